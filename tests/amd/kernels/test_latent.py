"""Attention over latent pages against a float64 reference, with NaN in everything that may not be read."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rocm_attn.kernels.cache.page_format import Encoding, Scales
from rocm_attn.kernels.tuning.latent_tiles import (
    LatentTiles,
    latent_decode_tiles,
    latent_extend_tiles,
    latent_segment_tiles,
)
from rocm_attn.kernels.tuning.tiles import NoTiles
from rocm_attn.problem import UNLIMITED_WINDOW
from tests.amd.kernels.attention_cases import (
    UNTOUCHED,
    Case,
    Tensors,
    assert_served,
    assert_serves,
    build,
    dtypes,
    run_decode_twin,
    run_extend_twin,
)
from tests.amd.kernels.latent_cases import (
    run_latent_decode,
    run_latent_extend,
    run_latent_segment_decode,
    run_latent_segment_extend,
)
from tests.amd.kernels.matrix_unit import use_matrix_unit
from tests.amd.kernels.segment_cases import assert_same_bits, last_tokens
from tests.amd.tolerances import assert_attention_close, assert_lse_close

# Empty, one key, a page and a tile more or less, and one that several programs share. All have one new token.
KV_LEN = [33, 0, 1, 16, 70, 15]
DECODES = Case(kv_len=KV_LEN, q_len=[1] * len(KV_LEN), heads=(4, 1), dims=(48, 32), latent=True)
# One to eight new tokens, none, and a sequence without keys.
DRAFTS = replace(DECODES, kv_len=[40, 9, 70, 5, 33, 12, 0], q_len=[3, 1, 8, 2, 0, 5, 0])
CHUNKS = replace(DECODES, kv_len=[40, 9, 36, 33, 6, 0], q_len=[5, 1, 9, 0, 6, 0], tail=5)

GEOMETRIES = {
    "256+32": replace(DECODES, dims=(288, 256), heads=(16, 1), page_size=64),
    "128+64": replace(DECODES, dims=(192, 128), heads=(12, 1), page_size=1),
    "64+16": replace(DECODES, dims=(80, 64), heads=(8, 1), page_size=16),
    "64+0": replace(DECODES, dims=(64, 64), heads=(20, 1), page_size=128),
    "40+24": replace(DECODES, dims=(64, 40), heads=(17, 1), page_size=5),
    "128_heads": replace(DECODES, dims=(24, 16), heads=(128, 1), page_size=32),
    "spread": replace(DECODES, heads=(6, 1), page_size=3, spread=True),
    "after_first_pages": replace(DECODES, page_size=5, first_page=[3, 0, 2, 7, 1, 40]),
    "window_sinks_cap": replace(DECODES, window_left=9, sinks=True, soft_cap=1.5),
}
DRAFTED = {
    "plain": DRAFTS,
    "20_heads": replace(DRAFTS, heads=(20, 1), page_size=1),
    "70_heads": replace(DRAFTS, heads=(70, 1), dims=(24, 16)),
    "12_of_kimi_k3": replace(DRAFTS, kv_len=[50, 9], q_len=[8, 5], dims=(576, 512), heads=(12, 1), dtype=torch.float16),
    "window": replace(DRAFTS, heads=(20, 1), window_left=11, sinks=True),
    "not_causal": replace(DRAFTS, window_right=UNLIMITED_WINDOW),
    "masked": replace(DRAFTS, masked=True),
    "tree": replace(DRAFTS, masked=True, mask_keys=0, heads=(20, 1), sinks=True),
    "masked_cap": replace(DRAFTS, masked=True, mask_keys=7, soft_cap=1.5),
    "masked_eight_bits": replace(
        DRAFTS, masked=True, mask_keys=3, kv=Encoding.E4M3FN, scales=Scales.LAYER, dtype=torch.float16
    ),
}
EXTENDED = {
    "plain": CHUNKS,
    "odd": replace(CHUNKS, heads=(5, 1), window_left=13, soft_cap=2.0, sinks=True, page_size=3, spread=True),
    "70_heads": replace(CHUNKS, heads=(70, 1), dims=(32, 32), kv_len=[40], q_len=[19]),
    "not_causal": replace(CHUNKS, window_right=UNLIMITED_WINDOW),
    "masked": replace(CHUNKS, masked=True),
    "masked_window": replace(CHUNKS, masked=True, mask_keys=7, window_left=10, soft_cap=1.5),
    "tree": replace(CHUNKS, masked=True, mask_keys=0),
    "ranges": replace(CHUNKS, ranged=True, window_right=UNLIMITED_WINDOW),
    "ranges_of_a_window": replace(CHUNKS, ranged=True, window_left=20, window_right=UNLIMITED_WINDOW, sinks=True),
    # A token in each query block, so that its rows begin at one key, and whole key blocks need no mask.
    "chunk": replace(CHUNKS, kv_len=[140], q_len=[19], heads=(70, 1), dims=(32, 32), ranged=True, window_left=127),
}


@pytest.mark.fast(2)
@pytest.mark.parametrize("case", GEOMETRIES.values(), ids=GEOMETRIES)
def test_decode_equals_the_reference(case: Case, kernel_device: torch.device) -> None:
    for dtype in latent_dtypes(kernel_device)[-1:]:
        assert_serves(run_latent_decode, replace(case, dtype=dtype), kernel_device)


@pytest.mark.parametrize(
    ("dims", "heads"),
    [((576, 512), 12), *(pytest.param((512, 512), heads, marks=pytest.mark.nightly) for heads in (16, 3))],
)
def test_the_dims_of_deepseek_are_right(dims: tuple[int, int], heads: int, kernel_device: torch.device) -> None:
    case = replace(DECODES, kv_len=[20, 3], q_len=[1, 1], dims=dims, heads=(heads, 1), dtype=torch.float16)
    assert_serves(run_latent_decode, case, kernel_device, compute_units=2)


CODED = {
    "layer": replace(DECODES, kv=Encoding.E4M3FN, scales=Scales.LAYER, sinks=True, soft_cap=2.0),
    "token": replace(DECODES, kv=Encoding.E4M3FNUZ, scales=Scales.TOKEN, heads=(20, 1)),
    "head": replace(DECODES, kv=Encoding.E5M2, scales=Scales.HEAD),
}


@pytest.mark.fast(1)
@pytest.mark.parametrize("case", CODED.values(), ids=CODED)
def test_latents_in_eight_bits_are_what_their_codes_are_worth(case: Case, kernel_device: torch.device) -> None:
    dtypes_here = latent_dtypes(kernel_device)
    ways = ((run_latent_decode, dtypes_here[0], case.q_len), (run_latent_extend, dtypes_here[-1], [3, 0, 1, 16, 2, 0]))
    for run, dtype, q_len in ways:
        assert_serves(run, replace(case, dtype=dtype, q_len=q_len), kernel_device)


def test_rows_of_zeros_see_all_keys_alike_however_small_the_scale_of_k_is(kernel_device: torch.device) -> None:
    """Rows of bfloat16 are converted with a scale, and the product of both scales and -inf must not be NaN."""
    tensors = build(replace(DECODES, dtype=torch.bfloat16, kv=Encoding.E4M3FN, scales=Scales.LAYER), kernel_device)
    assert tensors.k_scale is not None
    tensors.q.zero_()
    tensors.k_scale.fill_(2.0**-40)
    run_latent_decode(tensors)
    torch.testing.assert_close(tensors.lse, tensors.kv_len.float().log()[:, None].expand_as(tensors.lse))


@pytest.mark.fast(1)
@pytest.mark.parametrize("case", DRAFTED.values(), ids=DRAFTED)
def test_a_few_new_tokens_are_split_over_their_keys(case: Case, kernel_device: torch.device) -> None:
    for dtype in latent_dtypes(kernel_device)[-1:]:
        assert_serves(run_latent_decode, replace(case, dtype=dtype), kernel_device, most=8, compute_units=4)


@pytest.mark.fast
@pytest.mark.parametrize("key_block", [16, 32, 64])
@pytest.mark.parametrize("mask_keys", [0, 40])
def test_blocks_of_one_word_and_of_two_read_their_bits(
    key_block: int, mask_keys: int, kernel_device: torch.device
) -> None:
    case = replace(DRAFTS, kv_len=[140, 64, 63, 97], q_len=[3, 8, 2, 5], masked=True, mask_keys=mask_keys)
    tiles = LatentTiles(32, key_block, 4, 1, chains=2)
    case = replace(case, dtype=torch.float16)
    assert_serves(run_latent_decode, case, kernel_device, most=8, compute_units=3, tiles=tiles)


@pytest.mark.fast(1)
@pytest.mark.parametrize("case", EXTENDED.values(), ids=EXTENDED)
def test_extend_equals_the_reference(case: Case, kernel_device: torch.device) -> None:
    for dtype in latent_dtypes(kernel_device)[-1:]:
        tensors = build(replace(case, dtype=dtype), kernel_device)
        tiles = latent_extend_tiles(tensors.arch, dims=case.dims, dtype=dtype, is_coded=case.kv is not None)
        run_latent_extend(tensors, tiles=tiles.of_masked_steps() if case.masked else tiles)
        assert_served(tensors)


@pytest.mark.fast(1)
@pytest.mark.parametrize("case", [EXTENDED[name] for name in ("masked", "masked_window", "tree")])
def test_deterministic_masked_steps_are_right(case: Case, kernel_device: torch.device) -> None:
    assert_serves(run_latent_segment_extend, replace(case, dtype=torch.float16), kernel_device)


@pytest.mark.parametrize("case", [DECODES, DRAFTS, CHUNKS], ids=["decodes", "drafts", "chunks"])
def test_the_twins_of_linear_pages_serve_latent_ones(case: Case, kernel_device: torch.device) -> None:
    assert_serves(run_decode_twin if case is DECODES else run_extend_twin, case, kernel_device)


@pytest.mark.fast(1)
@pytest.mark.parametrize("compute_units", [1, 7, pytest.param(40, marks=pytest.mark.nightly)])
def test_any_number_of_programs_gives_the_same_answer(compute_units: int, kernel_device: torch.device) -> None:
    case = replace(DRAFTS, kv_len=[100, 3, 50, 0, 20], q_len=[1, 2, 4, 0, 1], dims=(24, 16), dtype=torch.float16)
    assert_serves(run_latent_decode, case, kernel_device, compute_units=compute_units, most=8)


@pytest.mark.nightly
def test_rows_that_are_cut_alike_may_have_padding_after_them(kernel_device: torch.device) -> None:
    """Rows have 31 blocks, which cost 33, in two shares of 17."""
    case = replace(DECODES, kv_len=[490] * 6, q_len=[1] * 6, tail=0)
    assert_serves(run_latent_decode, case, kernel_device, compute_units=13, tiles=LatentTiles(16, 16, 1, 1, even=True))


def test_each_kernel_leaves_the_others_tokens_alone(kernel_device: torch.device) -> None:
    """Decode of one token, of two to four, and extend of more serve one step."""
    case = replace(CHUNKS, kv_len=[40, 9, 20, 5, 33, 12], q_len=[6, 1, 4, 2, 0, 5], dtype=torch.float16)
    tensors = build(case, kernel_device)
    steps: tuple[tuple[Callable[[], None], list[int]], ...] = (
        (lambda: run_latent_extend(tensors, min_q_len=5), [0, 5]),
        (lambda: run_latent_decode(tensors, fewest=2, most=4), [2, 3]),
        (lambda: run_latent_decode(tensors), [1]),
    )
    waiting = torch.ones(tensors.out.shape[0], dtype=torch.bool, device=kernel_device)
    waiting[-case.tail :] = False
    for run, seqs in steps:
        run()
        for seq in seqs:
            waiting[tensors.q_indptr[seq] : tensors.q_indptr[seq + 1]] = False
        assert (tensors.out[waiting] == UNTOUCHED).all()
        assert (tensors.lse[waiting] == UNTOUCHED).all()
        assert_attention_close(tensors.out[~waiting], tensors.reference[~waiting], case.dtype)
        assert_lse_close(tensors.lse[~waiting], tensors.reference_lse[~waiting], case.dtype)


def test_a_table_without_an_entry_to_spare_is_enough(kernel_device: torch.device) -> None:
    tensors = build(replace(DECODES, kv_len=[48, 16], q_len=[1, 1], dtype=torch.float16), kernel_device)
    run_latent_decode(replace(tensors, table=tensors.table[:, :3].clone()))
    assert_served(tensors)


def test_pages_beyond_two_to_the_31_elements_are_read(kernel_device: torch.device) -> None:
    for run, case in ((run_latent_decode, DECODES), (run_latent_extend, replace(CHUNKS, kv_len=[20, 3], q_len=[5, 0]))):
        tensors = build(replace(case, dtype=torch.float16), kernel_device)
        pool_shape = (2**31 // tensors.k_pages[0].numel() + 8, *tensors.k_pages.shape[1:])
        first = pool_shape[0] - tensors.k_pages.shape[0]
        # NumPy's zeros take memory only where they are written; the test session fills torch's with NaN.
        pool = torch.from_numpy(np.zeros(pool_shape, np.float16)).to(kernel_device)
        pool[first:] = tensors.k_pages
        large = replace(tensors, k_pages=pool, v_pages=pool[..., : case.dims[1]], table=tensors.table + first)
        run(large)
        assert_served(large)


DETERMINISTIC = {
    "plain": replace(DECODES, kv_len=[130, 65, 1], q_len=[5, 2, 1]),
    "window": replace(DECODES, kv_len=[200, 67], q_len=[20, 4], window_left=40, sinks=True, heads=(12, 1)),
    "many_heads": replace(DECODES, kv_len=[100, 66], q_len=[4, 1], heads=(71, 1), dims=(32, 32), soft_cap=3.0),
    "not_causal": replace(DECODES, kv_len=[130, 70], q_len=[1, 1], window_right=UNLIMITED_WINDOW),
}


@pytest.mark.fast(1)
@pytest.mark.parametrize("case", DETERMINISTIC.values(), ids=DETERMINISTIC)
def test_the_last_tokens_of_an_extend_are_those_of_a_decode_bit_by_bit(
    case: Case, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_matrix_unit(monkeypatch)
    for dtype in latent_dtypes(kernel_device)[-1:]:
        extended = build(replace(case, dtype=dtype), kernel_device)
        decoded = last_tokens(extended)
        tiles = latent_segment_tiles(extended.arch, dims=case.dims, dtype=dtype)
        tiles = replace(tiles, segment_len=64)
        run_latent_segment_extend(extended, tiles=tiles)
        run_latent_segment_decode(decoded, tiles=tiles)
        assert_served(extended)
        assert_served(decoded)
        assert_same_bits(decoded, extended)


def test_deterministic_decode_refuses_rows_that_are_cut_alike(kernel_device: torch.device) -> None:
    """The padding after such rows has no slots."""
    tensors = build(DECODES, kernel_device)
    tiles = latent_segment_tiles(tensors.arch, dims=DECODES.dims, dtype=DECODES.dtype)
    even = replace(tiles, decoders=(), block=replace(tiles.of_decode(DECODES.heads[0]), even=True))
    with pytest.raises(AssertionError, match="partial results have slots"):
        run_latent_segment_decode(tensors, tiles=even)


@pytest.mark.nightly
def test_who_runs_a_segment_changes_no_bit(kernel_device: torch.device) -> None:
    def decoded(compute_units: int) -> Tensors:
        case = replace(DECODES, kv_len=[300, 0, 64, 129], q_len=[1] * 4, window_left=200, dtype=torch.float16)
        tensors = build(case, kernel_device)
        run_latent_segment_decode(tensors, compute_units=compute_units)
        assert_served(tensors)
        return tensors

    mine, other = decoded(7), decoded(2)
    assert torch.equal(mine.out, other.out)
    assert torch.equal(mine.lse, other.lse)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"heads": (129, 1)}, "129 query heads are too many; at most 128"),
        ({"dims": (576, 448)}, r"head_dim is 576; it must be from v_head_dim to v_head_dim \+ 64"),
        ({"dims": (544, 520)}, "v_head_dim is 520"),
        ({"page_size": 256}, "page_size is 256"),
    ],
)
def test_what_no_kernel_serves_is_refused_with_the_reason(
    change: dict[str, Any], reason: str, kernel_device: torch.device
) -> None:
    tensors = build(replace(DECODES, kv_len=[3], q_len=[1], dtype=torch.float16, **change), kernel_device)
    for run in (run_latent_decode, run_latent_extend):
        with pytest.raises(ValueError, match=reason):
            run(tensors, tiles=LatentTiles(query_rows=16, key_block=16, num_warps=4, num_stages=1))


def test_dims_without_tiles_are_named() -> None:
    with pytest.raises(NoTiles, match=r"rows of 512 \+ 128 elements.*for up to 512 \+ 64"):
        latent_decode_tiles("gfx942", num_rows=16, dims=(640, 512), dtype=torch.bfloat16, is_coded=False)


def latent_dtypes(device: torch.device) -> list[torch.dtype]:
    """Returns the dtypes that the tuning table has rows for here: float32 only in the interpreter."""
    return [dtype for dtype in dtypes() if device.type == "cpu" or dtype.itemsize == 2]
