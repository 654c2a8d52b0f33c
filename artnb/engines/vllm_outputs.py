"""What vLLM's core sampled, straight to us: in the place of the OutputProcessor of an in-process LLMEngine.

vLLM's own makes several objects for every token and request, text among them, which nobody reads here: with the
log-probs on and 256 requests at once it takes as long as the sampling itself. The engine's thread hands on ids and
log-probs as they come. The methods are those that LLMEngine calls (vLLM 0.20 to 0.33).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """What one request got in one step. `finish_reason`: vLLM's word for it."""

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class _Processed:
    request_outputs: list[TokenOutput]
    reqs_to_abort: list[str] = field(default_factory=list)  # none here ends by a stop string


class TokenOutputs:
    """See the module docstring. `original`: the one whose place this takes."""

    def __init__(self, original: Any) -> None:
        self.original = original
        self._ids: dict[str, str] = {}  # vLLM's own name of a request → ours
        self._names: dict[str, str] = {}  # and back

    def add_request(self, request: Any, *more: Any, **options: Any) -> None:
        ours = getattr(request, "external_req_id", None) or request.request_id
        self._ids[request.request_id] = ours
        self._names[ours] = request.request_id

    def abort_requests(self, request_ids: Iterable[str], *more: Any, **options: Any) -> list[str]:
        """Forget them; returns vLLM's own names, which the core knows them by."""
        names = [self._names.pop(ours) for ours in request_ids if ours in self._names]
        for name in names:
            del self._ids[name]
        return names

    def process_outputs(self, outputs: Sequence[Any], *more: Any, **options: Any) -> _Processed:
        found = []
        for output in outputs:
            ours = self._ids.get(output.request_id)
            if ours is None:
                continue  # aborted meanwhile
            reason = None if output.finish_reason is None else str(output.finish_reason)
            # Of each token the sampled one's log-prob comes first.
            logprobs = [] if output.new_logprobs is None else output.new_logprobs.logprobs[:, 0].tolist()
            if output.new_token_ids or reason is not None:
                found.append(TokenOutput(ours, list(output.new_token_ids), logprobs, reason))
            if reason is not None:
                del self._ids[output.request_id], self._names[ours]
        return _Processed(found)

    def update_scheduler_stats(self, *stats: Any) -> None:
        pass

    def get_num_unfinished_requests(self) -> int:
        return len(self._ids)

    def has_unfinished_requests(self) -> bool:
        return bool(self._ids)
