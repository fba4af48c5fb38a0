"""StepKind: the kind of a step (decode, extend, ...), which decides its kernels, and a table of each kind's properties.

A new kind needs a row here, kernels in the providers, and code for the differences: how a batch is recognised
(padding.step_kind), its extra inputs (Extra), and a random step to check its graphs with (capture/probe_requests.py).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

# The most new tokens of a sequence in a verify step.
FEW_TOKENS = 4


class Extra(enum.Enum):
    """The inputs of a step in addition to rows, lengths and token ids."""

    NOTHING = "nothing"
    MASK = "a mask"  # for layers whose problem has custom_mask
    PREFIXES = "shared prefixes"  # for layers that can share them, if graphs are requested with shared_prefixes


@dataclass(frozen=True, slots=True)
class _Facts:
    """See the properties of StepKind."""

    instead: StepKind
    decodes: bool = False
    mixes: bool = False
    splits: bool = False
    captured: bool = True
    extra: Extra = Extra.NOTHING


class StepKind(enum.Enum):
    """The kind of a step, by its new tokens; it decides the kernels."""

    DECODE = "decode"  # one new token in every sequence
    EXTEND = "extend"  # no sequence with exactly one new token
    MIXED = "mixed"  # some sequences with one new token, others with more, or none
    VERIFY = "verify"  # up to FEW_TOKENS in every sequence, as when drafts are verified; the planner finds these
    PREFILL = "prefill"  # an extend step in which no sequence has a token in the cache
    MASKED = "masked"  # any number of new tokens in each sequence; a mask says which keys they see
    SHARED = "shared"  # one new token in every sequence, and prefixes that several of them share

    @property
    def decodes(self) -> bool:
        """True if every sequence has one new token, padded ones too."""
        return _FACTS[self].decodes

    @property
    def mixes(self) -> bool:
        """True if sequences with one new token come together with others that have more."""
        return _FACTS[self].mixes

    @property
    def splits(self) -> bool:
        """True if such a step may run as two halves."""
        return _FACTS[self].splits

    @property
    def captured(self) -> bool:
        """True if such a step may run as a graph."""
        return _FACTS[self].captured

    @property
    def extra(self) -> Extra:
        """The extra inputs of such a step."""
        return _FACTS[self].extra

    @property
    def instead(self) -> StepKind:
        """The kind whose kernel serves such a step in layers without one of its own; itself if every layer has one."""
        return _FACTS[self].instead


_FACTS: Mapping[StepKind, _Facts] = {
    StepKind.DECODE: _Facts(StepKind.DECODE, decodes=True, splits=True),
    StepKind.EXTEND: _Facts(StepKind.EXTEND, splits=True),
    StepKind.MIXED: _Facts(StepKind.MIXED, mixes=True, splits=True),
    StepKind.VERIFY: _Facts(StepKind.MIXED),
    StepKind.PREFILL: _Facts(StepKind.EXTEND, captured=False),
    StepKind.MASKED: _Facts(StepKind.MIXED, splits=True, extra=Extra.MASK),
    StepKind.SHARED: _Facts(StepKind.DECODE, decodes=True, extra=Extra.PREFIXES),
}
