"""Whom a judge's question goes to: an OpenAI-compatible endpoint, a LiteLLM name, or the base weights of a model here.

One question, one answer, with its tokens and what it cost. Does not know what is asked; that is in ruler.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..config import check_number
from ..errors import ConfigError, JudgeError
from .judge_errors import explain

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from ..model import Model

log = logging.getLogger(__name__)

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """A judge's answer. Tokens and cost (US dollars) are None where they are not known."""

    text: str
    cut: bool = False  # by max_tokens
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cost: float | None = None


@dataclass(slots=True)
class JudgeUsage:
    """What judging took. `cost` is in US dollars, and None as soon as the price of one answer is not known."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = 0.0

    def add(self, reply: Reply) -> None:
        self.requests += 1
        self.prompt_tokens += reply.prompt_tokens or 0
        self.completion_tokens += reply.completion_tokens or 0
        self.cost = None if self.cost is None or reply.cost is None else self.cost + reply.cost

    def metrics(self) -> dict[str, float]:
        """Under the names that a history sums over the groups of a step."""
        if not self.requests:
            return {}
        values: dict[str, float] = {
            "judge/requests": self.requests,
            "judge/prompt_tokens": self.prompt_tokens,
            "judge/completion_tokens": self.completion_tokens,
        }
        return values if self.cost is None else values | {"judge/cost": self.cost}


class AskedJudge(ABC):
    """A judge that is asked in words. Once it has refused structured output it is asked without."""

    def __init__(self, name: str, *, takes_schema: bool = True) -> None:
        self.name = name
        self._takes_schema = takes_schema

    async def ask(
        self,
        messages: Sequence[Message],
        *,
        schema: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Reply:
        """One answer. `schema`: the JSON schema that it should fit; `options`: further fields of the request;
        `timeout`: seconds for it all.

        Raises: JudgeError that says what to do, ConfigError for an option that the client does not know.
        """
        given = dict(options or {})
        form = None if schema is None or "response_format" in given or not self._takes_schema else _form(schema)
        try:
            async with asyncio.timeout(timeout):
                return await self._ask(messages, form, given)
        except TimeoutError as error:
            raise JudgeError(
                f"the judge {self.name} gave no answer within {timeout:g} s: raise timeout=, or judge fewer groups at "
                "once"
            ) from error
        except TypeError as error:
            # What the client's create() says of an argument that it does not have.
            if "unexpected keyword argument" in str(error):
                raise ConfigError(f"the judge {self.name} cannot be asked with these options: {error}") from error
            raise

    async def _ask(self, messages: Sequence[Message], form: Any, options: dict[str, Any]) -> Reply:
        import openai  # LiteLLM's errors are of these classes, too

        sent = list(messages)
        try:
            if form is None:
                return await self._complete(sent, options)
            try:
                return await self._complete(sent, {**options, "response_format": form})
            except (openai.BadRequestError, openai.UnprocessableEntityError) as refused:
                # Perhaps for another reason (a prompt that is too long): then it is refused without, too, and says so.
                reply = await self._complete(sent, options)
                log.info("the judge %s takes no response_format (%s); it is asked without", self.name, refused)
                self._takes_schema = False
                return reply
        except openai.OpenAIError as error:
            raise JudgeError(explain(error, self.name)) from error

    @abstractmethod
    async def _complete(self, messages: list[Message], options: dict[str, Any]) -> Reply: ...

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


class Judge(AskedJudge):
    """A judge behind an OpenAI-compatible endpoint: vLLM, Ollama, llama.cpp, OpenAI, a gateway.

        Judge("qwen3:8b", base_url="http://localhost:11434/v1", api_key="ollama")
        Judge("gpt-5-mini")                      # OpenAI, with OPENAI_API_KEY
        Judge("judge", client=my_async_openai, price=(0.25, 2.0))

    Args:
        model: its name at the endpoint.
        client: an `openai.AsyncOpenAI`, instead of base_url and api_key.
        price: US dollars for a million (prompt, completion) tokens. Without it no cost is reported.
        options: fields of every request, e.g. {"temperature": 0, "max_tokens": 2000, "extra_body": {...}}.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        client: AsyncOpenAI | None = None,
        price: tuple[float, float] | None = None,
        options: Mapping[str, Any] | None = None,
        takes_schema: bool = True,
    ) -> None:
        if not isinstance(model, str) or not model:
            raise ConfigError(f"Judge: model={model!r} must be the model's name at the endpoint")
        if client is not None and (base_url is not None or api_key is not None):
            raise ConfigError("Judge: give either client, or base_url and api_key")
        if client is not None and _is_synchronous(client):
            raise ConfigError("Judge: client must be an openai.AsyncOpenAI, not the synchronous openai.OpenAI")
        if price is not None:
            if not isinstance(price, tuple | list) or len(price) != 2:
                raise ConfigError("Judge: price is a pair: dollars for a million prompt and completion tokens")
            for value in price:
                check_number("Judge", "price", value, low=0.0)
        super().__init__(model, takes_schema=takes_schema)
        self._base_url = base_url
        self._api_key = api_key
        self._client = client
        self._price = price
        self._options = dict(options or {})

    @contextlib.asynccontextmanager
    async def _open(self) -> AsyncIterator[AsyncOpenAI]:
        if self._client is not None:
            yield self._client
            return
        from openai import AsyncOpenAI, OpenAIError

        try:
            client = AsyncOpenAI(base_url=self._base_url, api_key=self._api_key)
        except OpenAIError as error:  # no key, and none in the environment
            raise ConfigError(
                f"Judge({self.name!r}): no API key; give api_key= (any text, where the endpoint asks for none) or set "
                "OPENAI_API_KEY"
            ) from error
        # Made anew for each question: its connections belong to the event loop that opened them.
        async with client:
            yield client

    async def _complete(self, messages: list[Message], options: dict[str, Any]) -> Reply:
        fields: dict[str, Any] = {**self._options, **options}
        async with self._open() as client:
            create: Any = client.chat.completions.create
            completion = await create(model=self.name, messages=messages, **fields)
        reply = _reply(completion, self.name)
        if self._price is None or reply.prompt_tokens is None or reply.completion_tokens is None:
            return reply
        dollars = reply.prompt_tokens * self._price[0] + reply.completion_tokens * self._price[1]
        return replace(reply, cost=dollars / 1e6)


class LiteLLMJudge(AskedJudge):
    """A judge by its LiteLLM name, e.g. "anthropic/claude-sonnet-4-5". What it costs is what LiteLLM knows."""

    def __init__(self, name: str) -> None:
        try:
            import litellm
        except ImportError as error:
            raise ConfigError(
                f'judge_model={name!r} is a LiteLLM name, which needs LiteLLM: pip install "artnb[litellm]". Without '
                "it, ask an OpenAI-compatible endpoint: judge_model=art.rewards.Judge(model, base_url=..., api_key=...)"
            ) from error
        super().__init__(name)
        self._ask_litellm = litellm.acompletion

    async def _complete(self, messages: list[Message], options: dict[str, Any]) -> Reply:
        # A judge that is asked a second time because its answer was no good must not get it from a cache.
        fields = {"caching": False, **options}
        completion: Any = await self._ask_litellm(model=self.name, messages=messages, **fields)
        cost = (getattr(completion, "_hidden_params", None) or {}).get("response_cost")
        return replace(_reply(completion, self.name), cost=None if cost is None else float(cost))


@functools.cache
def _by_name(name: str) -> LiteLLMJudge:
    """One for each name: it remembers whether it takes structured output."""
    return LiteLLMJudge(name)


_of_models: weakref.WeakKeyDictionary[Model, Judge] = weakref.WeakKeyDictionary()


class _ModelJudge(Judge):
    """The endpoint of an artnb model. A model that is trained judges with its base weights, the adapter off."""

    def __init__(self, model: Model) -> None:
        from ..model import TrainableModel

        trained = isinstance(model, TrainableModel)
        name = model.base_model if isinstance(model, TrainableModel) else model.get_inference_name()
        super().__init__(name, takes_schema=not trained)  # artnb's endpoint has no response_format
        self._model = weakref.ref(model)

    @contextlib.asynccontextmanager
    async def _open(self) -> AsyncIterator[AsyncOpenAI]:
        from ..compat.names import no_capture
        from ..model import TrainableModel

        model = self._model()
        assert model is not None  # who asks holds it
        with no_capture():  # what the judge says is no part of the rollout around it
            if isinstance(model, TrainableModel):
                await model.ready()  # one that was never registered says so itself
                yield model.openai_client()
            else:
                async with model.openai_client() as client:
                    yield client


def as_judge(given: Any) -> AskedJudge:
    """The judge that `judge_model` stands for. Raises: ConfigError."""
    from ..model import Model

    if isinstance(given, AskedJudge):
        return given
    if isinstance(given, Model):
        judge = _of_models.get(given)
        if judge is None:
            judge = _of_models[given] = _ModelJudge(given)
        return judge
    if isinstance(given, str) and given.strip():
        return _by_name(given.strip())
    raise ConfigError(
        f"judge_model is a {type(given).__name__}; give a LiteLLM name such as 'openai/gpt-5-mini', an "
        "art.rewards.Judge(model, base_url=..., api_key=...), or a model of artnb"
    )


def _form(schema: Mapping[str, Any]) -> dict[str, Any]:
    """`response_format` for a JSON schema."""
    return {"type": "json_schema", "json_schema": {"name": "scores", "strict": True, "schema": dict(schema)}}


def _reply(completion: Any, name: str) -> Reply:
    choices = getattr(completion, "choices", None)
    if not choices:
        raise JudgeError(f"the judge {name} answered without a choice: {completion!r:.200}")
    content, usage = choices[0].message.content, getattr(completion, "usage", None)
    return Reply(
        text=content if isinstance(content, str) else "",
        cut=choices[0].finish_reason == "length",
        prompt_tokens=getattr(usage, "prompt_tokens", None),
        completion_tokens=getattr(usage, "completion_tokens", None),
    )


def _is_synchronous(client: Any) -> bool:
    from openai import OpenAI

    return isinstance(client, OpenAI)
