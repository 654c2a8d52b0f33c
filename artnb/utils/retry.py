"""An import path that users of ART know. The code lives in artnb.retrying."""

from ..retrying import retry

__all__ = ["retry"]
