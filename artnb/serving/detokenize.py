"""Token ids to text, exactly and piece by piece.

`TokenBytes` knows the raw bytes behind an id, `Detokenizer` turns a stream of ids into text without
ever showing half a character, `StopChecker` cuts a stream of text at a stop string. The pieces never
depend on how the stream was cut. Knows nothing about messages, tools or chat templates.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from ..errors import RequestError

REPLACEMENT = "\ufffd"  # what undecodable bytes become


class ChatTokenizer(Protocol):
    """What is used of a transformers tokenizer; ByteTokenizer of the scripted engine has it too."""

    @property
    def all_special_ids(self) -> list[int]: ...

    @property
    def eos_token_id(self) -> Any: ...

    def apply_chat_template(self, conversation: Any, tools: Any = None, **options: Any) -> Any: ...

    def decode(self, ids: Any, *, skip_special_tokens: bool = False) -> Any: ...

    def convert_ids_to_tokens(self, ids: Any) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...


def _byte_alphabet() -> dict[str, int]:
    """Character → byte, as byte-level BPE spells bytes: the visible Latin-1 ones as themselves, the others from U+0100.

    https://github.com/openai/gpt-2/blob/master/src/encoder.py (bytes_to_unicode)
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(0x100) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


BYTE_ALPHABET = _byte_alphabet()


def _spelled_bytes(name: str) -> bytes:
    """The bytes that a byte-level vocabulary entry stands for; a name outside the alphabet is plain text."""
    try:
        return bytes(BYTE_ALPHABET[char] for char in name)
    except KeyError:
        return name.encode("utf-8", errors="surrogatepass")


def _decoder_steps(tokenizer: Any) -> list[dict[str, Any]]:
    """The steps of a fast tokenizer's decoder as its own JSON describes them; [] where there is none."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    return list(state["decoders"]) if state.get("type") == "Sequence" else [state]


class TokenBytes:
    """The raw bytes behind each token id, cached.

    `exact` is False for tokenizers whose decoder is neither byte-level nor byte-fallback (WordPiece,
    Metaspace): there bytes are those of the decoded token, and None where it does not decode alone.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.tokenizer = tokenizer
        self._cache: dict[int, bytes | None] = {}
        added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
        self._added: dict[int, str] = {token_id: token.content for token_id, token in added.items()}
        self.special_ids = set(tokenizer.all_special_ids)
        self.special_ids.update(token_id for token_id, token in added.items() if token.special)
        eos = tokenizer.eos_token_id
        self.special_ids.update([] if eos is None else [eos] if isinstance(eos, int) else eos)
        steps = _decoder_steps(tokenizer)
        kinds = {step["type"] for step in steps}
        self._byte_level = "ByteLevel" in kinds or (not steps and self._spells_bytes())
        self._byte_fallback = "ByteFallback" in kinds
        self.exact = self._byte_level or self._byte_fallback
        # SentencePiece puts a space before the first word; its decoder takes it away again.
        self.leading_spaces = 0 if self._byte_level else sum(s["start"] for s in steps if s["type"] == "Strip")

    def _name(self, token_id: int) -> str | None:
        try:
            name = self.tokenizer.convert_ids_to_tokens([token_id])[0]
        except (IndexError, KeyError, OverflowError):  # models often have more ids than their tokenizer
            return None
        return None if name is None else str(name)

    def _spells_bytes(self) -> bool:
        """Whether a tokenizer without a described decoder spells its first 256 ids in the byte alphabet."""
        names = [self._name(token_id) for token_id in range(256)]
        return all(
            name is not None
            and self.tokenizer.decode([i]) == _spelled_bytes(name).decode("utf-8", errors="replace")
            for i, name in enumerate(names)
        )  # fmt: skip

    def of(self, token_id: int) -> bytes | None:
        """Raw bytes of a token; b"" for an id that the tokenizer does not know, None where they are not defined."""
        if token_id not in self._cache:
            self._cache[token_id] = self._find(token_id)
        return self._cache[token_id]

    def _find(self, token_id: int) -> bytes | None:
        if token_id in self._added:
            return self._added[token_id].encode()
        name = self._name(token_id)
        if name is None:
            return b""
        if self._byte_level:
            return _spelled_bytes(name)
        if self._byte_fallback:
            if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
                return bytes([int(name[3:5], 16)])
            return name.replace("▁", " ").encode("utf-8", errors="surrogatepass")
        text = decode(self.tokenizer, [token_id])
        return None if REPLACEMENT in text else text.encode("utf-8", errors="surrogatepass")

    def text(self, token_id: int) -> str:
        """The token as text; bytes that are no whole character show as U+FFFD."""
        raw = self.of(token_id)
        return decode(self.tokenizer, [token_id]) if raw is None else raw.decode("utf-8", errors="replace")


def decode(tokenizer: ChatTokenizer, ids: Sequence[int]) -> str:
    """Text of ids with control tokens shown and without the whitespace clean-up of old configurations."""
    options = {"clean_up_tokenization_spaces": False} if hasattr(tokenizer, "clean_up_tokenization_spaces") else {}
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, **options))


class Detokenizer:
    """A stream of ids as text; `hidden` ids (control tokens, mostly) show nothing.

    The pieces joined, `finish()` included, are the decoded text of all ids. A character whose bytes are
    spread over several tokens appears with its last byte; bytes that are no UTF-8 become U+FFFD.
    """

    def __init__(self, table: TokenBytes, hidden: Collection[int] = ()) -> None:
        self._table = table
        self._hidden = hidden
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = table.leading_spaces
        self._ids: list[int] = []  # without exact bytes: all shown ids, and the two ends of the decoded window
        self._start = self._shown = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that became certain with these ids."""
        return "".join(self._one(token_id) for token_id in token_ids if token_id not in self._hidden)

    def _one(self, token_id: int) -> str:
        if not self._table.exact:
            return self._window(token_id)
        text = self._utf8.decode(self._table.of(token_id) or b"")
        while self._strip and text:
            if not text.startswith(" "):
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text

    def _window(self, token_id: int) -> str:
        """Decode a few tokens before the new one too, since a decoder may look at neighbours."""
        self._ids.append(token_id)
        before = decode(self._table.tokenizer, self._ids[self._start : self._shown])
        now = decode(self._table.tokenizer, self._ids[self._start :])
        if now.endswith(REPLACEMENT):
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return now[len(before) :]

    def finish(self) -> str:
        """What was held back: the replacement of an unfinished character, or nothing."""
        if self._table.exact:
            return self._utf8.decode(b"", final=True)
        before = decode(self._table.tokenizer, self._ids[self._start : self._shown])
        rest = decode(self._table.tokenizer, self._ids[self._start :])[len(before) :]
        self._start = self._shown = len(self._ids)
        return rest


class StopChecker:
    """Cuts a stream of text before the first stop string, as OpenAI does: the stop string is not shown.

    The stop string that is complete first wins (of two that end together, the longer).

        checker = StopChecker(["\\nUser:"])
        text, stopped = checker.push("fine.\\nUs")   # ("fine.", False): what may become a stop is held back

    Raises: RequestError(param="stop") for an empty stop string.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        if not all(isinstance(text, str) and text for text in stop):
            raise RequestError("stop: every stop string needs at least one character", param="stop")
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """(text that may be shown, whether a stop string was hit). After a hit nothing is shown any more."""
        if self.stopped or not self._stop:
            return ("" if self.stopped else text), self.stopped
        self._held += text
        ends = [(at + len(stop), at) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if ends:
            self.stopped = True
            shown, self._held = self._held[: min(ends)[1]], ""
            return shown, True
        keep = max(self._overlap(stop) for stop in self._stop)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown, False

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((size for size in range(longest, 0, -1) if stop.startswith(self._held[-size:])), 0)

    def finish(self) -> str:
        """The text that was held back and did not become a stop string."""
        shown, self._held = self._held, ""
        return shown
