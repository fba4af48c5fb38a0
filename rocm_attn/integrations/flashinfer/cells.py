"""Masks with a cell per new token and key: those that callers give, and those of windows and of short KV.

The cells of a sequence are [q_len, kv_len], one sequence after the other. Token i of a sequence is at position
kv_len - q_len + i, which is negative if a sequence has more new tokens than KV.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rocm_attn.errors import BadTensor
from rocm_attn.integrations.flashinfer.lengths import BatchLengths
from rocm_attn.machine.devices import require_tensor
from rocm_attn.problem import UNLIMITED_WINDOW


def seen_cells(
    lengths: BatchLengths, mask: Tensor | None, *, causal: bool, window_left: int, device: torch.device
) -> Tensor:
    """Returns the keys that each token sees of its sequence's KV: bool [cells], at least one cell.

    mask: bool [cells], the keys that a caller shows, in place of causality; a window hides older keys in any case
    """
    num_cells = lengths.num_cells
    if num_cells == 0:
        return torch.zeros(1, dtype=torch.bool, device=device)
    if mask is not None and window_left == UNLIMITED_WINDOW:
        return mask
    seen = torch.ones(num_cells, dtype=torch.bool, device=device) if mask is None else mask.clone()
    key = torch.arange(lengths.max_kv_len, device=device)
    begin = 0
    for q_len, kv_len in zip(lengths.q_len.tolist(), lengths.kv_len.tolist(), strict=True):
        cells = seen[begin : begin + q_len * kv_len].view(q_len, kv_len)
        begin += q_len * kv_len
        position = torch.arange(kv_len - q_len, kv_len, device=device)[:, None]
        if causal and mask is None:
            cells &= key[:kv_len] <= position
        if window_left != UNLIMITED_WINDOW:
            cells &= key[:kv_len] >= position - window_left
    return seen


def ranged_cells(lengths: BatchLengths, ranges: Tensor, causal_left: int, range_left: int) -> Tensor:
    """Returns the keys that each token sees if it is causal and has a span of keys besides: bool [cells].

    ranges:      int32 [tokens, 2], first and last key of each token's span; -1 and -1: none
    causal_left: previous keys that a token sees outside of its span; negative: all
    range_left:  keys of its span that it sees up to its own, itself included; 0 or negative: all
    """
    device, begin = ranges.device, 0
    parts = [torch.zeros(0, dtype=torch.bool, device=device)]
    key = torch.arange(lengths.max_kv_len, device=device)
    for q_len, kv_len in zip(lengths.q_len.tolist(), lengths.kv_len.tolist(), strict=True):
        before = torch.arange(kv_len - q_len, kv_len, device=device)[:, None] - key[:kv_len]
        first, last = ranges[begin : begin + q_len, None].unbind(-1)
        in_range = (first >= 0) & (key[:kv_len] >= first) & (key[:kv_len] <= last)
        if range_left > 0:
            in_range &= before < range_left
        causal = before >= 0
        if causal_left >= 0:
            causal &= before <= causal_left
        parts.append((causal | in_range).flatten())
        begin += q_len
    return torch.cat(parts)


def token_positions(lengths: BatchLengths) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Returns the position of each new token in its sequence: int64 [tokens], at least one entry."""
    if not lengths.num_tokens:
        return np.zeros(1, np.int64)
    q_len = lengths.q_len
    first = lengths.kv_len - q_len - lengths.q_indptr[:-1]
    return np.repeat(first, q_len) + np.arange(lengths.num_tokens)


@dataclass(frozen=True, slots=True)
class Masks:
    """Masks of a caller. The packed one is used if both are given.

    custom: [cells], not 0 where a key is seen
    packed: uint8, eight cells per byte, from the lowest bit on; each sequence begins with a new byte
    """

    custom: Tensor | None = None
    packed: Tensor | None = None


NO_MASKS = Masks()


def given_cells(lengths: BatchLengths, masks: Masks, device: torch.device) -> Tensor | None:
    """Returns a caller's mask as bool [cells], or None if there is none. Raises BadTensor."""
    if masks.packed is not None:
        require_tensor("packed_custom_mask", masks.packed)
        return _unpacked(lengths, masks.packed).to(device)
    if masks.custom is None:
        return None
    require_tensor("custom_mask", masks.custom)
    if masks.custom.numel() != lengths.num_cells:
        raise BadTensor(
            f"custom_mask has {masks.custom.numel()} cells; the batch has {lengths.num_cells}, one for each new token "
            "and key of its sequence"
        )
    return (masks.custom.reshape(-1) != 0).to(device)


def _unpacked(lengths: BatchLengths, packed: Tensor) -> Tensor:
    cells = lengths.q_len * lengths.kv_len
    num_bytes = -(-cells // 8)
    if packed.dtype != torch.uint8 or packed.dim() != 1 or len(packed) != num_bytes.sum():
        raise BadTensor(
            f"packed_custom_mask is {packed.dtype} {list(packed.shape)}; it must be uint8 [{num_bytes.sum()}], each "
            "sequence beginning at a byte of its own"
        )
    bits = (packed[:, None] >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1
    # cell -> bit: the cells of a sequence are shifted by the unused bits of the bytes before it.
    left_empty = np.cumsum(num_bytes * 8 - cells) - (num_bytes * 8 - cells)
    bit = np.arange(lengths.num_cells) + np.repeat(left_empty, cells)
    return bits.reshape(-1)[torch.from_numpy(bit).to(packed.device)] != 0
