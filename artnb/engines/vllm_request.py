"""One request to vLLM: checked on its way in, its sampled tokens on their way out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..errors import ContextLengthError, EngineError, RequestError
from .base import FinishReason, SamplingParams, TokenChunk
from .delivery import Mailbox
from .vllm_adapters import Adapter
from .vllm_outputs import TokenOutput

_REASONS: dict[str | None, FinishReason | None] = {None: None, "stop": "stop", "length": "length", "abort": "abort"}
_SEED_STRIDE = 0x9E3779B97F4A7C15
"""Between the seed of a request and that of its continuation; the golden ratio's, so that seeds 1, 2, … never meet."""


@dataclass(eq=False, slots=True)
class Request:
    """What is known of it here is enough to submit it again: a sleeping vLLM forgets its requests."""

    id: str  # vLLM's; a new one whenever it is submitted
    prompt: list[int]
    sampling: SamplingParams
    max_tokens: int
    adapter: Adapter | None
    mailbox: Mailbox
    sampled: list[int] = field(default_factory=list)

    def engine_prompt(self) -> dict[str, Any]:
        """With "type" vLLM takes it as it is, without a detour through its tokenizer."""
        return {"type": "token", "prompt_token_ids": self.prompt + self.sampled}

    def engine_params(self, eos_token_ids: frozenset[int]) -> Any:
        """vLLM's SamplingParams for what is still to be sampled.

        End tokens are given one by one: vLLM would take one of the tokenizer's and those of generation_config.json.
        A continuation has a seed of its own: vLLM begins its random numbers anew with every request, and would draw
        the same ones again.

        Raises: RequestError for what vLLM does not take, e.g. a temperature above 2.
        """
        import vllm
        from vllm.sampling_params import RequestOutputKind

        sampling, done = self.sampling, len(self.sampled)
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}
        try:
            return vllm.SamplingParams(
                max_tokens=self.max_tokens - done,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                seed=None if sampling.seed is None else (sampling.seed + done * _SEED_STRIDE) % 2**63,
                stop_token_ids=sorted(ends) or None,
                ignore_eos=True,
                logprobs=0,  # of the sampled token alone
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
        except Exception as error:  # its own class is another in each version
            raise RequestError(f"vLLM refused the request: {line(error)}") from error


def room_to_answer(prompt: list[int], *, vocabulary: int, context: int) -> int:
    """Tokens that the context leaves. Raises: RequestError, ContextLengthError."""
    if not prompt:
        raise RequestError("the prompt is empty", param="prompt")
    if min(prompt) < 0 or max(prompt) >= vocabulary:
        raise RequestError(f"prompt ids must be in [0, {vocabulary})", param="prompt")
    room = context - len(prompt)
    if room < 1:
        raise ContextLengthError(
            f"the prompt has {len(prompt)} tokens; the context of {context} leaves no room to answer", param="messages"
        )
    return room


def chunk_of(output: Any) -> TokenChunk:
    """The tokens that a TokenOutput, or vLLM's RequestOutput, brings. Raises: EngineError when it brings an error."""
    if isinstance(output, TokenOutput):
        ids, logprobs, reason = output.token_ids, output.logprobs, output.finish_reason
    else:
        part = output.outputs[0]
        flat = part.logprobs
        ids, reason = list(part.token_ids), part.finish_reason
        logprobs = [] if flat is None else [float(flat.logprobs[start]) for start in flat.start_indices]
    if len(ids) != len(logprobs) or reason not in _REASONS:
        raise EngineError(f"vLLM ended the request with {reason!r}")
    return TokenChunk(ids, logprobs, _REASONS[reason])


def line(error: BaseException | None) -> str:
    """An error in one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:500]
