"""GPU cards as memory and compute capability: all that the memory plan asks about one.

Only `this_card` loads torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, nearest

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU. What it can do follows from its capability and memory alone, never from its name."""

    name: str
    memory_bytes: int  # the total that the driver gives to programs, a little less than is on the label
    capability: tuple[int, int]

    @property
    def dtype(self) -> str:
        """The 16-bit type it computes natively: "bfloat16" from Ampere (8.0) on, "float16" before (a T4 is 7.5)."""
        return "bfloat16" if self.capability >= (8, 0) else "float16"

    @property
    def fp8(self) -> bool:
        """Whether it multiplies 8-bit floats: from Ada (8.9) on."""
        return self.capability >= (8, 9)

    @property
    def flex_attention(self) -> bool:
        """Whether packs can use FlexAttention: from Ampere (8.0) on."""
        return self.capability >= (8, 0)

    @property
    def cuda_graphs(self) -> bool:
        """Whether the engine captures CUDA graphs by default: from Ampere (8.0) on.

        On a T4 they cost a tenth of its memory, and runs hung with them: https://github.com/OpenPipe/ART/issues/346.
        """
        return self.capability >= (8, 0)

    @property
    def batched_tokens(self) -> int:
        """Tokens that the engine takes into one forward pass by default: few where their activations would crowd."""
        return 8192 if self.memory_bytes >= 36 * GIB else 2048


def _card(name: str, gib: float, capability: tuple[int, int]) -> Card:
    return Card(name, round(gib * GIB), capability)


# Memory is `torch.cuda.get_device_properties(0).total_memory` of common drivers; they differ by 1 % among themselves.
CARDS: tuple[Card, ...] = (
    _card("T4", 14.56, (7, 5)),
    _card("A10G", 21.98, (8, 6)),
    _card("L4", 22.03, (8, 9)),
    _card("RTX 4090", 23.64, (8, 9)),
    _card("RTX 3090", 23.69, (8, 6)),
    _card("A100-40GB", 39.38, (8, 0)),
    _card("L40S", 44.39, (8, 9)),
    _card("H100", 79.10, (9, 0)),
    _card("A100", 79.14, (8, 0)),
    _card("H200", 139.80, (9, 0)),
    _card("B200", 178.35, (10, 0)),
)
"""Known cards, the smallest first. "A100" is the one with 80 GB."""

_OTHER_NAMES = {"a10080gb": "A100", "h10080gb": "H100", "4090": "RTX 4090", "3090": "RTX 3090"}


def find_card(name: str) -> Card:
    """The profile of a card: `find_card("t4")`. Case, spaces, dashes and the maker's name do not count.

    Raises: ConfigError for an unknown card, with the nearest spelling or all names.
    """
    by_key = {_key(card.name): card for card in CARDS}
    by_key |= {other: by_key[_key(real)] for other, real in _OTHER_NAMES.items()}
    try:
        return by_key[_key(name)]
    except KeyError:
        raise ConfigError(f"no card {name!r} is known{nearest(name.upper(), [c.name for c in CARDS])}") from None


def _key(name: str) -> str:
    return re.sub(r"nvidia|tesla|geforce|[^a-z0-9]", "", name.lower())


def this_card(device: Any = None) -> Card:
    """The profile of a CUDA device of this machine (None: the current one).

    Raises: ConfigError where there is none.
    """
    try:
        import torch
    except ImportError:
        raise ConfigError(f"this machine has no torch to ask for its GPU; {_name_one()}") from None
    if not torch.cuda.is_available():
        raise ConfigError(f"this machine, or this build of torch, has no CUDA device; {_name_one()}")
    found = torch.cuda.get_device_properties(torch.cuda.current_device() if device is None else device)
    return Card(found.name, int(found.total_memory), (found.major, found.minor))


def _name_one() -> str:
    return f"name a card: {', '.join(card.name for card in CARDS)}"
