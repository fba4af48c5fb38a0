"""The slots of recurrent states that a step of SGLang uses, as its metadata names them. It imports no SGLang."""

from typing import Any

import torch
from torch import Tensor

from rocm_attn.integrations.sglang.steps import draft_width
from rocm_attn.integrations.state_watch import ALL_NEW, StateSlots, first_rows


def slots_of(metadata: Any, batch: Any, num_seqs: int, of_drafts: Tensor) -> StateSlots:
    """Returns the slots of a step's sequences in the order of the batch.

    A sequence has one slot, which a step reads and writes. Gated delta nets read it in every step, also where a
    sequence begins; Mamba2's metadata says whose they read. With a radix cache that tracks states, a step also leaves
    one in another slot: that after a decode's token, or after the whole chunks of a prompt's tokens.
    A step that verifies drafts leaves the slot as it is, and the state after each draft in memory for these.

    metadata:  ForwardMetadata, or Mamba2Metadata
    batch:     its ForwardBatch
    num_seqs:  padded
    of_drafts: int64 [rows, drafts], the place of the state after each draft of the batch's sequences
    """
    slots = first_rows(metadata.mamba_cache_indices.long(), num_seqs)
    is_read = torch.ones(num_seqs, dtype=torch.bool, device=slots.device)
    if batch.forward_mode.is_target_verify():
        written = first_rows(of_drafts[:, : draft_width(batch)], num_seqs)
        folded = torch.arange(1, 1 + written.shape[1], device=slots.device).expand_as(written)
        return StateSlots(slots, is_read, written, folded)
    mixed = getattr(metadata, "mixed_metadata", None)
    if mixed is not None:
        prompts = mixed.has_initial_states[: metadata.num_prefills]
        is_read[: len(prompts)] = prompts
    written, folded = slots[:, None], torch.full_like(slots[:, None], ALL_NEW)
    mask, tracked = batch.mamba_track_mask, metadata.mamba_track_indices
    if mask is not None and tracked is not None:
        count = batch.mamba_track_aligned_lens()
        kept = torch.where(mask, torch.ones_like(tracked) if count is None else count, 0)
        more = (first_rows(each.long(), num_seqs)[:, None] for each in (tracked, kept))
        written, folded = (torch.cat(each, 1) for each in zip((written, folded), more, strict=True))
    return StateSlots(slots, is_read, written, folded)
