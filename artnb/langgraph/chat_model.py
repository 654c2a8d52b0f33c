"""ChatArtnb: LangChain's ChatOpenAI, asking a model of artnb with that model's own OpenAI clients.

Everything that LangChain builds on a chat model (tools, structured output, retries, streaming, batches) is LangChain's.
What is sampled is recorded by capture.py, where the endpoint sees it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

import openai
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.outputs.chat_generation import merge_chat_generation_chunks
from langchain_core.runnables import Runnable
from langchain_openai import ChatOpenAI
from pydantic import Field, PrivateAttr, model_validator

from ..errors import ConfigError
from ..model import Model, TrainableModel
from ..notebook.loop import LoopThread
from ..serving.transport import make_client
from .foreign import record_foreign
from .rollout import rollout_model

if TYPE_CHECKING:
    from langchain_core.language_models import ModelProfile

_SYNC = LoopThread("artnb-langgraph")
"""Where requests of synchronous calls run: LangGraph's nodes and tools may be in any thread, with a loop or without."""


class ChatArtnb(ChatOpenAI):
    """Made by `init_chat_model`."""

    art_model: Any = Field(default=None, exclude=True)
    """The model that was given; None: the one of the rollout that is running, else `made_in`."""
    made_in: Any = Field(default=None, exclude=True)
    asked_name: str | None = None
    """The name that was given; None: the model's own."""

    # Defaults that fit an endpoint in this process. A model that trains answers when its step is done.
    stream_chunk_timeout: float | None = Field(default=None, exclude=True)
    stream_usage: bool | None = True
    use_responses_api: bool | None = False
    cache: Any = Field(default=False, exclude=True)  # an answer from LangChain's global cache is not sampled

    _clients: dict[Model, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def validate_environment(self) -> Self:
        """In place of ChatOpenAI's, which makes clients for OpenAI from the environment."""
        if self.n is not None and self.n > 1 and self.streaming:
            raise ValueError("n must be 1 when streaming: LangChain streams one answer")
        model = self._model()
        self.model_name = self.asked_name or ("artnb" if model is None else model.get_inference_name())
        self.root_client = _Late(self._sync_client)
        self.client = _Late(lambda: self._sync_client().chat.completions)
        self.root_async_client = _Late(self._async_client)
        self.async_client = _Late(lambda: self._async_client().chat.completions)
        return self

    def _model(self) -> Model | None:
        model: Model | None = self.art_model or rollout_model.get() or self.made_in
        return model

    def asked_model(self) -> Model:
        """The model that a call made now would ask."""
        model = self._model()
        if model is None:
            raise ConfigError(
                "init_chat_model() was called without a model and is used outside of a rollout: pass the model, "
                "init_chat_model(model), or run it inside of wrap_rollout(model, rollout)"
            )
        if isinstance(model, TrainableModel):
            model.backend()  # says so when it is not registered; a client would only say that it cannot connect
        return model

    def _async_client(self) -> openai.AsyncOpenAI:
        model = self.asked_model()
        if isinstance(model, TrainableModel):
            return model.openai_client().with_options(**self._client_options())
        client: openai.AsyncOpenAI = self._foreign(model).root_async_client
        return client

    def _sync_client(self) -> openai.OpenAI:
        model = self.asked_model()
        client: openai.OpenAI
        if not isinstance(model, TrainableModel):
            client = self._foreign(model).root_client
            return client
        if model not in self._clients:
            self._clients[model] = make_client(model._app(), thread=_SYNC)
        client = self._clients[model].with_options(**self._client_options())
        return client

    def _client_options(self) -> dict[str, Any]:
        return {
            "timeout": self.request_timeout,
            "max_retries": self.max_retries or 0,
            "default_headers": self.default_headers,
            "default_query": self.default_query,
        }

    def _foreign(self, model: Model) -> ChatOpenAI:
        """A plain ChatOpenAI at another endpoint, for its clients: LangChain shares their connections."""
        if model not in self._clients:
            given = {"base_url": model.inference_base_url, "api_key": model.inference_api_key}
            options = {**self._client_options(), "max_retries": self.max_retries, "model": model.get_inference_name()}
            self._clients[model] = ChatOpenAI(**{k: v for k, v in {**given, **options}.items() if v is not None})
        llm: ChatOpenAI = self._clients[model]
        return llm

    @property
    def _default_params(self) -> dict[str, Any]:
        model = self._model()
        name = self.asked_name or (self.model_name if model is None else model.get_inference_name())
        return {**super()._default_params, "model": name}

    def _resolve_model_profile(self) -> ModelProfile | None:
        return None  # LangChain's table of profiles goes by the names of OpenAI's models

    @property
    def _llm_type(self) -> str:
        return "artnb-chat"

    @classmethod
    def is_lc_serializable(cls) -> bool:
        return False  # it cannot be loaded elsewhere: the model is in this process

    def _get_request_payload(
        self, input_: LanguageModelInput, *, stop: list[str] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """As ChatOpenAI's; the reasoning of earlier turns goes back, for the chat template to keep or to leave out."""
        payload = super()._get_request_payload(input_, stop=stop, **kwargs)
        messages = self._convert_input(input_).to_messages()
        for message, sent in zip(messages, payload["messages"], strict=True):
            if isinstance(message, AIMessage) and (thought := message.additional_kwargs.get("reasoning_content")):
                sent["reasoning_content"] = thought
        return payload

    # Answers -----------------------------------------------------------------------------------

    def _create_chat_result(
        self, response: dict[str, Any] | openai.BaseModel, generation_info: dict[str, Any] | None = None
    ) -> ChatResult:
        result = super()._create_chat_result(response, generation_info)
        choices = getattr(response, "choices", None) or ()
        for generation, choice in zip(result.generations, choices, strict=False):
            if thought := (choice.message.model_extra or {}).get("reasoning_content"):
                generation.message.additional_kwargs["reasoning_content"] = thought
        return result

    def _convert_chunk_to_generation_chunk(
        self, chunk: dict[str, Any], default_chunk_class: type, base_generation_info: dict[str, Any] | None
    ) -> ChatGenerationChunk | None:
        made = super()._convert_chunk_to_generation_chunk(chunk, default_chunk_class, base_generation_info)
        choices = chunk.get("choices")
        if made is not None and choices and (thought := (choices[0].get("delta") or {}).get("reasoning_content")):
            made.message.additional_kwargs["reasoning_content"] = thought
        return made

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        result = super()._generate(messages, stop, run_manager, **kwargs)
        self._ended(result.generations, messages, stop, kwargs)
        return result

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        result = await super()._agenerate(messages, stop, run_manager, **kwargs)
        self._ended(result.generations, messages, stop, kwargs)
        return result

    def _stream(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        chunks = []
        for chunk in super()._stream(messages, stop, run_manager, **kwargs):
            chunks.append(chunk)
            self._tidy(chunk, kwargs)
            yield chunk
        self._ended([merge_chat_generation_chunks(chunks)], messages, stop, kwargs)

    async def _astream(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        chunks = []
        async for chunk in super()._astream(messages, stop, run_manager, **kwargs):
            chunks.append(chunk)
            self._tidy(chunk, kwargs)
            yield chunk
        self._ended([merge_chat_generation_chunks(chunks)], messages, stop, kwargs)

    def _tidy(self, generation: ChatGeneration, kwargs: Mapping[str, Any]) -> None:
        """The endpoint sends log-probs with every answer. In a message they would fill every state and every print."""
        if generation.generation_info and not kwargs.get("logprobs", self.logprobs):
            generation.generation_info.pop("logprobs", None)

    def _ended(
        self,
        generations: Sequence[ChatGeneration | None],
        messages: list[BaseMessage],
        stop: list[str] | None,
        kwargs: dict[str, Any],
    ) -> None:
        """Answers are there. Those of a model that artnb does not serve are not seen by its endpoint."""
        model = self.asked_model()
        foreign = not isinstance(model, TrainableModel) and model is rollout_model.get()
        for generation in filter(None, generations):
            self._tidy(generation, kwargs)
            if foreign:
                said = self._get_request_payload([generation.message])["messages"][0]
                reason = (generation.generation_info or {}).get("finish_reason") or "stop"
                record_foreign(model, self._get_request_payload(messages, stop=stop, **kwargs), said, reason)

    # Tools -------------------------------------------------------------------------------------

    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        method: Literal["function_calling", "json_mode", "json_schema"] = "function_calling",
        include_raw: bool = False,
        strict: bool | None = None,
        tools: list[Any] | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """As ChatOpenAI's, with function_calling as the default and only method.

        The answer begins with a call of the schema, and what follows is sampled as it is: nothing masks tokens, so that
        what is trained is what the model would say. An answer that does not fit the schema raises as LangChain says.
        """
        if method != "function_calling":
            raise ConfigError(
                f"with_structured_output: method={method!r} cannot be honoured: sampling is not constrained, so that "
                "what is trained is what was sampled; leave method out (a tool call)"
            )
        made: Runnable[LanguageModelInput, Any] = super().with_structured_output(
            schema, method=method, include_raw=include_raw, strict=strict, tools=tools, **kwargs
        )
        return made


class _Late:
    """An OpenAI client, or a part of one, that is looked up when it is used: by then the rollout's model is known."""

    def __init__(self, find: Callable[[], Any]) -> None:
        self._find = find

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_find":  # asked for by copy and pickle, before there is anything
            raise AttributeError(name)
        return getattr(self._find(), name)
