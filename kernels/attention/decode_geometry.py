"""The values that paged decode is compiled for, and the condition for giving every row a program of its own."""

from typing import NamedTuple

from rocm_attn.kernels.attention.cuts import GroupShape, RowCut
from rocm_attn.kernels.attention.scores import UNLIMITED_WINDOW
from rocm_attn.kernels.cache.page_format import Coding

# Windows of fewer keys are not handed out and merged: that would cost as much as reading them.
_FEW_KEYS = 256
# The largest head whose windows are read so: with larger ones gfx950 spills scalar registers with a cap.
_LARGEST_DIM = 128
# The share of the programs, over all rounds that the rows take, that must have a row.
_EVENLY = 0.9


class DecodeGeometry(NamedTuple):
    """The values that decode is compiled for.

    rows:                 how a sequence is cut into rows
    HEAD_DIM, V_HEAD_DIM: elements of a K row and of a V row of one KV head
    K_COLUMNS, V_COLUMNS: columns of a block of K and of a block of V: the KV heads of a row next to each other, then
                          padding; or blocks of this many columns, the last one as K_TAIL and V_TAIL say
    K_PARTS, V_PARTS:     blocks of columns of a row of K and of V
    K_TAIL, V_TAIL:       columns of the last of them if it is read by offsets of its own; else 0
    QUERY_ROWS:           rows of the q block, a query head each, then padding
    PAGE_SIZE:            tokens of a page
    SAME_OFFSETS:         whether K and V of a token lie at the same place of their pages
    IN_ONE_PAGE:          whether the keys of a block lie in one page (key_rows.py)
    TRANSPOSED:           whether scores are computed as k q^T
    PAIRED:               whether codes of K and of V are read in pairs
    WHOLE_ROWS:           whether every row has a program of its own
    EARLY:                whether launches may begin while the one before still runs
    CAPPED:               whether scores have a cap
    STAGES:               key blocks whose loads are in flight
    coding:               how elements of pages are encoded
    STRIDE_UNIT:          elements that strides of q, pages and out are counted in
    FIRST_SLOT:           slots before it belong to no sequence; of launches that store new rows
    merge:                how parts of a row are added up within the launch, if they are
    """

    rows: RowCut
    HEAD_DIM: int
    V_HEAD_DIM: int
    K_COLUMNS: int
    V_COLUMNS: int
    K_PARTS: int
    V_PARTS: int
    K_TAIL: int
    V_TAIL: int
    QUERY_ROWS: int
    PAGE_SIZE: int
    SAME_OFFSETS: bool
    IN_ONE_PAGE: bool
    TRANSPOSED: bool
    PAIRED: bool
    WHOLE_ROWS: bool
    EARLY: bool
    CAPPED: bool
    STAGES: int
    coding: Coding
    STRIDE_UNIT: int
    FIRST_SLOT: int
    merge: GroupShape


def has_whole_rows(num_rows: int, *, num_programs: int, window_left: int, head_dim: int) -> bool:
    """True if every row of a window has a program of its own.

    Rows of a window are equally long. So there is nothing to balance if they are short, or if they fill the
    num_programs that run at a time evenly, and merging would cost more than it gains. On an H200 gptoss 64 x 32k takes
    10.0 us so and 14.9 shared out with a window of 128, and 38.4 and 41.4 with one of 1024; but 1 x 32k 18.1 and 7.1.
    """
    if window_left == UNLIMITED_WINDOW or head_dim > _LARGEST_DIM:
        return False
    places = -(-num_rows // num_programs) * num_programs
    return window_left < _FEW_KEYS or num_rows >= _EVENLY * places
