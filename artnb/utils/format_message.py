"""An import path that users of ART know. The code lives in artnb.compat.helpers."""

from ..compat.helpers import format_message

__all__ = ["format_message"]
