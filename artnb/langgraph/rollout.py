"""wrap_rollout: a rollout that says which model its agent asks, and comes back with what that model was asked and said.

What is sampled is recorded by capture.py, whoever asked. Here it is put on the trajectory that the rollout returns.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar, cast

from openai.types.chat.chat_completion import Choice

from ..capture import comparables, trajectory
from ..collector import not_collected
from ..errors import ConfigError
from ..gather import finished
from ..model import Model
from ..trajectories import History, Trajectory, attach_trajectory

P = ParamSpec("P")
TrajectoryT = TypeVar("TrajectoryT", bound=Trajectory)

rollout_model: ContextVar[Model | None] = ContextVar("artnb_rollout_model", default=None)
"""The model of the rollout that runs here; what `init_chat_model()` without a model asks."""


def wrap_rollout(
    model: Model, fn: Callable[P, Awaitable[TrajectoryT]] | Callable[P, TrajectoryT]
) -> Callable[P, Awaitable[TrajectoryT]]:
    """A rollout that asks `model` through `init_chat_model` and returns its trajectory with the messages filled in.

        async def rollout(model: art.TrainableModel, question: str) -> art.Trajectory:
            agent = create_agent(init_chat_model(temperature=1.0), tools=[search])
            result = await agent.ainvoke({"messages": [("user", question)]})
            return art.Trajectory(reward=score(result["messages"][-1].text))

        art.TrajectoryGroup(wrap_rollout(model, rollout)(model, question) for _ in range(8))

    What `fn` returns keeps reward, metrics, metadata and logs. Its messages, tools and further histories are replaced
    by what was recorded: every call of the model, streamed or not, from any thread of the rollout, with the tokens that
    were sampled. The main history is the conversation that began first; where an answer was thrown away and asked for
    again, it is the one that went on, and the other one stays as a further history: it was sampled, so it is trained.

    `fn` may be synchronous: then it runs in a thread, so that rollouts still run side by side.

    What `fn` raises is raised. The exception carries what was recorded until then, with the traceback, and a gather's
    group keeps that as a failed trajectory, which is shown and counted, and not trained.
    """
    if not isinstance(model, Model):
        raise ConfigError(
            f"wrap_rollout takes the model first, then the rollout: wrap_rollout(model, rollout); not {model!r:.80}"
        )
    if not callable(fn):
        raise ConfigError(f"wrap_rollout: the rollout must be a function, not {fn!r:.80}; do not call it yourself")

    @functools.wraps(fn)
    async def wrapped(*args: P.args, **kwargs: P.kwargs) -> TrajectoryT:
        token = rollout_model.set(model)
        scope = trajectory()
        try:
            # The trajectory is returned to be trained on; it shall not wait for model.train() as well.
            with not_collected():
                async with scope:
                    result = await _call(fn, args, kwargs)
                    if not isinstance(result, Trajectory):
                        raise TypeError(
                            f"the rollout returned a {type(result).__name__}, not a Trajectory (is a `return` missing?)"
                        )
        except BaseException as error:
            attach_trajectory(error, _failed(scope.trajectory))
            raise
        finally:
            rollout_model.reset(token)
        return cast(TrajectoryT, _filled(result, scope.trajectory))

    return wrapped


async def _call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if inspect.iscoroutinefunction(fn):
        return await fn(*args, **kwargs)
    result = await asyncio.to_thread(fn, *args, **kwargs)
    return await result if inspect.isawaitable(result) else result


def _failed(recorded: Trajectory) -> Trajectory:
    recorded.reward = None
    follow_the_conversation(recorded)
    return finished(recorded)


def _filled(result: Trajectory, recorded: Trajectory) -> Trajectory:
    follow_the_conversation(recorded)
    if result is recorded:  # the rollout took it with art.auto_trajectory()
        return finished(result)
    if recorded.messages_and_choices:
        result.messages_and_choices = recorded.messages_and_choices
        result.tools = recorded.tools
        result.additional_histories = recorded.additional_histories
        result.initial_policy_version = recorded.initial_policy_version
        result.final_policy_version = recorded.final_policy_version
    result.start_time = recorded.start_time
    result.metrics.setdefault("duration", recorded.metrics["duration"])
    if result.stop_reason is None:
        result.stop_reason = recorded.stop_reason
    return finished(result)


def follow_the_conversation(recorded: Trajectory) -> None:
    """Make the main history the one that went on, where its last answer was thrown away and asked for once more.

    A request that was answered before starts a further history (capture.py), in which the earlier answers are context.
    Here both change places, and the earlier answers stay on the main one, where they are trained.
    """
    while (again := _asked_again(recorded)) is not None:
        main, other = recorded.messages_and_choices, again.messages_and_choices
        at = len(main) - 1
        again.messages_and_choices = [*other[:at], main[at]]
        recorded.messages_and_choices = [*main[:at], *other[at:]]
        if len(other) == len(main):  # the last of equals
            break


def _asked_again(recorded: Trajectory) -> History | None:
    """The history that gives another answer where the main one ends: the longest, and the last of those."""
    main = recorded.messages_and_choices
    if not main or not isinstance(main[-1], Choice):
        return None
    at, asked = len(main) - 1, comparables(main[:-1])
    found: History | None = None
    for history in recorded.additional_histories:
        items = history.messages_and_choices
        if (
            len(items) >= len(main if found is None else found.messages_and_choices)
            and isinstance(items[at], Choice)
            and (history.tools or []) == (recorded.tools or [])
            and comparables(items[:at]) == asked
        ):
            found = history
    return found
