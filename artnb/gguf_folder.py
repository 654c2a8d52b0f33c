"""Turn SmolLM2's GGUF file into a Hugging Face folder, and check that such a folder is sound.

Knows this one model family (Llama layers, SmolLM2's tokenizer, ChatML); it is no general converter.
Does not download anything: that is demo.py.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import ModelError

ROUND_TRIPS = (
    "Hello, world!",
    "a  b\n\tc",
    "1234 + 56",
    "naïve café",
    "한글 조합",
    "👩‍🚀🎉",
    '</think>{"x": [1]}',
    " ",
)
PROBE, PROBE_ANSWER = "The capital of France is", " Paris"


@contextmanager
def quiet_transformers() -> Generator[None]:
    """Without transformers' progress bars: each stage already has its own line."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def convert(gguf: Path, folder: Path) -> None:
    """Write `gguf` to `folder` as bf16 safetensors with config, tokenizer and chat template."""
    with quiet_transformers():
        save_model(gguf, folder)
        save_tokenizer(gguf, folder)


def save_model(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig, LlamaConfig, LlamaForCausalLM

    # Without `dequantize` transformers >= 5.20 keeps GGUF weights packed.
    packed = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    # Dequantized or not, the loaded model remembers that it was quantized and then refuses to be saved,
    # so its weights go into a plain model.
    options = packed.config.to_dict()
    for key in (
        "quantization_config",
        "_name_or_path",
        "_model_name_or_path",
        "architectures",
        "transformers_version",
        "dtype",
    ):
        options.pop(key, None)
    config = LlamaConfig(**options)
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(packed.state_dict(), strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ModelError(f"{gguf.name}: tensors do not fit a Llama model: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(folder)


def save_tokenizer(gguf: Path, folder: Path) -> None:
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers rebuilds a byte-level BPE out of a GGUF file with sentencepiece's steps around it. These are
    # SmolLM2's own: every digit is a token of its own, then bytes.
    backend = tokenizer.backend_tokenizer
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    # The original's special tokens. Padding shares <|im_end|> with the end of a turn: never mask by token id.
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = "<|im_start|>", "<|im_end|>", "<|im_end|>"
    tokenizer.unk_token = "<|endoftext|>"
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.model_max_length = 8192  # GGUF files do not say it; left alone it would be 1e30
    tokenizer.save_pretrained(folder)


def verify(folder: Path) -> None:
    """Load `folder` as users will and ask it one thing; ModelError says what is wrong.

    The probe would fail if, say, the rotary halves of the attention weights came out in GGUF's order.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with quiet_transformers():
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    problems = tokenizer_problems(tokenizer)
    if model.config.eos_token_id != tokenizer.eos_token_id:
        problems.append(f"config ends turns with token {model.config.eos_token_id}, not {tokenizer.eos_token_id}")
    with torch.no_grad():
        logits_V = model.eval()(torch.tensor([tokenizer.encode(PROBE)])).logits[0, -1]
    answer = tokenizer.decode([int(logits_V.argmax())])
    if answer != PROBE_ANSWER:
        problems.append(f"{PROBE!r} goes on with {answer!r}, not {PROBE_ANSWER!r}")
    if problems:
        raise ModelError(f"the model in {folder} is not sound: " + "; ".join(problems))


def tokenizer_problems(tokenizer: Any) -> list[str]:
    """What differs from SmolLM2's tokenizer, in words."""
    problems = []
    for text in ROUND_TRIPS:
        if (back := tokenizer.decode(tokenizer.encode(text))) != text:
            problems.append(f"the tokenizer turns {text!r} into {back!r}")
    if len(tokenizer.encode("2048")) != 4:
        problems.append("digits are not tokens of their own")
    if (tokenizer.eos_token, tokenizer.pad_token) != ("<|im_end|>", "<|im_end|>"):
        problems.append(f"end and padding are {tokenizer.eos_token!r} and {tokenizer.pad_token!r}, not '<|im_end|>'")
    if not 0 < tokenizer.model_max_length <= 8192:
        problems.append(f"model_max_length is {tokenizer.model_max_length}")
    if not tokenizer.chat_template:
        problems.append("there is no chat template")
    return problems
