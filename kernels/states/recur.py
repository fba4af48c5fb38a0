"""recur: the recurrence of a layer in a step, token by token or, for prompts, in chunks.

Both share a step: sequences with few new tokens are taken token by token, and those with more in chunks. The padded
shape determines whether there can be any of the latter, so that a graph always has the same launches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rocm_attn.kernels.launch import only_launches
from rocm_attn.kernels.states.arguments import RecurrenceRule, RecurrentSlots, RecurrentTokens, StatePlaces
from rocm_attn.kernels.states.backend import on_nvidia
from rocm_attn.kernels.states.chunk_rows import launch_chunk_rows
from rocm_attn.kernels.states.chunk_walk import launch_chunk_walk
from rocm_attn.kernels.states.token_steps import launch_token_steps

# With fewer new tokens than this, a sequence is not worth a chunk.
_LEAST_CHUNK = 16


def _takes_chunks(slots: RecurrentSlots) -> bool:
    """True if the form in chunks is right for a layer.

    On an H100 with Triton 3.6 it has read an illegal address in float16, for 20 channels with a decay each. No check of
    its addresses has explained it. In bfloat16 it was right for a head's decays and dims of 128.
    """
    if slots.k.dtype == torch.float32 or not on_nvidia():
        return True
    return not slots.has_channels and slots.state.shape[2] % 64 == slots.state.shape[3] % 64 == 0


@only_launches
def launch_recur(
    tokens: RecurrentTokens,
    recurrence: RecurrenceRule,
    slots: RecurrentSlots,
    places: StatePlaces,
    workspace: Tensor,
    *,
    deterministic: bool,
) -> None:
    """Writes every row of tokens.out, and the target slots.

    workspace:     float32, contiguous, of slots.workspace_words(T, S) words; scratch, its content is undefined
    deterministic: whether a sequence's bits must depend on nothing but itself: all its tokens are taken one by one
    """
    slots.check(tokens, places)
    most_q_len = max(slots.most_kept, _LEAST_CHUNK - 1)
    one_by_one = deterministic or not _takes_chunks(slots)
    if one_by_one or places.max_q_len <= most_q_len:
        launch_token_steps(tokens, recurrence, slots, places, most_q_len=places.max_q_len, clears=True)
        return
    launch_token_steps(tokens, recurrence, slots, places, most_q_len=most_q_len, clears=False)
    launch_chunk_rows(tokens, recurrence, slots, places, workspace, most_q_len=most_q_len)
    launch_chunk_walk(tokens, recurrence, slots, places, workspace, most_q_len=most_q_len)
