"""Write a checkpoint as a folder that other programs load: the adapter as it is, or merged into its base model.

Works from files alone, beside whatever is served and trained; the new folder appears whole or not at all. An adapter
needs the core install only; merging is in merge.py and loads torch.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import check_choice
from ..durable import TEMPORARY, free_space, is_full, remove_tree, sync_file, sync_folder, this_process
from ..errors import CheckpointError, ConfigError
from ..exported import EXPORT_FILE, Exported, ExportFormat, gguf_command, read_export_label
from .adapter_files import CONFIG_FILE, WEIGHTS_FILE, read_adapter_config
from .checkpoints import MANIFEST

if TYPE_CHECKING:
    from .merge import Merged

DTYPES = ("auto", "float32", "bfloat16", "float16")


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
        folder = Path(path).with_suffix("")
        raise ConfigError(
            "format='gguf': no library makes GGUF files of a model, llama.cpp's own script does. Export with "
            f"format='merged' to {folder}, then in a clone of github.com/ggml-org/llama.cpp: "
            f"{gguf_command(folder, Path(path))}"
        )
    check_choice("export", "format", format, ("merged", "adapter"))
    check_choice("export", "dtype", dtype, DTYPES)
    if format == "adapter" and (dtype != "auto" or base_model is not None):
        raise ConfigError("export: dtype and base_model are for format='merged'; an adapter is written as it is")
    config = read_adapter_config(source.folder)
    state = _state(source.folder)
    base = base_model or source.base_model or state.get("base_model") or config.get("base_model_name_or_path")
    if not base:
        raise CheckpointError(f"{source.folder} does not say which base model it is of; give base_model=")
    step = state.get("step", source.step)
    with _written(Path(path), source.folder) as (target, into):
        # Copied first: the checkpoint may be deleted while the base model is loaded.
        adapter = into / ".adapter"
        adapter.mkdir()
        for file in (CONFIG_FILE, WEIGHTS_FILE):
            shutil.copyfile(source.folder / file, adapter / file)
        notes: list[str] = []
        merged: Merged | None = None
        if format == "merged":
            if quantized := state.get("quantized"):
                notes.append(
                    f"trained over a base model in {quantized}, merged into its full-precision weights: answers differ "
                    "a little from those that were served"
                )
            merged = _merged(str(base), adapter, into, dtype)
            remove_tree(adapter)
        else:
            for file in (CONFIG_FILE, WEIGHTS_FILE):
                (adapter / file).rename(into / file)
            adapter.rmdir()
        kind: ExportFormat = "merged" if format == "merged" else "adapter"
        of_merged = {} if merged is None else merged._asdict()
        done = Exported(target, kind, source.name, step, str(base), int(config["r"]), notes=notes, **of_merged)
        (into / EXPORT_FILE).write_text(json.dumps(done.label(), indent=1), encoding="utf-8")
    return done


def _merged(base: str, adapter: Path, into: Path, dtype: str) -> Merged:
    try:
        from .merge import merge
    except ImportError as error:
        raise ConfigError(
            f"format='merged' needs {error.name}: pip install \"artnb[local]\"; format='adapter' does without"
        ) from error
    return merge(base, adapter, into, dtype)


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
        if isinstance(error, OSError) or is_full(error):
            space = f"; {free_space(target.parent)}" if is_full(error) else ""
            raise CheckpointError(f"export to {target} failed: {error}{space}. Nothing of it was kept") from error
        raise
    remove_tree(aside)
