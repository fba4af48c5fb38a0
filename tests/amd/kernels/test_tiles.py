"""The tuning table: problems with a row, errors for those without, and limits of a row."""

import itertools
import pkgutil
from dataclasses import replace
from typing import Any

import pytest
import torch

from rocm_attn.kernels.attention.limits import DTYPES, MAX_GQA_RATIO, MAX_HEAD_DIM
from rocm_attn.kernels.attention.mask_bits import TWO_WORDS
from rocm_attn.kernels.tuning.decode_tiles import DECODE_CHOICES, decode_tiles
from rocm_attn.kernels.tuning.extend_tiles import EXTEND_CHOICES, extend_choices
from rocm_attn.kernels.tuning.hopper_tiles import CODED_SEGMENT_DIMS, DIMS, hopper_segment_tiles, hopper_tiles
from rocm_attn.kernels.tuning.segment_tiles import SEGMENT_ROWS, segment_tiles
from rocm_attn.kernels.tuning.tile_choices import TableFile
from rocm_attn.kernels.tuning.tiles import CodeKind, DecodeTileChoice, DecodeTiles, ExtendTiles, NoTiles

ARCHS = ("sm_90", "sm_80", "sm_120", "gfx942", "gfx950", "interpreter", "cpu")
BF16 = torch.bfloat16


def decode_for(arch: str, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype = BF16) -> DecodeTiles:
    return decode_tiles(
        arch,
        gqa_ratio=heads[0] // heads[1],
        num_kv_heads=heads[1],
        head_dim=dims[0],
        v_head_dim=dims[1],
        dtype=dtype,
    )


@pytest.mark.fast
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whatever_the_kernels_serve_has_a_row(arch: str, dtype: torch.dtype) -> None:
    # In float32, in which no model is served, rows of 512 spill on AMD.
    has_wide = dtype != torch.float32 or arch in ("sm_90", "interpreter", "cpu")
    largest = MAX_HEAD_DIM if has_wide else 256
    dims = (1, 16, 64, 80, 96, 128, 192, 256, largest)
    for gqa_ratio, head_dim, v_head_dim in itertools.product((1, 3, 8, 16, 71, MAX_GQA_RATIO), dims, dims):
        for num_kv_heads in (1, 2, 3):
            tiles = decode_for(arch, (gqa_ratio * num_kv_heads, num_kv_heads), (head_dim, v_head_dim), dtype)
            assert num_kv_heads % tiles.heads_per_row == 0
            assert tiles.q_rows(gqa_ratio) * tiles.rows_per_seq(num_kv_heads) >= gqa_ratio * num_kv_heads
            assert tiles.q_rows(gqa_ratio) <= 64
            shape: dict[str, Any] = {"gqa_ratio": gqa_ratio, "num_kv_heads": num_kv_heads, "dtype": dtype}
            *short, extend = extend_choices(arch, head_dim=head_dim, v_head_dim=v_head_dim, **shape)
            assert extend.tiles.tokens_per_block(gqa_ratio) >= 1
            assert all(num_kv_heads % row.tiles.heads_per_row == 0 for row in short)


@pytest.mark.parametrize(
    ("arch", "dtype", "dims", "words"),
    [
        ("gfx1100", BF16, (128, 128), "no decode tiles for gfx1100 with torch.bfloat16"),
        ("sm_90", torch.float64, (128, 128), "no decode tiles for sm_90 with torch.float64"),
        ("gfx942", BF16, (128, 513), "head dims 128 and 513; with torch.bfloat16 they may be up to 512 there"),
        ("gfx942", torch.float32, (512, 512), "with torch.float32 they may be up to 256 there"),
        ("", BF16, (128, 128), r"rows exist for sm_90, sm_\*, gfx942, gfx950, interpreter"),
    ],
)
def test_a_miss_is_an_error_that_says_what_exists(
    arch: str, dtype: torch.dtype, dims: tuple[int, int], words: str
) -> None:
    with pytest.raises(NoTiles, match=words):
        decode_for(arch, (8, 8), dims, dtype)


def test_a_family_serves_only_members_without_a_row_of_their_own() -> None:
    family = next(row.tiles for row in DECODE_CHOICES if row.arch == "sm_")
    assert decode_for("sm_80", (8, 8), (128, 128)) == family
    assert decode_for("sm_90", (8, 8), (128, 128)) != family


@pytest.mark.parametrize("arch", ["sm_90", "gfx942", "gfx950"])
def test_heads_of_64_are_paired_where_two_fit_a_tile(arch: str) -> None:
    assert decode_for(arch, (64, 8), (64, 64)).heads_per_row == 2
    assert decode_for(arch, (9, 3), (64, 64)).heads_per_row == 1, "an odd number of KV heads"
    assert decode_for(arch, (32, 2), (64, 64)).heads_per_row == 1, "32 query heads in a pair"
    assert decode_for(arch, (8, 2), (64, 32)).heads_per_row == 1, "columns of different widths"


def test_large_groups_of_query_heads_are_cut_evenly() -> None:
    tiles = decode_for("gfx942", (71, 1), (64, 64))
    assert (tiles.head_blocks, tiles.q_rows(71), tiles.rows_per_seq(1)) == (3, 24, 3)


def test_layers_of_windows_have_tiles_of_their_own_up_to_the_windows_that_they_were_measured_with() -> None:
    def of_many_tokens(dim: int, **window: Any) -> ExtendTiles:
        shape: dict[str, Any] = {"gqa_ratio": 8, "num_kv_heads": 8, "head_dim": dim, "v_head_dim": dim, "dtype": BF16}
        return extend_choices("sm_90", **shape, **window)[-1].tiles

    for dim in (72, 80, 96):
        assert of_many_tokens(dim).query_rows == 128
        assert [of_many_tokens(dim, window=window).query_rows for window in (1, 128, 2047, 2048)] == [64, 64, 64, 128]
    assert of_many_tokens(128, window=128) == of_many_tokens(128)


def test_query_blocks_are_filled_by_fewer_heads_of_a_kv_head() -> None:
    filling = ExtendTiles(128, 64, 4, 2, fills=True)
    assert [filling.heads_per_block(ratio) for ratio in (48, 24, 20, 64, 7, 71)] == [16, 8, 5, 64, 7, 1]
    for ratio in range(1, MAX_GQA_RATIO + 1):
        heads = filling.heads_per_block(ratio)
        assert filling.head_blocks(ratio) * heads == ratio
        assert filling.tokens_per_block(ratio) * heads >= 124
    assert replace(filling, fills=False).heads_per_block(48) == 48


def test_masked_steps_of_joined_heads_keep_room_for_their_query_heads() -> None:
    """A query block has all of them: 30 rows of 32 are not halved, and 12 of 32 are."""
    joined = ExtendTiles(32, 64, 4, 2, heads_per_row=6)
    for ratio, rows in ((5, 32), (2, 16), (1, 16)):
        masked = joined.of_masked_steps(ratio)
        assert (masked.query_rows, masked.head_blocks(ratio)) == (rows, 1)
    assert replace(joined, heads_per_row=1).of_masked_steps(30).query_rows == 16, "one head's are cut into blocks"


@pytest.mark.parametrize(
    ("fields", "refusal"), [('"arch": 90', "90 is no str"), ('"arc": "sm_90"', "arc"), ('"codes": ["ROW"]', "ROW")]
)
def test_a_row_of_a_file_with_a_wrong_name_or_value_is_refused(
    fields: str, refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pkgutil, "get_data", lambda *_: f'{{"decode": [{{{fields}}}]}}'.encode())
    with pytest.raises((AssertionError, KeyError), match=refusal):
        list(TableFile(DecodeTileChoice, "decode.json", "decode"))


def test_every_row_starts_with_whole_tiles() -> None:
    """Triton needs powers of two, matrix units at least 16 on a side."""
    sides = [row.tiles.key_block for row in DECODE_CHOICES]
    sides += [side for row in EXTEND_CHOICES for side in (row.tiles.query_rows, row.tiles.key_block)]
    assert all(side >= 16 and side & (side - 1) == 0 for side in sides)
    assert all(row.tiles.row_cost + row.tiles.row_end >= 1 for row in DECODE_CHOICES)


@pytest.mark.parametrize("codes", CodeKind)
@pytest.mark.parametrize("dim", [64, 128, 256, 512])
@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch.startswith(("sm_", "gfx"))])
def test_rows_of_few_new_tokens_are_shared_out_on_a_gpu(arch: str, dim: int, codes: CodeKind) -> None:
    """A few new tokens after many others would else be a few programs that each read all keys."""
    of_layer = {"gqa_ratio": 8, "num_kv_heads": 8, "head_dim": dim, "v_head_dim": dim, "dtype": BF16, "codes": codes}
    assert extend_choices(arch, **of_layer)[0].tiles.programs_per_cu > 0  # type: ignore[arg-type]


def test_small_kv_heads_are_extended_as_one_where_their_rows_fit_a_block() -> None:
    for row in (row for row in EXTEND_CHOICES if row.tiles.heads_per_row > 1):
        assert row.max_rows * row.tiles.heads_per_row <= row.tiles.query_rows
        assert row.codes == (CodeKind.NONE,)


@pytest.mark.fast
@pytest.mark.parametrize("page_size", [2, 16])
@pytest.mark.parametrize(
    ("dims", "codes"),
    [
        *((dims, CodeKind.NONE) for dims in DIMS),
        *itertools.product(CODED_SEGMENT_DIMS, (CodeKind.BY_ROW, CodeKind.BY_TOKEN)),
    ],
    ids=str,
)
def test_deterministic_extend_on_hopper_walks_keys_as_decode_does(
    dims: tuple[int, int], codes: CodeKind, page_size: int
) -> None:
    """Masked steps, which read bits of at most two words per row, do too."""
    for dtype in (torch.bfloat16, torch.float16):
        ours = hopper_segment_tiles(*dims, page_size, coded=codes is not CodeKind.NONE)
        theirs = segment_tiles("sm_90", head_dim=dims[0], v_head_dim=dims[1], dtype=dtype, codes=codes)
        assert (ours.segment_len, ours.value_block) == (theirs.segment_len, theirs.key_block)
        assert ours.extend.key_block in (ours.value_block, 2 * ours.value_block)
        assert theirs.key_block <= TWO_WORDS


def test_deterministic_masked_steps_on_nvidia_have_no_fewer_rows_than_decode() -> None:
    """Fewer rows would be multiplied by other instructions, and drafts would not get the bits of decode."""
    rows = [row.tiles for row in SEGMENT_ROWS if row.arch.startswith("sm_")]
    masked = [tiles.of_masked_steps() for tiles in rows]
    assert all(some.extend.query_rows >= some.decode_rows for some in masked)
    as_they_were = zip(masked, rows, strict=True)
    assert [replace(some, extend=each.extend, short=each.short) for some, each in as_they_were] == rows
    assert any(some.extend.query_rows < all_rows.extend.query_rows for some, all_rows in zip(masked, rows, strict=True))


@pytest.mark.parametrize("head_dim", [128, 192])
def test_a_ring_of_v_holds_no_more_steps_than_that_of_k(head_dim: int) -> None:
    """Tiles are of whole key blocks, or of halves."""
    tiles = hopper_tiles(head_dim, head_dim, 16, coded=False)
    most = tiles.extend.num_stages * tiles.extend.key_block // tiles.value_block
    assert replace(tiles, value_tiles=most).value_stages == most
    with pytest.raises(ValueError, match="V's ring"):
        replace(tiles, value_tiles=most + 1)
