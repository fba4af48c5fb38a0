"""Moves a step's inputs from pinned host memory to fixed device addresses, and reports the step before it.

A kernel does it, not a copy: a buffer that a graph then reads has been seen stale on ROCm after a DMA copy (hip#3902).
Every padded entry is rewritten each time. The words of a slot: slot_layout.py.

The error word and the step number of the step before go back through the same slot, which the host reads when the slot
is handed out again: no launch, no copy and no wait is needed for that.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.any_alignment import at_any_alignment
from rocm_attn.kernels.launch import FixedLaunch
from rocm_attn.kernels.metadata import error_word
from rocm_attn.kernels.metadata.echo_step import echo_step_before
from rocm_attn.kernels.metadata.slot_layout import COUNT_WORDS, HEADER_WORDS
from rocm_attn.kernels.metadata.step_tensors import StepTensors

_BLOCK = 256
_ERROR_WORD = tl.constexpr(error_word.ERROR_WORD)


@triton.jit
def write_inputs(slot, i, to, padded_sizes, pads, HEADER: tl.constexpr, WITH_PREFIXES: tl.constexpr):
    """Writes the sequences and tokens i of a slot to the step's inputs, and pads after them.

    to:           row_of_seq, kv_len, q_len, prefix_len, group_end, token_ids
    padded_sizes: sequences, tokens
    pads:         kv_len, q_len
    """
    row_of_seq, kv_len, q_len, prefix_len, group_end, token_ids = to
    num_seqs_padded, num_tokens_padded = padded_sizes
    pad_kv_len, pad_q_len = pads
    num_seqs = tl.load(slot)
    num_tokens = tl.load(slot + 1)
    num_token_ids = num_tokens * tl.load(slot + 3)
    live = i < num_seqs
    padded = i < num_seqs_padded
    first = slot + HEADER
    tl.store(row_of_seq + i, tl.load(first + i, mask=live, other=0), mask=padded)
    # A sequence without a token has the length of a pad: kernels that divide by it may be launched for both.
    lengths = tl.load(first + num_seqs + i, mask=live, other=0)
    tl.store(kv_len + i, tl.where(lengths > 0, lengths, pad_kv_len), mask=padded)
    new = tl.load(first + 2 * num_seqs + i, mask=live, other=0)
    tl.store(q_len + i, tl.where(live, new, pad_q_len), mask=padded)
    ids = tl.load(first + 3 * num_seqs + i, mask=i < num_token_ids, other=0)
    tl.store(token_ids + i, ids, mask=i < num_tokens_padded)
    if WITH_PREFIXES:
        prefixes = first + 3 * num_seqs + num_token_ids
        tl.store(prefix_len + i, tl.load(prefixes + i, mask=live, other=0), mask=padded)
        tl.store(group_end + i, tl.load(prefixes + num_seqs + i, mask=live, other=0), mask=padded)


@at_any_alignment
@triton.jit(do_not_specialize=["num_seqs_padded", "num_tokens_padded", "pad_kv_len", "pad_q_len"])
def _publish_kernel(
    slot,
    counts_before,
    counts,
    row_of_seq,
    kv_len,
    q_len,
    prefix_len,
    group_end,
    token_ids,
    num_seqs_padded,
    num_tokens_padded,
    pad_kv_len,
    pad_q_len,
    HEADER: tl.constexpr,
    COUNTS: tl.constexpr,
    WITH_PREFIXES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    to = (row_of_seq, kv_len, q_len, prefix_len, group_end, token_ids)
    padded_sizes = (num_seqs_padded, num_tokens_padded)
    write_inputs(slot, i, to, padded_sizes, (pad_kv_len, pad_q_len), HEADER, WITH_PREFIXES)
    if tl.program_id(0) == 0:
        # Only this program reads or writes counts.
        echo_step_before(slot, counts_before)
        word = tl.arange(0, COUNTS)
        # There is no error yet; in the slot the word says whether ids follow.
        words = tl.load(slot + word, mask=word != _ERROR_WORD, other=0)
        # counts_before is mostly counts itself: every thread must have read it before one overwrites it.
        tl.debug_barrier()
        tl.store(counts + word, words)


def launch_publish(slot: Tensor, counts_before: Tensor, to: StepTensors) -> None:
    """Copies a ring slot to the step's inputs, writes the pads, and echoes the step before into the slot.

    slot:          int32 words in pinned host memory (or device memory), laid out by slot_layout.py; its words ECHO and
                   ECHOED_STEP are written
    counts_before: int32 [4], the counts of the step before; may be to.counts
    """
    launch = to.launches.get("publish")
    if launch is None:
        launch = to.launches["publish"] = _launch_to(to)
    launch(slot, counts_before)


def _launch_to(to: StepTensors) -> FixedLaunch:
    blocks = max(1, -(-max(to.row_of_seq.shape[0], to.token_ids.shape[0]) // _BLOCK))
    return FixedLaunch(
        _publish_kernel,
        to.counts.device,
        (blocks, 1, 1),
        *arguments_of(to),
        _BLOCK,
        num_warps=4,
    )


def arguments_of(to: StepTensors) -> tuple[Any, ...]:
    """The arguments of each kernel that writes a step's inputs: from its counts to whether it shares prefixes."""
    return (
        to.counts,
        to.row_of_seq,
        to.kv_len,
        to.q_len,
        to.prefix_len,
        to.group_end,
        to.token_ids,
        to.row_of_seq.shape[0],
        to.token_ids.shape[0],
        to.pads.kv_len,
        to.pads.q_len,
        HEADER_WORDS,
        COUNT_WORDS,
        to.prefix_len.numel() > 0,
    )
