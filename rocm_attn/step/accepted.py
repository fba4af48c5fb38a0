"""select_last_accepted: of a step of W new tokens a sequence, the row of the last one that was accepted."""

from __future__ import annotations

import torch
from torch import Tensor

from rocm_attn.errors import BadTensor
from rocm_attn.step.step import Part


def select_last_accepted(rows: Tensor, step: Part, num_accepted: Tensor) -> Tensor:
    """[S, ...]: of each sequence the row of its num_accepted-th new token.

    rows:         [T, ...], what a forward has for each token of the step, for instance hidden states
    num_accepted: int32 or int64 [S], on the device: how many of its new tokens, from the first one on, a sequence
                  keeps. State of a request that lies by rows is num_accepted_of_row[step.row_of_seq]. A number outside
                  of 1 .. new tokens is taken for the nearest one, so that a row of another sequence is never selected

    A draft model's step runs over W tokens of each sequence though only the device knows how many of them were
    accepted: DeviceInputs(kv_len=..., ahead=W). This picks what the next drafts start from, without asking it. Device
    work of fixed shape only; it may be captured. A pad and a sequence without new tokens get a row that is no one's to
    use. Raises BadTensor.
    """
    num_tokens = step.token_ids.shape[0]
    if rows.dim() == 0 or rows.shape[0] != num_tokens:
        raise BadTensor(f"rows have shape {list(rows.shape)}; this step has {num_tokens} padded tokens")
    return rows.index_select(0, last_accepted(step, num_accepted))


def last_accepted(step: Part, num_accepted: Tensor) -> Tensor:
    """int32 or int64 [S]: the token of each sequence that select_last_accepted selects the row of. Raises BadTensor."""
    num_tokens, num_seqs = step.token_ids.shape[0], step.row_of_seq.shape[0]
    if tuple(num_accepted.shape) != (num_seqs,) or num_accepted.dtype not in (torch.int32, torch.int64):
        raise BadTensor(
            f"num_accepted is {num_accepted.dtype} of shape {list(num_accepted.shape)}; it must be torch.int32 or "
            f"torch.int64 [{num_seqs}]"
        )
    first = step.q_indptr[:-1]
    new_tokens = step.q_indptr[1:] - first
    place = torch.minimum(num_accepted, new_tokens).clamp(min=1) - 1
    return (first + place).clamp(max=num_tokens - 1)
