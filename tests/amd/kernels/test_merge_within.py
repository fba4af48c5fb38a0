"""Decode that adds up parts of rows within its launch, in any order of programs."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.attention.cuts import LEAST_GROUP, DecodeCut
from rocm_attn.kernels.attention.decode import launch_paged_decode
from rocm_attn.kernels.attention.decode_schedule import launch_decode_schedule
from rocm_attn.kernels.launch import observe_launches
from rocm_attn.kernels.tuning.decode_tiles import decode_tiles
from rocm_attn.kernels.tuning.tiles import DecodeTiles
from tests.amd.kernels.attention_cases import (
    Case,
    Tensors,
    assert_served,
    assert_serves,
    build,
    dtypes,
    run_decode,
)

TILES = DecodeTiles(key_block=16, num_warps=4, num_stages=1, programs_per_cu=1, merge_group=8)
RAGGED = Case(kv_len=[33, 0, 1, 16, 70, 15], q_len=[1] * 6)
# Up to 8 parts are added up at once, 9 to 64 parts in groups, and more than 64 parts in groups of groups.
LONG = Case(kv_len=[1200], q_len=[1], heads=(3, 1), dims=(16, 16))
CASES: dict[str, tuple[Case, DecodeTiles, int]] = {
    "ragged": (RAGGED, TILES, 5),
    "scored": (replace(RAGGED, sinks=True, soft_cap=1.5, slopes=True), TILES, 7),
    "blocks_of_heads": (replace(RAGGED, heads=(10, 2)), replace(TILES, head_blocks=2, transposed=True), 7),
    "many_heads": (replace(RAGGED, heads=(33, 1), dims=(24, 40)), TILES, 5),
    "two_heads": (replace(RAGGED, heads=(8, 2)), replace(TILES, heads_per_row=2), 9),
    "many_columns": (replace(RAGGED, dims=(40, 160)), TILES, 6),
    "equal_blocks": (replace(RAGGED, dims=(96, 80)), replace(TILES, dim_block=32), 6),
    "window": (replace(LONG, window_left=700), TILES, 30),
    "beside_each_other": (
        Case(kv_len=[320] * 2, q_len=[1] * 2, heads=(8, 4), dims=(16, 16)),
        replace(TILES, row_cost=0, row_end=2, side_by_side=True),
        20,
    ),
    "one_group": (replace(LONG, kv_len=[224]), TILES, 8),
    "a_group_and_a_part": (replace(LONG, kv_len=[256]), TILES, 9),
    "two_levels": (replace(LONG, kv_len=[160], sinks=True, dims=(16, 40)), TILES, 11),
    "two_levels_and_a_part": (replace(LONG, kv_len=[1040]), TILES, 65),
    "rows_of_levels": (replace(LONG, kv_len=[70, 290, 8], q_len=[1] * 3, heads=(4, 2)), TILES, 31),
}


def _prepared(tensors: Tensors, tiles: DecodeTiles, programs: int) -> tuple[AttendArgs, DecodeCut]:
    """Returns a launch's arguments, with its schedule and a workspace of NaN."""
    case = tensors.case
    cut = DecodeCut.of(tiles, num_kv_heads=case.heads[1], programs=programs, window_left=case.window_left)
    words = cut.partials_words(gqa_ratio=tensors.gqa_ratio, v_head_dim=case.dims[1], tiles=tiles)
    return tensors.decode_args(cut, words), cut


def _counters(args: AttendArgs, cut: DecodeCut) -> Tensor:
    return args.schedule[cut.first_counter(args.queries.num_seqs) :]


@pytest.mark.fast
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
def test_rows_of_several_programs_are_right(name: str, dtype: torch.dtype, kernel_device: torch.device) -> None:
    case, tiles, programs = CASES[name]
    assert_serves(run_decode, replace(case, dtype=dtype), kernel_device, num_programs=programs, tiles=tiles)


@contextmanager
def _programs_in_order(order: Callable[[int], int]) -> Iterator[None]:
    """Makes the interpreter run program order(n) as the n-th one."""
    from triton.runtime import interpreter

    with pytest.MonkeyPatch.context() as patch:
        builder = interpreter.interpreter_builder
        set_place = builder.set_grid_idx
        patch.setattr(builder, "set_grid_idx", lambda x, y, z: set_place(order(x), y, z))
        yield


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", ["two_levels", "rows_of_levels", "ragged"])
def test_who_ends_last_changes_no_bit(name: str, kernel_device: torch.device) -> None:
    """Programs run one after the other, in several orders; on a GPU in its own order, in many launches.

    Parts that were not yet written are NaN.
    """
    case, tiles, programs = CASES[name]
    tensors = build(case, kernel_device)
    run_decode(tensors, num_programs=programs, tiles=tiles)
    assert_served(tensors)
    out, lse = tensors.out.clone(), tensors.lse.clone()
    shuffled = random.Random(1).sample(range(programs), programs)
    orders = [lambda n: programs - 1 - n, lambda n: shuffled[n]] if kernel_device.type == "cpu" else []
    for at in range(len(orders) or 50):
        args, cut = _prepared(tensors, tiles, programs)
        tensors.out.fill_(float("nan"))
        if orders:
            with _programs_in_order(orders[at]):
                launch_paged_decode(args, scores=tensors.scores, cut=cut, tiles=tiles)
        else:
            launch_paged_decode(args, scores=tensors.scores, cut=cut, tiles=tiles)
        assert torch.equal(tensors.out, out)
        assert torch.equal(tensors.lse, lse)


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", ["ragged", "rows_of_levels"])
def test_a_schedule_serves_many_launches(name: str, kernel_device: torch.device) -> None:
    """The layers of a step share one: the last program that counts resets its counter."""
    case, tiles, programs = CASES[name]
    tensors = build(case, kernel_device)
    args, cut = _prepared(tensors, tiles, programs)
    assert not _counters(args, cut).any()
    for _ in range(2):
        tensors.out.fill_(float("nan"))
        args.workspace.fill_(float("nan"))
        launch_paged_decode(args, scores=tensors.scores, cut=cut, tiles=tiles)
        assert_served(tensors)
        assert not _counters(args, cut).any()


def test_counters_that_were_left_in_between_are_set_back_with_the_schedule(kernel_device: torch.device) -> None:
    """A launch leaves such counters if not all of its programs ran."""
    case, tiles, programs = CASES["ragged"]
    tensors = build(case, kernel_device)
    args, cut = _prepared(tensors, tiles, programs)
    _counters(args, cut).fill_(1)
    launch_decode_schedule(tensors.queries, args.schedule, cut)
    assert not _counters(args, cut).any()
    launch_paged_decode(args, scores=tensors.scores, cut=cut, tiles=tiles)
    assert_served(tensors)


def test_a_part_that_counts_as_there_before_it_is_would_be_seen(kernel_device: torch.device) -> None:
    """A counter that is ahead by one makes the second-last program add up parts that are still NaN."""
    if kernel_device.type != "cpu":
        pytest.skip("programs of a GPU have no order: it is the interpreter's")
    case, tiles, programs = CASES["one_group"]
    tensors = build(case, kernel_device)
    args, cut = _prepared(tensors, tiles, programs)
    _counters(args, cut).add_(1)
    launch_paged_decode(args, scores=tensors.scores, cut=cut, tiles=tiles)
    assert tensors.out.isnan().all()


def _counters_of_row(count: int, group: int) -> list[int]:
    """Returns the parts whose counters a row's groups use, as merge_if_last finds them."""
    found = []
    apart, level = 1, 0
    while True:
        groups = -(-count // group)
        sizes = [min(group, count - number * group) for number in range(groups)]
        found += [number * group * apart + level for number, size in enumerate(sizes) if size > 1]
        if groups == 1:
            return found
        count, apart, level = groups, apart * group, level + 1


@pytest.mark.parametrize("group", [LEAST_GROUP, 9, 16, 32])
def test_no_two_groups_of_a_row_have_one_counter_and_each_has_one_of_the_row(group: int) -> None:
    for count in [*range(2, 700), 1055, 1056, 2432, 4096, 4097, 9728]:
        counters = _counters_of_row(count, group)
        assert max(Counter(counters).values()) == 1
        assert max(counters) < count


@pytest.mark.parametrize(
    ("num_seqs", "heads", "launches"),
    [(1, (32, 8), 2), (16, (64, 8), 1), (16, (8, 1), 2), (64, (32, 8), 1), (256, (32, 8), 1)],
)
def test_a_layer_of_hopper_is_one_launch_where_rows_have_few_parts(
    num_seqs: int, heads: tuple[int, int], launches: int
) -> None:
    tiles = decode_tiles(
        "sm_90",
        gqa_ratio=heads[0] // heads[1],
        num_kv_heads=heads[1],
        head_dim=128,
        v_head_dim=128,
        dtype=torch.bfloat16,
    )
    case = Case([1] * num_seqs, [1] * num_seqs, heads, (128, 128), dtype=torch.bfloat16)
    tensors = build(case, torch.device("cpu"))
    cut = DecodeCut.of(tiles, num_kv_heads=heads[1], programs=132 * tiles.programs_per_cu, window_left=-1)
    cut = cut.of_step(num_seqs)
    words = cut.partials_words(gqa_ratio=tensors.gqa_ratio, v_head_dim=128, tiles=tiles)
    args = tensors.args(torch.zeros(cut.words(num_seqs), dtype=torch.int32), torch.zeros(words))
    made: list[object] = []
    with observe_launches(made.append):
        launch_paged_decode(args, scores=tensors.scores, cut=cut, tiles=tiles)
    assert len(made) == launches
