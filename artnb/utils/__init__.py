"""An import path that users of ART know. The code lives in artnb.datasets, artnb.retrying and artnb.compat.helpers."""

from .format_message import format_message
from .get_model_step import get_model_step
from .iterate_dataset import iterate_dataset
from .limit_concurrency import limit_concurrency
from .retry import retry

__all__ = ["format_message", "get_model_step", "iterate_dataset", "limit_concurrency", "retry"]
