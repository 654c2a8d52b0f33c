"""RULER: a judge compares the trajectories of a group with each other, and its scores become their rewards.

    groups = await art.gather_trajectory_groups(
        (art.TrajectoryGroup(rollout(model, s) for _ in range(8)) for s in scenarios),
        after_each=lambda group: ruler_score_group(group, judge))

Who the judge is and how it is reached: judges.py. What it reads: ruler_question.py. How its answer is read:
ruler_answer.py. Nobody but the judge makes up a score: a trajectory without one is unscored.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import pydantic
from openai.types.chat.chat_completion import Choice

from ..config import check_choice, check_number
from ..errors import ConfigError, JudgeError
from ..trajectories import Messages, Tools, Trajectory, TrajectoryGroup, messages_of
from .copying import copy_group
from .judges import AskedJudge, JudgeUsage, as_judge
from .likelihood import LikelihoodJudge
from .ruler_answer import Verdict, read_answer
from .ruler_question import DEFAULT_RUBRIC, Question, answer_schema, make_question

if TYPE_CHECKING:
    from ..model import Model

__all__ = ["DEFAULT_JUDGE", "DEFAULT_RUBRIC", "RulerScores", "TrajectoryScore", "ruler", "ruler_score_group"]

log = logging.getLogger(__name__)

DEFAULT_JUDGE = "openai/o3"
TIMEOUT = 300.0
"""Seconds for one request. Judges that think take a minute or two."""

JudgeModel: TypeAlias = "str | AskedJudge | LikelihoodJudge | Model"
Orders = Literal["one", "two"]
Conversation = tuple[list[Any], list[list[Any]]]  # messages, and those of further histories


class TrajectoryScore(pydantic.BaseModel):
    """What the judge said of one trajectory. `score` is None where it gave none: that trajectory is unscored."""

    trajectory_id: str = pydantic.Field(description="Place in the list that was given, from '1'.")
    explanation: str
    score: float | None = pydantic.Field(description="From 0 (worst) to 1 (best), against the others of the group.")


class RulerScores(list[TrajectoryScore]):
    """One score for each trajectory, in the order given; `usage` is what judging took."""

    def __init__(self, scores: Sequence[TrajectoryScore], usage: JudgeUsage) -> None:
        super().__init__(scores)
        self.usage = usage


async def ruler(
    message_lists: Sequence[Messages] | Sequence[list[dict[str, Any]]],
    judge_model: JudgeModel = DEFAULT_JUDGE,
    extra_litellm_params: Mapping[str, Any] | None = None,
    rubric: str = DEFAULT_RUBRIC,
    tools: Tools | None = None,
    *,
    debug: bool = False,
    orders: Orders = "one",
    seed: int | None = None,
    timeout: float | None = TIMEOUT,
) -> RulerScores:
    """Scores of conversations that were attempts at the same task, against each other. Needs no model of artnb.

        scores = await ruler([messages_a, messages_b, messages_c], Judge("qwen3:8b", base_url=url, api_key="-"))
        [s.score for s in scores]

    Args:
        message_lists: message dicts, as OpenAI has them. What all have in common at their beginning is sent once.
        judge_model: a LiteLLM name; a `Judge` for any OpenAI-compatible endpoint; an `art.Model`; an
            `art.TrainableModel`, whose base weights judge with the adapter off; or a `LikelihoodJudge` of one, for
            models that are too small to judge in words.
        extra_litellm_params: further fields of the judge's requests (temperature, max_tokens, api_base, …).
        rubric: what makes one attempt better than another.
        tools: the tools that the agent had.
        debug: print what the judge was asked and what it said.
        orders: "one": shown in a random order. "two": judged twice, in a random order and its reverse, and averaged,
            for twice the tokens. A judge that prefers what stands first then says the same of two candidates.
        seed: of the random order, which then is the same for the same conversations; None: a new one each time.
        timeout: seconds for each request; None: no limit but the client's own.

    A conversation without messages, and one that the judge left out or scored out of range after being asked once
    more, has the score None.

    Raises: JudgeError when nothing usable came back (what to do about it is in the message), ConfigError.
    """
    conversations = _conversations(message_lists)
    usage = JudgeUsage()
    asked = _Asked(
        judge_model, extra_litellm_params, rubric, tools, debug=debug, orders=orders, seed=seed, timeout=timeout
    )
    return RulerScores(await asked.score(conversations, usage), usage)


async def ruler_score_group(
    group: TrajectoryGroup,
    judge_model: JudgeModel = DEFAULT_JUDGE,
    extra_litellm_params: Mapping[str, Any] | None = None,
    rubric: str = DEFAULT_RUBRIC,
    *,
    swallow_exceptions: bool = False,
    debug: bool = False,
    orders: Orders = "one",
    seed: int | None = None,
    timeout: float | None = TIMEOUT,
) -> TrajectoryGroup:
    """A copy of the group whose rewards are the judge's scores; the group that was given stays as it is.

    Each trajectory keeps what it had been given as `metrics["independent_reward"]`, has the score as
    `metrics["ruler_score"]` too, and the explanation in its logs. One without a score has the reward None: it does not
    train, and is never counted as a 0. Tokens and cost are in the group's metrics as `judge/…`, and in the history as
    sums over the step. Arguments as of `ruler`.

    With `swallow_exceptions` a judge that fails leaves the whole group unscored, `metrics["judge/failed"]` says 1 and
    the reason is logged; without it, JudgeError is raised. A wrong option raises ConfigError either way.
    """
    if not isinstance(group, TrajectoryGroup):
        raise ConfigError(f"ruler_score_group takes a TrajectoryGroup, not a {type(group).__name__}")
    tools = next((t.tools for t in group if t.tools), None)
    asked = _Asked(
        judge_model, extra_litellm_params, rubric, tools, debug=debug, orders=orders, seed=seed, timeout=timeout
    )
    judged = copy_group(group)
    usage = JudgeUsage()
    try:
        scores = await asked.score([_conversation(t) for t in group], usage)
    except JudgeError as error:
        if not swallow_exceptions:
            raise
        log.warning("a group of %d trajectories is left unscored: %s", len(group), error)
        judged.log(f"judge: {error}")
        judged.metrics["judge/failed"] = 1
        scores = [_unscored(i, f"the judge failed: {error}") for i in range(len(group))]
    for trajectory, score in zip(judged, scores, strict=True):
        _set_reward(trajectory, score)
    if left_out := sum(score.score is None for score in scores):
        judged.metrics["judge/left_out"] = left_out
    judged.metrics.update(usage.metrics())
    return judged


class _Asked:
    """One call's options, checked before anything is sent."""

    def __init__(
        self,
        judge_model: Any,
        options: Mapping[str, Any] | None,
        rubric: str,
        tools: Tools | None,
        *,
        debug: bool,
        orders: str,
        seed: int | None,
        timeout: float | None,
    ) -> None:
        check_choice("ruler", "orders", orders, ("one", "two"))
        if not isinstance(rubric, str) or not rubric.strip():
            raise ConfigError("ruler: rubric must be a text that says what makes one attempt better than another")
        if seed is not None:
            check_number("ruler", "seed", seed, whole=True)
        if timeout is not None:
            check_number("ruler", "timeout", timeout, above=0.0)
        self.options = dict(options or {})
        self.judge = judge_model if isinstance(judge_model, LikelihoodJudge) else as_judge(judge_model)
        if isinstance(judge_model, LikelihoodJudge):
            if self.options:
                raise ConfigError(
                    f"ruler: a LikelihoodJudge samples nothing, so it takes no options: {[*self.options]}"
                )
            if rubric != DEFAULT_RUBRIC:
                raise ConfigError(
                    "ruler: a LikelihoodJudge reads no rubric; leave rubric= out, or ask a judge in words"
                )
        self.rubric = rubric
        self.tools = tools
        self.debug = debug
        self.orders = orders
        self.seed = seed
        self.timeout = timeout

    async def score(self, conversations: Sequence[Conversation], usage: JudgeUsage) -> list[TrajectoryScore]:
        """One score for each conversation. `usage` counts what was spent, also when it raises."""
        scores = [_unscored(i, "there are no messages to judge") for i in range(len(conversations))]
        present = [i for i, (messages, others) in enumerate(conversations) if messages or others]
        if not present:
            return scores
        if isinstance(self.judge, LikelihoodJudge):
            said = await self._compare(self.judge, [conversations[i] for i in present], usage)
        else:
            question = make_question([conversations[i] for i in present], self.rubric, self.tools)
            said = await self._ask_all(self.judge, question, usage)
        for place, (score, explanation) in said.items():
            index = present[place]
            scores[index] = TrajectoryScore(trajectory_id=str(index + 1), explanation=explanation, score=score)
        for index in set(present) - {present[place] for place in said}:
            scores[index] = _unscored(index, "the judge gave it no usable score")
        return scores

    async def _compare(
        self, judge: LikelihoodJudge, conversations: Sequence[Conversation], usage: JudgeUsage
    ) -> dict[int, tuple[float, str]]:
        try:
            async with asyncio.timeout(self.timeout):
                said = await judge.compare(conversations, self.tools, usage)
        except TimeoutError as error:
            raise JudgeError(
                f"the judge {judge.name} was not done within {self.timeout:g} s: raise timeout="
            ) from error
        if self.debug:
            print(f"[ruler] {judge.name}: {said}", flush=True)
        return said

    async def _ask_all(self, judge: AskedJudge, question: Question, usage: JudgeUsage) -> dict[int, tuple[float, str]]:
        """Place in the question's conversations → (score, explanation), averaged over the orders."""
        first = self._order(question)
        orders = [first] if self.orders == "one" or len(first) == 1 else [first, first[::-1]]
        results = await asyncio.gather(
            *(self._ask_once(judge, question, order, usage) for order in orders), return_exceptions=True
        )
        answers = [result for result in results if not isinstance(result, BaseException)]
        for result in results:
            if isinstance(result, BaseException) and (not answers or not isinstance(result, JudgeError)):
                raise result
            if isinstance(result, JudgeError):
                log.warning("one of two orders was judged: %s", result)
        said: dict[int, tuple[float, str]] = {}
        for candidate, members in enumerate(question.members):
            given = [answer[candidate] for answer in answers if candidate in answer]
            if given:
                mean = statistics.fmean(score for score, _ in given)
                explanation = " / ".join(text for _, text in given if text)
                said.update(dict.fromkeys(members, (mean, explanation)))
        return said

    def _order(self, question: Question) -> list[int]:
        """A random order of the candidates. With a seed it depends on that and on what is shown, on nothing else."""
        if self.seed is None:
            rng = random.Random()
        else:
            text = "\0".join([str(self.seed), question.shared, *question.shown])
            rng = random.Random(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest())
        order = list(range(len(question)))
        rng.shuffle(order)
        return order

    async def _ask_once(
        self, judge: AskedJudge, question: Question, order: Sequence[int], usage: JudgeUsage
    ) -> dict[int, tuple[float, str]]:
        """Candidate → (score, explanation), after at most two requests. Raises: JudgeError when there is none."""
        messages = question.messages(order)
        verdict, text = await self._request(judge, messages, len(order), usage)
        if verdict.problems:
            again = [
                *messages,
                {"role": "assistant", "content": text or "(nothing)"},
                {"role": "user", "content": _complaint(verdict, len(order))},
            ]
            try:
                second, second_text = await self._request(judge, again, len(order), usage)
            except JudgeError as error:
                if not verdict.scores:
                    raise
                log.warning("the judge's first answer is used, for the second try failed: %s", error)
            else:
                if len(second.scores) >= len(verdict.scores):
                    verdict, text = second, second_text
        if not verdict.scores:
            raise JudgeError(
                f"the judge {judge.name} gave no usable score, asked twice: {'; '.join(verdict.problems)}. It said: "
                f"{' '.join(text.split())[:200]!r}. A larger judge, or more max_tokens in its options, may help"
            )
        if verdict.problems:
            log.warning("the judge %s, asked twice: %s", judge.name, "; ".join(verdict.problems))
        return {order[number - 1]: said for number, said in verdict.scores.items()}

    async def _request(
        self, judge: AskedJudge, messages: list[dict[str, Any]], count: int, usage: JudgeUsage
    ) -> tuple[Verdict, str]:
        reply = await judge.ask(messages, schema=answer_schema(count), options=self.options, timeout=self.timeout)
        usage.add(reply)
        if self.debug:
            print(f"[ruler] asked {judge.name}:\n{messages[-1]['content']}\n[ruler] it said:\n{reply.text}", flush=True)
        return read_answer(reply.text, count, cut=reply.cut), reply.text


def _complaint(verdict: Verdict, count: int) -> str:
    ids = "trajectory 1" if count == 1 else f"trajectories 1 to {count}"
    return (
        f"That answer cannot be used: {'; '.join(verdict.problems[:8])}. Answer again for all: JSON only, exactly one "
        f"entry for each of the {ids}, each score a number from 0 to 1."
    )


def _conversations(message_lists: Any) -> list[Conversation]:
    """The message lists as they are judged. Raises ConfigError that names what is none."""
    if not isinstance(message_lists, list | tuple):
        raise ConfigError("ruler: message_lists must be a list of conversations, each a list of message dicts")
    found: list[Conversation] = []
    for index, messages in enumerate(message_lists):
        ok = isinstance(messages, list | tuple) and all(isinstance(m, Choice | Mapping) for m in messages)
        if not ok:
            raise ConfigError(
                f"ruler: message_lists[{index}] is {messages!r:.80}; it must be a list of message dicts, as OpenAI has "
                "them (one list for each attempt)"
            )
        found.append((list(messages_of(messages)), []))
    return found


def _unscored(index: int, why: str) -> TrajectoryScore:
    return TrajectoryScore(trajectory_id=str(index + 1), explanation=why, score=None)


def _conversation(trajectory: Trajectory) -> Conversation:
    return list(trajectory.messages()), [list(history.messages()) for history in trajectory.additional_histories]


def _set_reward(trajectory: Trajectory, score: TrajectoryScore) -> None:
    # A group that is judged again, e.g. by a cell that is run again, still knows its own reward.
    judged_before = "ruler_score" in trajectory.metrics or "independent_reward" in trajectory.metrics
    if not judged_before and trajectory.reward is not None:
        trajectory.metrics["independent_reward"] = trajectory.reward
    trajectory.metrics.pop("ruler_score", None)
    trajectory.reward = score.score
    if score.score is not None:
        trajectory.metrics["ruler_score"] = score.score
    if score.explanation:
        trajectory.log(f"ruler: {score.explanation}")
