"""StepMask, TreeMask, TokenSpans: custom masks, which decide what keys a step's new tokens see.

A bit mask has a cell for each new token and each of its sequence's new keys, and for some keys before them. Cell (t, j)
of sequence i, for its t-th new token and the key at kv_index j >= start[i], is bit c % 8 of byte c // 8 (the lowest bit
first), where

    mask_len[i] = q_len[i] + min(kv_len[i] - q_len[i], keys_before)                 start[i] = kv_len[i] - mask_len[i]
    c = cells of the sequences before i + t * mask_len[i] + j - start[i]            q_len * mask_len cells each

All new tokens see keys without cells. Layers with custom_mask use the mask; the others ignore it. In a layer with a
window, a token sees only those keys of its mask whose kv_index is at least position - window_left.

Spans need no cells: the keys that a token sees are a range, which follows from its layer and its span
(kernels/attention/scores.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rocm_attn.errors import BadBatch, BadTensor
from rocm_attn.kernels.metadata.step_tensors import ALL_KEYS
from rocm_attn.machine.devices import require_tensor
from rocm_attn.machine.settings import whole_number

# The bytes that a launch copies are counted in 32 bits, with room for its last stride.
_MOST_BYTES = 1 << 30
_LAST_KEY = 2**31 - 1
# Keys of a sequence with cells. Kernels count those of a query block, which has at most 128 tokens, in 32 bits; its
# first cell may be any bit of a word.
_MOST_KEYS = (1 << 24) - 1
# Nodes of a tree, whose cells are counted in 32 bits.
_MOST_NODES = 1 << 15


def on_host(name: str, values: object) -> npt.NDArray[Any]:
    """Values as an array, one of objects for lists of unequal lengths. Raises BadBatch for tensors of a GPU."""
    try:
        return np.asarray(values)
    except ValueError:
        return np.asarray(values, np.object_)
    except (TypeError, RuntimeError) as error:  # other tensors that NumPy does not read, such as those of bfloat16
        raise BadBatch(f"{name} cannot be read as integers on the host: {error}") from None


class NoMask:
    """A step without a mask: its tokens see the keys that their layers' problems determine."""

    __slots__ = ()
    device: ClassVar[None] = None

    def __reduce__(self) -> str:
        return "NO_MASK"  # there is one; a copy, pickled or not, is that one


@dataclass(frozen=True, slots=True, eq=False)
class StepMask:
    """A bit mask of a step's new tokens, in tensors of the caller on the runtime's device.

    bits:        uint8 [bytes]       the cells of all sequences, in as many bytes as they take: sequence after sequence,
                 a row of cells for each new token, a cell for each key, without a gap and the lowest bit of a byte
                 first. FlashInfer begins each sequence at a new byte, so its bits are those of another mask from the
                 second sequence on. If lengths are on the device, the layout follows from those, and the size from the
                 batch's bounds
    positions:   int32 [num_tokens]  the values of Part.positions. In a tree a token's position is its depth, not its
                 kv_index; kv_positions() gives the latter. Windows are counted back from them, or from kv_len - q_len
                 if that is more, because older pages were freed. ALiBi uses kv_index
    keys_before: most keys before a sequence's new ones that have cells; all new tokens see the keys before those.
                 ALL_KEYS: each sequence has q_len * kv_len cells

    A kernel on the step's stream reads the tensors in place: they must keep their values until it has run, and may
    change afterwards. Raises BadTensor, BadBatch, and BadSetting for a number that is not whole.
    """

    bits: Tensor
    positions: Tensor
    keys_before: int = ALL_KEYS

    def __post_init__(self) -> None:
        for name, tensor, dtype in (("bits", self.bits, torch.uint8), ("positions", self.positions, torch.int32)):
            require_tensor(f"{name} of a mask", tensor)
            if tensor.dtype != dtype or tensor.dim() != 1 or not tensor.is_contiguous():
                raise BadTensor(
                    f"{name} of a mask is a {tensor.dtype} tensor of shape {list(tensor.shape)} and strides "
                    f"{list(tensor.stride())}; it must be a contiguous vector of {dtype}"
                )
        if self.bits.device != self.positions.device:
            raise BadTensor(
                f"the bits of a mask are on {self.bits.device} and its positions on {self.positions.device}; "
                "give both on one device"
            )
        object.__setattr__(self, "keys_before", whole_number("keys_before of a mask", self.keys_before))
        if not 0 <= self.keys_before <= ALL_KEYS:
            raise BadBatch(
                f"keys_before of a mask is {self.keys_before}; it must be a number of keys from 0 to {ALL_KEYS}, "
                "which means all"
            )

    @property
    def device(self) -> torch.device:
        return self.bits.device

    def num_cells(self, kv_len: npt.NDArray[np.int32], q_len: npt.NDArray[np.int32]) -> int:
        """Number of cells of sequences with these lengths, together."""
        return mask_cells(kv_len, q_len, self.keys_before)

    def check(self, kv_len: npt.NDArray[np.int32], q_len: npt.NDArray[np.int32]) -> None:
        """Refuses a mask of another size than a step of these lengths has. Raises BadBatch."""
        most = int(_keys_with_cells(kv_len, q_len, self.keys_before).max(initial=0))
        if most > _MOST_KEYS:
            raise BadBatch(
                f"{most} keys of a sequence have cells, and at most {_MOST_KEYS} may; lower keys_before of the mask"
            )
        num_bytes, num_tokens = bytes_of_cells(self.num_cells(kv_len, q_len)), int(q_len.sum())
        if num_bytes > _MOST_BYTES:
            raise BadBatch(
                f"the mask of the step takes {num_bytes} bytes and may take at most {_MOST_BYTES}; split the batch"
            )
        if len(self.bits) != num_bytes:  # more bytes are the sign of another layout
            keys = "kv_len" if self.keys_before == ALL_KEYS else f"(q_len + up to {self.keys_before} keys before)"
            raise BadBatch(
                f"the mask has {len(self.bits)} bytes; the sum of q_len * {keys} bits over this step "
                f"takes {num_bytes}; give these, sequence after sequence without a gap"
            )
        if len(self.positions) != num_tokens:
            raise BadBatch(
                f"the mask has {len(self.positions)} positions for {num_tokens} new tokens; give one per token"
            )


@dataclass(frozen=True, slots=True, eq=False)
class TreeMask:
    """The mask of a step whose new tokens are draft trees, one or more per sequence.

    A draft sees the sequence's KV before the step, itself, and its ancestors among the new tokens. Its position is the
    number of tokens before the step plus the number of its ancestors.

    parents: int32 [num_seqs, n] on the runtime's device, rows contiguous, any row stride: for each new token, its
             parent's index among the sequence's new tokens, or NO_PARENT. A parent must come before its children; one
             that does not counts as NO_PARENT, and a later step raises DeviceFault. n is max_q_len or more; entries
             past a sequence's new tokens are not read

    It is read in place, like the tensors of a StepMask. Lengths are the step's, on host or device. Raises BadTensor.
    """

    parents: Tensor

    def __post_init__(self) -> None:
        parents = self.parents
        require_tensor("parents", parents)
        is_matrix = parents.dtype == torch.int32 and parents.dim() == 2
        if not is_matrix or (len(parents) > 0 and parents.shape[1] > 1 and parents.stride(1) != 1):
            raise BadTensor(
                f"parents is {parents.dtype} of shape {list(parents.shape)} and strides {list(parents.stride())}; "
                "it must be torch.int32 of shape [num_seqs, new tokens] with contiguous rows"
            )

    @property
    def device(self) -> torch.device:
        return self.parents.device

    def num_cells(self, kv_len: npt.NDArray[np.int32], q_len: npt.NDArray[np.int32]) -> int:
        return mask_cells(kv_len, q_len, 0)

    def check(self, kv_len: npt.NDArray[np.int32], q_len: npt.NDArray[np.int32]) -> None:
        """Refuses parents that are too few for a step of these lengths. Raises BadBatch."""
        most = int(q_len.max(initial=0))
        if most > _MOST_NODES:
            raise BadBatch(f"a sequence has {most} new tokens in trees; at most {_MOST_NODES} are allowed")
        num_seqs, width = self.parents.shape
        if num_seqs != len(q_len) or width < most:
            raise BadBatch(
                f"parents has shape [{num_seqs}, {width}]; a step of {len(q_len)} sequences with up to {most} new "
                f"tokens needs [{len(q_len)}, {most}] or wider"
            )


@dataclass(frozen=True, slots=True, eq=False, init=False)
class TokenSpans:
    """A mask of spans: tokens of a span attend to each other in both directions, all others as in the layer.

    A span is an image in a prompt, the first tokens of a prefix-LM, or a block of drafts. All of its tokens must be new
    in the same step: tokens of an earlier step have not seen those of this one. Problem.spans_pass_window says whether
    a span overrides a layer's window.

    spans:  int32 [n, 3], read-only: sequence of the step, kv_index of the first token, one past that of the last;
            sorted, without overlaps
    placed: the same, on the runtime's device

    Raises BadBatch.
    """

    spans: npt.NDArray[np.int32]
    placed: Tensor

    def __init__(self, spans: npt.ArrayLike, device: torch.device) -> None:
        given = on_host("spans", spans)
        if given.size == 0:
            given = np.zeros((0, 3), np.int64)
        if given.ndim != 2 or given.shape[1] != 3 or given.dtype.kind not in "iu":
            raise BadBatch(
                f"spans are {given.dtype} of shape {list(given.shape)}; give integers of shape [n, 3]: sequence, first "
                "kv_index, end"
            )
        seq, first, end = given.T
        wrong = (seq < 0) | (first < 0) | (first >= end) | (np.maximum(seq, end) > _LAST_KEY)
        if wrong.any():
            at = int(wrong.argmax())
            raise BadBatch(
                f"span {at} is {given[at].tolist()}; give a sequence of the step, and places with 0 <= first < end"
            )
        late = (seq[1:] < seq[:-1]) | ((seq[1:] == seq[:-1]) & (first[1:] < end[:-1]))
        if late.any():
            at = int(late.argmax())
            raise BadBatch(
                f"span {at + 1} is {given[at + 1].tolist()} and the one before it {given[at].tolist()}; sort spans by "
                "sequence and place, and let none overlap"
            )
        kept = given.astype(np.int32)
        kept.flags.writeable = False
        object.__setattr__(self, "spans", kept)
        object.__setattr__(self, "placed", torch.tensor(kept, device=device))

    @property
    def device(self) -> torch.device:
        return self.placed.device

    def select(self, order: npt.NDArray[np.int_]) -> TokenSpans:
        """The spans of the sequences with these indices, in this order."""
        seq, places = self.spans[:, 0], np.argsort(order)
        at = np.searchsorted(order, seq, sorter=places).clip(max=max(len(order) - 1, 0))
        kept = np.flatnonzero(order[places[at]] == seq) if len(order) else np.arange(0)
        moved = np.column_stack([places[at[kept]], self.spans[kept, 1:]])
        return TokenSpans(moved[np.argsort(moved[:, 0], kind="stable")], self.device)

    def num_cells(self, kv_len: npt.NDArray[np.int32], q_len: npt.NDArray[np.int32]) -> int:
        """0: spans need no cells."""
        return 0

    def check(self, kv_len: npt.NDArray[np.int32], q_len: npt.NDArray[np.int32]) -> None:
        """Refuses spans that are not among the new tokens of a step of these lengths. Raises BadBatch."""
        seq, first, end = self.spans.T
        if len(seq) and seq[-1] >= len(kv_len):
            raise BadBatch(
                f"span {len(seq) - 1} is of sequence {seq[-1]}, and the step has {len(kv_len)}; give sequences of the "
                "step, counted from 0"
            )
        start = (kv_len - q_len)[seq]
        outside = (first < start) | (end > kv_len[seq])
        if outside.any():
            at = int(outside.argmax())
            raise BadBatch(
                f"span {at} is [{first[at]}, {end[at]}) of sequence {seq[at]}, whose new tokens are [{start[at]}, "
                f"{kv_len[seq[at]]}); a span must lie within them, because its tokens see each other: cut prompts "
                "between spans, and leave out spans of earlier and later steps"
            )


def spans_of_blocks(kv_len: npt.ArrayLike, q_len: npt.ArrayLike, block: int, device: torch.device) -> TokenSpans:
    """Returns spans that cut each sequence's new tokens into blocks of `block` tokens; the last one may be shorter.

    For draft models that propose a block of tokens at once.

    Raises BadBatch, and BadSetting for a part of a token.
    """
    block = whole_number("block", block)
    if not 1 <= block <= _LAST_KEY:
        raise BadBatch(f"a block is of {block} tokens; give 1 or more, and at most {_LAST_KEY}")
    kv_len, q_len = on_host("kv_len", kv_len), on_host("q_len", q_len)
    are_whole = {kv_len.dtype.kind, q_len.dtype.kind} <= {"i", "u"} or kv_len.size == 0
    if not are_whole or kv_len.shape != q_len.shape or kv_len.ndim != 1 or ((q_len < 0) | (q_len > kv_len)).any():
        raise BadBatch(
            f"kv_len is {kv_len.tolist()} and q_len {q_len.tolist()}; give whole numbers, one of each per sequence, "
            "and 0 <= q_len <= kv_len"
        )
    kv_len, q_len = kv_len.astype(np.int64), q_len.astype(np.int64)  # unsigned ones have no negatives
    counts = -(-q_len // block)
    seq = np.repeat(np.arange(len(q_len)), counts)
    number = np.arange(len(seq)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = (kv_len - q_len)[seq] + number * block
    return TokenSpans(np.stack([seq, first, np.minimum(first + block, kv_len[seq])], 1), device)


Mask = NoMask | StepMask | TreeMask | TokenSpans
NO_MASK = NoMask()


def mask_cells(kv_len: npt.NDArray[np.int32], q_len: npt.NDArray[np.int32], keys_before: int) -> int:
    """Cells that sequences with these lengths have together."""
    return int(np.dot(q_len.astype(np.int64), _keys_with_cells(kv_len, q_len, keys_before)))


def _keys_with_cells(
    kv_len: npt.NDArray[np.int32], q_len: npt.NDArray[np.int32], keys_before: int
) -> npt.NDArray[np.int64]:
    """The keys of each sequence that have cells."""
    new = q_len.astype(np.int64)
    keys: npt.NDArray[np.int64] = new + np.minimum(kv_len - new, keys_before)
    return keys


def bytes_of_cells(num_cells: int) -> int:
    """Bytes that num_cells cells take."""
    return -(-num_cells // 8)


def kv_positions(kv_len: npt.NDArray[np.int32], q_len: npt.NDArray[np.int32], device: torch.device) -> Tensor:
    """int32 [num_tokens]: each new token's place in its sequence's KV."""
    ends = np.cumsum(q_len)
    first = np.repeat(kv_len - ends, q_len)
    return torch.from_numpy((first + np.arange(int(q_len.sum()))).astype(np.int32)).to(device)


def random_mask(
    kv_len: npt.NDArray[np.int32],
    q_len: npt.NDArray[np.int32],
    generator: torch.Generator,
    keys_before: int = ALL_KEYS,
) -> StepMask:
    """A mask of random bits, for probes and tests; on the generator's device, with positions by place."""
    device = generator.device
    num_bytes = bytes_of_cells(mask_cells(kv_len, q_len, keys_before))
    bits = torch.randint(256, (num_bytes,), generator=generator, device=device, dtype=torch.uint8)
    return StepMask(bits, kv_positions(kv_len, q_len, device), keys_before)


def random_trees(q_len: npt.NDArray[np.int32], generator: torch.Generator) -> TreeMask:
    """Trees whose drafts have random parents, for probes; on the generator's device."""
    width = max(1, int(q_len.max(initial=0)))
    drawn = torch.rand(len(q_len), width, generator=generator, device=generator.device)
    place = torch.arange(width, device=generator.device)
    return TreeMask((drawn * (place + 1)).int() - 1)
