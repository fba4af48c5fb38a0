"""ExternalStep: one step of an engine, described by the engine's own tensors of lengths, table rows and masks."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.errors import BadBatch, BadTensor
from rocm_attn.kernels.metadata.engine_tensors import (
    MOST_MASK_CELLS,
    Q_BOUNDARIES,
    Q_EACH_ONE,
    Q_LENGTHS,
    EngineLengths,
)
from rocm_attn.machine.devices import require_tensor
from rocm_attn.machine.settings import check_fields

_INTEGERS = (torch.int32, torch.int64)


class Causality(enum.Enum):
    """The keys that a step's tokens see: earlier ones (causal), later ones too, or as each layer's problem says."""

    OF_LAYERS = "as its layers' problems say"
    CAUSAL = "they see themselves and what comes before"
    NOT_CAUSAL = "they see all of their sequence's KV, or a window's keys on both sides"


@dataclass(frozen=True, slots=True)
class OneEach:
    """One new token in each sequence, as in decode; the engine's padded sequences have one too."""


ONE_EACH = OneEach()


@dataclass(frozen=True, slots=True)
class NewLengths:
    """The numbers of new tokens of sequences. of_seq: int32 or int64 [num_seqs or more], any stride, on the device"""

    of_seq: Tensor


@dataclass(frozen=True, slots=True)
class Boundaries:
    """The indptr of the step's new tokens (cu_seqlens_q).

    of_seq: int32 or int64 [num_seqs + 1 or more], any stride, on the device: each sequence's first new token, then the
            end of the last; of_seq[0] is 0
    """

    of_seq: Tensor


@dataclass(frozen=True, slots=True)
class NoCells:
    """A step without a mask."""


NO_CELLS = NoCells()


@dataclass(frozen=True, slots=True)
class BoolCells:
    """A boolean mask: for each new token, which keys of its sequence's KV it sees.

    cells:     bool or uint8 [n], contiguous, on the device: the [q_len, kv_len] mask of each sequence, concatenated;
               n is below 2^31
    positions: int32 or int64 [num_tokens or more], any stride, on the device; each token's position, for windows
    """

    cells: Tensor
    positions: Tensor

    def __post_init__(self) -> None:
        require_tensor("cells of a mask", self.cells)
        if self.cells.dtype not in (torch.bool, torch.uint8) or self.cells.dim() != 1 or not self.cells.is_contiguous():
            raise BadTensor(
                f"mask cells are {self.cells.dtype} {list(self.cells.shape)}; they must be bool or uint8, in one row"
            )
        if self.cells.numel() > MOST_MASK_CELLS:
            raise BadTensor(
                f"a mask has {self.cells.numel()} cells, and at most {MOST_MASK_CELLS} can be packed; give steps "
                "fewer tokens, or shorter sequences"
            )
        _check("positions", self.positions, 0)


@dataclass(frozen=True, slots=True)
class DeviceSpans:
    """A mask of spans: tokens of a span attend to each other in both directions, all others as in the layer.

    Problem.spans_pass_window says whether a span overrides a layer's window. Such a layer reads the whole span, so the
    table must still have the span's pages before the window. If one of them is no page of the pool, or page 0 in a
    table with null_page, the sequence becomes padding, and PAGE_NOT_IN_POOL is reported. An entry with the id of a
    freed page is not detected. begin() reads the spans on the current stream, also for a captured step.

    of_step: int32 [n, 3], contiguous, on the device: sequence of the step, kv_index of the span's first token, one past
             that of its last. A row with a sequence that is not in the step is ignored. A span may begin before the
             new tokens of its sequence, if the earlier ones have seen all of it. Its end is clipped to that of the
             sequence. Two spans with a new token in common are reported as a fault: that token sees both
    """

    of_step: Tensor

    def __post_init__(self) -> None:
        spans = self.of_step
        require_tensor("spans", spans)
        if spans.dtype != torch.int32 or spans.dim() != 2 or spans.shape[1] != 3 or not spans.is_contiguous():
            raise BadTensor(
                f"spans are {spans.dtype} of shape {list(spans.shape)} and strides {list(spans.stride())}; they must "
                "be contiguous int32 [n, 3]: sequence, first kv_index, end"
            )


EngineMask = NoCells | BoolCells | DeviceSpans


@dataclass(frozen=True, slots=True)
class ExternalStep:
    """One step: shape and bounds on the host, the rest in the engine's tensors, which are read on the current stream.

    num_seqs:      entries of the engine's tensors that are used; later ones are not read. In causal attention, entries
                   with kv_len 0 are padding, and must come last
    padded_seqs:   sequences that the step is padded to
    padded_tokens: rows of q, k, v and out
    kv_len:        int32 or int64 [num_seqs or more], any stride, on the device; new tokens included
    q:             the new tokens of each sequence
    rows:          int32 or int64 [num_seqs or more], any stride, on the device; rows of the engine's tables. None:
                   sequence i has row i
    min_q_len, max_q_len: fewest and most new tokens of a sequence that has any; ONE_EACH alone says that each has one
    max_kv_len:    most tokens of a sequence
    captured:      True if the engine captures or replays the step. A replay must have the same shape, type of q,
                   min_q_len, max_q_len, type of mask and causality as the capture; max_kv_len is ignored
    mask:          the keys that tokens see, in layers with custom_mask
    causality:     for all layers of the step

    A sequence with lengths beyond the bounds becomes padding, and is reported as a fault. Raises BadBatch, BadTensor.
    """

    num_seqs: int
    padded_seqs: int
    padded_tokens: int
    kv_len: Tensor
    q: OneEach | NewLengths | Boundaries
    rows: Tensor | None
    min_q_len: int
    max_q_len: int
    max_kv_len: int
    captured: bool = False
    mask: EngineMask = NO_CELLS
    causality: Causality = Causality.OF_LAYERS
    shape: PaddedShape = field(init=False)
    lengths: EngineLengths = field(init=False)

    @classmethod
    def decode(
        cls, kv_len: Tensor, *, num_seqs: int, max_kv_len: int, rows: Tensor | None = None, captured: bool = False
    ) -> ExternalStep:
        """A decode step: one new token in each sequence, padded to len(kv_len) sequences.

        rows: if not given, sequence i has row i
        """
        padded = _num_entries(kv_len)
        return cls(num_seqs, padded, padded, kv_len, ONE_EACH, rows, 1, 1, max_kv_len, captured)

    @classmethod
    def extend(
        cls,
        q_indptr: Tensor,
        kv_len: Tensor,
        *,
        num_tokens: int,
        max_q_len: int,
        max_kv_len: int,
        num_seqs: int | None = None,
        rows: Tensor | None = None,
        captured: bool = False,
    ) -> ExternalStep:
        """An extend step (prefill, mixed, verify): any number of new tokens, padded to len(kv_len) sequences.

        q_indptr:   see Boundaries (cu_seqlens_q)
        num_tokens: rows of q, padding included; without padding q_indptr[-1]
        num_seqs:   default: all entries of kv_len are used
        rows:       if not given, sequence i has row i
        """
        padded = _num_entries(kv_len)
        num_seqs = padded if num_seqs is None else num_seqs
        return cls(num_seqs, padded, num_tokens, kv_len, Boundaries(q_indptr), rows, 1, max_q_len, max_kv_len, captured)

    def __post_init__(self) -> None:
        # One expression if all is well, because each step of an engine makes one.
        if not (
            type(self.num_seqs) is type(self.padded_seqs) is type(self.padded_tokens) is type(self.max_kv_len) is int
            and type(self.min_q_len) is type(self.max_q_len) is int
            and isinstance(self.q, _KINDS["q"])
            and isinstance(self.mask, _KINDS["mask"])
            and type(self.causality) is Causality
            and type(self.captured) is bool
        ):
            self._require_kinds()
        if not 0 <= self.num_seqs <= self.padded_seqs or self.padded_seqs < 1 or self.padded_tokens < 1:
            raise BadBatch(
                f"{self.num_seqs} sequences are padded to {self.padded_seqs}, with {self.padded_tokens} padded "
                "tokens; pad to at least as many sequences as the step has, and to at least 1 sequence and 1 token"
            )
        if not 0 <= self.min_q_len <= self.max_q_len or self.max_q_len < 1 or self.max_kv_len < 0:
            raise BadBatch(
                f"min_q_len is {self.min_q_len}, max_q_len {self.max_q_len} and max_kv_len {self.max_kv_len}; give "
                "0 <= min_q_len <= max_q_len, max_q_len of at least 1, and max_kv_len of at least 0"
            )
        if not isinstance(self.mask, NoCells):
            kind = StepKind.MASKED
        elif isinstance(self.q, OneEach):
            kind = StepKind.DECODE
        else:
            kind = StepKind.EXTEND if self.min_q_len > 1 else StepKind.MIXED
        if kind is StepKind.DECODE and self.padded_tokens != self.padded_seqs:
            raise BadBatch(
                f"{self.padded_seqs} padded sequences with one new token each have {self.padded_tokens} padded "
                "tokens; give as many tokens as sequences"
            )
        _check("kv_len", self.kv_len, self.num_seqs)
        if self.rows is not None:
            _check("rows", self.rows, self.num_seqs)
        if isinstance(self.q, OneEach):
            lengths = EngineLengths(self.kv_len, self.rows, None, Q_EACH_ONE)
        else:
            form, more = (Q_LENGTHS, 0) if isinstance(self.q, NewLengths) else (Q_BOUNDARIES, 1)
            _check("q", self.q.of_seq, self.num_seqs + more)
            lengths = EngineLengths(self.kv_len, self.rows, self.q.of_seq, form)
        object.__setattr__(self, "shape", PaddedShape(kind, self.padded_seqs, self.padded_tokens))
        object.__setattr__(self, "lengths", lengths)

    def _require_kinds(self) -> None:
        """Turns other whole numbers, such as NumPy's, into ints. Raises BadBatch for values of another kind."""
        for name, kinds in _KINDS.items():
            if not isinstance(value := getattr(self, name), kinds):
                words = " or ".join(kind.__name__ for kind in kinds)
                raise BadBatch(f"{name} of a step is a {type(value).__name__}; it must be {words}")
        check_fields(self, BadBatch, " of a step")


# Fields of a step that are no numbers -> the kinds of values that they may have.
_KINDS: Mapping[str, tuple[type, ...]] = {
    "q": (OneEach, NewLengths, Boundaries),
    "mask": (NoCells, BoolCells, DeviceSpans),
    "causality": (Causality,),
    "captured": (bool,),
}


def _num_entries(kv_len: Tensor) -> int:
    """The sequences that a step is padded to. Raises BadTensor."""
    if not isinstance(kv_len, Tensor) or kv_len.dim() != 1:
        _check("kv_len", kv_len, 1)
    return kv_len.shape[0]


def _check(name: str, tensor: Tensor, at_least: int) -> None:
    require_tensor(name, tensor)
    if tensor.dim() != 1 or tensor.dtype not in _INTEGERS or tensor.shape[0] < max(1, at_least):
        raise BadTensor(
            f"{name} is {tensor.dtype} {list(tensor.shape)}; it must be int32 or int64 in one dimension, "
            f"with at least {max(1, at_least)} elements"
        )
