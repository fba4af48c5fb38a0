"""TokenCount: the fewest tokens that a text can have, counted in pieces of it.

A tokenizer takes over 100 times the memory of a text while it reads it: one that cannot fit is not given to it whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers

from rocm_serve.text.characters import require_characters
from rocm_serve.text.tokenizer import encoding_of

# Characters that are tokenised in one call. Between two calls, other threads can have Python's lock.
PIECE = 2**16
# More tokens than two cuts make of one.
_AT_CUTS = 128


@dataclass(frozen=True, slots=True)
class TokenCount:
    """A tokenizer's bound.

    backend:   the tokenizer
    is_local:  whether it looks at a token's neighbours alone
    stripping: texts of tokens that take the spaces next to them along
    """

    backend: tokenizers.Tokenizer
    is_local: bool
    stripping: tuple[str, ...]

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> TokenCount:
        """Returns the bound of a tokenizer."""
        added = backend.get_added_tokens_decoder().values()
        stripping = tuple(token.content for token in added if token.lstrip or token.rstrip)
        # A part that takes out or replaces a text of any length does not look at neighbours alone.
        is_local = all(part.get("behavior") != "Removed" for part in _parts(backend.pre_tokenizer, "pretokenizers"))
        is_local &= all("Regex" not in part.get("pattern", {}) for part in _parts(backend.normalizer, "normalizers"))
        return cls(backend, is_local, stripping)

    def least(self, text: str, most: int) -> int:
        """Returns a number of tokens that the text does not fall below, at little more than `most`; 0: none is known.

        It is half the tokens of the pieces, without some of each: a cut changes few tokens next to it, and a piece has
        thousands. Raises BadRequest for a text with half of a character, or that the tokenizer has no tokens for.
        """
        require_characters(text)
        if not self.is_local:
            return 0
        strips = any(token in text for token in self.stripping)
        num_tokens = 0
        for begin in range(0, len(text), PIECE):
            piece = text[begin : begin + PIECE]
            found = encoding_of(self.backend, piece.strip() if strips else piece, add_special_tokens=False)
            num_tokens += max(0, len(found) - _AT_CUTS)
            if num_tokens > 2 * most:
                break
        return (num_tokens + 1) // 2


def _parts(stage: Any, name: str) -> list[Mapping[str, Any]]:
    """Returns the parts of a normalizer or pre-tokenizer, as tokenizer.json describes them; sequences are flattened."""
    return [] if stage is None else list(_flat(json.loads(stage.__getstate__()), name))


def _flat(part: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    return [each for inner in part[name] for each in _flat(inner, name)] if part["type"] == "Sequence" else [part]
