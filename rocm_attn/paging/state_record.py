"""A record: the checksum of a request's tokens, and its recurrent state if it has any, for KVExporter and KVImporter.

It is int64 words in lines of 32. The first line has the token count, and how many of these are folded into the state;
then come the bytes of a slot, which are whole lines: none without recurrent layers, where all tokens count as folded. K
and V of the same tokens are in the same buffer. One more word of the first line is a checksum: it is chosen so that,
over the lines of the record and then those of the tokens,

    sum over lines i of (2 * i + 1) * (sum of the words of line i) = 0   modulo 2**64

A change of a single word always changes that sum, because 2 * i + 1 is odd. So the sum finds bytes that were lost,
repeated or exchanged on their way, except words that are exchanged within a line. It also finds a state that has come
to the tokens of another request, since there is no name of a request that both sides know.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.errors import BadTensor
from rocm_attn.paging.state_pool import StatePool, StateSource

_LINE = 32
# Words of the first line.
_TOKENS, _FOLDED, _CHECK = 0, 1, 2
_HEAD_BYTES = _LINE * torch.int64.itemsize


@dataclass(frozen=True, slots=True)
class RecordHead:
    """The first line of a record, on the host.

    tokens:   of the state; 0: the sender's device had none
    folded:   tokens that are folded; the others are kept next to the state
    checksum: 0, if the record and the bytes of the tokens are those that were written
    """

    tokens: int
    folded: int
    checksum: int


def must_be_after(head: RecordHead, kv_len: int, kept: int) -> None:
    """Raises BadTensor unless a record is that of the kv_len tokens that came with it, and all is unchanged.

    kept: the most tokens next to a state
    """
    if head.checksum:
        raise BadTensor(
            "the buffer's bytes are not those that export_row() wrote, because their checksum differs; send the buffer "
            "again, with its own extent"
        )
    if head.tokens == 0:
        raise BadTensor(
            f"the buffer holds no state, because the sender's device had none after {kv_len} tokens of the row; send "
            "tokens that a state is there for"
        )
    if head.tokens != kv_len or not 0 <= head.folded <= head.tokens <= head.folded + kept:
        raise BadTensor(
            f"the buffer holds the state after {head.tokens} tokens, {head.folded} of them folded, and the extent has "
            f"{kv_len}; send the buffer and the extent of one export_row()"
        )


def num_record_bytes(states: StatePool) -> int:
    """Returns the bytes of a record: a line, and those of a slot if there are recurrent layers."""
    return _HEAD_BYTES + states.memory.shape[1]


def write_sum(states: StatePool, kv_len: int, buffer: Tensor) -> None:
    """Writes the record of kv_len tokens of a model without recurrent layers, without waiting for the device.

    buffer: as write_record()
    """
    tokens, record = _cut(states, buffer)
    record.zero_()
    record[: _FOLDED + 1].fill_(kv_len)
    record[_CHECK].copy_(-_checksum(record, tokens))


def write_record(states: StatePool, source: StateSource, buffer: Tensor) -> None:
    """Copies a state to the end of a buffer, without waiting for the device. If no slot has it, it says 0 tokens.

    buffer: uint8 [bytes], a multiple of 8; the tokens of the state are in it, and then num_record_bytes()
    """
    found = states.slot_with(source)
    slot, (tokens, record) = found.clamp(min=0), _cut(states, buffer)
    record[:_LINE].zero_()
    record[_TOKENS].copy_(torch.where(found >= 0, source.tokens, 0)[0])
    record[_FOLDED].copy_(states.headers.index_select(0, slot)[0, 2])
    torch.index_select(states.memory, 0, slot, out=_slot_of(record)[None])
    record[_CHECK].copy_(-_checksum(record, tokens))


def read_head(states: StatePool, buffer: Tensor) -> RecordHead:
    """Returns the first line of the record at the end of a buffer. Waits for the device. buffer: as write_record()"""
    tokens, record = _cut(states, buffer)
    return RecordHead(*torch.stack([record[_TOKENS], record[_FOLDED], _checksum(record, tokens)]).tolist())


def read_state(states: StatePool, slot: int, header: Tensor, buffer: Tensor) -> None:
    """Copies the state of a record to the first slot of a row, whose tag no step has had yet.

    header: int32 [4], that of the slot; buffer: as write_record(), after must_be_after() has passed
    """
    _, record = _cut(states, buffer)
    states.memory[slot].copy_(_slot_of(record))
    states.headers[slot].copy_(header)


def _cut(states: StatePool, buffer: Tensor) -> tuple[Tensor, Tensor]:
    """The words of the tokens, and those of the record."""
    words, of_record = buffer.view(torch.int64), num_record_bytes(states) // torch.int64.itemsize
    return words[:-of_record], words[-of_record:]


def _slot_of(record: Tensor) -> Tensor:
    """uint8: the part of a record that a slot is copied to."""
    return record[_LINE:].view(torch.uint8)


def _checksum(record: Tensor, tokens: Tensor) -> Tensor:
    """int64 []: the sum over all lines. The last line of the tokens may be short."""
    whole = len(tokens) // _LINE * _LINE
    parts = record.view(-1, _LINE).sum(1), tokens[:whole].view(-1, _LINE).sum(1), tokens[whole:].sum().reshape(1)
    of_lines = torch.cat(parts)
    return (of_lines * torch.arange(1, 2 * len(of_lines), 2, device=of_lines.device)).sum()
