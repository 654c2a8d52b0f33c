"""The log-probs of a sampled choice, which stay text until somebody reads them token by token.

A ChoiceLogprobs holds four objects for each token, 700 bytes where text has 90, and Python's garbage collector walks
through all of them again and again: with 256 rollouts of 128 tokens it took longer than everything else that their
requests cost (LOG.md). The trainer and the history want numbers and JSON, so what came as JSON is kept as that. To
everybody else it is a ChoiceLogprobs: `content` is there as soon as it is asked for, dumped, copied or compared.
"""

from __future__ import annotations

import json
import re
from typing import Any

from openai.types.chat import ChatCompletionTokenLogprob
from openai.types.chat.chat_completion import ChoiceLogprobs
from pydantic import BaseModel, TypeAdapter

_TEXT = "artnb_text"
_NUMBER = re.compile(rb'"logprob":\s*([^,}\s]+)')
"""Inside of a JSON string this cannot be: its quotes would have backslashes."""
_CONTENT = TypeAdapter(list[ChatCompletionTokenLogprob])
_fields: Any = BaseModel.__dict__["__dict__"]  # how to come at an instance's own dict


class TextLogprobs(ChoiceLogprobs):
    """`content` as JSON text, which becomes objects where it is looked at."""

    @classmethod
    def of(cls, text: bytes) -> TextLogprobs:
        """`text`: the array `content`, valid, with a number in each entry's `logprob`."""
        made = cls.model_validate_json(b'{"content":null}')
        _fields.__set__(made, {"refusal": None, _TEXT: text})
        return made

    # pydantic, its compiled part too, asks for this attribute whenever it needs the fields.
    @property
    def __dict__(self) -> dict[str, Any]:
        fields: dict[str, Any] = _fields.__get__(self)
        text = fields.get(_TEXT)
        if text is None:
            return fields
        read = {"content": _CONTENT.validate_python(json.loads(text)), "refusal": fields["refusal"]}
        _fields.__set__(self, read)
        return read

    @__dict__.setter
    def __dict__(self, fields: dict[str, Any]) -> None:
        _fields.__set__(self, fields)

    def __getattr__(self, name: str) -> Any:
        if name == "content" and _TEXT in _fields.__get__(self):
            return self.__dict__["content"]
        return super().__getattr__(name)  # type: ignore[misc]

    def __eq__(self, other: object) -> bool:
        return _plain(self) == (_plain(other) if isinstance(other, TextLogprobs) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr_name__(self) -> str:
        return ChoiceLogprobs.__name__


def _plain(logprobs: TextLogprobs) -> ChoiceLogprobs:
    return ChoiceLogprobs.model_construct(None, **logprobs.__dict__)


def unread_text(logprobs: ChoiceLogprobs | None) -> bytes | None:
    """The JSON array `content`, where it has not been read as objects."""
    if not isinstance(logprobs, TextLogprobs):
        return None
    text: bytes | None = _fields.__get__(logprobs).get(_TEXT)
    return text


def token_logprobs(logprobs: ChoiceLogprobs | None) -> list[float] | None:
    """One number for each sampled token; None where there is no content. Reads text without making objects of it."""
    if (text := unread_text(logprobs)) is not None:
        return [*map(float, _NUMBER.findall(text))]
    if logprobs is None or logprobs.content is None:
        return None
    return [entry.logprob for entry in logprobs.content]
