"""The slots of recurrent states that a step of vLLM uses, as its metadata names them. It imports no vLLM."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rocm_attn.integrations.state_watch import ALL_NEW, StateSlots, first_rows


def has_states(metadata: Any) -> bool:
    """True for vLLM's metadata of recurrent layers, GDNAttentionMetadata and BaseMambaAttentionMetadata."""
    return hasattr(metadata, "non_spec_state_indices_tensor") or hasattr(metadata, "state_indices_tensor_d")


def slots_of(metadata: Any, num_seqs: int) -> StateSlots:
    """Returns the slots of a step's sequences in the order of the batch. num_seqs: padded"""
    is_mamba = hasattr(metadata, "state_indices_tensor_d")
    found = (_columns_of_mamba if is_mamba else _columns_of_delta_nets)(metadata, num_seqs)
    # A sequence with drafts goes on from the column of the last token that was accepted.
    column = torch.where(found.drafts, found.accepted.long() - 1, 0).clamp(0, found.slots.shape[1] - 1)
    place = torch.arange(found.slots.shape[1], device=column.device)
    folded = torch.where(found.drafts[:, None], place + 1, torch.where(place == 0, ALL_NEW, 0))
    slots = StateSlots(found.slots.gather(1, column[:, None])[:, 0], found.is_read, found.slots, folded)
    within = getattr(metadata, "checkpoint_meta" if is_mamba else "checkpoint", None)
    return slots if within is None else _with_checkpoints(slots, within)


@dataclass(frozen=True, slots=True)
class _Columns:
    """A batch's lines of the block table, from the column of its last block on.

    slots:    int [S, W]
    is_read:  bool [S]
    drafts:   bool [S], whether a state is written for each new token, and the one of the last accepted token is read
    accepted: int [S], with the token that was not a draft
    """

    slots: Tensor
    is_read: Tensor
    drafts: Tensor
    accepted: Tensor


def _columns_of_mamba(metadata: Any, num_seqs: int) -> _Columns:
    """Decodes come before prompts."""
    decodes, prompts = metadata.state_indices_tensor_d, metadata.state_indices_tensor_p
    parts = [each.reshape(len(each), -1) for each in (decodes, prompts) if each is not None and len(each)]
    width = max(each.shape[1] for each in parts)
    slots = first_rows(torch.cat([_widened(each, width) for each in parts]), num_seqs)
    is_decode = torch.arange(num_seqs, device=slots.device) < metadata.num_decodes
    is_read = is_decode
    if metadata.has_initial_states_p is not None:
        before = is_decode[: metadata.num_decodes]
        is_read = first_rows(torch.cat([before, metadata.has_initial_states_p.bool()]), num_seqs)
    accepted = metadata.num_accepted_tokens
    if accepted is None:
        return _Columns(slots, is_read, torch.zeros_like(is_decode), torch.ones_like(slots[:, 0]))
    return _Columns(slots, is_read, is_decode, first_rows(accepted, num_seqs))


def _columns_of_delta_nets(metadata: Any, num_seqs: int) -> _Columns:
    """Sequences with drafts and others have a tensor each, and a mask says which is which. Decodes are read always."""
    plain, mask = metadata.non_spec_state_indices_tensor, metadata.spec_sequence_masks
    has_state = metadata.has_initial_state
    if mask is None:
        slots = first_rows(plain[:, None], num_seqs)
        is_read = torch.arange(num_seqs, device=slots.device) < metadata.num_decodes
        if has_state is not None:
            is_read = is_read | first_rows(has_state.bool(), num_seqs)
        return _Columns(slots, is_read, torch.zeros_like(is_read), torch.ones_like(slots[:, 0]))
    drafts, of_drafts = first_rows(mask, num_seqs), metadata.spec_state_indices_tensor
    accepted = metadata.num_accepted_tokens
    place = (drafts.cumsum(0) - 1).clamp(min=0)
    slots, is_read = of_drafts[place.clamp(max=len(of_drafts) - 1)], torch.ones_like(drafts)
    if plain is not None and len(plain):
        other = ((~drafts).cumsum(0) - 1).clamp(0, len(plain) - 1)
        slots = torch.where(drafts[:, None], slots, _widened(plain[other][:, None], slots.shape[1]))
        if has_state is not None:
            is_read = drafts | has_state.bool()[other.clamp(max=len(has_state) - 1)]
    return _Columns(slots, is_read, drafts, accepted[place.clamp(max=len(accepted) - 1)])


def _with_checkpoints(slots: StateSlots, within: Any) -> StateSlots:
    """Adds the states that are kept from within a chunk of a prompt. within: MambaPrefillCheckpointMetadata"""
    rows = within.request_rows
    kept, folded = (each.new_zeros(len(each), 1) for each in (slots.written, slots.folded))
    kept[rows, 0] = within.state_indices.to(kept.dtype)
    folded[rows, 0] = within.checkpoint_offsets.to(folded.dtype)
    return StateSlots(
        slots.read, slots.is_read, torch.cat([slots.written, kept], 1), torch.cat([slots.folded, folded], 1)
    )


def _widened(rows: Tensor, width: int) -> Tensor:
    """Rows with zeros after them."""
    return torch.nn.functional.pad(rows, (0, width - rows.shape[1]))
