"""What of ART artnb has not, or has in another way, on purpose: why, and what to do instead.

tests/test_compat_signatures.py compares every recorded name of openpipe-art with artnb's and finds each difference
here; docs/compatibility.md is this list for people. A name is 'art.module.name', a parameter 'art.name(parameter)'.
"""

from __future__ import annotations

import fnmatch
from typing import NamedTuple


class Difference(NamedTuple):
    """Names (with wildcards), and what is said about them."""

    names: tuple[str, ...]
    instead: str


DIFFERENCES: tuple[Difference, ...] = (
    Difference(
        ("art.TrainConfig.learning_rate",),
        "the default is 1e-5, not 5e-6; a notebook that gives its own is not concerned",
    ),
    Difference(
        (
            *("art.TrainConfig.kl_penalty_coef", "art.TrainConfig.kl_penalty_source"),
            *("art.TrainConfig.final_training_step", "art.TrainConfig.grad_accumulation_sequences"),
            "art.TrainConfig.optimizer_save_interval",
        ),
        "TrainConfig has the options of GRPO by TRL's names; beta= is a KL to the base model, minibatches= the "
        "optimizer steps of a pass, and every checkpoint has its optimizer state",
    ),
    Difference(
        ("art.*LocalBackend.__init__(in_process)", "art.*LocalBackend.__init__(path)"),
        "the trainer is always in this process (in_process=False raises; engine='vllm-process' puts the engine into "
        "another), and path is '.art' below the working directory, not below the repository",
    ),
    Difference(
        ("art.*LocalBackend.__init__(gpu_cost_per_hour_usd)", "art.*LocalBackend.__init__(enable_expert_replay)"),
        "no prices are kept, and mixture-of-experts models are not trained",
    ),
    Difference(
        (
            *("art.*Backend.*adapter*_lease", "art.*LocalBackend.prune_model_adapters"),
            *("art.*LocalBackend.*metrics*", "art.*LocalBackend.automatic_gpu_cost_per_hour_usd"),
            "art.ServerlessBackend.logs_sft_metrics_remotely",
        ),
        "a request keeps the adapter that it began with; name@step asks for an older one. The backend measures itself",
    ),
    Difference(
        ("art.*Model.register(await)",),
        "register starts at once and returns something to await; without await, what needs the model waits for it",
    ),
    Difference(
        ("art.dev.OpenAIServerConfig", "art.dev.ServerArgs", "art.dev.get_openai_server_config"),
        "the endpoint's options are LocalBackend's: host=, port=, engine_options=. register(_openai_client_config=...) "
        "raises",
    ),
    Difference(
        ("art.*Model.__init__(id)", "art.*Model.__init__(run_id)"),
        "model.id and model.run_id are set by a service that has such; they cannot be chosen",
    ),
    Difference(
        ("art.*Model.safe_model_dump", "art.*Model.model_dump"),
        "a model handle is a plain object, not a pydantic one; its options are its attributes",
    ),
    Difference(("art.*Model.write_state",), "use overwrite_state or merge_state, as ART says too"),
    Difference(
        (
            *("art.*Model.metrics_builder", "art.*Model.activate_metrics_context", "art.*Model.cost_calculator"),
            *("art.*Model.set_cost_calculator", "art.MetricDefinition", "art.PIPELINE_RL_*", "art.model.METRIC*"),
            "art.model.WANDB_*",
        ),
        "metrics are numbers: put yours into trajectory.metrics or model.log(metrics=...); no prices are kept",
    ),
    Difference(
        ("art.TrainableModel.train_sft(log_metrics)", "art.utils.sft.train_sft_from_file(log_metrics)"),
        "the metrics of a step are always kept",
    ),
    Difference(
        ("art.*assistant_turns", "art.*(assistant_turns)", "art.utils.sft.resolve_sft_batch_size"),
        "every assistant turn of a conversation is trained; leave out of it what should not be",
    ),
    Difference(
        ("art.LocalTrainResult.checkpoint_ready",),
        "train returns when the checkpoint is on disk",
    ),
    Difference(("art.Trajectory.auto_metrics",), "token counts and durations are in trajectory.metrics"),
    Difference(
        (
            *("art.Trajectory.exchanges", "art.Trajectory.*_histor*", "art.Trajectory.history"),
            *("art.Trajectory.histories(*", "art.*model_copy(*", "art.*model_dump*(*", "art.*compact*"),
            *("art.trajectories.*History", "art.trajectories.*Source*", "art.trajectories.*Exchange*"),
            *("art.trajectories.*Request", "art.trajectories.Compact*", "art.trajectories.History.*"),
        ),
        "a trajectory is its messages and sampled choices (messages_and_choices, additional_histories); exchanges of "
        "other protocols are not recorded",
    ),
    Difference(
        (
            *("art.tokenize", "art.tensorize", "art.*.tokenize", "art.*.tensorize", "art.trajectories.Token*"),
            *("art.trajectories.Tensor*", "art.trajectories.first_occurrence_masks", "art.get_tokenizer"),
        ),
        "nothing is tokenized a second time: choices carry the ids that were sampled, and "
        "artnb.training.rows.rows_from_trajectory makes rows of them",
    ),
    Difference(
        (
            *("art.trajectories.current_trajectory", "art.trajectories.no_capture", "art.trajectories.trajectory"),
            *("art.trajectories.trajectory_group", "art.yield_trajectory.*", "art.auto_trajectory.*"),
        ),
        "import them from art itself",
    ),
    Difference(
        ("art.trajectory(*",),
        "art.trajectory() is a scope, `async with art.trajectory(group=...) as t`; given a coroutine it is awaited as "
        "in ART. The reward of what is captured starts as None, which is unscored, and not as 0",
    ),
    Difference(
        ("art.rewards.ruler.Response",),
        "what a judge may answer is RULER's own business; the scores are art.rewards.TrajectoryScore",
    ),
    Difference(
        ("art.gather.*",),
        "a gather's inside: after_each= sees groups, and the progress line shows the rollouts' metrics by itself",
    ),
    Difference(
        (
            *("art.dev.Tinker*", "art.dev.Vllm*", "art.dev.BackendModelConfig", "art.dev.RolloutWeightUpdateMode"),
            *("art.dev.TrainSFTConfig", "art.dev.is_*"),
            "art.dev.validate_dedicated_config",
        ),
        "art.dev has the dicts that LocalBackend's models take; see the options above",
    ),
    Difference(
        (
            *("art.*Megatron*", "art.*_megatron_*", "art.Pipeline*", "art.LocalServingUnavailableError"),
            *("art.megatron*", "art.tinker*", "art.pipeline*", "art.distributed*", "art.trainer_rank*", "art.unsloth*"),
            *("art.preprocessing*", "art.loss", "art.mcp*", "art.tau_bench*", "art.vllm*", "art.transformers*"),
        ),
        "one machine trains; what ART has for clusters and other services is not here",
    ),
    Difference(
        (
            *("art.types.SFTMetricLoggingConfig", "art.types.Verbosity", "art.utils.record_provenance"),
            *("art.utils.log_http_errors*", "art.utils.get_model_step.get_step_from_dir"),
        ),
        "not needed: errors say what was answered, and art.utils.get_model_step reads a folder's newest step",
    ),
)


def matching(name: str) -> Difference | None:
    """The entry for a name or parameter; None if there is none."""
    for difference in DIFFERENCES:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in difference.names):
            return difference
    return None


def reason(name: str) -> str:
    """'; …' for a name below `art` that artnb has not on purpose, for the end of an error; '' for any other."""
    found = matching(f"art.{name}")
    return "" if found is None else f"; {found.instead} (docs/compatibility.md)"
