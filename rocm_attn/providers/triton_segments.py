"""The triton provider's deterministic kernels: KV is split at fixed kv_index; see kernels/attention/segments.py."""

from dataclasses import dataclass, replace

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.attention.cuts import DecodeCut, ExtendCut
from rocm_attn.kernels.attention.visible_keys import VisibleKeys
from rocm_attn.kernels.launch import only_launches
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.kernels.tuning.segment_tiles import SegmentTiles, segment_tiles
from rocm_attn.kernels.tuning.tiles import NoTiles
from rocm_attn.machine.releases import UNKNOWN
from rocm_attn.machine.target import Target
from rocm_attn.problem import Problem
from rocm_attn.providers.by_tokens import ANY_TOKENS, KernelByTokens, ServedSteps, SizedKernel
from rocm_attn.providers.chunk_decode import of_chunks
from rocm_attn.providers.contract import BoundKernel, PoolSize, StepBounds
from rocm_attn.providers.cut_kernels import CutSegmentDecode, MaskableExtend
from rocm_attn.providers.scores import scores_of
from rocm_attn.providers.tiles import codes_of, extend_cut
from rocm_attn.providers.triton_entries import Ranged
from rocm_attn.providers.triton_later import triton_launches

# The ptxas of CUDA 12.8, which Triton 3.6 has, adds to a uniform register that nothing has written where the address of
# a block of V was. It does so in some kernels whose V has a block of 16 or 32 columns and whose K has a wider one, by
# scores and heads: 24/8, 128/16, 40/24, 128/32, 256/32, and 64/32 in codes. That of CUDA 12.9, which Triton 3.9 has,
# does not. tests/amd/offline/test_unwritten_registers.py compiles these, and others without it.
_NARROW_BLOCKS = (16, 32)
RIGHT_TRITON = (3, 9)
# Mean new tokens of a step of new prompts, at most, whose rows are whole. 32 x 8 heads of 128, and in extend steps, 1 x
# 30: 4.6 and 11.6 us; 1 x 400: 14 and 19; 32 x 30: 15 and 22; 4 x 300: 25 and 32; 64 x 128: 110 and 120. 64 x 8 of 64,
# 1 x 30: 3.6 and 9.1; 64 x 128: 113 and 164. 32 x 8 of 96, 1 x 400: 12 and 17; 64 x 128: 91 and 110 (H200).
_MOST_OF_PROMPTS = 512
# More blocks than compute units take longer with wider heads: 64 x 8 of 192, 1 x 30: 11 and 14; but 1 x 400: 45 and 27;
# 64 x 128: 618 and 229. 16 x 8 of 256, 1 x 30: 12 and 17 (H200).
_WIDE_HEADS = 128


@dataclass(frozen=True, slots=True)
class SegmentDecode(CutSegmentDecode[SegmentTiles]):
    """Deterministic decode over K and V pages."""

    @property
    def q_rows(self) -> int:
        return self.tiles.decode(self.problem.gqa_ratio).q_rows(self.problem.gqa_ratio)

    def describe(self) -> str:
        return (
            f"triton.segment_decode({self.problem}, {self.tiles}, programs={self.cut.programs}, "
            f"segments={self.most_segments})"
        )

    @only_launches
    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        triton_launches.launch_segment_decode(
            args, scores=self.scores, most_segments=self.most_segments, cut=self.cut, tiles=self.tiles
        )


@dataclass(frozen=True, slots=True)
class SegmentExtend(MaskableExtend[SegmentTiles]):
    """Ragged extend over a cached prefix, for sequences with cut.min_q_len new tokens or more. scores: the problem's"""

    def describe(self) -> str:
        cut = self.cut
        sharing = f", programs={cut.sharing.programs}" if cut.sharing.programs else ""
        return f"triton.segment_extend({self.problem}, {self.tiles}, min_q_len={cut.min_q_len}{sharing})"

    def workspace_words(self, shape: PaddedShape) -> int:
        problem = self.problem
        return self.tiles.extend_words(
            self.cut.max_blocks(shape.num_tokens, shape.num_seqs),
            programs=self.cut.sharing.programs,
            num_kv_heads=problem.num_kv_heads,
            gqa_ratio=problem.gqa_ratio,
            v_head_dim=problem.v_head_dim,
        )

    def attend_by(self, args: AttendArgs, mask: VisibleKeys | None) -> None:
        triton_launches.launch_segment_extend(args, scores=self.scores, cut=self.cut, tiles=self.tiles, mask=mask)


def bind_decode(problem: Problem, target: Target, pool: PoolSize) -> SegmentDecode:
    """Binds deterministic decode. Raises NoTiles."""
    tiles = _tiles(problem, target)
    cut = DecodeCut.of(
        tiles.decode(problem.gqa_ratio),
        num_kv_heads=problem.num_kv_heads,
        programs=target.compute_units * tiles.programs_per_cu,
        window_left=problem.window_left,
        has_slots=True,
    )
    most_segments = tiles.most_segments(pool.max_kv_len, problem.window_left)
    return SegmentDecode(problem, scores_of(problem), tiles, cut, most_segments)


def bind_chunk_decode(problem: Problem, target: Target, pool: PoolSize) -> BoundKernel:
    """Binds deterministic decode in a layer with chunks. Raises NoTiles, also if chunks are not whole segments."""
    segment_len = _tiles(problem, target).segment_len
    if problem.chunk % segment_len:
        # Segments of decode would begin elsewhere than those of extend.
        raise NoTiles(f"it serves chunks of whole segments of {segment_len} keys, and not of {problem.chunk}")
    return of_chunks(bind_decode)(problem, target, pool)


def bind_extend(
    problem: Problem, target: Target, pool: PoolSize, min_q_len: int = 1, of_long: BoundKernel | None = None
) -> BoundKernel:
    """Binds deterministic extend of sequences with min_q_len new tokens or more. Raises NoTiles.

    of_long: the kernel of steps whose sequences have more than few tokens; None: this provider's own tiles. If it
             shares rows out, which the kernels for few tokens do not, it serves all steps with so few sequences that
             those would leave half of the GPU idle. 8 x 1 heads of 128, 16 x 4 new of 8004: 50 us, 122 by the others;
             64 x 8, 4 x 8 of 2008: 31 and 35; 32 x 8, 8 x 5 of 4005: 65 and 65 (H200). In mixed steps sequences that
             decode serves count too
    """
    tiles = _tiles(problem, target)
    if of_long is None and tiles.short == (tiles.extend,):
        return _extend_in(tiles, problem, min_q_len)
    other = of_long or _shared(_extend_in(tiles, problem, min_q_len), target)
    shares = of_long is not None or tiles.extend.programs_per_cu > 0
    min_seqs = -(-target.compute_units // (2 * problem.num_kv_heads)) if shares else 1
    short = tuple(
        SizedKernel(
            ServedSteps(each.extend.query_rows // problem.gqa_ratio, min_seqs), _extend_in(each, problem, min_q_len)
        )
        for each in tiles.of_short_steps(problem.gqa_ratio)
    )
    return KernelByTokens(short, other) if short else other


def bind_prompts(problem: Problem, target: Target, extend: BoundKernel) -> KernelByTokens:
    """Whole rows of this provider's kernel for steps of short new prompts alone, else extend. Raises NoTiles.

    extend: serves any step
    """
    tiles = _tiles(problem, target)
    *_, few = tiles, *tiles.of_short_steps(problem.gqa_ratio)
    one_each = few.extend.tokens_of(target.compute_units, problem.num_q_heads)
    max_tokens = ANY_TOKENS if problem.head_dim <= _WIDE_HEADS else one_each
    short = SizedKernel(ServedSteps(_MOST_OF_PROMPTS, max_tokens=max_tokens), _extend_in(few, problem))
    return KernelByTokens.before((short,), extend)


def bind_masked(problem: Problem, target: Target, pool: PoolSize, min_q_len: int = 1) -> Ranged:
    """Binds deterministic attention of steps with a mask, or in layers whose keys are ranges. Raises NoTiles."""
    return Ranged(masked_extend(problem, target, min_q_len), problem.visibility)


def masked_extend(problem: Problem, target: Target, min_q_len: int = 1) -> SegmentExtend:
    """The kernel of bind_masked. Raises NoTiles."""
    tiles = _tiles(problem, target)
    return _extend_in(tiles.of_masked_steps() if target.is_nvidia else tiles, problem, min_q_len)


def _shared(extend: SegmentExtend, target: Target) -> SegmentExtend:
    """The same kernel with the longest rows shared out by whole segments, if the tiles say so."""
    problem, tiles = extend.problem, extend.tiles
    if not tiles.extend.has_equal_blocks(problem.gqa_ratio):
        # The merge finds the query heads of a block by its place alone, so each block must have as many.
        return extend
    cut = extend_cut(problem, target, tiles.extend, causal=problem.causal, min_q_len=extend.cut.min_q_len).by_segments(
        tiles.segment_len,
        most_segments=tiles.shared_segments,
        split_keys=tiles.extend.split_keys,
        shares_first=True,
    )
    return replace(extend, cut=cut)


def _extend_in(tiles: SegmentTiles, problem: Problem, min_q_len: int = 1) -> SegmentExtend:
    """Extend in which every row belongs to one program."""
    cut = ExtendCut.of(tiles.extend, gqa_ratio=problem.gqa_ratio, min_q_len=min_q_len, causal=problem.causal)
    return SegmentExtend(problem, scores_of(problem), tiles, cut)


def _tiles(problem: Problem, target: Target) -> SegmentTiles:
    dims = {"head_dim": problem.head_dim, "v_head_dim": problem.v_head_dim}
    triton = target.releases.triton
    is_narrow = any(problem.v_head_dim <= columns < problem.head_dim for columns in _NARROW_BLOCKS)
    if target.arch == "sm_90" and is_narrow and triton != UNKNOWN and triton.numbers < RIGHT_TRITON:
        raise NoTiles(
            f"Triton {triton} compiles deterministic kernels of head_dim {problem.head_dim} and "
            f"v_head_dim {problem.v_head_dim} wrongly for sm_90; install Triton 3.9 or later"
        )
    return segment_tiles(target.arch, **dims, dtype=problem.dtype, codes=codes_of(problem))
