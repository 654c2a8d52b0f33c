"""Many concurrent chat requests against the endpoint on the scripted engine: none may be lost.

    python benchmarks/endpoint_load.py                 # 2,000 requests, in this process and over HTTP
    python benchmarks/endpoint_load.py --requests 500 --ways http

The engine holds its answers back until the last request has come in, so all are open at once. The
adapter is swapped five times meanwhile, and every answer is checked against the adapter that its choice
says it used. The engine computes nothing: times are those of the endpoint and of its client, from a request
to the end of its answer. Over HTTP the clients live in a process of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import multiprocessing
import resource
import ssl
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from artnb.engines.base import AdapterRef
from artnb.engines.byte_tokenizer import ByteTokenizer
from artnb.engines.scripted import ScriptedEngine, ScriptedRequest
from artnb.serving.app import StaticResolver, create_app
from artnb.serving.chat import ChatFormat
from artnb.serving.server import Server
from artnb.serving.transport import client_library, make_async_client

KEY = "benchmark"
SWAPS = 5
CONNECTIONS_PER_CLIENT = 25  # httpcore looks at every connection of its pool for each request
MODEL = "agent"


def raise_file_limit(needed: int) -> None:
    """Each HTTP request holds a socket at either end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < needed:
        wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        print(f"open files: limit raised from {soft} to {wanted}")
        if wanted < needed:
            sys.exit(f"open files: {needed} are needed and the hard limit is {hard}; ask for fewer --requests")


class Bench:
    """The endpoint, and the adapter swaps while it is under load."""

    def __init__(self, tokens: int) -> None:
        padding = "x" * max(0, tokens - 10)
        self.engine = ScriptedEngine(lambda request: f"{step_of(request)} {padding}", chunk_size=16)
        self.resolver = StaticResolver("base")
        self.app = create_app(self.engine, ChatFormat(ByteTokenizer()), self.resolver, api_key=KEY)
        self.step = -1

    async def swap(self) -> None:
        old, self.step = AdapterRef(MODEL, self.step), self.step + 1
        await self.engine.load_adapter(AdapterRef(MODEL, self.step), Path("unused"))
        self.resolver.set_latest(MODEL, self.step)
        await self.engine.drop_adapter(old)

    async def arrived(self, requests: int) -> None:
        while self.engine.stats().requests < requests:
            await asyncio.sleep(0.002)

    async def swap_under_load(self, requests: int) -> None:
        """Spread the swaps over the requests as they come in, then let the engine answer."""
        await self.engine.sleep()
        for swap in range(1, SWAPS + 1):
            await self.arrived(requests * swap // (SWAPS + 1))
            await self.swap()
        await self.arrived(requests)
        await self.engine.wake()


def step_of(request: ScriptedRequest) -> str:
    return str(request.adapter)


async def ask(client: AsyncOpenAI, stream: bool) -> dict[str, Any]:
    """One request: {"seconds", "policy", "error"}."""
    began = time.perf_counter()
    messages: list[Any] = [{"role": "user", "content": "Which step are you?"}]
    try:
        if stream:
            text, policy = "", None
            async for chunk in await client.chat.completions.create(model=MODEL, messages=messages, stream=True):
                text += chunk.choices[0].delta.content or ""
                policy = (chunk.choices[0].model_extra or {}).get("policy", policy)
        else:
            choice = (await client.chat.completions.create(model=MODEL, messages=messages)).choices[0]
            text, policy = choice.message.content or "", (choice.model_extra or {})["policy"]
    except Exception as error:
        return {"seconds": time.perf_counter() - began, "policy": None, "error": f"{type(error).__name__}: {error}"}
    wrong = None if text.split(" ")[0] == policy else f"the answer is of {text[:12]!r}, the choice says {policy}"
    return {"seconds": time.perf_counter() - began, "policy": policy, "error": wrong}


def http_clients(url: str, requests: int, stream: bool, results: Any) -> None:
    """The client process: one loop, as many connections as requests."""
    library = client_library()
    context = ssl.create_default_context()  # not used, and slow to make for each client

    def make() -> AsyncOpenAI:
        limits = library.Limits(max_connections=None)
        http = library.AsyncClient(limits=limits, timeout=None, verify=context)
        return AsyncOpenAI(api_key=KEY, base_url=url, http_client=http, max_retries=0, timeout=None)

    async def run() -> list[dict[str, Any]]:
        clients = [make() for _ in range(-(-requests // CONNECTIONS_PER_CLIENT))]
        answers = await asyncio.gather(*(ask(clients[i // CONNECTIONS_PER_CLIENT], stream) for i in range(requests)))
        for client in clients:
            await client.close()
        return answers

    results.put(asyncio.run(run()))


async def run_in_process(bench: Bench, requests: int, stream: bool) -> list[dict[str, Any]]:
    swapping = asyncio.create_task(bench.swap_under_load(requests))
    client = make_async_client(bench.app, KEY)
    tasks: list[asyncio.Task[dict[str, Any]]] = []
    # In waves: tasks of one loop go in step, and would all be in the engine before the first swap.
    for wave in range(SWAPS + 1):
        upto = requests * (wave + 1) // (SWAPS + 1)
        tasks += [asyncio.create_task(ask(client, stream)) for _ in range(upto - len(tasks))]
        while bench.step < wave + 1 and wave < SWAPS:
            await asyncio.sleep(0.002)
    answers = await asyncio.gather(*tasks)
    await swapping
    return answers


async def run_http(bench: Bench, requests: int, stream: bool) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with Server(bench.app) as server:
        process = context.Process(target=http_clients, args=(f"{server.url}/v1", requests, stream, results))
        process.start()
        swapping = asyncio.create_task(bench.swap_under_load(requests))
        answers: list[dict[str, Any]] = await asyncio.to_thread(results.get)
        await swapping
        process.join()
    return answers


def report(way: str, answers: list[dict[str, Any]], requests: int, wall: float, cpu: float, peak: float) -> bool:
    """Print one run; True when nothing was lost or wrong."""
    seconds = sorted(answer["seconds"] for answer in answers)
    errors = Counter(answer["error"] for answer in answers if answer["error"])
    policies = Counter(answer["policy"] for answer in answers)
    lost = requests - len(answers) + sum(errors.values())
    p50, p99 = (seconds[min(len(seconds) - 1, int(len(seconds) * share))] for share in (0.5, 0.99))
    print(
        f"{way:>10}: {requests} requests, {lost} lost, p50 {p50:.2f} s, p99 {p99:.2f} s, all in {wall:.2f} s "
        f"({1000 * wall / requests:.2f} ms each)"
    )
    print(
        f"{'':>10}  {int(peak)} at once in the engine; {1000 * cpu / requests:.2f} ms of this process's CPU each "
        f"({'endpoint' if way == 'http' else 'endpoint and client'})"
    )
    print(f"{'':>10}  answered by {', '.join(f'{name} × {n}' for name, n in sorted(policies.items(), key=str))}")
    for error, count in errors.most_common(5):
        print(f"{'':>10}  {count} × {error}")
    return lost == 0


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000, help="open at once (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="in each answer (default %(default)s)")
    parser.add_argument("--stream", action="store_true", help="ask for streamed answers")
    parser.add_argument("--ways", default="in-process,http", help="which of in-process, http (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, too")
    options = parser.parse_args()
    raise_file_limit(2 * options.requests + 200)
    importlib.import_module("transformers.utils.chat_parsing")  # before the clock starts
    fine, figures = True, {}
    for way in options.ways.split(","):
        bench = Bench(options.tokens)
        await bench.swap()
        run = {"in-process": run_in_process, "http": run_http}[way]
        began, cpu = time.perf_counter(), time.process_time()
        answers = await run(bench, options.requests, options.stream)
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
        fine &= report(way, answers, options.requests, wall, cpu, bench.engine.stats().extra["peak_running"])
        figures[way] = {"wall": wall, "seconds": sorted(answer["seconds"] for answer in answers)}
        await bench.engine.close()
    if options.json:
        print(json.dumps(figures))
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
