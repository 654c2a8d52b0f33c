"""Several rewards as one: a weighted sum whose parts can be seen one by one."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable
from typing import Any, TypeAlias

from ..config import check_number
from ..errors import ConfigError
from ..trajectories import Trajectory

log = logging.getLogger(__name__)

Reward: TypeAlias = Callable[[Trajectory], float | bool | None]
"""A number for a trajectory; None: it cannot be scored."""


class Weighted:
    """The sum of weight × part. Each part is kept as `metrics["reward/<name>"]`, its weight as `reward_weight/<name>`.

        reward = Weighted(correct=Numeric(metadata="answer"), form=(0.2, Regex(r"<answer>.*</answer>")))
        trajectory.reward = reward(trajectory)

    A part is a reward of artnb or any function of a trajectory that returns a number, and has weight 1 unless it is
    given as (weight, reward). Weights may be negative, and are not normalized. A part that returns None, NaN or an
    infinity leaves the whole unscored: the sum is None, and the trajectory does not train.
    """

    def __init__(self, **parts: Reward | tuple[float, Reward]) -> None:
        if not parts:
            raise ConfigError("Weighted needs parts, e.g. Weighted(correct=ExactMatch('Paris'))")
        self.parts: dict[str, tuple[float, Reward]] = {}
        for name, given in parts.items():
            weight, reward = given if isinstance(given, tuple) and len(given) == 2 else (1.0, given)
            check_number("Weighted", f"the weight of {name}", weight)
            if not callable(reward):
                raise ConfigError(
                    f"Weighted: {name} must be a reward or (weight, reward), not a {type(reward).__name__}"
                )
            if inspect.iscoroutinefunction(reward):
                raise ConfigError(
                    f"Weighted: {name} is async; await it in the rollout, keep its value in trajectory.metrics, and "
                    f"give lambda t: t.metrics[{name!r}]"
                )
            self.parts[name] = (float(weight), reward)

    def __call__(self, trajectory: Trajectory) -> float | None:
        total: float | None = 0.0
        for name, (weight, reward) in self.parts.items():
            value = as_score(reward(trajectory), f"the part {name}")
            if value is None:
                trajectory.log(f"reward: {name} gave no number, so the trajectory is unscored")
                total = None
                continue
            trajectory.metrics[f"reward/{name}"] = value
            trajectory.metrics[f"reward_weight/{name}"] = weight
            if total is not None:
                total += weight * value
        return total

    def __repr__(self) -> str:
        parts = ", ".join(f"{name}={weight:g} × {reward!r}" for name, (weight, reward) in self.parts.items())
        return f"Weighted({parts})"


def as_score(value: Any, what: str = "the reward") -> float | None:
    """A reward's value as a float; None for None, NaN and infinities. Raises TypeError for what is no number."""
    if value is None:
        return None
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # numpy's and torch's scalars
        value = value.item()
    if not isinstance(value, int | float):
        raise TypeError(f"{what} is a {type(value).__name__}, not a number")
    if not math.isfinite(value):
        log.warning("%s is %s, so the trajectory is unscored", what, value)
        return None
    return float(value)
