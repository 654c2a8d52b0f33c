"""A rollout of a model that artnb does not serve, e.g. a larger one to compare with: its answers on the trajectory.

They have no token ids and train nothing. Answers of our own endpoints are recorded by capture.py.
"""

from __future__ import annotations

from typing import Any, cast

from openai.types.chat.chat_completion import Choice

from ..capture import CaptureRegistry, ChoiceRecord, auto_trajectory, comparables
from ..model import Model
from ..trajectories import MessagesAndChoices


def record_foreign(model: Model, request: dict[str, Any], said: dict[str, Any], reason: str) -> None:
    """Write the answer `said` to `request` (both as OpenAI's JSON) on the current trajectory.

    Nothing where it stands already: the other endpoint is one of this process, and has recorded it with its tokens.
    """
    trajectory = auto_trajectory()
    whole = comparables(cast(MessagesAndChoices, [*request["messages"], said]))
    if trajectory is None or any(comparables(items) == whole for items, _ in trajectory.histories()):
        return
    choice = Choice.model_validate({"index": 0, "finish_reason": reason, "message": said, "logprobs": None})
    record = ChoiceRecord(request["messages"], request.get("tools"), choice, name=model.name, step=None)
    CaptureRegistry().begin(None, streamed=False).add(record)
