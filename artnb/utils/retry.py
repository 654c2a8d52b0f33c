"""An import path that users of ART know. The code lives in artnb.retry."""

from ..retry import retry

__all__ = ["retry"]
