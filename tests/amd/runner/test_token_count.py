"""TokenCount: no text has fewer tokens than its pieces say."""

import pytest
import tokenizers
from tokenizers import AddedToken, normalizers, pre_tokenizers

from rocm_serve.text import token_count
from rocm_serve.text.token_count import PIECE, TokenCount
from tests.amd.runner.tiny_model import word_tokenizer

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


def removing() -> tokenizers.Tokenizer:
    backend = by_bytes()
    split = pre_tokenizers.Split(tokenizers.Regex(r"\s+"), behavior="removed")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return backend


BACKENDS = {
    "bytes": by_bytes(),
    "bytes without some": by_bytes(leaves_out="xyz"),
    "compatible form": by_bytes(normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Prepend("_")])),
    "fallback": with_fallback(),
    "stripping": stripping(),
    "long words": by_bytes(normalizer=normalizers.Replace("letter", "a")),
    "words": word_tokenizer().backend,
    "strips accents": by_bytes(normalizer=normalizers.StripAccents()),
    "empties": by_bytes(normalizer=normalizers.Replace("a", "")),
}
# A part of their text may depend on all of it.
GLOBAL = {
    "removes": removing(),
    "by a pattern": by_bytes(normalizer=normalizers.Replace(tokenizers.Regex(" +"), " ")),
}
LONG_TEXTS = (LONGEST, "x", " ", "w1 ", "letter", "\u1fbe\u0308\u0301", "a <|end|>" + " " * 500)


@pytest.mark.parametrize("text", LONG_TEXTS)
@pytest.mark.parametrize("backend", [*BACKENDS.values(), *GLOBAL.values()], ids=[*BACKENDS, *GLOBAL])
def test_a_text_has_half_as_many_tokens_as_its_pieces_or_more(
    backend: tokenizers.Tokenizer, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    piece = PIECE // 8
    monkeypatch.setattr(token_count, "PIECE", piece)
    long = text * (9 * piece // 8 // len(text))
    whole = len(backend.encode(long, add_special_tokens=False))
    count = TokenCount.of(backend)
    assert count.least(long, 10 * PIECE) <= whole
    for most in (1, whole // 4, whole):
        assert not most < count.least(long, most) > whole


def test_pieces_are_counted_until_the_text_has_too_many_tokens_and_where_they_are_those_of_the_text() -> None:
    count = TokenCount.of(word_tokenizer().backend)
    assert PIECE * 0.49 < count.least("w1 " * PIECE, 10 * PIECE) < PIECE * 0.5
    assert PIECE / 7 < count.least("w1 " * PIECE, 10) < PIECE / 5
    for backend in GLOBAL.values():
        assert TokenCount.of(backend).least("a b" * PIECE, 10) == 0
    assert TokenCount.of(stripping()).least("a<|end|>" + " " * PIECE, 10) == 0
    assert TokenCount.of(stripping()).least("a<|end|>" + "a" * PIECE, 10) > PIECE * 0.49
