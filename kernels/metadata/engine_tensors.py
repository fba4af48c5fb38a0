"""The arguments and outputs of the launches that read an engine's tensors."""

from dataclasses import dataclass

from torch import Tensor

# The forms in which given_q holds the new tokens of a sequence.
Q_EACH_ONE, Q_LENGTHS, Q_BOUNDARIES = 0, 1, 2

# The most cells of a mask of bytes: the kernel that packs them counts in 32 bits, and a little beyond the last one.
MOST_MASK_CELLS = 2**31 - 2**22


@dataclass(frozen=True, slots=True)
class EngineLengths:
    """An engine's own tensors for a step: int32 or int64, any strides, on the device; read only.

    kv_len: [n] or more, tokens, new ones included
    rows:   [n] or more, rows of its table; None: sequence i has row i
    q:      None for Q_EACH_ONE; [n] or more lengths; [n + 1] or more boundaries
    q_form: Q_EACH_ONE, Q_LENGTHS or Q_BOUNDARIES
    """

    kv_len: Tensor
    rows: Tensor | None
    q: Tensor | None
    q_form: int


@dataclass(frozen=True, slots=True, eq=False)
class PublishedLengths:
    """The destinations of a step's counts and lengths: S padded sequences; int32 and contiguous.

    counts:     [4] receives live sequences, their new tokens, step number, error word
    engine_row: [S] receives rows of the engine's table, 0 for pads
    row_of_seq: [S] receives rows of the table that kernels read: the engine's own, or i + 1 of a table that is gathered
                for each step; 0 for pads
    kv_len:     [S] pads receive pad_kv_len
    q_len:      [S] pads receive pad_q_len
    keys_of_cells: [S] receives the lengths by which the engine has laid out its cells, 0 for pads; only with num_cells
    gathered:   whether kernels read a gathered table
    """

    counts: Tensor
    engine_row: Tensor
    row_of_seq: Tensor
    kv_len: Tensor
    q_len: Tensor
    keys_of_cells: Tensor
    pad_kv_len: int
    pad_q_len: int
    gathered: bool


@dataclass(slots=True, eq=False)
class EngineRows:
    """The rows of an engine's table at this time: it may be replaced while bounds and graphs stay.

    num:        number of rows
    named:      int32 [num or more], the number of the step that last stored in each row; before that another number
    csr_indptr: int32 or int64 [num + 1], row -> first entry of its pages in a list of all; None for a table of rows
    """

    num: int
    named: Tensor
    csr_indptr: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LengthBounds:
    """The limits of an engine's lengths.

    rows:       of its table
    kv_len:     most tokens of a sequence
    min_q_len:  fewest new tokens of a sequence that has any
    max_q_len:  most new tokens of a sequence
    num_tokens: T, padded tokens of the step
    page_size:  tokens of a page; used if pages come as lists
    causal:     whether a sequence has no more new tokens than KV
    num_cells:  cells of a mask that there is room for, which fit int32; 0: the step has no cells
    """

    rows: EngineRows
    kv_len: int
    min_q_len: int
    max_q_len: int
    num_tokens: int
    page_size: int
    causal: bool
    num_cells: int = 0


@dataclass(frozen=True, slots=True)
class GatherSource:
    """The places of the pages of an engine's rows: int32 or int64, any strides, on the device; read only.

    entries:    [rows, width] of pages or slots, or [n] pages, row after row, with csr_indptr
    has_slots:  whether entries are slots
    csr_indptr: [rows + 1]; None for a table of rows
    slot_map:   [slots], slot -> slot of the space that is gathered for; None: the same
    """

    entries: Tensor
    has_slots: bool = False
    csr_indptr: Tensor | None = None
    slot_map: Tensor | None = None
