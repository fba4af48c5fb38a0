"""Layouts of decode on CDNA: keys, values and queries as they are loaded, and results of products."""

from typing import NamedTuple

from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from rocm_attn.kernels.attention.cuts import RowCut
from rocm_attn.kernels.cache.codes import is_coded
from rocm_attn.kernels.cache.page_format import Coding
from rocm_attn.kernels.cdna.codes import in_word
from rocm_attn.kernels.tuning import cdna_tiles

CHUNK = gl.constexpr(cdna_tiles.CHUNK)
ROWS = gl.constexpr(cdna_tiles.ROWS)


class CdnaGeometry(NamedTuple):
    """The values that the kernel is compiled for.

    rows:       how a sequence is cut into rows
    CDNA:       3 or 4
    HEAD_DIM:   elements of a row of K and of V of one KV head
    COLUMNS:    of a row of work: its KV heads' elements side by side, 128 or 256
    PAGE_SIZE:  tokens of a page, a multiple of CHUNK
    CHUNKS:     chunks of a block
    SAME_OFFSETS: whether K and V of a token lie at the same place of their pages: takes fewer scalar registers
    WHOLE_ROWS: whether every row has a program of its own
    CAPPED:     whether scores have a cap
    CODING:     of K and V: elements in q's dtype, or the codes that the arch's hardware reads, in 128 columns
    """

    rows: RowCut
    CDNA: int
    HEAD_DIM: int
    COLUMNS: int
    PAGE_SIZE: int
    CHUNKS: int
    SAME_OFFSETS: bool
    WHOLE_ROWS: bool
    CAPPED: bool
    CODING: Coding


@constexpr_function
def depth(G: CdnaGeometry) -> int:
    """Columns of K, or keys of V, that one product takes."""
    return 16 if G.CDNA == 3 and not is_coded(G.CODING.ENCODING) else 32


@constexpr_function
def product_layout(G: CdnaGeometry) -> gl.constexpr:
    """The layout of the result of a product: a lane has a column, and four rows in turn."""
    shape = [16, 16, depth(G)]
    return gl.amd.AMDMFMALayout(version=G.CDNA, instr_shape=shape, transposed=False, warps_per_cta=[1, 1])


@constexpr_function
def key_elements(G: CdnaGeometry) -> int:
    """Neighbouring elements of a key that a lane has: 16 bytes."""
    return 16 if is_coded(G.CODING.ENCODING) else 8


@constexpr_function
def key_words(G: CdnaGeometry) -> gl.constexpr:
    """Layout of K as it is loaded: 16 lanes have a key each; four times four words side by side make 64 bytes."""
    words = G.COLUMNS // in_word(G.CODING)
    more = [[0, 16 << i] for i in range((words // 16).bit_length() - 1)]
    lanes = [[1, 0], [2, 0], [4, 0], [8, 0], [0, 4], [0, 8]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], *more], lanes, [], [], [16, words])


@constexpr_function
def value_words(G: CdnaGeometry) -> gl.constexpr:
    """Layout of V as it is loaded: 16 lanes have 128 elements of a key, and each lane those of four keys in turn."""
    lane, words = 8 // in_word(G.CODING), G.COLUMNS // in_word(G.CODING)
    own = [[0, 1 << i] for i in range(lane.bit_length() - 1)]
    more = [[0, 16 * lane << i] for i in range((G.COLUMNS // 128).bit_length() - 1)]
    lanes = [[0, lane], [0, 2 * lane], [0, 4 * lane], [0, 8 * lane], [4, 0], [8, 0]]
    return gl.DistributedLinearLayout([*own, [1, 0], [2, 0], *more], lanes, [], [], [16, words])


@constexpr_function
def query_layout(G: CdnaGeometry) -> gl.constexpr:
    """The layout of q as it is loaded, [ROWS, COLUMNS]; transposed it is an operand."""
    lane = key_elements(G)
    own = [[0, 1 << i] for i in range(lane.bit_length() - 1)]
    more = [[0, 4 * lane << i] for i in range((G.COLUMNS // (4 * lane)).bit_length() - 1)]
    lanes = [[1, 0], [2, 0], [4, 0], [8, 0], [0, lane], [0, 2 * lane]]
    return gl.DistributedLinearLayout([*own, *more], lanes, [], [], [16, G.COLUMNS])
