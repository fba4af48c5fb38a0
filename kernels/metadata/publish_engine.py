"""Takes a step's rows and lengths from the tensors of an engine, writes the pads, and reports the step before it.

    row[i]    = rows[i], or i if the engine gives no rows
    bound[i]  = kv_bound, or with CSR page lists min(kv_bound, page_size * (csr_indptr[row + 1] - csr_indptr[row]))
    kv_len[i] = given_kv_len[i]
    new[i]    = 1 | given_q[i] | given_q[i + 1] - given_q[i]       by Q_EACH_ONE, Q_LENGTHS, Q_BOUNDARIES
    q_len[i]  = new[i], as far as it lies within the T padded tokens
    cells[i]  = q_len[i] * given_kv_len[i], in a step with a mask of cells

A sequence without KV is one of the engine's own pads if attention is causal or every sequence has one new token; it
gets the values of padded entries, less the new tokens that others do not have. Live sequences come before pads. The
step's counts end with the last live sequence, so the host need not know how many of an engine's entries are pads.

A sequence is lost, and becomes a pad, if one of these is not so:

    0 <= kv_len[i] <= bound[i]
    0 <= new[i] <= max_q_len, and within the step's T tokens
    new[i] <= kv_len[i] if attention is causal
    its cells end within num_cells

A pad keeps the new tokens and the cells that it was given: those of later sequences lie after them in the engine's
tensors. So it may have more than max_q_len. If pads have KV, it has a key for each new token, which a kernel of another
library may need. Boundaries outside of the step, or below an earlier one, are left out: the sequences around them share
the tokens between the others, and are lost.

LENGTH_BEYOND_BOUND in the step's error word reports a sequence that is lost, and one of fewer new tokens than
min_q_len. It also reports boundaries that do not begin at 0, and new tokens of a sequence without KV if a live one
comes after it. A row outside of the table sets ROW_NOT_IN_TABLE: its sequence is taken for a pad. If two sequences with
KV and new tokens have the same row, ROW_TWICE is set: each writes the step's number to the row's place and finds it
there already.

One program does it all: it alone knows the sums, and engines have some thousand sequences at most. The header of the
slot and the echo of the step before: slot_layout.py, publish.py.
"""

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.any_alignment import at_any_alignment
from rocm_attn.kernels.launch import repeated_launches
from rocm_attn.kernels.metadata import error_word
from rocm_attn.kernels.metadata.echo_step import echo_step_before
from rocm_attn.kernels.metadata.engine_tensors import (
    Q_BOUNDARIES,
    Q_LENGTHS,
    EngineLengths,
    LengthBounds,
    PublishedLengths,
)
from rocm_attn.kernels.metadata.slot_layout import COUNT_WORDS, STEP
from rocm_attn.kernels.metadata.step_tensors import ALL_KEYS

# Sequences that the program handles at a time; a fixed number, so that no batch size needs another compilation.
_SEQS_AT_ONCE = 512
_ERROR_WORD = tl.constexpr(error_word.ERROR_WORD)
_BEYOND_BOUND = tl.constexpr(error_word.LENGTH_BEYOND_BOUND)
_NO_ROW = tl.constexpr(error_word.ROW_NOT_IN_TABLE)
_ROW_TWICE = tl.constexpr(error_word.ROW_TWICE)
_STEP = tl.constexpr(STEP)
_Q_LENGTHS = tl.constexpr(Q_LENGTHS)
_Q_BOUNDARIES = tl.constexpr(Q_BOUNDARIES)
_MOST_KEYS = tl.constexpr(ALL_KEYS)  # a number of int64 would overflow its product with new tokens


@triton.jit
def keys_of_pad(new, pad_kv_len):
    """The length of a sequence that becomes a pad: a key for each new token if pads have KV, else 0."""
    return tl.where(pad_kv_len > 0, tl.maximum(new, pad_kv_len), 0)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _largest_until(place, before, most):
    """The largest of before and the places up to each one; places below 0 or above most are left out."""
    return tl.maximum(before, tl.associative_scan(tl.where(place <= most, place, 0), 0, _larger))


@at_any_alignment
@triton.jit(
    do_not_specialize=[
        "rows_stride",
        "kv_stride",
        "q_stride",
        "csr_stride",
        "num_seqs_padded",
        "num_tokens_padded",
        "num_rows",
        "kv_bound",
        "min_q_len",
        "max_q_len",
        "num_cells",
        "pad_kv_len",
        "pad_q_len",
        "named",  # Triton 3.6 would exchange through a buffer on AMD, which has no such instruction
    ]
)
def _publish_engine_kernel(
    slot,
    counts_before,
    rows,
    named,
    given_kv_len,
    given_q,
    csr_indptr,
    counts,
    engine_row,
    row_of_seq,
    kv_len,
    q_len,
    keys_of_cells,
    rows_stride,
    kv_stride,
    q_stride,
    csr_stride,
    num_seqs_padded,
    num_tokens_padded,
    num_rows,
    kv_bound,
    min_q_len,
    max_q_len,
    num_cells,
    pad_kv_len,
    pad_q_len,
    HAS_ROWS: tl.constexpr,
    Q_FORM: tl.constexpr,
    HAS_CSR: tl.constexpr,
    GATHERED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WITH_CELLS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    COUNTS: tl.constexpr,
    SEQS: tl.constexpr,
):
    echo_step_before(slot, counts_before)
    num_seqs = tl.load(slot)
    step = tl.load(slot + _STEP)
    num_live = 0
    tokens_before = tl.zeros([1], tl.int64)
    cells_before = tl.zeros([1], tl.int64)
    live_tokens = tl.zeros([1], tl.int64)
    left_out = tl.zeros([SEQS], tl.int32) + num_seqs_padded
    errors = tl.zeros([SEQS], tl.int32)
    if Q_FORM == _Q_BOUNDARIES:
        errors += tl.where(tl.load(given_q, mask=num_seqs > 0, other=0) != 0, _BEYOND_BOUND, 0)
    for first in range(0, num_seqs_padded, SEQS):
        seq = first + tl.arange(0, SEQS)
        inside = seq < num_seqs_padded
        given = seq < num_seqs
        row = seq.to(tl.int64)
        if HAS_ROWS:
            row = tl.load(rows + seq.to(tl.int64) * rows_stride, mask=given, other=0).to(tl.int64)
        in_table = given & (row >= 0) & (row < num_rows)
        errors |= tl.where(given & ~in_table, _NO_ROW, 0)
        length = tl.load(given_kv_len + seq.to(tl.int64) * kv_stride, mask=given, other=0).to(tl.int64)
        bound = tl.zeros([SEQS], tl.int64) + kv_bound
        if HAS_CSR:
            list_begin = tl.load(csr_indptr + row * csr_stride, mask=in_table, other=0).to(tl.int64)
            list_end = tl.load(csr_indptr + (row + 1) * csr_stride, mask=in_table, other=0).to(tl.int64)
            bound = tl.minimum(bound, (list_end - list_begin) * PAGE_SIZE)
        fits = (length >= 0) & (length <= bound)
        errors |= tl.where(in_table & ~fits, _BEYOND_BOUND, 0)
        # Where the tokens of each lie in the engine's tensors.
        if Q_FORM == _Q_BOUNDARIES:
            begin = tl.load(given_q + seq.to(tl.int64) * q_stride, mask=given, other=0).to(tl.int64)
            end = tl.load(given_q + (seq.to(tl.int64) + 1) * q_stride, mask=given, other=0).to(tl.int64)
            new = end - begin
            token_begin = _largest_until(tl.where(seq > 0, begin, 0), tokens_before, num_tokens_padded)
            token_end = _largest_until(end, tokens_before, num_tokens_padded)
        else:
            new = tl.where(given, 1, 0).to(tl.int64)
            if Q_FORM == _Q_LENGTHS:
                new = tl.load(given_q + seq.to(tl.int64) * q_stride, mask=given, other=0).to(tl.int64)
            # Each at most T, so that the sum of some thousand fits.
            taken = tl.minimum(tl.maximum(new, 0), num_tokens_padded)
            token_end = tokens_before + tl.cumsum(taken, 0)
            token_begin = tl.minimum(token_end - taken, num_tokens_padded)
            token_end = tl.minimum(token_end, num_tokens_padded)
        taken = tl.where(given, token_end - token_begin, 0)
        fits &= (taken == new) & (new <= max_q_len)
        if WITH_CELLS:
            keys = tl.minimum(tl.maximum(length, 0), _MOST_KEYS)
            cells_end = cells_before + tl.cumsum(taken * keys, 0)
            cells_before = tl.maximum(cells_before, tl.max(cells_end, 0))
            has_room = cells_end <= num_cells
            fits &= has_room
            tl.store(keys_of_cells + seq, tl.where(has_room, keys, 0).to(tl.int32), mask=inside)
        has_kv = in_table & (length > 0)
        if Q_FORM != 0:
            if CAUSAL:
                fits &= new <= length
            else:
                has_kv = in_table & ((length > 0) | (new > 0))
        is_live = has_kv & fits
        few = (new > 0) & (new < min_q_len)
        errors |= tl.where(has_kv & (~fits | few), _BEYOND_BOUND, 0)
        left_out = tl.minimum(left_out, tl.where(in_table & ~has_kv & (new != 0), seq, num_seqs_padded))
        if HAS_ROWS:
            stores = is_live & (length > 0) & (taken > 0)  # without KV, nothing has a place to be stored at
            number = tl.zeros([SEQS], tl.int32) + step
            found = tl.atomic_xchg(named + row, number, mask=stores, sem="relaxed")
            errors |= tl.where(stores & (found == step), _ROW_TWICE, 0)
        num_live = tl.maximum(num_live, tl.max(tl.where(is_live, seq + 1, 0), 0))
        live_tokens = tl.maximum(live_tokens, tl.max(tl.where(is_live, token_end, 0), 0))
        tokens_before = tl.maximum(tokens_before, tl.max(token_end, 0))
        own_row = seq + 1 if GATHERED else row.to(tl.int32)
        tl.store(engine_row + seq, tl.where(is_live, row, 0).to(tl.int32), mask=inside)
        tl.store(row_of_seq + seq, tl.where(is_live, own_row, 0), mask=inside)
        # If a sequence has new tokens and no KV, they must see nothing.
        of_pad = keys_of_pad(tl.minimum(taken, kv_bound), pad_kv_len)
        tl.store(kv_len + seq, tl.where(is_live, length, of_pad).to(tl.int32), mask=inside)
        tl.store(q_len + seq, tl.where(given, taken, pad_q_len).to(tl.int32), mask=inside)
    # counts_before is mostly counts itself: every thread must have read it before one overwrites it.
    tl.debug_barrier()
    word = tl.arange(0, COUNTS)
    words = tl.load(slot + word)
    if Q_FORM != 0:
        errors |= tl.where(left_out < num_live, _BEYOND_BOUND, 0)
    error = tl.max(errors & _BEYOND_BOUND, 0) | tl.max(errors & _NO_ROW, 0) | tl.max(errors & _ROW_TWICE, 0)
    words = tl.where(word == 0, num_live, words)
    words = tl.where(word == 1, live_tokens.to(tl.int32), words)
    tl.store(counts + word, tl.where(word == _ERROR_WORD, error, words))


_variant = repeated_launches(_publish_engine_kernel)


def launch_publish_engine(
    slot: Tensor, counts_before: Tensor, given: EngineLengths, bounds: LengthBounds, to: PublishedLengths
) -> None:
    """Writes a step's counts, rows and lengths, pads included, and echoes the step before into the slot.

    slot:          int32 words in pinned host memory (or device memory), the header of slot_layout.py: the number of
                   entries in the engine's tensors, at most S, in [0], step number and number of the step before; words
                   ECHO and ECHOED_STEP are written. No step before it has the same number
    counts_before: int32 [4], the counts of the step before; may be to.counts
    """
    rows = given.kv_len if given.rows is None else given.rows
    q = given.kv_len if given.q is None else given.q
    has_lists = bounds.rows.csr_indptr is not None
    csr_indptr = given.kv_len if bounds.rows.csr_indptr is None else bounds.rows.csr_indptr
    fixed = (
        given.rows is not None,
        given.q_form,
        has_lists,
        to.gathered,
        bounds.causal,
        bounds.num_cells > 0,
        bounds.page_size if has_lists else 1,
        COUNT_WORDS,
        _SEQS_AT_ONCE,
    )
    _variant(rows.dtype, given.kv_len.dtype, q.dtype, csr_indptr.dtype, *fixed)(
        to.counts.device,
        (1, 1, 1),
        slot,
        counts_before,
        rows,
        bounds.rows.named,
        given.kv_len,
        q,
        csr_indptr,
        to.counts,
        to.engine_row,
        to.row_of_seq,
        to.kv_len,
        to.q_len,
        to.keys_of_cells,
        rows.stride(0),
        given.kv_len.stride(0),
        q.stride(0),
        csr_indptr.stride(0),
        to.row_of_seq.shape[0],
        bounds.num_tokens,
        bounds.rows.num,
        bounds.kv_len,
        bounds.min_q_len,
        bounds.max_q_len,
        bounds.num_cells,
        to.pad_kv_len,
        to.pad_q_len,
        *fixed,
        # One CDNA thread per sequence: a mask then takes two scalar registers, and none is spilled.
        num_warps=8,
    )
