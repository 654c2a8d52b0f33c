"""The policy: one frozen base model with LoRA adapters by name, and the log-probs of packs under them.

Engine and trainer share these weights; whoever computes holds `lock`. Does not sample and does not
know about losses or optimizers.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from peft import PeftModel
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..attention import PackAttend, flat_inputs
from ..config import LoraConfig, check_choice
from ..errors import ConfigError, ModelError
from ..memory import available_bytes
from ..packed_linear import PackedLinear
from .adapters import Adapters
from .base_model import BaseModel, Weights, load_base
from .fast_norms import use_fused_norms
from .flex_tree import FlexTreeAttend
from .layers import LayerPasses, start_workers
from .logprobs import OutputHead, gather_logprobs
from .pack import build_packs
from .tree_attention import TreeAttend
from .types import Pack, Row, gpu_chunk

CPU_ACTIVATION_BYTES = 2 << 30
"""On CPU a step keeps at most this much of activations (or half of what is free): the machine is also the user's."""
GPU_ACTIVATION_BYTES = 1 << 30
"""On a GPU a pass may always take this much, where as much is free."""
GPU_LAUNCHES = 260e9
"""Weights × tokens that a GPU gets done while the host launches one layer's kernels, forward and backward (beside an
H200 3 to 4 ms). A pass over fewer tokens takes no less time: the GPU waits for the host."""
LARGEST_PASS = 32768
"""Tokens."""
COMPILED_FROM = 500_000_000
"""Weights from which on compiling the layers (a minute, once) is worth it by itself."""
CPU_CHUNK = 256
"""Positions whose logits exist at a time on a CPU."""
WARM_UP_TOKENS = 1024


class Policy:
    """A base model with adapters. Made by `load_policy`.

    `gradient_checkpointing`: True recomputes every layer's activations in the backward pass, False none;
    "auto" recomputes as many layers as the memory for activations asks for (`activation_gib` GiB, by default what
    `activation_budget` says), and the MLPs of compiled ones always. `spare_share`: of a GPU's free memory, which passes
    may take where they would be content with less. `compile_layers`: see layers.py; "auto" compiles those of larger
    models on an Ampere GPU or a newer one. `chunk`: positions whose logits exist at a time; None is 256, and more on a
    GPU.
    """

    def __init__(
        self,
        base: BaseModel,
        lora: LoraConfig,
        *,
        gradient_checkpointing: bool | Literal["auto"] = "auto",
        activation_gib: float | None = None,
        spare_share: float = 0.0,
        compile_layers: bool | Literal["auto"] = "auto",
        chunk: int | None = None,
    ) -> None:
        for option, value in (("gradient_checkpointing", gradient_checkpointing), ("compile_layers", compile_layers)):
            if not isinstance(value, bool):
                check_choice("Policy", option, value, ("auto",))
        self.name = base.name
        self.tokenizer: Any = base.tokenizer
        self.device = base.device
        self.dtype = base.dtype
        self.context_length = base.context_length
        self.eos_token_ids = base.eos_token_ids
        self.gradient_checkpointing = gradient_checkpointing
        self.base: PreTrainedModel = base.model  # the causal language model, PEFT's layers inside
        self._adapters = Adapters(base, lora)
        self._text_config = base.model.config.get_text_config()
        self._decoder: torch.nn.Module = base.model.get_decoder()
        self._head = OutputHead(base.model, self._text_config)
        layers = [m for m in self._decoder.modules() if isinstance(m, GradientCheckpointingLayer)]
        cuda = base.device.type == "cuda"
        self.chunk = chunk or (gpu_chunk(int(self._text_config.vocab_size)) if cuda else CPU_CHUNK)
        # Triton's kernels need Ampere; TreeAttend runs everywhere.
        self._flex = cuda and torch.cuda.get_device_capability(base.device) >= (8, 0)
        if cuda:
            use_fused_norms(self._decoder)
        modules = list(self._decoder.modules())
        self._windows = {getattr(m, "sliding_window", None) for m in [self._text_config, *modules]} | {None}
        self._activation_bytes = None if activation_gib is None else int(activation_gib * 2**30)
        self._weights: int = sum(p.numel() for n, p in base.model.named_parameters() if "lora_" not in n)
        self._spare_share = spare_share
        self._cold = True
        self._layers = LayerPasses(
            layers,
            base.device,
            compiled=self._compiles(compile_layers, modules),
            recompute_mlp=gradient_checkpointing is not False,
        )
        if self._layers.compiled:
            start_workers(wait=False)
        self._check()

    @property
    def model(self) -> PeftModel:
        """The PEFT-wrapped model."""
        return self._adapters.model

    @property
    def lock(self) -> threading.RLock:
        """Held by whoever computes with the weights or changes them."""
        return self._adapters.lock

    def adapters(self) -> list[str]:
        """Names of the adapters that are loaded."""
        return self._adapters.names()

    def add_adapter(self, name: str, lora: LoraConfig | None = None) -> None:
        """Add an adapter that changes nothing yet. Raises: ModelError when the name is taken."""
        self._adapters.add(name, lora)

    def load_adapter(self, name: str, path: Path | str) -> None:
        """Load a PEFT adapter folder, in place of what has that name. Raises: CheckpointError."""
        self._adapters.load(name, Path(path))

    def save_adapter(self, name: str, path: Path | str) -> None:
        """Write the adapter as a PEFT adapter folder. Raises: ModelError for an unknown name."""
        self._adapters.save(name, Path(path))

    def drop_adapter(self, name: str) -> None:
        """Forget an adapter. Unknown names are ignored."""
        self._adapters.drop(name)

    def adapter_key(self, name: str) -> str:
        """PEFT's own name of an adapter, e.g. for its `adapter_names` argument."""
        return self._adapters.key(name)

    def adapter_parameters(self, name: str) -> dict[str, torch.nn.Parameter]:
        """The adapter's fp32 weights by their name in the model, in a fixed order."""
        return self._adapters.parameters(name)

    def using(self, name: str | None, *, train: bool = False) -> AbstractContextManager[None]:
        """Forward passes in the block use this adapter (None: the base alone). Holds `lock`. See `Adapters.use`."""
        return self._adapters.use(name, train=train)

    def without_adapter(self) -> AbstractContextManager[None]:
        """Forward passes in the block use the base alone. Holds `lock`."""
        return self._adapters.use(None)

    def token_logprobs(
        self,
        pack: Pack,
        *,
        adapter: str | None,
        entropy: bool = False,
        grad: bool = False,
        entropy_grad: bool = True,
        attend: PackAttend | None = None,
        recomputed: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probs of the pack's sampled tokens at their temperatures, and the entropy there: [R, T] fp32, in nats.

        0 outside `mask_RT`. `adapter=None` is the base. With `grad`, both (the entropy only with
        `entropy_grad`) carry gradients to the adapter's weights; call it, and backward, inside
        `using(adapter, train=True)`. Pass the same `attend` for every pass over a pack: it holds the masks.
        `recomputed`: layers whose activations are not kept; None asks `recomputed_layers`.
        """
        attend = attend or self.attend(pack)
        padding = (0, attend.size - len(pack.token_ids_S))
        ids_S, place_S = (
            torch.from_numpy(np.pad(x_S, padding)).to(self.device) for x_S in (pack.token_ids_S, pack.position_ids_S)
        )
        layers: AbstractContextManager[None] = nullcontext()
        if grad:
            layers = self._layers.training(self.recomputed_layers(len(ids_S)) if recomputed is None else recomputed)
        with self.using(adapter, train=grad), torch.set_grad_enabled(grad), layers:
            if grad:
                self._adapters.round(static=self._layers.compiled)
            else:
                self._adapters.unround()
            output = self._decoder(**flat_inputs(ids_S, place_S, attend))
            return gather_logprobs(
                self._head,
                output.last_hidden_state[0],
                pack,
                entropy=entropy,
                entropy_grad=grad and entropy_grad,
                chunk=max(1, self.chunk),
                compiled=grad and self._layers.compiled,
            )

    @property
    def cold(self) -> bool:
        """Whether the first pass with gradients has something to compile: `warm_up`."""
        return self._cold and self._layers.compiled

    def warm_up(self, adapter: str) -> None:
        """Compile what passes with gradients run, once, on a small pack; where that fails they go on without.

        Also measures what a layer keeps, for `pack_sizes`. Does nothing where nothing is compiled.
        """
        if not self.cold:
            return
        start_workers(wait=True)
        row_S = np.arange(WARM_UP_TOKENS) % int(self._text_config.vocab_size)
        sampled_S = row_S >= WARM_UP_TOKENS - 64
        ones_S = np.ones(WARM_UP_TOKENS, np.float32)
        (pack,) = build_packs([Row(row_S, sampled_S, ones_S, ones_S)], WARM_UP_TOKENS)
        weights = self.adapter_parameters(adapter).values()
        try:
            with self.using(adapter, train=True):
                logp_RT, _ = self.token_logprobs(pack, adapter=adapter, grad=True, entropy=True, entropy_grad=False)
                torch.autograd.grad(logp_RT.sum(), list(weights))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # torch's compiler raises what its parts do; the packs' own pass tells its faults
            self._layers.give_up_compiling(error)
        self._cold = False  # not when it was interrupted

    def attend(self, pack: Pack) -> PackAttend:
        """The attention of this pack, for all passes over it."""
        if self._flex:
            return FlexTreeAttend(pack.segments, self.device, self._windows)
        return TreeAttend(pack.segments, self.device)

    def recomputed_layers(self, tokens: int, budget: int | None = None) -> int:
        """How many layers' activations a pass with gradients over so many tokens computes again, not keeps.

        `budget`: what `activation_budget` said, for who asks often.
        """
        layers = len(self._layers)
        if self.gradient_checkpointing != "auto":
            return layers if self.gradient_checkpointing else 0
        budget = self.activation_budget() if budget is None else budget
        layer, one_input = max(1, tokens * self._layer_bytes()), tokens * self._input_bytes() // max(1, layers)
        budget -= tokens * self._work_bytes()
        if layer * layers <= budget:
            return 0
        # A recomputed layer keeps its input, and one of them at a time has all its activations.
        kept = max(0, budget - layers * one_input - layer) // max(1, layer - one_input)
        return max(0, layers - kept)

    def pack_sizes(self, budget: int) -> list[int]:
        """Distinct tokens of one pass with gradients that are worth a try: from no layer recomputed to all.

        Powers of two and what lies halfway, so that a little more or less free memory does not change the packs from
        run to run.
        """
        layer = self._layer_bytes()
        kept = budget // (len(self._layers) * layer + self._work_bytes())
        recomputed = min(budget // (self._input_bytes() + layer + self._work_bytes()), LARGEST_PASS)
        sizes = [part << bits for bits in range(9, 15) for part in (2, 3)]
        least = max([size for size in sizes if size <= min(kept, recomputed)], default=sizes[0])
        tried = [size for size in sizes if least <= size <= max(least, recomputed)]
        # Larger ones only double: each is tried, and what they are for, a long prompt that many rows share, is rare.
        return tried[:4] + [size for size in tried[4:] if size & (size - 1) == 0]

    def pass_cost(self, tokens: int, budget: int) -> float:
        """What a pass with gradients over so many tokens costs, in tokens computed forward and backward.

        Recomputing a layer is one forward pass more, a third of forward and backward together.
        """
        launches = 0.0
        if self.device.type == "cuda":
            launches = GPU_LAUNCHES * len(self._layers) / max(1, self._weights)
        return max(launches, tokens) * (1.0 + self.recomputed_layers(tokens, budget) / max(1, len(self._layers)) / 3.0)

    def activation_budget(self, tokens: int = 0) -> int:
        """Bytes that a pass with gradients may take now, beyond weights and gradients.

        `tokens`: on a GPU as much as a pass over so many that recomputes every layer, where there is room.
        """
        free = available_bytes(self.device)
        if self._activation_bytes is not None:
            return min(self._activation_bytes, free)
        if self.device.type == "cpu":
            return min(CPU_ACTIVATION_BYTES, free // 2)
        wanted = tokens * (self._input_bytes() + self._plain_layer_bytes())
        return min(max(GPU_ACTIVATION_BYTES, wanted, int(free * self._spare_share)), free * 6 // 10)

    def _compiles(self, asked: bool | str, modules: Sequence[torch.nn.Module]) -> bool:
        packed = any(isinstance(m, PackedLinear) for m in modules)
        if asked is True and (packed or not self._flex):
            raise ConfigError(
                "compile_layers=True needs a CUDA device of compute capability 8.0 or newer and weights that are not "
                'packed (load_in_4bit, load_in_fp8); compile_layers="auto" does without where it cannot be'
            )
        weights = sum(p.numel() for p in self.base.parameters())
        return bool(asked) and self._flex and not packed and (asked is True or weights >= COMPILED_FROM)

    def _input_bytes(self) -> int:
        """Bytes of the inputs of all layers, per token."""
        total: int = self._text_config.hidden_size * self.dtype.itemsize * len(self._layers)
        return total

    def _layer_bytes(self) -> int:
        """Bytes that one layer keeps per token for its backward pass: as seen, or an estimate from its operations."""
        seen = self._layers.bytes_per_token
        return self._plain_layer_bytes() if seen is None else seen

    def _plain_layer_bytes(self) -> int:
        config, item = self._text_config, self.dtype.itemsize
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        queries = heads * head_dim
        kv = 2 * (getattr(config, "num_key_value_heads", None) or heads) * head_dim
        inner = getattr(config, "intermediate_size", 4 * config.hidden_size)
        return int((6 * config.hidden_size + 3 * queries + 2 * kv + 4 * inner) * item)

    def _work_bytes(self) -> int:
        """Bytes per token that the backward pass of an MLP takes which is computed again: its products, and theirs."""
        inner = getattr(self._text_config, "intermediate_size", 4 * self._text_config.hidden_size)
        return 6 * inner * self.dtype.itemsize if self._layers.recomputes_mlps else 0

    def _check(self) -> None:
        """Compare a small tree with the model's ordinary forward pass.

        Raises: ModelError when they differ, i.e. for an architecture whose attention or output layer is unlike.
        """
        vocabulary = self._text_config.vocab_size
        rng = np.random.default_rng(0)
        ids_RS = rng.integers(0, vocabulary, (2, 8))
        ids_RS[1, :4], ids_RS[1, 4] = ids_RS[0, :4], (ids_RS[0, 4] + 1) % vocabulary
        sampled_S = np.arange(8) > 0
        ones_S = np.ones(8, np.float32)
        (pack,) = build_packs([Row(ids_S, sampled_S, ones_S, ones_S) for ids_S in ids_RS], 16)
        flat_RT, _ = self.token_logprobs(pack, adapter=None)
        with self.without_adapter(), torch.no_grad():
            ids = torch.from_numpy(ids_RS).to(self.device)
            logits_RSV = self.base(input_ids=ids, use_cache=False).logits.float()
        plain_RT = logits_RSV.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
        error = float((flat_RT - plain_RT).abs().max())
        if not error <= (1e-3 if self.dtype == torch.float32 else 0.5):
            kind = type(self.base).__name__
            raise ModelError(
                f"{self.name}: {kind} cannot train in packs: log-probs of a small tree differ from its ordinary "
                f"forward pass by {error:.2g}. Models with ordinary softmax attention (Llama, Qwen, Gemma 3, …) can"
            )


def load_policy(
    base_model: str | Path,
    *,
    lora: LoraConfig,
    device: str = "auto",
    dtype: str = "auto",
    context_length: int | None = None,
    gradient_checkpointing: bool | Literal["auto"] = "auto",
    activation_gib: float | None = None,
    spare_share: float = 0.0,
    compile_layers: bool | Literal["auto"] = "auto",
    weights: Weights | None = None,
) -> Policy:
    """Load a base model from a folder or the hub and make it ready for adapters shaped like `lora`.

    `weights` gives an engine's tensors instead of loading them a second time.

        policy = load_policy("Qwen/Qwen3-0.6B", lora=LoraConfig(r=16))
        policy.add_adapter("my-agent")

    Raises: ModelError when there is no such model or it cannot train in packs; ConfigError for an option
    that cannot be honoured here.
    """
    base = load_base(base_model, device=device, dtype=dtype, context_length=context_length, weights=weights)
    return Policy(
        base,
        lora,
        gradient_checkpointing=gradient_checkpointing,
        activation_gib=activation_gib,
        spare_share=spare_share,
        compile_layers=compile_layers,
    )
