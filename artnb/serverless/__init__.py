"""Train and serve at the W&B training service: `ServerlessBackend`. See docs/serverless.md."""

from .backend import ServerlessBackend
from .registered import ServerlessTrainResult

__all__ = ["ServerlessBackend", "ServerlessTrainResult"]
