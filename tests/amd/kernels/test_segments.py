"""The deterministic kernels: they equal the reference, and decode's bits are extend's with any sharing of the work."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rocm_attn.kernels.attention.cuts import SHARE_WORDS, DecodeCut
from rocm_attn.kernels.attention.extend_schedule import SHARE_PARTS
from rocm_attn.kernels.attention.segment_decode import launch_segment_decode
from rocm_attn.kernels.attention.visible_keys import PackedMask
from rocm_attn.kernels.tuning.segment_tiles import SEGMENT_ROWS, SegmentTiles, segment_tiles
from rocm_attn.kernels.tuning.tiles import NoTiles
from rocm_attn.machine.target import detect_target
from rocm_attn.problem import UNLIMITED_WINDOW
from tests.amd.kernels.attention_cases import (
    UNTOUCHED,
    Case,
    Run,
    Tensors,
    assert_served,
    assert_serves,
    build,
    dtypes,
    extend_cut,
)
from tests.amd.kernels.matrix_unit import use_matrix_unit
from tests.amd.kernels.segment_cases import (
    all_shared,
    assert_same_bits,
    last_tokens,
    run_decode,
    run_extend,
    run_extend_twin,
)
from tests.amd.schedule_twins import extend_schedule


@pytest.fixture(autouse=True)
def _matrix_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    use_matrix_unit(monkeypatch)


def tiles_at(device: torch.device, case: Case) -> SegmentTiles:
    """Returns the device's own tiles, with segments short enough for the cases to have several."""
    tiles = segment_tiles(detect_target(device).arch, head_dim=case.dims[0], v_head_dim=case.dims[1], dtype=case.dtype)
    return replace(tiles, segment_len=64)


CASES = {
    "plain": Case([130, 64, 65, 1], [9, 3, 1, 1], heads=(2, 1)),
    "odd": Case([90, 129], [17, 2], heads=(6, 2), dims=(80, 48), page_size=5, tail=3, spread=True),
    "wide": Case([66], [2], heads=(1, 1), dims=(512, 384)),
    "mha": Case([70, 128], [6, 64], heads=(2, 2), dims=(16, 16), page_size=1),
    "many_heads": Case([100, 66], [4, 1], heads=(71, 1), dims=(32, 32), page_size=7),
    "window": Case([200, 67], [20, 4], window_left=40, sinks=True),
    "long_window": Case([300], [90], heads=(4, 1), window_left=150, page_size=3),
    "cap_slopes": Case([130, 70], [66, 2], soft_cap=3.0, slopes=True),
    "not_causal": Case([130, 70], [1, 1], window_right=UNLIMITED_WINDOW),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.mark.fast(1)
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@every_case
def test_the_last_tokens_of_an_extend_are_those_of_a_decode_bit_by_bit(
    case: Case, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    extended = build(replace(case, dtype=dtype), kernel_device)
    tiles = tiles_at(kernel_device, extended.case)
    decoded = last_tokens(extended)
    run_extend(extended, tiles=tiles)
    run_decode(decoded, num_programs=5, tiles=tiles)
    assert_served(extended)
    assert_served(decoded)
    assert_same_bits(decoded, extended)


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
def test_sequences_may_begin_after_pages_of_their_rows(dtype: torch.dtype, kernel_device: torch.device) -> None:
    case = Case([130, 64, 1], [1] * 3, page_size=5, window_left=100, first_page=[3, 0, 40], dtype=dtype)
    decoded = build(case, kernel_device)
    run_decode(decoded, num_programs=5, tiles=tiles_at(kernel_device, case))
    assert_served(decoded)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["plain", "odd", "window"])
def test_where_an_extend_keeps_what_lies_left_of_a_segment_changes_no_bit(
    name: str, kernel_device: torch.device
) -> None:
    in_registers, in_memory = (build(CASES[name], kernel_device) for _ in range(2))
    tiles = tiles_at(kernel_device, in_registers.case)
    run_extend(in_registers, tiles=replace(tiles, left_in_memory=False))
    run_extend(in_memory, tiles=replace(tiles, left_in_memory=True))
    assert_served(in_memory)
    assert torch.equal(in_memory.out, in_registers.out)
    assert torch.equal(in_memory.lse, in_registers.lse)


def test_tiles_of_short_steps_change_no_bit(kernel_device: torch.device) -> None:
    long, short = (build(Case([130, 65], [5, 9], dtype=torch.float16), kernel_device) for _ in range(2))
    tiles = tiles_at(kernel_device, long.case)
    run_extend(long, tiles=tiles)
    assert tiles.short
    for each in tiles.of_short_steps(long.gqa_ratio):
        run_extend(short, tiles=each)
        assert torch.equal(short.out, long.out)
        assert torch.equal(short.lse, long.lse)


@pytest.mark.fast(1)
@pytest.mark.parametrize("num_programs", [1, 2, 7, 40])
def test_who_runs_a_segment_changes_no_bit(num_programs: int, kernel_device: torch.device) -> None:
    def decoded(programs: int) -> Tensors:
        tensors = build(Case([200, 0, 64, 129], [1] * 4, window_left=130, heads=(2, 1)), kernel_device)
        run_decode(tensors, num_programs=programs, tiles=tiles_at(kernel_device, tensors.case))
        assert_served(tensors)
        return tensors

    mine, other = decoded(num_programs), decoded(3)
    assert torch.equal(mine.out, other.out)
    assert torch.equal(mine.lse, other.lse)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["plain", "odd", "mha", "window", "long_window", "cap_slopes", "not_causal"])
@pytest.mark.parametrize("programs", [2, 5, 11])
def test_how_programs_share_rows_of_an_extend_changes_no_bit(
    programs: int, name: str, kernel_device: torch.device
) -> None:
    whole, shared = (build(CASES[name], kernel_device) for _ in range(2))
    tiles = replace(tiles_at(kernel_device, whole.case), shared_segments=40, left_in_memory=False)
    run_extend(whole, tiles=tiles)
    assert run_extend(shared, tiles=tiles, sharing=all_shared(tiles, programs)) > 0
    assert_served(shared)
    assert torch.equal(shared.out, whole.out)
    assert torch.equal(shared.lse, whole.lse)


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", ["plain", "long_window", "not_causal"])
def test_rows_that_are_cut_alike_into_segments_keep_their_bits(name: str, kernel_device: torch.device) -> None:
    whole, shared = (build(CASES[name], kernel_device) for _ in range(2))
    tiles = replace(tiles_at(kernel_device, whole.case), shared_segments=40, left_in_memory=False)
    sharing = all_shared(tiles, 80)._replace(split_keys=1 << 12, alike_keys=1)
    run_extend(whole, tiles=tiles)
    cut = extend_cut(shared, tiles.extend, sharing)
    words = extend_schedule(shared.case.kv_len, shared.case.q_len, cut, shared.q.shape[0])
    assert words[SHARE_PARTS.value - SHARE_WORDS] > 1
    run_extend(shared, tiles=tiles, sharing=sharing)
    assert_served(shared)
    assert torch.equal(shared.out, whole.out)
    assert torch.equal(shared.lse, whole.lse)


def test_a_schedule_that_may_leave_gaps_between_rows_is_refused(kernel_device: torch.device) -> None:
    """Slots of partial results follow rows without a gap: otherwise the merge would add up unwritten parts."""
    tensors = build(Case([300, 300], [1, 1]), kernel_device)
    tiles = tiles_at(kernel_device, tensors.case)
    decode = tiles.decode(tensors.gqa_ratio)
    even = DecodeCut.of(decode, num_kv_heads=2, programs=3, window_left=-1)
    without_gaps = DecodeCut.of(decode, num_kv_heads=2, programs=3, window_left=-1, has_slots=True)
    assert without_gaps == replace(even, is_even=False)
    words = torch.zeros(even.words(2), dtype=torch.int32, device=kernel_device)
    with pytest.raises(AssertionError, match="cut for another launch"):
        launch_segment_decode(tensors.args(words), scores=tensors.scores, most_segments=9, cut=even, tiles=tiles)


def test_each_kernel_leaves_the_others_tokens_alone(kernel_device: torch.device) -> None:
    tensors = build(Case([80, 70, 5], [1, 6, 1], tail=2), kernel_device)
    tiles = tiles_at(kernel_device, tensors.case)
    run_extend(tensors, min_q_len=2, tiles=tiles)
    assert (tensors.out[[0, 7]] == UNTOUCHED).all()
    run_decode(tensors, num_programs=3, tiles=tiles)
    assert_served(tensors)


MASKED = {
    "mask": Case([130, 64, 65, 1], [9, 3, 1, 1], masked=True),
    "tree": Case([130, 64, 65, 1, 100], [9, 3, 1, 1, 5], masked=True, mask_keys=0, sinks=True, soft_cap=2.0),
    "window": Case([130, 67], [7, 4], masked=True, mask_keys=30, window_left=50, tail=2),
}


@pytest.mark.fast(1)
@pytest.mark.parametrize("run", [run_extend, run_extend_twin])
@pytest.mark.parametrize("case", MASKED.values(), ids=MASKED)
def test_masked_steps_are_right(case: Case, run: Run, kernel_device: torch.device) -> None:
    tensors = build(case, kernel_device)
    run(tensors, tiles=tiles_at(kernel_device, case)) if run is run_extend else run(tensors)
    assert_served(tensors)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("mask_keys", [0, 20, 200])
def test_a_mask_of_a_chain_changes_no_bit(mask_keys: int, dtype: torch.dtype, kernel_device: torch.device) -> None:
    """For any keys with bits, a token's result equals that of the last token of a causal step, and decode's."""
    lengths, new = [130, 70], [5, 66]
    plain = build(Case(lengths, new, dims=(32, 32), dtype=dtype), kernel_device)
    tiles = tiles_at(kernel_device, plain.case)
    run_extend(plain, tiles=tiles)
    start = [max(length - q_len - mask_keys, 0) for length, q_len in zip(lengths, new, strict=True)]
    cells = [
        [key <= token for key in range(first, length)]
        for first, length, q_len in zip(start, lengths, new, strict=True)
        for token in range(length - q_len, length)
    ]
    sizes = [q_len * (length - first) for first, length, q_len in zip(start, lengths, new, strict=True)]
    mask = PackedMask(
        torch.zeros(sum(new), dtype=torch.int32).to(kernel_device),
        torch.tensor(np.repeat(lengths, new), dtype=torch.int32).to(kernel_device),
        words_of([bit for row in cells for bit in row]).to(kernel_device),
        torch.tensor([0, sizes[0], sum(sizes)]).to(kernel_device),
        torch.tensor(start, dtype=torch.int32).to(kernel_device),
    )
    masked = replace(plain, out=torch.zeros_like(plain.out), lse=torch.zeros_like(plain.lse), mask=mask)
    run_extend(masked, tiles=tiles.of_masked_steps())
    assert torch.equal(masked.out, plain.out)
    assert torch.equal(masked.lse, plain.lse)
    decoded = last_tokens(plain)
    run_decode(decoded, num_programs=5, tiles=tiles)
    assert_same_bits(decoded, masked)


def words_of(bits: list[bool]) -> torch.Tensor:
    """Returns int32 words, the lowest bit of each word first."""
    words = [sum(bit << place for place, bit in enumerate(bits[at : at + 32])) for at in range(0, len(bits), 32)]
    return torch.tensor([word - (word >> 31 << 32) for word in words], dtype=torch.int32)


@pytest.mark.fast
@every_case
def test_the_twin_is_right(case: Case, kernel_device: torch.device) -> None:
    assert_serves(run_extend_twin, case, kernel_device)
    assert_serves(run_extend_twin, case.decodes(), kernel_device)


def test_decode_and_extend_of_a_row_share_what_decides_bits() -> None:
    """If a compiler may order a sum by the shape of a tile, both use one shape."""
    for row in SEGMENT_ROWS:
        tiles = row.tiles
        by_rows_alone = row.item_bytes == 2 and (row.arch.startswith("gfx") or tiles.decode_rows >= 64)
        same_shape = (tiles.decode_rows, tiles.decode_warps) == (tiles.extend.query_rows, tiles.extend.num_warps)
        assert by_rows_alone or same_shape, row
        # The interpreter's products are the same for every shape.
        assert by_rows_alone or row.arch == "interpreter" or not tiles.short, row
        assert row.arch != "sm_90" or all(short.query_rows >= 64 for short in tiles.short), row
        assert tiles.matrix_dim == (16 if row.arch.startswith("gfx") else 0)


def test_a_shape_without_tiles_is_refused_with_the_archs_that_have_some() -> None:
    with pytest.raises(NoTiles, match=r"no deterministic tiles for gfx90a .* rows exist for sm_90, sm_\*, gfx942"):
        segment_tiles("gfx90a", head_dim=64, v_head_dim=64, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("max_kv_len", "window_left", "segments"),
    [(1, -1, 1), (64, -1, 1), (65, -1, 2), (500, 0, 2), (500, 64, 3), (9, 64, 1)],
)
def test_the_workspace_has_a_slot_for_every_segment_a_token_sees(
    max_kv_len: int, window_left: int, segments: int
) -> None:
    tiles = replace([*SEGMENT_ROWS][-1].tiles, segment_len=64)
    assert tiles.most_segments(max_kv_len, window_left) == segments
    if window_left < 0:
        return
    seen = {len(range(max(0, length - 1 - window_left) // 64, -(-length // 64))) for length in range(1, max_kv_len + 1)}
    assert max(seen) <= segments
