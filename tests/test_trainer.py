import io
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from tiny_models import branching_rows, make_model, make_row

from artnb.config import LoraConfig, TrainConfig, TrainSFTConfig
from artnb.errors import CheckpointError, ModelError, NonFiniteGradientError, TrainError
from artnb.training.pack import build_packs
from artnb.training.policy import Policy, load_policy
from artnb.training.trainer import StepResult, Trainer
from artnb.training.types import Row, RowBatch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=2)


def make_policy(folder: Path) -> Policy:
    policy = load_policy(folder, lora=LoraConfig(r=4), device="cpu", dtype="float32")
    policy.add_adapter("a")
    policy.add_adapter("b")
    return policy


@pytest.fixture
def policy(folder: Path) -> Policy:
    return make_policy(folder)


def make_batch(policy: Policy, seed: int = 0) -> RowBatch:
    """Rows of three groups, their sampler log-probs those of the policy as it starts."""
    rows = branching_rows(seed, 9, 30)
    for i, row in enumerate(rows):
        row.group = i // 3
    (pack,) = build_packs(rows, 10_000)
    logp_RT, _ = policy.token_logprobs(pack, adapter=None)
    for r, row in enumerate(rows):
        row.logprobs[row.sampled] = logp_RT[r, : int(row.sampled.sum())].numpy()
    return RowBatch(rows=rows)


def weights(policy: Policy, name: str = "a") -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in policy.adapter_parameters(name).items()}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


CONFIG = TrainConfig(learning_rate=1e-2)
MANY = TrainConfig(learning_rate=1e-2, num_iterations=2, minibatches=2, beta=0.05, entropy_coef=0.01)


def test_a_step_moves_the_adapter_and_reports(policy: Policy) -> None:
    batch = make_batch(policy)
    before, other = weights(policy), weights(policy, "b")
    shown: list[dict[str, float]] = []
    result = Trainer(policy, "a").step(batch, CONFIG, step=0, on_progress=lambda n, **more: shown.append(more))
    metrics = result.metrics
    assert result.updates == 1 and shown[:2] == [{"total": 1}, {}] and [*shown[2]] == ["loss"]
    assert not same(weights(policy), before) and same(weights(policy, "b"), other)
    assert all(np.isfinite(v) for v in metrics.values())
    assert metrics["grad_norm"] > 0 and metrics["learning_rate"] == 1e-2 and metrics["skipped_nonfinite"] == 0
    assert metrics["mismatch_ratio"] == pytest.approx(1.0, abs=1e-3)
    assert metrics["entropy"] > 0 and metrics["peak_memory_bytes"] > 1e6 and metrics["tokens_per_second"] > 0
    assert metrics["unique_tokens"] < metrics["row_tokens"] == sum(len(r) for r in batch.rows)
    assert metrics["packing_efficiency"] == 1.0
    assert all(p.grad is None for p in policy.model.parameters())
    assert not any(p.requires_grad for p in policy.model.parameters())


def test_steps_raise_the_probability_of_what_earned_more(policy: Policy) -> None:
    good, bad = [5, 6, 7, 8], [5, 6, 9, 10]
    rows = [make_row(good, [2, 3], advantage=1.0), make_row(bad, [2, 3], advantage=-1.0)]
    trainer = Trainer(policy, "a")
    config = TrainConfig(learning_rate=1e-2, importance_correction="none")
    (pack,) = build_packs(rows, 100)
    before, _ = policy.token_logprobs(pack, adapter="a")
    for step in range(5):
        trainer.step(RowBatch(rows=rows), config, step=step)
    after, _ = policy.token_logprobs(pack, adapter="a")
    gain_R = (after - before).sum(-1)
    assert float(gain_R[0]) > 0.5 and float(gain_R[1]) < -0.5


def run(folder: Path, config: TrainConfig, seed: int = 3) -> tuple[list[float], dict[str, torch.Tensor]]:
    policy = make_policy(folder)
    trainer = Trainer(policy, "a", seed=seed)
    batch = make_batch(policy)
    return [trainer.step(batch, config, step=i).metrics["loss"] for i in range(3)], weights(policy)


@pytest.mark.parametrize("config", [CONFIG, MANY], ids=["one update", "four updates"])
def test_the_same_seed_gives_the_same_losses(folder: Path, config: TrainConfig) -> None:
    torch.manual_seed(1)
    first = run(folder, config)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = run(folder, config)
    assert first[0] == second[0] and same(first[1], second[1])
    assert torch.equal(torch.get_rng_state(), state)
    if config.minibatches > 1:
        assert run(folder, config, seed=4)[0] != first[0]


def test_packs_do_not_change_the_step(folder: Path) -> None:
    results = []
    for size in (10_000, 60):
        policy = make_policy(folder)
        config = TrainConfig(learning_rate=1e-3, max_tokens_per_pack=size, loss_type="grpo")
        result = Trainer(policy, "a").step(make_batch(policy), config, step=0)
        results.append((result.metrics, weights(policy)))
    assert results[1][0]["packs"] > 2
    assert results[0][0]["grad_norm"] == pytest.approx(results[1][0]["grad_norm"], rel=1e-4)
    assert results[0][0]["loss"] == pytest.approx(results[1][0]["loss"], abs=1e-5)


def test_packs_are_as_large_as_it_pays(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "pack_sizes", lambda budget: (60, 200))
    monkeypatch.setattr(policy, "recomputed_layers", lambda tokens, budget=None: 0 if tokens <= 60 else 2)
    trainer = Trainer(policy, "a")
    rng = np.random.default_rng(0)

    def rows(shared: int, own: int) -> list[Row]:
        system = rng.integers(0, 400, shared).tolist()
        return [make_row([*system, *rng.integers(0, 400, own).tolist()], [shared], group=i) for i in range(6)]

    assert [len(p.pack.rows) for p in trainer._place(rows(1, 25), None)] == [2, 2, 2]  # nothing computed twice
    assert [len(p.pack.rows) for p in trainer._place(rows(40, 15), None)] == [6]  # the prompt computed once
    assert len(trainer._place(rows(40, 15), 60)) == 6  # as told


def test_old_logprobs_are_those_before_the_first_update(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    from artnb.training import trainer as module

    seen: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    loss = module.policy_loss

    def spy(logp_RT: torch.Tensor, **more: Any) -> Any:
        seen.append((logp_RT.detach().clone(), more["old_logp_RT"]))
        return loss(logp_RT, **more)

    monkeypatch.setattr(module, "policy_loss", spy)
    batch = make_batch(policy)
    sampler = {tuple(r.token_ids): r.logprobs[r.sampled] for r in batch.rows}
    Trainer(policy, "a").step(batch, TrainConfig(learning_rate=1e-2, num_iterations=2, minibatches=2), step=0)
    assert len(seen) == 4 and seen[0][1] is None
    expected = np.sort(np.concatenate(list(sampler.values())))
    olds = [seen[2][1], seen[3][1]]
    got = np.sort(np.concatenate([old[old != 0].numpy() for old in olds if old is not None]))
    np.testing.assert_allclose(got, expected, atol=1e-4)
    assert float((seen[2][0] - olds[0]).abs().max()) > 1e-3  # the policy itself has moved on


def poison(policy: Policy) -> Any:
    """Make one gradient of adapter a infinite."""
    weight = next(iter(policy.adapter_parameters("a").values()))
    return weight.register_hook(lambda grad: grad * float("inf"))


def test_nonfinite_gradients_change_nothing_and_stop_in_the_end(policy: Policy) -> None:
    trainer, batch = Trainer(policy, "a"), make_batch(policy)
    trainer.step(batch, CONFIG, step=0)
    before, state = weights(policy), trainer.state_dict()["optimizer"]
    config = TrainConfig(learning_rate=1e-2, max_nonfinite_steps=3)
    with policy.using("a", train=True):
        hook = poison(policy)
    for count in (1, 2):
        result = trainer.step(batch, config, step=count)
        assert result.metrics["skipped_nonfinite"] == 1 and result.updates == 0 and "grad_norm" not in result.metrics
    with pytest.raises(NonFiniteGradientError, match="3 steps in a row"):
        trainer.step(batch, config, step=3)
    assert same(weights(policy), before) and same(trainer.state_dict()["optimizer"], state)
    hook.remove()
    assert trainer.step(batch, config, step=3).updates == 1
    assert trainer.state_dict()["nonfinite_in_a_row"] == 0


class Stop(BaseException):
    pass


@pytest.mark.parametrize("error", [KeyboardInterrupt, Stop])
@pytest.mark.parametrize("at", [1, 3, 5])
def test_an_interrupt_leaves_the_step_before(policy: Policy, error: type[BaseException], at: int) -> None:
    trainer, batch = Trainer(policy, "a"), make_batch(policy)
    trainer.step(batch, MANY, step=0)
    before, state = weights(policy), trainer.state_dict()
    calls = 0

    def report(done: int, **shown: float) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise error

    with pytest.raises(error):
        trainer.step(batch, MANY, step=1, on_progress=report)
    assert same(weights(policy), before) and same(trainer.state_dict(), state)
    assert all(p.grad is None for p in policy.model.parameters())
    losses = trainer.step(batch, MANY, step=1).metrics["loss"]

    again = make_policy_at(policy, before)
    other = Trainer(again, "a")
    other.load_state_dict(state)
    assert other.step(batch, MANY, step=1).metrics["loss"] == losses


def make_policy_at(policy: Policy, held: dict[str, torch.Tensor]) -> Policy:
    again = make_policy(Path(policy.name))
    with torch.no_grad():
        for name, parameter in again.adapter_parameters("a").items():
            parameter.copy_(held[name])
    return again


@pytest.mark.parametrize(
    "error", [ValueError("odd"), RuntimeError("DefaultCPUAllocator: can't allocate memory: 34 GB")]
)
def test_a_failed_step_names_phase_and_memory(
    policy: Policy, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    from artnb.training import trainer as module

    def fail(*args: Any, **more: Any) -> None:
        raise error

    trainer, batch = Trainer(policy, "a"), make_batch(policy)
    before = weights(policy)
    with monkeypatch.context() as patch:
        patch.setattr(module, "policy_loss", fail)
        with pytest.raises(TrainError, match=r"phase: forward pass; cpu: peak .* GiB free") as caught:
            trainer.step(batch, CONFIG, step=0)
    assert caught.value.phase == "forward pass" and caught.value.__cause__ is error
    assert ("max_tokens_per_pack" in str(caught.value)) == isinstance(error, RuntimeError)
    assert same(weights(policy), before)
    assert trainer.step(batch, CONFIG, step=0).updates == 1


def test_rows_that_cannot_be_packed_name_the_phase(policy: Policy) -> None:
    with pytest.raises(TrainError, match="phase: packing"):
        Trainer(policy, "a").step(RowBatch(rows=[make_row([1, 2], [0])]), CONFIG, step=0)


def test_rows_without_sampled_tokens_change_nothing(folder: Path) -> None:
    results: list[tuple[StepResult, dict[str, torch.Tensor]]] = []
    for extra in ([], [make_row([1, 2, 3], [], advantage=5.0, group=9)]):
        policy = make_policy(folder)
        batch = make_batch(policy)
        batch.rows = batch.rows + extra
        results.append((Trainer(policy, "a").step(batch, CONFIG, step=0), weights(policy)))
    assert same(results[0][1], results[1][1])
    assert results[0][0].metrics["loss"] == results[1][0].metrics["loss"]


@pytest.mark.parametrize("rows", [[], [make_row([1, 2, 3], [])]], ids=["no rows", "all masked"])
def test_nothing_to_train_on(policy: Policy, rows: list[Row]) -> None:
    before = weights(policy)
    trainer = Trainer(policy, "a")
    for result in (
        trainer.step(RowBatch(rows=rows), MANY, step=0),
        trainer.sft_step(RowBatch(rows=rows), 1e-3, TrainSFTConfig()),
    ):
        assert result.updates == 0 and result.metrics["unique_tokens"] == 0
    assert same(weights(policy), before)


def test_two_adapters_train_apart(folder: Path) -> None:
    together, alone = make_policy(folder), make_policy(folder)
    batch = make_batch(together)
    a, b, only_b = Trainer(together, "a"), Trainer(together, "b"), Trainer(alone, "b")
    for step in range(2):
        a.step(batch, CONFIG, step=step)
        mixed = b.step(batch, CONFIG, step=step).metrics["loss"]
        assert only_b.step(batch, CONFIG, step=step).metrics["loss"] == mixed
    assert same(weights(together, "b"), weights(alone, "b"))
    with pytest.raises(ModelError, match="no adapter 'c'"):
        Trainer(together, "c")


def test_state_survives_saving_and_other_adapters(folder: Path, tmp_path: Path) -> None:
    policy = make_policy(folder)
    trainer, batch = Trainer(policy, "a", seed=1), make_batch(policy)
    trainer.step(batch, MANY, step=0)
    policy.save_adapter("a", tmp_path)
    file = io.BytesIO()
    torch.save(trainer.state_dict(), file)
    expected = trainer.step(batch, MANY, step=1).metrics["loss"]

    other = load_policy(folder, lora=LoraConfig(r=4), device="cpu", dtype="float32")
    other.add_adapter("another one")
    other.load_adapter("a", tmp_path)
    resumed = Trainer(other, "a", seed=99)
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert resumed.step(batch, MANY, step=1).metrics["loss"] == expected

    other.add_adapter("small", LoraConfig(r=4, target_modules=("q_proj",)))
    file.seek(0)
    with pytest.raises(CheckpointError, match="another LoraConfig"):
        Trainer(other, "small").load_state_dict(torch.load(file, weights_only=True))


def test_supervised_steps_learn_the_rows(policy: Policy) -> None:
    rows = [make_row([3, 4, 5, 6, 7, 8], [2, 3, 4, 5]), make_row([3, 4, 9, 1], [2, 3])]
    trainer = Trainer(policy, "a")
    losses = [trainer.sft_step(RowBatch(rows=rows), 1e-2, TrainSFTConfig()).metrics["loss"] for _ in range(8)]
    assert losses[-1] < losses[0] - 0.5


def test_118_short_rows_fill_their_packs(policy: Policy) -> None:
    rng = np.random.default_rng(1)
    rows = [
        make_row(rng.integers(0, 400, n).tolist(), [n - 1], advantage=1.0, group=i)
        for i, n in enumerate(rng.integers(10, 40, 118))
    ]
    config = TrainConfig(max_tokens_per_pack=614, importance_correction="none")
    metrics = Trainer(policy, "a").step(RowBatch(rows=rows), config, step=0).metrics
    assert metrics["packs"] <= -(-metrics["unique_tokens"] // 614) + 1
    assert metrics["packing_efficiency"] > 0.8


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_short_dtypes_train_fp32_adapters(folder: Path, dtype: str) -> None:
    policy = load_policy(folder, lora=LoraConfig(r=4), device="cpu", dtype=dtype, gradient_checkpointing=True)
    policy.add_adapter("a")
    assert {p.dtype for p in policy.adapter_parameters("a").values()} == {torch.float32}
    trainer = Trainer(policy, "a")
    batch = make_batch(policy)
    metrics = trainer.step(batch, CONFIG, step=0).metrics
    assert metrics["updates"] == 1 and metrics["mismatch_ratio"] == pytest.approx(1.0, abs=0.02)
    reference = Trainer(make_policy(folder), "a").step(batch, CONFIG, step=0).metrics
    assert metrics["grad_norm"] == pytest.approx(reference["grad_norm"], rel=0.1)  # fp16's scale is taken out again


def test_fp16_lowers_its_scale_when_gradients_overflow(folder: Path) -> None:
    policy = load_policy(folder, lora=LoraConfig(r=4), device="cpu", dtype="float16")
    policy.add_adapter("a")
    trainer, batch = Trainer(policy, "a"), make_batch(policy)
    scale = trainer.state_dict()["optimizer"]["scale"]
    with policy.using("a", train=True):
        hook = poison(policy)
    trainer.step(batch, CONFIG, step=0)
    hook.remove()
    assert trainer.state_dict()["optimizer"]["scale"] == scale / 2
    assert trainer.step(batch, CONFIG, step=0).updates == 1


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's arenas")
def test_steps_in_several_threads_do_not_pile_up_memory(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2}
    policy = load_policy(make_model("llama", tmp_path, **sizes), lora=LoraConfig(r=4), device="cpu", dtype="float32")
    policy.add_adapter("a")
    rng = np.random.default_rng(0)
    rows = [make_row(rng.integers(0, 400, 400).tolist(), [399], advantage=1.0) for _ in range(8)]
    trainer, config = Trainer(policy, "a"), TrainConfig(importance_correction="none")
    resident = []

    def step(start: threading.Event, end: threading.Event) -> None:
        trainer.step(RowBatch(rows=rows), config, step=0)
        resident.append(psutil.Process().memory_info().rss)
        end.set()
        start.wait()  # a thread that lives on keeps its arena

    start = threading.Event()
    for _ in range(4):
        end = threading.Event()
        threading.Thread(target=step, args=(start, end), daemon=True).start()
        assert end.wait(60)
    start.set()
    # 300 MiB and more where they pile up; what other tests of this process leave behind comes and goes meanwhile.
    assert resident[-1] - resident[0] < 150 * 2**20
