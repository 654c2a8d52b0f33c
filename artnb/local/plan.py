"""The memory plan: how engine and trainer share one card, before anything is loaded.

Where it does not fit, the error names a way out that was itself planned and fits. The arithmetic is in `budget`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ..config import LoraConfig, check_choice, check_number
from ..engines.vllm_options import LORA_RANKS
from ..errors import ConfigError
from .budget import ITEM_BYTES, MemoryPlan, Request, Shortage, Sleep, gib, margin_bytes, solve
from .cards import CARDS, Card
from .shapes import ModelShape

__all__ = ["MemoryPlan", "plan_memory"]

_NO_FP16 = ("gemma2", "gemma3", "gemma3_text", "glm4")  # their activations leave its range; vLLM refuses it too


def plan_memory(
    shape: ModelShape,
    card: Card,
    *,
    context_length: int | None = None,
    lora: LoraConfig | None = None,
    rollouts: int = 256,
    max_running: int = 256,
    dtype: str | None = None,
    load_in_4bit: bool = False,
    load_in_fp8: bool = False,
    engine_shares_weights: bool = True,
    sleep: Sleep = "auto",
    gpu_memory_utilization: float | None = None,
    max_loras: int = 2,
    chunk: int | None = None,
    batched_tokens: int | None = None,
    cuda_graphs: bool | None = None,
    used_by_others: int = 0,
) -> MemoryPlan:
    """Share a card among engine and trainer. Nothing is loaded.

    `context_length` None: the longest power of two, up to 32,768 and what the model was made for, at which 8 rollouts
    of full length fit side by side. `rollouts`: group size × groups; at most `max_running` of them run at a time, and
    the KV cache wants room for all of these at full length. `sleep="auto"`: only where that cache and the trainer do
    not fit together. `dtype`, `batched_tokens` (of one forward pass of the engine) and `cuda_graphs` None: by the card.
    `max_loras`: adapters that the engine serves at a time. `chunk`: positions whose logits the trainer holds (None: by
    the vocabulary).
    `used_by_others`: bytes of the card that other programs hold.

    Raises: ConfigError for an option that the card or the model cannot honour, and where it does not fit, with the
    numbers and a way out that does.
    """
    request = Request(
        shape,
        card,
        context_length,
        lora or LoraConfig(),
        rollouts,
        max_running,
        dtype,
        load_in_4bit,
        load_in_fp8,
        engine_shares_weights,
        sleep,
        gpu_memory_utilization,
        max_loras,
        chunk,
        batched_tokens,
        cuda_graphs,
        used_by_others,
    )
    _check_values(request)
    problem = _problem(request)
    if problem:
        raise ConfigError(problem)
    found = solve(request)
    if isinstance(found, Shortage):
        raise ConfigError(_refusal(request, found))
    return found


def _check_values(request: Request) -> None:
    me, shape = "plan_memory", request.shape
    for option in ("rollouts", "max_running", "max_loras"):
        check_number(me, option, getattr(request, option), low=1, whole=True)
    if request.chunk is not None:
        check_number(me, "chunk", request.chunk, low=1, whole=True)
    check_number(me, "used_by_others", request.used_by_others, low=0, whole=True)
    check_choice(me, "sleep", request.sleep, ("auto", "always", "never"))
    if request.dtype is not None:
        check_choice(me, "dtype", request.dtype, tuple(ITEM_BYTES))
    if request.context_length is not None:
        check_number(me, "context_length", request.context_length, low=2, whole=True)
        if request.context_length > shape.max_position_embeddings:
            raise ConfigError(
                f"{me}: context_length={request.context_length} is longer than the {shape.max_position_embeddings} "
                f"tokens that {shape.name} was made for"
            )
    if request.batched_tokens is not None:
        check_number(me, "batched_tokens", request.batched_tokens, low=request.max_running, whole=True)
    if request.gpu_memory_utilization is not None:
        check_number(me, "gpu_memory_utilization", request.gpu_memory_utilization, above=0.0, high=1.0)
    check_number("LoraConfig", "r", request.lora.r, high=LORA_RANKS[-1], whole=True)  # vLLM serves no larger one


def _problem(request: Request) -> str | None:
    """Why this card cannot do what is asked, whatever its memory; None when it can."""
    shape, card = request.shape, request.card
    has = f"{card.name} has {'.'.join(map(str, card.capability))}"
    if request.load_in_4bit and request.load_in_fp8:
        return "load_in_4bit and load_in_fp8 exclude each other; leave one out"
    if shape.stored not in ("16-bit", request.precision):
        return f"{shape.name} holds its weights in {shape.stored}; leave load_in_4bit and load_in_fp8 out"
    if request.precision == "fp8" and not card.fp8:
        instead = "use load_in_4bit=True" if request.load_in_fp8 else "take the model with 16-bit weights"
        return f"FP8 weights need compute capability 8.9 or newer (Ada, Hopper), and {has}; {instead}"
    if request.dtype == "bfloat16" and card.dtype != "bfloat16":
        return f"dtype='bfloat16' needs compute capability 8.0 or newer, and {has}; use dtype='float16' or leave it out"
    if (request.dtype or card.dtype) == "float16" and shape.kind in _NO_FP16:
        return (
            f"{shape.name}: the activations of {shape.kind} leave float16's range; use dtype='float32', or a card with "
            "bfloat16 (compute capability 8.0 or newer)"
        )
    return None


def _refusal(request: Request, short: Shortage) -> str:
    card = request.card
    kept = f"{gib(margin_bytes(card))} of them kept free"
    if request.used_by_others:
        kept += f" and {gib(request.used_by_others)} held by other programs"
    ways = list(_ways_out(request, short))
    way = f"use {', or '.join(ways)}" if ways else "no known card and no smaller setting is enough"
    return (
        f"{request.shape.name} with context_length={short.context_length} does not fit: {short.phase} needs "
        f"{gib(short.needed)} GiB at least; {card.name} has {gib(card.memory_bytes)} GiB, {kept}; {way}"
    )


def _ways_out(request: Request, short: Shortage) -> Iterator[str]:
    """Changes of one option with which it was planned again and fits; of two, or another card, where there is none."""

    def fits(changed: Request) -> bool:
        return _problem(changed) is None and isinstance(solve(changed), MemoryPlan)

    def single() -> Iterator[str]:
        if request.gpu_memory_utilization is not None and fits(replace(request, gpu_memory_utilization=None)):
            yield "no gpu_memory_utilization, so that it is planned"
        if request.sleep == "never" and fits(replace(request, sleep="auto")):
            yield "sleep='auto'"
        if not request.engine_shares_weights and fits(replace(request, engine_shares_weights=True)):
            yield "engine_shares_weights=True"
        for option, changed in packed:
            if fits(changed):
                yield option
        yield from _smaller(request, short.context_length, fits)

    packed = []
    if request.shape.stored == "16-bit" and not request.load_in_4bit:
        instead = " instead of load_in_fp8" if request.load_in_fp8 else ""
        packed.append((f"load_in_4bit=True{instead}", replace(request, load_in_4bit=True, load_in_fp8=False)))
        if not request.load_in_fp8:
            packed.append(("load_in_fp8=True", replace(request, load_in_fp8=True)))
    found = list(single())
    if not found:
        found = [
            f"{option} with {smaller}"
            for option, changed in packed
            for smaller in _smaller(changed, short.context_length, fits)
        ]
    if not found:
        found = [f"a card like {card.name}" for card in CARDS if fits(replace(request, card=card))][:1]
    yield from found


def _smaller(request: Request, context: int, fits: Callable[[Request], bool]) -> Iterator[str]:
    """The largest context (in steps of 256), the largest max_running and LoRA rank (by halves) with which it fits."""
    low, high = 0, (context - 1) // 256  # in steps; low fits or is nothing
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(replace(request, context_length=256 * middle)) else (low, middle - 1)
    if low:
        yield f"context_length<={256 * low}"
    changed = request
    while changed.max_running > 1:
        changed = replace(changed, max_running=changed.max_running // 2)
        if fits(changed):
            yield f"max_running<={changed.max_running}"
            break
    changed = request
    while changed.lora.r > 1:
        changed = replace(changed, lora=replace(changed.lora, r=changed.lora.r // 2))
        if fits(changed):
            yield f"LoraConfig(r={changed.lora.r})"
            break
