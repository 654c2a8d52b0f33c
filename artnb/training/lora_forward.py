"""One LoRA layer's forward pass: the base layer's output with the adapter's added in place.

PEFT's own makes two more tensors of the output's size and, for a 16-bit base, a 32-bit copy of the input; on a GPU,
where these are bound by memory traffic, that costs as much as half of the base layer itself. The same sums, the same
weights: y = base(x) + s · (x Aᵀ) Bᵀ (Hu et al. 2021, https://arxiv.org/abs/2106.09685). A and B stay fp32 and are
rounded to the input's dtype for the products, as vLLM does when it serves them: for a training pass all at once, since
hundreds of small kernels would take longer to launch than to run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear


class _AddLora(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """y [..., out], x [..., in], A [r, in], B [out, r] → y + scale · (x Aᵀ) Bᵀ, in y's own memory."""

    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, x: torch.Tensor, a_weight: torch.Tensor, b_weight: torch.Tensor, scale: float
    ) -> torch.Tensor:
        a, b = a_weight.to(x.dtype), b_weight.to(x.dtype)
        flat = x.reshape(-1, x.shape[-1])
        down = (flat @ a.t()).mul_(scale)
        ctx.save_for_backward(flat, a, b, down)
        ctx.scale, ctx.dtype, ctx.shape = scale, a_weight.dtype, x.shape
        ctx.mark_dirty(y)
        y.view(-1, y.shape[-1]).addmm_(down, b.t())
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        x, a, b, down = ctx.saved_tensors
        grad = grads[0].reshape(-1, b.shape[0])
        grad_b = (grad.t() @ down).to(ctx.dtype) if ctx.needs_input_grad[3] else None
        grad_x = grad_a = None
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            grad_down = (grad @ b).mul_(ctx.scale)
            grad_a = (grad_down.t() @ x).to(ctx.dtype) if ctx.needs_input_grad[2] else None
            grad_x = (grad_down @ a).view(ctx.shape) if ctx.needs_input_grad[1] else None
        return grads[0], grad_x, grad_a, grad_b, None


class _Refresh(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """copies ← factors · weights, in place; gradients of the copies go to the weights. A few kernels for all."""

    @staticmethod
    def forward(ctx: Any, factors: list[float], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        copies, weights = tensors[: len(factors)], tensors[len(factors) :]
        ctx.factors, ctx.dtype = factors, weights[0].dtype
        torch._foreach_copy_(copies, torch._foreach_mul(weights, factors))
        ctx.mark_dirty(*copies)
        return copies

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        made = [torch.empty_like(grad, dtype=ctx.dtype) for grad in grads]
        torch._foreach_copy_(made, grads)
        torch._foreach_mul_(made, ctx.factors)
        return (None, *(None for _ in grads), *made)


class PlainLoraLinear(LoraLinear):
    """PEFT's LoRA layer over a linear one, with this forward pass. PEFT knows such layers by "Linear" in their names.

    `added` is what its forward pass adds: A, B and the scale of the active adapter (None where B is scaled already).
    They are not looked up by the adapter's name, because a compiled pass would be compiled again for each name.
    """

    added: tuple[torch.Tensor, torch.Tensor, float | None] | None = None

    def activate(self) -> None:
        """Take up PEFT's active adapter; one of another kind than plain LoRA stays with PEFT's own forward pass."""
        name = self._active_adapter[0]
        known = name in self.lora_A and not self.use_dora[name] and self.lora_B[name].bias is None
        self.added = (self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name]) if known else None

    def set_adapter(self, *args: Any, **kwargs: Any) -> None:
        super().set_adapter(*args, **kwargs)
        self.activate()

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._disable_adapters:
            return self.base_layer(x)
        if self.added is None:
            return super().forward(x, *args, **kwargs)
        a, b, scale = self.added
        y = self.base_layer(x)
        if torch.compiler.is_compiling():  # which fuses the sum with what follows it
            down = x @ a.to(x.dtype).t()
            return y + (down if scale is None else down * scale) @ b.to(x.dtype).t()
        added: torch.Tensor = _AddLora.apply(y, x, a, b, 1.0 if scale is None else scale)
        return added


class RoundedAdapter:
    """Copies of the active adapter's weights in the model's dtype, for passes with gradients through `layers`.

    `static`: layers that are compiled take the copies' shapes for granted, as they do of parameters.
    """

    def __init__(self, layers: Iterable[Any], dtype: torch.dtype, *, static: bool) -> None:
        adding = [(layer, layer.added) for layer in layers if isinstance(layer, PlainLoraLinear) and layer.added]
        self._layers = [layer for layer, _ in adding]
        self._plain = [added for _, added in adding]
        self._weights = [weight for a, b, _ in self._plain for weight in (a, b)]
        self._factors = [factor for *_, scale in self._plain for factor in (1.0, 1.0 if scale is None else scale)]
        self._copies = [torch.empty_like(weight, dtype=dtype) for weight in self._weights]
        for copy in self._copies if static else []:
            torch._dynamo.mark_static(copy)
        self._rounded = list(zip(self._copies[::2], self._copies[1::2], [None] * len(adding), strict=True))

    def use(self) -> None:
        """Give the layers the weights as they are now, until `release`; their gradients go to the weights."""
        for copy in self._copies:
            copy.detach_()
        if self._copies:
            _Refresh.apply(self._factors, *self._copies, *self._weights)
        self._give(self._rounded)

    def release(self) -> None:
        """Give the layers the weights themselves again."""
        self._give(self._plain)

    def _give(self, added: Iterable[Any]) -> None:
        for layer, one in zip(self._layers, added, strict=True):
            layer.__dict__["added"] = one  # torch's own __setattr__ takes longer than all else here


def use_plain_lora(layer: Any) -> None:
    """Make PEFT's LoRA layer over a linear one a `PlainLoraLinear`. Layers of another kind stay as they are."""
    if type(layer) is LoraLinear:
        layer.__class__ = PlainLoraLinear
