"""The product of rows with the matrices of their experts for Hopper, in Gluon: experts/product.py's results.

All rows may have one matrix: that is a layer of one expert, in which nothing has to be looked up.

A program has two consumers, groups of four warps, and four warps that load for them: one thread loads rows of a matrix
by TMA, and rows of x too if they lie by expert. Otherwise all of them copy each pair's row, 16 bytes per lane, from
wherever it lies. Both pass through one ring in shared memory, which runs on from block to block: the first steps of the
next block arrive while results are written.

Each consumer has 64 pairs of a block with all columns. An expert's last block may have up to 64 more, as many as the
consumers' registers hold, in place of a block of their own, which takes almost twice as long: each consumer has half of
the columns of these. A consumer without a pair multiplies nothing.

There are as many programs as run at a time, and each takes the next block when it has loaded one: experts' blocks have
different numbers of pairs. Programs that run next to each other have the same rows or the same columns, which then come
from the L2 cache. The warps that load find the expert of a block while the consumers multiply the one before, and pass
it on in shared memory.

Sums are in the order of experts/product.py and of model/few_rows.py: the bits are the same where the first one uses the
same matrix instructions, and where the second one has one part.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import constexpr_function

from rocm_attn.kernels.early import early_options, starts_early, wait_for_launch
from rocm_attn.kernels.experts.arguments import ProductArgs
from rocm_attn.kernels.hopper.warp_groups import leave
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.model.gate import GateForm, gated
from rocm_attn.kernels.tuning.tiles import next_power_of_2

_GROUP_ROWS = gl.constexpr(64)
# Elements of x that are multiplied at a time.
_STEP = gl.constexpr(64)
_LOADING_THREADS = gl.constexpr(128)
_CONSUMERS = gl.constexpr(2)
_BLOCK_ROWS = gl.constexpr(_CONSUMERS.value * _GROUP_ROWS.value)


class BlockSize(NamedTuple):
    """Rows of the matrix in a block, groups of 64 pairs, and steps that shared memory has room for.

    The copies of all steps but one are under way.
    """

    columns: int
    groups: int
    stages: int


_WIDE, _HALF, _QUARTER = BlockSize(256, 2, 4), BlockSize(128, 2, 6), BlockSize(64, 2, 8)
_TALL = BlockSize(256, 3, 4)
BLOCK_SIZES = (_WIDE, _HALF, _QUARTER, _TALL)
# Blocks of each processor, from which on it does not matter that one takes longer.
_SEVERAL = 4
# Columns that take as long as a block's rows of x. Half as many and twice as many give these steps the same time.
_COLUMNS_OF_ROWS = 48
# Blocks whose numbers shared memory has room for: the warps that load are at most as many blocks ahead as it has steps.
_SLOTS = gl.constexpr(16)
# Blocks of an expert that are multiplied with the same columns before others are: their rows of x stay in the L2 cache,
# and a matrix is read once for all of them.
_PANEL = gl.constexpr(16)
_CONSUMER_REGISTERS, _LOADER_REGISTERS = gl.constexpr(224), gl.constexpr(56)
# Lanes of eight elements: a warp has 128 bytes of four rows.
_COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
# One number, which all lanes have.
_ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
_BOX = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=3))


@constexpr_function
def _products_layout(columns):
    """The layout of the products of 64 rows."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@constexpr_function
def _lanes_layout(columns, lanes, registers):
    """A layout like that of the products, but for the columns of two bits of the lanes and of two of the registers."""
    blocks = [[0, 1 << bit] for bit in range(5, columns.bit_length() - 1)]
    low, high = registers
    return gl.DistributedLinearLayout(
        [[0, 1], [0, low], [0, high], [8, 0], *blocks],
        [[0, lanes[0]], [0, lanes[1]], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [_GROUP_ROWS.value, columns],
    )


@gluon.jit
def _in_lines(values):
    """Products, which lie in pairs of columns, in a layout in which four lanes have 64 bytes of a row.

    Each of the two steps exchanges values of two lanes, which takes no shared memory.
    """
    COLUMNS: gl.constexpr = values.shape[1]
    values = gl.convert_layout(values, _lanes_layout(COLUMNS, (8, 4), (2, 16)))
    return gl.convert_layout(values, _lanes_layout(COLUMNS, (8, 16), (2, 4)))


class HopperProductGeometry(NamedTuple):
    """The values that the product is compiled for.

    EXPERTS, EXPERTS_BLOCK: experts, and a power of 2, at least 32 and the number of all but the last one
    IN, OUT:                elements of a row of x and of out
    BY_EXPERT:              whether rows of x lie by expert
    COLUMNS, GROUPS:        rows of the matrix in a block, and groups of 64 pairs, at most
    STAGES:                 steps that shared memory has room for
    EARLY:                  whether it starts early (early.py)
    GATE:                   how a row's two halves are combined; None if it has one
    """

    EXPERTS: int
    EXPERTS_BLOCK: int
    IN: int
    OUT: int
    BY_EXPERT: bool
    COLUMNS: int
    GROUPS: int
    STAGES: int
    EARLY: bool
    GATE: GateForm | None


class _Room(NamedTuple):
    """Shared memory: rows of x and of matrices, by stages; barriers of stages that are loaded, and of those read; four
    numbers of each of the latest blocks.
    """

    x: Any
    weight: Any
    full: Any
    free: Any
    blocks: Any


class _Rows(NamedTuple):
    """The rows that are loaded: boxes of x, or its first element, with a row for each pair and elements from row to
    row; and boxes of matrices.
    """

    x: Any
    source: Any
    x_row: Any
    weight: Any


class _Outputs(NamedTuple):
    """The rows that are written, with elements from row to row, and a bias."""

    out: Any
    out_row: Any
    bias: Any


class _Pairs(NamedTuple):
    """The pairs by expert (ExpertGroups), which are not read if there is one expert; their number; programs."""

    indptr: Any
    drawn: Any
    num: Any
    num_programs: Any


class _Block(NamedTuple):
    """A block: an expert, the first pair, the end of the block's pairs, and the first column of out.

    expert: EXPERTS stands for the end
    """

    expert: Any
    first: Any
    end: Any
    column: Any


@gluon.jit
def _add(left, right):
    return left + right


@gluon.jit
def _block_ends(pairs, G: gl.constexpr):
    """The number of the first block after each expert's except the last one's; 0 if there is one expert."""
    if G.EXPERTS == 1:
        until = 0
    else:
        each = gl.arange(0, G.EXPERTS_BLOCK, layout=gl.BlockedLayout([G.EXPERTS_BLOCK // 32], [32], [4], [0]))
        is_expert = each < G.EXPERTS - 1
        begins = gl.load(pairs.indptr + each, mask=is_expert, other=0).to(gl.int32)
        ends = gl.load(pairs.indptr + each + 1, mask=is_expert, other=0).to(gl.int32)
        until = gl.associative_scan(_row_blocks(ends - begins, G) * _column_blocks(G), 0, _add)
    return until


@gluon.jit
def _pairs_of(expert, pairs, G: gl.constexpr):
    """An expert's first pair, and the one after its last."""
    if G.EXPERTS == 1:
        first, end = 0, pairs.num
    else:
        first = gl.load(pairs.indptr + expert).to(gl.int32)
        end = gl.load(pairs.indptr + expert + 1).to(gl.int32)
    return first, end


@gluon.jit
def _row_blocks(num_pairs, G: gl.constexpr):
    """Blocks of an expert's pairs. The last one has those beyond the full ones before it, if it has room for them."""
    ROOM: gl.constexpr = (G.GROUPS - _CONSUMERS) * _GROUP_ROWS
    return gl.maximum((num_pairs + (_BLOCK_ROWS - 1 - ROOM)) // _BLOCK_ROWS, gl.minimum(num_pairs, 1))


@gluon.jit
def _column_blocks(G: gl.constexpr):
    return (G.OUT + _outputs(G) - 1) // _outputs(G)


@gluon.jit
def _outputs(G: gl.constexpr):
    """Columns of out in a block."""
    return G.COLUMNS if G.GATE is None else G.COLUMNS // 2


@gluon.jit
def _next_number(number, num_blocks, pairs, G: gl.constexpr):
    """The number of the block after one that the program has taken.

    With one expert blocks are equal. Otherwise each is drawn; the last draw, one for each block, sets the count back.
    """
    if G.EXPERTS == 1:
        following = number + pairs.num_programs
    else:
        drawn = gl.atomic_add(pairs.drawn, 1, sem="relaxed")
        gl.store(pairs.drawn, 0, mask=drawn == num_blocks - 1)
        following = drawn + pairs.num_programs
    return following


@gluon.jit
def _block_of(number, until, pairs, G: gl.constexpr):
    """The block with a number."""
    column_blocks = _column_blocks(G)
    if G.EXPERTS == 1:
        expert, within = 0, number
    else:
        each = gl.arange(0, G.EXPERTS_BLOCK, layout=until.type.layout)
        is_before = (until <= number) & (each < G.EXPERTS - 1)
        expert = gl.sum(is_before.to(gl.int32), 0)
        within = number - gl.max(gl.where(is_before, until, 0), 0)
    first, end = _pairs_of(expert, pairs, G)
    row_blocks = _row_blocks(end - first, G)
    panel = within // (_PANEL * column_blocks) * _PANEL
    within -= panel * column_blocks
    blocks = gl.minimum(row_blocks - panel, _PANEL)
    row_block = panel + within % blocks
    first += row_block * _BLOCK_ROWS
    end = gl.where(row_block + 1 < row_blocks, first + _BLOCK_ROWS, end)
    return _Block(expert, first, end, within // blocks * _outputs(G))


@gluon.jit
def _pass_on(block, turn, room, G: gl.constexpr):
    """Writes the block of a turn for the consumers. The next stage that is loaded shows that it is there."""
    slot = turn % _SLOTS * 4
    numbers = (block.expert, block.first, block.end, block.column // _outputs(G))
    for i in gl.static_range(4):
        room.blocks.index(slot + i).store(gl.full([1], numbers[i], gl.int32, _ONE))
    gl.thread_barrier()


@gluon.jit
def _number(room, at):
    return gl.max(room.blocks.index(at).load(_ONE), 0)


@gluon.jit
def _passed_on(turn, n, room, G: gl.constexpr):
    """The block of a turn, whose first step is the n-th."""
    mbarrier.wait(room.full.index(n % G.STAGES), (n // G.STAGES) & 1)
    slot = turn % _SLOTS * 4
    expert, first, end = _number(room, slot), _number(room, slot + 1), _number(room, slot + 2)
    # The compiler stores 16 bytes at a time, as it sees what the first column is a multiple of.
    return _Block(expert, first, end, _number(room, slot + 3) * _outputs(G))


@gluon.jit
def _rows_of(block, source, G: gl.constexpr):
    """Returns where each group's rows of x begin, and which of them have a pair: [64, 1] of each group.

    There are none if rows lie by expert.
    """
    COPIED: gl.constexpr = 0 if G.BY_EXPERT else G.GROUPS
    begins = ()
    is_pair = ()
    for group in gl.static_range(COPIED):
        pair = block.first + group * _GROUP_ROWS + gl.arange(0, _GROUP_ROWS, layout=gl.SliceLayout(1, _COPIED))
        row = gl.load(source.source + pair, mask=pair < block.end, other=0)
        begins += (gl.expand_dims(source.x + row * source.x_row, 1),)  # type: ignore[assignment]
        is_pair += (gl.expand_dims(pair < block.end, 1),)  # type: ignore[assignment]
    return begins, is_pair


@gluon.jit
def _load_boxes(block, stage, first, source, room, full, G: gl.constexpr):
    """Loads a step of the block's rows of x, which lie by expert. Rows of a box that have other pairs do no harm."""
    GROUPS: gl.constexpr = G.GROUPS
    tma.async_copy_global_to_shared(source.x, [block.first, first], full, room.x.index(stage * GROUPS))
    for group in gl.static_range(1, GROUPS):
        begin = block.first + group * _GROUP_ROWS
        if begin < block.end:
            mbarrier.expect(full, _GROUP_ROWS * _STEP * 2)
            tma.async_copy_global_to_shared(source.x, [begin, first], full, room.x.index(stage * GROUPS + group))
        else:
            mbarrier.arrive(full, count=1)


@gluon.jit
def _load(source, pairs, room, G: gl.constexpr):
    """Loads the rows of all the program's blocks."""
    SIDES: gl.constexpr = 1 if G.GATE is None else 2
    GROUPS: gl.constexpr = G.GROUPS
    BOX: gl.constexpr = _GROUP_ROWS if G.BY_EXPERT else 0
    column = gl.expand_dims(gl.arange(0, _STEP, layout=gl.SliceLayout(0, _COPIED)), 0)
    # A block's columns are in two pieces, each with all sides.
    PART: gl.constexpr = G.COLUMNS // (2 * SIDES)
    until = _block_ends(pairs, G)
    first, end = _pairs_of(G.EXPERTS - 1, pairs, G)
    num_blocks = _row_blocks(end - first, G) * _column_blocks(G)
    if G.EXPERTS > 1:
        num_blocks += gl.max(until, 0)
    turn = 0
    number = gl.program_id(0)
    n = 0
    while number < num_blocks:
        block = _block_of(number, until, pairs, G)
        _pass_on(block, turn, room, G)
        begins, is_pair = _rows_of(block, source, G)
        for first in range(0, G.IN, _STEP):
            stage = n % G.STAGES
            full = room.full.index(stage)
            mbarrier.wait(room.free.index(stage), ((n // G.STAGES) & 1) ^ 1)
            mbarrier.expect(full, (G.COLUMNS + BOX) * _STEP * 2)
            for part in gl.static_range(2 * SIDES):
                box = room.weight.index(stage).slice(part * PART, PART)
                box = box._reinterpret(room.weight.dtype, [1, PART, _STEP], _BOX)
                of_part = part % SIDES * G.OUT + part // SIDES * PART
                tma.async_copy_global_to_shared(source.weight, [block.expert, block.column + of_part, first], full, box)
            if G.BY_EXPERT:
                _load_boxes(block, stage, first, source, room, full, G)
            else:
                for group in gl.static_range(GROUPS):
                    is_element = is_pair[group] & (first + column < G.IN)
                    to = room.x.index(stage * GROUPS + group)
                    if group < _CONSUMERS or block.first + _BLOCK_ROWS < block.end:
                        async_copy.async_copy_global_to_shared(to, begins[group] + (first + column), mask=is_element)
                async_copy.mbarrier_arrive(full, increment_count=False)
            n += 1
        turn += 1
        number = _next_number(number, num_blocks, pairs, G)
    # The end has no step, so it is passed on with an empty one.
    full = room.full.index(n % G.STAGES)
    mbarrier.wait(room.free.index(n % G.STAGES), ((n // G.STAGES) & 1) ^ 1)
    _pass_on(_Block(G.EXPERTS, 0, 0, 0), turn, room, G)
    mbarrier.expect(full, 0)
    if G.BY_EXPERT:
        mbarrier.arrive(full, count=G.GROUPS - 1)
    else:
        async_copy.mbarrier_arrive(full, increment_count=False)
    # No thread ends before its copies do.
    async_copy.commit_group()
    async_copy.wait_group(0)
    leave()


@gluon.jit
def _free(room, n, G: gl.constexpr):
    """Notes that this group has read the stage of the n-th step."""
    gl.thread_barrier()
    mbarrier.arrive(room.free.index(n % G.STAGES), count=1)


@gluon.jit
def _products(CONSUMER: gl.constexpr, HAS_LAST: gl.constexpr, room, n, G: gl.constexpr):
    """Returns the products of the consumer's 64 rows with a block's columns, those of the last 64 rows with its half of
    the columns, and n, the steps that have passed through the ring.

    HAS_LAST: whether there are such last rows
    """
    COLUMNS: gl.constexpr = G.COLUMNS
    HALF: gl.constexpr = COLUMNS // 2
    acc = gl.zeros([_GROUP_ROWS, COLUMNS], gl.float32, layout=_products_layout(COLUMNS))
    last = gl.zeros([_GROUP_ROWS, HALF], gl.float32, layout=_products_layout(HALF))
    for first in range(0, G.IN, _STEP):
        stage = n % G.STAGES
        mbarrier.wait(room.full.index(stage), (n // G.STAGES) & 1)
        if not G.BY_EXPERT:
            # Copies of lanes are ordinary writes.
            fence_async_shared()
        matrix = room.weight.index(stage)
        own = room.x.index(stage * G.GROUPS + CONSUMER)
        acc = warpgroup_mma(own, matrix.permute((1, 0)), acc, is_async=True)
        if HAS_LAST:
            half = matrix.slice(CONSUMER * HALF, HALF).permute((1, 0))
            last = warpgroup_mma(room.x.index(stage * G.GROUPS + _CONSUMERS), half, last, is_async=True)
            acc, last = warpgroup_mma_wait(2, (acc, last))
        else:
            acc = warpgroup_mma_wait(1, (acc,))
        # The step before is done; this one goes on.
        if first > 0:
            _free(room, n - 1, G)
        n += 1
    if HAS_LAST:
        acc, last = warpgroup_mma_wait(0, (acc, last))
    else:
        acc = warpgroup_mma_wait(0, (acc,))
    _free(room, n - 1, G)
    return acc, last, n


@gluon.jit
def _pass(room, n, G: gl.constexpr):
    """Passes over the steps of a block of which this group has no pair; returns n after them.

    It waits all the same: barriers count in turns of two.
    """
    for _ in range(0, G.IN, _STEP):
        mbarrier.wait(room.full.index(n % G.STAGES), (n // G.STAGES) & 1)
        _free(room, n, G)
        n += 1
    return n


@gluon.jit
def _store(results, PIECES: gl.constexpr, first, column, block, to, HAS_BIAS: gl.constexpr, G: gl.constexpr):
    """Adds the bias to 64 rows of products, combines their sides, and writes them.

    PIECES:        pieces of columns that they have
    first, column: the first pair, and the first column of out
    """
    GATE: gl.constexpr = G.GATE
    SIDES: gl.constexpr = 1 if GATE is None else 2
    COLUMNS: gl.constexpr = results.shape[1]
    PART: gl.constexpr = COLUMNS // (PIECES * SIDES)
    OUTPUTS: gl.constexpr = COLUMNS // SIDES
    if HAS_BIAS:
        lane = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, results.type.layout))
        within = column + lane // (SIDES * PART) * PART + lane % PART
        side = lane // PART % SIDES
        of_column = to.bias + (block.expert.to(gl.int64) * (SIDES * G.OUT) + (side * G.OUT + within))
        results += gl.expand_dims(gl.load(of_column, mask=within < G.OUT, other=0.0).to(gl.float32), 0)
    if GATE is None:
        stored = _in_lines(results.to(to.out.dtype.element_ty))
    else:
        gate, up = gl.split(gl.permute(results.reshape([_GROUP_ROWS, PIECES, 2, PART]), (0, 1, 3, 2)))
        layout: gl.constexpr = _products_layout(OUTPUTS)
        gate = gl.convert_layout(gate.reshape([_GROUP_ROWS, OUTPUTS]), layout, assert_trivial=True)
        up = gl.convert_layout(up.reshape([_GROUP_ROWS, OUTPUTS]), layout, assert_trivial=True)
        combined = gated(gate, up, GATE.kind, GATE.limit, GATE.alpha)
        stored = _in_lines(combined.to(to.out.dtype.element_ty))
    pair = first + gl.arange(0, _GROUP_ROWS, layout=gl.SliceLayout(1, stored.type.layout))
    stored_column = column + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(0, stored.type.layout))
    gl.store(
        to.out + (gl.expand_dims(pair.to(gl.int64) * to.out_row, 1) + gl.expand_dims(stored_column, 0)),
        stored,
        mask=gl.expand_dims(pair < block.end, 1) & gl.expand_dims(stored_column < G.OUT, 0),
    )


@gluon.jit
def _multiply_block(
    CONSUMER: gl.constexpr, HAS_LAST: gl.constexpr, block, n, to, room, HAS_BIAS: gl.constexpr, G: gl.constexpr
):
    """Computes the consumer's part of a block; returns n after it."""
    SIDES: gl.constexpr = 1 if G.GATE is None else 2
    acc, last, n = _products(CONSUMER, HAS_LAST, room, n, G)
    _store(acc, 2, block.first + CONSUMER * _GROUP_ROWS, block.column, block, to, HAS_BIAS, G)
    if HAS_LAST:
        column = block.column + CONSUMER * (G.COLUMNS // (2 * SIDES))
        _store(last, 1, block.first + _BLOCK_ROWS, column, block, to, HAS_BIAS, G)
    return n


@gluon.jit
def _multiply(CONSUMER: gl.constexpr, to, room, HAS_BIAS: gl.constexpr, G: gl.constexpr):
    """Computes the consumer's part of each of the program's blocks."""
    turn = 0
    n = 0
    block = _passed_on(turn, n, room, G)
    while block.expert < G.EXPERTS:
        if (G.GROUPS > _CONSUMERS) and (block.first + _BLOCK_ROWS < block.end):
            n = _multiply_block(CONSUMER, True, block, n, to, room, HAS_BIAS, G)
        elif block.first + CONSUMER * _GROUP_ROWS < block.end:
            n = _multiply_block(CONSUMER, False, block, n, to, room, HAS_BIAS, G)
        else:
            n = _pass(room, n, G)
        turn += 1
        block = _passed_on(turn, n, room, G)
    leave()


@gluon.jit(do_not_specialize=["num_pairs", "num_programs"])
def _hopper_expert_product_kernel(
    x,
    weight,
    bias,
    source,
    indptr,
    drawn,
    out,
    x_row,
    out_row,
    num_pairs,
    num_programs,
    G: gl.constexpr,
):
    wait_for_launch(G.EARLY)
    DTYPE: gl.constexpr = out.dtype.element_ty
    STAGES: gl.constexpr = G.STAGES
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    room = _Room(
        gl.allocate_shared_memory(DTYPE, [STAGES * G.GROUPS, _GROUP_ROWS, _STEP], _SWIZZLED),
        gl.allocate_shared_memory(DTYPE, [STAGES, G.COLUMNS, _STEP], _SWIZZLED),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars),
        gl.allocate_shared_memory(gl.int32, [_SLOTS * 4, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
    )
    for i in gl.static_range(STAGES):
        mbarrier.init(room.full.index(i), count=G.GROUPS if G.BY_EXPERT else _LOADING_THREADS + 1)
        mbarrier.init(room.free.index(i), count=_CONSUMERS)
    fence_async_shared()
    gl.thread_barrier()
    HAS_BIAS: gl.constexpr = bias is not None
    # Gluon passes no None to warp groups: a bias or a source that is None is not read.
    added = out
    if HAS_BIAS:
        added = bias
    read = indptr
    if not G.BY_EXPERT:
        read = source
    pairs = _Pairs(indptr, drawn, num_pairs, num_programs)
    to, rows = _Outputs(out, out_row, added), _Rows(x, read, x_row, weight)
    gl.warp_specialize(
        [
            (_multiply, (0, to, room, HAS_BIAS, G)),
            (_multiply, (1, to, room, HAS_BIAS, G)),
            (_load, (rows, pairs, room, G)),
        ],
        [4, 4],
        [_CONSUMER_REGISTERS, _LOADER_REGISTERS],
    )


def _blocks(args: ProductArgs, size: BlockSize, num_pairs: int) -> int:
    """Blocks, at most."""
    row_blocks = args.most_blocks(_BLOCK_ROWS.value, num_pairs)
    return row_blocks * -(-args.out.shape[1] * args.sides // size.columns)


def block_size(args: ProductArgs, compute_units: int) -> BlockSize:
    """The fastest size. Any of them gives the same bits.

    Narrow blocks leave fewer processors without work. H200, deterministic decode of 96, 128 and 256 requests by a model
    of 1.1B: 2,259, 2,606 and 3,567 us a step; by 256 columns alone 3,404, 3,664 and 4,547.

    If each processor has several blocks, an expert's last one may have up to 192 pairs. H200: 512 experts of 2048 x 512
    with 160 pairs take 1,206 us, and 1,374 with 128 in a block; with 1 or 2 pairs 535 and 520.

    With experts, the size of any number of tokens is that of a power of 2 too: kernels are compiled ahead for these.
    """
    num_pairs = len(args.out)
    if len(args.weight) > 1:
        num_pairs = next_power_of_2(num_pairs)

    def time(size: BlockSize) -> int:
        """The time of the turns of the last program."""
        return -(-_blocks(args, size, num_pairs) // compute_units) * (size.columns + _COLUMNS_OF_ROWS)

    size = min(_WIDE, _HALF, _QUARTER, key=time)
    has_several = _blocks(args, _WIDE, num_pairs) >= _SEVERAL * compute_units
    # With up to half a block of an expert's pairs on average, few blocks have the third group.
    return _TALL if size is _WIDE and has_several and 2 * num_pairs > _BLOCK_ROWS * len(args.weight) else size


def launch_hopper_expert_product(args: ProductArgs, *, compute_units: int) -> None:
    """Does the same as `launch_expert_product`, for arguments that suit it.

    compute_units: multiprocessors of the GPU, each of which has room for one program
    """
    args.check()
    x, weight, out, early = args.x, args.weight, args.out, starts_early(args.x.device)
    if not len(out):
        return
    size, by_expert = block_size(args, compute_units), args.source is None
    programs = min(compute_units, _blocks(args, size, len(out)))
    box = [1, size.columns // (2 * args.sides), _STEP.value]
    boxes = TensorDescriptor(weight, list(weight.shape), list(weight.stride()), box, _BOX.value)
    rows = TensorDescriptor(x, list(x.shape), list(x.stride()), [_GROUP_ROWS.value, _STEP.value], _SWIZZLED.value)
    launch(
        _hopper_expert_product_kernel,
        (programs,),
        rows if by_expert else x,
        boxes,
        args.bias,
        args.source,
        args.indptr,
        args.drawn,
        out,
        x.stride(0),
        out.stride(0),
        len(out),
        programs,
        G=HopperProductGeometry(
            EXPERTS=len(weight),
            EXPERTS_BLOCK=max(32, next_power_of_2(len(weight) - 1)),
            IN=x.shape[1],
            OUT=out.shape[1],
            BY_EXPERT=by_expert,
            COLUMNS=size.columns,
            GROUPS=size.groups,
            STAGES=size.stages,
            EARLY=early,
            GATE=args.gate,
        ),
        num_warps=4,
        **early_options(early),
    )
