"""The arguments of attention, as values that launchers and their torch twins take whole."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rocm_attn.kernels.attention.limits import refusals
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.page_format import PoolKind

# Elements of two bytes that one load of 16 bytes brings.
_EIGHT = 8


def rows_are_contiguous(*tensors: Tensor) -> bool:
    """True if the elements of a row follow each other. The stride of a row of one element has no meaning."""
    return all(tensor.stride(-1) == 1 or tensor.shape[-1] == 1 for tensor in tensors)


def check_rows(
    q: Tensor, pages: LayerPages, table: Tensor, out: Tensor, lse: Tensor | None, *of_heads: Tensor | None
) -> None:
    """Asserts that a kernel's tensors fit each other. of_heads: weights, one for each query head"""
    num_tokens, num_q_heads, head_dim = q.shape
    assert pages.format.head_dim == head_dim, "q and the pages disagree"
    assert out.shape == (num_tokens, num_q_heads, pages.format.v_head_dim), "out disagrees with q and the pages"
    assert q.dtype == out.dtype
    assert rows_are_contiguous(q, pages.k, pages.v, out), "the last stride must be 1"
    assert table.dtype == torch.int32
    assert table.stride(1) == 1
    assert table.shape[1] >= 1
    assert lse is None or (lse.dtype == torch.float32 and lse.shape == (num_tokens, num_q_heads))
    for weights in of_heads:
        assert weights is None or (
            weights.dtype == torch.float32 and weights.shape == (num_q_heads,) and weights.stride(0) == 1
        )


@dataclass(frozen=True, slots=True, eq=False)
class Queries:
    """Sequences whose new tokens attend: S sequences with T new tokens, both padded, and the keys that each may see.

    row_of_seq: int32 [S]      seq -> row of the table
    kv_len:     int32 [S]      tokens, the new ones included
    q_indptr:   int32 [S + 1]  sequence -> first token; [S] is the number of tokens that belong to a sequence
    num_tokens: T
    max_q_len:  no sequence has more new tokens
    max_kv_len: rows are not read past the pages of this many tokens
    first_page: int32 [S]      seq -> page_no in its row where its kv_len keys begin; None: at the start of the row
    """

    row_of_seq: Tensor
    kv_len: Tensor
    q_indptr: Tensor
    num_tokens: int
    max_q_len: int
    max_kv_len: int
    first_page: Tensor | None = None

    @property
    def num_seqs(self) -> int:
        """S."""
        return self.kv_len.shape[0]

    def check(self) -> None:
        """Asserts dtypes, shapes and contiguity."""
        num_seqs = self.num_seqs
        assert self.row_of_seq.dtype == self.kv_len.dtype == self.q_indptr.dtype == torch.int32
        assert self.row_of_seq.shape == (num_seqs,)
        assert self.q_indptr.shape == (num_seqs + 1,)
        assert self.row_of_seq.is_contiguous()
        assert self.kv_len.is_contiguous()
        assert self.q_indptr.is_contiguous()
        first_page = self.first_page
        assert first_page is None or (first_page.dtype == torch.int32 and first_page.shape == (num_seqs,))


class NewRows(NamedTuple):
    """K and V of a step's new tokens, for a launch that stores them before it attends.

    k, v:          [T, kv_heads, head_dim | v_head_dim], any strides but the last
    slot_of_token: int32 [T]
    counts:        int32 [4]; [1] is num_tokens, [3] receives an error bit if a token was not finite
    null_page:     whether page 0 belongs to no sequence
    """

    k: Tensor
    v: Tensor
    slot_of_token: Tensor
    counts: Tensor
    null_page: bool


class AttendArgs(NamedTuple):
    """One layer's attention in one step. A tuple, because making one takes a quarter of a frozen dataclass's time.

    q, out:        [T, q_heads, head_dim | v_head_dim], any strides but the last; out is written
    pages:         of the layer; Triton's kernels read linear ones, with any strides but the last
    table:         int32 [rows, width]: row, page_no -> page; page numbers beyond the width are not read
    queries:       the step's sequences
    lse:           float32 [T, q_heads], natural logarithm with the sink in it, any strides, written; or None
    sinks, slopes: float32 [q_heads], or None; see scores.py
    schedule:      int32, filled for these queries by the schedule that goes with the kernel
    workspace:     float32, scratch of the size that the kernel states; content is undefined
    """

    q: Tensor
    pages: LayerPages
    table: Tensor
    queries: Queries
    out: Tensor
    lse: Tensor | None
    sinks: Tensor | None
    slopes: Tensor | None
    schedule: Tensor
    workspace: Tensor

    @property
    def heads(self) -> tuple[int, int]:
        """KV heads, and query heads that share one."""
        num_kv_heads = self.pages.format.num_kv_heads
        return num_kv_heads, self.q.shape[1] // num_kv_heads

    @property
    def same_offsets(self) -> bool:
        """True if K and V of a token lie at the same offsets in their pages."""
        k, v = self.pages.k, self.pages.v
        return k.shape[3] == v.shape[3] and k.stride() == v.stride()

    @property
    def has_pairs(self) -> bool:
        """True if codes of K and of V can be read in pairs."""
        sides = self.pages.raw_k, self.pages.raw_v
        numbers = (number for side in sides for number in (side.data_ptr(), side.shape[3], *side.stride()[:3]))
        return self.pages.format.encoding.is_fp8 and not any(number % 2 for number in numbers)

    @property
    def read_strides(self) -> tuple[int, ...]:
        """Strides of q (token, head), K pages and V pages (page, token, head for each) and the table (row)."""
        q, k, v = self.q, self.pages.k, self.pages.v
        return (q.stride(0), q.stride(1), *k.stride()[:3], *v.stride()[:3], self.table.stride(0))

    @property
    def written_strides(self) -> tuple[int, ...]:
        """Strides of out (token, head) and of lse (token, head; 0 if there is none)."""
        lse = (0, 0) if self.lse is None else self.lse.stride()
        return (self.out.stride(0), self.out.stride(1), *lse)

    @property
    def stride_unit(self) -> int:
        """The unit that strides of q, pages and out are counted in: 8 elements, or 1.

        Triton knows whether a stride is a multiple of 16, and nothing else about it. If strides are only multiples of
        8, as with heads of 24, 40 or 72, rows would be loaded element by element, at a third of the speed or less.
        """
        strides = *self.q.stride()[:2], *self.pages.k.stride()[:3], *self.pages.v.stride()[:3], *self.out.stride()[:2]
        if all(stride % 16 == 0 for stride in strides) or any(stride % _EIGHT for stride in strides):
            return 1
        # If the divided stride fitted 32 bits, a product that needs 64 bits would be computed in 32.
        return _EIGHT if max(strides) < 1 << 31 else 1

    def strides_in(self, unit: int) -> tuple[int, ...]:
        """read_strides and written_strides, those of q, pages and out in stride_unit."""
        *rows, table = self.read_strides
        out_token, out_head, *lse = self.written_strides
        return (*(stride // unit for stride in rows), table, out_token // unit, out_head // unit, *lse)

    def check_workspace(self, words: int) -> None:
        """Asserts that the workspace is contiguous and has room for this many float32 words."""
        assert self.workspace.dtype == torch.float32
        assert self.workspace.numel() >= words
        assert self.workspace.is_contiguous()

    def check(self, kernel: str) -> None:
        """check_kind() for pages of K and of V, and for the limits of the kernels over them."""
        form = self.pages.format
        reasons = refusals(
            num_q_heads=self.q.shape[1],
            num_kv_heads=form.num_kv_heads,
            head_dim=self.q.shape[2],
            v_head_dim=form.v_head_dim,
            page_size=form.page_size,
            dtype=self.q.dtype,
        )
        self.check_kind(PoolKind.SPLIT, kernel, reasons)

    def check_kind(self, kind: PoolKind, kernel: str, reasons: list[str]) -> None:
        """Checks only what would corrupt memory silently. Cheap, on the host.

        kind:    of the pages that the kernel reads
        reasons: why it does not serve the problem, a sentence each

        Raises ValueError for a problem that no kernel serves. The runtime checked the rest, which is asserted here.
        """
        q, form = self.q, self.pages.format
        if form.kind is not kind or not (form.encoding.is_fp8 or form.encoding.dtype == q.dtype):
            reasons = [
                *reasons,
                f"with q in {q.dtype} it reads {kind.value} in that dtype or in eight bits, not {form}",
            ]
        if reasons:
            raise ValueError(f"{kernel} does not serve this: {'; '.join(reasons)}")
        self.queries.check()
        assert self.queries.num_tokens == len(q), "q and the queries disagree"
        check_rows(q, self.pages, self.table, self.out, self.lse, self.sinks, self.slopes)

    def check_new(self, new: NewRows) -> None:
        """Asserts dtypes, shapes and strides of new rows that are stored to the pages."""
        form, num_tokens = self.pages.format, self.q.shape[0]
        assert form.encoding.dtype == self.q.dtype == new.k.dtype == new.v.dtype
        assert new.k.shape == (num_tokens, form.num_kv_heads, form.head_dim)
        assert new.v.shape == (num_tokens, form.num_kv_heads, form.v_head_dim)
        assert rows_are_contiguous(new.k, new.v), "the last stride must be 1"
        assert new.slot_of_token.dtype == new.counts.dtype == torch.int32
        assert new.slot_of_token.shape == (num_tokens,)
        assert new.slot_of_token.is_contiguous()
