"""For the games' tests: a model whose answers are written down, asked through the real endpoint; needs no weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import artnb as art
from artnb.engines.byte_tokenizer import ByteTokenizer
from artnb.serving.app import StaticResolver, create_app
from artnb.serving.chat import ChatFormat
from artnb.serving.transport import make_async_client

if TYPE_CHECKING:
    from openai import AsyncOpenAI


class ScriptedModel(art.Model):
    """`script` as in ScriptedEngine, which keeps the requests; `log` writes below `base_path`."""

    def __init__(self, script: Any, base_path: Path | str = ".art") -> None:
        super().__init__("scripted", "tests", base_path=base_path)
        self.engine = art.ScriptedEngine(script)
        app = create_app(self.engine, ChatFormat(ByteTokenizer()), StaticResolver("base"), api_key="k")
        self._client = make_async_client(app, "k")

    def openai_client(self) -> AsyncOpenAI:
        return self._client

    def get_inference_name(self, step: int | None = None) -> str:
        return "base"
