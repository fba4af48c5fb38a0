"""recur: the recurrence of a layer in a step, token by token or, for prompts, in chunks."""

from __future__ import annotations

from torch import Tensor

from rocm_attn.kernels.launch import only_launches
from rocm_attn.kernels.states.arguments import Recurrence, RecurrentSlots, RecurrentTokens, StatePlaces
from rocm_attn.kernels.states.token_steps import launch_token_steps


@only_launches
def launch_recur(
    tokens: RecurrentTokens,
    recurrence: Recurrence,
    slots: RecurrentSlots,
    places: StatePlaces,
    workspace: Tensor,
    *,
    deterministic: bool,
) -> None:
    """Writes every row of tokens.out, and the target slots.

    workspace:     float32, contiguous, slots.workspace_words(T, S); scratch, its content is undefined
    deterministic: whether a sequence's bits must depend on nothing but itself: all tokens are taken one by one
    """
    slots.check(tokens, places)
    launch_token_steps(tokens, recurrence, slots, places, most_q_len=places.max_q_len, clears=True)
