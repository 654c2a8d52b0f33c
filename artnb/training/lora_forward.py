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


class _Round(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """Tensors to the same in another dtype, and their gradients back, in a few kernels for all."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.dtype = weights[0].dtype
        return _converted(weights, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return None, *_converted(grads, ctx.dtype)


def _converted(tensors: Iterable[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    given = list(tensors)
    made = [torch.empty_like(tensor, dtype=dtype) for tensor in given]
    torch._foreach_copy_(made, given)
    return tuple(made)


class PlainLoraLinear(LoraLinear):
    """PEFT's LoRA layer over a linear one, with this forward pass. PEFT knows such layers by "Linear" in their names.

    `added` is what its forward pass adds: A, B and the scale of the active adapter. They are not looked up by the
    adapter's name, because a compiled pass would be compiled again for each name.
    """

    added: tuple[torch.Tensor, torch.Tensor, float] | None = None

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
            return y + ((x @ a.to(x.dtype).t()) * scale) @ b.to(x.dtype).t()
        added: torch.Tensor = _AddLora.apply(y, x, a, b, scale)
        return added


def round_added(layers: Iterable[Any], dtype: torch.dtype, *, static: bool) -> None:
    """Let the layers add their A and B in `dtype`, with gradients to the weights themselves, until `activate`.

    `static`: a layer that is compiled takes their shapes for granted, as it does of parameters.
    """
    adding = [(layer, layer.added) for layer in layers if isinstance(layer, PlainLoraLinear) and layer.added]
    weights = [weight for _, (a, b, _) in adding for weight in (a, b)]
    if not weights or weights[0].dtype == dtype:
        return
    rounded = _Round.apply(dtype, *weights)
    if static:
        for weight in rounded:
            torch._dynamo.mark_static(weight)
    for (layer, (_, _, scale)), a, b in zip(adding, rounded[::2], rounded[1::2], strict=True):
        layer.added = (a, b, scale)


def use_plain_lora(layer: Any) -> None:
    """Make PEFT's LoRA layer over a linear one a `PlainLoraLinear`. Layers of another kind stay as they are."""
    if type(layer) is LoraLinear:
        layer.__class__ = PlainLoraLinear
