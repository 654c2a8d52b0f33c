"""Token ids of rendered prompts, each part between two control tokens tokenized once.

A conversation comes back with every turn, and most of its text with it. A fast tokenizer first cuts the text at its
added tokens and then treats each piece by itself, so the ids of parts that begin with a control token are,
one after the other, the ids of the whole. Where that does not hold for certain, this offers nothing.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from typing import Any

CACHED_CHARACTERS = 8_000_000
"""Of text whose ids are kept: some 20 MB."""
_PROBES = ("", "plain", " a  b\n", "{0}user\n hi{0}", "{0}{0} x", "é{0}한글 👩‍👩‍👧\n\n{0}\n<{0}")


class PromptTokens:
    """`tokenizer(text, add_special_tokens=False)` by parts; None from `of` where it has to be asked itself."""

    def __init__(self, tokenizer: Any, room: int = CACHED_CHARACTERS) -> None:
        self._room = room
        self._lock = threading.Lock()
        self._ids: OrderedDict[str, array[int]] = OrderedDict()
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        marks = _cuts(self._backend)
        self._cut = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True)))) if marks else None
        if self._cut is not None and not all(self._agrees(tokenizer, probe.format(marks[0])) for probe in _PROBES):
            self._cut = None

    @property
    def usable(self) -> bool:
        """False: `of` never knows."""
        return self._cut is not None

    def _agrees(self, tokenizer: Any, text: str) -> bool:
        """Whether the tokenizer's class adds nothing of its own to what its Rust part does."""
        whole = tokenizer(text, padding=False, truncation=False, add_special_tokens=False)["input_ids"]
        return self.of(text) == list(whole)

    def of(self, text: str) -> list[int] | None:
        """The ids of the whole text."""
        backend = self._backend
        # Whoever else uses the tokenizer may have set these; it is told otherwise with every call of its own.
        if self._cut is None or backend.padding or backend.truncation or backend.encode_special_tokens:
            return None
        starts = [match.start() for match in self._cut.finditer(text)]
        parts = [text[start:end] for start, end in zip([0, *starts], [*starts, len(text)], strict=True)]
        with self._lock:
            found = {part: ids for part in parts if (ids := self._ids.get(part)) is not None}
            for part in found:
                self._ids.move_to_end(part)
        if missing := [part for part in dict.fromkeys(parts) if part not in found]:
            # One call: each of them gives up the interpreter's lock, and has to wait for it again.
            encodings = backend.encode_batch_fast(missing, add_special_tokens=False)
            fresh = {part: array("i", encoding.ids) for part, encoding in zip(missing, encodings, strict=True)}
            self._keep(fresh)
            found |= fresh
        whole: list[int] = []
        for part in parts:
            whole.extend(found[part])
        return whole

    def _keep(self, fresh: dict[str, array[int]]) -> None:
        with self._lock:
            for part, ids in fresh.items():
                if part not in self._ids:
                    self._room -= len(part)
                self._ids[part] = ids
            while self._room < 0:
                self._room += len(self._ids.popitem(last=False)[0])


def _cuts(backend: Any) -> list[str]:
    """The control tokens before which a text can be cut, whatever stands around them."""
    if backend is None or not hasattr(backend, "encode_batch_fast") or getattr(backend.model, "dropout", None):
        return []
    added = backend.get_added_tokens_decoder().values()
    # These are looked for in the text as it is, from left to right, the longest first; others only between them.
    raw = [token for token in added if not token.normalized]
    if any(token.single_word for token in raw):  # looks at what stands beside it
        return []
    return [
        token.content
        for token in raw
        if token.special
        and not token.lstrip
        and token.content == token.content.strip() != ""
        and not any(_may_cover(other.content, token.content) for other in raw)
    ]


def _may_cover(other: str, mark: str) -> bool:
    """Whether `other` can begin before `mark` and reach into it, so that `mark` itself is not found there."""
    return any(mark.startswith(other[at:]) or other.startswith(mark, at) for at in range(1, len(other)))
