"""AdamW over one adapter's weights, with state by name: kept across steps, saved, put back. Knows no loss."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from ..errors import CheckpointError
from ..memory import available_bytes
from .policy import Policy

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's own names of its two running means."""
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
        self._updates = 0  # counted here, too: AdamW's own count is on the device, and reading it waits for all before

    def _bound(self) -> torch.optim.AdamW:
        """The optimizer over the adapter's weights of this moment: loading may have put new tensors in their place."""
        part = f".{self._policy.adapter_key(self._adapter)}."
        found = {n.replace(part, "."): p for n, p in self._policy.adapter_parameters(self._adapter).items()}
        parameters = list(found.values())
        same = len(parameters) == len(self._parameters) and all(
            a is b for a, b in zip(parameters, self._parameters, strict=True)
        )
        if self._adamw is None or not same:
            before = self._adamw.state if self._adamw and self._names == list(found) else {}
            held = [before.get(parameter) for parameter in self._parameters]
            if not any(held):
                self._updates = 0
            self._names, self._parameters = list(found), parameters
            fused = self._policy.device.type == "cuda"  # one kernel for hundreds of small weights
            self._adamw = torch.optim.AdamW(parameters, betas=(0.9, 0.999), eps=1e-8, fused=fused)
            for parameter, state in zip(parameters, held, strict=False):
                if state:
                    self._adamw.state[parameter] = state
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
            self._updates += 1
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
        """A copy of the optimizer's state on CPU; tensors and plain values only."""
        return self._state(torch.device("cpu"))

    def _state(self, device: torch.device) -> dict[str, Any]:
        """Each moment is one flat tensor: hundreds of small ones take longer to copy and to write than to compute."""
        adamw = self._bound()
        state: dict[str, Any] = {"names": list(self._names), "scale": self.scale, "good": self._good, "updates": 0.0}
        if adamw.state:
            state["updates"] = float(self._updates)
            for moment in MOMENTS:
                state[moment] = self._flat([adamw.state[p][moment] for p in self._parameters], device)
        return state

    @staticmethod
    def _flat(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
        with torch.no_grad():
            flat: torch.Tensor = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(device)
        return flat

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state. Raises: CheckpointError when it belongs to other weights."""
        adamw = self._bound()
        if state["names"] != self._names:
            raise CheckpointError(
                f"the saved optimizer state is of {len(state['names'])} weights that are not the "
                f"{len(self._names)} of adapter {self._adapter!r}: it was made with another LoraConfig or base model"
            )
        adamw.state.clear()
        self._updates = int(state["updates"])
        if self._updates:
            parts = [self._parts(state[moment]) for moment in MOMENTS]
            for parameter, *moments in zip(self._parameters, *parts, strict=True):
                held = {moment: part.clone() for moment, part in zip(MOMENTS, moments, strict=True)}
                adamw.state[parameter] = {"step": self._counter(state["updates"], parameter), **held}
        self.scale, self._good = float(state["scale"]), int(state["good"])

    @staticmethod
    def _counter(updates: float, parameter: torch.Tensor) -> torch.Tensor:
        """Where AdamW keeps its own: beside the weight in its fused form, else on CPU."""
        return torch.tensor(updates, device=parameter.device if parameter.is_cuda else None)

    def _parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """A flat tensor in the shapes of the weights, on their device."""
        pieces = flat.to(self._parameters[0].device).split([p.numel() for p in self._parameters])
        return [piece.view(p.shape) for piece, p in zip(pieces, self._parameters, strict=True)]

    def snapshot(self) -> dict[str, Any]:
        """The weights and the state, for `restore`: on the device where it has room, which takes milliseconds."""
        self._bound()
        device = self._policy.device
        size = 12 * sum(p.numel() for p in self._parameters)
        where = device if available_bytes(device) > 16 * size else torch.device("cpu")
        return {"weights": self._flat(self._parameters, where), "state": self._state(where)}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Put weights and state back bit by bit; gradients are freed."""
        self.clear()
        with torch.no_grad():
            for parameter, weight in zip(self._parameters, self._parts(snapshot["weights"]), strict=True):
                parameter.copy_(weight)
        self.load_state_dict(snapshot["state"])
