"""tree_mask: the mask and the positions of a step whose new tokens are trees of drafts.

A draft sees the KV that was there before the step, itself, and its ancestors among the sequence's new tokens. Its
position is its place in the branch: tokens before the step, and one more for each ancestor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rocm_attn.batch.inputs import ON_HOST, DeviceInputs
from rocm_attn.batch.mask import StepMask, mask_bytes
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.errors import BadBatch, BadTensor

NO_PARENT = -1


def tree_mask(batch: StepBatch, parents: Tensor) -> StepMask:
    """The mask of a batch of trees; replace(batch, mask=...) puts it there.

    batch:   its lengths, or bounds of them where its inputs have lengths on the device
    parents: int32 [num_tokens]  token -> its parent's place among the sequence's new tokens, or NO_PARENT; a parent
             comes before its children

    Everything but the batch's own lengths is computed on the device of parents, without waiting for it. What a parent
    that does not come before its child, or does not exist, leads to is not specified, but nothing out of bounds.
    Raises BadTensor, BadBatch.
    """
    if parents.dtype != torch.int32 or parents.dim() != 1:
        raise BadTensor(
            f"parents is {parents.dtype} of shape {list(parents.shape)}; it must be a vector of torch.int32"
        )
    if len(parents) != batch.num_tokens:
        raise BadBatch(f"{len(parents)} parents for {batch.num_tokens} new tokens; give one each, {NO_PARENT} for none")
    num_bytes = mask_bytes(batch.kv_len, batch.q_len)
    if batch.num_tokens == 0:
        return StepMask(parents.new_empty(num_bytes, dtype=torch.uint8), parents.clone())
    kv_len, q_len = _lengths(batch, parents.device)
    places = torch.arange(batch.max_q_len, device=parents.device)
    first_token = q_len.cumsum(0) - q_len
    is_token = places < q_len[:, None]
    # [num_seqs, most new tokens]; places beyond a sequence's new tokens are no token's parents.
    token = torch.where(is_token, first_token[:, None] + places, 0)
    parent = torch.where(is_token, parents[token].long(), NO_PARENT)
    sees = _ancestors(parent)
    prefix = kv_len - q_len
    bits = _all_but(~sees & is_token[:, :, None] & is_token[:, None, :], prefix, kv_len, q_len, num_bytes)
    depth = sees.sum(2) - 1
    positions = torch.zeros_like(parents).index_add_(
        0, token.flatten(), torch.where(is_token, prefix[:, None] + depth, 0).flatten().int()
    )
    return StepMask(bits, positions)


def _lengths(batch: StepBatch, device: torch.device) -> tuple[Tensor, Tensor]:
    """kv_len and q_len, int64 on the device; where the batch's inputs have them, from there."""
    kv_len, q_len = (torch.tensor(lengths, device=device).long() for lengths in (batch.kv_len, batch.q_len))
    inputs = batch.inputs
    if isinstance(inputs, DeviceInputs):
        # Cut as the step itself cuts them, so that the packing agrees and nothing lies beyond the bounds.
        q_len = q_len if inputs.q_len is ON_HOST else torch.minimum(inputs.q_len.long().clamp(min=0), q_len)
        if inputs.kv_len is not ON_HOST:
            kv_len = torch.minimum(torch.maximum(inputs.kv_len.long(), q_len), kv_len)
    return kv_len, q_len


def _ancestors(parent: Tensor) -> Tensor:
    """bool [seqs, n, n]: whether a token is another one or comes before it in its branch, from parents [seqs, n]."""
    num_tokens = parent.shape[1]
    places = torch.arange(num_tokens, device=parent.device)
    reach = (parent[:, :, None] == places) | (places[:, None] == places)
    steps = 1
    while steps < num_tokens:
        # Reaching in s steps twice is reaching in 2 s; float32 counts these exactly.
        reach = torch.bmm(reach.float(), reach.float()) > 0
        steps *= 2
    return reach


def _all_but(hidden: Tensor, prefix: Tensor, kv_len: Tensor, q_len: Tensor, num_bytes: int) -> Tensor:
    """uint8 [num_bytes]: all cells set but those of hidden [seqs, token, new key], whose keys lie after the prefix."""
    cells = q_len * kv_len
    first_cell = cells.cumsum(0) - cells
    places = torch.arange(hidden.shape[1], device=hidden.device)
    cell = (first_cell + prefix)[:, None, None] + places[None, :, None] * kv_len[:, None, None] + places
    cell = torch.where(hidden, cell, 0).flatten()
    # No two cells are the same bit, so that sums of bits are unions of them.
    bit = torch.where(hidden.flatten(), 1 << (cell % 8), 0).to(torch.uint8)
    cleared = torch.zeros(num_bytes, dtype=torch.uint8, device=hidden.device).index_add_(0, cell // 8, bit)
    return 255 - cleared
