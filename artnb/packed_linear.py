"""Linear layers over weights that are kept in fewer bits and unpacked for each product: 4-bit NF4 and FP8.

An engine that quantized the base model hands its packed weights over; the trainer computes with the same numbers and
keeps no second copy. The unpacked weight of one layer exists at a time, in the backward pass, too. Frozen: the adapter
is what trains (QLoRA: Dettmers et al. 2023, https://arxiv.org/abs/2305.14314).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """`data`: the bytes, uint8. `unpack`: gives the weight [out, in] in the dtype that is computed in."""

    data: torch.Tensor
    unpack: Callable[[], torch.Tensor]


class _Product(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """x [..., in] → x Wᵀ [..., out]; W is unpacked again for the gradient instead of being kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, unpack: Callable[[], torch.Tensor]) -> torch.Tensor:
        ctx.unpack = unpack
        return F.linear(x, unpack())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] @ ctx.unpack(), None


class PackedLinear(torch.nn.Linear):  # type: ignore[misc]
    """A linear layer whose weight is a `PackedWeight`; `weight` holds its bytes."""

    def __init__(self, inputs: int, outputs: int, packed: PackedWeight, bias: torch.Tensor | None) -> None:
        super().__init__(inputs, outputs, bias=False, device="meta")
        self.weight = torch.nn.Parameter(packed.data, requires_grad=False)
        self.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)
        self._unpack = packed.unpack

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = _Product.apply(input, self._unpack)
        return product if self.bias is None else product + self.bias


def pack_linears(model: torch.nn.Module, packed: Mapping[str, PackedWeight]) -> None:
    """Put a `PackedLinear` in the place of each linear layer whose weight (by its name in the model) is packed."""
    for name, weight in packed.items():
        path = name.removesuffix(".weight")
        parent, _, child = path.rpartition(".")
        layer = model.get_submodule(path)
        if not isinstance(layer, torch.nn.Linear):
            raise TypeError(f"{path} is a {type(layer).__name__}; only linear layers can be packed")
        mine = PackedLinear(layer.in_features, layer.out_features, weight, layer.bias)
        setattr(model.get_submodule(parent), child, mine)
