"""TokenCount: the fewest tokens that a text can have, known from its bytes, or from pieces of it.

A tokenizer takes over 100 times the memory of a text while it reads it: one that cannot fit is not given to it whole.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers

from rocm_serve.text.token_bytes import LETTERS
from rocm_serve.text.tokenizer import require_characters

# Unicode's normal forms write a text with at least a quarter of its bytes: tests/amd/runner/test_token_count.py tries
# all characters.
_NORMAL_FORMS, _SHRINK = frozenset({"NFC", "NFD", "NFKC", "NFKD"}), 4
# Parts of a tokenizer that change no byte, or add some.
_LOSSLESS_NORMALIZERS = frozenset({"ByteLevel", "Prepend"})
_LOSSLESS_SPLITS = frozenset({"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts"})
# Characters that are looked at in one call. Between two calls, other threads can have Python's lock.
PIECE = 2**16
# More tokens than two cuts make of one.
_AT_CUTS = 128
_SPACES = tuple(chr(code) for code in range(0x3001) if chr(code).isspace())


@dataclass(frozen=True, slots=True)
class TokenCount:
    """A tokenizer's bound.

    bytes_of_token: the most bytes of text that one token stands for; infinite if the tokenizer may drop any byte, or
                    write any number of bytes as one token
    dropped:        the bytes that have no token: a byte-level tokenizer leaves them out
    stripping:      texts of tokens that take the spaces next to them along
    backend:        the tokenizer
    is_local:       whether it looks at a token's neighbours alone, as long as no such token is there
    """

    bytes_of_token: float
    dropped: bytes
    stripping: tuple[str, ...]
    backend: tokenizers.Tokenizer
    is_local: bool

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> TokenCount:
        """Returns the bound of a tokenizer. Only byte pair encodings over bytes have a finite one."""
        added = list(backend.get_added_tokens_decoder().values())
        stripping = tuple(token.content for token in added if token.lstrip or token.rstrip)
        normalizers = _parts(backend.normalizer, "normalizers")
        splits = _parts(backend.pre_tokenizer, "pretokenizers")
        tokens = set(backend.get_vocab(with_added_tokens=False))
        if any(part["type"] == "ByteLevel" for part in (*normalizers, *splits)):
            # The vocabulary has a character for each byte.
            dropped = bytes(byte for byte, letter in enumerate(LETTERS) if letter not in tokens)
            longest = max(map(len, tokens), default=1)
            is_bounded = not (dropped and normalizers)  # a normalizer may make such bytes
        else:
            dropped, longest = b"", max(map(_num_bytes, tokens), default=1)
            is_bounded = (
                bool(getattr(backend.model, "byte_fallback", False))
                and {f"<0x{byte:02X}>" for byte in range(256)} <= tokens
            )
        is_bounded &= isinstance(backend.model, tokenizers.models.BPE) and backend.truncation is None
        is_bounded &= all(part["type"] in _LOSSLESS_SPLITS and part.get("behavior") != "Removed" for part in splits)
        # Any other part may take out or replace a text of any length.
        is_local = backend.truncation is None and backend.padding is None
        is_local &= all(part.get("behavior") != "Removed" for part in splits)
        is_local &= all("Regex" not in part.get("pattern", {}) for part in normalizers)
        if not is_bounded:
            return cls(math.inf, dropped, stripping, backend, is_local)
        longest = max([longest, *(_num_bytes(token.content) for token in added)])
        return cls(longest * math.prod(map(_shrink, normalizers)), dropped, stripping, backend, is_local)

    def least(self, text: str) -> int:
        """Returns a number of tokens that no text of these bytes falls below; 0 if nothing is known."""
        if math.isinf(self.bytes_of_token):
            return 0
        spaces = _SPACES if any(token in text for token in self.stripping) else ()
        pieces = (text[begin : begin + PIECE] for begin in range(0, len(text), PIECE))
        num_bytes = sum(self._num_kept(piece, spaces) for piece in pieces)
        return math.ceil(num_bytes / self.bytes_of_token)

    def in_pieces(self, text: str, most: int) -> int:
        """Returns a number of tokens that the text does not fall below, at little more than `most`; 0: none is known.

        It is half the tokens of the pieces, without some of each: a cut changes few tokens next to it, and a piece has
        thousands. Raises BadRequest for a text with half of a character.
        """
        require_characters(text)
        if not self.is_local or any(token in text for token in self.stripping):
            return 0
        num_tokens = 0
        for begin in range(0, len(text), PIECE):
            (piece,) = self.backend.encode_batch_fast([text[begin : begin + PIECE]], add_special_tokens=False)
            num_tokens += max(0, len(piece) - _AT_CUTS)
            if num_tokens > 2 * most:
                break
        return (num_tokens + 1) // 2

    def _num_kept(self, piece: str, spaces: Sequence[str]) -> int:
        """Returns the bytes of a part of a text that have a token, without these spaces."""
        for space in spaces:
            piece = piece.replace(space, "")
        return len(piece.encode("utf-8", "surrogatepass").translate(None, self.dropped))


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _parts(stage: Any, name: str) -> list[Mapping[str, Any]]:
    """Returns the parts of a normalizer or pre-tokenizer, as tokenizer.json describes them; sequences are flattened."""
    return [] if stage is None else list(_flat(json.loads(stage.__getstate__()), name))


def _flat(part: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    return [each for inner in part[name] for each in _flat(inner, name)] if part["type"] == "Sequence" else [part]


def _shrink(normalizer: Mapping[str, Any]) -> float:
    """Returns the most bytes that a normalizer writes as one byte."""
    kind = normalizer["type"]
    if kind in _NORMAL_FORMS:
        return _SHRINK
    if kind == "Replace" and normalizer["content"]:
        replaced = normalizer["pattern"].get("String", "")
        if replaced:
            return max(1.0, _num_bytes(replaced) / _num_bytes(normalizer["content"]))
    return 1.0 if kind in _LOSSLESS_NORMALIZERS else math.inf
