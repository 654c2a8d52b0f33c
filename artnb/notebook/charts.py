"""Which charts a dashboard has and what each draws, as data that the JavaScript reads. No drawing here.

A series names columns of the history; the first of them that was logged is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SOLVED = ("solve_rate", "solved", "success", "success_rate", "win", "won", "win_rate", "correct", "accuracy", "passed")
"""Metrics that are taken for the solve rate when they are logged, in this order."""

LOSS_NOTE = "About 0 by construction on fresh rollouts: it is the gradient that trains, see its norm."


def charts(solved: str | None = None, metrics: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The standard charts, then one for each of `metrics` (names with or without their split)."""
    names = (solved,) if solved is not None else SOLVED
    return [
        {
            "id": "reward",
            "title": "Reward",
            "wide": True,
            "series": [
                _series("training", ["train/reward"], spread=["train/reward_std_in_groups"]),
                _series("validation", ["val/reward"], spread=["val/reward_std_in_groups"], points=True),
            ],
        },
        {
            "id": "solved",
            "title": "Solve rate",
            "low": 0,
            "high": 1,
            "empty": f"no metric {solved!r} was logged"
            if solved is not None
            else "no metric such as solved, success or win was logged; dashboard(solved='name') says which is yours",
            "series": [
                _series("training", [f"train/{name}" for name in names]),
                _series("validation", [f"val/{name}" for name in names], points=True),
            ],
        },
        {
            "id": "loss",
            "title": "Loss",
            "note": LOSS_NOTE,
            "span": 0.02,
            "series": [_series("GRPO", ["train/loss"]), _series("supervised", ["sft/loss"])],
        },
        {
            "id": "grad",
            "title": "Gradient norm",
            "low": 0,
            "series": [_series("", ["train/grad_norm", "sft/grad_norm"])],
        },
        {
            "id": "kl",
            "title": "KL, nats a token",
            "series": [
                _series("trainer from sampler", ["train/mismatch_k3"]),
                _series("policy from base", ["train/kl_base"]),
            ],
        },
        {"id": "entropy", "title": "Entropy, nats a token", "low": 0, "series": [_series("", ["train/entropy"])]},
        {
            "id": "ratio",
            "title": "Trainer / sampler, raw",
            "note": "Mean probability ratio before any correction; 1 where both agree.",
            "span": 0.02,
            "series": [_series("", ["train/mismatch_ratio"])],
        },
        {
            "id": "speed",
            "title": "Tokens per second",
            "low": 0,
            "series": [
                _series("sampling", ["train/sampling_tokens_per_second"]),
                _series("training", ["train/tokens_per_second", "sft/tokens_per_second"]),
            ],
        },
        {
            "id": "memory",
            "title": "Memory, GiB",
            "low": 0,
            "scale": 1 / 1024**3,
            "series": [
                _series("held", ["train/memory_bytes", "sft/memory_bytes"]),
                _series("trainer's peak", ["train/peak_memory_bytes", "sft/peak_memory_bytes"]),
                _series("engine's cache", ["train/engine_kv_bytes", "sft/engine_kv_bytes"]),
            ],
        },
        {
            "id": "time",
            "title": "Seconds a step",
            "low": 0,
            "series": [
                _series("training", ["train/seconds", "sft/seconds"]),
                _series("swap", ["train/seconds_swap", "sft/seconds_swap"]),
            ],
        },
        *({"id": f"own:{name}", "title": name, "series": own(name)} for name in metrics),
    ]


def own(name: str) -> list[dict[str, Any]]:
    """Series of a metric that the user logs: `score` is that of training and of validation, `val/score` just one."""
    if name.startswith(("train/", "val/", "sft/")):
        return [_series("", [name])]
    return [_series("training", [f"train/{name}", f"sft/{name}"]), _series("validation", [f"val/{name}"], points=True)]


def _series(label: str, columns: list[str], *, spread: Sequence[str] = (), points: bool = False) -> dict[str, Any]:
    return {"label": label, "columns": columns, "spread": list(spread), "points": points}
