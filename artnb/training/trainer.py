"""One training step: rows → packs → loss → gradients → adapter. The optimizer's state lives on across steps.

A step that fails or is interrupted leaves weights, optimizer and random state as they were before it.
Does not make rows, write checkpoints, or sample.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .. import memory
from ..attention import PackAttend
from ..config import TrainConfig, TrainSFTConfig
from ..errors import ArtnbError, NonFiniteGradientError, TrainError
from .loss import LossOutput, StepTotals, Sums, add_sums, finish_metrics, policy_loss, sft_loss
from .optimizer import AdapterOptimizer
from .pack import cheapest_packs
from .policy import Policy
from .types import Pack, Row, RowBatch

ROWS_AT_ONCE = 32
"""A pass takes no more memory than so many of the rows, padded to the longest, with every layer recomputed: what
trainers take that compute row by row."""
OnProgress = Callable[..., None]
"""Called as `on_progress(0, total=packs)`, as `on_progress(1)` after each pack, with the loss of the one before it if
there is one, and as `on_progress(0, loss=...)` after each update. What it raises ends the step."""


@dataclass(slots=True)
class StepResult:
    """What a step did. `updates`: optimizer steps taken; 0 when nothing was there to train on, or all were skipped."""

    metrics: dict[str, float]
    updates: int


@dataclass(slots=True)
class _Placed:
    """A pack on the device, with what later passes reuse. `old`, `ref`: log-probs [R, T], once they are known."""

    pack: Pack
    rows: list[Row]  # those of the pack, in its order
    recomputed: int  # layers, in passes with gradients
    mask_RT: torch.Tensor
    advantage_R: torch.Tensor
    sampler_RT: torch.Tensor
    attend: PackAttend | None = None  # made for the first pass: on a GPU while the pack before is computed
    old_RT: torch.Tensor | None = None
    ref_RT: torch.Tensor | None = None
    before_RT: torch.Tensor | None = None  # log-probs before the step

    def note(self) -> None:
        """Give the rows the log-probs of the policy before the step, for whoever looks at them later."""
        if self.before_RT is not None:
            for row, logp_T, mask_T in zip(self.rows, self.before_RT.cpu(), self.pack.mask_RT, strict=True):
                row.trainer_logprobs = logp_T.numpy()[mask_T].astype(np.float32)


@dataclass(slots=True)
class _Progress:
    """Where a step is, and what it has counted."""

    report: OnProgress
    phase: str = "packing"
    tokens: int = 0  # of the pack that is computed
    loss: torch.Tensor | None = None  # of the last pack
    snapshot: dict[str, Any] | None = None
    sums: Sums = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    skipped: int = 0


class Trainer:
    """Trains one adapter of a policy. `seed` decides how groups are dealt to minibatches, nothing else is random.

    trainer = Trainer(policy, "my-agent", seed=0)
    result = trainer.step(batch, TrainConfig(learning_rate=1e-5), step=0)
    """

    def __init__(self, policy: Policy, adapter: str, *, seed: int = 0) -> None:
        policy.adapter_key(adapter)  # an unknown name fails here
        self.policy = policy
        self.adapter = adapter
        self._optimizer = AdapterOptimizer(policy, adapter)
        self._generator = torch.Generator().manual_seed(seed)
        self._nonfinite_in_a_row = 0

    def step(
        self, batch: RowBatch, config: TrainConfig, *, step: int, on_progress: OnProgress | None = None
    ) -> StepResult:
        """One GRPO step on the batch, from checkpoint `step` to `step + 1`.

        Raises: TrainError, with phase and memory, when it fails; NonFiniteGradientError when it is one too many
        in a row whose gradients are not finite. KeyboardInterrupt and its like pass through. In each of these
        cases the weights are those before the step. Sets `trainer_logprobs` of the rows.
        """

        def work(run: _Progress) -> list[_Placed]:
            parts = self._deal(_trained(batch), config.minibatches)
            minibatches = [self._place(part, config.max_tokens_per_pack) for part in parts]
            counts = [len(minibatch) for minibatch in minibatches]
            run.report(0, total=sum(counts[1:]) + config.num_iterations * sum(counts))
            self._old_logprobs(run, minibatches[1:])
            rate = config.learning_rate_at(step)
            for iteration in range(config.num_iterations):
                for minibatch in minibatches:
                    totals = StepTotals.of((p.pack.mask_RT for p in minibatch), config.max_completion_length)
                    for placed in minibatch:
                        keep_old = iteration + 1 < config.num_iterations and placed.old_RT is None
                        self._grpo_pack(run, placed, config, totals, keep_old)
                    self._update(run, rate, config.weight_decay, config.max_grad_norm)
            self._count_nonfinite(run, config.max_nonfinite_steps)
            done = [placed for minibatch in minibatches for placed in minibatch]
            for placed in done:  # at the end: reading them off a GPU waits for all that it was given
                placed.note()
            return done

        return self._run(work, config.learning_rate_at(step), on_progress)

    def sft_step(
        self, batch: RowBatch, learning_rate: float, config: TrainSFTConfig, *, on_progress: OnProgress | None = None
    ) -> StepResult:
        """One optimizer step towards the sampled tokens of the batch's rows. Raises as `step` does."""

        def work(run: _Progress) -> list[_Placed]:
            packs = self._place(_trained(batch), config.max_tokens_per_pack)
            totals = StepTotals.of(placed.pack.mask_RT for placed in packs)
            for placed in packs:
                run.phase, run.tokens = "forward pass", len(placed.pack.token_ids_S)
                logp_RT, _ = self._logprobs(placed, self.adapter, grad=True)
                self._backward(run, sft_loss(logp_RT, placed.mask_RT, totals))
            if packs:
                self._update(run, learning_rate, config.weight_decay, config.max_grad_norm)
            self._count_nonfinite(run, TrainConfig().max_nonfinite_steps)
            return packs

        return self._run(work, learning_rate, on_progress)

    def state_dict(self) -> dict[str, Any]:
        """Optimizer and random state, not the weights; state_file.py writes it and reads it back."""
        return {
            "optimizer": self._optimizer.state_dict(),
            "generator": self._generator.get_state(),
            "nonfinite_in_a_row": self._nonfinite_in_a_row,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. Raises: CheckpointError when it is of another adapter."""
        self._optimizer.load_state_dict(state["optimizer"])
        self._generator.set_state(state["generator"].cpu())
        self._nonfinite_in_a_row = int(state["nonfinite_in_a_row"])

    # Inside a step ---------------------------------------------------------------------------------

    def _run(
        self, work: Callable[[_Progress], list[_Placed]], learning_rate: float, on_progress: OnProgress | None
    ) -> StepResult:
        run = _Progress(on_progress or (lambda *args, **shown: None))
        started = time.monotonic()
        memory.reset_peak(self.policy.device)
        try:
            with self.policy.using(self.adapter, train=True), self._unharmed(run):
                if self.policy.cold:
                    run.phase = "compiling"
                    self.policy.warm_up(self.adapter)
                    run.phase = "packing"
                packs = work(run)
        finally:
            memory.give_back(self.policy.device)
        seconds = time.monotonic() - started
        unique = [len(placed.pack.token_ids_S) for placed in packs]
        row_tokens = sum(placed.pack.row_tokens for placed in packs)
        updates = len(run.norms)
        metrics = finish_metrics(run.sums)
        if "loss" in metrics:
            metrics["loss"] /= max(1, updates + run.skipped)  # each optimizer step's loss is a whole one
        metrics |= {
            "learning_rate": learning_rate,
            "skipped_nonfinite": float(run.skipped),
            "updates": float(updates),
            "packs": float(len(packs)),
            "unique_tokens": float(sum(unique)),
            "row_tokens": float(row_tokens),
            "seconds": seconds,
            "tokens_per_second": row_tokens / max(seconds, 1e-9),
            "peak_memory_bytes": float(memory.peak_bytes(self.policy.device)),
        }
        if unique:
            # As in a batch that pads each pack to the longest: 1 when all packs are equally full.
            metrics["packing_efficiency"] = sum(unique) / (len(unique) * max(unique))
            metrics["shared_tokens"] = 1.0 - sum(unique) / row_tokens
        if run.norms:
            metrics["grad_norm"] = sum(run.norms) / updates
        return StepResult({k: v for k, v in metrics.items() if math.isfinite(v)}, updates)

    @contextmanager
    def _unharmed(self, run: _Progress) -> Iterator[None]:
        """Undo what a failed or interrupted step has changed, and say where it failed."""
        generator = self._generator.get_state()
        try:
            yield
        except BaseException as error:
            used = memory.describe(self.policy.device)
            self._generator.set_state(generator)
            if run.snapshot is None:
                self._optimizer.clear()
            else:
                self._optimizer.restore(run.snapshot)
            if not isinstance(error, Exception) or isinstance(error, ArtnbError):
                raise
            failure = TrainError(_sentence(error, run.tokens), phase=run.phase, memory=used)
            if _out_of_memory(error):
                # The traceback's frames hold the activations that did not fit; only the message is kept.
                error.__traceback__ = None
                gc.collect()
                if self.policy.device.type == "cuda":
                    torch.cuda.empty_cache()
            raise failure from error

    def _deal(self, rows: Sequence[Row], minibatches: int) -> list[list[Row]]:
        """Deal whole groups to the minibatches, in random order where there is more than one."""
        if minibatches == 1 or not rows:
            return [list(rows)] if rows else []
        groups = sorted({row.group for row in rows})
        order = [groups[i] for i in torch.randperm(len(groups), generator=self._generator).tolist()]
        parts = [set(order[i::minibatches]) for i in range(min(minibatches, len(groups)))]
        return [[row for row in rows if row.group in part] for part in parts]

    def _place(self, rows: Sequence[Row], max_tokens: int | None) -> list[_Placed]:
        device = self.policy.device
        policy, longest = self.policy, max(map(len, rows), default=0)
        budget = policy.activation_budget(min(len(rows), ROWS_AT_ONCE) * longest)
        sizes = [max_tokens] if max_tokens else policy.pack_sizes(budget)
        packs = cheapest_packs(rows, sizes, lambda tokens: policy.pass_cost(tokens, budget))
        return [
            _Placed(
                pack,
                [rows[index] for index in pack.rows],
                policy.recomputed_layers(len(pack.token_ids_S), budget),
                torch.from_numpy(pack.mask_RT).to(device),
                torch.from_numpy(pack.advantage_R).to(device),
                torch.from_numpy(pack.sampler_logp_RT).to(device),
            )
            for pack in packs
        ]

    def _logprobs(
        self, placed: _Placed, adapter: str | None, *, grad: bool = False, entropy: bool = False, tracked: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        placed.attend = placed.attend or self.policy.attend(placed.pack)
        return self.policy.token_logprobs(
            placed.pack,
            adapter=adapter,
            entropy=entropy,
            entropy_grad=tracked,
            grad=grad,
            attend=placed.attend,
            recomputed=placed.recomputed,
        )

    def _old_logprobs(self, run: _Progress, later: list[list[_Placed]]) -> None:
        """Log-probs before the first update, for the minibatches that come after one."""
        run.phase = "log-probs before the update"
        for minibatch in later:
            for placed in minibatch:
                run.tokens = len(placed.pack.token_ids_S)
                placed.old_RT, _ = self._logprobs(placed, self.adapter)
                run.report(1)

    def _grpo_pack(
        self, run: _Progress, placed: _Placed, config: TrainConfig, totals: StepTotals, keep_old: bool
    ) -> None:
        run.tokens = len(placed.pack.token_ids_S)
        if config.beta != 0.0 and placed.ref_RT is None:
            run.phase = "log-probs of the base model"
            placed.ref_RT, _ = self._logprobs(placed, None)
        run.phase = "forward pass"
        logp_RT, entropy_RT = self._logprobs(
            placed, self.adapter, grad=True, entropy=True, tracked=config.entropy_coef != 0.0
        )
        if placed.before_RT is None:
            placed.before_RT = logp_RT.detach() if placed.old_RT is None else placed.old_RT
        output = policy_loss(
            logp_RT,
            mask_RT=placed.mask_RT,
            advantage_R=placed.advantage_R,
            config=config,
            totals=totals,
            old_logp_RT=placed.old_RT,
            sampler_logp_RT=placed.sampler_RT,
            ref_logp_RT=placed.ref_RT,
            entropy_RT=entropy_RT,
        )
        if keep_old:
            placed.old_RT = logp_RT.detach()
        self._backward(run, output)

    def _backward(self, run: _Progress, output: LossOutput) -> None:
        run.phase = "backward pass"
        (output.loss * self._optimizer.scale).backward()
        run.sums = add_sums(run.sums, output.sums)
        # The loss of the pack before: reading this one's would wait for the GPU instead of giving it the next pack.
        run.report(1, **({} if run.loss is None else {"loss": float(run.loss)}))
        run.loss = output.sums["loss"]

    def _update(self, run: _Progress, rate: float, weight_decay: float, max_grad_norm: float) -> None:
        run.phase = "update"
        if run.snapshot is None:
            run.snapshot = self._optimizer.snapshot()
        norm = self._optimizer.update(learning_rate=rate, weight_decay=weight_decay, max_grad_norm=max_grad_norm)
        if norm is None:
            run.skipped += 1
        else:
            run.norms.append(norm)
        if run.loss is not None:
            run.report(0, loss=float(run.loss))
            run.loss = None

    def _count_nonfinite(self, run: _Progress, limit: int) -> None:
        if run.norms:
            self._nonfinite_in_a_row = 0
        elif run.skipped:
            self._nonfinite_in_a_row += 1
            if self._nonfinite_in_a_row >= limit:
                raise NonFiniteGradientError(
                    f"the gradients of {self._nonfinite_in_a_row} steps in a row were NaN or infinite; "
                    "nothing was changed by them. A lower learning rate or dtype='float32' may help",
                    phase=run.phase,
                    memory=memory.describe(self.policy.device),
                )


def _trained(batch: RowBatch) -> list[Row]:
    """Rows without a sampled token cost a forward pass and change nothing."""
    return [row for row in batch.rows if row.sampled.any()]


def _out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)
    )


def _sentence(error: Exception, tokens: int) -> str:
    if not _out_of_memory(error):
        return f"the step failed with {type(error).__name__}: {error}"
    smaller = 1 << max(8, (max(tokens, 2) - 1).bit_length() - 1)  # the power of two below
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return (
        f"the step ran out of memory on a pack of {tokens:,} tokens; the model keeps its last complete step. Try "
        f"TrainConfig(max_tokens_per_pack={smaller}), or shorter rollouts ({reason})"
    )
