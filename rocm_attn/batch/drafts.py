"""Drafts: a draft round of speculative decoding, as one step of the runtime that runs in several parts.

A draft model proposes K branches in each of S draft steps. All K * S draft tokens of a sequence are new tokens of one
step of the runtime. They lie in the sequence's own row, after its stored tokens:

    kv_index of branch b of draft step i = prefix + i * K + b,    where prefix = kv_len - K * S

So a sequence has one list of pages, however many branches it has; all branches share the partly filled page at its end;
and reserve(row, kv_len) makes room for all of them. A draft sees the prefix, itself and its ancestors, by a mask. With
one branch, drafts are a chain, and each draft step is a decode step.
"""

from __future__ import annotations  # check_fields() reads types as texts

from dataclasses import dataclass
from typing import ClassVar

from rocm_attn.errors import BadBatch, BadSetting
from rocm_attn.kernels.speculative.limits import MOST_NODES
from rocm_attn.machine.settings import check_fields


class NoDrafts:
    """A step that runs in one part, or in two halves."""

    __slots__ = ()
    branches: ClassVar[int] = 0
    steps: ClassVar[int] = 1
    tokens: ClassVar[int] = 0

    def __repr__(self) -> str:
        return "NO_DRAFTS"

    def __reduce__(self) -> str:
        return "NO_DRAFTS"  # there is one; a copy, pickled or not, is that one


@dataclass(frozen=True, slots=True)
class Drafts:
    """The shape of a draft round: a draft model proposes `branches` tokens per sequence in each of `steps` draft steps.

    branches: K, draft tokens per sequence in each draft step; 1: a chain
    steps:    S, draft steps of the round

    Raises BadBatch, and BadSetting for a number that is not whole.
    """

    branches: int
    steps: int

    def __post_init__(self) -> None:
        check_fields(self, BadSetting, " of drafts")
        if self.branches < 1 or self.steps < 1:
            raise BadBatch(f"drafts have {self.branches} branches and {self.steps} steps; give at least 1 of each")
        if self.tokens >= MOST_NODES:
            raise BadBatch(
                f"{self.branches} branches with {self.steps} steps make {self.tokens} draft tokens per sequence; a "
                f"tree has at most {MOST_NODES} nodes with its root, so use fewer draft tokens"
            )

    @property
    def tokens(self) -> int:
        """Draft tokens per sequence in the round: K * S."""
        return self.branches * self.steps


AnyDrafts = NoDrafts | Drafts
NO_DRAFTS = NoDrafts()
