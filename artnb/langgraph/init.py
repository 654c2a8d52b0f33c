"""init_chat_model: LangChain's call of that name, for the model in training. Checks every argument; none is ignored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, nearest
from ..model import Model
from .rollout import rollout_model

if TYPE_CHECKING:
    from .chat_model import ChatArtnb

_FROM_THE_MODEL = frozenset(
    (
        *("base_url", "openai_api_base", "api_key", "openai_api_key", "organization", "openai_organization"),
        *("openai_proxy", "http_client", "http_async_client", "http_socket_options"),
        *("client", "async_client", "root_client", "root_async_client", "art_model", "made_in", "asked_name"),
    )
)
_RESPONSES_API = frozenset(
    (
        *("use_responses_api", "use_previous_response_id", "reasoning", "include", "truncation"),
        *("context_management", "output_version"),
    )
)
# The endpoint has them beyond OpenAI's parameters; an OpenAI client sends them as extra_body.
_BEYOND_OPENAI = ("top_k", "min_p", "chat_template_kwargs", "stop_token_ids", "ignore_eos")


def init_chat_model(
    model: Model | str | None = None,
    *,
    model_provider: str | None = None,
    configurable_fields: Any = None,
    config_prefix: str | None = None,
    **kwargs: Any,
) -> ChatArtnb:
    """A LangChain chat model (a ChatOpenAI) that asks the model in training, in this process, without a port.

        llm = init_chat_model(temperature=0.7, timeout=60, max_tokens=200)      # inside of wrap_rollout's rollout
        llm = init_chat_model(model, temperature=0.0)                           # anywhere
        llm = init_chat_model(model.get_inference_name(step=3))                 # checkpoint 3 of the rollout's model

    Args:
        model: an `art.TrainableModel`, or an `art.Model` to compare with. A name asks the rollout's model under it: a
            checkpoint, the base model; one that is not served is refused when it is asked. None is the model of the
            rollout in which the chat model is used, so that a graph that is compiled once trains any model.
        model_provider: None or "openai".
        configurable_fields, config_prefix: not offered; use `.configurable_fields()` of the chat model.
        kwargs: as of ChatOpenAI (temperature, top_p, seed, stop, n, max_tokens, timeout, max_retries, streaming, …),
            and the endpoint's own top_k, min_p, chat_template_kwargs, stop_token_ids, ignore_eos.

    `timeout` in seconds; None, the default, waits: a model that trains answers when its step is done. `max_retries`
    is 0 for a model in this process. Structured output is by a tool call that the model is made to begin.

    Raises: ConfigError for an argument that is unknown or cannot be honoured, or if LangChain is missing.
    """
    try:
        from .chat_model import ChatArtnb
    except ImportError as error:
        raise ConfigError(
            f'init_chat_model needs LangChain and langchain-openai ({error}): pip install "artnb[langgraph]"'
        ) from error
    if model_provider not in (None, "openai"):
        raise ConfigError(
            f"init_chat_model: model_provider={model_provider!r} cannot be honoured: the endpoint speaks OpenAI's "
            "protocol; leave it out"
        )
    if configurable_fields is not None or config_prefix is not None:
        raise ConfigError(
            "init_chat_model: configurable_fields and config_prefix are not offered; call "
            "`.configurable_fields(temperature=ConfigurableField(id=...))` on the chat model"
        )
    fields = ChatArtnb.model_fields
    known = {*fields, *(field.alias for field in fields.values() if field.alias), *_BEYOND_OPENAI}
    for name in kwargs:
        if name in ("model_name", "model_provider"):
            raise ConfigError(f"init_chat_model: give the model as the first argument, not as {name}")
        if name in _FROM_THE_MODEL:
            raise ConfigError(f"init_chat_model: {name} comes from the model; leave it out")
        if name in _RESPONSES_API:
            raise ConfigError(f"init_chat_model: {name} is for OpenAI's Responses API, which the endpoint has not")
        if name not in known:
            raise ConfigError(f"init_chat_model has no option {name!r}{nearest(name, known - _FROM_THE_MODEL)}")
    beyond = {name: kwargs.pop(name) for name in _BEYOND_OPENAI if name in kwargs}
    if beyond:
        kwargs["extra_body"] = {**beyond, **(kwargs.get("extra_body") or {})}
    if isinstance(model, str):
        kwargs["asked_name"] = model.removeprefix("openai:")
    elif isinstance(model, Model):
        kwargs["art_model"] = model
    elif model is not None:
        raise ConfigError(
            f"init_chat_model: model must be an art.TrainableModel, an art.Model, a name or None, not a "
            f"{type(model).__name__}"
        )
    return ChatArtnb(made_in=rollout_model.get(), **kwargs)
