"""A registered TrainableModel whose engine answers from a script: for tests of what agents ask and what is recorded."""

from __future__ import annotations

from typing import Any

from endpoint_for_tests import KEY, Endpoint

import artnb as art
from artnb.backend import ASGIApp
from artnb.engines.scripted import Script
from artnb.serving.server import Server
from artnb.tracking.history import History


class ScriptedBackend:
    """What a backend offers to clients. It trains nothing."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint_ = endpoint
        self._server: Server | None = None

    async def register(self, model: art.TrainableModel) -> None:
        await self.endpoint_.swap(model.name, 0)

    def app(self, model: art.TrainableModel) -> ASGIApp:
        return self.endpoint_.app

    def api_key(self, model: art.TrainableModel) -> str:
        return KEY

    def endpoint(self, model: art.TrainableModel) -> tuple[str, str]:
        if self._server is None:
            self._server = Server(self.endpoint_.app)
            self._server.start()
        return f"{self._server.url}/v1", KEY

    def history(self, model: art.TrainableModel) -> History:
        return History(model.folder)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def __aenter__(self) -> ScriptedBackend:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


async def scripted_model(script: Script, name: str = "agent", **options: Any) -> tuple[art.TrainableModel, Endpoint]:
    """The model and its endpoint; `endpoint.engine.requests` is what the engine was asked."""
    endpoint = Endpoint(script, **options)
    model = art.TrainableModel(name=name, project="tests", base_model="scripted")
    await model.register(ScriptedBackend(endpoint))  # type: ignore[arg-type]
    return model, endpoint
