"""8-bit codes against torch's own casts, and attention over them, with every kind of scale, against float64."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch

from rocm_attn.kernels.cache.page_format import Encoding, Scales
from rocm_attn.kernels.tuning.segment_tiles import SegmentTiles
from rocm_attn.kernels.tuning.tiles import DecodeTiles, ExtendTiles
from tests.amd.kernels import segment_cases
from tests.amd.kernels.attention_cases import (
    Case,
    Run,
    Tensors,
    assert_served,
    assert_serves,
    build,
    dtypes,
    run_decode,
    run_decode_twin,
    run_extend,
    run_extend_twin,
    run_shared_extend,
)
from tests.amd.kernels.codes_kernels import FP8, decode_all, encode, numbers_to_encode
from tests.amd.tolerances import assert_attention_close, assert_lse_close

SCALES = (Scales.LAYER, Scales.HEAD, Scales.TOKEN)
each_scales = pytest.mark.parametrize("scales", SCALES, ids=lambda s: s.name)


def by_turns(name: str, values: Sequence[object]) -> pytest.MarkDecorator:
    """Parametrizes by values and kinds of scale. Every run has each value with one kind, and each kind with a value."""
    return pytest.mark.parametrize(
        ("scales", name),
        [
            pytest.param(
                scales,
                value,
                id=f"{scales.name}-{getattr(value, 'name', value)}",
                marks=[pytest.mark.nightly] * (row != column % len(SCALES)),
            )
            for row, scales in enumerate(SCALES)
            for column, value in enumerate(values)
        ],
    )


EVERY_DECODE = (run_decode, run_decode_twin)
EVERY_EXTEND = (run_extend, run_shared_extend, run_extend_twin)

# Pages of three tokens, heads and dims that leave lanes empty; a sequence without keys.
DECODES = Case([33, 1, 0], [1] * 3, heads=(6, 2), dims=(24, 40), page_size=3, spread=True)
EXTENDS = Case([27, 9, 0], [2, 9, 0], heads=(4, 2), dims=(24, 40), page_size=3, tail=2, spread=True)


@pytest.mark.fast
@by_turns("encoding", FP8)
@pytest.mark.parametrize("run", EVERY_DECODE, ids=lambda run: run.__name__)
def test_decode_reads_every_encoding_with_every_kind_of_scale(
    run: Run, encoding: Encoding, scales: Scales, kernel_device: torch.device
) -> None:
    assert_serves(run, replace(DECODES, kv=encoding, scales=scales), kernel_device)


@pytest.mark.fast
@by_turns("encoding", FP8)
@pytest.mark.parametrize("run", EVERY_EXTEND, ids=lambda run: run.__name__)
def test_extend_reads_every_encoding_with_every_kind_of_scale(
    run: Run, encoding: Encoding, scales: Scales, kernel_device: torch.device
) -> None:
    assert_serves(run, replace(EXTENDS, kv=encoding, scales=scales), kernel_device)


@pytest.mark.fast(1)
@each_scales
@pytest.mark.parametrize("dtype", dtypes()[1:], ids=str)
def test_q_of_sixteen_bits_loses_nothing_of_the_codes(
    scales: Scales, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    for case, run in ((DECODES, run_decode), (EXTENDS, run_extend)):
        assert_serves(run, replace(case, dtype=dtype, kv=Encoding.E4M3FNUZ, scales=scales), kernel_device)


@pytest.mark.fast(1)
@by_turns(
    "scores",
    [
        {"window_left": 5, "sinks": True},
        {"soft_cap": 1.5, "slopes": True},
        {"soft_cap": 1.5, "sinks": True, "window_left": 9},
        {"slopes": True},
    ],
)
def test_scales_meet_caps_slopes_sinks_and_windows_where_they_must(
    scales: Scales, scores: dict[str, float], kernel_device: torch.device
) -> None:
    """A scale of K applies before the cap; no scale of V changes a sink's share."""
    case = replace(EXTENDS, kv=Encoding.E4M3FN, scales=scales, **scores)  # type: ignore[arg-type]
    tensors = build(case, kernel_device)
    run_extend(tensors)
    assert_served(tensors)
    assert_serves(run_decode, replace(case.decodes(), kv_len=[33, 1, 0], tail=0), kernel_device)


@pytest.mark.fast(1)
@by_turns("how", [{}, {"transposed": True}, {"paired": True}])
def test_two_heads_in_one_row_have_a_scale_each(
    how: dict[str, bool], scales: Scales, kernel_device: torch.device
) -> None:
    tiles = DecodeTiles(16, 1, 1, 1, heads_per_row=2, **how)
    case = replace(DECODES, heads=(12, 4), dims=(32, 32), kv=Encoding.E4M3FN, scales=scales)
    for some in (case, replace(case, soft_cap=1.5, dtype=torch.float16)):
        assert_serves(run_decode, some, kernel_device, tiles=tiles)


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("dims", "page_size"), [((24, 40), 2), ((24, 40), 8), ((24, 40), 48), ((33, 40), 8), ((24, 17), 8)], ids=str
)
def test_pairs_are_read_from_pages_of_any_size_and_never_across_odd_rows(
    dims: tuple[int, int], page_size: int, kernel_device: torch.device
) -> None:
    """Pages smaller than a key block have a number each. Rows of odd lengths, of K or of V, are not read in pairs."""
    layer = replace(DECODES, dims=dims, page_size=page_size, kv=Encoding.E4M3FN, dtype=torch.float16, window_left=21)
    assert_serves(run_decode, layer, kernel_device, tiles=DecodeTiles(32, 1, 1, 1, paired=True))


@pytest.mark.fast
@pytest.mark.parametrize("heads_per_row", [1, 2])
@pytest.mark.parametrize("change", [2.0**-40, 2.0**-75], ids=str)
@pytest.mark.parametrize("first", [0, 1])
def test_scales_of_tokens_may_differ_far_from_block_to_block(
    first: int, change: float, heads_per_row: int, kernel_device: torch.device
) -> None:
    """Weights are float16 and sums float32: neither may vanish or overflow because of another block's scales.

    Every second page has small scales, starting with page `first`.
    """
    tiles = DecodeTiles(16, 1, 1, 1, heads_per_row=heads_per_row, paired=True)
    case = Case([64], [1], heads=(4, 2), dims=(32, 32), page_size=16, kv=Encoding.E4M3FN, scales=Scales.TOKEN)
    # Codes are never read in pairs for float32.
    tensors = build(replace(case, dtype=torch.float16), kernel_device)
    scales = tensors.pages.v_scale
    assert scales is not None
    for page in tensors.table[tensors.row_of_seq[0], first:4:2].tolist():
        scales[page] *= change
    run_decode_twin(tensors)
    want, lse = tensors.out.double(), tensors.lse.double()
    assert not torch.allclose(want, tensors.reference, rtol=0.1), "the factors are those of before"
    run_decode(tensors, num_programs=1, tiles=tiles)
    assert_attention_close(tensors.out, want, torch.float16)
    assert_lse_close(tensors.lse, lse, torch.float16)


def test_a_scale_that_is_no_number_stays_with_its_head(kernel_device: torch.device) -> None:
    """Two heads of a row share one amount, which ignores scales that are NaN."""
    tiles = DecodeTiles(16, 1, 1, 1, heads_per_row=2, paired=True)
    case = Case([64], [1], heads=(4, 2), dims=(32, 32), page_size=16, kv=Encoding.E4M3FN, scales=Scales.TOKEN)
    tensors = build(replace(case, dtype=torch.float16), kernel_device)
    assert tensors.pages.v_scale is not None
    tensors.pages.v_scale[tensors.table[tensors.row_of_seq[0], 1], 0, 3] = float("nan")
    run_decode(tensors, num_programs=1, tiles=tiles)
    assert tensors.out[:, :2].isnan().all()
    assert_attention_close(tensors.out[:, 2:], tensors.reference[:, 2:], torch.float16)


@pytest.mark.fast(1)
@each_scales
@pytest.mark.parametrize("run", EVERY_EXTEND, ids=lambda run: run.__name__)
def test_a_packed_mask_hides_keys_and_their_scales(run: Run, scales: Scales, kernel_device: torch.device) -> None:
    assert_serves(run, replace(EXTENDS, masked=True, kv=Encoding.E4M3FN, scales=scales), kernel_device)


def with_k_of_zeros(case: Case, device: torch.device) -> tuple[Tensors, Tensors]:
    """Returns a step whose scales of K are 0, and one whose queries are 0: all scores are 0 in both."""
    tensors, alike = build(case, device), build(case, device)
    assert tensors.pages.k_scale is not None
    tensors.pages.k_scale.zero_()
    alike.q.zero_()
    return tensors, alike


def run_segment_extend(tensors: Tensors) -> None:
    segment_cases.run_extend(tensors, tiles=SegmentTiles(32, 16, 16, 1, 1, 1, ExtendTiles(16, 16, 1, 1)))


@pytest.mark.parametrize(
    ("run", "masked", "window_left", "scales"),
    [
        pytest.param(
            *way, marks=[] if way[1:] == (True, -1, Scales.HEAD) and way[0] is run_extend else [pytest.mark.nightly]
        )
        for way in product(
            [*EVERY_EXTEND, run_segment_extend], [False, True], [-1, 5], [Scales.LAYER, Scales.HEAD, Scales.TOKEN]
        )
    ],
)
def test_where_a_scale_of_k_is_zero_all_keys_that_a_row_sees_weigh_alike(
    run: Run, masked: bool, window_left: int, scales: Scales, kernel_device: torch.device
) -> None:
    """The score of an unseen key is -inf, and 0 times that is NaN. Rows without keys are 0, and their LSE is -inf."""
    case = replace(EXTENDS, kv=Encoding.E4M3FN, scales=scales, masked=masked, window_left=window_left)
    tensors, alike = with_k_of_zeros(case, kernel_device)
    run(tensors)
    run(alike)
    num_tokens = sum(case.q_len)
    assert tensors.out.isfinite().all()
    torch.testing.assert_close(tensors.out, alike.out)
    torch.testing.assert_close(tensors.lse, alike.lse)
    sees_nothing = tensors.lse[:num_tokens].isneginf()
    assert sees_nothing.any() == masked
    assert not tensors.out[:num_tokens][sees_nothing].any()


@pytest.mark.nightly
@each_scales
def test_where_a_scale_of_k_is_zero_decode_weighs_all_keys_alike(scales: Scales, kernel_device: torch.device) -> None:
    tensors, alike = with_k_of_zeros(replace(DECODES, kv=Encoding.E4M3FN, scales=scales, window_left=5), kernel_device)
    run_decode(tensors)
    run_decode(alike)
    torch.testing.assert_close(tensors.out, alike.out)
    torch.testing.assert_close(tensors.lse, alike.lse)


@pytest.mark.fast(1)
@each_scales
@pytest.mark.parametrize("encoding", [Encoding.E4M3FNUZ, Encoding.E5M2], ids=lambda encoding: encoding.name)
def test_deterministic_decode_and_extend_give_a_token_the_same_bits(
    encoding: Encoding, scales: Scales, kernel_device: torch.device
) -> None:
    case = replace(EXTENDS, kv_len=[70, 33], q_len=[3, 2], heads=(2, 1), kv=encoding, scales=scales)
    extended = build(case, kernel_device)
    decoded = segment_cases.last_tokens(extended)
    tiles = SegmentTiles(32, 16, 16, 1, 1, 1, ExtendTiles(16, 16, 1, 1))
    segment_cases.run_extend(extended, tiles=tiles)
    segment_cases.run_decode(decoded, num_programs=3, tiles=tiles)
    assert_served(extended)
    assert_served(decoded)
    segment_cases.assert_same_bits(decoded, extended)
    assert_serves(segment_cases.run_extend_twin, case, kernel_device)


each_encoding = pytest.mark.parametrize("encoding", FP8, ids=lambda encoding: encoding.name)
_INTEGERS = {2: torch.int16, 4: torch.int32}


@each_encoding
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_code_is_read_exactly(encoding: Encoding, dtype: torch.dtype, kernel_device: torch.device) -> None:
    numbers, wanted = decode_all(encoding, dtype, kernel_device)
    assert torch.equal(numbers.isnan(), wanted.isnan())
    as_bits = _INTEGERS[dtype.itemsize]
    is_number = ~wanted.isnan()
    assert torch.equal(numbers.view(as_bits)[is_number], wanted.view(as_bits)[is_number])


def test_the_codes_that_are_no_numbers_are_those_of_the_specifications(kernel_device: torch.device) -> None:
    nan = {e: decode_all(e, torch.float32, kernel_device)[0].isnan().nonzero().flatten().tolist() for e in FP8}
    assert nan[Encoding.E4M3FN] == [0x7F, 0xFF]
    assert nan[Encoding.E4M3FNUZ] == [0x80]
    assert nan[Encoding.E5M2] == [0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]


@each_encoding
def test_numbers_between_codes_become_the_nearest_and_the_even_one_of_two(
    encoding: Encoding, kernel_device: torch.device
) -> None:
    codes, wanted = encode(numbers_to_encode(encoding).to(kernel_device), encoding)
    assert torch.equal(codes, wanted)


@pytest.mark.fast
@each_encoding
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_number_of_sixteen_bits_is_written_as_torch_writes_it(
    encoding: Encoding, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    numbers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    codes, wanted = encode(numbers[~numbers.isnan()].to(kernel_device), encoding)
    assert torch.equal(codes, wanted)


@each_encoding
def test_what_is_beyond_the_largest_is_the_largest_and_never_infinite(
    encoding: Encoding, kernel_device: torch.device
) -> None:
    codes, _ = encode(torch.tensor([1e30, -1e30, float("inf"), encoding.largest], device=kernel_device), encoding)
    numbers = codes[:4].cpu().view(encoding.dtype).float()
    assert numbers.tolist() == [encoding.largest, -encoding.largest, encoding.largest, encoding.largest]
