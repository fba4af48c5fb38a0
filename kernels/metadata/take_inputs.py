"""Takes a step's inputs from pinned host memory at the head of its graph: the host launches nothing but the graph.

A graph has fixed arguments, and its slots come in turn: the kernel counts the runs of graphs on the device, and a slot
that a graph is to take holds the number of runs before it. A run for which no slot is due takes nothing: its inputs
were published by a launch, or are those of the run before. The launch writes the same as publish.py, from one program:
its echo shows the host, which waits for no event, that the whole slot was read.
"""

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.any_alignment import at_any_alignment
from rocm_attn.kernels.launch import launch, only_launches
from rocm_attn.kernels.metadata import error_word, slot_layout
from rocm_attn.kernels.metadata.echo_step import echo_step_before
from rocm_attn.kernels.metadata.publish import arguments_of, write_inputs
from rocm_attn.kernels.metadata.slot_layout import MOST_TAKEN
from rocm_attn.kernels.metadata.step_tensors import StepTensors

_ERROR_WORD = tl.constexpr(error_word.ERROR_WORD)
_ECHO = tl.constexpr(slot_layout.ECHO)
_RUNS_BEFORE = tl.constexpr(slot_layout.RUNS_BEFORE)
_TAKEN_BY_GRAPH = tl.constexpr(slot_layout.TAKEN_BY_GRAPH)
_MOST_RUNS = tl.constexpr(slot_layout.MOST_RUNS)


@at_any_alignment
@triton.jit(do_not_specialize=["slot_words", "num_seqs_padded", "num_tokens_padded", "pad_kv_len", "pad_q_len"])
def _take_inputs_kernel(
    slots,
    slot_words,
    runs,
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
    run = tl.load(runs)
    other = slots + slot_words
    first_is_due = (tl.load(slots + _ECHO) == _TAKEN_BY_GRAPH) & (tl.load(slots + _RUNS_BEFORE) == run)
    other_is_due = (tl.load(other + _ECHO) == _TAKEN_BY_GRAPH) & (tl.load(other + _RUNS_BEFORE) == run)
    # Every thread must have read the count before one writes it.
    tl.debug_barrier()
    tl.store(runs, tl.where(run == _MOST_RUNS, 0, run + 1))
    if first_is_due | other_is_due:
        slot = slots + slot_words * other_is_due.to(tl.int32)
        to = (row_of_seq, kv_len, q_len, prefix_len, group_end, token_ids)
        padded_sizes = (num_seqs_padded, num_tokens_padded)
        write_inputs(slot, tl.arange(0, BLOCK), to, padded_sizes, (pad_kv_len, pad_q_len), HEADER, WITH_PREFIXES)
        word = tl.arange(0, COUNTS)
        # There is no error yet; in the slot the word says whether ids follow.
        words = tl.load(slot + word, mask=word != _ERROR_WORD, other=0)
        # The host may write to the slot as soon as it sees the echo: every thread must have read its part by then.
        tl.debug_barrier()
        echo_step_before(slot, counts)
        # Every thread must also have read the counts of the step before.
        tl.debug_barrier()
        tl.store(counts + word, words)


@only_launches
def launch_take_inputs(slots: Tensor, runs: Tensor, to: StepTensors) -> None:
    """Does the same as `launch_publish`, for the slot that is due in this run, if there is one; the counts of the step
    before are to.counts. At most MOST_TAKEN padded sequences and tokens. May be recorded.

    slots: int32 [2, n] in pinned host memory (or device memory), laid out by slot_layout.py
    runs:  int32 [1], runs of graphs so far; is counted up
    """
    assert max(to.row_of_seq.shape[0], to.token_ids.shape[0]) <= MOST_TAKEN, "no such step is taken by its graph"
    launch(
        _take_inputs_kernel,
        (1, 1, 1),
        slots,
        slots.stride(0),
        runs,
        *arguments_of(to),
        MOST_TAKEN,
        num_warps=4,
    )
