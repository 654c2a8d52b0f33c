"""A judge for models that are too small to judge in words: how much the task raises the likelihood of the answer.

Score of a trajectory: the pointwise mutual information of task and answer, log p(answer | task) − log p(answer), as the
mean over the answer's tokens (Holtzman et al. 2021, https://arxiv.org/abs/2104.08315), under the base weights, every
adapter off. Each trajectory is scored by itself, so no place in a list can be preferred.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, JudgeError, RenderError
from ..trajectories import History, Tools, Trajectory

if TYPE_CHECKING:
    from ..model import TrainableModel
    from .judges import JudgeUsage

_NO_TASK: list[Any] = [{"role": "user", "content": ""}]


class LikelihoodJudge:
    """The base weights of a model on a LocalBackend, asked how likely they find each answer. It samples nothing.

        judged = await ruler_score_group(group, LikelihoodJudge(model))

    The score is 1 / (1 + e^−x), x being the nats a token by which the messages before the first answer make the
    assistant's turns likelier; 0.5 says that they make no difference. It reads no rubric. It tells answers that fit
    the task and are well-formed from those that are not; whether a long argument is right it cannot tell, and a model
    that is trained on it alone learns to say what is expected. `judge_accuracy` measures it on the model at hand.
    """

    def __init__(self, model: TrainableModel) -> None:
        from ..model import TrainableModel

        if not isinstance(model, TrainableModel):
            raise ConfigError(f"LikelihoodJudge takes an art.TrainableModel, not a {type(model).__name__}")
        self.model = model
        self.name = f"likelihood under {model.base_model}"

    async def compare(
        self, conversations: Sequence[tuple[list[Any], list[list[Any]]]], tools: Tools | None, usage: JudgeUsage
    ) -> dict[int, tuple[float, str]]:
        """Index → (score, explanation); without those that are longer than the context or hold no answer.

        Raises: JudgeError for messages that the model's chat template cannot render, ConfigError for a backend that
        does not have the weights in this process.
        """
        from ..backend import HasBaseLogprobs

        backend = await self.model.ready()
        if not isinstance(backend, HasBaseLogprobs):
            raise ConfigError(
                f"LikelihoodJudge needs the weights in this process, and {type(backend).__name__} has them elsewhere: "
                "use judge_model=model, which asks its base in words, or an art.LocalBackend"
            )
        with_task = [_trajectory(conversation, tools) for conversation in conversations]
        without = [_trajectory((_cut(messages), [_cut(o) for o in others]), None) for messages, others in conversations]
        try:
            found = await backend.base_logprobs(self.model, [*with_task, *without])
        except RenderError as error:
            raise JudgeError(f"{self.name}: the messages cannot be rendered: {error}") from error
        count = len(conversations)
        said: dict[int, tuple[float, str]] = {}
        for index, (given, alone) in enumerate(zip(found[:count], found[count:], strict=True)):
            if given is None or alone is None:
                continue
            usage.requests += 1
            usage.prompt_tokens += given.row_tokens + alone.row_tokens
            likely, base = float(given.values.mean()), float(alone.values.mean())
            gain = likely - base
            why = f"{gain:+.2f} nats a token by the task ({likely:.2f} with it, {base:.2f} without)"
            said[index] = (1.0 / (1.0 + math.exp(-gain)), why)
        return said

    def __repr__(self) -> str:
        return f"LikelihoodJudge({self.model!r})"


def _trajectory(conversation: tuple[list[Any], list[list[Any]]], tools: Tools | None) -> Trajectory:
    messages, others = conversation
    histories = [History(messages_and_choices=other) for other in others]
    return Trajectory(messages_and_choices=messages, additional_histories=histories, tools=tools)


def _cut(messages: list[Any]) -> list[Any]:
    """The conversation without what was said before its first answer to anything."""
    for index in range(1, len(messages)):
        answers = messages[index].get("role") == "assistant"
        if answers and any(before.get("role") != "assistant" for before in messages[:index]):
            return [*_NO_TASK, *messages[index:]]
    return []
