"""The slots of recurrent states that a step of SGLang uses, as its metadata names them. It imports no SGLang."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rocm_attn.integrations.state_watch import ALL_NEW, StateSlots


def slots_of(metadata: Any, batch: Any, num_seqs: int) -> StateSlots:
    """Returns the slots of a step's sequences in the order of the batch.

    A sequence has one slot, which a step reads and writes. Gated delta nets read it in every step, also where a
    sequence begins; Mamba2's metadata says whose they read. With a radix cache that tracks states, a step also leaves
    one in another slot: that after a decode's token, or after the whole chunks of a prompt's tokens.

    metadata: ForwardMetadata, or Mamba2Metadata
    batch:    its ForwardBatch
    num_seqs: padded
    """
    slots = _first(metadata.mamba_cache_indices, num_seqs)
    is_read = torch.ones(num_seqs, dtype=torch.bool, device=slots.device)
    mixed = getattr(metadata, "mixed_metadata", None)
    if mixed is not None:
        prompts = mixed.has_initial_states[: metadata.num_prefills]
        is_read[: len(prompts)] = prompts
    written, folded = [slots], [torch.full_like(slots, ALL_NEW)]
    mask, tracked = batch.mamba_track_mask, metadata.mamba_track_indices
    if mask is not None and tracked is not None:
        count = batch.mamba_track_aligned_lens()
        after = torch.ones_like(tracked) if count is None else count
        written.append(_first(tracked, num_seqs))
        folded.append(_first(torch.where(mask, after, 0), num_seqs))
    return StateSlots(slots, is_read, torch.stack(written, 1), torch.stack(folded, 1))


def _first(rows: Tensor, num: int) -> Tensor:
    """The first rows, and zeros if there are fewer; int64."""
    return torch.nn.functional.pad(rows[:num].long(), (0, num - len(rows[:num])))
