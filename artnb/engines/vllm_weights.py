"""vLLM's weights under the names that transformers uses, as views: one copy of the base model for engine and trainer.

vLLM fuses projections that read the same input (q, k and v into qkv) by stacking their rows, and says which in the
model's `packed_modules_mapping`; LoRA support wraps layers (`base_layer`), and vocabularies are padded. Nothing is
copied.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..errors import ModelError
from ..packed_linear import PackedWeight


def shared_weights(
    module: torch.nn.Module, shapes: Mapping[str, torch.Size], dtype: torch.dtype
) -> dict[str, torch.Tensor | PackedWeight]:
    """For each name and shape of transformers' model, the tensor of vLLM's that holds it. `dtype`: computed in.

    Raises: ModelError that names the first weight that cannot be shared.
    """
    held = {
        name.replace(".base_layer.", "."): weight for name, weight in module.named_parameters(remove_duplicate=False)
    }
    fused = _fused(module)
    views: dict[str, torch.Tensor | PackedWeight] = {}
    for name, shape in shapes.items():
        weight, index, start, whole = held.get(name), 0, 0, name
        if weight is None:
            head, _, kind = name.rpartition(".")
            prefix, _, part = head.rpartition(".")
            layer, before = fused.get(part, ("", ()))
            whole, index = f"{prefix}.{layer}.{kind}", len(before)
            weight = held.get(whole)
            start = sum(shapes[f"{prefix}.{other}.{kind}"][0] for other in before)
        if weight is None:
            raise ModelError(f"vLLM's {type(module).__name__} holds no weight {name!r}")
        view: torch.Tensor | PackedWeight | None
        if hasattr(weight, "bnb_quant_state"):
            view = _four_bits(weight, index, dtype)
        elif weight.dtype == torch.float8_e4m3fn:
            view = _eight_bits(weight, held.get(f"{whole}_scale"), start, shape, dtype)
        else:
            view = weight.detach()[start : start + shape[0]]
        if view is None or (isinstance(view, torch.Tensor) and (view.shape != shape or view.dtype != dtype)):
            raise ModelError(f"vLLM holds {name!r} as {tuple(weight.shape)} of {weight.dtype}, not as {tuple(shape)}")
        views[name] = view
    return views


def _four_bits(weight: torch.Tensor, index: int, dtype: torch.dtype) -> PackedWeight:
    """bitsandbytes' NF4: a fused layer has a quantization state and a run of bytes for each part."""
    from bitsandbytes.functional import dequantize_4bit

    states, offsets = weight.bnb_quant_state, weight.bnb_shard_offsets
    data = weight.detach()[int(offsets[index]) : int(offsets[index + 1])]
    return PackedWeight(data, lambda: dequantize_4bit(data, states[index]).to(dtype))


def _eight_bits(
    weight: torch.Tensor, scale: torch.Tensor | None, start: int, shape: torch.Size, dtype: torch.dtype
) -> PackedWeight | None:
    """FP8 with one scale: vLLM keeps the weight transposed, [in, out]."""
    if scale is None or scale.numel() != 1:
        return None
    part = weight.detach().t()[start : start + shape[0]]
    if part.shape != shape:
        return None
    return PackedWeight(part.view(torch.uint8), lambda: part.to(dtype) * scale.to(dtype))


def _fused(module: torch.nn.Module) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Of each fused projection: the layer it is in, and those that come before it there."""
    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    mapping: Mapping[str, list[str]] = getattr(module, "packed_modules_mapping", {})
    for whole, parts in mapping.items():
        for index, part in enumerate(parts):
            found[part] = (whole, tuple(parts[:index]))
    return found
