"""Records are stored as their format defines them, byte by byte, and attended to in steps without a selection."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.page_format import Encoding, FormatMismatch, PageFormat, PoolKind, Scales
from rocm_attn.kernels.cache.records import RecordParts
from rocm_attn.kernels.cache.rope_store import launch_rope_store
from rocm_attn.kernels.cache.row_work import Projected, QkvWork, RopeTable, RowNorm, TokenPlaces
from rocm_attn.kernels.cache.store import launch_store_kv
from rocm_attn.kernels.metadata.error_word import NOT_FINITE
from rocm_attn.kernels.refs.cache import store_kv
from rocm_attn.kernels.refs.rope import rope_store
from rocm_attn.kernels.refs.sparse import selected_attention
from rocm_attn.kernels.sparse.arguments import LastTokens
from rocm_attn.machine.target import detect_target
from tests.amd.kernels.codes_kernels import scales_of_exponents
from tests.amd.kernels.record_cases import POISON, RecordPages
from tests.amd.kernels.sparse_cases import UNTOUCHED, SelectedCase, Step, build_selected, run_attention

PAGE_SIZE = 4
# DeepSeek-V3.2's rows, fewer groups than columns of a block, and rows without a part that turns.
OF_ROWS = [(dims, Scales.GROUP) for dims in ((576, 512), (392, 384), (128, 128))]
# DeepSeek-V4's, and fewer groups than columns of a block.
OF_PAGES = [(dims, Scales.FOOTER) for dims in ((512, 512), (256, 256))]
every_store = pytest.mark.parametrize("store", [launch_store_kv, store_kv], ids=["kernel", "twin"])
every_encoding = pytest.mark.parametrize("encoding", [Encoding.E4M3FN, Encoding.E4M3FNUZ], ids=str)
every_kind = pytest.mark.parametrize(("dims", "scales"), [*OF_ROWS, *OF_PAGES], ids=str)


def pages_of(
    dims: tuple[int, int], encoding: Encoding, device: torch.device, scales: Scales = Scales.GROUP
) -> LayerPages:
    """Returns four poisoned pages."""
    form = PageFormat(encoding, PoolKind.LATENT, PAGE_SIZE, 1, *dims, scales)
    memory = torch.full((4, form.line), POISON, dtype=torch.uint8, device=device)
    return LayerPages.latent(memory.view(encoding.dtype), form)


def held_by(pages: LayerPages) -> Tensor:
    """Returns all bytes of pages, with those between a page and the next, uint8 [pages, bytes]."""
    form = pages.format
    return pages.raw_k.as_strided((len(pages.k), form.line), (form.line, 1)).cpu()


@pytest.mark.fast(4)
@every_encoding
@every_store
@every_kind
def test_a_record_has_the_bytes_of_vllms_formula(
    dims: tuple[int, int], scales: Scales, store: Callable[..., None], encoding: Encoding, kernel_device: torch.device
) -> None:
    """Large, small and tiny rows, zeros, and a group whose largest element is exactly the largest code."""
    generator = torch.Generator().manual_seed(sum(dims))
    rows = torch.randn(7, 1, dims[0], generator=generator) * torch.tensor([1, 300, 1e-3, 1e-7, 0, 3, 1])[:, None, None]
    rows[1, 0, :128] = 448.0 - torch.arange(128)
    rows = rows.bfloat16()
    pages = pages_of(dims, encoding, kernel_device, scales)
    # The last token is a pad; the last but one lies in page 0, which belongs to no sequence.
    slots = [4, 15, 6, 13, 8, 2, 9]
    counts = torch.tensor([1, 6, 0, 0], dtype=torch.int32, device=kernel_device)
    placed = rows.to(kernel_device)
    store(placed, placed[..., : dims[1]], torch.tensor(slots, dtype=torch.int32, device=kernel_device), counts, pages)
    records = RecordPages(dims, encoding, PAGE_SIZE, scales)
    expected = torch.full((4, records.page_bytes), POISON, dtype=torch.uint8)
    for slot, row in zip(slots[:5], rows[:5, 0], strict=True):
        records.write(expected[slot // PAGE_SIZE], slot % PAGE_SIZE, row)
    held = held_by(pages)
    assert held.shape == expected.shape
    different = (held != expected).nonzero().tolist()
    assert not different, f"page and byte of the first that differ: {different[:3]}"
    assert counts.tolist() == [1, 6, 0, 0]
    k, v = (side.cpu() for side in pages.read(torch.tensor([1], device=kernel_device)))
    assert torch.equal(k[0, 0, 0].double(), records.value(held[1], 0))
    assert torch.equal(v[0, 0], k[0, 0, :, : dims[1]])


def test_deepseek_v4s_pages_have_the_sizes_that_flashmla_and_vllm_compute() -> None:
    """FlashMLA: (block_size * 584 + 575) // 576 * 576; vLLM gives the pages of 64 tokens of its tests 37,440 bytes."""
    form = PageFormat(Encoding.E4M3FN, PoolKind.LATENT, 64, 1, 512, 512, Scales.FOOTER)
    assert (form.k_row, form.line, form.page_bytes) == (576, 37440, 37440)
    for page_size in (1, 2, 32, 72, 256):
        assert replace(form, page_size=page_size).page_bytes == (page_size * 584 + 575) // 576 * 576


@pytest.mark.parametrize("exponent", [0, 1, 127, 254, 255])
def test_every_exponent_of_a_footer_is_read_as_a_power_of_two(exponent: int, kernel_device: torch.device) -> None:
    """The code 0x38 is 1, so a value is its scale; 255 is NaN."""
    pages = pages_of((128, 128), Encoding.E4M3FN, kernel_device, Scales.FOOTER)
    assert pages.record is not None
    pages.record.put((torch.tensor([2], device=kernel_device),), RecordParts(*_ones(exponent, kernel_device)))
    k = pages.read_keys(*(torch.tensor([each], device=kernel_device) for each in (2, 3)))
    expected = RecordPages((128, 128), Encoding.E4M3FN, PAGE_SIZE, Scales.FOOTER).value(held_by(pages)[2], 3)
    torch.testing.assert_close(k[0, 0].cpu().double(), expected, rtol=0.0, atol=0.0, equal_nan=True)
    read = scales_of_exponents(torch.full((4,), exponent, dtype=torch.uint8, device=kernel_device))
    torch.testing.assert_close(read.cpu().double(), expected[:4], rtol=0.0, atol=0.0, equal_nan=True)


def _ones(exponent: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the parts of a page: codes of 1, an exponent, and bfloat16 of 2."""
    codes = torch.full((1, PAGE_SIZE, 1, 64), 0x38, dtype=torch.uint8, device=device)
    return codes, torch.full_like(codes[..., :1], exponent), torch.full_like(codes, 2).bfloat16()


@every_store
@pytest.mark.parametrize(("dims", "scales"), [((152, 128), Scales.GROUP), ((192, 192), Scales.FOOTER)], ids=str)
def test_what_is_not_finite_is_stored_as_0_and_reported(
    dims: tuple[int, int], scales: Scales, store: Callable[..., None], kernel_device: torch.device
) -> None:
    for place in (3, 140):
        pages = pages_of(dims, Encoding.E4M3FN, kernel_device, scales)
        rows = torch.ones(1, 1, dims[0], dtype=torch.bfloat16, device=kernel_device)
        rows[0, 0, place] = float("nan")
        counts = torch.tensor([1, 1, 0, 0], dtype=torch.int32, device=kernel_device)
        store(rows, rows[..., : dims[1]], torch.tensor([5], dtype=torch.int32, device=kernel_device), counts, pages)
        k = pages.read_keys(*(torch.tensor([1], device=kernel_device) for _ in range(2)))
        assert k[0, 0, place] == 0
        assert k.sum() == dims[0] - 1
        assert counts[3] == NOT_FINITE


@pytest.mark.parametrize(("dims", "scales"), [((152, 128), Scales.GROUP), ((192, 192), Scales.FOOTER)], ids=str)
def test_rope_and_store_writes_the_records_of_its_twin(
    dims: tuple[int, int], scales: Scales, kernel_device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(3, heads, dims[0], generator=generator).to(kernel_device) for heads in (4, 1))
    rope = RopeTable(torch.randn(9, dims[0] - 128, generator=generator).to(kernel_device), at_end=True)
    work = QkvWork(rope, k_norm=RowNorm(torch.rand(128, generator=generator).to(kernel_device), 1e-6))
    results = []
    for store in (launch_rope_store, rope_store):
        pages = pages_of(dims, Encoding.E4M3FN, kernel_device, scales)
        counts, slots, positions = (
            torch.tensor(each, dtype=torch.int32, device=kernel_device)
            for each in ([1, 3, 0, 0], [4, 11, 6], [0, 8, 3])
        )
        q_out = torch.empty_like(q)
        store(Projected(q, k, k[..., : dims[1]], q_out), TokenPlaces(positions, slots, counts), work, pages)
        results.append((q_out, *pages.read(torch.tensor([1, 2], device=kernel_device))))
    for found, expected in zip(*results, strict=True):
        # The order of a norm's sum may change a code to the next one.
        torch.testing.assert_close(found, expected, rtol=0.13, atol=1e-5, equal_nan=True)
    with pytest.raises(AssertionError, match="turns what has no codes"):
        launch_rope_store(Projected(q, k, k, q), TokenPlaces(positions, slots, counts), QkvWork(None), pages)


@pytest.mark.fast(4, interpreted=2)
@every_encoding
@pytest.mark.parametrize("programs", [1, 40])
@pytest.mark.parametrize("width", [50, 20])
@pytest.mark.parametrize(("dims", "scales"), [((152, 128), Scales.GROUP), ((192, 192), Scales.FOOTER)], ids=str)
def test_without_a_selection_a_token_sees_the_last_ones_up_to_its_own(
    dims: tuple[int, int], scales: Scales, width: int, programs: int, encoding: Encoding, kernel_device: torch.device
) -> None:
    """Bytes that no token sees are poison."""
    step = Step([50, 1, 33], [3, 1, 1], tail=1)
    case = SelectedCase(
        step, (4, 1), dims, latent=True, encoding=encoding, scales=scales, dense=True, width=width, sinks=True
    )
    problem = build_selected(case, kernel_device)
    args = problem.args._replace(selection=LastTokens(width))
    run_attention(detect_target(kernel_device).arch, replace(problem, args=args), programs)
    args.out.fill_(UNTOUCHED)
    selected_attention(args, scale=problem.scale)
    problem.assert_served()


def test_records_that_begin_between_words_are_refused() -> None:
    form = PageFormat(Encoding.E4M3FN, PoolKind.LATENT, PAGE_SIZE, 1, 152, 128, Scales.GROUP)
    k = torch.zeros(2, PAGE_SIZE, 1, 182, dtype=torch.uint8)[..., :180].view(torch.float8_e4m3fn)
    with pytest.raises(FormatMismatch, match="records begin at multiples of 4 bytes"):
        LayerPages(k, k[..., :128], form)


def test_footers_that_would_lie_in_other_rows_or_past_the_memory_are_refused() -> None:
    form = PageFormat(Encoding.E4M3FN, PoolKind.LATENT, PAGE_SIZE, 1, 512, 512, Scales.FOOTER)
    k = torch.zeros(2, PAGE_SIZE, 1, 576, dtype=torch.uint8).view(torch.float8_e4m3fn)
    with pytest.raises(FormatMismatch, match="each page has 2336 bytes for them and its footer"):
        LayerPages(k, k[..., :512], form)
    memory = torch.zeros(2, form.line, dtype=torch.uint8).view(torch.float8_e4m3fn)
    good = LayerPages.latent(memory, form)
    cut = memory.flatten()[: form.line + 4 * 584].as_strided(good.k.shape, good.k.stride())
    assert len(LayerPages(cut, cut[..., :512], form).k) == 2
    short = torch.zeros(form.line + 4 * 584 - 1, dtype=torch.uint8).view(torch.float8_e4m3fn)
    short = short.as_strided(good.k.shape, good.k.stride())
    with pytest.raises(FormatMismatch, match="each page has 2336 bytes"):
        LayerPages(short, short[..., :512], form)
    apart = torch.zeros(2, 8 * 640, dtype=torch.uint8).view(torch.float8_e4m3fn)
    apart = apart.as_strided(good.k.shape, (8 * 640, 640, 640, 1))
    with pytest.raises(FormatMismatch, match="rows of 576 bytes lie next to each other"):
        LayerPages(apart, apart[..., :512], form)
