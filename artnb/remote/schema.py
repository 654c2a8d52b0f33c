"""The JSON of `artnb serve`, as pydantic models: what its OpenAPI says, and the first check of every request.

Shapes only. Whether a step's groups can train, or a name can be a folder's, is for the job to say.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _whole(value: Any) -> Any:
    """JSON has one kind of number: 3.0 is a whole one."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
Step = Annotated[int, Field(ge=0, le=2**53), BeforeValidator(_whole)]
Json = dict[str, Any]
JobId = Annotated[
    str, Field(pattern="^[0-9a-f]{32}$", description="Made by the client; sent again, it is the same job")
]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Body(BaseModel):
    """A request's: JSON types as they are, no further fields."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Answer(BaseModel):
    """A response's."""


# Jobs -------------------------------------------------------------------------------------------------


class Lora(Body):
    """The fields of LoraConfig."""

    r: Whole
    alpha: float
    target_modules: str | list[str]
    seed: Whole


class Group(Body):
    """A group, and its trajectories, as the history keeps them."""

    group: Json
    trajectories: list[Json]


class OfModel(Body):
    project: str
    name: str


class Register(OfModel):
    """Load the base, resume or create the adapter, serve it."""

    kind: Literal["register"]
    base_model: str
    lora: Lora


class Fork(OfModel):
    """Start a model, which is not registered yet, from another one's checkpoint."""

    kind: Literal["fork"]
    base_model: str
    lora: Lora
    from_model: str
    from_project: str
    step: Step | None
    not_after_step: Step | None


class Train(OfModel):
    """One GRPO step, from step `from_step` of the model to the next."""

    kind: Literal["train"]
    from_step: Step
    config: Json
    groups: list[Group]


class TrainSFT(OfModel):
    """One supervised step."""

    kind: Literal["train_sft"]
    from_step: Step
    config: Json
    trajectories: list[Json]


class Push(OfModel):
    """Make an uploaded adapter the next step."""

    kind: Literal["push"]
    from_step: Step
    adapter: Sha256
    adapter_config: Json


class BaseLogprobs(OfModel):
    """How likely the base, without an adapter, finds the assistant turns of each trajectory."""

    kind: Literal["base_logprobs"]
    trajectories: list[Json]


class Log(OfModel):
    """Keep groups and metrics in the server's history, too."""

    kind: Literal["log"]
    step: Step
    split: str
    metrics: dict[str, float | int | bool | None]
    groups: list[Group]


class DeleteCheckpoints(OfModel):
    kind: Literal["delete_checkpoints"]
    steps: list[Step]


JobRequest = Annotated[
    Register | Fork | Train | TrainSFT | Push | BaseLogprobs | Log | DeleteCheckpoints,
    Field(discriminator="kind"),
]


class JobState(Answer):
    """A job. `result` and `error` are of its end; a job that `failed` may have kept its step: see `step`."""

    id: str
    kind: str
    project: str
    name: str
    state: Literal["running", "done", "failed", "cancelled"]
    step: int | None = Field(description="The model's step when the job ended")
    result: Json | None = None
    error: Json | None = None


# Models -----------------------------------------------------------------------------------------------


class ModelState(Answer):
    project: str
    name: str
    base_model: str
    step: int
    checkpoints: list[int]
    context_tokens: int | None
    training: str | None = Field(description="The job that changes the model now, if any")


class CheckpointFile(Answer):
    name: str
    size: int
    sha256: str


class Checkpoint(Answer):
    """A checkpoint's files that can be fetched: safetensors and JSON."""

    step: int
    files: list[CheckpointFile]


class Saved(Answer):
    """Trajectories that are kept."""

    step: int
    split: str


class HistoryList(Answer):
    """What the server's history has of later steps: records of metrics, and where there are trajectories."""

    metrics: list[Json]
    trajectories: list[Saved]


class Adapter(Answer):
    sha256: str
    size: int


class ServerState(Answer):
    version: str
    base_models: list[str] | None = Field(description="Those that may be registered; null: any of the Hugging Face hub")
    max_body_bytes: int
    models: list[ModelState]


class Health(Answer):
    status: Literal["ok"]
    version: str


# Errors and the OpenAI endpoint -----------------------------------------------------------------------


class ErrorDetail(Answer):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class Error(Answer):
    """OpenAI's shape."""

    error: ErrorDetail


class ModelCard(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(Answer):
    object: Literal["list"]
    data: list[ModelCard]


class ChatCompletion(Answer):
    """OpenAI's answer. Each choice also has `token_ids`, `prompt_token_ids`, `temperature` and `policy`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[Json]
    usage: Json
