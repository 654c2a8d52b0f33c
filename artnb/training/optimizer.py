"""AdamW over one adapter's weights, with state by name: kept across steps, saved, put back. Knows no loss."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..errors import CheckpointError
from .policy import Policy

_FIRST_SCALE = 1024.0
_GROWTH_STEPS = 200


class AdapterOptimizer:
    """AdamW (betas 0.9 and 0.999, as TRL) of the adapter `adapter` of `policy`.

    In fp16 the loss is scaled by `scale` before its backward pass, so that small gradients do not vanish;
    it halves with each non-finite gradient and doubles after 200 good ones.
    """

    def __init__(self, policy: Policy, adapter: str) -> None:
        self._policy = policy
        self._adapter = adapter
        self._names: list[str] = []
        self._parameters: list[torch.nn.Parameter] = []
        self._adamw: torch.optim.AdamW | None = None
        self.scale = _FIRST_SCALE if policy.dtype == torch.float16 else 1.0
        self._good = 0

    def _bound(self) -> torch.optim.AdamW:
        """The optimizer over the adapter's weights of this moment: loading may have put new tensors in their place."""
        part = f".{self._policy.adapter_key(self._adapter)}."
        found = {n.replace(part, "."): p for n, p in self._policy.adapter_parameters(self._adapter).items()}
        parameters = list(found.values())
        same = len(parameters) == len(self._parameters) and all(
            a is b for a, b in zip(parameters, self._parameters, strict=True)
        )
        if self._adamw is None or not same:
            before = self._adamw.state_dict() if self._adamw and self._names == list(found) else None
            self._names, self._parameters = list(found), parameters
            self._adamw = torch.optim.AdamW(parameters, betas=(0.9, 0.999), eps=1e-8)
            if before:
                self._adamw.load_state_dict(before)
        return self._adamw

    def clear(self) -> None:
        """Free the gradients."""
        self._bound().zero_grad(set_to_none=True)

    def update(self, *, learning_rate: float, weight_decay: float, max_grad_norm: float) -> float | None:
        """Clip the gradients and take one step; they are freed either way.

        Returns: their norm before clipping; None when it was NaN or infinite, and nothing changed.
        """
        adamw = self._bound()
        if self.scale != 1.0:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(self.scale)
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, max_grad_norm))
        finite = math.isfinite(norm)
        if finite:
            for group in adamw.param_groups:
                group["lr"], group["weight_decay"] = learning_rate, weight_decay
            adamw.step()
        adamw.zero_grad(set_to_none=True)
        if self._policy.dtype == torch.float16:
            self._rescale(finite)
        return norm if finite else None

    def _rescale(self, finite: bool) -> None:
        self._good = self._good + 1 if finite else 0
        if not finite:
            self.scale = max(1.0, self.scale / 2)
        elif self._good % _GROWTH_STEPS == 0:
            self.scale = min(65536.0, self.scale * 2)

    def state_dict(self) -> dict[str, Any]:
        """Copies of the optimizer's state, on CPU; tensors and plain values only."""
        state = _to_cpu(self._bound().state_dict())
        return {"names": list(self._names), "adamw": state, "scale": self.scale, "good": self._good}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state. Raises: CheckpointError when it belongs to other weights."""
        adamw = self._bound()
        if state["names"] != self._names:
            raise CheckpointError(
                f"the saved optimizer state is of {len(state['names'])} weights that are not the "
                f"{len(self._names)} of adapter {self._adapter!r}: it was made with another LoraConfig or base model"
            )
        adamw.load_state_dict(_to_cpu(state["adamw"]))  # it keeps the tensors it is given where it can
        self.scale, self._good = float(state["scale"]), int(state["good"])

    def snapshot(self) -> dict[str, Any]:
        """The weights and the state, for `restore`."""
        state = self.state_dict()
        return {"weights": [p.detach().to("cpu", copy=True) for p in self._parameters], "state": state}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Put weights and state back bit by bit; gradients are freed."""
        self.clear()
        with torch.no_grad():
            for parameter, weight in zip(self._parameters, snapshot["weights"], strict=True):
                parameter.copy_(weight)
        self.load_state_dict(snapshot["state"])


def _to_cpu(value: Any) -> Any:
    """A deep copy with every tensor on CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {k: _to_cpu(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_to_cpu(v) for v in value)
    return value
