"""Tokens from an engine's thread to the loops that wait for them: who is woken, and what is never lost."""

import asyncio
import gc
import threading

import pytest

from artnb.engines.base import TokenChunk
from artnb.engines.delivery import Deliveries, Mailbox


class Engine:
    """A thread that hands over one token a step, each step when it is told."""

    def __init__(self) -> None:
        self.steps = 0
        self.dead: list[Mailbox] = []

    async def step(self, *events: tuple[Mailbox, TokenChunk | Exception]) -> None:
        def work() -> None:
            deliveries = Deliveries()
            for mailbox, event in events:
                deliveries.add(mailbox, event)
            self.dead += deliveries.send()

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        await asyncio.sleep(0)
        await asyncio.sleep(0)


def chunk(token: int, reason=None) -> TokenChunk:
    return TokenChunk([token], [-float(token)], reason)


@pytest.mark.parametrize("stream", [True, False])
async def test_the_consumer_gets_everything_in_order(stream):
    engine, mailbox = Engine(), Mailbox(stream)
    got: list[TokenChunk] = []

    async def consume() -> None:
        while not got or got[-1].finish_reason is None:
            got.append(await mailbox.get())

    task = asyncio.create_task(consume())
    for token in range(5):
        await engine.step((mailbox, chunk(token, "length" if token == 4 else None)))
    await task
    assert [t for c in got for t in c.token_ids] == [0, 1, 2, 3, 4]
    assert [p for c in got for p in c.logprobs] == [-0.0, -1.0, -2.0, -3.0, -4.0]
    assert len(got) == (5 if stream else 1)


async def test_a_loop_is_not_called_for_parts_of_whole_answers(monkeypatch):
    engine, whole, streamed = Engine(), Mailbox(stream=False), Mailbox()
    calls = []
    loop = asyncio.get_running_loop()
    original = loop.call_soon_threadsafe
    monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *args: calls.append(args) or original(*args))
    await engine.step((whole, chunk(1)))
    assert not calls
    await engine.step((whole, chunk(2)), (streamed, chunk(1)))
    assert len(calls) == 1
    await engine.step((whole, chunk(3, "stop")))
    assert len(calls) == 2
    assert (await whole.get()).token_ids == [1, 2, 3] and (await streamed.get()).token_ids == [1]


async def test_parts_of_whole_answers_leave_no_objects():
    """Of 256 answers they would be 100,000, and the garbage collector walks through all there are."""
    mailboxes, deliveries = [Mailbox(stream=False) for _ in range(50)], Deliveries()
    gc.collect()
    before = len(gc.get_objects())
    for token in range(40):
        for mailbox in mailboxes:
            deliveries.add(mailbox, chunk(token))
    gc.collect()
    assert len(gc.get_objects()) - before < 100
    for mailbox in mailboxes:
        deliveries.add(mailbox, chunk(40, "stop"))
    assert not deliveries.send()
    assert {(await mailbox.get()).token_ids == list(range(41)) for mailbox in mailboxes} == {True}


@pytest.mark.parametrize("stream", [True, False])
async def test_an_error_comes_after_what_was_sampled(stream):
    engine, mailbox = Engine(), Mailbox(stream)
    await engine.step((mailbox, chunk(1)))
    await engine.step((mailbox, LookupError("broken")))
    assert (await mailbox.get()).token_ids == [1]
    with pytest.raises(LookupError):
        await mailbox.get()


@pytest.mark.parametrize("stream", [True, False])
def test_a_closed_loop_is_reported_with_the_next_token(stream):
    async def leave() -> Mailbox:
        return Mailbox(stream)

    mailbox = asyncio.run(leave())
    engine = Engine()
    asyncio.run(engine.step((mailbox, chunk(1))))
    assert engine.dead == [mailbox]
