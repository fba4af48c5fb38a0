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

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.errors import BadSetting

# Lengths are int32 on the device.
MOST_TOKENS = 2**31 - 1
MOST_SEQS = 1 << 20

_KILO = 1024
# The images of prompts in layers with custom masks: one in each 1,024 tokens, of as many tokens as in Gemma 3
# (mm_tokens_per_image of its config.json).
_TEXT_BEFORE, _IMAGE, _TOKENS_OF_AN_IMAGE = 64, 256, 1024
_EXAMPLES = "as in 64d4k, 1x2048+6144 or 63d4k+1x2048"
# A group, and the "+" before the next one. More digits than a length has are no number.
_GROUP = re.compile(
    r"([1-9]\d{0,9})(?:d([1-9]\d{0,9}k?)|x([1-9]\d{0,9}k?)(?:\+(\d{1,10}k?)(?![\ddx]))?)(?:\+(?=.)|$)", re.ASCII
)


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

    @property
    def spans(self) -> list[range]:
        """The places (kv_index) of each image, whose tokens see each other in layers with custom masks."""
        firsts = range(self.stored + _TEXT_BEFORE, self.kv_len - _IMAGE + 1, _TOKENS_OF_AN_IMAGE)
        return [range(first, first + _IMAGE) for first in firsts]

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
        """Parses the text form of a batch. Raises BadSetting, which points at the first group that is none."""
        at = 0
        groups: list[Group] = []
        while at < len(text) or not groups:
            found = _GROUP.match(text, at)
            if found is None:
                raise BadSetting(
                    f"batch {text!r}: {text[at:]!r}, from character {at + 1} on, does not begin with sequences, d or "
                    f"x, and their tokens, at least 1 of each; write it {_EXAMPLES}\n  {text}\n  {' ' * at}^"
                )
            num_seqs, kv_len, new, stored = found.groups()
            first = (1, _tokens(kv_len) - 1) if kv_len else (_tokens(new), _tokens(stored or "0"))
            groups.append(Group(int(num_seqs), *first))
            at = found.end()
        return cls(tuple(groups))

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

    @property
    def spans(self) -> list[list[range]]:
        """The places (kv_index) of each sequence's images."""
        return [group.spans for group in self.groups for _ in range(group.num_seqs)]

    @property
    def kind(self) -> StepKind:
        """The kind of the step if it runs eagerly. Steps of an empty cache may have a kernel of their own."""
        new = [group.new for group in self.groups]
        if max(new) == 1:
            return StepKind.DECODE
        if min(new) == 1:
            return StepKind.MIXED
        return StepKind.EXTEND if any(group.stored for group in self.groups) else StepKind.PREFILL

    def __str__(self) -> str:
        return "+".join(map(str, self.groups))


def _length(tokens: int) -> str:
    return f"{tokens // _KILO}k" if tokens and tokens % _KILO == 0 else str(tokens)


def _tokens(text: str) -> int:
    return int(text.removesuffix("k")) * (_KILO if text.endswith("k") else 1)
