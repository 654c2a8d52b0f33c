"""An import path that users of ART know. The code lives in artnb.datasets and artnb.retrying."""

from .iterate_dataset import iterate_dataset
from .retry import retry

__all__ = ["iterate_dataset", "retry"]
