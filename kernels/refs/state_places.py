"""Torch twin of kernels/states/places.py: same signature, same results, fixed shapes, no host synchronisation."""

import torch
from torch import Tensor

from rocm_attn.kernels.metadata.error_word import ERROR_WORD, WRONG_STATE
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.kernels.states.arguments import BEGINS, LEFT_OUT, StatePlaces


def state_places(step: StepTensors, tags: Tensor, headers: Tensor, places: StatePlaces, *, kept: int) -> None:
    """Twin of launch_state_places."""
    seqs = torch.arange(len(places.source), device=tags.device)
    live = (seqs < step.counts[0]) & (step.q_len > 0)
    row, end = torch.where(live, step.row_of_seq, 0).long(), step.kv_len
    start, tag = end - step.q_len, tags[row, 0]
    # of_row: [S, 2, 4], the headers of both slots of each row
    of_row = headers[: 2 * len(tags)].view(-1, 2, 4)[row]
    written_at, first = of_row[..., 1], of_row[..., 2]
    is_earlier = (of_row[..., 0] == tag[:, None]) & (written_at < start[:, None])
    written_at = torch.where(is_earlier, written_at, -2)
    serves = is_earlier & (first <= start[:, None]) & (start[:, None] <= of_row[..., 3])
    serves &= written_at == written_at.amax(1, keepdim=True)
    newest = torch.where(serves, written_at, -2).argmax(1)
    begins = start <= 0
    found = live & (begins | serves.any(1)) & (tag > 0)
    target = torch.where(begins, 2 * row, 2 * row + 1 - newest)
    before = first.gather(1, newest[:, None])[:, 0]
    places.source.copy_(torch.where(found, torch.where(begins, BEGINS, 2 * row + newest), LEFT_OUT))
    places.target.copy_(torch.where(found, target, 0))
    places.pending.copy_(torch.where(found & ~begins, start - before, 0))
    after = torch.where(step.q_len <= kept, start, end)
    made = torch.stack([tag, start, after, end], 1).to(torch.int32)
    # Rows of other sequences repeat the write to row 0's first slot of what is there.
    at = torch.where(found, target, 0)
    headers.index_copy_(0, at, torch.where(found[:, None], made, headers[at]))
    other = torch.where(found & begins, target + 1, 0)
    gone = headers[other]
    gone[:, 0] = torch.where(found & begins, 0, gone[:, 0])
    headers.index_copy_(0, other, gone)
    counts = step.counts
    counts[ERROR_WORD].bitwise_or_((live & ~found).any().to(torch.int32) * WRONG_STATE)
