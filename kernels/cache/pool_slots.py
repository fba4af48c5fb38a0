"""The destinations of index keys and rows of pools of tokens: a pool's key comes with its last token.

    slot_of_pool[t] = slot_of_token[t] // key_tokens     if token t is the last one of a pool, else a dropped slot
    last_row[t] = (position_of_token[t] + 1) // tokens - 1

It uses operations of torch, on any device: few models pool their tokens, and a step does this once for all layers.
"""

import torch
from torch import Tensor


def write_pool_slots(
    slot_of_token: Tensor, position_of_token: Tensor, slot_of_pool: Tensor, *, key_tokens: int, null_page: bool
) -> None:
    """Fills slot_of_pool: slots of pages that hold one key for each key_tokens tokens.

    slot_of_token, position_of_token, slot_of_pool: int32 [T]
    null_page: whether page 0 belongs to no sequence, so that slot 0 is dropped; else -1 is
    """
    torch.div(slot_of_token, key_tokens, rounding_mode="floor", out=slot_of_pool)
    torch.where(
        torch.remainder(position_of_token, key_tokens) == key_tokens - 1,
        slot_of_pool,
        torch.full_like(slot_of_pool, 0 if null_page else -1),
        out=slot_of_pool,
    )


def write_last_rows(position_of_token: Tensor, last_row: Tensor, *, tokens: int) -> None:
    """Fills last_row: the last row that each token sees, -1 if it sees none.

    tokens: of a row

    position_of_token, last_row: int32 [T]
    """
    torch.add(position_of_token, 1, out=last_row)
    torch.div(last_row, tokens, rounding_mode="floor", out=last_row)
    last_row.sub_(1)
