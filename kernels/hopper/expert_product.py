"""The product of rows with the matrices of their experts for Hopper, in Gluon: experts/product.py's results.

All rows may have one matrix: that is a layer of one expert, in which nothing has to be looked up.

A program has two consumers, groups of four warps with 64 pairs of a block each, and four warps that load for them: one
thread loads rows of a matrix by TMA, and all of them copy the pairs' rows of x, 16 bytes per lane, from wherever they
lie. Both pass through one ring in shared memory, which runs on from block to block: the first steps of the next block
arrive while results are written. A consumer without a pair in its half of a block multiplies nothing.

There are as many programs as run at a time. Programs that run next to each other have the same rows or the same
columns, which then come from the L2 cache. Each group of warps finds the expert of a block by itself: the lanes of
every warp hold all experts, so that no warp waits for another.

Sums are in the order of experts/product.py and of model/few_rows.py: the bits are the same where the first one uses the
same matrix instructions, and where the second one has one part.
"""

from __future__ import annotations

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
_GROUPS = gl.constexpr(2)
_ROWS = gl.constexpr(_GROUPS.value * _GROUP_ROWS.value)
# Rows of the matrix in a block, of which a TMA instruction loads half, and steps that shared memory has room for: at
# most 192 KiB. The copies of all steps but one are under way. Narrow blocks leave fewer processors without work. H200,
# deterministic decode of 96, 128 and 256 requests by a model of 1.1B: 2,259, 2,606 and 3,567 us a step; by 256 columns
# alone 3,404, 3,664 and 4,547.
_STAGES_OF_COLUMNS = {256: 4, 128: 6, 64: 8}
# Columns that take as long as a block's rows of x. Half as many and twice as many give these steps the same time.
_COLUMNS_OF_ROWS = 48
# Blocks of an expert that are multiplied with the same columns before others are: their rows of x stay in the L2 cache,
# and a matrix is read once for all of them.
_PANEL = gl.constexpr(16)
# A program's step from its place in one turn to that in the next one. It has no divisor in common with 132.
_NEXT_PLACE = gl.constexpr(7)
_CONSUMER_REGISTERS, _LOADER_REGISTERS = gl.constexpr(216), gl.constexpr(80)
# Lanes of eight elements: a warp has 128 bytes of four rows.
_COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
_BOX = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=3))


@constexpr_function
def _products_layout(columns):
    """The layout of the products of 64 rows."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@constexpr_function
def _stored_layout(columns):
    """A layout in which four lanes have 64 bytes of a row: products lie in pairs of columns, and move within a warp."""
    blocks = [[0, 1 << bit] for bit in range(5, columns.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], *blocks],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [_GROUP_ROWS.value, columns],
    )


class HopperProductGeometry(NamedTuple):
    """The values that the product is compiled for.

    EXPERTS, EXPERTS_BLOCK: experts, and a power of 2, 32 or more
    IN, OUT:                elements of a row of x and of out
    PAIRS_OF_ROW:           pairs that read one row of x
    COLUMNS, STAGES:        rows of the matrix in a block, and steps that shared memory has room for
    EARLY:                  whether it starts early (early.py)
    GATE:                   how a row's two halves are combined; None if it has one
    """

    EXPERTS: int
    EXPERTS_BLOCK: int
    IN: int
    OUT: int
    PAIRS_OF_ROW: int
    COLUMNS: int
    STAGES: int
    EARLY: bool
    GATE: GateForm | None


class _Room(NamedTuple):
    """Shared memory: rows of x and of matrices, by stages; barriers of stages that are loaded, and of those read."""

    x: Any
    weight: Any
    full: Any
    free: Any


class _Rows(NamedTuple):
    """The rows that are loaded: x, with elements from row to row, and boxes of matrices."""

    x: Any
    x_row: Any
    weight: Any


class _Outputs(NamedTuple):
    """The rows that are written, with elements from row to row, and a bias."""

    out: Any
    out_row: Any
    bias: Any


class _Pairs(NamedTuple):
    """The pairs by expert (ExpertGroups), which are not read if there is one expert; their number; programs."""

    order: Any
    indptr: Any
    num: Any
    num_programs: Any


class _Block(NamedTuple):
    """A block: an expert, the first pair's place in order, the end of the expert's pairs, and the first column of out.

    expert: EXPERTS if there is no block with such a number
    """

    expert: Any
    first: Any
    end: Any
    column: Any


@gluon.jit
def _add(left, right):
    return left + right


@gluon.jit
def _block_of(turn, pairs, G: gl.constexpr):
    """The program's block in a turn. Full blocks and others may alternate, so programs change places."""
    number = turn * pairs.num_programs + (gl.program_id(0) + turn * _NEXT_PLACE) % pairs.num_programs
    SIDES: gl.constexpr = 1 if G.GATE is None else 2
    OUTPUTS: gl.constexpr = G.COLUMNS // SIDES
    COLUMN_BLOCKS: gl.constexpr = (G.OUT + OUTPUTS - 1) // OUTPUTS
    if G.EXPERTS == 1:
        first, end, within = 0, pairs.num, number
        expert = (number >= gl.cdiv(end, _ROWS) * COLUMN_BLOCKS).to(gl.int32)
    else:
        layout: gl.constexpr = gl.BlockedLayout([G.EXPERTS_BLOCK // 32], [32], [4], [0])
        each = gl.arange(0, G.EXPERTS_BLOCK, layout=layout)
        is_expert = each < G.EXPERTS
        begins = gl.load(pairs.indptr + each, mask=is_expert, other=0).to(gl.int32)
        ends = gl.load(pairs.indptr + each + 1, mask=is_expert, other=0).to(gl.int32)
        until = gl.associative_scan((ends - begins + (_ROWS - 1)) // _ROWS * COLUMN_BLOCKS, 0, _add)
        is_before = (until <= number) & is_expert
        expert = gl.sum(is_before.to(gl.int32), 0)
        within = number - gl.max(gl.where(is_before, until, 0), 0)
        # Both ascend from expert to expert.
        is_other = is_before | (each >= G.EXPERTS)
        first = gl.min(gl.where(is_other, 0x7FFFFFFF, begins), 0)
        end = gl.min(gl.where(is_other, 0x7FFFFFFF, ends), 0)
    panel = within // (_PANEL * COLUMN_BLOCKS) * _PANEL
    within -= panel * COLUMN_BLOCKS
    blocks = gl.maximum(gl.minimum((end - first + (_ROWS - 1)) // _ROWS - panel, _PANEL), 1)
    return _Block(expert, first + (panel + within % blocks) * _ROWS, end, within // blocks * OUTPUTS)


@gluon.jit
def _pairs_at(pairs, place, is_there, G: gl.constexpr):
    """The pairs at some places of the order, int64."""
    return place.to(gl.int64) if G.EXPERTS == 1 else gl.load(pairs.order + place, mask=is_there, other=0)


@gluon.jit
def _load(source, pairs, room, G: gl.constexpr):
    """Loads the rows of all the program's blocks."""
    SIDES: gl.constexpr = 1 if G.GATE is None else 2
    column = gl.expand_dims(gl.arange(0, _STEP, layout=gl.SliceLayout(0, _COPIED)), 0)
    HALF: gl.constexpr = G.COLUMNS // 2
    SECOND: gl.constexpr = HALF if SIDES == 1 else G.OUT
    turn = 0
    block = _block_of(turn, pairs, G)
    n = 0
    while block.expert < G.EXPERTS:
        rows = ()
        is_pair = ()
        for group in gl.static_range(_GROUPS):
            place = block.first + group * _GROUP_ROWS + gl.arange(0, _GROUP_ROWS, layout=gl.SliceLayout(1, _COPIED))
            is_there = place < block.end
            pair = _pairs_at(pairs, place, is_there, G)
            rows += (gl.expand_dims((pair // G.PAIRS_OF_ROW).to(gl.int32), 1),)  # type: ignore[assignment]
            is_pair += (gl.expand_dims(is_there, 1),)  # type: ignore[assignment]
        for first in range(0, G.IN, _STEP):
            stage = n % G.STAGES
            full = room.full.index(stage)
            mbarrier.wait(room.free.index(stage), ((n // G.STAGES) & 1) ^ 1)
            mbarrier.expect(full, G.COLUMNS * _STEP * 2)
            for half in gl.static_range(2):
                box = room.weight.index(stage).slice(half * HALF, HALF)
                box = box._reinterpret(room.weight.dtype, [1, HALF, _STEP], _BOX)
                tma.async_copy_global_to_shared(
                    source.weight, [block.expert, block.column + half * SECOND, first], full, box
                )
            for group in gl.static_range(_GROUPS):
                at = source.x + (rows[group].to(gl.int64) * source.x_row + (first + column))
                is_element = is_pair[group] & (first + column < G.IN)
                async_copy.async_copy_global_to_shared(room.x.index(stage * _GROUPS + group), at, mask=is_element)
            async_copy.mbarrier_arrive(full, increment_count=False)
            n += 1
        turn += 1
        block = _block_of(turn, pairs, G)
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
def _products(GROUP: gl.constexpr, room, n, G: gl.constexpr):
    """Returns the products of 64 rows with a block's columns, and n, the steps that have passed through the ring."""
    COLUMNS: gl.constexpr = G.COLUMNS
    acc = gl.zeros([_GROUP_ROWS, COLUMNS], gl.float32, layout=_products_layout(COLUMNS))
    for first in range(0, G.IN, _STEP):
        stage = n % G.STAGES
        mbarrier.wait(room.full.index(stage), (n // G.STAGES) & 1)
        # Copies of lanes are ordinary writes.
        fence_async_shared()
        matrix = room.weight.index(stage).permute((1, 0))
        acc = warpgroup_mma(room.x.index(stage * _GROUPS + GROUP), matrix, acc, is_async=True)
        # The step before is done; this one goes on.
        acc = warpgroup_mma_wait(1, (acc,))
        if first > 0:
            _free(room, n - 1, G)
        n += 1
    acc = warpgroup_mma_wait(0, (acc,))
    _free(room, n - 1, G)
    return acc, n


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
def _store(GROUP: gl.constexpr, results, block, pairs, to, HAS_BIAS: gl.constexpr, G: gl.constexpr):
    """Adds the bias to 64 rows of products, combines their halves, and writes them."""
    GATE: gl.constexpr = G.GATE
    SIDES: gl.constexpr = 1 if GATE is None else 2
    OUTPUTS: gl.constexpr = G.COLUMNS // SIDES
    if HAS_BIAS:
        COLUMNS: gl.constexpr = G.COLUMNS
        lane = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, _products_layout(COLUMNS)))
        within = block.column + lane % OUTPUTS
        of_column = to.bias + block.expert.to(gl.int64) * (SIDES * G.OUT) + lane // OUTPUTS * G.OUT + within
        results += gl.expand_dims(gl.load(of_column, mask=within < G.OUT, other=0.0).to(gl.float32), 0)
    if GATE is None:
        stored = gl.convert_layout(results.to(to.out.dtype.element_ty), _stored_layout(OUTPUTS))
    else:
        gate, up = gl.split(gl.permute(results.reshape([_GROUP_ROWS, 2, OUTPUTS]), (0, 2, 1)))
        gate = gl.convert_layout(gate, _products_layout(OUTPUTS), assert_trivial=True)
        up = gl.convert_layout(up, _products_layout(OUTPUTS), assert_trivial=True)
        combined = gated(gate, up, GATE.kind, GATE.limit, GATE.alpha)
        stored = gl.convert_layout(combined.to(to.out.dtype.element_ty), _stored_layout(OUTPUTS))
    layout: gl.constexpr = stored.type.layout
    place = block.first + GROUP * _GROUP_ROWS + gl.arange(0, _GROUP_ROWS, layout=gl.SliceLayout(1, layout))
    is_pair = place < block.end
    pair = _pairs_at(pairs, place, is_pair, G)
    column = block.column + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(0, layout))
    gl.store(
        to.out + (gl.expand_dims(pair * to.out_row, 1) + gl.expand_dims(column, 0)),
        stored,
        mask=gl.expand_dims(is_pair, 1) & gl.expand_dims(column < G.OUT, 0),
    )


@gluon.jit
def _multiply(GROUP: gl.constexpr, pairs, to, room, HAS_BIAS: gl.constexpr, G: gl.constexpr):
    """Computes 64 pairs of each of the program's blocks."""
    turn = 0
    block = _block_of(turn, pairs, G)
    n = 0
    while block.expert < G.EXPERTS:
        if block.first + GROUP * _GROUP_ROWS < block.end:
            acc, n = _products(GROUP, room, n, G)
            _store(GROUP, acc, block, pairs, to, HAS_BIAS, G)
        else:
            n = _pass(room, n, G)
        turn += 1
        block = _block_of(turn, pairs, G)
    leave()


@gluon.jit(do_not_specialize=["num_pairs", "num_programs"])
def _hopper_expert_product_kernel(
    x,
    weight,
    bias,
    order,
    indptr,
    out,
    x_row,
    out_row,
    num_pairs,
    num_programs,
    G: gl.constexpr,
):
    wait_for_launch(G.EARLY)
    DTYPE: gl.constexpr = x.dtype.element_ty
    STAGES: gl.constexpr = G.STAGES
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    room = _Room(
        gl.allocate_shared_memory(DTYPE, [STAGES * _GROUPS, _GROUP_ROWS, _STEP], _SWIZZLED),
        gl.allocate_shared_memory(DTYPE, [STAGES, G.COLUMNS, _STEP], _SWIZZLED),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars),
    )
    for i in gl.static_range(STAGES):
        mbarrier.init(room.full.index(i), count=_LOADING_THREADS + 1)
        mbarrier.init(room.free.index(i), count=_GROUPS)
    fence_async_shared()
    gl.thread_barrier()
    HAS_BIAS: gl.constexpr = bias is not None
    # Gluon passes no None to warp groups: without a bias it is not read.
    added = out
    if HAS_BIAS:
        added = bias
    pairs = _Pairs(order, indptr, num_pairs, num_programs)
    to, source = _Outputs(out, out_row, added), _Rows(x, x_row, weight)
    gl.warp_specialize(
        [
            (_multiply, (0, pairs, to, room, HAS_BIAS, G)),
            (_multiply, (1, pairs, to, room, HAS_BIAS, G)),
            (_load, (source, pairs, room, G)),
        ],
        [4, 4],
        [_CONSUMER_REGISTERS, _LOADER_REGISTERS],
    )


def launch_hopper_expert_product(args: ProductArgs, *, compute_units: int) -> None:
    """Does the same as `launch_expert_product`, for arguments that suit it.

    compute_units: multiprocessors of the GPU, each of which has room for one program
    """
    args.check()
    x, weight, out, early = args.x, args.weight, args.out, starts_early(args.x.device)
    num_out, blocks_of_rows = out.shape[1], args.most_blocks(_ROWS.value)

    def blocks(columns: int) -> int:
        return blocks_of_rows * -(-num_out * args.sides // columns)

    def time(columns: int) -> int:
        """The time of the turns of the last program. Any columns give the same bits."""
        return -(-blocks(columns) // compute_units) * (columns + _COLUMNS_OF_ROWS)

    columns = min(_STAGES_OF_COLUMNS, key=time)
    programs = min(compute_units, blocks(columns))
    boxes = TensorDescriptor(
        weight, list(weight.shape), list(weight.stride()), [1, columns // 2, _STEP.value], _BOX.value
    )
    launch(
        _hopper_expert_product_kernel,
        (programs,),
        x,
        boxes,
        args.bias,
        args.order,
        args.indptr,
        out,
        x.stride(0),
        out.stride(0),
        len(out),
        programs,
        G=HopperProductGeometry(
            EXPERTS=len(weight),
            EXPERTS_BLOCK=max(32, next_power_of_2(len(weight))),
            IN=x.shape[1],
            OUT=num_out,
            PAIRS_OF_ROW=args.pairs_of_row,
            COLUMNS=columns,
            STAGES=_STAGES_OF_COLUMNS[columns],
            EARLY=early,
            GATE=args.gate,
        ),
        num_warps=4,
        **early_options(early),
    )
