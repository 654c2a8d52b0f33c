"""An import path that users of ART know. The code lives in artnb.compat.helpers."""

from ..compat.helpers import get_model_step

__all__ = ["get_model_step"]
