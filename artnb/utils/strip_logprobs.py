"""An import path that users of ART know. The code lives in artnb.compat.helpers."""

from ..compat.helpers import strip_logprobs

__all__ = ["strip_logprobs"]
