"""A state record: the state of a request in all recurrent layers as bytes, for KVExporter and KVImporter.

It is int64 words in lines of 32. The first line has the tokens of the state, and how many of them are folded; then come
the bytes of a slot, which are whole lines. One more word of the first line is chosen so that

    sum over lines i of (2 * i + 1) * (sum of the words of line i) = 0   modulo 2**64

A change of a single word always changes that sum, because 2 * i + 1 is odd. So the sum finds bytes that were lost,
repeated or exchanged on their way, except words that are exchanged within a line.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rocm_attn.errors import BadTensor
from rocm_attn.paging.state_pool import StatePool, StateSource

_LINE = 32
# Words of the first line.
_TOKENS, _FOLDED, _CHECK = 0, 1, 2
_HEAD_BYTES = _LINE * torch.int64.itemsize


def num_record_bytes(states: StatePool) -> int:
    """Returns the bytes of a record: those of a slot, and a line; 0 if there are no recurrent layers."""
    return 0 if states.is_empty else _HEAD_BYTES + states.memory.shape[1]


def write_record(states: StatePool, source: StateSource, record: Tensor) -> None:
    """Copies a state to a record, without waiting for the device. If no slot has it, the record says 0 tokens.

    record: uint8 [num_record_bytes]
    """
    found = states.slot_with(source)
    slot, words = found.clamp(min=0), record.view(torch.int64)
    words[:_LINE].zero_()
    words[_TOKENS].copy_(torch.where(found >= 0, source.tokens, 0)[0])
    words[_FOLDED].copy_(states.headers.index_select(0, slot)[0, 2])
    torch.index_select(states.memory, 0, slot, out=record[_HEAD_BYTES:][None])
    words[_CHECK].copy_(-_weighted_sum(words))


def read_head(states: StatePool, kv_len: int, record: Tensor) -> int:
    """Returns how many tokens of a record's state are folded. Waits for the device.

    record: uint8 [num_record_bytes]
    Raises BadTensor unless it holds, unchanged, the state after kv_len tokens.
    """
    words = record.view(torch.int64)
    tokens, folded, total = torch.stack([words[_TOKENS], words[_FOLDED], _weighted_sum(words)]).tolist()
    if total:
        raise BadTensor(
            "the bytes of the state are not those that export_row() wrote, because their checksum differs; send the "
            "buffer again"
        )
    if tokens == 0:
        raise BadTensor(
            f"the buffer holds no state, because the sender's device had none after {kv_len} tokens of the row; send "
            "tokens that a state is there for"
        )
    if tokens != kv_len or not 0 <= tokens - folded <= states.recurrent.kept:
        raise BadTensor(
            f"the buffer holds the state after {tokens} tokens, {folded} of them folded, and the extent has {kv_len}; "
            "send the buffer and the extent of one export_row()"
        )
    return int(folded)


def read_state(states: StatePool, slot: int, header: Tensor, record: Tensor) -> None:
    """Copies the state of a record to the first slot of a row; the row's other slot loses its state.

    header: int32 [4], that of the slot; record: uint8 [num_record_bytes], which read_head() has accepted
    """
    states.memory[slot].copy_(record[_HEAD_BYTES:])
    states.headers[slot].copy_(header)
    states.headers[slot + 1].zero_()


def _weighted_sum(words: Tensor) -> Tensor:
    """int64 []: the sum of the words of all lines, those of line i counted 2 * i + 1 times."""
    of_lines = words.view(-1, _LINE).sum(1)
    return (of_lines * torch.arange(1, 2 * len(of_lines), 2, device=words.device)).sum()
