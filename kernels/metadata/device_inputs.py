"""Replaces lengths and token ids that the host has published for a step by those that only the device knows.

    q_len[i]  = min(max(device_q_len[i], 0), q bound[i])
    kv_len[i] = min(max(device_kv_len[i] + ahead, q_len[i]), kv bound[i])
    kv_len[i] = min(kv_len[i], stored[i] + q_len[i])
    where q_len[i] > 0 and kv_len[i] - q_len[i] < floor[i]:
        kv_len[i] = min(floor[i] + q_len[i], kv bound[i])
        q_len[i]  = min(q_len[i], max(kv_len[i] - floor[i], 0))
    kv_len[i] = that of pads, if it is 0
    token t   = device_token_ids[t] for t < q_len[0] + q_len[1] + ..., 0 after them

It runs after publish; the bounds are the lengths in the ring slot that publish has read. So a length that is wrong on
the device stays within the pages that the host has reserved, leaves no gap after the stored tokens, where an earlier
request's tokens may lie, and writes to no token before floor, which other rows may share. Each of these cuts sets a bit
of the step's error word. The host's bounds decide which tokens count as stored: tokens of an earlier step whose length
only the device knew, and that were missing, count as stored.

Each program sums q_len itself, from the words of the caller and the host: none reads what another writes.
"""

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.any_alignment import at_any_alignment
from rocm_attn.kernels.launch import RepeatedLaunch
from rocm_attn.kernels.metadata import error_word
from rocm_attn.kernels.metadata.given_inputs import GivenInputs
from rocm_attn.kernels.metadata.slot_layout import HEADER_WORDS
from rocm_attn.kernels.metadata.step_tensors import StepTensors

_TOKENS = 256
# Sequences that a program handles at a time; a fixed number, so that no batch size needs another compilation.
_SEQS_AT_ONCE = 512
_ERROR_WORD = tl.constexpr(error_word.ERROR_WORD)
_BEYOND_BOUND = tl.constexpr(error_word.LENGTH_BEYOND_BOUND)
_UNSTORED = tl.constexpr(error_word.UNSTORED_TOKEN)
_SHARED_TOKEN = tl.constexpr(error_word.SHARED_TOKEN)


@at_any_alignment
@triton.jit(do_not_specialize=["ahead", "num_token_ids", "num_tokens_padded", "pad_kv_len"])
def _device_inputs_kernel(
    slot,
    device_kv_len,
    device_q_len,
    device_token_ids,
    first_writable,
    stored,
    ahead,
    counts,
    kv_len,
    q_len,
    token_ids,
    num_token_ids,
    num_tokens_padded,
    pad_kv_len,
    HEADER: tl.constexpr,
    SEQS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    num_seqs = tl.load(slot)
    lane = tl.arange(0, SEQS)
    total = 0
    num_beyond = 0
    num_late = 0
    num_below = 0
    for first in range(0, num_seqs, SEQS):
        seq = first + lane
        live = seq < num_seqs
        kv_bound = tl.load(slot + HEADER + num_seqs + seq, mask=live, other=0)
        q_bound = tl.load(slot + HEADER + 2 * num_seqs + seq, mask=live, other=0)
        given_kv = tl.load(device_kv_len + seq, mask=live, other=-ahead) + ahead
        given_q = tl.load(device_q_len + seq, mask=live, other=0)
        # Every cut from here on is counted, and reported at the end.
        new = tl.minimum(tl.maximum(given_q, 0), q_bound)
        length = tl.minimum(tl.maximum(given_kv, new), kv_bound)
        num_beyond += tl.sum(((new != given_q) | (length != given_kv)).to(tl.int32), 0)
        # If the sum is beyond int32, no sequence is late.
        room = tl.load(stored + seq, mask=live, other=0)
        late = length - new > room
        length = tl.where(late, room + new, length)
        num_late += tl.sum(late.to(tl.int32), 0)
        begin = tl.load(first_writable + seq, mask=live, other=0)
        below = (new > 0) & (length - new < begin)
        length = tl.where(below, tl.minimum(begin + new, kv_bound), length)
        new = tl.where(below, tl.minimum(new, tl.maximum(length - begin, 0)), new)
        num_below += tl.sum(below.to(tl.int32), 0)
        total += tl.sum(new, 0)
        if tl.program_id(0) == 0:
            tl.store(kv_len + seq, tl.where(length > 0, length, pad_kv_len), mask=live)
            tl.store(q_len + seq, new, mask=live)
    if tl.program_id(0) == 0:
        tl.store(counts + 1, total)
        cut = tl.where(num_beyond > 0, _BEYOND_BOUND, 0) | tl.where(num_late > 0, _UNSTORED, 0)
        tl.store(counts + _ERROR_WORD, cut | tl.where(num_below > 0, _SHARED_TOKEN, 0))
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    # There are ids for all of the batch's bounds, which no sum exceeds, or none at all.
    ids = tl.load(device_token_ids + t, mask=t < tl.minimum(total, num_token_ids), other=0)
    tl.store(token_ids + t, ids, mask=t < num_tokens_padded)


_place = RepeatedLaunch(_device_inputs_kernel)


def launch_device_inputs(slot: Tensor, given: GivenInputs, to: StepTensors) -> None:
    """Overwrites a published step's lengths, token ids and number of tokens; pads of sequences stay unchanged.

    slot: int32 words from which the step was published; its lengths are the bounds
    to:   counts, kv_len, q_len and token_ids are written. counts[1] receives the sum of q_len, counts[3] error bits
          if a length was cut or moved; token_ids after the step's tokens, and all of it without ids, receives 0
    """
    num_tokens_padded = to.token_ids.shape[0]
    _place(
        to.counts.device,
        (max(1, -(-num_tokens_padded // _TOKENS)), 1, 1),
        slot,
        *given,
        to.counts,
        to.kv_len,
        to.q_len,
        to.token_ids,
        given.token_ids.shape[0],
        num_tokens_padded,
        to.pads.kv_len,
        HEADER_WORDS,
        _SEQS_AT_ONCE,
        _TOKENS,
        num_warps=4,
    )
