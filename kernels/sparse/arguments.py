"""The arguments of sparse attention, as values that launchers and their torch twins take whole.

An index key stands for one token, or for a few that a model pooled; its page has the id of the layer's own page. Units
are selected: a unit is a token, a pool of tokens, or a block of tokens. Unit u of a sequence is the tokens
[u, u + 1) * unit_tokens of its KV. A token's selection does not depend on the batch, so decode and extend agree.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import NamedTuple

import torch
from torch import Tensor

from rocm_attn.kernels.attention.arguments import check_rows
from rocm_attn.kernels.cache.layer_pages import LayerPages

# The entries of a selection at and past its count.
NO_UNIT = -1
# Bits of the word that reports errors of a selection: a count is negative, or larger than the units that the
# token sees or than the width; an entry is no unit that its token sees; an entry is not larger than the one before it.
BAD_COUNT, OUTSIDE, NOT_ASCENDING = 1, 2, 4


class Pooling(enum.Enum):
    """How the scores of a unit's index keys are reduced to the unit's score."""

    MAX = "the largest score of its keys"
    MEAN = "the mean of its keys' scores"


class LastUnit(enum.Enum):
    """How a token's last unit is treated if the token sees only a part of it.

    SCORED:   it competes like the others, by the keys that the token sees
    ADDED:    it is always added to the selected units
    LEFT_OUT: it is never selected
    """

    SCORED = "scored by the keys that are seen"
    ADDED = "added to what is chosen"
    LEFT_OUT = "left out"


# By the names of annotations, whose values come from configs too.
_KINDS = {"float": Real, "int": Integral, "bool": bool, "Pooling": Pooling, "LastUnit": LastUnit}


@dataclass(frozen=True, slots=True)
class Indexing:
    """How index keys are scored, and how units are selected by their scores (top-k).

        score[t, s, u] = pooling over keys r of unit u that t sees:   sum over heads h of set s:
                         weights[t, h] * f(scale * q[t, h] . k[r])                             f(x) = max(x, 0), or x

    The units with the largest scores are selected; among equal scores, the first ones. A unit whose score is NaN is
    never selected. A token that sees no more than `top` units gets all of them.

    scale:       factor on q . k, positive
    top:         units selected for a token (k of the top-k), forced ones included
    sets:        selections per token: 1, which all heads share, or one for each KV head. Index heads are divided evenly
    rectified:   whether f is max(x, 0)
    key_tokens:  tokens that an index key stands for; the key exists once all of them are stored
    unit_keys:   index keys in a unit
    pooling:     how the scores of a unit's keys are reduced; with one key it has no effect
    first, last: units at the beginning and at the end of a token's keys that are selected whatever their scores
    last_unit:   see LastUnit; if key_tokens is more than 1, an incomplete unit cannot be scored
    candidate_blocks: blocks of keys that select() keeps for select_among(): those with the largest scores of single
                 keys, and the last block that the token sees; 0: none
    block_keys:  keys in such a block, a power of two
    """

    scale: float
    top: int
    sets: int = 1
    rectified: bool = True
    key_tokens: int = 1
    unit_keys: int = 1
    pooling: Pooling = Pooling.MAX
    first: int = 0
    last: int = 0
    last_unit: LastUnit = LastUnit.SCORED
    candidate_blocks: int = 0
    block_keys: int = 1

    @property
    def refusal(self) -> str:
        """Returns the reason why these values are invalid; empty if they are valid."""
        for each in fields(self):
            value, kind = getattr(self, each.name), _KINDS[str(each.type)]
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                return f"{each.name} of an indexer is {value!r}; it must be of type {each.type}"
        if not (math.isfinite(self.scale) and self.scale > 0):
            return f"scale of an indexer is {self.scale}; it must be a positive number"
        for name in ("top", "sets", "key_tokens", "unit_keys"):
            if getattr(self, name) < 1:
                return f"{name} of an indexer is {getattr(self, name)}; it must be at least 1"
        if min(self.first, self.last) < 0 or self.first + self.last > self.top:
            return (
                f"an indexer forces {self.first} first and {self.last} last units and selects {self.top}; it "
                "cannot force more than it selects, nor fewer than 0"
            )
        if self.key_tokens > 1 and self.last_unit is LastUnit.SCORED:
            return (
                f"an index key of {self.key_tokens} tokens exists once all of them are stored, so an incomplete "
                "unit has no score; set last_unit to ADDED or LEFT_OUT"
            )
        blocks, size = self.candidate_blocks, self.block_keys
        has_blocks = blocks >= 0 and size >= 1 and size & (size - 1) == 0
        if not has_blocks or (blocks and (self.unit_tokens, self.first, self.last) != (1, 0, 0)):
            return (
                f"an indexer leaves {blocks} blocks of {size} keys, chooses units of {self.unit_tokens} tokens, and "
                f"forces {self.first} first and {self.last} last ones; blocks of a power of two of keys are left only "
                "where units are single tokens and none is forced"
            )
        return ""

    @property
    def of_blocks(self) -> Indexing:
        """The Indexing that selects the candidate blocks."""
        return replace(
            self,
            top=self.candidate_blocks,
            unit_keys=self.block_keys,
            pooling=Pooling.MAX,
            last=1,
            last_unit=LastUnit.SCORED,
            candidate_blocks=0,
            block_keys=1,
        )

    @property
    def unit_tokens(self) -> int:
        """Tokens in a unit."""
        return self.key_tokens * self.unit_keys

    @property
    def width(self) -> int:
        """The most units that are selected for a token."""
        return self.top + (self.last_unit is LastUnit.ADDED)

    def max_units(self, max_kv_len: int) -> int:
        """The most units that a token of a sequence of up to max_kv_len tokens sees."""
        whole, rest = divmod(max_kv_len, self.unit_tokens)
        return whole + (rest > 0 and self.last_unit is LastUnit.SCORED)


class SparseTokens(NamedTuple):
    """T padded tokens, and their places. A token sees the keys of its sequence up to its own.

    row_of_token:      int32 [T]  token -> row of the table
    position_of_token: int32 [T]  token -> place in its sequence's KV
    num_tokens:        int32 [1]  tokens at or past it belong to no sequence, and see nothing
    max_q_len:         no sequence has more of the tokens
    max_kv_len:        rows are not read past the pages of this many tokens
    """

    row_of_token: Tensor
    position_of_token: Tensor
    num_tokens: Tensor
    max_q_len: int
    max_kv_len: int

    def check(self) -> None:
        """Asserts dtypes, shapes and contiguity."""
        for each in (self.row_of_token, self.position_of_token, self.num_tokens):
            assert each.dtype == torch.int32
            assert each.is_contiguous()
        assert self.row_of_token.shape == self.position_of_token.shape
        assert self.num_tokens.numel() == 1
        assert self.max_kv_len >= 0


class SelectedKeys(NamedTuple):
    """The units that each token gets, in a buffer that its owner may pass to the attention of several layers.

    units:       int32 [T, sets, width]  unit numbers, ascending; NO_UNIT at and past the count
    counts:      int32 [T, sets]
    unit_tokens: tokens of a unit
    """

    units: Tensor
    counts: Tensor
    unit_tokens: int

    @property
    def sets(self) -> int:
        """Selections of a token."""
        return self.units.shape[1]

    @property
    def width(self) -> int:
        """The most units of a token."""
        return self.units.shape[2]

    def check(self, num_tokens: int) -> None:
        """Asserts dtypes, shapes and contiguity."""
        assert self.units.dtype == self.counts.dtype == torch.int32
        assert self.units.shape == (num_tokens, self.sets, self.width)
        assert self.counts.shape == (num_tokens, self.sets)
        assert self.units.is_contiguous()
        assert self.counts.is_contiguous()
        assert self.unit_tokens >= 1


class LastTokens(NamedTuple):
    """No selection: each token gets the last `width` that it sees, as units of one token."""

    width: int
    units: None = None
    counts: None = None
    unit_tokens: int = 1
    sets: int = 1

    def check(self, num_tokens: int) -> None:
        """Asserts that a token may see one."""
        assert self.width >= 1


class IndexPages(NamedTuple):
    """One layer's index keys.

    keys:  [pages, page_keys, dim], page_keys = page_size / key_tokens; the last stride is 1. bfloat16, float16, float32
           or an eight-bit encoding
    scale: float32 scale of the keys: [1], or [pages, page_keys]; None: there is none
    """

    keys: Tensor
    scale: Tensor | None = None


class IndexArgs(NamedTuple):
    """One indexer's work in one step.

    q:       [T, index_heads, dim], any strides but the last; in the keys' eight-bit encoding, or in bfloat16, float16
             or float32, to which keys are widened
    weights: float32 [T, index_heads], any strides; or None: all are 1. They include the scale of q's own encoding
    pages:   the index keys
    table:   int32 [rows, width]: row, page_no -> page, of the layer's own pages
    tokens:  the step's tokens
    among:   the blocks of keys that each token chooses from, as Indexing.of_blocks has chosen them; None: all
    """

    q: Tensor
    weights: Tensor | None
    pages: IndexPages
    table: Tensor
    tokens: SparseTokens
    among: SelectedKeys | None = None

    def check(self, indexing: Indexing) -> None:
        """Asserts, cheaply and on the host, that launches read no other memory and give no wrong scores."""
        num_tokens, num_heads, dim = self.q.shape
        keys, scale = self.pages
        self.tokens.check()
        assert self.tokens.row_of_token.shape == (num_tokens,), "q and the tokens disagree"
        assert keys.dim() == 3
        assert keys.shape[2] == dim, "q and the keys disagree"
        assert self.q.stride(2) == keys.stride(2) == 1, "the last stride must be 1"
        assert num_heads % indexing.sets == 0, "the sets do not share the heads evenly"
        assert keys.dtype.itemsize == 1 or self.q.dtype == keys.dtype, (
            "q and keys that are not of 8 bits have one dtype"
        )
        assert self.q.dtype.itemsize > 1 or self.q.dtype == keys.dtype, "an eight-bit q has the keys' encoding"
        weights = self.weights
        assert weights is None or (weights.dtype == torch.float32 and weights.shape == (num_tokens, num_heads))
        assert scale is None or (scale.dtype == torch.float32 and scale.shape in ((1,), keys.shape[:2]))
        assert self.table.dtype == torch.int32
        assert self.table.stride(1) == 1
        assert self.table.shape[1] >= 1


class SelectedArgs(NamedTuple):
    """One layer's attention over a selection.

    A token sees the tokens of each listed unit up to its own. An entry counts as often as it is listed; an entry
    outside of the sequence's KV gives no key. Tokens that see no key get 0, and LSE -inf.

    q, out:    [T, q_heads, head_dim | v_head_dim], any strides but the last; out is written
    pages:     of the layer: split ones or latent ones, records included; KV heads share a set, or have one each
    table:     int32 [rows, width]: row, page_no -> page
    tokens:    the step's tokens
    selection: of these tokens, or all that they see
    lse:       float32 [T, q_heads], natural logarithm with the sink in it, any strides, written; or None
    sinks:     float32 [q_heads], or None
    workspace: float32, scratch of the size that the kernel states; content is undefined
    """

    q: Tensor
    pages: LayerPages
    table: Tensor
    tokens: SparseTokens
    selection: SelectedKeys | LastTokens
    out: Tensor
    lse: Tensor | None
    sinks: Tensor | None
    workspace: Tensor

    @property
    def heads(self) -> tuple[int, int]:
        """KV heads, and query heads that share one."""
        num_kv_heads = self.pages.v.shape[2]
        return num_kv_heads, self.q.shape[1] // num_kv_heads

    @property
    def written_strides(self) -> tuple[int, ...]:
        """Strides of out (token, head) and of lse (token, head; 0 if there is none)."""
        lse = (0, 0) if self.lse is None else self.lse.stride()
        return (self.out.stride(0), self.out.stride(1), *lse)

    def check(self) -> None:
        """Asserts the properties that launchers rely on, cheaply and on the host."""
        k, v, num_kv_heads = self.pages.k, self.pages.v, self.heads[0]
        num_tokens, num_q_heads, _ = self.q.shape
        self.tokens.check()
        self.selection.check(num_tokens)
        assert self.tokens.row_of_token.shape == (num_tokens,), "q and the tokens disagree"
        assert k.shape[:3] == v.shape[:3], "K pages and V pages disagree"
        assert num_q_heads % num_kv_heads == 0
        assert self.selection.sets in (1, num_kv_heads), "the KV heads share one set, or have one each"
        check_rows(self.q, self.pages, self.table, self.out, self.lse, self.sinks)
