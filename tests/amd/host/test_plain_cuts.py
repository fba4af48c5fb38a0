"""Cuts of the plain kernels: memory made for a step has room for smaller ones; rows are shared by whole segments."""

from dataclasses import replace

import pytest
import torch

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.kernels.attention.cuts import SHARE_WORDS
from rocm_attn.kernels.attention.extend_schedule import SHARE_CUT, SHARE_SIZE
from rocm_attn.kernels.attention.segment_extend import launch_segment_extend
from rocm_attn.machine.target import known_target
from rocm_attn.problem import Problem
from rocm_attn.providers.contract import PoolSize
from rocm_attn.providers.select import select
from rocm_attn.providers.triton import TritonDecode
from rocm_attn.providers.triton_segments import SegmentExtend, bind_extend, bind_masked
from tests.amd.kernels.attention_cases import Case, build, garbage
from tests.amd.schedule_twins import extend_schedule

LAYER = Problem(32, 8, 128, torch.bfloat16, v_head_dim=128, page_size=16, scale=128**-0.5)
POOL = PoolSize(1000, 1 << 17, 64)


def bound(arch: str, problem: Problem) -> SegmentExtend:
    """Returns the kernel that serves the steps of a layer."""
    extend = bind_extend(problem, known_target(arch), POOL)
    assert isinstance(extend, SegmentExtend)
    return extend


def longest(extend: SegmentExtend, kv_len: int, q_len: int) -> tuple[int, int]:
    """Returns, for one sequence, the number of shared query blocks, and segments of the longest row or share."""
    words = extend_schedule([kv_len], [q_len], extend.cut, q_len)
    share, cut = (words[at.value - SHARE_WORDS] for at in (SHARE_SIZE, SHARE_CUT))
    segment_len = extend.tiles.segment_len
    whole = -(-kv_len // segment_len)
    blocks = -(-q_len // extend.cut.query_tokens)
    return cut, max(whole if cut < blocks else 0, -(-share // segment_len) if cut else 0)


def test_blocks_of_query_heads_that_are_not_equal_are_one_programs_each() -> None:
    """The merge finds the heads of a block by its place. A block has 128 rows, so 129 heads leave one over."""
    of_equal, of_unequal = (bound("gfx942", replace(LAYER, num_q_heads=heads, num_kv_heads=1)) for heads in (128, 129))
    assert of_equal.cut.sharing.programs == 304
    assert of_unequal.cut.sharing.programs == 0


def test_the_workspace_has_a_slot_for_each_segment_of_a_share_and_no_word_less() -> None:
    extend = bound("gfx942", LAYER)
    words = extend.workspace_words(PaddedShape(StepKind.EXTEND, 1, 5))
    rows, slots = extend.tiles.extend.query_rows, extend.tiles.shared_segments + 2
    assert words == 304 * rows * slots * (128 + 2)
    tensors = build(Case([9], [5], heads=(32, 8), dims=(128, 128), dtype=torch.bfloat16), torch.device("cpu"))
    args = tensors.args(garbage(extend.cut.words(5, 1), torch.device("cpu")), torch.empty(words - 1))
    with pytest.raises(AssertionError):
        launch_segment_extend(args, scores=tensors.scores, cut=extend.cut, tiles=extend.tiles)


def test_masked_steps_and_gpus_on_which_nothing_was_looked_at_share_nothing() -> None:
    """A window counted from a draft's depth begins before the keys that a row's cost covers."""
    masked = bind_masked(replace(LAYER, custom_mask=True), known_target("gfx942"), POOL)
    assert "programs=304" in bound("gfx942", LAYER).describe()
    assert "programs=304" not in masked.describe()
    assert bound("sm_80", LAYER).cut.sharing.programs == 0


LLAMA = Problem(64, 8, 128, torch.bfloat16, 16, v_head_dim=128, scale=128**-0.5)
GEMMA = Problem(16, 8, 256, torch.bfloat16, 16, v_head_dim=256, scale=256**-0.5)
NARROW = replace(LLAMA, v_head_dim=1)
# Two KV heads are read as one, but not in steps with as many KV heads as programs.
PAIRED = Problem(32, 8, 64, torch.bfloat16, 16, v_head_dim=64, scale=64**-0.5)


def decode_of(problem: Problem, arch: str = "sm_90") -> TritonDecode:
    kernel = select(problem, known_target(arch), "triton").kernels[StepKind.DECODE].bound
    assert isinstance(kernel, TritonDecode)
    return kernel


def steps_of_others(kernel: TritonDecode, most: int) -> list[set[int]]:
    """Returns, for each of the other tiles, the numbers of sequences whose steps have them."""
    return [{n for n in range(1, most) if kernel.cut.other_of(n) is other} for other in kernel.cut.others]


@pytest.mark.parametrize("problem", [LLAMA, GEMMA, NARROW, PAIRED], ids=["llama", "gemma", "narrow", "paired"])
def test_memory_of_a_step_has_room_for_smaller_ones(problem: Problem) -> None:
    kernel = decode_of(problem)
    of_others = steps_of_others(kernel, 260)
    assert all(of_others)
    assert len(of_others) == {GEMMA: 1}.get(problem, 3)
    for most in (*range(1, 66), 122, 123, 124, 245, 246, 259):
        shape = PaddedShape(StepKind.DECODE, most, most)
        words, workspace = kernel.schedule.words(shape), kernel.workspace_words(shape)
        for n in range(1, most + 1):
            cut = kernel.cut.of_step(n)
            assert cut.words(n) <= words
            needed = cut.partials_words(
                gqa_ratio=problem.gqa_ratio, v_head_dim=problem.v_head_dim, tiles=kernel.tiles_of(n)
            )
            assert needed <= workspace


def test_heads_that_are_read_as_one_are_counted_one_by_one_where_each_has_a_program() -> None:
    """31 to 33 sequences of 8 KV heads have 93 % or more of 264 programs, and no more rows than those."""
    assert steps_of_others(decode_of(PAIRED), 300)[0] == {31, 32, 33}
    (alone,) = steps_of_others(decode_of(replace(PAIRED, num_q_heads=8, num_kv_heads=1)), 300)
    assert alone == set(range(246, 265))


def test_steps_with_rows_for_nearly_all_programs_that_are_smaller_have_those() -> None:
    """62 and 123 sequences of 8 KV heads have 93 % of 528 and 1,056 programs; two heads read as one are half as many
    rows. The programs that fewer sequences fill serve the others.
    """
    assert steps_of_others(decode_of(LLAMA), 300)[1:] == [set(range(123, 300)), set(range(62, 123))]
    assert steps_of_others(decode_of(PAIRED), 300)[1:] == [set(range(246, 300)), set(range(123, 246))]
    assert decode_of(LLAMA).describe().endswith("programs=132 to 1056)")
    windowed = decode_of(replace(LLAMA, window_left=512))
    assert steps_of_others(windowed, 300) == [set(range(123, 300)), set(range(62, 123))]
