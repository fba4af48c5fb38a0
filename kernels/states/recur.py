"""recur: the recurrence of a layer in a step, token by token or, for prompts, in chunks.

Both share a step: sequences with few new tokens are taken token by token, and those with more in chunks. The padded
shape determines whether there can be any of the latter, so that a graph always has the same launches.
"""

from __future__ import annotations

from torch import Tensor

from rocm_attn.kernels.backend import on_hopper
from rocm_attn.kernels.launch import only_launches
from rocm_attn.kernels.states.arguments import RecurrenceRule, RecurrentSlots, RecurrentTokens, StatePlaces
from rocm_attn.kernels.states.chunk_rows import launch_chunk_rows
from rocm_attn.kernels.states.chunk_walk import launch_chunk_walk
from rocm_attn.kernels.states.token_steps import launch_token_steps

# With fewer new tokens than this, a sequence is not worth a chunk.
_LEAST_CHUNK = 16


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
    if deterministic or places.max_q_len <= most_q_len:
        launch_token_steps(tokens, recurrence, slots, places, most_q_len=places.max_q_len, clears=True)
        return
    launch_token_steps(tokens, recurrence, slots, places, most_q_len=most_q_len, clears=False)
    if on_hopper():
        # Not every release of Triton has the Gluon that these are written in.
        from rocm_attn.kernels.hopper.state_rows import launch_hopper_chunk_rows
        from rocm_attn.kernels.hopper.state_walk import launch_hopper_chunk_walk

        launch_hopper_chunk_rows(tokens, recurrence, slots, places, workspace, most_q_len=most_q_len)
        launch_hopper_chunk_walk(tokens, recurrence, slots, places, workspace, most_q_len=most_q_len)
    else:
        launch_chunk_rows(tokens, recurrence, slots, places, workspace, most_q_len=most_q_len)
        launch_chunk_walk(tokens, recurrence, slots, places, workspace, most_q_len=most_q_len)
