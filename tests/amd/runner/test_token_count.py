"""TokenCount: no text has fewer tokens than its bytes say."""

from __future__ import annotations

import math
import unicodedata
from collections import defaultdict
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers

from rocm_serve.text.token_count import PIECE, TokenCount
from rocm_serve.text.tokenizer import Tokenizer
from tests.amd.runner.tiny_model import word_tokenizer
from tests.amd.runner.with_parameters import character_tokenizer

LONGEST = "abcdefgh"


def by_bytes(*, normalizer: normalizers.Normalizer | None = None, leaves_out: str = "") -> tokenizers.Tokenizer:
    """A byte-level BPE whose longest token is LONGEST."""
    letters = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(leaves_out))
    merges = [(LONGEST[:length], LONGEST[length]) for length in range(1, len(LONGEST))]
    tokens = [*letters, *(left + right for left, right in merges)]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({token: number for number, token in enumerate(tokens)}, merges)
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if normalizer is not None:
        backend.normalizer = normalizer
    return backend


def with_fallback() -> tokenizers.Tokenizer:
    """SentencePiece's scheme: spaces are written as another character, and characters without a token as bytes."""
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), *"ab▁"]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({token: number for number, token in enumerate(tokens)}, [], byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return backend


def stripping() -> tokenizers.Tokenizer:
    """A token takes all spaces after it along."""
    backend = by_bytes()
    backend.add_special_tokens([AddedToken("<|end|>", rstrip=True)])
    return backend


def of_long_words() -> tokenizers.Tokenizer:
    """A normalizer writes a word of six bytes as one."""
    return by_bytes(normalizer=normalizers.Replace("letter", "a"))


BOUNDED = {
    "bytes": by_bytes(),
    "bytes without a": by_bytes(leaves_out="xyz"),
    "normal form": by_bytes(normalizer=normalizers.NFC()),
    "compatible form": by_bytes(normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Prepend("_")])),
    "fallback": with_fallback(),
    "stripping": stripping(),
    "long words": of_long_words(),
}
ALPHABET = st.sampled_from(
    [
        *LONGEST,
        LONGEST * 9,
        "x",
        "<|end|>",
        " " * 99,
        "\u3000\u00a0\n",
        "letter" * 9,
        "é",
        "\u212a",
        "\u1fbe\u0308\u0301",
    ]
)


@pytest.mark.fast(3)
@pytest.mark.parametrize("backend", BOUNDED.values(), ids=BOUNDED)
@given(text=st.one_of(st.text(), st.lists(ALPHABET).map("".join)))
@example(text=LONGEST * 50)
@example(text="<|end|>" + " \u3000" * 500)
@example(text="\u1fbe\u0308\u0301" * 50)
@example(text="".join(map(chr, range(0x1D41A, 0x1D422))) * 50)  # LONGEST in mathematical letters
@example(text="letter" * 50)
@example(text="xyz" * 50)
def test_a_text_has_as_many_tokens_as_its_bytes_say_or_more(text: str, backend: tokenizers.Tokenizer) -> None:
    count = TokenCount.of(backend)
    assert count.bytes_of_token < math.inf
    assert count.least(text) <= len(Tokenizer(backend, None, None).encode(text))


def test_a_text_of_the_longest_token_has_no_more_than_that() -> None:
    assert TokenCount.of(by_bytes()).least(LONGEST * 50) == 50
    assert TokenCount.of(by_bytes()).least(LONGEST * 50 + "a") == 51
    assert TokenCount.of(character_tokenizer().backend).least("é" * 50) == 0


class Whole(str):
    """A text of which only parts may be read."""

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        raise AssertionError("a whole text was read in one call")

    def replace(self, old: Any, new: Any, count: Any = -1) -> str:
        raise AssertionError("a whole text was read in one call")


@pytest.mark.parametrize("backend", [by_bytes(leaves_out="x"), stripping()], ids=["bytes", "stripping"])
def test_a_long_text_is_counted_in_pieces_as_if_it_were_one(backend: tokenizers.Tokenizer) -> None:
    count = TokenCount.of(backend)
    text = "a éx<|end|> \u3000" * PIECE
    kept = "aéx<|end|>" if count.stripping else "a é<|end|> \u3000"
    assert count.least(Whole(text)) == math.ceil(PIECE * len(kept.encode()) / count.bytes_of_token)


def removing() -> tokenizers.Tokenizer:
    backend = by_bytes()
    split = pre_tokenizers.Split(tokenizers.Regex(r"\s+"), behavior="removed")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return backend


def truncating() -> tokenizers.Tokenizer:
    backend = by_bytes()
    backend.enable_truncation(4)
    return backend


def without_bytes() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True))


UNBOUNDED = {
    "words": word_tokenizer().backend,
    "removes": removing(),
    "truncates": truncating(),
    "strips accents": by_bytes(normalizer=normalizers.StripAccents()),
    "joins what it does not know": without_bytes(),
    "normalises what it leaves out": by_bytes(normalizer=normalizers.NFC(), leaves_out="x"),
    "empties": by_bytes(normalizer=normalizers.Replace("a", "")),
    "by a pattern": by_bytes(normalizer=normalizers.Replace(tokenizers.Regex(" +"), " ")),
}


@pytest.mark.parametrize("backend", UNBOUNDED.values(), ids=UNBOUNDED)
def test_nothing_is_known_of_a_tokenizer_that_may_drop_text(backend: tokenizers.Tokenizer) -> None:
    assert TokenCount.of(backend).least("a" * 10_000) == 0


def padding() -> tokenizers.Tokenizer:
    backend = by_bytes()
    backend.enable_padding(length=3 * PIECE)
    return backend


LONG_TEXTS = (LONGEST, "x", " ", "w1 ", "letter", "\u1fbe\u0308\u0301", "a <|end|>" + " " * 5000)


@pytest.mark.parametrize("text", LONG_TEXTS)
@pytest.mark.parametrize(
    "backend", [*BOUNDED.values(), *UNBOUNDED.values(), padding()], ids=[*BOUNDED, *UNBOUNDED, "pads"]
)
def test_a_text_has_half_as_many_tokens_as_its_pieces_or_more(backend: tokenizers.Tokenizer, text: str) -> None:
    long = text * (9 * PIECE // 8 // len(text))
    whole = len(backend.encode(long, add_special_tokens=False))
    count = TokenCount.of(backend)
    assert count.in_pieces(long, 10 * PIECE) <= whole
    for most in (1, whole // 4, whole):
        assert not most < count.in_pieces(long, most) > whole


def test_pieces_are_counted_until_the_text_has_too_many_tokens_and_where_they_are_those_of_the_text() -> None:
    count = TokenCount.of(word_tokenizer().backend)
    assert PIECE * 0.49 < count.in_pieces("w1 " * PIECE, 10 * PIECE) < PIECE * 0.5
    assert PIECE / 7 < count.in_pieces("w1 " * PIECE, 10) < PIECE / 5
    for backend in (removing(), truncating(), padding(), UNBOUNDED["by a pattern"]):
        assert TokenCount.of(backend).in_pieces("a b" * PIECE, 10) == 0
    assert TokenCount.of(stripping()).in_pieces("a<|end|>" + " " * PIECE, 10) == 0
    assert TokenCount.of(stripping()).in_pieces("a" * PIECE, 10) > PIECE * 0.49


@pytest.mark.parametrize(("composed", "apart"), [("NFC", "NFD"), ("NFD", "NFD"), ("NFKC", "NFKD"), ("NFKD", "NFKD")])
def test_no_normal_form_writes_a_character_with_less_than_a_quarter_of_its_bytes(composed: str, apart: str) -> None:
    """The longest way to write a character: each of its parts as the longest character that means the same."""

    def num_bytes(text: str) -> int:
        return len(text.encode())

    syllables = range(0xAC00, 0xD7A4)  # of Hangul, whose parts no table has
    composites = [chr(code) for code in range(0x110000) if unicodedata.decomposition(chr(code)) or code in syllables]
    longest: defaultdict[str, int] = defaultdict(int)
    for character in composites:
        part = unicodedata.normalize(apart, character)  # type: ignore[arg-type]
        longest[part] = max(longest[part], num_bytes(character))
    for text in {*composites, *longest}:
        if unicodedata.normalize(composed, text) == text:  # type: ignore[arg-type]
            parts = unicodedata.normalize(apart, text)  # type: ignore[arg-type]
            assert sum(longest.get(part, num_bytes(part)) for part in parts) <= 4 * num_bytes(text), text
