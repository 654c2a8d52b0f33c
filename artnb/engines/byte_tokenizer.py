"""A tokenizer of bytes with a ChatML template in plain Python: for the scripted engine and for tests.

Ids 0 to 255 are the bytes of UTF-8, the ids above are the control tokens. It has the part of
transformers' tokenizer interface that artnb uses; it is not meant for a real model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, overload

SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
MARKUP_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TOOL_INTRODUCTION = (
    "# Tools\n\nYou may call one or more functions. Their signatures are in <tools></tools>:\n"
    "<tools>\n{tools}\n</tools>\n\n"
    "For each call write a JSON object with the function's name and arguments:\n"
    '<tool_call>\n{{"name": "...", "arguments": {{...}}}}\n</tool_call>'
)


def _printable_bytes() -> list[str]:
    """One visible character per byte, the way byte-level BPE vocabularies spell them (GPT-2)."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spelled = {byte: chr(byte) for byte in visible}
    for byte in range(256):
        spelled.setdefault(byte, chr(256 + len(spelled) - len(visible)))
    return [spelled[byte] for byte in range(256)]


class ByteTokenizer:
    """Bytes plus control tokens; `strip_thinking` leaves the reasoning of earlier turns out of the prompt.

    >>> ByteTokenizer().encode("é<|im_end|>")
    [195, 169, 257]
    """

    bos_token_id: int | None = None
    bos_token: str | None = None
    eos_token = "<|im_end|>"
    pad_token = "<|endoftext|>"
    response_template: Any = None
    chat_template: str | None = None  # the template is apply_chat_template itself
    name_or_path = "bytes"
    padding_side = "right"

    def __init__(self, *, strip_thinking: bool = False) -> None:
        self.strip_thinking = strip_thinking
        self._names = [*_printable_bytes(), *SPECIAL_TOKENS, *MARKUP_TOKENS]
        self._ids = {name: index for index, name in enumerate(self._names)}
        self._controls = {name: self._ids[name] for name in (*SPECIAL_TOKENS, *MARKUP_TOKENS)}
        self._split = re.compile("(" + "|".join(map(re.escape, self._controls)) + ")")

    @property
    def eos_token_id(self) -> int:
        return self._ids[self.eos_token]

    @property
    def pad_token_id(self) -> int:
        return self._ids[self.pad_token]

    @property
    def all_special_ids(self) -> list[int]:
        return [self._ids[token] for token in SPECIAL_TOKENS]

    @property
    def all_special_tokens(self) -> list[str]:
        return list(SPECIAL_TOKENS)

    @property
    def vocab_size(self) -> int:
        return len(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def get_vocab(self) -> dict[str, int]:
        return dict(self._ids)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of `text`; control tokens spelled in it become one id. There is nothing to add around it."""
        ids: list[int] = []
        for part in self._split.split(text):
            control = self._controls.get(part)
            if control is None:
                ids.extend(part.encode("utf-8"))
            else:
                ids.append(control)
        return ids

    def __call__(self, text: str, *, add_special_tokens: bool = False) -> dict[str, list[int]]:
        ids = self.encode(text)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}

    def decode(self, ids: int | Iterable[int], *, skip_special_tokens: bool = False, **_: object) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        skipped = set(self.all_special_ids) if skip_special_tokens else set()
        pieces = bytearray()
        for token in [ids] if isinstance(ids, int) else ids:
            if token < 256:
                pieces.append(token)
            elif token not in skipped:
                pieces.extend(self._names[token].encode())
        return pieces.decode("utf-8", errors="replace")

    @overload
    def convert_ids_to_tokens(self, ids: int) -> str: ...
    @overload
    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]: ...
    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str]:
        return self._names[ids] if isinstance(ids, int) else [self._names[token] for token in ids]

    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int: ...
    @overload
    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int]: ...
    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | list[int]:
        return self._ids[tokens] if isinstance(tokens, str) else [self._ids[token] for token in tokens]

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        enable_thinking: bool = True,
        **_: object,
    ) -> Any:
        """ChatML; tools as Hermes writes them. Like a Jinja template, it ignores variables it does not know.

        Returns ids, the text with `tokenize=False`, or {"input_ids", "attention_mask"} with `return_dict=True`.
        """
        messages = list(conversation)
        text = ""
        if tools:
            listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
            system = TOOL_INTRODUCTION.format(tools=listed)
            if messages and messages[0]["role"] == "system":
                system = f"{_text(messages[0].get('content'))}\n\n{system}"
                messages = messages[1:]
            text = f"<|im_start|>system\n{system}<|im_end|>\n"
        text += "".join(self._render(message) for message in messages)
        if add_generation_prompt:
            text += "<|im_start|>assistant\n" + ("" if enable_thinking else "<think>\n\n</think>\n\n")
        if not tokenize:
            return text
        return self(text) if return_dict else self.encode(text)

    def _render(self, message: Mapping[str, Any]) -> str:
        role, content = message["role"], _text(message.get("content"))
        if role == "tool":
            return f"<|im_start|>user\n<tool_response>\n{content}\n</tool_response><|im_end|>\n"
        if role == "assistant":
            calls = [_call(call) for call in message.get("tool_calls") or ()]
            content = "\n".join([content, *calls] if content else calls)
            reasoning = message.get("reasoning_content")
            if reasoning and not self.strip_thinking:
                content = f"<think>\n{reasoning}\n</think>\n\n{content}"
        return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(part if isinstance(part, str) else str(part.get("text", "")) for part in content)
    return json.dumps(content, ensure_ascii=False)


def _call(call: Mapping[str, Any]) -> str:
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    shown = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": {shown or "{}"}}}\n</tool_call>'
