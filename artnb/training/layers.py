"""How the decoder's layers run in passes with gradients: compiled on a GPU, and some of them computed again backward.

Each layer's forward pass is compiled by itself, so that all layers of a model share one compilation, of any length of
pack. Compiled, a layer launches fewer kernels and keeps about half of the activations: what only follows from others
by cheap operations is computed again (https://docs.pytorch.org/docs/stable/torch.compiler.html; figures in LOG.md).
Passes without gradients run as they are.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ..memory import Trimmer

logger = logging.getLogger("artnb")


class LayerPasses:
    """The layers' forward passes are replaced when this is made, and are what they were outside `training`.

    `bytes_per_token`: what one layer's pass was seen to keep for the backward pass; None where that is not known.
    """

    def __init__(self, layers: Sequence[torch.nn.Module], device: torch.device, *, compiled: bool) -> None:
        self.compiled = compiled
        self.bytes_per_token: int | None = None
        self._device = device
        self._recomputed: int | None = None  # None outside `training`
        self._trim: Trimmer | None = None
        self._count = len(layers)
        for index, layer in enumerate(layers):
            layer.forward = _LayerForward(self, index, layer.forward)

    def __len__(self) -> int:
        return self._count

    @contextmanager
    def training(self, recomputed: int) -> Iterator[None]:
        """A pass with gradients in this block keeps no activations of the first `recomputed` layers."""
        before, self._recomputed = self._recomputed, recomputed
        self._trim = Trimmer(self._device)
        try:
            with _kept_share() if self.compiled else nullcontext():
                yield
        finally:
            self._recomputed = before

    def give_up_compiling(self, error: Exception) -> None:
        """Run the layers as they are from now on, and say why."""
        self.compiled = False
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        logger.warning(
            "the model's layers cannot be compiled here, so that training is slower and takes more memory: %s", reason
        )

    def run(self, index: int, layer: _LayerForward, hidden: torch.Tensor, args: Any, kwargs: Any) -> Any:
        if self._recomputed is None or not torch.is_grad_enabled():
            return layer.plain(hidden, *args, **kwargs)
        forward = layer.plain
        if self.compiled:
            forward = layer.compiled()
            if not hidden.requires_grad:  # else the first layer would need a compilation of its own
                hidden = hidden.detach().requires_grad_()
        if index < self._recomputed:
            return self._recompute(partial(forward, **kwargs), hidden, *args)
        if index + 1 == self._count and self._device.type == "cuda":
            return self._measure(partial(forward, **kwargs), hidden, *args)
        return forward(hidden, *args, **kwargs)

    def _recompute(self, forward: Callable[..., Any], *inputs: Any) -> Any:
        trim = self._trim
        assert trim is not None

        def trimmed(*again: Any) -> Any:  # runs in the forward pass and in the backward pass
            trim()
            return forward(*again)

        return checkpoint(trimmed, *inputs, use_reentrant=False, preserve_rng_state=False)

    def _measure(self, forward: Callable[..., Any], hidden: torch.Tensor, *args: Any) -> Any:
        before = torch.cuda.memory_allocated(self._device)
        out = forward(hidden, *args)
        tokens = hidden.shape[-2]
        if tokens >= 1024:  # of shorter ones the weights' own copies are a large part
            self.bytes_per_token = (torch.cuda.memory_allocated(self._device) - before) // tokens
        return out


def start_workers(*, wait: bool) -> None:
    """Start the processes in which torch compiles kernels; `wait` until they are there.

    Before they are, torch compiles one kernel after the other in this process. A torch that has other names for it
    goes without.
    """
    from torch._inductor.async_compile import AsyncCompile

    getattr(AsyncCompile, "wait_pool_ready" if wait else "use_process_pool", lambda: None)()


def _kept_share() -> AbstractContextManager[None]:
    """What is compiled in this block keeps 7/10 of the activations: all that need a matrix product to be had again."""
    import torch._functorch.config as compiler

    share: AbstractContextManager[None] = compiler.patch(activation_memory_budget=0.7)
    return share


def compile_options() -> dict[str, Any]:
    """For torch.compile on a GPU."""
    # What launches the kernels is compiled, too, where there is a C++ compiler: a small pack is bound by it. None of it
    # computes on the CPU, whose vector instructions torch would else try one by one, each in a process that imports it.
    cpp = any(map(shutil.which, ("c++", "g++", "clang++")))
    return {"cpp_wrapper": cpp, "cpp.vec_isa_ok": True}


class _LayerForward:
    """One layer's forward pass."""

    def __init__(self, passes: LayerPasses, index: int, plain: Callable[..., Any]) -> None:
        self.plain = plain
        self._compiled: Callable[..., Any] | None = None
        self._passes = passes
        self._index = index

    def compiled(self) -> Callable[..., Any]:
        if self._compiled is None:  # torch imports its compiler only where it is used
            self._compiled = torch.compile(self.plain, dynamic=True, options=compile_options())
        return self._compiled

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self._passes.run(self._index, self, hidden_states, args, kwargs)
