"""Layouts of latent decode on CDNA in waves that share rows: words in memory, operands, scores, and LDS."""

from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from rocm_attn.kernels.cache.codes import is_record
from rocm_attn.kernels.cdna.codes import in_word
from rocm_attn.kernels.cdna.latent_blocks import KEYS, REST, ROWS, V_DIM, WAVES, CdnaLatentGeometry

# Keys and columns of a wave's scores, columns of its accumulator, neighbouring elements of a lane in the last columns.
HALF_KEYS = gl.constexpr(KEYS.value // 2)
HALF = gl.constexpr(V_DIM.value // 2)
QUARTER = gl.constexpr(V_DIM.value // WAVES.value)
LAST_LANE = gl.constexpr(8)
_LANES = [[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 8, 0]]
_WAVES = [[1, 0, 0], [2, 0, 0]]
_LANES_OF_KEYS, _WAVES_OF_HALVES = [[0, 0, 1 << i] for i in range(4)], [[0, 1, 0], [1, 0, 0]]


@constexpr_function
def shares_rows(G: CdnaLatentGeometry) -> bool:
    """True if waves share rows as this file says: with more than ROWS heads."""
    return bool(ROWS.value < G.HEADS)


@constexpr_function
def num_tiles(G: CdnaLatentGeometry) -> int:
    """Tiles of ROWS query heads of a program."""
    return int(G.HEADS // ROWS.value)


@constexpr_function
def has_records(G: CdnaLatentGeometry) -> bool:
    """True if rows are records, whose codes have a scale for each wave's columns of V."""
    return bool(is_record(G.CODING.SCALES))


@constexpr_function
def num_groups(G: CdnaLatentGeometry) -> int:
    """Parts of a wave's half of the columns, each of which has a scale; without scales one."""
    return int(HALF.value // QUARTER.value) if has_records(G) else 1


@constexpr_function
def lane_elements(G: CdnaLatentGeometry) -> int:
    """Neighbouring elements of a key that a lane has: 16 bytes."""
    return int(4 * in_word(G.CODING))


@constexpr_function
def half_scores(G: CdnaLatentGeometry) -> gl.constexpr:
    """The layout of halves of scores, [WAVES, KEYS / 2, ROWS]."""
    depth = 2 * G.UNITS.DEPTH
    return gl.amd.AMDMFMALayout(G.UNITS.VERSION, [16, 16, depth], transposed=False, warps_per_cta=[WAVES.value, 1, 1])


@constexpr_function
def key_words(words: int) -> gl.constexpr:
    """Layout of K as it is loaded: 16 lanes have a key each; four times four words side by side."""
    registers = [[0, 0, 1], [0, 0, 2]]
    more = [[0, 0, 16 << i] for i in range((words // 16).bit_length() - 1)]
    lanes = [*_LANES, [0, 0, 4], [0, 0, 8]]
    shape = [WAVES.value, HALF_KEYS.value, words]
    return gl.DistributedLinearLayout([*registers, *more, [0, 16, 0]], lanes, _WAVES, [], shape)


@constexpr_function
def listed_keys() -> gl.constexpr:
    """The layout of numbers of a block's keys as key_words has them, [2, 2, KEYS / 2]: wave 2 i + j has keys of half
    i."""
    lanes = [*_LANES_OF_KEYS, [0, 0, 0], [0, 0, 0]]
    return gl.DistributedLinearLayout([[0, 0, 16]], lanes, _WAVES_OF_HALVES, [], [2, 2, HALF_KEYS.value])


@constexpr_function
def group_keys(G: CdnaLatentGeometry) -> int:
    """Neighbouring keys of V in a lane that lie in one page."""
    return 8 if G.PAGE_SIZE % 8 == 0 and not G.LISTED else 1


@constexpr_function
def value_words(G: CdnaLatentGeometry) -> gl.constexpr:
    """Layout of V as it is loaded, [WAVES, groups, keys of a group, words]: a lane has eight neighbouring elements of
    each of eight neighbouring keys, twice."""
    group, own = group_keys(G), 8 // in_word(G.CODING)
    keys = [[0, 0, 1 << i, 0] if 1 << i < group else [0, (1 << i) // group, 0, 0] for i in range(6)]
    registers = [*([0, 0, 0, 1 << i] for i in range(own.bit_length() - 1)), *keys[:3], keys[5]]
    lanes = [[0, 0, 0, own << i] for i in range(4)] + keys[3:5]
    shape = [WAVES.value, KEYS.value // group, group, 16 * own]
    return gl.DistributedLinearLayout(registers, lanes, [[1, 0, 0, 0], [2, 0, 0, 0]], [], shape)


@constexpr_function
def query_layout(G: CdnaLatentGeometry) -> gl.constexpr:
    """The layout of q as it is loaded, [WAVES, ROWS, columns of a group]; transposed it is an operand."""
    columns, own = HALF.value // num_groups(G), lane_elements(G)
    bits = [[0, 0, 1 << i] for i in range(columns.bit_length() - 1)]
    first = own.bit_length() - 1
    registers, lanes = bits[:first] + bits[first + 2 :], [*_LANES, *bits[first : first + 2]]
    return gl.DistributedLinearLayout(registers, lanes, _WAVES, [], [WAVES.value, ROWS.value, columns])


@constexpr_function
def last_in_lds(G: CdnaLatentGeometry) -> gl.constexpr:
    """Half of a head's last columns side by side. A row of the tensor is a head in a tile, a half, and then a tile."""
    bits = [[0, 1 << i] for i in range(5)] + [[1 << i, 0] for i in range(G.HEADS.bit_length())]
    return gl.PaddedSharedLayout([[REST.value // 2, 8]], bits, [], [2 * G.HEADS, REST.value // 2])


@constexpr_function
def last_parts() -> gl.constexpr:
    """The layout of the last columns of q of a tile as waves read them, [2, 2 ROWS, REST / 2]: wave 2 i + j has half j
    and both i the same."""
    registers, lanes = [[0, 0, 1], [0, 0, 2], [0, 0, 4]], [*_LANES, [0, 0, 8], [0, 0, 16]]
    shape = [2, 2 * ROWS.value, REST.value // 2]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 16, 0], [1, 0, 0]], [], shape)


@constexpr_function
def weight_layout() -> gl.constexpr:
    """The layout of weights of a tile of heads as waves read them, [WAVES, KEYS, ROWS]: an operand."""
    registers = [[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 32, 0]]
    lanes = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 8, 0], [0, 16, 0]]
    return gl.DistributedLinearLayout(registers, lanes, _WAVES, [], [WAVES.value, KEYS.value, ROWS.value])


@constexpr_function
def _softmax_bits(G: CdnaLatentGeometry) -> tuple[list[int], list[int], list[int]]:
    """Bits of [KEYS, HEADS], key bits before head bits, in the registers, lanes and waves that have a softmax."""
    in_lane = G.HEADS.bit_length() - 3
    keys = list(range(6))
    lanes = [6 + i for i in range(in_lane)] + keys[2 : 8 - in_lane]
    return [0, 1, *keys[8 - in_lane :]], lanes, [6 + in_lane, 7 + in_lane]


@constexpr_function
def _head_bits(G: CdnaLatentGeometry) -> list[list[int]]:
    return [[0, 1 << i] for i in range(G.HEADS.bit_length() - 1)]


@constexpr_function
def softmax_layout(G: CdnaLatentGeometry) -> gl.constexpr:
    """The layout of scores [KEYS, HEADS] in which a wave has all keys of its heads."""
    bits = [[1 << i, 0] for i in range(6)] + _head_bits(G)
    registers, lanes, waves = ([bits[i] for i in each] for each in _softmax_bits(G))
    return gl.DistributedLinearLayout(registers, lanes, waves, [], [KEYS.value, G.HEADS])


@constexpr_function
def halves_layout(G: CdnaLatentGeometry) -> gl.constexpr:
    """The layout of halves of scores as they are read, [tiles * WAVES, KEYS / 2, ROWS]; wave 2 i + j has keys of half i
    and columns of half j."""
    keys = [[0, 1 << i, 0] for i in range(5)] + [[2, 0, 0]]
    bits = [*keys, *([0, 0, 1 << i] for i in range(4)), [4, 0, 0], [8, 0, 0]]
    registers, lanes, waves = ([bits[i] for i in each] for each in _softmax_bits(G))
    shape = [num_tiles(G) * WAVES.value, HALF_KEYS.value, ROWS.value]
    return gl.DistributedLinearLayout([*registers, [1, 0, 0]], lanes, waves, [], shape)


@constexpr_function
def total_layout(G: CdnaLatentGeometry) -> gl.constexpr:
    """The layout of sums of weights, [8, HEADS]: a lane adds up its own keys."""
    bits = [None, None, [1, 0], [2, 0], [4, 0], None, *_head_bits(G)]
    registers, lanes, waves = ([found for i in each if (found := bits[i])] for each in _softmax_bits(G))
    if len(lanes) < 6:
        lanes.append([0, 0])
    return gl.DistributedLinearLayout(registers, lanes, waves, [], [8, G.HEADS])


@constexpr_function
def scores_in_lds(G: CdnaLatentGeometry) -> gl.constexpr:
    """Four neighbouring keys of a head, then heads: a wave stores and loads whole KiB."""
    keys, heads = [[0, 1 << i, 0] for i in range(5)], [[0, 0, 1 << i] for i in range(4)]
    tiles = [[1 << i, 0, 0] for i in range((num_tiles(G) * WAVES.value).bit_length() - 1)]
    return gl.SharedLinearLayout([*keys[:2], *heads, *keys[2:], *tiles])


@constexpr_function
def weights_in_lds(G: CdnaLatentGeometry) -> gl.constexpr:
    """The keys of a head side by side; for records a copy for each wave."""
    bits = [[1 << i, 0] for i in range(6)] + _head_bits(G)
    shape = [KEYS.value, G.HEADS]
    if has_records(G):
        bits, shape = [*([0, *bit] for bit in bits), [1, 0, 0], [2, 0, 0]], [WAVES.value, *shape]
    return gl.PaddedSharedLayout([[KEYS.value, 8]], bits, [], shape)


@constexpr_function
def scale_words() -> gl.constexpr:
    """The layout of a block's scales as they are loaded, [KEYS, WAVES]: a lane has one."""
    return gl.BlockedLayout([1, 1], [16, 4], [WAVES.value, 1], [1, 0])


@constexpr_function
def key_scales() -> gl.constexpr:
    """The layout of the scales of one of two groups as waves score keys with them, [2, 2, KEYS / 2]: of keys of half i
    and columns of half j for wave 2 i + j; like scores, a lane has four neighbouring keys."""
    lanes = [[0, 0, 0]] * 4 + [[0, 0, 4], [0, 0, 8]]
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 16]], lanes, _WAVES_OF_HALVES, [], [2, 2, HALF_KEYS.value]
    )
