"""An import path that users of ART know. The code lives in artnb.training.sft_runs and sft_batches."""

from ..training.sft_batches import create_lr_schedule
from ..training.sft_runs import (
    SFTChunk,
    create_sft_dataset_iterator,
    get_file_row_count,
    iterate_file,
    train_sft_from_file,
)

__all__ = [
    "SFTChunk",
    "create_lr_schedule",
    "create_sft_dataset_iterator",
    "get_file_row_count",
    "iterate_file",
    "train_sft_from_file",
]
