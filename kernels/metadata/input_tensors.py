"""The input tensors of a step: what `publish` writes, and all else of a step follows from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class InputTensors:
    """S padded sequences, T padded tokens; int32 and contiguous.

    counts:     [4]  receives num_seqs, num_tokens, step number, 0
    row_of_seq: [S]  pads receive 0
    kv_len:     [S]  pads receive pad_kv_len
    q_len:      [S]  pads receive pad_q_len
    prefix_len: [S]  pads receive 0; empty where the step shares no prefix
    group_end:  [S]  pads receive 0; empty with prefix_len
    token_ids:  [T]  pads, and all of it when a slot brings no ids, receive 0
    launches:   what a launcher keeps for these addresses, under its own name
    """

    counts: Tensor
    row_of_seq: Tensor
    kv_len: Tensor
    q_len: Tensor
    prefix_len: Tensor
    group_end: Tensor
    token_ids: Tensor
    pad_kv_len: int
    pad_q_len: int
    launches: dict[str, Callable[[Tensor, Tensor], None]] = field(default_factory=dict, init=False)
