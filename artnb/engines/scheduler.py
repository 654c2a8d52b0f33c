"""Which sequences run, and what each computes next. Places and prefixes, no tensors and no threads.

A sequence stands at a tree node that holds its prompt but the last token; that token and what is sampled lie
in its own tail, which grows. Sequences with a common prefix share nodes: the first one computes, the others
wait for it. When the pool is full, cached prefixes go first; then the youngest sequence gives its place up and
is computed again later, with the same tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from .base import SamplingParams
from .flat_attention import AttendRow
from .kv_pool import KVPool, Range
from .prefix_tree import Node, PrefixTree

TAIL_TOKENS = 64
"""First size of a tail; it doubles when it is full."""


@dataclass(eq=False, slots=True)
class Sequence:
    """One request on its way. `tokens` is the prompt and what was sampled; `done` of them are computed."""

    tokens: list[int]
    prompt_tokens: int
    sampling: SamplingParams
    adapter: str | None  # whose keys and values these are
    seed: int
    max_tokens: int
    owner: Any  # whom the tokens are for; not looked at here
    done: int = 0
    node: Node | None = None
    tail: list[Range] = field(default_factory=list)
    preempted: int = 0

    @property
    def sampled(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    def ranges(self, upto: int) -> tuple[Range, ...]:
        """Places of the first `upto` tokens."""
        assert self.node is not None
        held = [(node.start, node.start + len(node.tokens)) for node in self.node.path()]
        taken: list[Range] = []
        for start, end in (*held, *self.tail):
            if upto <= 0:
                break
            taken.append((start, min(end, start + upto)))
            upto -= end - start
        return tuple(taken)


@dataclass(frozen=True, slots=True)
class Work:
    """`new` tokens of a sequence to compute, from `sequence.done` on."""

    sequence: Sequence
    row: AttendRow

    @property
    def new(self) -> int:
        return self.row.new

    @property
    def samples(self) -> bool:
        """The last token is among them: its logits give the next one."""
        return self.sequence.done + self.new == len(self.sequence.tokens)


class Scheduler:
    """Waiting and running sequences over one pool."""

    def __init__(self, pool: KVPool, *, max_running: int, max_batch_tokens: int) -> None:
        self.pool = pool
        self.tree = PrefixTree(pool)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.cached_prompt_tokens = 0
        self.preemptions = 0
        self._max_running = max_running
        self._max_batch_tokens = max_batch_tokens

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def all(self) -> list[Sequence]:
        return [*self.running, *self.waiting]

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def next(self) -> list[list[Work]]:
        """Admit what fits, then one batch of work for each adapter."""
        while self.waiting and len(self.running) < self._max_running and self._admit(self.waiting[0]):
            self.running.append(self.waiting.popleft())
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in list(self.running):
            if sequence.node is None:
                continue  # gave its place up to an older one a moment ago
            if not _ready(sequence):
                continue
            if len(sequence.tokens) - sequence.done > 1:
                prefilling.append(sequence)
            elif self._room(sequence):
                decoding.append(sequence)
        batches: dict[Hashable, list[Work]] = {}
        for sequence in decoding:
            if sequence.node is not None:  # still running
                row = AttendRow(sequence.ranges(len(sequence.tokens)), 1)
                batches.setdefault(sequence.adapter, []).append(Work(sequence, row))
        for batch in batches.values():
            batch.sort(key=lambda work: work.row.ranges)  # like prefixes side by side
        budget = {adapter: self._max_batch_tokens - len(batch) for adapter, batch in batches.items()}
        for sequence in prefilling:
            left = budget.get(sequence.adapter, self._max_batch_tokens)
            new = min(left, len(sequence.tokens) - sequence.done)
            if sequence.node is None or new <= 0:
                continue
            budget[sequence.adapter] = left - new
            row = AttendRow(sequence.ranges(sequence.done + new), new)
            batches.setdefault(sequence.adapter, []).append(Work(sequence, row))
        return list(batches.values())

    def computed(self, work: Work) -> None:
        """The forward pass over `work` is through. Call before its sampled token is appended."""
        sequence = work.sequence
        sequence.done += work.new
        assert sequence.node is not None
        for node in sequence.node.path():
            if node.leader is sequence and node.end <= sequence.done:
                node.leader = None
                node.computed = True

    def finish(self, sequence: Sequence) -> None:
        """It ends here: keep what it computed for others to start from, give the rest back."""
        if sequence.node is None:
            if sequence in self.waiting:
                self.waiting.remove(sequence)
            return
        self._give_back(sequence)
        self.running.remove(sequence)

    def clear_cache(self) -> None:
        """Forget every prefix that no running sequence needs."""
        self.tree.evict(self.pool.limit)

    def _admit(self, sequence: Sequence) -> bool:
        prompt = sequence.tokens[:-1]
        known = self.tree.match(sequence.adapter, prompt)
        self.tree.enter(known)
        missing = len(prompt) - known.end
        tail = min(TAIL_TOKENS, sequence.max_tokens - sequence.sampled)
        places = self._allocate(missing + tail, after=known.start + len(known.tokens))
        if places is None:
            self.tree.leave(known, sequence)
            return False
        ranges, sequence.tail = _cut(places, missing)
        sequence.node = self.tree.append(known, prompt[known.end :], ranges, leader=sequence) if missing else known
        if missing:
            self.tree.enter(sequence.node)
            self.tree.leave(known, None)
        sequence.done = 0
        if not sequence.preempted:
            self.cached_prompt_tokens += known.end
        return True

    def _room(self, sequence: Sequence) -> bool:
        """A place for the newest token's keys; older sequences take it from younger ones. False: it lost its own."""
        assert sequence.node is not None
        held = sum(end - start for start, end in sequence.tail)
        if len(sequence.tokens) - sequence.node.end <= held:
            return True
        wanted = min(max(TAIL_TOKENS, held), sequence.max_tokens - sequence.sampled)
        while True:
            after = sequence.tail[-1][1]
            places = self._allocate(wanted, after) or self._allocate(1, after)
            if places is not None:
                sequence.tail.extend(places)
                return True
            youngest = next(s for s in reversed(self.running) if s.node is not None)
            self._preempt(youngest)
            if youngest is sequence:
                return False

    def _preempt(self, sequence: Sequence) -> None:
        self._give_back(sequence)
        self.running.remove(sequence)
        sequence.preempted += 1
        self.preemptions += 1
        self.waiting.appendleft(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        node = sequence.node
        assert node is not None
        kept, unused = _cut(sequence.tail, max(0, sequence.done - node.end))
        for start, end in unused:
            self.pool.free(start, end)
        if kept:
            self.tree.append(node, sequence.tokens[node.end : sequence.done], kept, leader=None)
        self.tree.leave(node, sequence)
        sequence.node, sequence.tail, sequence.done = None, [], 0

    def _allocate(self, tokens: int, after: int) -> list[Range] | None:
        missing = tokens - self.pool.free_tokens
        if missing > 0:
            # A little more than needed, so that a full pool is not searched for every request.
            self.tree.evict(max(missing, min(self.pool.limit // 16, 4096)))
        return self.pool.allocate(tokens, after)


def _ready(sequence: Sequence) -> bool:
    """Whether it can compute now. Sets `done` past what others computed, and takes the lead where nobody computes."""
    assert sequence.node is not None
    if sequence.done >= sequence.node.end:
        return True
    for node in sequence.node.path():
        if node.leader is sequence and node.end <= sequence.done:
            node.leader, node.computed = None, True  # the upper part of a node that was split meanwhile
        if node.computed:
            sequence.done = max(sequence.done, node.end)
        elif node.leader is None:
            node.leader = sequence
            sequence.done = node.pos
            return True
        else:
            return node.leader is sequence
    return True


def _cut(ranges: Iterable[Range], count: int) -> tuple[list[Range], list[Range]]:
    """The first `count` places, and the others."""
    before: list[Range] = []
    after: list[Range] = []
    for start, end in ranges:
        middle = min(end, start + count)
        count -= middle - start
        if start < middle:
            before.append((start, middle))
        if middle < end:
            after.append((middle, end))
    return before, after


def halves(batch: list[Work]) -> list[list[Work]]:
    """The same work in smaller batches; of a single sequence only the first half of its tokens."""
    if len(batch) > 1:
        return [batch[: len(batch) // 2], batch[len(batch) // 2 :]]
    work = batch[0]
    new = max(1, work.new // 2)
    return [[Work(work.sequence, AttendRow(work.sequence.ranges(work.sequence.done + new), new))]]
