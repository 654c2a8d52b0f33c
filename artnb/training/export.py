"""Write a checkpoint as a folder that other programs load: the adapter as it is, or merged into its base model.

PEFT merges, transformers writes. Runs on the CPU, from files alone, beside whatever is served and trained. The new
folder appears whole or not at all.
"""

from __future__ import annotations

import json
import logging
import secrets
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import cached_file

from ..config import check_choice
from ..durable import TEMPORARY, free_space, is_full, remove_tree, sync_file, sync_folder, this_process
from ..errors import CheckpointError, ConfigError, ModelError
from ..exported import EXPORT_FILE, Exported, ExportFormat, gguf_command, read_export_label
from ..gguf_folder import quiet_transformers
from ..memory import available_bytes
from ..notebook.progress import Progress
from .adapter_shape import CONFIG_FILE, WEIGHTS_FILE, empty_model, read_adapter_config, read_adapter_shapes
from .base_model import DTYPES, check_folder
from .checkpoints import MANIFEST

log = logging.getLogger(__name__)

PROBE = [{"role": "user", "content": "Which of these is larger: 7 or 12? Answer with the number, then say why."}]
"""The conversation on which the merged model is compared with base and adapter."""
SENTENCEPIECE = "tokenizer.model"
"""The vocabulary that converters for Llama 2, Mistral and Gemma read; transformers does not write it."""


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint to export: a PEFT folder, what it is called, and the base model it is of."""

    folder: Path
    name: str
    step: int | None = None
    base_model: str | None = None  # None: as the checkpoint or adapter_config.json says


def export_checkpoint(
    source: Source, path: str | Path, *, format: str = "merged", dtype: str = "auto", base_model: str | None = None
) -> Exported:
    """Export `source` to the folder `path`, which must be new, empty, or an earlier export.

    Args:
        format: "merged" (a full model with tokenizer, Modelfile and safetensors) or "adapter" (the PEFT folder).
        dtype: of merged weights: float32, bfloat16, float16; "auto" is what the base's files have.
        base_model: merge into these weights instead of those that the checkpoint names.

    Raises: ConfigError for options and paths; ModelError when the base cannot be merged into; CheckpointError when the
    checkpoint is no adapter of the base, or the folder cannot be written.
    """
    if format == "gguf":
        merged = Path(path).with_suffix("")
        raise ConfigError(
            "format='gguf': no library makes GGUF files of a model, llama.cpp's own script does. Export with "
            f"format='merged' to {merged}, then in a clone of github.com/ggml-org/llama.cpp: "
            f"{gguf_command(merged, Path(path))}"
        )
    check_choice("export", "format", format, ("merged", "adapter"))
    check_choice("export", "dtype", dtype, ("auto", *DTYPES))
    if format == "adapter" and (dtype != "auto" or base_model is not None):
        raise ConfigError("export: dtype and base_model are for format='merged'; an adapter is written as it is")
    config = read_adapter_config(source.folder)
    state = _state(source.folder)
    base = str(base_model or source.base_model or state.get("base_model") or config["base_model_name_or_path"])
    step = state.get("step", source.step)
    with _written(Path(path), source.folder) as (target, into):
        # Copied first: the checkpoint may be deleted while the base model is loaded.
        adapter = into / ".adapter"
        adapter.mkdir()
        for file in (CONFIG_FILE, WEIGHTS_FILE):
            shutil.copyfile(source.folder / file, adapter / file)
        notes: list[str] = []
        difference, chosen = None, None
        if format == "merged":
            if quantized := state.get("quantized"):
                notes.append(
                    f"trained over a base model in {quantized}, merged into its full-precision weights: answers differ "
                    "a little from those that were served"
                )
            difference, chosen = _merge(base, adapter, into, dtype)
            remove_tree(adapter)
        else:
            for file in (CONFIG_FILE, WEIGHTS_FILE):
                (adapter / file).rename(into / file)
            adapter.rmdir()
        kind: ExportFormat = "merged" if format == "merged" else "adapter"
        done = Exported(target, kind, source.name, step, base, int(config["r"]), chosen, difference, notes)
        (into / EXPORT_FILE).write_text(json.dumps(done.label(), indent=1), encoding="utf-8")
    return done


def _merge(base: str, adapter: Path, into: Path, dtype: str) -> tuple[float, str]:
    """Merge and write the model. Returns the largest difference of a logit, and the dtype of the weights."""
    name = f"merge into {Path(base).name}"
    with quiet_transformers(), warnings.catch_warnings(), Progress(3, name, "stage", phase="save") as bar:
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*", FutureWarning)  # as in adapters.py
        chosen = _check_base(base, dtype)
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(base)
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(base, dtype=chosen)
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
        difference = float((_logits(merged, ids) - before).abs().max())
        bar.update(1)
        merged.save_pretrained(into)
        # Ollama and older programs read the chat template where it used to be, in tokenizer_config.json.
        tokenizer.save_pretrained(into, save_jinja_files=False)
        _copy_vocabulary(base, into)
        (into / "Modelfile").write_text(_modelfile(tokenizer), encoding="utf-8")
        bar.update(1)
    return difference, str(chosen).removeprefix("torch.")


def _check_base(base: str, dtype: str) -> torch.dtype:
    """The dtype to merge in. Raises ModelError for a base without full weights, or too little memory."""
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
    needed = sum(weight.numel() for weight in empty_model(base).parameters()) * chosen.itemsize
    free = available_bytes(torch.device("cpu"))
    if needed > free:
        gib = 1024.0**3
        raise ModelError(
            f"merging into {base} in {str(chosen).removeprefix('torch.')} takes {needed / gib:.1f} GiB of memory, "
            f"{free / gib:.1f} GiB are free; merge where there is more, or export with format='adapter'"
        )
    return chosen


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


def _state(folder: Path) -> dict[str, Any]:
    """What a checkpoint's manifest says; empty for a bare PEFT folder."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return {}
    return {**manifest.get("state", {}), "step": manifest.get("step")}


@contextmanager
def _written(path: Path, source: Path) -> Iterator[tuple[Path, Path]]:
    """(the folder's final place, a temporary one to write into); the latter is renamed to the former at the end."""
    target = path.expanduser().resolve()
    # Beside artnb's checkpoints nothing else may lie; a bare adapter's folder is its own matter.
    kept = source.resolve().parent if (source / MANIFEST).exists() else source.resolve()
    if target == kept or kept in target.parents:
        raise ConfigError(f"export: {target} is inside the checkpoint's own folder {kept}; give a folder elsewhere")
    if target.exists() and not target.is_dir():
        raise ConfigError(f"export: {target} is a file; give a folder")
    if target.is_dir() and any(target.iterdir()) and read_export_label(target) is None:
        raise ConfigError(f"export: {target} holds other files; give a new or empty folder, or an earlier export's")
    mark = f"{this_process().mark}-{secrets.token_hex(4)}"
    into, aside = target.with_name(f"{TEMPORARY}{target.name}-{mark}"), target.with_name(f".old-{target.name}-{mark}")
    try:
        into.mkdir(parents=True)
        yield target, into
        mode = (into / EXPORT_FILE).stat().st_mode
        for file in into.rglob("*"):
            if file.is_file():
                file.chmod(mode)  # safetensors lets only the owner read; a server may be another user
                sync_file(file)
        if target.exists():
            target.rename(aside)
        into.rename(target)
        sync_folder(target.parent)
    except BaseException as error:
        if aside.exists() and not target.exists():
            aside.rename(target)
        remove_tree(into)
        if isinstance(error, OSError | SafetensorError) or is_full(error):
            space = f"; {free_space(target.parent)}" if is_full(error) else ""
            raise CheckpointError(f"export to {target} failed: {error}{space}. Nothing of it was kept") from error
        raise
    remove_tree(aside)
