"""A model folder with random bf16 weights of a well-known shape: for timing, where it does not matter what they say.

    python benchmarks/gpu/make_model.py 1b4 /tmp/1b4                          # 2.8 GB
    python benchmarks/gpu/make_model.py 7b /tmp/7b                            # 15.2 GB
    python benchmarks/gpu/make_model.py 1b4 /tmp/1b4 --tokenizer SOME_FOLDER  # that model's tokenizer

`1b4`: Qwen2.5-1.5B with a vocabulary of 49,152 (1.39B weights); `7b`: Qwen2.5-7B (7.6B); `tiny` is for a CPU.

Without --tokenizer every token is a word, so that any sampled tokens, written as text and read again, are the same
tokens. A trained model nearly always writes text of which that is true; random weights with a real tokenizer never do,
and each turn of a rollout would then be a training row of its own. The architecture is then Llama's (Qwen2 without
biases in attention): transformers 5 gives every Qwen2 folder Qwen's own kind of tokenizer.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from harness import say

SHAPES: dict[str, dict[str, Any]] = {
    "1b4": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
}
SPECIAL = ["<|unk|>", "<|im_end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def word_tokenizer(size: int) -> Any:
    """A tokenizer whose ordinary tokens are a space and four letters each."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def word(number: int) -> str:
        return " " + "".join(chr(97 + number // 26**place % 26) for place in (3, 2, 1, 0))

    names = SPECIAL + [word(number) for number in range(size - len(SPECIAL))]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s*\S+"), behavior="isolated")
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=SPECIAL[0],
        eos_token=SPECIAL[1],
        pad_token=SPECIAL[2],
        additional_special_tokens=SPECIAL[3:],
        clean_up_tokenization_spaces=False,
        model_max_length=32768,
    )
    fast.chat_template = TEMPLATE
    return fast


def make(shape: str, folder: Path, tokenizer: Path | None, device: str) -> int:
    """Returns the number of weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen2Config

    sizes = SHAPES[shape]
    own = word_tokenizer(sizes["vocab_size"]) if tokenizer is None else AutoTokenizer.from_pretrained(tokenizer)
    if len(own) > sizes["vocab_size"]:
        raise SystemExit(f"{tokenizer} has {len(own)} tokens, the shape {shape} only {sizes['vocab_size']}")
    architecture = LlamaConfig if tokenizer is None else Qwen2Config
    config = architecture(
        **sizes,
        max_position_embeddings=32768,
        rope_theta=1e6,
        bos_token_id=own.bos_token_id,
        eos_token_id=own.eos_token_id,
        pad_token_id=own.pad_token_id,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    say(f"made {sum(p.numel() for p in model.parameters()) / 1e9:.3f}B random weights on {device}")
    model.save_pretrained(folder)
    own.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="a model folder; without one every token is a word")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="makes the weights")
    args = parser.parse_args()
    began = time.perf_counter()
    weights = make(args.shape, args.folder, args.tokenizer, args.device)
    print(f"{args.shape}: {weights / 1e9:.3f}B weights in {args.folder}, {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
