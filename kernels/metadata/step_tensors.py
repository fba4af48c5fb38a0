"""StepTensors: every tensor of a step, each declared once: its content, unit, dtype and pad, and its need.

The buffers that hold them, their sizes, the views of a step and the arguments of `fill` follow from this table.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple, get_type_hints

import torch
from torch import Tensor

# The parent of a draft that no other one comes before.
NO_PARENT = -1
# The first parent of a sequence whose new tokens are a prompt, and no drafts, in a step that verifies trees.
BRINGS_PROMPT = -2

# UNLIMITED_WINDOW for subtracting a window from lengths: no sequence has that many keys.
ALL_KEYS = 2**31 - 1


class Unit(enum.Enum):
    """The thing that one element of a tensor stands for."""

    COUNT = "count of the step"
    SEQ = "sequence"
    SEQ_BOUNDARY = "sequence boundary (one more than sequences)"
    TOKEN = "token"
    LIST_ENTRY = "entry of the page list"
    TABLE_ENTRY = "entry of the block table"
    MASK_WORD = "word of the packed mask"
    DRAFT = "draft of a round"
    WORD = "word of a schedule"


class Need(enum.Enum):
    """Forms of a step that a kernel reads in addition to those of every step."""

    PAGE_LIST = "CSR page list with page_indptr and last_page_len"
    BLOCK_TABLE = "dense block table, one row for each sequence"
    KV_LEN_INT64 = "int64 KV lengths"
    MASK = "packed mask cells, where each sequence's begin, and positions that come with them; spans"
    PREFIXES = "lengths of shared prefixes, where their groups begin, and what comes after them"


EVERY_STEP: frozenset[Need] = frozenset()  # the needs of a tensor that every step has


@dataclass(frozen=True, slots=True)
class Field:
    """The declaration of a tensor of the step.

    pad:      value of an element without a real sequence, token or page, when its memory is new
    needs:    the kernels' need that it serves; EVERY_STEP: no need is required
    of_space: whether its entries are pages or slots, so that each space has its own
    of_round: whether the steps of a round of drafts share it, because the steps' lengths do not change it
    """

    unit: Unit
    dtype: torch.dtype = torch.int32
    pad: int = 0
    needs: frozenset[Need] = EVERY_STEP
    of_space: bool = False
    of_round: bool = False


class Pads(NamedTuple):
    """The values that publish writes for a padded sequence: its KV length and its new tokens."""

    kv_len: int = 0
    q_len: int = 0


NO_PADS = Pads()


class TableTerms(NamedTuple):
    """The properties of a table, of its pages and of the sequences that read it.

    null_page: whether page 0 belongs to no sequence: a new token whose slot is in it is lost, and nothing is written to
               it. If it is a real page, a lost token has slot -1
    short_kv:  whether a sequence may have fewer tokens in its KV than new ones, as it may if attention is not causal:
               its first new tokens have no slot then, and that is no fault
    """

    null_page: bool = True
    short_kv: bool = False


OWN_TABLE = TableTerms()

_LIST = frozenset({Need.PAGE_LIST})
_MASK = frozenset({Need.MASK})
_PREFIXES = frozenset({Need.PREFIXES})


@dataclass(frozen=True, slots=True, eq=False)
class StepTensors:
    """A step, or one half of a split one, in one space; S padded sequences, T padded tokens.

    Tensors are contiguous, and int32 unless the declaration says otherwise. A tensor that no kernel needs is empty.
    `table` is no buffer of the step: it is the request table of the space, int32 [rows, width], row and page_no ->
    page, with a free row stride.
    """

    # Published: from the host, or from the caller's tensors on the device.
    # [4] num_seqs, num_tokens, step number, error word; fill sets bits of the last
    counts: Annotated[Tensor, Field(Unit.COUNT, of_round=True)]
    # [S] sequence -> row of the table
    row_of_seq: Annotated[Tensor, Field(Unit.SEQ, of_round=True)]
    # [S] tokens, new ones included
    kv_len: Annotated[Tensor, Field(Unit.SEQ)]
    # [S] new tokens
    q_len: Annotated[Tensor, Field(Unit.SEQ, of_round=True)]
    # [T] 0 for pads, and for every token if the step brings no ids
    token_ids: Annotated[Tensor, Field(Unit.TOKEN)]
    # [S] tokens that the sequence shares with its group, whole pages
    prefix_len: Annotated[Tensor, Field(Unit.SEQ, needs=_PREFIXES)]
    # [S] one past the last sequence of its group
    group_end: Annotated[Tensor, Field(Unit.SEQ, needs=_PREFIXES)]
    # [S] the first key that has cells in a mask, 0 if all have, kv_len if none has; in masked steps only
    mask_start: Annotated[Tensor, Field(Unit.SEQ, needs=_MASK)]
    # [n] cells of a mask, packed: visible_keys.py; in masked steps only
    mask_words: Annotated[Tensor, Field(Unit.MASK_WORD, needs=_MASK)]
    # [T] positions that came with the mask; in masked steps only
    mask_positions: Annotated[Tensor, Field(Unit.TOKEN, needs=_MASK)]
    # [T] token -> the first key of the span that it is in, and one past the last; in masked steps only, and read only
    # if there are no cells
    span_begin: Annotated[Tensor, Field(Unit.TOKEN, needs=_MASK)]
    span_end: Annotated[Tensor, Field(Unit.TOKEN, needs=_MASK)]

    # Derived by every fill.
    # [S + 1] sequence -> first token
    q_indptr: Annotated[Tensor, Field(Unit.SEQ_BOUNDARY)]
    # [S] sequence -> last token, 0 if it has no new one
    last_token_of_seq: Annotated[Tensor, Field(Unit.SEQ)]
    # [T] token -> sequence; for tokens after those of all S sequences S - 1, which may be a real one
    seq_of_token: Annotated[Tensor, Field(Unit.TOKEN)]
    # [T] token -> row of the table; for pads 0
    row_of_token: Annotated[Tensor, Field(Unit.TOKEN)]
    # [T] token -> place in its sequence's KV
    position_of_token: Annotated[Tensor, Field(Unit.TOKEN)]
    # [T] token -> place in its sequence's KV, -1 for pads and for tokens before the KV: they see no key
    last_key_of_token: Annotated[Tensor, Field(Unit.TOKEN, pad=-1)]
    # [T] token -> slot of the pool; for pads 0, or -1 if page 0 is a real page
    slot_of_token: Annotated[Tensor, Field(Unit.TOKEN, of_space=True)]

    # Derived by every fill if a kernel needs them.
    # [S + 1] sequence -> first entry of page_list
    page_indptr: Annotated[Tensor, Field(Unit.SEQ_BOUNDARY, needs=_LIST)]
    # [L] pages, sequence after sequence, then page 0
    page_list: Annotated[Tensor, Field(Unit.LIST_ENTRY, needs=_LIST, of_space=True)]
    # [S] tokens in the last page, 1 if kv_len is 0
    last_page_len: Annotated[Tensor, Field(Unit.SEQ, pad=1, needs=_LIST)]
    # [S, W] pages of each sequence, then page 0; W may exceed the table's width
    block_table: Annotated[Tensor, Field(Unit.TABLE_ENTRY, needs=frozenset({Need.BLOCK_TABLE}), of_space=True)]
    # [S]
    kv_len_int64: Annotated[Tensor, Field(Unit.SEQ, torch.int64, needs=frozenset({Need.KV_LEN_INT64}))]
    # [S + 1] sequence -> first cell of its [q_len, kv_len - mask_start] mask
    mask_indptr: Annotated[Tensor, Field(Unit.SEQ_BOUNDARY, torch.int64, needs=_MASK)]
    # [S + 1] group -> first of its sequences; a group has the number of its first sequence, other groups are empty
    group_indptr: Annotated[Tensor, Field(Unit.SEQ_BOUNDARY, needs=_PREFIXES)]
    # [S] tokens after the shared prefix, 0 for pads
    suffix_kv_len: Annotated[Tensor, Field(Unit.SEQ, needs=_PREFIXES)]
    # [S] page_no of the first page after the shared prefix
    suffix_page: Annotated[Tensor, Field(Unit.SEQ, needs=_PREFIXES)]

    table: Tensor
    # [T] token -> the first key of its window, in masked steps; empty if no window is read. Each window of masked
    # layers has one of its own, so it is no buffer of this table either.
    window_start: Tensor
    pads: Pads = NO_PADS
    terms: TableTerms = OWN_TABLE
    # Launches that a launcher keeps for these addresses, under its own name.
    launches: dict[str, Callable[[Tensor, Tensor], None]] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(
        cls, nothing: Tensor, pads: Pads = NO_PADS, terms: TableTerms = OWN_TABLE, /, **tensors: Tensor
    ) -> StepTensors:
        """A step of these tensors, by name; nothing, which is empty, stands for all others."""
        return cls(**{**dict.fromkeys((*FIELDS, "table", "window_start"), nothing), **tensors}, pads=pads, terms=terms)

    @property
    def positions(self) -> Tensor:
        """int32 [T]; the positions for the model's position embedding: derived, or as they came with a mask."""
        return self.mask_positions if self.mask_positions.numel() else self.position_of_token


FIELDS: Mapping[str, Field] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(StepTensors, include_extras=True).items()
    if hasattr(hint, "__metadata__")
}

# Programs of a role that is shared out finely, about as many as run at a time on an H200 (2112) or an MI300X (2432).
_PROGRAMS = 2048


def shares_of_seq(entries: int, num_seqs: int, at_once: int) -> int:
    """Programs that share one sequence's entries, of which it has at most `entries`, at_once of them at a time."""
    return min(-(-entries // at_once), max(1, _PROGRAMS // num_seqs))
