"""One attention function for engine and trainer: each forward pass brings its own layout.

A flat batch `[1, tokens]` of many sequences needs to know which keys each query may see. Instead of a
dense tokens × tokens mask, the caller passes an `Attend` with the forward pass, and every layer asks it.
A forward pass without one is ordinary sdpa. Registering a name with transformers is its public way to
add an attention function; nothing of the library is replaced.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "artnb"


class Attend(Protocol):
    """Attention of one forward pass over a flat batch."""

    def __call__(
        self,
        layer: int,
        query_HSD: torch.Tensor,
        key_KSD: torch.Tensor,
        value_KSD: torch.Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """[heads, S, D], [kv_heads, S, D], [kv_heads, S, D] → [S, heads, D], rotary embedding already applied."""
        ...


class PackAttend(Attend, Protocol):
    """The `Attend` of one pack. Forward passes bring `size` tokens: the pack's, and padding after them."""

    size: int


def _forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    attend: Attend | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if attend is None:
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window, **kwargs
        )
    for unlike, name in (("softcap", "caps its attention scores"), ("s_aux", "has attention sinks")):
        if kwargs.get(unlike) is not None:
            raise ValueError(f"this model {name} ({unlike}), which the flat batch does not do")
    scale = scaling if scaling is not None else float(query.shape[-1]) ** -0.5
    # A layer that is compiled must not read its number, or each would be compiled anew; a pack's attention needs none.
    layer = 0 if torch.compiler.is_compiling() else int(module.layer_idx)
    out_SHD = attend(layer, query[0], key[0], value[0], scaling=scale, sliding_window=sliding_window)
    return out_SHD.unsqueeze(0), None


def use(model: PreTrainedModel) -> None:
    """Make `model` (not wrapped by PEFT) take an `Attend` in its forward pass."""
    AttentionInterface.register(NAME, _forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)


def flat_inputs(token_ids_S: torch.Tensor, position_ids_S: torch.Tensor, attend: Attend) -> dict[str, Any]:
    """Keyword arguments for `model(**...)`: a flat batch with its layout.

    The 4-D mask is a dummy: transformers hands a 4-D mask on as it is and builds none of its own.
    """
    return {
        "input_ids": token_ids_S.unsqueeze(0),
        "position_ids": position_ids_S.unsqueeze(0),
        "attention_mask": torch.zeros(1, 1, 1, 1, device=token_ids_S.device),
        "use_cache": False,
        "attend": attend,
    }
