"""Layouts of latent decode over codes on CDNA: words in memory, operands, scores, and LDS."""

from typing import NamedTuple

from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from rocm_attn.kernels.cdna.latent_blocks import V_DIM, WAVES, CdnaLatentGeometry

_WORDS = V_DIM.value // 4


@constexpr_function
def num_keys(G: CdnaLatentGeometry) -> int:
    """Keys of a block: 32 of each wave that has other keys."""
    return int(G.rows.KEY_BLOCK)


@constexpr_function
def head_tile(G: CdnaLatentGeometry) -> int:
    """Query heads of a wave's scores."""
    return int(min(32, G.HEADS))


@constexpr_function
def score_layout(G: CdnaLatentGeometry) -> gl.constexpr:
    """The layout of scores, [KEYS, HEADS]."""
    tile = head_tile(G)
    depth = 2048 // tile if G.UNITS.VERSION == 4 else 512 // tile
    blocks = G.HEADS // tile
    return gl.amd.AMDMFMALayout(
        G.UNITS.VERSION, [tile, tile, depth], transposed=False, warps_per_cta=[WAVES.value // blocks, blocks]
    )


@constexpr_function
def last_layout(G: CdnaLatentGeometry) -> gl.constexpr:
    """score_layout for products of the last columns, which are fewer than a product of CDNA 4 has for 16 heads."""
    tile = head_tile(G)
    if tile == 32:
        return score_layout(G)
    return gl.amd.AMDMFMALayout(G.UNITS.VERSION, [16, 16, 32], transposed=False, warps_per_cta=[WAVES.value, 1])


@constexpr_function
def _operand_words(shape: list[int], tile: int, waves: list[list[int]]) -> gl.constexpr:
    """Layout of words [rows, words]: a lane has runs of four words of a row, and waves have tiles of rows."""
    in_lanes = tile.bit_length() - 1
    lanes = [[1 << i, 0] for i in range(in_lanes)] + [[0, 4 << i] for i in range(6 - in_lanes)]
    more = [[0, 256 // tile << i] for i in range((shape[1] * tile // 256).bit_length() - 1)]
    if tile == 16 and shape[0] > 64:
        more.append([64, 0])
    return gl.DistributedLinearLayout([[0, 1], [0, 2], *more], lanes, waves, [], shape)


@constexpr_function
def key_words(words: int, G: CdnaLatentGeometry) -> gl.constexpr:
    """Layout of K as it is loaded, [KEYS, words]."""
    tile = head_tile(G)
    waves = [[0, 0], [32, 0]] if G.HEADS == 64 else [[tile, 0], [2 * tile, 0]]
    return _operand_words([num_keys(G), words], tile, waves)


@constexpr_function
def query_words(words: int, G: CdnaLatentGeometry) -> gl.constexpr:
    """Layout of q's codes as waves have them, [HEADS, words]."""
    waves = [[32, 0], [0, 0]] if G.HEADS == 64 else [[0, 0], [0, 0]]
    return _operand_words([G.HEADS, words], head_tile(G), waves)


@constexpr_function
def lane_totals(G: CdnaLatentGeometry) -> gl.constexpr:
    """The layout of each lane's four sums of weights, [lanes, HEADS]."""
    heads = [[0, 1 << i] for i in range(head_tile(G).bit_length() - 1)]
    lanes = [*heads, *([4 << i, 0] for i in range(6 - len(heads)))]
    first = 256 // head_tile(G)
    waves = [[0, 32], [first, 0]] if G.HEADS == 64 else [[first, 0], [2 * first, 0]]
    return gl.DistributedLinearLayout(
        [[1, 0], [2, 0]], lanes, waves, [], [(1024 if G.HEADS < 64 else 512) // head_tile(G), G.HEADS]
    )


@constexpr_function
def value_tile(G: CdnaLatentGeometry) -> int:
    """Query heads of an accumulator."""
    return head_tile(G) if G.V_IN_LDS else 16


@constexpr_function
def value_layout(G: CdnaLatentGeometry) -> gl.constexpr:
    """The layout of an accumulator, [V_DIM, heads]: waves have tiles of rows in turn."""
    tile = value_tile(G)
    depth = 2048 // tile if G.V_IN_LDS else 32
    return gl.amd.AMDMFMALayout(G.UNITS.VERSION, [tile, tile, depth], transposed=False, warps_per_cta=[WAVES.value, 1])


@constexpr_function
def value_depth(G: CdnaLatentGeometry) -> int:
    """Neighbouring keys of a lane in a product with V."""
    return 16 if G.V_IN_LDS else 8


@constexpr_function
def reads_weights_in_order(G: CdnaLatentGeometry) -> bool:
    """True if weights are waited for once for each tile. For 32 heads CDNA 3 has too few registers for that."""
    return bool(G.V_IN_LDS or G.HEADS != 32)


@constexpr_function
def group_keys(G: CdnaLatentGeometry) -> int:
    """Neighbouring keys of V in a lane that lie in one page."""
    return 8 if G.PAGE_SIZE % 8 == 0 else 1


class ValueBits(NamedTuple):
    """The bases of V's words of a block, [KEYS / 64, 8 / GROUP, GROUP, 8, words]: keys 1 and 8 apart, halves, words."""

    inner: list[list[int]]
    outer: list[list[int]]
    half: list[list[int]]
    words: list[list[int]]


@constexpr_function
def _value_bits(G: CdnaLatentGeometry) -> ValueBits:
    return ValueBits(
        inner=[[0, 0, 1 << i, 0, 0] if group_keys(G) == 8 else [0, 1 << i, 0, 0, 0] for i in range(3)],
        outer=[[0, 0, 0, 1 << i, 0] for i in range(3)],
        half=[[1, 0, 0, 0, 0]] * (num_keys(G) // 64 - 1),
        words=[[0, 0, 0, 0, 1 << i] for i in range(7)],
    )


@constexpr_function
def value_words(G: CdnaLatentGeometry) -> gl.constexpr:
    """Layout of V as it is loaded, [KEYS / 64, 8 / GROUP, GROUP, 8, words]: keys 64, 1, 1 and 8 apart."""
    halves, group, (inner, outer, half, words) = num_keys(G) // 64, group_keys(G), _value_bits(G)
    if G.V_IN_LDS:
        registers, lanes = [*words[:2], *inner, *half], [*outer, *words[2:5]]
    else:
        registers, lanes = [words[0], *inner, outer[2], *half], [*words[1:5], *outer[:2]]
    return gl.DistributedLinearLayout(registers, lanes, words[5:], [], [halves, 8 // group, group, 8, _WORDS])


@constexpr_function
def values_in_lds(G: CdnaLatentGeometry) -> gl.constexpr:
    """V in LDS as words, of the shape of value_words: a load's 64 times 16 bytes, of eight keys, lie side by side."""
    inner, outer, half, words = _value_bits(G)
    return gl.SharedLinearLayout([*words[:2], *outer, *words[2:5], *inner, *half, *words[5:]])


@constexpr_function
def value_bytes(G: CdnaLatentGeometry) -> gl.constexpr:
    """V in LDS as codes, [KEYS, V_DIM]: keys in the order of products, columns in that of accumulators."""
    tile = value_tile(G).bit_length() - 1
    keys = [[1 << i, 0] for i in range(num_keys(G).bit_length() - 1)]
    columns = [[0, 1 << i] for i in range(9)]
    waves = columns[tile : tile + 2]
    rest = [*columns[4:tile], *columns[tile + 2 :]]
    return gl.SharedLinearLayout([*columns[:4], *keys[:3], *rest, *keys[3:], *waves])


@constexpr_function
def rows_in_lds(columns: int, pad: int, G: CdnaLatentGeometry) -> gl.constexpr:
    """Codes or words of q, [HEADS, columns]."""
    bits = [[0, 1 << i] for i in range(columns.bit_length() - 1)]
    bits += [[1 << i, 0] for i in range(G.HEADS.bit_length() - 1)]
    return gl.PaddedSharedLayout([[columns, pad]], bits, [], [G.HEADS, columns])


@constexpr_function
def weights_in_lds(G: CdnaLatentGeometry) -> gl.constexpr:
    """The keys of a head side by side."""
    keys = num_keys(G)
    bits = [[1 << i, 0] for i in range(keys.bit_length() - 1)] + [[0, 1 << i] for i in range(G.HEADS.bit_length() - 1)]
    return gl.PaddedSharedLayout([[keys, 16]], bits, [], [keys, G.HEADS])
