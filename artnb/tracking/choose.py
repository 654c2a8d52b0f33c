"""What `report_metrics` of a model means: names, trackers with options, or None for the usual rule.

The rule is openpipe-art's: where WANDB_API_KEY is set, runs go to W&B. A key in the environment is what a user sets for
that and nothing else; a key that `wandb login` once left in a home folder is not taken as a wish.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any

import pydantic

from .. import __version__
from ..errors import ConfigError, nearest
from .follow import TRACKING
from .tracker import RunInfo, Tracker, logger

if TYPE_CHECKING:
    from ..asked_model import Model

_TRACKERS = {
    "wandb": "WandbTracker",
    "tensorboard": "TensorBoardTracker",
    "weave": "WeaveTracker",
    "langfuse": "LangfuseTracker",
}
_SECRET = re.compile(
    r"(api|access|auth|bearer|hf|private|public|refresh|secret|wandb)[_-]?(key|token)|secret|passw(or)?d|credential",
    re.IGNORECASE,
)
_SHORTEST_SECRET = 8


def check_report_metrics(value: Any) -> tuple[str | Tracker, ...] | None:
    """The option as it is kept. Raises ConfigError for an unknown name or a library that is not installed."""
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"report_metrics={value!r} must be a list, e.g. report_metrics=['wandb']; [] reports nowhere")
    seen: set[str] = set()
    for item in value:
        if isinstance(item, str):
            if item not in _TRACKERS:
                raise ConfigError(f"report_metrics: {item!r} is unknown{nearest(item, _TRACKERS)}")
        elif not (callable(getattr(item, "open", None)) and isinstance(getattr(item, "name", None), str)):
            raise ConfigError(
                f"report_metrics: {item!r} is neither a name ({', '.join(_TRACKERS)}) nor a tracker, e.g. "
                "artnb.tracking.wandb.WandbTracker(mode='offline')"
            )
        name = item if isinstance(item, str) else item.name
        if name in seen:
            raise ConfigError(f"report_metrics: {name!r} is there twice")
        seen.add(name)
        if name in _TRACKERS and not _installed(name):
            raise ConfigError(f"report_metrics: {name!r} needs a package: pip install 'artnb[{name}]'")
    return tuple(value)


def track(model: Model) -> None:
    """Follow the model's run with what its `report_metrics` asks for. May be called any number of times."""
    chosen = model.report_metrics
    if chosen is None:
        chosen = ("wandb",) if os.environ.get("WANDB_API_KEY") and _wandb_is_there() else ()
    trackers = [_by_name(item) if isinstance(item, str) else item for item in chosen]
    followed = [t for t in trackers if not getattr(t, "disabled", False)]
    for tracker in followed:
        # Here and not in the tracker's thread, where it would meet the next cell's imports of the same library, or
        # openai, which takes up httpx as soon as it is in sys.modules, half imported. What fails is told by the thread.
        if tracker.name in _TRACKERS:
            with contextlib.suppress(Exception):
                importlib.import_module(tracker.name)
    TRACKING.attach(_run_info(model), followed)


def configure(model: Model, config: dict[str, Any]) -> None:
    """Further entries of the run's config, or new values; whatever follows the run is told of what has changed."""
    values = without_secrets(plain(config))
    changed = {name: value for name, value in values.items() if model._run_config.get(name) != value}
    if changed:
        model._run_config |= changed
        TRACKING.configure(f"{model.project}/{model.name}", changed)


def _by_name(name: str) -> Tracker:
    module = importlib.import_module(f"{__package__}.{name}")
    made: Tracker = getattr(module, _TRACKERS[name])()
    return made


def _installed(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None  # None: a folder of that name, such as W&B's own ./wandb


@functools.cache
def _wandb_is_there() -> bool:
    there = _installed("wandb")
    if not there:
        logger.warning(
            "WANDB_API_KEY is set but wandb is not installed: metrics stay on disk. pip install 'artnb[wandb]', or "
            "report_metrics=[] to go without"
        )
    return there


def _run_info(model: Model) -> RunInfo:
    config: dict[str, Any] = {"model": model.name, "artnb_version": __version__}
    for name in ("base_model", "lora"):
        if hasattr(model, name):
            config[name] = plain(getattr(model, name))
    users = plain(model.config)
    config |= users if isinstance(users, dict) else {} if users is None else {"config": users}
    config = without_secrets(config) | model._run_config
    return RunInfo(model.project, model.name, model.run_name, model.entity, model._history().folder, config)


def plain(value: Any) -> Any:
    """JSON values of a config, whatever it is made of; what has no such form becomes its text."""
    if isinstance(value, pydantic.BaseModel):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def without_secrets(config: dict[str, Any]) -> dict[str, Any]:
    """The config without entries that are called like a secret (`api_key`, `HF_TOKEN`; not `pad_token`), and without
    values that stand in this process's environment under such a name."""
    known = {v for k, v in os.environ.items() if len(v) >= _SHORTEST_SECRET and _SECRET.search(k)}

    def kept(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: kept(v) for k, v in value.items() if not (_SECRET.search(k) or hidden(v))}
        return [kept(item) for item in value if not hidden(item)] if isinstance(value, list) else value

    def hidden(value: Any) -> bool:
        return isinstance(value, str) and value in known

    cleaned: dict[str, Any] = kept(config)
    return cleaned
