"""Reports a page that is written while another row still names it.

A page remembers which entry of the table led to it when it was written last, and in which step. An entry remembers
since which step it names its page. An entry of a live row whose page was written since, by another entry, leads to
another sequence's K and V: PAGE_TAKEN. So does a page that two entries write to in one step. Pages that many rows read
and none writes are no fault, and neither is an entry that names another page from now on.

A row is the same sequence as in its last step if it begins where that one began, or up to where it ended, and its last
token still lies in the same page. Else it is taken for another one, whose entries name their pages from now on.

The last page of a sequence without new tokens is not looked at: another one may fill the rest of it.

A page is reported once. A page that another row has written in this very step is reported now or in the row's next
step. page_watch.py describes the kept state; new tokens that are dropped write no page.
"""

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.any_alignment import at_any_alignment
from rocm_attn.kernels.launch import repeated_launches
from rocm_attn.kernels.metadata import error_word
from rocm_attn.kernels.metadata.page_watch import ROW_WORDS, STEPS_OF_ROW, PageWatch
from rocm_attn.kernels.metadata.step_tensors import StepTensors, shares_of_seq

_PAGES_AT_ONCE = 1024
_TOKENS = 256
_ERROR_WORD = tl.constexpr(error_word.ERROR_WORD)
_PAGE_TAKEN = tl.constexpr(error_word.PAGE_TAKEN)
_WORDS = tl.constexpr(ROW_WORDS)
_WORDS_OF_ROW = tl.constexpr(ROW_WORDS * STEPS_OF_ROW)
_LOW = tl.constexpr(2**32 - 1)


@triton.jit
def _last_step(words, live, now):
    """Returns the offset, among a row's words, of those of its last step before this one."""
    first = tl.load(words, mask=live, other=0)
    second = tl.load(words + _WORDS, mask=live, other=0)
    return tl.where((second < now) & ((first >= now) | (second > first)), _WORDS, 0)


@triton.jit
def _goes_on(last_step, entry, page, begin, live, now):
    """True if a row is the same sequence as before. entry, page: of its last stored token"""
    since = entry >> 32
    known = live & (begin > 0) & ((entry & _LOW) == page) & (since < now)
    known &= tl.load(last_step, mask=live, other=0) < now
    known &= since >= tl.load(last_step + 1, mask=live, other=0)
    known &= begin >= tl.load(last_step + 2, mask=live, other=0)
    return known & (begin <= tl.load(last_step + 3, mask=live, other=0))


@at_any_alignment
@triton.jit(
    do_not_specialize=[
        "num_tokens_padded",
        "num_rows",
        "num_pages",
        "width",
        "table_stride",
        "shares",
        "num_checks",
        "pages",  # Triton 3.6 would exchange by way of a buffer on AMD, where it has no such instruction
    ]
)
def _watch_pages_kernel(
    counts,
    engine_row,
    row_of_seq,
    kv_len,
    q_len,
    not_of_pads,
    seq_of_token,
    position_of_token,
    slot_of_token,
    table,
    entries,
    pages,
    rows,
    num_tokens_padded,
    num_rows,
    num_pages,
    width,
    table_stride,
    shares,
    num_checks,
    PAGE_SIZE: tl.constexpr,
    FIRST_PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    now = tl.load(counts + 2)
    program = tl.program_id(0)
    if program < num_checks:
        # A share of the pages that a row names.
        seq = program // shares
        share = program % shares
        row = tl.load(engine_row + seq).to(tl.int64)
        # A pad before others has row 0, which may be one of theirs.
        live = (seq < tl.load(counts)) & (row < num_rows) & (tl.load(not_of_pads + seq) > 0)
        length = tl.where(live, tl.load(kv_len + seq), 0)
        new = tl.load(q_len + seq)
        begin = length - new
        pages_of_row = table + tl.load(row_of_seq + seq).to(tl.int64) * table_stride
        last_no = tl.maximum(begin - 1, 0) // PAGE_SIZE
        words = rows + row * _WORDS_OF_ROW
        of_last = _last_step(words, live, now)
        last_step = words + of_last
        last_entry = tl.load(entries + row * width + last_no, mask=live, other=0)
        goes_on = _goes_on(last_step, last_entry, tl.load(pages_of_row + last_no, mask=live, other=0), begin, live, now)
        start = tl.where(goes_on, tl.load(last_step + 1, mask=live, other=0), now)
        looked_at = tl.where(new > 0, length + PAGE_SIZE, length)
        num_used = tl.minimum(tl.cdiv(length, PAGE_SIZE), width)
        for first in range(share * BLOCK, num_used, shares * BLOCK):
            page_no = first + tl.arange(0, BLOCK)
            used = page_no < num_used
            page = tl.load(pages_of_row + page_no, mask=used, other=0)
            named = used & (page >= FIRST_PAGE) & (page < num_pages)
            cell = row * width + page_no
            entry = tl.load(entries + cell, mask=named, other=0)
            known = named & ((entry & _LOW) == page) & ((entry >> 32) >= start)
            written = tl.load(pages + page, mask=known, other=0)
            taken = known & ((written >> 32) > (entry >> 32)) & ((written & _LOW) != (cell & _LOW))
            taken &= (page_no + 1) * PAGE_SIZE <= looked_at
            tl.store(entries + cell, (now.to(tl.int64) << 32) | page, mask=named & (taken | (known == 0)))
            tl.atomic_or(counts + _ERROR_WORD + tl.zeros([BLOCK], tl.int32), _PAGE_TAKEN, mask=taken, sem="relaxed")
        if (share == 0) & live:
            other_step = words + (_WORDS - of_last)
            tl.store(other_step, now)
            tl.store(other_step + 1, start)
            tl.store(other_step + 2, begin)
            tl.store(other_step + 3, length)
    else:
        # The pages that a block of new tokens writes.
        token = (program - num_checks) * TOKENS + tl.arange(0, TOKENS)
        inside = (token < num_tokens_padded) & (token < tl.load(counts + 1))
        slot = tl.load(slot_of_token + token, mask=inside, other=-1)
        its_page = slot // PAGE_SIZE
        writes = inside & (slot >= FIRST_PAGE * PAGE_SIZE) & (its_page < num_pages)
        # Where nothing is written, the first sequence is looked at, which there always is.
        its_seq = tl.load(seq_of_token + token, mask=writes, other=0)
        its_row = tl.load(engine_row + its_seq).to(tl.int64)
        writes &= its_row < num_rows
        its_begin = tl.load(kv_len + its_seq) - tl.load(q_len + its_seq)
        its_last_no = tl.maximum(its_begin - 1, 0) // PAGE_SIZE
        its_last_page = tl.load(table + tl.load(row_of_seq + its_seq).to(tl.int64) * table_stride + its_last_no)
        its_words = rows + its_row * _WORDS_OF_ROW
        its_last_step = its_words + _last_step(its_words, writes, now)
        its_last_entry = tl.load(entries + its_row * width + its_last_no, mask=writes, other=0)
        its_goes_on = _goes_on(its_last_step, its_last_entry, its_last_page, its_begin, writes, now)
        its_cell = its_row * width + tl.load(position_of_token + token, mask=writes, other=0) // PAGE_SIZE
        its_entry = tl.load(entries + its_cell, mask=writes, other=0)
        its_known = (
            its_goes_on
            & ((its_entry & _LOW) == its_page)
            & ((its_entry >> 32) >= tl.load(its_last_step + 1, mask=writes, other=0))
        )
        mine = (now.to(tl.int64) << 32) | (its_cell & _LOW)
        before = tl.atomic_xchg(pages + its_page, mine, mask=writes, sem="relaxed")
        others = writes & ((before & _LOW) != (its_cell & _LOW))
        its_taken = others & (((before >> 32) == now) | (its_known & ((before >> 32) > (its_entry >> 32))))
        tl.atomic_or(counts + _ERROR_WORD + tl.zeros([TOKENS], tl.int32), _PAGE_TAKEN, mask=its_taken, sem="relaxed")


_variant = repeated_launches(_watch_pages_kernel)


def launch_watch_pages(step: StepTensors, engine_row: Tensor, watch: PageWatch, *, page_size: int) -> None:
    """Checks the pages that a step's rows name, and records them and those that its new tokens are stored to.

    step:       as fill, and what takes given slots, have left it
    engine_row: int32 [S], rows of the watch
    """
    (num_rows, width), num_seqs = watch.entries.shape, step.kv_len.shape[0]
    shares = shares_of_seq(width, num_seqs, _PAGES_AT_ONCE)
    num_tokens, num_checks = step.slot_of_token.shape[0], num_seqs * shares
    fixed = page_size, int(step.terms.null_page), _PAGES_AT_ONCE, _TOKENS
    _variant(*fixed)(
        step.counts.device,
        (num_checks + -(-num_tokens // _TOKENS), 1, 1),
        step.counts,
        engine_row,
        step.row_of_seq,
        step.kv_len,
        step.q_len,
        # Where pads have KV, row 0 of the table is theirs alone.
        step.row_of_seq if step.pads.kv_len else step.kv_len,
        step.seq_of_token,
        step.position_of_token,
        step.slot_of_token,
        step.table,
        watch.entries,
        watch.pages,
        watch.rows,
        num_tokens,
        num_rows,
        watch.pages.shape[0],
        width,
        step.table.stride(0),
        shares,
        num_checks,
        *fixed,
        num_warps=4,
    )
