"""Langfuse: the reward of a traced rollout becomes a score of its trace.

The tracing itself is Langfuse's: `import langfuse.openai` traces what any OpenAI client asks, `model.openai_client()`
and `model.chat` too, and `@observe` makes one trace of a rollout. Nothing here turns that on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .traces import OTEL
from .tracker import Logged, RunInfo, State, TracedReward

if TYPE_CHECKING:
    from langfuse import Langfuse


@dataclass(frozen=True)
class LangfuseTracker:
    """Reports the rewards of rollouts that ran inside an `@observe`d function.

    model = art.TrainableModel(..., report_metrics=[LangfuseTracker(metrics=("won",))])

    `metrics`: which of the trajectories' own metrics become scores beside `reward`.
    """

    metrics: tuple[str, ...] = ()
    name = "langfuse"
    resumes = False  # a trace is known while its trajectory is in memory

    def open(self, run: RunInfo, state: State) -> LangfuseRun:
        from langfuse import get_client

        return LangfuseRun(get_client(), run, self.metrics)


class LangfuseRun:
    """Scores of one run's traces. Langfuse's own thread sends them."""

    def __init__(self, client: Langfuse, run: RunInfo, metrics: tuple[str, ...]) -> None:
        self._client = client
        self._run = run
        self._metrics = metrics

    def log(self, logged: Logged) -> None:
        for rollout in logged.rewards:
            trace = rollout.traces.get(OTEL)
            for name, value in _scores(rollout, self._metrics).items() if trace is not None else ():
                self._client.create_score(
                    name=name,
                    value=value,
                    trace_id=trace,
                    score_id=f"{trace}-{name}",  # logged again, it is replaced
                    data_type="NUMERIC",
                    metadata={
                        "project": self._run.project,
                        "model": self._run.name,
                        "split": logged.split,
                        "step": logged.step,
                    },
                )

    def configure(self, config: Mapping[str, Any]) -> None:
        """Scores have no config."""

    def close(self) -> None:
        self._client.flush()


def _scores(rollout: TracedReward, metrics: tuple[str, ...]) -> dict[str, float]:
    known = {"reward": rollout.reward} | {name: rollout.metrics.get(name) for name in metrics}
    return {name: value for name, value in known.items() if value is not None and math.isfinite(value)}
