"""W&B Weave: the reward of a traced rollout becomes feedback on its call.

The tracing itself is Weave's: `weave.init` traces what any OpenAI client asks, `model.openai_client()` and `model.chat`
too, and `@weave.op` makes one trace of a rollout. Nothing here turns that on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openai.types.chat import ChatCompletionChunk

from ..trajectories import Trajectory
from .traces import WEAVE
from .tracker import Logged, RunInfo, State

FEEDBACK = "reward"
_TOKENS = frozenset(("logprobs", "prompt_token_ids", "token_ids"))


@dataclass(frozen=True)
class WeaveTracker:
    """Reports the rewards of rollouts that ran inside a `@weave.op`: feedback of the type `reward`.

    weave.init("team/project")
    model = art.TrainableModel(..., report_metrics=["weave"])
    """

    name = "weave"
    resumes = False  # a call is known while its trajectory is in memory

    def open(self, run: RunInfo, state: State) -> WeaveRun:
        return WeaveRun(run)


class WeaveRun:
    """Feedback on one run's calls. Weave's own thread sends it."""

    def __init__(self, run: RunInfo) -> None:
        self._run = run
        self._said: set[tuple[str, float]] = set()

    def log(self, logged: Logged) -> None:
        from weave.trace.feedback import RefFeedbackQuery

        for rollout in logged.rewards:
            call, reward = rollout.traces.get(WEAVE), rollout.reward
            if call is None or reward is None or (call, reward) in self._said:
                continue
            self._said.add((call, reward))
            where = {"model": self._run.name, "split": logged.split, "step": logged.step}
            payload = {"value": reward, "metrics": dict(rollout.metrics), **where}
            RefFeedbackQuery(call).add(FEEDBACK, payload)

    def configure(self, config: Mapping[str, Any]) -> None:
        """Feedback has no config."""

    def close(self) -> None:
        import weave

        if (client := weave.get_client()) is not None:
            client.flush()


def without_tokens(output: Any) -> Any:
    """An output without token ids and log-probs, which make up most of it: `weave.init(..., postprocess_output=...)`.

    What the rollout itself gets and what is trained on keeps them.
    """
    if isinstance(output, Trajectory):
        return output.for_logging()
    if isinstance(output, ChatCompletionChunk):
        # A stream: its chunks put together. Other answers come as plain values.
        return output.model_copy(update={"choices": [_bare(choice) for choice in output.choices]})
    if isinstance(output, dict):
        return {name: without_tokens(value) for name, value in output.items() if name not in _TOKENS}
    return [without_tokens(item) for item in output] if isinstance(output, list) else output


def _bare(choice: Any) -> Any:
    bare = choice.model_copy(update={"logprobs": None})
    for name in _TOKENS & (bare.model_extra or {}).keys():
        del bare.model_extra[name]
    return bare
