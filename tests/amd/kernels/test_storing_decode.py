"""Decode that stores the new tokens' K and V itself equals the store followed by decode, bit by bit."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from rocm_attn.kernels.attention.arguments import NewRows
from rocm_attn.kernels.attention.cuts import DecodeCut
from rocm_attn.kernels.attention.decode import launch_paged_decode, launch_storing_decode
from rocm_attn.kernels.cache.store import launch_store_kv
from rocm_attn.kernels.metadata.error_word import ERROR_WORD, NOT_FINITE
from rocm_attn.kernels.tuning.tiles import DecodeTiles
from tests.amd.kernels.attention_cases import Case, Tensors, assert_served, build, dtypes, tiles_of

KV_LEN = [33, 0, 1, 16, 40, 15]
RAGGED = Case(kv_len=KV_LEN, q_len=[1] * len(KV_LEN))
CASES = {
    "mha": replace(RAGGED, heads=(2, 2)),
    "gqa_3": replace(RAGGED, heads=(6, 2), page_size=5),
    "tokens_as_pages": replace(RAGGED, heads=(8, 2), page_size=1),
    "three_kv_heads": replace(RAGGED, heads=(24, 3), page_size=64),
    "blocks_of_heads": replace(RAGGED, heads=(71, 1), dims=(32, 32)),
    "dim_24_72": replace(RAGGED, dims=(24, 72), window_left=9),
    "dim_128": replace(RAGGED, dims=(128, 128), heads=(8, 2)),
    "dim_320": replace(RAGGED, dims=(320, 320), heads=(2, 1)),
    "dim_1_7": replace(RAGGED, dims=(1, 7), heads=(1, 1), page_size=2),
    "spread": replace(RAGGED, heads=(6, 2), dims=(80, 48), page_size=3, spread=True),
    "scored": replace(RAGGED, sinks=True, slopes=True, soft_cap=1.5),
    "later_pages": replace(RAGGED, page_size=5, first_page=[3, 0, 2, 7, 1, 40]),
    "window": replace(RAGGED, kv_len=[300, 513, 1000, 0], q_len=[1] * 4, window_left=600),
}
TILES = [
    DecodeTiles(key_block=32, num_warps=4, num_stages=2, programs_per_cu=1, heads_per_row=2),
    DecodeTiles(key_block=16, num_warps=4, num_stages=1, programs_per_cu=1, head_blocks=2),
    DecodeTiles(key_block=16, num_warps=4, num_stages=1, programs_per_cu=1, row_cost=0, row_end=2),
    DecodeTiles(key_block=16, num_warps=4, num_stages=1, programs_per_cu=1, row_cost=7, side_by_side=True),
]


class _Stored(NamedTuple):
    """The results of either way."""

    out: Tensor
    lse: Tensor
    k_pages: Tensor
    v_pages: Tensor
    error: int


def _new_rows(tensors: Tensors) -> NewRows:
    """Returns the last key of each sequence, taken out of its page, which is then NaN."""
    case, page_size = tensors.case, tensors.case.page_size
    first = case.first_page or [0] * len(case.kv_len)
    slots = []
    for seq, length in enumerate(case.kv_len):
        page_no = first[seq] + (length - 1) // page_size
        last_page = int(tensors.table[tensors.row_of_seq[seq], page_no]) if length else 0
        slots.append(last_page * page_size + (length - 1) % page_size if length else -1)
    slot = torch.tensor(slots, dtype=torch.int32, device=tensors.q.device)
    page, offset = slot.clamp(min=0) // page_size, slot.clamp(min=0) % page_size
    is_kept = slot >= 0
    k, v = (pages[page, offset].clone() for pages in (tensors.k_pages, tensors.v_pages))
    for pages in (tensors.k_pages, tensors.v_pages):
        pages[page[is_kept], offset[is_kept]] = float("nan")
    counts = torch.tensor([0, len(slots), 0, 0], dtype=torch.int32, device=tensors.q.device)
    return NewRows(k, v, slot, counts, null_page=False)


def _run(tensors: Tensors, new: NewRows, tiles: DecodeTiles | None, *, stores: bool, programs: int) -> _Stored:
    """Runs decode on copies of everything that it writes."""
    case = tensors.case
    tiles = tiles or tiles_of(tensors.arch, case)[0]
    k_pages, v_pages, counts = tensors.k_pages.clone(), tensors.v_pages.clone(), new.counts.clone()
    mine = replace(tensors, k_pages=k_pages, v_pages=v_pages, out=tensors.out.clone(), lse=tensors.lse.clone())
    given = new._replace(counts=counts)
    cut = DecodeCut.of(tiles, num_kv_heads=case.heads[1], programs=programs, window_left=case.window_left)
    words = cut.partials_words(gqa_ratio=tensors.gqa_ratio, v_head_dim=case.dims[1], tiles=tiles)
    args = mine.decode_args(cut, words)
    if stores:
        launch_storing_decode(args, given, scores=tensors.scores, cut=cut, tiles=tiles)
    else:
        launch_store_kv(given.k, given.v, given.slot_of_token, counts, args.pages, null_page=given.null_page)
        launch_paged_decode(args, scores=tensors.scores, cut=cut, tiles=tiles)
    return _Stored(mine.out, mine.lse, k_pages, v_pages, int(counts[ERROR_WORD]))


def _assert_same(mine: _Stored, theirs: _Stored) -> None:
    for ours, other in zip(mine[:4], theirs[:4], strict=True):
        assert torch.equal(ours.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
    assert mine.error == theirs.error


def _assert_alike(tensors: Tensors, new: NewRows, tiles: DecodeTiles | None = None, programs: int = 5) -> _Stored:
    stored = _run(tensors, new, tiles, stores=True, programs=programs)
    _assert_same(stored, _run(tensors, new, tiles, stores=False, programs=programs))
    return stored


@pytest.mark.fast(1)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
def test_it_is_the_store_and_then_decode(case: Case, dtype: torch.dtype, kernel_device: torch.device) -> None:
    tensors = build(replace(case, dtype=dtype), kernel_device)
    stored = _assert_alike(tensors, _new_rows(tensors))
    assert stored.error == 0
    assert_served(replace(tensors, out=stored.out, lse=stored.lse))


@pytest.mark.fast(1)
@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize("programs", [3, 1, 64])
def test_in_every_cut(tiles: DecodeTiles, programs: int, kernel_device: torch.device) -> None:
    tensors = build(replace(RAGGED, heads=(10, 2), page_size=3, dtype=torch.float16), kernel_device)
    _assert_alike(tensors, _new_rows(tensors), tiles, programs)


def test_tokens_and_slots_of_no_one_are_dropped(kernel_device: torch.device) -> None:
    """The last two tokens are pads; another token's slot is in page 0, which belongs to no sequence."""
    tensors = build(replace(RAGGED, heads=(2, 1)), kernel_device)
    new = _new_rows(tensors)
    new.slot_of_token[3] = 7
    new.counts[1] = len(KV_LEN) - 2
    stored = _assert_alike(tensors, new._replace(null_page=True))
    assert torch.isnan(stored.k_pages[0]).all()
    page, offset = divmod(int(new.slot_of_token[4]), tensors.case.page_size)
    assert torch.isnan(stored.k_pages[page, offset]).all()


@pytest.mark.fast(1)
@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_stored_as_0_and_reported(side: str, value: float, kernel_device: torch.device) -> None:
    tensors = build(replace(RAGGED, heads=(4, 2)), kernel_device)
    new = _new_rows(tensors)
    getattr(new, side)[4, 1, 3] = value
    stored = _assert_alike(tensors, new)
    assert stored.error == NOT_FINITE
    page, offset = divmod(int(new.slot_of_token[4]), tensors.case.page_size)
    assert getattr(stored, f"{side}_pages")[page, offset, 1, 3] == 0
