"""What engine and trainer hold on one card, worked out from sizes alone: the arithmetic under the memory plan.

Touches no device, imports neither torch nor transformers, and refuses nothing: `plan` checks and explains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..config import LoraConfig
from ..engines.vllm_options import LORA_RANKS
from ..errors import ConfigError, nearest
from ..training.types import gpu_chunk
from .cards import GIB, Card
from .shapes import ModelShape, Precision

Sleep = Literal["auto", "always", "never"]

CONTEXT_BYTES = 384 << 20
"""Of the CUDA context: held before the engine starts to count."""
LIBRARY_BYTES = 256 << 20
"""Of cuBLAS, loaded kernels and their workspaces: the engine counts them to its share."""
GRAPH_BYTES = 768 << 10
"""Of one layer in the CUDA graphs of one batch size, captured with and without adapters.

vLLM 0.26, SmolLM2-135M (30 layers) on an H200: 0.65 MiB, derived from what stays on the device in sleep.
"""
SAMPLER_BYTES = 24
"""Per running request and vocabulary entry: logits, log-probs, probabilities (fp32), and sorted ones with an index."""
MARGIN, MARGIN_MOST = 0.06, 4 * GIB
"""Share of the card that stays free for fragmentation and for what is wrong in here, and its cap."""
COMFORTABLE_PASS = 8192
"""Tokens of one training pass below which it is worth it that the engine sleeps."""
LARGEST_PASS = 32768
LONGEST_DEFAULT = 32768
SHORTEST_DEFAULT = 1024
SIDE_BY_SIDE = 8
"""Full-length rollouts for which a context chosen here leaves room."""
BLOCK = 16
"""Tokens in a block of vLLM's KV cache."""

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# Bytes per weight. NF4 in blocks of 64 with one 8-bit scale each, these in blocks of 256 with one fp32 scale (QLoRA);
# FP8 with one fp32 scale per 128 × 128 block.
_PACKED = {"4-bit": 0.5 + 1 / 64 + 4 / (64 * 256), "fp8": 1 + 4 / (128 * 128)}
_LABELS = {
    "others": "held by other programs",
    "context": "CUDA context, libraries",
    "weights": "base weights",
    "graphs": "CUDA graphs",
    "kv_cache": "KV cache",
    "engine_adapters": "adapters in the engine",
    "workspace": "the engine's forward pass",
    "lora": "LoRA weights, fp32",
    "gradients": "gradients, fp32",
    "optimizer": "AdamW state",
    "activations": "activations of one pass",
    "logits": "logits of one chunk",
}


@dataclass(frozen=True)
class MemoryPlan:
    """What fits on a card, in bytes, and the settings that follow. `plan_memory` makes it.

        plan = plan_memory(shape_of("Qwen/Qwen2.5-7B-Instruct"), find_card("T4"), load_in_4bit=True)
        print(plan.table())

    All bytes are estimates; see `compare`.
    """

    shape: ModelShape
    card: Card
    lora: LoraConfig
    dtype: str  # computed in
    precision: Precision  # of the linear layers' weights
    context_length: int  # tokens of prompt and answer together
    max_running: int  # requests that the engine runs side by side
    sleep: bool  # whether the engine gives its KV cache up while the trainer works
    engine_shares_weights: bool
    cuda_graphs: bool
    batched_tokens: int  # in one forward pass of the engine
    gpu_memory_utilization: float  # share of the card's total that the engine may use, base weights included
    tokens_per_pass: int  # distinct tokens of one training pass; a whole row must fit
    activation_budget: int  # bytes that a training pass may use for activations and logits
    margin_bytes: int
    sampling: Mapping[str, int]  # bytes by what they are for, while rollouts run
    training: Mapping[str, int]  # the same while a step is made

    @property
    def kv_cache_bytes(self) -> int:
        return self.sampling["kv_cache"]

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values the cache holds."""
        return self.kv_cache_bytes // self.shape.kv_bytes(ITEM_BYTES[self.dtype])

    @property
    def sampling_bytes(self) -> int:
        return sum(self.sampling.values())

    @property
    def training_bytes(self) -> int:
        return sum(self.training.values())

    @property
    def free_bytes(self) -> int:
        """What the fuller of the two phases leaves beyond the margin."""
        return self.card.memory_bytes - self.margin_bytes - max(self.sampling_bytes, self.training_bytes)

    def table(self) -> str:
        """The plan as aligned text, in GiB, with the settings below it."""
        weights = {"16-bit": "", "4-bit": ", weights in 4-bit NF4", "fp8": ", weights in FP8"}[self.precision]
        lines = [f"{self.shape.name} on {self.card.name}, {gib(self.card.memory_bytes)} GiB: {self.dtype}{weights}"]
        rows = [
            (label, *(gib(phase[key]) if phase.get(key) else "–" for phase in (self.sampling, self.training)))
            for key, label in _LABELS.items()
            if self.sampling.get(key) or self.training.get(key)
        ]
        free = self.card.memory_bytes
        totals = [
            ("together", gib(self.sampling_bytes), gib(self.training_bytes)),
            ("free", gib(free - self.sampling_bytes), gib(free - self.training_bytes)),
        ]
        lines += _aligned([("GiB", "sampling", "training"), *rows, *totals])
        full = self.kv_tokens // self.context_length
        asleep = "asleep" if self.sleep else "awake"
        lines += [
            f"context_length={self.context_length}, max_running={self.max_running}: the KV cache holds "
            f"{self.kv_tokens:,} tokens, {full} rollout{'s' if full != 1 else ''} of full length",
            f"the engine is {asleep} while training; gpu_memory_utilization={self.gpu_memory_utilization}, "
            f"CUDA graphs {'on' if self.cuda_graphs else 'off'}, LoRA rank {self.lora.r}, "
            f"{self.tokens_per_pass:,} tokens in a training pass",
            f"kept free: at least {gib(self.margin_bytes)} GiB. Sizes from {self.shape.source}",
        ]
        return "\n".join(lines)

    def compare(self, measured: Mapping[str, int]) -> str:
        """Planned beside used, as aligned text; a sentence for all that took more than was planned.

        `measured`: bytes under the keys of `sampling` and `training`, and under "sampling" and "training" for the
        whole phases. Raises: ConfigError for another key.
        """
        planned = {
            key: max(self.sampling.get(key, 0), self.training.get(key, 0)) for key in (*self.sampling, *self.training)
        } | {"sampling": self.sampling_bytes, "training": self.training_bytes}
        rows, over = [("GiB", "planned", "used", "difference")], []
        for key, used in measured.items():
            if key not in planned:
                raise ConfigError(f"MemoryPlan.compare: no {key!r} is planned{nearest(key, planned)}")
            label = _LABELS.get(key, f"all while {key}")
            more = used - planned[key]
            rows.append((label, gib(planned[key]), gib(used), f"{more / GIB:+.2f}"))
            if more > 0:
                over.append(f"{label} took {gib(used)} GiB where {gib(planned[key])} were planned")
        lines = _aligned(rows)
        if over:
            lines.append(
                f"More than planned: {'; '.join(over)}. {gib(self.margin_bytes)} GiB are kept free for that; "
                "if it was more, choose a shorter context_length or a smaller max_running"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class Request:
    """The arguments of `plan_memory`, checked there."""

    shape: ModelShape
    card: Card
    context_length: int | None
    lora: LoraConfig
    rollouts: int
    max_running: int
    dtype: str | None
    load_in_4bit: bool
    load_in_fp8: bool
    engine_shares_weights: bool
    sleep: Sleep
    gpu_memory_utilization: float | None
    max_loras: int
    chunk: int | None
    batched_tokens: int | None
    cuda_graphs: bool | None
    used_by_others: int

    @property
    def precision(self) -> Precision:
        return "4-bit" if self.load_in_4bit else "fp8" if self.load_in_fp8 else self.shape.stored


@dataclass(frozen=True)
class Shortage:
    """A request that does not fit: what is short, the bytes it needs at least, and the context that was tried."""

    phase: str
    needed: int
    context_length: int


def solve(request: Request) -> MemoryPlan | Shortage:
    """The plan, its context chosen where none was asked for; or by how much the nearest to it fails."""
    if request.context_length is not None:
        return _fit(request, request.context_length)
    lengths = [min(request.shape.max_position_embeddings, LONGEST_DEFAULT)]
    while lengths[-1] >= 2 * SHORTEST_DEFAULT:
        lengths.append(lengths[-1] // 2)
    tried = [_fit(request, length) for length in lengths]
    plans = [plan for plan in tried if isinstance(plan, MemoryPlan)]
    roomy = [plan for plan in plans if plan.kv_tokens >= min(SIDE_BY_SIDE, plan.max_running) * plan.context_length]
    return next(iter(roomy or plans), tried[-1])


def _fit(request: Request, context: int) -> MemoryPlan | Shortage:
    shape, card, lora = request.shape, request.card, request.lora
    dtype = request.dtype or card.dtype
    item = ITEM_BYTES[dtype]
    running = min(request.max_running, request.rollouts)
    margin = margin_bytes(card)
    limit = card.memory_bytes - margin
    batched = request.batched_tokens or max(card.batched_tokens, running)
    graphs = card.cuda_graphs if request.cuda_graphs is None else request.cuda_graphs

    weights = _weight_bytes(shape, request.precision, item)
    copies = 1 if request.engine_shares_weights else 2
    adapter = shape.adapter_parameters(lora)
    # vLLM 0.26 makes its slots for all linear layers whatever the adapter names, and in some models for the embeddings.
    every = sum(linear.inputs + linear.outputs for linear in shape.linears) + 2 * (shape.vocab + shape.hidden)
    slot = every * min(rank for rank in LORA_RANKS if rank >= lora.r)
    # One layer at a time is unpacked for its matrix product.
    unpacked = max(linear.weights for linear in shape.linears) * item if request.precision != "16-bit" else 0
    always = {
        "others": request.used_by_others,
        "context": CONTEXT_BYTES + LIBRARY_BYTES,
        "weights": copies * weights,
        "graphs": _capture_sizes(running, batched) * shape.layers * GRAPH_BYTES if graphs else 0,
        "engine_adapters": request.max_loras * slot * item,
        "lora": 4 * adapter,
        "optimizer": 8 * adapter,
    }
    widest = 4 * shape.hidden + (shape.heads + 2 * shape.kv_heads) * shape.head_dim + 3 * shape.inner
    workspace = batched * widest * item + running * shape.vocab * SAMPLER_BYTES + unpacked
    engine = weights + always["graphs"] + always["engine_adapters"] + workspace + LIBRARY_BYTES

    rounded = 2 * item * adapter  # the adapter in the dtype that is computed in, and its gradients
    step = always | {
        "gradients": 4 * adapter + rounded,
        "logits": 3 * 4 * (request.chunk or gpu_chunk(shape.vocab)) * shape.vocab,
    }
    # Two copies, and level-1 sleep: the engine's own goes to the host's memory.
    resting = step if copies == 1 else step | {"weights": weights}
    token = shape.activation_bytes(item)

    def activations(tokens: int) -> int:
        # After the pass AdamW holds one more copy of the adapter for a moment; it is seldom the larger.
        return max(tokens * token + unpacked, 4 * adapter - step["logits"])

    def needed(held: Mapping[str, int], tokens: int) -> int:
        return sum(held.values()) + activations(tokens)

    block = BLOCK * shape.kv_bytes(item)
    one = math.ceil(context / BLOCK) * block
    wanted = running * one
    room = limit - sum(always.values()) - workspace
    forced = request.gpu_memory_utilization is not None
    if request.gpu_memory_utilization is not None:  # the engine takes all of its share, wanted or not
        given = int(request.gpu_memory_utilization * card.memory_bytes)
        wanted = (given - engine) // block * block
        if wanted < one:
            phase = (
                f"the engine, to which gpu_memory_utilization={request.gpu_memory_utilization} gives {gib(given)} GiB,"
            )
            return Shortage(phase, engine + one, context)
    both = wanted <= room and needed(step, max(context, COMFORTABLE_PASS)) + wanted <= limit
    asleep = request.sleep == "always" or (request.sleep == "auto" and not both)
    least = wanted if forced else one
    at_least = {
        "sampling": limit - room + least,
        "training": needed(resting, context) if asleep else needed(step, context) + least,
    }
    fuller = max(at_least, key=at_least.__getitem__)
    if at_least[fuller] > limit:
        return Shortage(fuller, at_least[fuller], context)
    kv = wanted
    if not forced:
        kv = min(wanted, room)
        if not (asleep or both):
            # Awake but crowded: beyond one context and one row, half for each. What a largest pass leaves is the
            # cache's.
            beyond = limit - needed(step, context) - one
            kv = min(kv, one + max(beyond // 2, beyond - activations(LARGEST_PASS) + activations(context)))
        kv = kv // block * block

    held = resting if asleep else step | {"kv_cache": kv}
    budget = limit - sum(held.values())
    fits = min((budget - unpacked) // token, LARGEST_PASS)
    tokens = max(context, 1 << (fits.bit_length() - 1))
    share = request.gpu_memory_utilization or math.ceil((engine + kv) / card.memory_bytes * 1e4) / 1e4
    return MemoryPlan(
        shape=shape,
        card=card,
        lora=lora,
        dtype=dtype,
        precision=request.precision,
        context_length=context,
        max_running=running,
        sleep=asleep,
        engine_shares_weights=request.engine_shares_weights,
        cuda_graphs=graphs,
        batched_tokens=batched,
        gpu_memory_utilization=min(share, 1.0),
        tokens_per_pass=tokens,
        activation_budget=budget + step["logits"],
        margin_bytes=margin,
        sampling=always | {"kv_cache": kv, "workspace": workspace},
        training=held | {"activations": activations(tokens)},
    )


def _weight_bytes(shape: ModelShape, precision: Precision, item: int) -> int:
    """Of one copy of the base: embeddings, output head and norms stay in the dtype that is computed in."""
    packed = shape.linear_weights if precision != "16-bit" else 0
    return (shape.parameters - packed) * item + math.ceil(packed * _PACKED.get(precision, 0))


def _capture_sizes(running: int, batched: int) -> int:
    """Batch sizes that vLLM (0.13 to 0.26) captures graphs for: 1, 2, 4, then every 8th to 256, every 16th to 512."""
    largest = min(2 * running, 512, batched)
    few = sum(size <= largest for size in (1, 2, 4))
    return few + len(range(8, min(largest + 1, 256), 8)) + len(range(256, largest + 1, 16))


def margin_bytes(card: Card) -> int:
    """What stays free on a card."""
    return min(int(MARGIN * card.memory_bytes), MARGIN_MOST)


def gib(amount: int) -> str:
    """GiB for people, without the unit."""
    return f"{amount / GIB:.2f}" if abs(amount) < 10 * GIB else f"{amount / GIB:.1f}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """First column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
