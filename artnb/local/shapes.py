"""The sizes of a base model that decide how much memory it takes, found without downloading its weights.

From its config and the model built on the meta device; well-known models also from a table, for machines without
network. Loads torch and transformers only when a config is read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ..config import LoraConfig
from ..errors import ConfigError, ModelError

Precision = Literal["16-bit", "4-bit", "fp8"]
"""How the linear layers' weights are held; "16-bit" means in the dtype that is computed in."""


@dataclass(frozen=True, slots=True)
class LinearSize:
    """One linear layer: its name in the model, and its width in and out."""

    name: str
    inputs: int
    outputs: int

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one causal language model. `shape_of` makes it."""

    name: str
    kind: str  # transformers' model_type, e.g. "qwen2"
    parameters: int  # all, a tied output head counted once
    embedding_parameters: int  # input embedding and output head
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int  # width inside the MLP
    vocab: int
    tied: bool  # output head and input embedding are one
    max_position_embeddings: int
    linears: tuple[LinearSize, ...]  # all linear layers but the output head: what "all-linear" adapts and 4-bit packs
    stored: Precision = "16-bit"  # how the published weights are held
    source: str = "its config"  # where these numbers are from, for people

    @property
    def linear_weights(self) -> int:
        """Weights in the linear layers, without biases and without the output head."""
        return sum(linear.weights for linear in self.linears)

    def adapter_parameters(self, lora: LoraConfig) -> int:
        """Weights of one adapter: r × (in + out) for every layer that `target_modules` names, as PEFT reads it.

        Raises: ConfigError when it names none.
        """
        touched = [linear for linear in self.linears if _targets(lora.target_modules, linear.name)]
        if not touched:
            known = ", ".join(sorted({linear.name.rpartition(".")[2] for linear in self.linears}))
            raise ConfigError(
                f"LoraConfig: target_modules={lora.target_modules!r} names no linear layer of {self.name}; "
                f"it has {known}"
            )
        return lora.r * sum(linear.inputs + linear.outputs for linear in touched)

    def kv_bytes(self, item: int) -> int:
        """Bytes of keys and values per token, all layers; sliding windows, which need less, are not counted on."""
        return 2 * self.layers * self.kv_heads * self.head_dim * item

    def activation_bytes(self, item: int) -> int:
        """Bytes per token of a pass with gradients that recomputes every layer.

        The inputs of all layers, and what one layer keeps for its backward pass: `Policy`'s estimate. `item`: bytes of
        the dtype computed in.
        """
        queries, kv = self.heads * self.head_dim, 2 * self.kv_heads * self.head_dim
        layer = 6 * self.hidden + 3 * queries + 2 * kv + 4 * self.inner
        return (layer + self.layers * self.hidden) * item


def _targets(target: str | tuple[str, ...], name: str) -> bool:
    if target == "all-linear":
        return True
    if isinstance(target, str):
        return re.fullmatch(target, name) is not None
    return any(name == part or name.endswith(f".{part}") for part in target)


def shape_of(name_or_path: str | Path) -> ModelShape:
    """The shape of a model folder or of a model on the hub; only its config is fetched, where no cache has it.

    Where the hub does not answer, a well-known model comes from the table here, and `source` says so.

    Raises: ModelError when there is no such model; ConfigError for weights quantized in a way that is not supported.
    """
    name = str(name_or_path)
    folder = isinstance(name_or_path, Path) or name.startswith((".", "/", "~")) or Path(name).is_dir()
    if folder:
        name = str(Path(name).expanduser())
        if not (Path(name) / "config.json").is_file():
            raise ModelError(f"base_model={name!r}: there is no such folder with a config.json")
    try:
        return _measured(name)
    except ConfigError:
        raise
    except (OSError, ValueError, ImportError) as error:
        known = None if folder else known_shape(name)
        if known is not None:
            return known
        reason = str(error).strip().split("\n")[0].rstrip(".")
        listed = "" if folder else f". Without network these are known: {', '.join(_KNOWN)}"
        raise ModelError(f"base_model={name!r}: its config cannot be read: {reason}{listed}") from error


def _measured(name: str) -> ModelShape:
    import torch
    from transformers import AutoModelForCausalLM

    config = _config(name)
    stored = _stored(name, config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the layers' true widths are wanted, not those of packed weights
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    text = config.get_text_config()
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings().weight
    tied = head is not None and head.weight is embedding
    heads = text.num_attention_heads
    return ModelShape(
        name=name,
        kind=text.model_type,
        parameters=sum(p.numel() for p in model.parameters()),
        embedding_parameters=embedding.numel() + (0 if tied or head is None else head.weight.numel()),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        inner=getattr(text, "intermediate_size", 4 * text.hidden_size),
        vocab=text.vocab_size,
        tied=tied,
        max_position_embeddings=getattr(text, "max_position_embeddings", None) or 32768,
        linears=tuple(
            LinearSize(where, module.in_features, module.out_features)
            for where, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and module is not head
        ),
        stored=stored,
    )


def _config(name: str) -> Any:
    """From a folder, from the cache, or from the hub."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name, local_files_only=True)
    except OSError:
        if Path(name).is_dir() or not _hub_answers():
            raise
    return AutoConfig.from_pretrained(name)


def _hub_answers() -> bool:
    """Whether the hub can be asked: its own client would try for half a minute on a machine without network."""
    import httpx
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        httpx.head(constants.ENDPOINT, timeout=5.0)
    except httpx.TransportError:
        return False
    return True


def _stored(name: str, config: Any) -> Precision:
    """How published weights are held. Raises: ConfigError for what can be neither shared nor trained on."""
    quantized = getattr(config, "quantization_config", None)
    if quantized is None:
        return "16-bit"
    read = quantized.get if isinstance(quantized, dict) else lambda key, default=None: getattr(quantized, key, default)
    method = str(getattr(read("quant_method"), "value", read("quant_method")))
    if method == "bitsandbytes" and read("load_in_4bit"):
        return "4-bit"
    if "fp8" in method:
        return "fp8"
    raise ConfigError(f"{name}: its weights are quantized by {method!r}; take the model in 16 bit, 4-bit NF4 or FP8")


def known_shape(name: str) -> ModelShape | None:
    """A well-known model's shape from the table, by its name on the hub, whoever owns it; None where it is not there.

    Instruct and base variants, and 4-bit copies, count as the same model.
    """
    text = name.rpartition("/")[2].lower()
    stored: Precision = "4-bit" if text.endswith("-bnb-4bit") else "16-bit"
    text = text.removesuffix("-bnb-4bit").removesuffix("-unsloth").removeprefix("meta-")
    for ending in ("-instruct", "-it", "-pt", "-base"):
        text = text.removesuffix(ending)
    for known, sizes in _KNOWN.items():
        if known.lower() == text:
            return replace(_dense(*sizes), name=name, stored=stored)
    return None


def _dense(
    kind: str,
    layers: int,
    hidden: int,
    inner: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int,
    tied: bool,
    longest: int,
) -> ModelShape:
    """A decoder of the Llama family: seven linear layers in each layer, RMS norms, maybe biases or norms on q and k."""
    queries, keys = heads * head_dim, kv_heads * head_dim
    widths = {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    linears = tuple(LinearSize(f"model.layers.{i}.{n}", *w) for i in range(layers) for n, w in widths.items())
    small = (4 if kind == "gemma3_text" else 2) * hidden  # norms
    small += 2 * head_dim if kind in ("qwen3", "gemma3_text") else 0  # norms of q and k
    small += queries + 2 * keys if kind == "qwen2" else 0  # biases of q, k and v
    embeddings = vocab * hidden * (1 if tied else 2)
    return ModelShape(
        name="",
        kind=kind,
        parameters=embeddings + sum(linear.weights for linear in linears) + layers * small + hidden,
        embedding_parameters=embeddings,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        inner=inner,
        vocab=vocab,
        tied=tied,
        max_position_embeddings=longest,
        linears=linears,
        source="artnb's own table: the hub did not answer",
    )


_KNOWN: dict[str, tuple[str, int, int, int, int, int, int, int, bool, int]] = {
    # name: kind, layers, hidden, inner, heads, kv_heads, head_dim, vocab, tied, longest context of the chat variant
    "SmolLM2-135M": ("llama", 30, 576, 1536, 9, 3, 64, 49152, True, 8192),
    "SmolLM2-360M": ("llama", 32, 960, 2560, 15, 5, 64, 49152, True, 8192),
    "SmolLM2-1.7B": ("llama", 24, 2048, 8192, 32, 32, 64, 49152, True, 8192),
    "Qwen2.5-0.5B": ("qwen2", 24, 896, 4864, 14, 2, 64, 151936, True, 32768),
    "Qwen2.5-1.5B": ("qwen2", 28, 1536, 8960, 12, 2, 128, 151936, True, 32768),
    "Qwen2.5-3B": ("qwen2", 36, 2048, 11008, 16, 2, 128, 151936, True, 32768),
    "Qwen2.5-7B": ("qwen2", 28, 3584, 18944, 28, 4, 128, 152064, False, 32768),
    "Qwen2.5-14B": ("qwen2", 48, 5120, 13824, 40, 8, 128, 152064, False, 32768),
    "Qwen3-0.6B": ("qwen3", 28, 1024, 3072, 16, 8, 128, 151936, True, 40960),
    "Qwen3-1.7B": ("qwen3", 28, 2048, 6144, 16, 8, 128, 151936, True, 40960),
    "Qwen3-4B": ("qwen3", 36, 2560, 9728, 32, 8, 128, 151936, True, 40960),
    "Qwen3-8B": ("qwen3", 36, 4096, 12288, 32, 8, 128, 151936, False, 40960),
    "Qwen3-14B": ("qwen3", 40, 5120, 17408, 40, 8, 128, 151936, False, 40960),
    "Llama-3.2-1B": ("llama", 16, 2048, 8192, 32, 8, 64, 128256, True, 131072),
    "Llama-3.2-3B": ("llama", 28, 3072, 8192, 24, 8, 128, 128256, True, 131072),
    "Llama-3.1-8B": ("llama", 32, 4096, 14336, 32, 8, 128, 128256, False, 131072),
    "gemma-3-1b": ("gemma3_text", 26, 1152, 6912, 4, 1, 256, 262144, True, 32768),
    "gemma-3-4b": ("gemma3_text", 34, 2560, 10240, 8, 4, 256, 262208, True, 131072),  # the text part
}
