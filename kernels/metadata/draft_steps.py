"""Derives the inputs of all steps of a round of drafts from those of its first step, which were published.

    kv_len[i, s]     = kv_len[0, s] + i * K, and the pad's length for pads        for draft steps i after the first
    token_ids[i, t]  = 0: only the device knows the drafts that were picked       for draft steps i after the first
    mask_start[i, s] = kv_len[0, s] - K: keys before the drafts have no cells; 0 for pads
    parents[s, n]    = n - K, the draft of the same branch one step earlier, or NO_PARENT for the first step's

K: branches; the number of a draft is draft step * K + branch. Each step's rows, new tokens and counts are the round's.
The first step is read and not written, so the launch may run twice.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.any_alignment import at_any_alignment
from rocm_attn.kernels.launch import RepeatedLaunch, only_launches
from rocm_attn.kernels.metadata.step_tensors import NO_PARENT, StepTensors

_BLOCK = 256
_NO_PARENT = tl.constexpr(NO_PARENT)


@at_any_alignment
@triton.jit(
    do_not_specialize=[
        "kv_len_stride",
        "token_ids_stride",
        "mask_start_stride",
        "num_seqs_padded",
        "num_tokens_padded",
        "num_mask_starts",
        "num_parents",
        "branches",
        "steps",
        "pad_kv_len",
    ]
)
def _draft_steps_kernel(
    counts,
    kv_len,
    token_ids,
    mask_start,
    parents,
    kv_len_stride,
    token_ids_stride,
    mask_start_stride,
    num_seqs_padded,
    num_tokens_padded,
    num_mask_starts,
    num_parents,
    branches,
    steps,
    pad_kv_len,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    step = tl.program_id(1)
    far = step.to(tl.int64)  # before a stride is multiplied
    live = at < tl.load(counts)
    length = tl.load(kv_len + at, mask=live, other=0)
    start = tl.where(live, length - branches, 0)
    tl.store(mask_start + far * mask_start_stride + at, start, mask=at < num_mask_starts)
    if step > 0:
        grown = tl.where(live, length + step * branches, pad_kv_len)
        tl.store(kv_len + far * kv_len_stride + at, grown, mask=at < num_seqs_padded)
        ids = token_ids + far * token_ids_stride + at
        tl.store(ids, tl.zeros([BLOCK], tl.int32), mask=at < num_tokens_padded)
    # The drafts of this step: branch b of sequence s is in line s, after those of the steps before.
    draft = step * branches + at % branches
    line = (at // branches).to(tl.int64) * (branches * steps)
    parent = tl.where(step > 0, draft - branches, _NO_PARENT)
    tl.store(parents + line + draft, parent, mask=at < num_parents // steps)


_derive = RepeatedLaunch(_draft_steps_kernel)


@only_launches
def launch_draft_steps(steps: Sequence[StepTensors], parents: Tensor, branches: int) -> None:
    """Writes the inputs of the steps of a round.

    steps:    of the round, in order; their kv_len lie at equal distances in one buffer, and so do token_ids and
              mask_start. kv_len of the first is read, like counts[0], the number of sequences
    parents:  int32 [S, branches * steps], contiguous, or empty
    branches: drafts of a sequence in each step
    """
    first = steps[0]
    assert parents.is_contiguous()
    num_seqs, num_tokens = first.kv_len.shape[0], first.token_ids.shape[0]
    kv_len, kv_len_stride = _in_one([step.kv_len for step in steps])
    token_ids, token_ids_stride = _in_one([step.token_ids for step in steps])
    mask_start, mask_start_stride = _in_one([step.mask_start for step in steps])
    _derive(
        first.counts.device,
        (-(-max(num_seqs, num_tokens) // _BLOCK), len(steps), 1),
        first.counts,
        kv_len,
        token_ids,
        mask_start,
        parents,
        kv_len_stride,
        token_ids_stride,
        mask_start_stride,
        num_seqs,
        num_tokens,
        first.mask_start.shape[0],
        parents.numel(),
        branches,
        len(steps),
        first.pads.kv_len,
        _BLOCK,
        num_warps=4,
    )


def _in_one(tensors: Sequence[Tensor]) -> tuple[Tensor, int]:
    """A view of the span of these int32 tensors of one size, and elements from one's beginning to the next one's."""
    first = tensors[0]
    if len(tensors) == 1 or not first.numel():
        return first, 0
    distance = (tensors[1].data_ptr() - first.data_ptr()) // 4
    assert all((tensor.data_ptr() - first.data_ptr()) // 4 == place * distance for place, tensor in enumerate(tensors))
    return first.as_strided(((len(tensors) - 1) * distance + first.numel(),), (1,)), distance
