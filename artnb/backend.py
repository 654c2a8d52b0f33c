"""What every backend offers, and what a step answers. A backend owns engine and trainer; a model is only a handle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from .config import TrainConfig
from .errors import ConfigError
from .trajectories import TrajectoryGroup

if TYPE_CHECKING:
    from .capture import Collector
    from .config import TrainSFTConfig
    from .model import TrainableModel
    from .tracking.history import History
    from .training.types import Floats
    from .trajectories import Trajectory

ASGIApp = Callable[[Any, Any, Any], Awaitable[None]]


@dataclass(slots=True)
class TrainResult:
    """What one step did.

    `reasons` counts the groups that did not train by why ("all rewards equal": 3), `notes` says the same
    in sentences, `trained` is False when nothing was: the step counts, the adapter is unchanged.
    """

    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    trained: bool = True
    checkpoint_path: Path | None = None

    def __str__(self) -> str:
        shown = {k: self.metrics[k] for k in ("reward", "loss", "grad_norm", "entropy", "seconds") if k in self.metrics}
        values = ", ".join(f"{k} {v:.3g}" for k, v in shown.items())
        left = "; not trained: " + ", ".join(f"{n} × {r}" for r, n in self.reasons.items()) if self.reasons else ""
        return f"step {self.step}: {values}{left}"


class Backend(Protocol):
    """Where engine and trainer live. Every call may be repeated."""

    async def register(self, model: TrainableModel) -> None:
        """Load the base, resume or create the adapter, serve it. A second call changes nothing."""
        ...

    async def train(
        self,
        model: TrainableModel,
        trajectory_groups: Iterable[TrajectoryGroup],
        config: TrainConfig | None = None,
        **options: Any,
    ) -> TrainResult:
        """One GRPO step. `options` are TrainConfig's, for callers that pass them one by one."""
        ...

    async def train_sft(
        self, model: TrainableModel, trajectories: Iterable[Trajectory], config: TrainSFTConfig | None = None
    ) -> TrainResult:
        """One supervised step over all `trajectories`."""
        ...

    async def get_step(self, model: TrainableModel) -> int: ...

    async def checkpoints(self, model: TrainableModel) -> list[int]:
        """Steps whose complete checkpoints are kept, ascending."""
        ...

    async def delete_checkpoints(self, model: TrainableModel, steps: Sequence[int]) -> None:
        """Delete checkpoints; never the newest."""
        ...

    async def close(self) -> None: ...

    def app(self, model: TrainableModel) -> ASGIApp:
        """The endpoint that serves the model, as an ASGI app for clients in this process."""
        ...

    def endpoint(self, model: TrainableModel) -> tuple[str, str]:
        """(base URL, API key) of the endpoint over HTTP; starts the server on the first call."""
        ...

    def api_key(self, model: TrainableModel) -> str: ...

    def context_tokens(self, model: TrainableModel) -> int | None:
        """How many tokens prompt and answer may have together; None where that is not known."""
        ...

    def history(self, model: TrainableModel) -> History: ...

    def collector(self, model: TrainableModel) -> Collector: ...


def check_groups(trajectory_groups: Iterable[TrajectoryGroup]) -> list[TrajectoryGroup]:
    """The groups of a step as a list. Raises ConfigError that names what is none."""
    groups = list(trajectory_groups)
    for index, group in enumerate(groups):
        if not isinstance(group, TrajectoryGroup):
            raise ConfigError(
                f"train: trajectory_groups[{index}] is a {type(group).__name__}; it must be an art.TrajectoryGroup "
                "(await gather_trajectory_groups(...) first)"
            )
    return groups


@runtime_checkable
class HasCheckpointFiles(Protocol):
    """A backend whose checkpoints can be had as files: `model.export` and `model.push_to_hub` need it."""

    async def pull_checkpoint(self, model: TrainableModel, step: int | None = None) -> Path:
        """The PEFT folder of a checkpoint (None: the newest) on this machine's disk.

        Raises: CheckpointError when there is none.
        """
        ...


@dataclass(frozen=True, slots=True)
class TurnLogprobs:
    """Log-probs, in nats, of all assistant tokens of a trajectory; `row_tokens`: tokens that were read for it."""

    values: Floats
    row_tokens: int


@runtime_checkable
class HasBaseLogprobs(Protocol):
    """A backend whose base weights can be asked how likely they find a text: `LikelihoodJudge` needs it."""

    async def base_logprobs(
        self, model: TrainableModel, trajectories: Sequence[Trajectory]
    ) -> list[TurnLogprobs | None]:
        """Log-probs of the assistant turns under the base, every adapter off.

        None for a trajectory without assistant turns after a prompt, or longer than the context. Raises: RenderError.
        """
        ...
