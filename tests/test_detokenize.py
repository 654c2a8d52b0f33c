"""Token ids to text: raw bytes of tokens, characters spread over tokens, stop strings."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from tokenizers_for_tests import KINDS, make_tokenizer
from transformers import PreTrainedTokenizerFast

from artnb.engines.byte_tokenizer import ByteTokenizer
from artnb.errors import RequestError
from artnb.serving.chat import ChatFormat, StopChecker
from artnb.serving.detokenize import Detokenizer, TokenBytes

NASTY = [
    "", " ", "\n", "👋👩‍👩‍👧🎉", "한글 안녕하세요", "</think>", "}}", '{"a": {"b": "}"}}',
    "naïve\u0301", "<|im_star", "a\x00b",
]  # fmt: skip


@functools.cache
def chat_of(kind: str) -> ChatFormat:
    return ChatFormat(ByteTokenizer() if kind == "bytes" else make_tokenizer(kind))


def sentencepiece() -> PreTrainedTokenizerFast:
    """The decoder of Llama 2 and Gemma: bytes as <0x..>, spaces as ▁, a first space that is not shown."""
    words = ["<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], "▁hello", "▁", "hello", "한", "▁wor", "ld"]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def wordpiece() -> PreTrainedTokenizerFast:
    words = {word: i for i, word in enumerate(["[UNK]", "[SEP]", "hel", "##lo", "한", "##글", "world", "."])}
    backend = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="[SEP]", unk_token="[UNK]")


@pytest.mark.parametrize("kind", [*KINDS, "bytes"])
@pytest.mark.parametrize("text", [*NASTY, "hello world, " + "".join(NASTY)])
def test_bytes_of_the_tokens_are_the_bytes_of_the_text(kind: str, text: str) -> None:
    chat = chat_of(kind)
    ids = chat.tokenizer.encode(text, add_special_tokens=False)
    assert [byte for token_id in ids for byte in chat.token_bytes(token_id)] == list(text.encode())
    pieces = [chat.detokenizer().push([token_id]) for token_id in ids]
    stream = chat.detokenizer()
    pieces = [stream.push([token_id]) for token_id in ids]
    assert "".join(pieces) == text and stream.finish() == ""
    assert not any("\ufffd" in piece for piece in pieces)


def test_text_and_bytes_of_a_part_of_a_character() -> None:
    chat = chat_of("bytes")
    assert [chat.token_bytes(byte) for byte in "é".encode()] == [[0xC3], [0xA9]]
    assert chat.token_text(0xC3) == "\ufffd"
    assert chat.token_text(ord("a")) == "a" and chat.token_text(chat.tokenizer.eos_token_id) == "<|im_end|>"


@pytest.mark.parametrize("kind", [*KINDS, "bytes"])
def test_an_id_beyond_the_tokenizer_shows_nothing(kind: str) -> None:
    chat = chat_of(kind)
    assert chat.token_text(10_000) == "" and chat.token_bytes(10_000) == []
    assert chat.detokenizer().push([10_000]) == ""


@pytest.mark.parametrize("build", [sentencepiece, wordpiece, lambda: make_tokenizer("qwen3")])
def test_a_stream_of_any_tokenizer_is_its_decoded_text(build: Any) -> None:
    tokenizer = build()
    table = TokenBytes(tokenizer)
    draw = random.Random(7)
    compared = 0
    for _ in range(300):
        ids = [draw.choice([draw.randrange(len(tokenizer)), len(tokenizer) - 1 - draw.randrange(6)]) for _ in range(8)]
        stream = Detokenizer(table, table.special_ids)
        text = "".join([stream.push([token_id]) for token_id in ids]) + stream.finish()
        whole = Detokenizer(table, table.special_ids)
        assert whole.push(ids) + whole.finish() == text
        expected = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        # A byte-fallback decoder gives up on a whole run of bytes if one is wrong; here the good ones are kept.
        if not (build is sentencepiece and "\ufffd" in expected):
            assert text == expected
            compared += 1
    assert compared > 30


def test_split_hangul_of_sentencepiece() -> None:
    tokenizer = sentencepiece()
    ids = tokenizer.convert_tokens_to_ids(["▁hello", "▁", *[f"<0x{b:02X}>" for b in "글".encode()], "한"])
    stream = Detokenizer(TokenBytes(tokenizer))
    assert [stream.push([i]) for i in ids] == ["hello", " ", "", "", "글", "한"]
    assert TokenBytes(tokenizer).of(ids[2]) == "글".encode()[:1]


# Stop strings


@pytest.mark.parametrize(
    ("stop", "text", "shown"),
    [
        (["\nUser:"], "fine.\nUser: x", "fine."),
        (["\nUser:"], "fine.\nUse", "fine.\nUse"),
        (["aab"], "aaab", "a"),
        (["abc", "b"], "xabc", "xa"),
        (["b", "ab"], "xab", "x"),
        (["👋"], "한글👋x", "한글"),
        (["x"], "x", ""),
        ([], "anything", "anything"),
    ],
)
def test_stop_strings_are_not_shown_however_the_text_is_cut(stop: list[str], text: str, shown: str) -> None:
    cuts = [[text], list(text), *[[text[:at], text[at:]] for at in range(len(text))]]
    for pieces in cuts:
        checker = StopChecker(stop)
        parts = [checker.push(piece) for piece in pieces]
        assert "".join(part for part, _ in parts) + checker.finish() == shown
        assert checker.stopped == (shown != text)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="stop") as caught:
        StopChecker([""])
    assert caught.value.param == "stop"
