"""Tiny random models of three architectures, saved as folders, and random rows that share prefixes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers_for_tests import make_tokenizer

from artnb.training.types import Row

VOCAB = 400
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")


def make_model(kind: str, folder: Path, *, seed: int = 0, tokenizer: bool = True, **sizes: Any) -> Path:
    """Write a random fp32 model of the architecture to `folder`; returns it."""
    options = SIZES | sizes
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "gemma3":
            layers = ["sliding_attention", "full_attention", "sliding_attention"][: options["num_hidden_layers"]]
            config = transformers.Gemma3TextConfig(
                **options, sliding_window=6, layer_types=layers, query_pre_attn_scalar=16, final_logit_softcapping=2.0
            )
            model: Any = transformers.Gemma3ForCausalLM(config)
        else:
            names = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
            config = getattr(transformers, f"{names[kind]}Config")(**options)
            model = getattr(transformers, f"{names[kind]}ForCausalLM")(config)
        with torch.no_grad():  # the usual start is so close to zero that every distribution is flat
            for weight in model.parameters():
                if weight.ndim == 2:
                    weight.mul_(6.0)
    model.save_pretrained(folder)
    if tokenizer:
        make_tokenizer("chatml", VOCAB).save_pretrained(folder)
    return folder


def make_row(ids: list[int], sampled: list[int], **fields: Any) -> Row:
    """A row with log-probs of −1 and the given temperature at its sampled tokens."""
    mask = np.zeros(len(ids), np.bool_)
    mask[sampled] = True
    temperature = fields.pop("temperature", 1.0)
    return Row(
        np.array(ids, np.int64),
        mask,
        np.where(mask, -1.0, 0.0).astype(np.float32),
        np.where(mask, temperature, 1.0).astype(np.float32),
        **fields,
    )


def branching_rows(seed: int = 0, count: int = 7, length: int = 40) -> list[Row]:
    """Rows that fork off one another at random places, sampled tokens among what they share."""
    rng = np.random.default_rng(seed)
    rows: list[Row] = []
    for i in range(count):
        n = int(rng.integers(length // 2, length))
        ids = rng.integers(0, VOCAB, n).tolist()
        sampled = (rng.random(n) < 0.6) & (np.arange(n) > 0)
        temperature = float(rng.choice([0.6, 1.0, 1.3]))
        if rows and i != count - 1:  # the last one is a tree of its own
            other = rows[int(rng.integers(len(rows)))]
            shared = int(rng.integers(1, min(n, len(other))))
            ids[:shared] = other.token_ids[:shared].tolist()
            sampled[:shared] = other.sampled[:shared]
        rows.append(
            make_row(ids, np.flatnonzero(sampled).tolist(), temperature=temperature, advantage=float(i % 3) - 1)
        )
    return rows
