"""How the decoder's layers run in passes with gradients: compiled on a GPU, and some of them computed again backward.

Each layer's forward pass is compiled by itself, so that all layers of a model share one compilation, of any length of
pack. Compiled, a layer launches fewer kernels and keeps a fifth of the activations: the backward pass computes its MLP
again, less the last product, and what follows from the rest by cheap operations
(https://docs.pytorch.org/docs/stable/torch.compiler.html; figures in LOG.md). Passes without gradients run as they are.
"""

from __future__ import annotations

import functools
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

    `recompute_mlp`: compiled layers keep no activations of their MLPs. `bytes_per_token`: what one layer's pass was
    seen to keep for the backward pass; None where that is not known.
    """

    def __init__(
        self, layers: Sequence[torch.nn.Module], device: torch.device, *, compiled: bool, recompute_mlp: bool = True
    ) -> None:
        self.compiled = False
        self._recompute_mlp = recompute_mlp
        self._mlps = [m for layer in layers if isinstance(m := getattr(layer, "mlp", None), torch.nn.Module)]
        self.bytes_per_token: int | None = None
        self._device = device
        self._recomputed: int | None = None  # None outside `training`
        self._trim: Trimmer | None = None
        self._count = len(layers)
        for index, layer in enumerate(layers):
            layer.forward = _LayerForward(self, index, layer.forward)
        if compiled:
            self.compile()

    def __len__(self) -> int:
        return self._count

    @property
    def recomputes_mlps(self) -> bool:
        return self.compiled and self._recompute_mlp

    @contextmanager
    def training(self, recomputed: int) -> Iterator[None]:
        """A pass with gradients in this block keeps no activations of the first `recomputed` layers."""
        before, self._recomputed = self._recomputed, recomputed
        self._trim = Trimmer(self._device)
        try:
            with _cheap_again() if self.compiled else nullcontext():
                yield
        finally:
            self._recomputed = before

    def compile(self) -> None:
        """Compile the layers where they next run with gradients."""
        self.compiled = True
        for mlp in self._mlps if self._recompute_mlp else []:
            mlp.__class__ = _computed_again(mlp.__class__)

    def give_up_compiling(self, error: Exception) -> None:
        """Run the layers as they are from now on, and say why."""
        self.compiled, self.bytes_per_token = False, None
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
        if self.bytes_per_token is None and index + 1 == self._count and self._device.type == "cuda":
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


@functools.cache
def _computed_again(kind: Any) -> type:
    """A module's class whose backward pass, when compiled, computes the module again. One class for all of a kind."""

    def forward(self: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        def plain(hidden: torch.Tensor) -> Any:
            return kind.forward(self, hidden, *args, **kwargs)

        if not torch.compiler.is_compiling():
            return plain(hidden)
        return checkpoint(plain, hidden, use_reentrant=False, preserve_rng_state=False)

    return type(kind.__name__, (kind,), {"forward": forward})


def _cheap_again() -> AbstractContextManager[None]:
    """What is compiled in this block keeps nothing that can be had again from the rest without a matrix product."""
    import torch._functorch.config as compiler

    patched: AbstractContextManager[None] = compiler.patch(
        ban_recompute_used_far_apart=False,
        ban_recompute_long_fusible_chains=False,
        ban_recompute_materialized_backward=False,
    )
    return patched


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
