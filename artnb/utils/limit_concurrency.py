"""An import path that users of ART know. The code lives in artnb.compat.helpers."""

from ..compat.helpers import limit_concurrency

__all__ = ["limit_concurrency"]
