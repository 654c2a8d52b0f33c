"""Prompts that are tokenized by parts have the ids that the tokenizer gives the whole, for any text and tokenizer."""

import random
import threading

import pytest
from endpoint_for_tests import HELLO
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers_for_tests import make_tokenizer
from transformers import PreTrainedTokenizerFast

from artnb.engines.byte_tokenizer import ByteTokenizer
from artnb.serving.chat import ChatFormat
from artnb.serving.prompt_tokens import PromptTokens

KINDS = ("chatml", "qwen3", "llama3", "mistral")
TEXTS = (" ", "  ", "\n", "hello", "Hello", "한글", "👩‍👩‍👧", "é", "<", "|", "im", "\t", "1 2", "a", "aa", "▁")


def letters(*added: AddedToken, byte_level: bool = False, pre=None, normalizer=None) -> PreTrainedTokenizerFast:
    """A tokenizer of a few merges, with other parts than the usual."""
    alphabet = sorted({*pre_tokenizers.ByteLevel.alphabet(), *"▁ \n\t", *"".join(TEXTS)})
    merges = [("a", "a"), ("▁", "a"), ("l", "l"), ("Ġ", "a"), (" ", "a"), ("▁", "▁")]
    vocabulary = {piece: i for i, piece in enumerate([*alphabet, *("".join(m) for m in merges)])}
    backend = Tokenizer(models.BPE(vocabulary, merges))
    if byte_level:
        backend.decoder = decoders.ByteLevel()
    if pre is not None:
        backend.pre_tokenizer = pre
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_special_tokens([special("[t]"), *(token for token in added if token.special)])
    backend.add_tokens([token for token in added if not token.special])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def special(text: str, **options: bool) -> AddedToken:
    return AddedToken(text, special=True, normalized=False, **options)


ODD = {
    "metaspace": letters(special("<s>"), pre=pre_tokenizers.Metaspace(prepend_scheme="first")),
    "prefix space": letters(special("<s>"), byte_level=True, pre=pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "prepended": letters(
        special("<s>"),
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    ),
    "lower case": letters(
        special("<s>"), AddedToken("<S>", special=False, normalized=True), normalizer=normalizers.Lowercase()
    ),
    "takes what is left of it": letters(special("<s>"), special("<l>", lstrip=True), special("<r>", rstrip=True)),
    "one begins another": letters(special("<s>"), special("<s><s>"), special("<s>a"), special("a<s>")),
    "one ends in another": letters(special("<s>"), AddedToken("a<", special=False, normalized=False), special("<u>")),
    "overlaps itself": letters(special("aa"), special("<s>")),
    "blank": letters(special("\n"), special(" <s>")),
    "whole words": letters(special("<s>"), AddedToken("aa", special=False, normalized=False, single_word=True)),
}


def check(tokenizer, seed: int, rounds: int = 1500, room: int = 500) -> PromptTokens:
    tokens, rng = PromptTokens(tokenizer, room), random.Random(seed)
    added = [token.content for token in tokenizer.backend_tokenizer.get_added_tokens_decoder().values()]
    pieces = [*added, *added, *(a[:-1] for a in added), *(a[1:] for a in added), *TEXTS]
    for _ in range(rounds):
        text = "".join(rng.choices(pieces, k=rng.randint(0, 12)))
        assert tokens.of(text) in (None, tokenizer(text, add_special_tokens=False)["input_ids"]), repr(text)
    return tokens


@pytest.mark.parametrize("kind", KINDS)
def test_the_usual_tokenizers_go_by_parts(kind):
    assert check(make_tokenizer(kind), 1).usable


@pytest.mark.parametrize("name", ODD)
def test_odd_tokenizers_go_by_parts_only_where_that_is_the_same(name):
    assert check(ODD[name], 2).usable == (name != "whole words")


def test_no_cut_where_a_token_may_reach_over_it():
    cuts = {name: PromptTokens(ODD[name])._cut.pattern.split("|") for name in ODD if name != "whole words"}
    assert cuts.pop("takes what is left of it") == [r"\[t\]", "<s>", "<r>"]
    for name in ("one begins another", "one ends in another", "blank"):
        assert cuts.pop(name) == [r"\[t\]"]
    assert all(marks == [r"\[t\]", "<s>"] for marks in cuts.values())


def test_other_users_of_the_tokenizer_do_not_change_the_ids():
    tokenizer = make_tokenizer("chatml")
    chat = ChatFormat(tokenizer)
    ids = chat.render(HELLO)
    tokenizer("a", padding="max_length", max_length=200, truncation=True)
    assert chat.render(HELLO) == ids
    tokenizer("a", split_special_tokens=True)
    assert chat.render(HELLO) == ids
    assert chat.render(HELLO) is not chat.render(HELLO), "every request gets ids of its own"


def test_a_class_that_tokenizes_in_its_own_way_is_asked_itself():
    class Own(PreTrainedTokenizerFast):
        def _encode_plus(self, *args, **options):
            encoded = super()._encode_plus(*args, **options)
            encoded["input_ids"] = [*encoded["input_ids"], 0]
            return encoded

    own = Own(tokenizer_object=make_tokenizer("chatml").backend_tokenizer)
    assert not PromptTokens(own).usable and PromptTokens(own).of("a") is None
    assert not PromptTokens(ByteTokenizer()).usable


def test_what_is_kept_is_bounded_and_shared_between_threads():
    tokenizer = make_tokenizer("chatml")
    tokens = PromptTokens(tokenizer, room=300)
    texts = [f"<|im_start|>user\nhello {i % 7} {'a' * (i % 50)}<|im_end|>\n" for i in range(400)]
    expected = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    wrong = []

    def work(seed: int) -> None:
        for i in random.Random(seed).sample(range(400), 400):
            if tokens.of(texts[i]) != expected[i]:
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert sum(map(len, tokens._ids)) <= 300 and tokens._room == 300 - sum(map(len, tokens._ids))
