"""An import path that users of ART know. The code lives in artnb.datasets."""

from ..datasets import DatasetBatch, iterate_dataset

__all__ = ["DatasetBatch", "iterate_dataset"]
