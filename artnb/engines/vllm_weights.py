"""vLLM's weights under the names that transformers uses, as views: one copy of the base model for engine and trainer.

vLLM fuses projections that read the same input (q, k and v into qkv) by stacking their rows, and says which in the
model's `packed_modules_mapping`; LoRA support wraps layers (`base_layer`), and vocabularies are padded. Nothing is
copied.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..errors import ModelError


def shared_weights(module: torch.nn.Module, shapes: Mapping[str, torch.Size]) -> dict[str, torch.Tensor]:
    """For each name and shape of transformers' model, the tensor of vLLM's that holds it.

    Raises: ModelError that names the first weight that cannot be shared, e.g. because it is quantized.
    """
    held = {
        name.replace(".base_layer.", "."): weight for name, weight in module.named_parameters(remove_duplicate=False)
    }
    held |= {name.replace(".base_layer.", "."): b for name, b in module.named_buffers(remove_duplicate=False)}
    packed = _packed(module)
    views: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        weight = held.get(name)
        start = 0
        if weight is None:
            head, _, kind = name.rpartition(".")
            prefix, _, part = head.rpartition(".")
            whole, before = packed.get(part, ("", ()))
            weight = held.get(f"{prefix}.{whole}.{kind}")
            start = sum(shapes[f"{prefix}.{other}.{kind}"][0] for other in before)
        if weight is None:
            raise ModelError(f"vLLM's {type(module).__name__} holds no weight {name!r}")
        view = weight.detach()[start : start + shape[0]]
        if view.shape != shape or not view.is_floating_point():
            raise ModelError(f"vLLM holds {name!r} as {tuple(weight.shape)} of {weight.dtype}, not as {tuple(shape)}")
        views[name] = view
    return views


def _packed(module: torch.nn.Module) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Of each fused projection: the layer it is in, and those that come before it there."""
    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    mapping: Mapping[str, list[str]] = getattr(module, "packed_modules_mapping", {})
    for whole, parts in mapping.items():
        for index, part in enumerate(parts):
            found[part] = (whole, tuple(parts[:index]))
    return found
