"""CPU milliseconds of one short chat request in this process, and whose they are.

    OMP_NUM_THREADS=1 python benchmarks/request_cost.py
    OMP_NUM_THREADS=1 python benchmarks/request_cost.py --profile
    OMP_NUM_THREADS=1 python benchmarks/request_cost.py --tokens 128 --steps

Conversations of five turns, as in the tic-tac-toe rollouts, on the scripted engine with a real tokenizer: nothing is
computed, so all of it is the way from `model.openai_client()` to the engine and back. The same requests are made four
times, each time entering one layer deeper; a layer's share is the difference:

    client      openai and httpx: building the request, sending it, reading the answer
    transport   from httpx to the ASGI app and back
    endpoint    the app: checks, chat template, tokens, answer, JSON
    engine      the scripted engine, or with --steps one that hands tokens over as those on a GPU do: a thread of
                its own, one token a step for every request

CPU seconds of the process, the least of `--repeat` runs. Load on other cores still slows them down.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import logging
import pstats
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from typing import Any, cast

import artnb as art
from artnb.demo import demo_model
from artnb.engines.base import AdapterRef, SamplingParams, TokenChunk
from artnb.engines.delivery import Deliveries, Mailbox
from artnb.engines.scripted import ScriptedAnswer, ScriptedEngine, ScriptedRequest
from artnb.serving.app import StaticResolver, create_app
from artnb.serving.chat import ChatFormat
from artnb.serving.transport import InProcessTransport, client_library
from artnb.tracking.history import History

KEY = "benchmark"
NAME = "agent"
TURNS = 5
SYSTEM = "You play X in tic-tac-toe. Pick one number from the board. Answer with the number only."
BOARDS = ["123 456 789", "123 4X6 O89", "1O3 4X6 OX9", "XO3 4X6 OX9", "XOO 4X6 OX9"]
FORGET = frozenset((b"content-length",))


class SteppingEngine(ScriptedEngine):
    """Hands the answer over as the engines with a model do, from a thread and through mailboxes."""

    def __init__(self, ids: list[int], tokenizer: Any) -> None:
        super().__init__("", tokenizer=tokenizer, context_length=8192)
        self._ids = ids
        self._changed = threading.Condition()
        self._asked: list[tuple[Mailbox, Iterator[TokenChunk]]] = []
        threading.Thread(target=self._run, daemon=True).start()

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, adapter: AdapterRef | None = None
    ) -> AsyncGenerator[TokenChunk]:
        self.requests.append(ScriptedRequest(list(prompt_ids), sampling, adapter, len(self.requests), self.tokenizer))
        last = len(self._ids) - 1
        chunks = (TokenChunk([id_], [-0.5], "stop" if i == last else None) for i, id_ in enumerate(self._ids))
        mailbox = Mailbox(sampling.stream)
        with self._changed:
            self._asked.append((mailbox, chunks))
            self._changed.notify()
        ended = False
        while not ended:
            chunk = await mailbox.get()
            ended = chunk.finish_reason is not None
            yield chunk

    def _run(self) -> None:
        deliveries = Deliveries()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked)
                running = list(self._asked)
            ended = []
            for request in running:
                chunk = next(request[1])
                deliveries.add(request[0], chunk)
                if chunk.finish_reason is not None:
                    ended.append(request)
            deliveries.send()
            with self._changed:
                for request in ended:
                    self._asked.remove(request)
            time.sleep(0.005)  # the forward pass


class ScriptedBackend:
    """What model.openai_client() uses of a backend."""

    def __init__(self, engine: ScriptedEngine, tokenizer: Any) -> None:
        self._app = create_app(engine, ChatFormat(tokenizer), StaticResolver(NAME), api_key=KEY)

    async def register(self, model: art.TrainableModel) -> None:
        """There is nothing to load."""

    def app(self, model: art.TrainableModel) -> Any:
        return self._app

    def api_key(self, model: art.TrainableModel) -> str:
        return KEY

    def history(self, model: art.TrainableModel) -> History:
        return History(model.folder)  # where nothing is written


class Bench:
    """Engine, model, and the requests that the client makes of the conversations."""

    def __init__(self, options: argparse.Namespace) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(options.model or str(demo_model()))
        answer = self.tokenizer.encode("5" + " and" * (options.tokens - 2), add_special_tokens=False)
        ids = [*(answer * options.tokens)[: options.tokens - 1], self.tokenizer.eos_token_id]
        script = lambda request: ScriptedAnswer(ids, finish_reason="stop")  # noqa: E731
        self.engine = (
            SteppingEngine(ids, self.tokenizer)
            if options.steps
            else ScriptedEngine(script, tokenizer=self.tokenizer, context_length=8192, chunk_size=options.tokens)
        )
        self.tokens = options.tokens
        self.seed = 0
        self.conversations: int = options.requests // TURNS
        self.concurrent = options.concurrent
        self.capture = options.capture
        self.backend = ScriptedBackend(self.engine, self.tokenizer)
        self.model = art.TrainableModel(NAME, "benchmark", "none")
        self.seen: list[tuple[dict[str, Any], bytes]] = []

    async def each(self, work: Callable[[int], Awaitable[None]]) -> None:
        """`work` on every conversation, so many at a time."""
        waiting = iter(range(self.conversations))

        async def worker() -> None:
            for number in waiting:
                await work(number)

        await asyncio.gather(*(worker() for _ in range(self.concurrent)))

    async def through_client(self, number: int) -> None:
        client = self.model.openai_client()
        messages: list[Any] = [{"role": "system", "content": SYSTEM}]
        with art.trajectory(reward=0.0) if self.capture else contextlib.nullcontext():
            for turn in range(TURNS):
                messages.append({"role": "user", "content": f"{BOARDS[turn]} {number % 97}"})
                answer = await client.chat.completions.create(
                    model=NAME, messages=messages, max_tokens=self.tokens, temperature=1.0, seed=number * 16 + turn
                )
                content = answer.choices[0].message.content
                assert content and len(cast(Any, answer.choices[0]).token_ids) == self.tokens
                messages.append({"role": "assistant", "content": content})

    async def record(self) -> None:
        """Keep what reaches the app, for the layers below the client."""
        app = self.backend.app(self.model)

        async def recorder(scope: Any, receive: Any, send: Any) -> None:
            message = await receive()
            self.seen.append((scope, message["body"]))
            body: list[Any] = [message]

            async def again() -> Any:
                return body.pop() if body else await receive()

            await app(scope, again, send)

        self.backend._app = cast(Any, recorder)
        await self.each(self.through_client)
        self.backend._app = app

    def part(self, items: list[Any], number: int) -> list[Any]:
        return items[number * TURNS : (number + 1) * TURNS]

    def transport_layer(self) -> Callable[[int], Awaitable[None]]:
        library = client_library()
        transport = InProcessTransport(self.model._app())
        requests = [
            library.Request(
                scope["method"],
                "http://artnb.local" + scope["path"],
                headers=[(k, v) for k, v in scope["headers"] if k not in FORGET],
                content=body,
            )
            for scope, body in self.seen
        ]

        async def work(number: int) -> None:
            for request in self.part(requests, number):
                response = await transport.handle_async_request(request)
                await response.aread()
                await response.aclose()
                assert response.status_code == 200

        return work

    def endpoint_layer(self) -> Callable[[int], Awaitable[None]]:
        app = self.backend.app(self.model)

        async def work(number: int) -> None:
            for scope, body in self.part(self.seen, number):
                messages: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]
                status: list[int] = []

                async def receive(messages: list[Any] = messages) -> Any:
                    if messages:
                        return messages.pop()
                    return await asyncio.Event().wait()

                async def send(message: Any, status: list[int] = status) -> None:
                    if "status" in message:
                        status.append(message["status"])

                await app(dict(scope), receive, send)
                assert status == [200]

        return work

    def engine_layer(self) -> Callable[[int], Awaitable[None]]:
        prompts = [request.prompt_ids for request in self.engine.requests]
        sampling = SamplingParams(max_tokens=self.tokens, seed=1, stream=False)

        async def work(number: int) -> None:
            for prompt in self.part(prompts, number):
                async for _ in self.engine.generate(prompt, sampling):
                    pass

        return work

    async def cpu_ms(self, work: Callable[[int], Awaitable[None]]) -> float:
        """Per request."""
        self.engine.requests.clear()
        began = time.process_time()
        await self.each(work)
        return (time.process_time() - began) / (self.conversations * TURNS) * 1000


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--concurrent", type=int, default=64, help="conversations at a time (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=2, help="length of the answers (default %(default)s)")
    parser.add_argument("--steps", action="store_true", help="an engine that hands over a token a step")
    parser.add_argument("--model", help="folder or name whose tokenizer is used; default: the demo model")
    parser.add_argument("--capture", action="store_true", help="inside art.trajectory() scopes")
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--profile", nargs="?", const=40, type=int, help="print a profile of so many functions instead")
    options = parser.parse_args()
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    bench = Bench(options)
    await bench.model.register(cast(Any, bench.backend))
    await bench.record()  # warms everything up, too
    engine = bench.engine_layer()
    if options.profile:
        profile = cProfile.Profile()
        with profile:
            await bench.each(bench.through_client)
        pstats.Stats(profile).sort_stats("tottime").print_stats(options.profile)
        pstats.Stats(profile).sort_stats("cumtime").print_stats(2 * options.profile)
        return
    layers = {
        "client": bench.through_client,
        "transport": bench.transport_layer(),
        "endpoint": bench.endpoint_layer(),
        "engine": engine,
    }
    spent = dict.fromkeys(layers, float("inf"))
    for _ in range(options.repeat):  # in turn, so that a busy moment is not one layer's
        for name, work in layers.items():
            spent[name] = min(spent[name], await bench.cpu_ms(work))
    names = list(layers)
    whole = spent["client"]
    print(f"{bench.conversations * TURNS} requests of {options.tokens} tokens, {options.concurrent} at a time")
    for name, below in zip(names, [*names[1:], None], strict=True):
        own = spent[name] - (spent[below] if below else 0.0)
        print(f"{name:10}{own:8.3f} CPU ms a request {own / whole:6.0%}")
    print(f"{'all':10}{whole:8.3f}")


if __name__ == "__main__":
    asyncio.run(main())
