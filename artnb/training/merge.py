"""Merge a LoRA adapter into its base model, on the CPU: PEFT merges, transformers writes."""

from __future__ import annotations

import logging
import math
import shutil
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import peft
import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import cached_file

from ..errors import CheckpointError, ModelError
from ..gguf_folder import quiet_transformers
from ..memory import available_bytes
from ..notebook.progress import Progress
from .adapter_shape import empty_model, read_adapter_shapes
from .base_model import DTYPES, check_folder

log = logging.getLogger(__name__)

PROBE = [{"role": "user", "content": "Which of these is larger: 7 or 12? Answer with the number, then say why."}]
"""The conversation on which the merged model is compared with base and adapter."""
SENTENCEPIECE = "tokenizer.model"
"""The vocabulary that converters for Llama 2, Mistral and Gemma read; transformers does not write it."""


class Merged(NamedTuple):
    """What was written: the weights' dtype, and how far its logits are from those of base and adapter."""

    dtype: str
    max_logit_difference: float  # on PROBE
    compared_in: str  # the dtype in which both were computed


def merge(base: str, adapter: Path, into: Path, dtype: str) -> Merged:
    """Merge the adapter folder into the base model and write model, tokenizer and Modelfile to `into`.

    `dtype`: a key of DTYPES, or "auto" for that of the base's files. Where memory allows it, weights are added up in
    fp32 and rounded once.

    Raises: ModelError, CheckpointError; OSError when it cannot be written.
    """
    name = f"merge into {Path(base).name}"
    with quiet_transformers(), warnings.catch_warnings(), Progress(3, name, "stage", phase="save") as bar:
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*", FutureWarning)  # as in adapters.py
        chosen, computed = _dtypes(base, dtype)
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(base)
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(base, dtype=computed)
        except (OSError, ValueError, ImportError, SafetensorError) as error:
            raise ModelError(f"the base model {base!r} cannot be loaded: {error}") from error
        model.requires_grad_(False).eval()
        _untie(model, adapter)
        bar.update(1)
        try:
            wrapped = peft.PeftModel.from_pretrained(model, str(adapter))
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(f"the adapter does not fit the base model {base!r}: {error}") from error
        wrapped.eval()
        ids = _probe_ids(tokenizer)
        before = _logits(wrapped, ids)
        try:
            merged = wrapped.merge_and_unload(safe_merge=True)
        except ValueError as error:
            raise CheckpointError(f"the adapter cannot be merged: {error}") from error
        _cast(merged, chosen)
        _cast(merged, computed)
        difference = float((_logits(merged, ids) - before).abs().max())
        if not math.isfinite(difference):
            raise ModelError(f"merged into {base} the weights are too large for {_name(chosen)}; take dtype='bfloat16'")
        bar.update(1)
        try:
            _cast(merged, chosen)
            merged.save_pretrained(into)
        except SafetensorError as error:
            raise OSError(str(error)) from error  # what the caller knows as a folder that cannot be written
        # Ollama and older programs read the chat template where it used to be, in tokenizer_config.json.
        tokenizer.save_pretrained(into, save_jinja_files=False)
        _copy_vocabulary(base, into)
        (into / "Modelfile").write_text(_modelfile(tokenizer), encoding="utf-8")
        bar.update(1)
    return Merged(_name(chosen), difference, _name(computed))


def _dtypes(base: str, dtype: str) -> tuple[torch.dtype, torch.dtype]:
    """(dtype to write, dtype to compute in). Raises: ModelError, for quantized weights and for too little memory."""
    check_folder(base, base)
    try:
        config = AutoConfig.from_pretrained(base)
    except (OSError, ValueError) as error:
        raise ModelError(f"the base model {base!r} cannot be read: {str(error).splitlines()[0]}") from error
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
        raise ModelError(
            f"{base} holds quantized weights ({getattr(method, 'value', method)}): an adapter cannot be merged into "
            "them without rounding it away. Give base_model=<the same model in 16 or 32 bits>, or format='adapter'"
        )
    stored = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None) or torch.float32
    chosen: torch.dtype = stored if dtype == "auto" else DTYPES[dtype]
    weights = sum(weight.numel() for weight in empty_model(base).parameters())
    free = available_bytes(torch.device("cpu"))
    if weights * chosen.itemsize > free:
        gib = 1024.0**3
        raise ModelError(
            f"merging into {base} in {_name(chosen)} takes {weights * chosen.itemsize / gib:.1f} GiB of memory, "
            f"{free / gib:.1f} GiB are free; merge where there is more, or export with format='adapter'"
        )
    # For fp32 the model is held twice for a moment, when it is cast.
    room = weights * (torch.float32.itemsize + chosen.itemsize) < free
    return chosen, torch.float32 if room else chosen


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _cast(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """The weights alone: `model.to` would round the rotary frequencies, too, which are not saved."""
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)


def _untie(model: PreTrainedModel, adapter: Path) -> None:
    """Give the output head weights of its own where the adapter changes it: merging would change the embedding, too."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return
    names = {id(module): name for name, module in model.named_modules()}
    touched = [f".{names[id(module)]}.lora_A." for module in (head, embedding)]
    if any(part in name for name in read_adapter_shapes(adapter) for part in touched):
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        model.config.tie_word_embeddings = False
        model.config.get_text_config().tie_word_embeddings = False


def _probe_ids(tokenizer: Any) -> torch.Tensor:
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(PROBE, tokenize=False, add_generation_prompt=True)
        return torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    return torch.tensor([tokenizer.encode(PROBE[0]["content"])])


@torch.no_grad()  # type: ignore[untyped-decorator]  # torch is untyped here
def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits.float()
    return logits


def _copy_vocabulary(base: str, into: Path) -> None:
    try:
        found = cached_file(
            base,
            SENTENCEPIECE,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except OSError as error:  # a hub that does not answer: the file is one of several that say the same
        log.warning("%s was not looked for: %s", SENTENCEPIECE, error)
        return
    if found is not None:
        shutil.copyfile(found, into / SENTENCEPIECE)


def _modelfile(tokenizer: Any) -> str:
    """Ollama reads weights, tokenizer and chat template from the folder itself."""
    stop = f'PARAMETER stop "{tokenizer.eos_token}"\n' if tokenizer.eos_token else ""
    return f"FROM .\n{stop}"
