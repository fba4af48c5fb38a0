"""Records are stored as their format defines them, byte by byte, and attended to in steps without a selection."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.page_format import Encoding, FormatMismatch, PageFormat, PoolKind, Scales
from rocm_attn.kernels.cache.rope_store import launch_rope_store
from rocm_attn.kernels.cache.row_work import Projected, QkvWork, RopeTable, RowNorm, TokenPlaces
from rocm_attn.kernels.cache.store import launch_store_kv
from rocm_attn.kernels.metadata.error_word import NOT_FINITE
from rocm_attn.kernels.refs.cache import store_kv
from rocm_attn.kernels.refs.rope import rope_store
from rocm_attn.kernels.sparse.arguments import LastTokens
from rocm_attn.kernels.sparse.attention import launch_selected_attention
from rocm_attn.kernels.sparse.cuts import selected_cut
from rocm_attn.kernels.tuning.sparse_tiles import selected_tiles
from tests.amd.kernels.record_cases import POISON, record_bytes, record_of_row, record_value
from tests.amd.kernels.sparse_cases import SelectedCase, Step, arch_of, build_selected

PAGE_SIZE = 4
# DeepSeek-V3.2's rows, fewer groups than columns of a block, and rows without a part that turns.
DIMS = ((576, 512), (392, 384), (128, 128))
every_store = pytest.mark.parametrize("store", [launch_store_kv, store_kv], ids=["kernel", "twin"])
every_encoding = pytest.mark.parametrize("encoding", [Encoding.E4M3FN, Encoding.E4M3FNUZ], ids=str)


def pages_of(dims: tuple[int, int], encoding: Encoding, device: torch.device, num_pages: int = 4) -> LayerPages:
    """Returns poisoned pages."""
    form = PageFormat(encoding, PoolKind.LATENT, PAGE_SIZE, 1, *dims, Scales.GROUP)
    shape = num_pages, PAGE_SIZE, 1, record_bytes(dims)
    k = torch.full(shape, POISON, dtype=torch.uint8, device=device).view(encoding.dtype)
    return LayerPages(k, k[..., : dims[1]], form)


@pytest.mark.fast(4)
@every_encoding
@every_store
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_a_record_has_the_bytes_of_vllms_formula(
    dims: tuple[int, int], store: Callable[..., None], encoding: Encoding, kernel_device: torch.device
) -> None:
    """Large, small and tiny rows, zeros, and a group whose largest element is exactly the largest code."""
    generator = torch.Generator().manual_seed(sum(dims))
    rows = torch.randn(7, 1, dims[0], generator=generator) * torch.tensor([1, 300, 1e-3, 1e-7, 0, 3, 1])[:, None, None]
    rows[1, 0, :128] = 448.0 - torch.arange(128)
    rows = rows.bfloat16()
    pages = pages_of(dims, encoding, kernel_device)
    # The last token is a pad; the last but one lies in page 0, which belongs to no sequence.
    slots = [4, 15, 6, 13, 8, 2, 9]
    counts = torch.tensor([1, 6, 0, 0], dtype=torch.int32, device=kernel_device)
    placed = rows.to(kernel_device)
    store(placed, placed[..., : dims[1]], torch.tensor(slots, dtype=torch.int32, device=kernel_device), counts, pages)
    held = pages.raw_k.cpu().view(-1, record_bytes(dims))
    written = dict(zip(slots[:5], rows[:5, 0], strict=True))
    for slot, record in enumerate(held):
        expected = record_of_row(written[slot], dims, encoding) if slot in written else bytes([POISON]) * len(record)
        assert bytes(record.tolist()) == expected, f"slot {slot}"
    assert counts.tolist() == [1, 6, 0, 0]
    k, v = (side.cpu() for side in pages.read(torch.tensor([1], device=kernel_device)))
    assert torch.equal(k[0, 0, 0].double(), record_value(held[4], dims, encoding))
    assert torch.equal(v[0, 0], k[0, 0, :, : dims[1]])


@every_store
def test_what_is_not_finite_is_stored_as_0_and_reported(
    store: Callable[..., None], kernel_device: torch.device
) -> None:
    for place in (3, 140):
        pages = pages_of((152, 128), Encoding.E4M3FN, kernel_device)
        rows = torch.ones(1, 1, 152, dtype=torch.bfloat16, device=kernel_device)
        rows[0, 0, place] = float("nan")
        counts = torch.tensor([1, 1, 0, 0], dtype=torch.int32, device=kernel_device)
        store(rows, rows[..., :128], torch.tensor([5], dtype=torch.int32, device=kernel_device), counts, pages)
        k = pages.read_keys(*(torch.tensor([1], device=kernel_device) for _ in range(2)))
        assert k[0, 0, place] == 0
        assert k.sum() == 151
        assert counts[3] == NOT_FINITE


def test_rope_and_store_writes_the_records_of_its_twin(kernel_device: torch.device) -> None:
    dims, generator = (152, 128), torch.Generator().manual_seed(0)
    q, k = (torch.randn(3, heads, 152, generator=generator).to(kernel_device) for heads in (4, 1))
    rope = RopeTable(torch.randn(9, 24, generator=generator).to(kernel_device), at_end=True)
    work = QkvWork(rope, k_norm=RowNorm(torch.rand(128, generator=generator).to(kernel_device), 1e-6))
    results = []
    for store in (launch_rope_store, rope_store):
        pages = pages_of(dims, Encoding.E4M3FN, kernel_device)
        counts, slots, positions = (
            torch.tensor(each, dtype=torch.int32, device=kernel_device)
            for each in ([1, 3, 0, 0], [4, 11, 6], [0, 8, 3])
        )
        q_out = torch.empty_like(q)
        store(Projected(q, k, k[..., :128], q_out), TokenPlaces(positions, slots, counts), work, pages)
        results.append((q_out, *pages.read(torch.tensor([1, 2], device=kernel_device))))
    for found, expected in zip(*results, strict=True):
        # The order of a norm's sum may change a code to the next one.
        torch.testing.assert_close(found, expected, rtol=0.13, atol=1e-5, equal_nan=True)
    with pytest.raises(AssertionError, match="turns what follows V"):
        launch_rope_store(Projected(q, k, k, q), TokenPlaces(positions, slots, counts), QkvWork(None), pages)


@pytest.mark.fast(1)
@every_encoding
@pytest.mark.parametrize("programs", [1, 40])
def test_without_a_selection_a_token_sees_all_up_to_its_own(
    programs: int, encoding: Encoding, kernel_device: torch.device
) -> None:
    """Bytes that no token sees are poison."""
    step = Step([50, 1, 33], [3, 1, 1], tail=1)
    case = SelectedCase(
        step, (4, 1), (152, 128), latent=True, encoding=encoding, scales=Scales.GROUP, dense=True, width=50, sinks=True
    )
    problem = build_selected(case, kernel_device)
    args = problem.args._replace(selection=LastTokens(problem.args.tokens.max_kv_len))
    shape = {"gqa_ratio": 4, "head_dim": 152, "v_head_dim": 128, "dtype": case.dtype}
    tiles = selected_tiles(arch_of(kernel_device), **shape, is_coded=True, is_record=True)  # type: ignore[arg-type]
    cut = selected_cut(len(args.q), args.selection.width, heads=args.heads, tiles=tiles, programs=programs)
    workspace = torch.empty(cut.words(len(args.q), 128), device=kernel_device)
    launch_selected_attention(args._replace(workspace=workspace), scale=problem.scale, tiles=tiles, programs=programs)
    problem.assert_served()


def test_records_that_begin_between_words_are_refused() -> None:
    form = PageFormat(Encoding.E4M3FN, PoolKind.LATENT, PAGE_SIZE, 1, 152, 128, Scales.GROUP)
    k = torch.zeros(2, PAGE_SIZE, 1, 182, dtype=torch.uint8)[..., :180].view(torch.float8_e4m3fn)
    with pytest.raises(FormatMismatch, match="records begin at multiples of 4 bytes"):
        LayerPages(k, k[..., :128], form)
