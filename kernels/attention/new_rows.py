"""Stores K and V of new tokens within decode: the program that reads a row's last key does so before it reads it.

    k_pages[slot // page_size, slot % page_size] = k[token]      likewise v

It does the same as kernels/cache/store.py, into linear pages of q's dtype: tokens at or past num_tokens and slots that
belong to no sequence are dropped, and an infinity or NaN is stored as 0 and sets a bit of the step's error word.

A sequence has one new token, which is its last key. So no other program reads what this one writes, except those of
the same KV head's other query heads, each of which writes the same and reads what it wrote itself. A barrier separates
the two: on NVIDIA's GPUs it orders the writes of a program's threads before their reads.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.runtime.jit import constexpr_function

from rocm_attn.kernels.metadata import error_word
from rocm_attn.kernels.tuning.tiles import next_power_of_2

_ERROR_WORD = tl.constexpr(error_word.ERROR_WORD)
_NOT_FINITE = tl.constexpr(error_word.NOT_FINITE)
_power_of_2 = constexpr_function(next_power_of_2)


class NewToken(NamedTuple):
    """A sequence's new token.

    slot_of_token, counts: pointers, to the step's
    number:                of the token, int64
    is_here:               whether the program reads the last key of its row
    """

    slot_of_token: Any
    counts: Any
    number: Any
    is_here: Any


@triton.jit
def _places(DIM: tl.constexpr, G: tl.constexpr):
    """Head and column of each element of a row's new K or V, and whether there is one."""
    HEADS: tl.constexpr = _power_of_2(G.rows.HEADS_PER_ROW)
    COLUMNS: tl.constexpr = _power_of_2(DIM)
    head = tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    return head.to(tl.int64), column, (head < G.rows.HEADS_PER_ROW) & (column < DIM)


@triton.jit
def _new_elements(new, token, first_head, DIM: tl.constexpr, G: tl.constexpr):
    """Elements of a row's KV heads, [heads, columns]. token, first_head: int64"""
    head, column, inside = _places(DIM, G)
    return tl.load(new.at + token * new.token + (first_head + head) * new.head + column, mask=inside, other=0.0)


@triton.jit
def _keep(elements, pages, slot, first_head, counts, DIM: tl.constexpr, G: tl.constexpr):
    """Writes _new_elements to their slot. pages: a PagePointers (bundles.py)"""
    head, column, inside = _places(DIM, G)
    is_strange = ~(tl.abs(elements.to(tl.float32)) < float("inf"))
    cell = slot // G.PAGE_SIZE * pages.page + slot % G.PAGE_SIZE * pages.token + (first_head + head) * pages.head
    tl.store(pages.at + cell + column, tl.where(is_strange, 0.0, elements), mask=inside)
    # Element by element, because hardly any is strange: a test for it takes barriers. Columns beyond a row never are.
    words = counts + _ERROR_WORD + tl.zeros(is_strange.shape, tl.int32)
    tl.atomic_or(words, _NOT_FINITE, mask=is_strange, sem="relaxed")


@triton.jit
def store_new_rows(k, v, k_pages, v_pages, token, first_head, G: tl.constexpr):
    """Stores a token's K and V of a row's KV heads, if it is here, and lets the program read them afterwards.

    k, v:       HeadRows (bundles.py); k_pages, v_pages: PagePointers of the first KV head of all
    token:      a NewToken
    first_head: int64
    """
    if token.is_here:
        # All loads come before the first store, because no load could pass a store.
        slot = tl.load(token.slot_of_token + token.number).to(tl.int64)
        num_tokens = tl.load(token.counts + 1)
        k_elements = _new_elements(k, token.number, first_head, G.HEAD_DIM, G)
        v_elements = _new_elements(v, token.number, first_head, G.V_HEAD_DIM, G)
        if (token.number < num_tokens) & (slot >= G.FIRST_SLOT):
            _keep(k_elements, k_pages, slot, first_head, token.counts, G.HEAD_DIM, G)
            _keep(v_elements, v_pages, slot, first_head, token.counts, G.V_HEAD_DIM, G)
        tl.debug_barrier()
