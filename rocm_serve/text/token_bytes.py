"""TokenBytes: the bytes that a vocabulary's entries stand for.

A token may hold a part of a character, so its text alone does not say which. Vocabularies write their entries in two
ways: byte-level ones (GPT-2's scheme) have a printable character for each byte; others (SentencePiece's) have text with
"▁" for a space, and "<0xC3>" for a single byte.
"""

import itertools
import json
import re
from typing import Any

import tokenizers

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "▁"


def _letters() -> tuple[str, ...]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = itertools.count(0x100)
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(0x100))


# The characters of byte-level vocabularies, by byte: GPT-2's bytes_to_unicode(). A printable byte is its own character,
# and the others are those from U+0100 on, in order.
LETTERS = _letters()
_BYTES = {letter: byte for byte, letter in enumerate(LETTERS)}


class TokenBytes:
    """Finds the bytes of a vocabulary's entries."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        decoder: Any = backend.decoder
        self._backend = backend
        self._is_byte_level = decoder is not None and "ByteLevel" in _kinds(json.loads(decoder.__getstate__()))
        self._added = {
            number: token.content if token.special or self._is_byte_level else token.content.replace(_SPACE, " ")
            for number, token in backend.get_added_tokens_decoder().items()  # Gemma's have "▁▁", which is a text
        }

    def of(self, token_id: int) -> bytes:
        """The bytes of a token; of a special one those of its name. None at all for an id that is not in use."""
        added = self._added.get(token_id)
        if added is not None:
            return added.encode()
        entry = self._backend.id_to_token(token_id)
        if entry is None:
            return b""
        if self._is_byte_level and all(character in _BYTES for character in entry):
            return bytes(_BYTES[character] for character in entry)
        byte = _BYTE.fullmatch(entry)
        return bytes.fromhex(byte[1]) if byte is not None else str(entry).replace(_SPACE, " ").encode()


def _kinds(decoder: dict[str, Any]) -> list[str]:
    """The kinds of a decoder's steps."""
    return [decoder["type"], *(kind for step in decoder.get("decoders", ()) for kind in _kinds(step))]
