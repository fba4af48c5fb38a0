"""A text form of a step's batch: `64d4k`, `1x2048+6144`, `63d4k+1x2048`, `64x5+2500`.

    batch  = group , { "+" , group } ;
    group  = decode | extend ;
    decode = count , "d" , length ;                    count sequences of length tokens, the last of which is new
    extend = count , "x" , length , [ "+" , length ] ; count sequences of length new tokens, over stored ones
    count  = number ;
    length = number , [ "k" ] ;                        k: times 1024
    number = digit , { digit } ;                       the first digit of a count is not 0

A number after "+" is a group's count if "d" or "x" follows it, else the stored tokens of the group before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from rocm_attn.errors import BadSetting

# Lengths are int32 on the device.
MOST_TOKENS = 2**31 - 1
MOST_SEQS = 1 << 20

_NUMBER = re.compile(r"\d+")
_KILO = 1024
_EXAMPLES = "as in 64d4k, 1x2048+6144 or 63d4k+1x2048"


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences with the same lengths.

    num_seqs: at least 1
    new:      new tokens of each, at least 1; a sequence with one is a decode
    stored:   tokens of each in the KV before the step
    """

    num_seqs: int
    new: int
    stored: int

    @property
    def kv_len(self) -> int:
        """Tokens of each sequence after the step."""
        return self.stored + self.new

    def __str__(self) -> str:
        if self.new == 1:
            return f"{self.num_seqs}d{_length(self.kv_len)}"
        return f"{self.num_seqs}x{_length(self.new)}" + (f"+{_length(self.stored)}" if self.stored else "")


@dataclass(frozen=True, slots=True)
class BatchSpec:
    """The sequences of a step, in order. parse() reads the result of str().

    Raises BadSetting if there is no sequence, or one is too long.
    """

    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        if not self.groups:
            raise BadSetting(f"a batch has no sequences; give at least one, {_EXAMPLES}")
        for group in self.groups:
            if min(group.num_seqs, group.new) < 1 or group.stored < 0:
                raise BadSetting(f"{group!r}: sequences and new tokens must be at least 1, stored tokens at least 0")
            if group.kv_len > MOST_TOKENS:
                raise BadSetting(f"{group} has sequences of {group.kv_len} tokens; at most {MOST_TOKENS} fit")
        if sum(group.num_seqs for group in self.groups) > MOST_SEQS:
            raise BadSetting(f"{self} has more than {MOST_SEQS} sequences")

    @classmethod
    def parse(cls, text: str) -> BatchSpec:
        """Parses the text form of a batch. Raises BadSetting, which points at the place."""
        return _Reader(text).batch()

    @classmethod
    def of_lengths(cls, lengths: Iterable[tuple[int, int]]) -> BatchSpec:
        """Makes a batch from each sequence's (new tokens, stored tokens), in order. Raises BadSetting."""
        return cls(tuple(Group(len(list(alike)), *each) for each, alike in groupby(lengths)))

    @property
    def num_seqs(self) -> int:
        """The number of sequences."""
        return sum(group.num_seqs for group in self.groups)

    @property
    def num_tokens(self) -> int:
        """New tokens of all sequences."""
        return sum(group.num_seqs * group.new for group in self.groups)

    @property
    def q_len(self) -> tuple[int, ...]:
        """New tokens of each sequence."""
        return tuple(group.new for group in self.groups for _ in range(group.num_seqs))

    @property
    def kv_len(self) -> tuple[int, ...]:
        """Tokens of each sequence, new ones included."""
        return tuple(group.kv_len for group in self.groups for _ in range(group.num_seqs))

    def __str__(self) -> str:
        return "+".join(map(str, self.groups))


def _length(tokens: int) -> str:
    return f"{tokens // _KILO}k" if tokens and tokens % _KILO == 0 else str(tokens)


class _Reader:
    """Parses a text from left to right."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def batch(self) -> BatchSpec:
        groups = [self._group()]
        while self._at < len(self._text):
            self._take("+", what="'+' or the end")
            groups.append(self._group())
        try:
            return BatchSpec(tuple(groups))
        except BadSetting as error:
            raise BadSetting(f"batch {self._text!r}: {error}") from error

    def _group(self) -> Group:
        begin = self._at
        num_seqs = self._number("the number of sequences")
        if num_seqs == 0:
            raise self._wrong("a number of sequences, at least 1", begin)
        if self._peek() == "d":
            self._at += 1
            begin = self._at
            kv_len = self._length("the number of tokens of a sequence")
            if kv_len == 0:
                raise self._wrong("the tokens of a sequence, at least 1", begin)
            return Group(num_seqs, 1, kv_len - 1)
        self._take("x", what="'d' (a decode over these tokens) or 'x' (new tokens)")
        begin = self._at
        new = self._length("the number of new tokens of a sequence")
        if new == 0:
            raise self._wrong("a number of new tokens, at least 1", begin)
        return Group(num_seqs, new, self._stored())

    def _stored(self) -> int:
        """Returns the tokens after a "+", or 0 if there is none or a group begins there."""
        if re.match(r"\+\d+(?![\ddx])", self._text[self._at :]) is None:
            return 0
        self._at += 1
        return self._length("the number of stored tokens")

    def _length(self, what: str) -> int:
        number = self._number(what)
        if self._peek() == "k":
            self._at += 1
            number *= _KILO
        return number

    def _number(self, what: str) -> int:
        found = _NUMBER.match(self._text, self._at)
        if found is None or not found[0].isascii():
            raise self._wrong(what, self._at)
        if len(found[0]) > len(str(MOST_TOKENS)):
            raise self._wrong(f"a number of at most {MOST_TOKENS}", self._at)
        self._at = found.end()
        return int(found[0])

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self, letter: str, *, what: str) -> None:
        if self._peek() != letter:
            raise self._wrong(what, self._at)
        self._at += 1

    def _wrong(self, wanted: str, at: int) -> BadSetting:
        found = repr(self._text[at]) if at < len(self._text) else "the end"
        return BadSetting(
            f"batch {self._text!r}: character {at + 1} is {found}, and {wanted} is expected; {_EXAMPLES}\n  "
            f"{self._text}\n  {' ' * at}^"
        )
