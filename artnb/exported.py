"""What an export made, and the commands that serve it. Writes nothing and runs nothing. No torch."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .engines.vllm_options import lora_slots
from .errors import ConfigError

ExportFormat = Literal["merged", "adapter"]
EXPORT_FILE = "artnb_export.json"
"""What an exported folder says of itself; a later export of the same kind may replace a folder that has it."""


@dataclass(frozen=True, slots=True)
class Exported:
    """A folder that other programs load as it is.

    exported = await model.export("out/agent", step=30)
    print(exported)  # what it is, and the lines that serve it
    """

    path: Path
    format: ExportFormat
    name: str  # what it is served as
    step: int | None  # None: of a bare adapter folder
    base_model: str
    rank: int  # of the LoRA adapter
    dtype: str | None = None  # of merged weights
    max_logit_difference: float | None = None  # merged against base and adapter, on a fixed prompt
    compared_in: str | None = None  # the dtype in which both were computed
    notes: list[str] = field(default_factory=list)

    @property
    def vllm(self) -> str:
        """A `vllm serve` line. Ask it for the model `name`."""
        path, name = shlex.quote(str(self.path)), shlex.quote(self.name)
        if self.format == "merged":
            return f"vllm serve {path} --served-model-name {name}"
        module = shlex.quote(f"{self.name}={self.path}")
        base = shlex.quote(self.base_model)
        return f"vllm serve {base} --enable-lora --max-lora-rank {lora_slots(self.rank)} --lora-modules {module}"

    @property
    def ollama(self) -> str:
        """The lines that bring a merged folder into Ollama and ask it; its Modelfile is in the folder.

        Ollama converts the architectures that it knows (Llama, Mistral, Gemma, Phi-3, Qwen2 and later ones) and
        recognises the chat templates of known families. Raises: ConfigError for an adapter.
        """
        if self.format != "merged":
            raise ConfigError(
                f'Ollama loads LoRA adapters of few architectures only; export {self.name} with format="merged" for it'
            )
        modelfile = shlex.quote(str(self.path / "Modelfile"))
        return f"ollama create {self.ollama_name} -f {modelfile} && ollama run {self.ollama_name}"

    @property
    def ollama_name(self) -> str:
        """The name in Ollama, which takes lower case only."""
        return re.sub(r"[^a-z0-9._-]+", "-", self.name.lower()).strip("-._") or "artnb-model"

    @property
    def gguf(self) -> str:
        """The line that makes a GGUF file of a merged folder with llama.cpp's converter. Raises: ConfigError."""
        if self.format != "merged":
            raise ConfigError(f'a GGUF file is made of a merged model; export {self.name} with format="merged"')
        target = self.path.with_name(f"{self.path.name}.gguf")
        return gguf_command(self.path, target)

    def label(self) -> dict[str, Any]:
        """JSON for EXPORT_FILE."""
        return {
            "artnb": "export",
            "format": self.format,
            "name": self.name,
            "step": self.step,
            "base_model": self.base_model,
            "rank": self.rank,
            "dtype": self.dtype,
            "max_logit_difference": self.max_logit_difference,
            "compared_in": self.compared_in,
            "notes": self.notes,
        }

    def __str__(self) -> str:
        what = f"merged {self.dtype} model" if self.format == "merged" else f"LoRA adapter of {self.base_model}"
        at = self.name if self.step is None else f"{self.name}@{self.step}"
        lines = [f"{at} as a {what} in {self.path}"]
        if self.max_logit_difference is not None:
            lines.append(
                f"largest difference of a logit from base and adapter: {self.max_logit_difference:.3g}, "
                f"both computed in {self.compared_in}"
            )
        lines += [f"note: {note}" for note in self.notes]
        lines.append(self.vllm)
        if self.format == "merged":
            lines += [self.ollama, self.gguf]
        return "\n".join(lines)


def gguf_command(folder: Path, target: Path) -> str:
    """llama.cpp's own converter on a merged folder: `pip install -r requirements.txt` in a clone of it comes first."""
    return f"python llama.cpp/convert_hf_to_gguf.py {shlex.quote(str(folder))} --outfile {shlex.quote(str(target))}"


def read_export_label(folder: Path) -> dict[str, Any] | None:
    """What an exported folder says of itself; None for any other folder."""
    try:
        label = json.loads((folder / EXPORT_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    return label if isinstance(label, dict) and label.get("artnb") == "export" else None
