"""Small functions of ART's `utils`. Import them from artnb.utils, where ART has them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import pydantic
from openai.types.chat.chat_completion import Choice

from ..training.checkpoints import CheckpointStore, model_folder

if TYPE_CHECKING:
    from ..asked_model import Model

P = ParamSpec("P")
R = TypeVar("R")


def strip_logprobs(obj: Any) -> Any:
    """A copy of nested dicts, lists, tuples and pydantic objects without their "logprobs": traces stay small."""
    if isinstance(obj, Mapping):
        return {key: strip_logprobs(value) for key, value in obj.items() if key != "logprobs"}
    if isinstance(obj, list):
        return [strip_logprobs(value) for value in obj]
    if isinstance(obj, tuple) and not hasattr(obj, "_fields"):
        return tuple(strip_logprobs(value) for value in obj)
    if isinstance(obj, pydantic.BaseModel):
        held = {name: getattr(obj, name) for name in (*type(obj).model_fields, *(obj.model_extra or ()))}
        return obj.model_copy(
            update={name: None if name == "logprobs" else strip_logprobs(value) for name, value in held.items()}
        )
    return obj


def format_message(message: Mapping[str, Any]) -> str:
    """A message for people: its role, its text, and one line `name(arguments)` for each tool call."""
    lines = [f"{str(message['role']).capitalize()}:"]
    if text := message.get("content") or message.get("refusal"):
        lines.append(str(text))
    for call in message.get("tool_calls") or ():
        if function := call.get("function"):
            lines.append(f"{function['name']}({function['arguments']})")
    return "\n".join(lines)


def limit_concurrency(
    n: int, derive_key: Callable[..., str] | None = None
) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Awaitable[R]]]:
    """Decorate an async function so that at most `n` calls run at a time, for each key that `derive_key` gives.

    `gather_trajectory_groups(..., max_concurrency=n)` does it for rollouts, and starts earlier groups first.
    """

    def decorate(function: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
        # A semaphore belongs to one event loop; each loop has its own, and a loop that ended keeps none.
        waiting: dict[tuple[int, str], tuple[asyncio.AbstractEventLoop, asyncio.Semaphore]] = {}

        @functools.wraps(function)
        async def limited(*args: P.args, **kwargs: P.kwargs) -> R:
            loop = asyncio.get_running_loop()
            key = (id(loop), "" if derive_key is None else derive_key(*args, **kwargs))
            for old in [k for k, (owner, _) in waiting.items() if owner.is_closed()]:
                del waiting[old]
            _, semaphore = waiting.setdefault(key, (loop, asyncio.Semaphore(n)))
            async with semaphore:
                return await function(*args, **kwargs)

        return limited

    return decorate


def get_model_step(model: Model, art_path: str | Path) -> int:
    """The newest complete checkpoint below `art_path`, without a backend; 0 if there is none."""
    return CheckpointStore(model_folder(art_path, model.project, model.name)).latest() or 0


def convert_litellm_choice_to_openai(litellm_choice: Any) -> Choice:
    """A choice of a whole LiteLLM answer as OpenAI's, its log-probs and token ids included: it can be trained on."""
    given = litellm_choice.model_dump()
    message = given["message"]
    kept = {name: message[name] for name in ("role", "content", "tool_calls", "reasoning_content") if message.get(name)}
    return Choice.model_validate(
        {
            **(given.get("provider_specific_fields") or {}),  # where LiteLLM keeps what OpenAI's choices have not
            "index": given["index"],
            "finish_reason": given["finish_reason"],
            "message": {"role": "assistant", "content": None, **kept},
            "logprobs": given.get("logprobs"),
        }
    )
