"""The losses: TRL's own code on the same batch, hand-computed references, splitting, masking, metrics."""

from __future__ import annotations

import ast
import collections
import contextlib
import inspect
import math
import textwrap
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from artnb.config import TrainConfig
from artnb.training.loss import LossOutput, StepTotals, add_sums, finish_metrics, policy_loss, sft_loss

# PEFT reads an attribute that transformers 5.24 has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo")
R, P, T = 5, 4, 7  # rows, prompt tokens, completion tokens


def masks() -> Tensor:
    """Ragged rows, one with a hole (a tool's answer), one with a single token."""
    mask_RT = torch.zeros(R, T, dtype=torch.bool)
    for row, length in enumerate((7, 3, 5, 1, 6)):
        mask_RT[row, :length] = True
    mask_RT[0, 2:4] = False
    return mask_RT


def option(loss_type: str, **options: Any) -> TrainConfig:
    options.setdefault("importance_correction", "none")
    options.setdefault("epsilon_high", 1.1 if loss_type == "cispo" else 0.28)
    options.setdefault("max_completion_length", 16)
    return TrainConfig(loss_type=loss_type, **options)


# ------------------------------------------------------------------------------------------------ TRL's own code


@pytest.fixture(scope="module")
def trl_trainer() -> Any:
    pytest.importorskip("trl")
    from trl.trainer.grpo_trainer import GRPOTrainer

    return GRPOTrainer


@pytest.fixture(scope="module")
def model() -> Any:
    pytest.importorskip("trl")
    peft = pytest.importorskip("peft")
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl.trainer.utils import add_fused_lm_head

    torch.manual_seed(0)
    shape = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=300,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    llama = LlamaForCausalLM(shape)
    add_fused_lm_head(llama, temperature=1.0, outputs=("log_probs", "entropy"))
    made = peft.get_peft_model(llama, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"]))
    for name, weight in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    return made.train()


@pytest.fixture(scope="module")
def batch(model: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 300, (R, P + T), generator=generator)
    with torch.no_grad():
        logp_RT = ours(model, ids)[0]

    def near(value_RT: Tensor, by: float) -> Tensor:
        return value_RT + by * torch.randn(value_RT.shape, generator=generator)

    old_RT = near(logp_RT, 0.35)
    return {
        "ids": ids,
        "old": old_RT,
        "sampler": near(old_RT, 0.3),
        "ref": near(logp_RT, 0.2),
        "advantage": torch.randn(R, generator=generator),
    }


def ours(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [R, T] by a plain forward, with none of TRL's code."""
    logits = model(input_ids=ids).logits[:, P - 1 : -1].float()
    logp_RTV = logits.log_softmax(-1)
    logp_RT = logp_RTV.gather(-1, ids[:, P:].unsqueeze(-1)).squeeze(-1)
    return logp_RT, -(logp_RTV.exp() * logp_RTV).sum(-1)


def trl_correction(trainer: Any, mode: str, cap: float, old_RT: Tensor, sampler_RT: Tensor, mask_RT: Tensor) -> Tensor:
    """TRL's importance_sampling_ratio: the very statements of its _generate_and_score_completions."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(trainer._generate_and_score_completions)))
    wanted = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
        and "self.vllm_importance_sampling_correction" in ast.unparse(node.test)
        and any(ast.unparse(line).startswith("vllm_importance_sampling_ratio = torch.exp") for line in node.body)
    ]
    assert len(wanted) == 1, "TRL moved its importance-sampling code"
    names = {
        "torch": torch,
        "math": math,
        "self": types.SimpleNamespace(
            use_vllm=True,
            vllm_importance_sampling_correction=True,
            vllm_importance_sampling_mode=mode,
            vllm_importance_sampling_clip_max=cap,
            vllm_importance_sampling_clip_min=None,
        ),
        "completion_mask": mask_RT.long(),
        "tool_mask": None,
        "old_per_token_logps": old_RT,
        "sampling_per_token_logps": sampler_RT,
    }
    exec(compile(ast.Module(body=[wanted[0]], type_ignores=[]), "trl", "exec"), names)
    return names["vllm_importance_sampling_ratio"]


def trl_loss(trainer: Any, model: Any, batch: dict[str, Tensor], config: TrainConfig) -> Tensor:
    """TRL's _compute_loss, unbound, on an object that has the attributes it reads and nothing else."""
    mask_RT = masks()
    corrected = config.importance_correction != "none"
    standin = types.SimpleNamespace(
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=config.importance_sampling_level,
        beta=config.beta,
        loss_type=config.loss_type,
        epsilon_low=config.epsilon,
        epsilon_high=config.epsilon if config.epsilon_high is None else config.epsilon_high,
        use_vllm=corrected,
        vllm_importance_sampling_correction=corrected,
        max_completion_length=config.max_completion_length,
        current_gradient_accumulation_steps=1,
        entropy_coef=config.entropy_coef,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=config.entropy_coef != 0.0,
        model=types.SimpleNamespace(training=True),
        _metrics={"train": collections.defaultdict(list)},
        args=types.SimpleNamespace(delta=config.delta, use_bias_correction_kl=False, steps_per_generation=1),
        accelerator=types.SimpleNamespace(
            num_processes=1,
            is_main_process=True,
            sync_gradients=True,
            autocast=contextlib.nullcontext,
            gather=lambda x: x,
            reduce=lambda x, reduction: x,
        ),
    )
    standin._get_per_token_logps_and_entropies = types.MethodType(trainer._get_per_token_logps_and_entropies, standin)
    inputs: dict[str, Any] = {
        "prompt_ids": batch["ids"][:, :P],
        "prompt_mask": torch.ones(R, P, dtype=torch.long),
        "completion_ids": batch["ids"][:, P:],
        # All completion tokens exist; the tool mask says which were sampled.
        "completion_mask": torch.ones(R, T, dtype=torch.long),
        "tool_mask": mask_RT.long(),
        "advantages": batch["advantage"],
        "old_per_token_logps": batch["old"],
        "ref_per_token_logps": batch["ref"],
        "num_items_in_batch": mask_RT.sum(),
    }
    if corrected:
        inputs["importance_sampling_ratio"] = trl_correction(
            trainer,
            config.importance_correction,
            config.importance_cap,
            batch["old"],
            batch["sampler"],
            mask_RT,
        )
    loss = trainer._compute_loss(standin, model, inputs)
    standin_metrics.clear()
    standin_metrics.update({key: values[-1] for key, values in standin._metrics["train"].items()})
    return loss


standin_metrics: dict[str, float] = {}


def our_loss(
    model: Any,
    batch: dict[str, Tensor],
    config: TrainConfig,
    rows: slice = slice(None),
    totals: StepTotals | None = None,
) -> LossOutput:
    mask_RT = masks()
    logp_RT, entropy_RT = ours(model, batch["ids"][rows])
    return policy_loss(
        logp_RT,
        mask_RT=mask_RT[rows],
        advantage_R=batch["advantage"][rows],
        config=config,
        totals=totals or StepTotals.of([mask_RT], config.max_completion_length),
        old_logp_RT=batch["old"][rows],
        sampler_logp_RT=batch["sampler"][rows],
        ref_logp_RT=batch["ref"][rows],
        entropy_RT=entropy_RT,
    )


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert left.keys() == right.keys() and left
    assert max(float(grad.abs().max()) for grad in left.values()) > 1e-3, "a zero gradient would prove nothing"
    for name, grad in left.items():
        assert float((grad - right[name]).abs().max()) <= tolerance, name


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "same_epsilons": {"epsilon_high": None},
    "delta": {"delta": 1.5},
    "beta": {"beta": 0.1},
    "entropy": {"entropy_coef": 0.05},
    "token_truncate": {"importance_correction": "token_truncate", "importance_cap": 1.2},
    "token_mask": {"importance_correction": "token_mask", "importance_cap": 1.2},
    "sequence_truncate": {"importance_correction": "sequence_truncate", "importance_cap": 1.2},
    "sequence_mask": {"importance_correction": "sequence_mask", "importance_cap": 1.2},
    "all": {"beta": 0.1, "entropy_coef": 0.05, "delta": 1.5, "importance_correction": "token_truncate"},
}


# The config refuses delta with cispo, where it does nothing, and cispo without a cap of its own.
REFUSED = {("cispo", "delta"), ("cispo", "same_epsilons")}
CASES = [(kind, name) for kind in LOSS_TYPES for name in VARIANTS if (kind, name) not in REFUSED]


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("loss_type", "variant"), CASES)
def test_values_and_gradients_are_trl_s(
    trl_trainer: Any, model: Any, batch: dict[str, Tensor], loss_type: str, level: str, variant: str
) -> None:
    options = dict(VARIANTS[variant])
    if loss_type == "cispo":
        options.pop("delta", None)
    config = option(loss_type, importance_sampling_level=level, **options)
    theirs = trl_loss(trl_trainer, model, batch, config)
    their_grads = gradients(model, theirs)
    output = our_loss(model, batch, config)
    our_grads = gradients(model, output.loss)
    assert output.loss.item() == pytest.approx(theirs.item(), abs=1e-5)
    assert_same(their_grads, our_grads)
    metrics = finish_metrics(output.sums)
    assert metrics["entropy"] == pytest.approx(standin_metrics["entropy"], abs=1e-5)
    if config.beta:
        assert metrics["kl_base"] == pytest.approx(standin_metrics["kl"], abs=1e-5)
    # TRL averages per-row clip flags over rows at sequence level and per-token flags over tokens, as we do.
    key = "cispo_clip_ratio" if loss_type == "cispo" else "clip_ratio/region_mean"
    if config.delta is None:  # with delta TRL compares the ratio that delta has capped
        assert metrics["clip"] == pytest.approx(standin_metrics[key], abs=1e-6)


def test_the_batch_exercises_every_branch(trl_trainer: Any, model: Any, batch: dict[str, Tensor]) -> None:
    """Otherwise the comparison above would hold of code that does nothing."""
    metrics = finish_metrics(our_loss(model, batch, option("grpo", importance_correction="token_mask")).sums)
    assert 0.1 < metrics["clip"] < 0.9 and metrics["clip_low"] > 0 and metrics["clip_high"] > 0
    for mode in ("token_mask", "sequence_mask"):
        config = option("grpo", importance_correction=mode, importance_cap=1.2)
        assert 0.0 < finish_metrics(our_loss(model, batch, config).sums)["corrected"] < 1.0
    assert metrics["ratio_max"] > 1.5  # delta


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_packs_add_up_to_the_whole_batch(model: Any, batch: dict[str, Tensor], loss_type: str, level: str) -> None:
    config = option(
        loss_type,
        importance_sampling_level=level,
        beta=0.1,
        entropy_coef=0.05,
        importance_correction="sequence_truncate",
        importance_cap=1.2,
    )
    whole = our_loss(model, batch, config)
    expected = gradients(model, whole.loss)
    totals = StepTotals.of([masks()[:2], masks()[2:3], masks()[3:]], config.max_completion_length)
    parts = [our_loss(model, batch, config, rows, totals) for rows in (slice(0, 2), slice(2, 3), slice(3, R))]
    model.zero_grad(set_to_none=True)
    assert_same(expected, gradients(model, sum((part.loss for part in parts), torch.zeros(()))), 1e-6)
    sums = add_sums(add_sums(parts[0].sums, parts[1].sums), parts[2].sums)
    assert finish_metrics(sums) == pytest.approx(finish_metrics(whole.sums), abs=1e-5)


# ------------------------------------------------------------------------------------------------ by hand


def leaf(values: list[list[float]]) -> Tensor:
    return torch.tensor(values, requires_grad=True)


HAND_LOGP = [[-1.0, -2.0, -0.5], [-0.3, -0.7, 0.0]]
HAND_OLD = [[-1.5, -2.0, -0.4], [-0.2, -0.9, 0.0]]
HAND_MASK = [[1, 1, 1], [1, 1, 0]]
HAND_ADVANTAGE = [1.0, -0.5]


def hand_loss(loss_type: str) -> float:
    """The formulas with Python floats and loops."""
    rows = []
    for logp, old, mask, advantage in zip(HAND_LOGP, HAND_OLD, HAND_MASK, HAND_ADVANTAGE, strict=True):
        losses = []
        for p, q, kept in zip(logp, old, mask, strict=True):
            if kept:
                ratio = math.exp(p - q)
                if loss_type == "cispo":
                    losses.append(-min(ratio, 1.3) * advantage * p)
                else:
                    losses.append(-min(ratio * advantage, min(max(ratio, 0.8), 1.3) * advantage))
        rows.append(losses)
    everything = [value for row in rows for value in row]
    if loss_type == "grpo":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    return sum(everything) / (len(rows) * 10 if loss_type == "dr_grpo" else len(everything))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_against_a_hand_written_reference(loss_type: str) -> None:
    high = 1.3 if loss_type == "cispo" else 0.3
    config = option(loss_type, epsilon=0.2, epsilon_high=high, max_completion_length=10)
    mask_RT = torch.tensor(HAND_MASK)
    output = policy_loss(
        leaf(HAND_LOGP),
        mask_RT=mask_RT,
        advantage_R=torch.tensor(HAND_ADVANTAGE),
        config=config,
        totals=StepTotals.of([mask_RT], 10),
        old_logp_RT=torch.tensor(HAND_OLD),
    )
    assert output.loss.item() == pytest.approx(hand_loss(loss_type), abs=1e-6)


def test_on_policy_loss_is_near_zero_but_its_gradient_is_not() -> None:
    """user-reports #22: the value is the mean advantage by construction; the gradient is the policy gradient."""
    logp_RT, mask_RT = leaf([[-1.0, -2.0], [-0.5, -0.1]]), torch.ones(2, 2)
    output = policy_loss(
        logp_RT,
        mask_RT=mask_RT,
        advantage_R=torch.tensor([1.0, -1.0]),
        config=option("dapo"),
        totals=StepTotals.of([mask_RT]),
    )
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert torch.equal(logp_RT.grad, torch.tensor([[-0.25, -0.25], [0.25, 0.25]]))


def test_mismatch_is_reported_raw_and_the_correction_apart() -> None:
    """user-reports #27: the metrics are those before masking."""
    sampler = [[-1.0, -1.0], [-1.0, -1.0]]
    trainer = [[-1.0 + math.log(5.0), -1.0], [-1.5, -0.9]]
    mask_RT = torch.ones(2, 2)
    output = policy_loss(
        leaf(trainer),
        mask_RT=mask_RT,
        advantage_R=torch.tensor([1.0, -1.0]),
        config=option("dapo", importance_correction="token_mask", importance_cap=3.0),
        totals=StepTotals.of([mask_RT]),
        sampler_logp_RT=torch.tensor(sampler),
    )
    metrics = finish_metrics(output.sums)
    diffs = [math.log(5.0), 0.0, -0.5, 0.1]
    assert metrics["mismatch_ratio"] == pytest.approx(sum(map(math.exp, diffs)) / 4)
    assert metrics["mismatch_log_ratio_max"] == pytest.approx(math.log(5.0))
    assert metrics["mismatch_row_log_ratio_max"] == pytest.approx(math.log(5.0))
    assert metrics["mismatch_k1"] == pytest.approx(-sum(diffs) / 4, abs=1e-6)
    assert metrics["mismatch_k3"] == pytest.approx(sum(math.exp(d) - 1 - d for d in diffs) / 4, abs=1e-6)
    assert metrics["corrected"] == 0.25  # the one token with ratio 5


def test_without_correction_the_mismatch_is_still_reported() -> None:
    mask_RT = torch.ones(1, 2)
    output = policy_loss(
        leaf([[-1.0, -1.0]]),
        mask_RT=mask_RT,
        advantage_R=torch.ones(1),
        config=option("dapo"),
        totals=StepTotals.of([mask_RT]),
        sampler_logp_RT=torch.tensor([[-1.5, -1.5]]),
    )
    metrics = finish_metrics(output.sums)
    assert metrics["mismatch_ratio"] == pytest.approx(math.exp(0.5))
    assert metrics["corrected"] == 0.0
    assert output.loss.item() == -1.0


def long_rows(mode: str, noise: float, bias: float = 0.0) -> dict[str, float]:
    """400 rows of 2,000 tokens whose trainer log-probs differ a little from the sampler's."""
    generator = torch.Generator().manual_seed(0)
    sampler_RT = -torch.rand(400, 2000, generator=generator)
    # Of tokens that the sampler drew, E[exp(diff)] = 1, so the mean of a difference of deviation s is -s²/2.
    diff_RT = noise * torch.randn(400, 2000, generator=generator) - noise**2 / 2 + bias
    mask_RT = torch.ones(400, 2000)
    output = policy_loss(
        sampler_RT + diff_RT,
        mask_RT=mask_RT,
        advantage_R=torch.ones(400),
        config=option("dapo", importance_correction=mode),
        totals=StepTotals.of([mask_RT]),
        sampler_logp_RT=sampler_RT,
    )
    return finish_metrics(output.sums)


@pytest.mark.parametrize("noise", [1e-4, 0.01, 0.02])
@pytest.mark.parametrize("mode", ["token_mask", "sequence_mask"])
def test_tiny_differences_over_2000_tokens_mask_under_5_percent(mode: str, noise: float) -> None:
    """user-reports #26."""
    assert long_rows(mode, noise)["corrected"] < 0.05


def test_a_biased_sampler_is_seen_in_the_raw_metrics() -> None:
    """user-reports #26: a difference of one sign masks whole rows at sequence level, none at token level."""
    row, token = long_rows("sequence_mask", 0.0, bias=0.012), long_rows("token_mask", 0.0, bias=0.012)
    assert row["corrected"] == 1.0 and token["corrected"] == 0.0
    assert row["mismatch_k1"] == pytest.approx(-0.012, rel=1e-3)
    assert row["mismatch_row_log_ratio_max"] == pytest.approx(24.0, rel=1e-3)


# ------------------------------------------------------------------------------------------------ masks and NaN


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_fully_masked_row_changes_nothing(loss_type: str, level: str) -> None:
    """user-reports #28; what lies under the mask may even be NaN."""
    config = option(
        loss_type,
        importance_sampling_level=level,
        beta=0.1,
        entropy_coef=0.1,
        importance_correction="sequence_mask",
        max_completion_length=None,
    )

    def run(extra: int) -> tuple[Tensor, Tensor, dict[str, float]]:
        bad = [[math.nan, -math.inf, math.inf]] * extra
        mask_RT = torch.tensor(HAND_MASK + [[0, 0, 0]] * extra)
        logp_RT = leaf(HAND_LOGP + bad)
        output = policy_loss(
            logp_RT,
            mask_RT=mask_RT,
            advantage_R=torch.tensor(HAND_ADVANTAGE + [7.0] * extra),
            config=config,
            totals=StepTotals.of([mask_RT]),
            old_logp_RT=torch.tensor(HAND_OLD + bad),
            sampler_logp_RT=torch.tensor(HAND_OLD + bad),
            ref_logp_RT=torch.tensor(HAND_OLD + bad),
            entropy_RT=torch.tensor(HAND_OLD + bad).neg(),
        )
        output.loss.backward()
        return output.loss, logp_RT.grad, finish_metrics(output.sums)

    loss, grad_RT, metrics = run(0)
    loss_more, grad_more_RT, metrics_more = run(2)
    assert loss_more.item() == pytest.approx(loss.item(), abs=1e-6)  # the order of a sum depends on the shape
    assert torch.allclose(grad_RT, grad_more_RT[:2], atol=1e-6) and not grad_more_RT[2:].any()
    assert metrics_more == pytest.approx(metrics, abs=1e-6)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("shape", [(2, 3), (2, 0), (0, 3)])
def test_nothing_but_masked_rows_gives_zero_and_no_nan(loss_type: str, shape: tuple[int, int]) -> None:
    """user-reports #29."""
    logp_RT = torch.full(shape, -1.0, requires_grad=True)
    mask_RT = torch.zeros(shape)
    config = option(loss_type, beta=0.1, entropy_coef=0.1, importance_correction="sequence_mask")
    output = policy_loss(
        logp_RT,
        mask_RT=mask_RT,
        advantage_R=torch.ones(shape[0]),
        config=config,
        totals=StepTotals.of([mask_RT]),
        sampler_logp_RT=logp_RT.detach(),
        ref_logp_RT=logp_RT.detach(),
        entropy_RT=logp_RT,
    )
    output.loss.backward()
    assert output.loss.item() == 0.0 and not logp_RT.grad.any()
    assert finish_metrics(output.sums) == {"loss": 0.0}


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_an_exploding_ratio_gives_a_finite_gradient(loss_type: str, advantage: float) -> None:
    logp_RT = leaf([[-1.0, -1.0]])
    output = policy_loss(
        logp_RT,
        mask_RT=torch.ones(1, 2),
        advantage_R=torch.tensor([advantage]),
        config=option(loss_type),
        totals=StepTotals.of([torch.ones(1, 2)]),
        old_logp_RT=torch.tensor([[-200.0, -1.0]]),
    )
    output.loss.backward()
    assert torch.isfinite(output.loss) and torch.isfinite(logp_RT.grad).all()


def test_what_the_config_needs_must_be_given() -> None:
    def run(**options: Any) -> None:
        one = torch.ones(1, 1)
        policy_loss(leaf([[-1.0]]), mask_RT=one, advantage_R=one[0], config=option("dapo", **options),
                    totals=StepTotals.of([one]))  # fmt: skip

    run()
    for options, name in (
        ({"beta": 0.1}, "ref_logp_RT"),
        ({"entropy_coef": 0.1}, "entropy_RT"),
        ({"importance_correction": "token_mask"}, "sampler_logp_RT"),
    ):
        with pytest.raises(ValueError, match=name):
            run(**options)


def test_totals_count_rows_with_tokens() -> None:
    first, second = torch.tensor([[1, 1, 0], [0, 0, 0]]), torch.tensor([[1, 1, 1, 1]])
    assert StepTotals.of([first.numpy().astype(bool), second]) == StepTotals(rows=2, tokens=6, max_completion_length=4)
    assert StepTotals.of([first], 99).max_completion_length == 99
    assert StepTotals.of([]) == StepTotals(rows=0, tokens=0, max_completion_length=1)


def test_sft_loss_is_the_mean_nll_over_the_step() -> None:
    logp_RT = leaf([[-1.0, -2.0, math.nan], [-3.0, math.nan, math.nan]])
    mask_RT = torch.tensor([[1, 1, 0], [1, 0, 0]])
    totals = StepTotals.of([mask_RT])
    output = sft_loss(logp_RT, mask_RT, totals)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(2.0)
    assert torch.allclose(logp_RT.grad, torch.tensor([[-1 / 3, -1 / 3, 0.0], [-1 / 3, 0.0, 0.0]]))
    parts = [sft_loss(logp_RT[row : row + 1], mask_RT[row : row + 1], totals) for row in (0, 1)]
    assert (parts[0].loss + parts[1].loss).item() == pytest.approx(2.0)
    assert finish_metrics(add_sums(parts[0].sums, parts[1].sums)) == pytest.approx({"loss": 2.0, "nll": 2.0})
    assert sft_loss(logp_RT, torch.zeros(2, 3), StepTotals.of([])).loss.item() == 0.0
