"""Derives where each sequence of a step reads its state and where it writes the next one, and refuses a wrong state.

A row has two slots. A step reads the one that holds the state before its first new token, and writes the other, so it
can run twice. Each slot has a header: int32 tag, start, first, end.

    tag      the request that the state belongs to; 0: none
    start    the first new token of the step that wrote it; -1: it was copied
    first    tokens that are folded into the state
    end      with the tokens that are kept next to it: a step may go on after first, ..., end tokens

With s tokens before the step and e after it, a slot serves the step if

    tag == tag of the row,   start < s,   first <= s <= end

and no other slot with this tag has a start between this one's and s: tokens after that start were stored anew, and are
not the ones in this slot. A slot whose start is s or more belongs to tokens that were taken back. The other slot gets
the header (tag, s, s, e) if at most `kept` tokens are new, which are then kept, else (tag, s, e, e). A sequence that
begins (s = 0) reads none, and takes both slots.
"""

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.launch import launch, only_launches
from rocm_attn.kernels.metadata import error_word
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.kernels.states.arguments import BEGINS, HEADER_WORDS, LEFT_OUT, StatePlaces

_BLOCK = 128
_ERROR_WORD = tl.constexpr(error_word.ERROR_WORD)
_WRONG_STATE = tl.constexpr(error_word.WRONG_STATE)
_BEGINS, _LEFT_OUT = tl.constexpr(BEGINS), tl.constexpr(LEFT_OUT)
_WORDS = tl.constexpr(HEADER_WORDS)


@triton.jit
def _serves(headers, slot, tag, start):
    """True if a slot can serve; the start of the step that wrote it, -2 for none before `start`; tokens folded."""
    header = headers + slot * _WORDS
    written_at = tl.load(header + 1)
    first = tl.load(header + 2)
    end = tl.load(header + 3)
    is_earlier = (tl.load(header) == tag) & (written_at < start)
    return is_earlier & (first <= start) & (start <= end), tl.where(is_earlier, written_at, -2), first


@triton.jit(do_not_specialize=["num_padded", "kept"])
def _state_places_kernel(
    row_of_seq, kv_len, q_len, counts, tags, headers, source, target, pending, num_padded, kept, BLOCK: tl.constexpr
):
    seq = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    padded = seq < num_padded
    live = padded & (seq < tl.load(counts))
    row = tl.load(row_of_seq + seq, mask=live, other=0)
    new = tl.load(q_len + seq, mask=live, other=0)
    end = tl.load(kv_len + seq, mask=live, other=0)
    start = end - new
    live = live & (new > 0)
    # Where there is no sequence the row is 0, which has a tag and slots like any other.
    tag = tl.load(tags + row)
    slot = row.to(tl.int64) * 2
    serves_a, at_a, first_a = _serves(headers, slot, tag, start)
    serves_b, at_b, first_b = _serves(headers, slot + 1, tag, start)
    serves_a, serves_b = serves_a & (at_a >= at_b), serves_b & (at_b >= at_a)
    takes_b = serves_b & (~serves_a | (at_b > at_a))
    begins = start <= 0
    found = live & (begins | serves_a | serves_b) & (tag > 0)
    wrong = live & ~found
    read = tl.where(begins, _BEGINS, (slot + takes_b).to(tl.int32))
    # A sequence that begins writes the first slot, like one that reads the second.
    write = (slot + (~takes_b & ~begins)).to(tl.int32)
    first_read = tl.where(takes_b, first_b, first_a)
    tl.store(source + seq, tl.where(found, read, _LEFT_OUT), mask=padded)
    tl.store(target + seq, tl.where(found, write, 0), mask=padded)
    tl.store(pending + seq, tl.where(found & ~begins, start - first_read, 0), mask=padded)
    header = headers + write.to(tl.int64) * _WORDS
    # On AMD two waves hold each sequence. Both must have read its headers before one of them writes.
    tl.debug_barrier()
    tl.store(header, tag, mask=found)
    tl.store(header + 1, start, mask=found)
    tl.store(header + 2, tl.where(new <= kept, start, end), mask=found)
    tl.store(header + 3, end, mask=found)
    # Its other slot belongs to tokens that were taken back.
    tl.store(header + _WORDS, tl.zeros_like(tag), mask=found & begins)
    if tl.max(wrong.to(tl.int32), 0) > 0:
        tl.atomic_or(counts + _ERROR_WORD, _WRONG_STATE, sem="relaxed")


@only_launches
def launch_state_places(step: StepTensors, tags: Tensor, headers: Tensor, places: StatePlaces, *, kept: int) -> None:
    """Fills the places of states; sets WRONG_STATE for a sequence whose row has no state before its first new token.

    tags:    int32 [rows, 1], the request that each row belongs to; 0: none
    headers: int32 [slots, 4], read and written
    places:  source, target and pending are written, pads included
    kept:    the most new tokens that are kept, and not folded
    """
    assert headers.shape[1] == HEADER_WORDS
    assert headers.is_contiguous()
    assert tags.is_contiguous()
    num_seqs = len(places.source)
    launch(
        _state_places_kernel,
        (triton.cdiv(num_seqs, _BLOCK),),
        step.row_of_seq,
        step.kv_len,
        step.q_len,
        step.counts,
        tags,
        headers,
        places.source,
        places.target,
        places.pending,
        num_seqs,
        kept,
        BLOCK=_BLOCK,
        num_warps=4,
    )
