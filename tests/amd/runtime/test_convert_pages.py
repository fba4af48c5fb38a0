"""Eight-bit pages of one encoding converted to another: exact if both can, saturated elsewhere, and reported."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rocm_attn.errors import BadTensor
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.page_format import Encoding, PageFormat, PoolKind, Scales
from rocm_attn.paging.convert import Conversion, convert_pages

# Left out under the interpreter by day: no Triton kernel runs here, and the host stage runs it every time.
pytestmark = pytest.mark.fast(interpreted=0)

# Every code once in each head of a page, K and V alike.
FORM = PageFormat(Encoding.E4M3FN, PoolKind.SPLIT, 4, 2, 64, 64, Scales.LAYER)
FN, FNUZ, E5M2 = Encoding.E4M3FN, Encoding.E4M3FNUZ, Encoding.E5M2


def pages_of(
    form: PageFormat, scale: list[float], device: torch.device, *, codes: torch.Tensor | None = None
) -> LayerPages:
    """Returns three pages; the last one holds every code in each head, or the given codes; the others hold nothing."""
    every = torch.arange(256, dtype=torch.uint8) if codes is None else codes
    raw = torch.zeros(3, 4, 2, 64, dtype=torch.uint8)
    raw[2] = every.view(4, 1, 64)
    if form.kind is PoolKind.VECTORIZED:
        raw = raw.view(3, 4, 2, 4, 16).permute(0, 2, 3, 1, 4).contiguous()
    k = raw.to(device).view(form.encoding.dtype)
    scale_values = torch.tensor(scale, device=device)
    if form.scales is Scales.TOKEN:
        scale_values = scale_values.expand(3, 2, 4).contiguous()
    return LayerPages(k, k.clone(), form, scale_values, scale_values.clone())


def worth(pages: LayerPages, page: int) -> torch.Tensor:
    return pages.read(torch.tensor([page], device=pages.k.device))[0].double().cpu()


def ids(*pages: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(pages, dtype=torch.int64, device=device)


@pytest.mark.parametrize("scales", [Scales.LAYER, Scales.HEAD, Scales.TOKEN], ids=lambda scales: scales.name)
def test_every_number_of_e4m3fn_is_kept_by_scales_twice_as_large(scales: Scales, device: torch.device) -> None:
    """NaN becomes 0, and so does negative 0, whose code is NaN in E4M3FNUZ."""
    form = replace(FORM, scales=scales)
    given = {Scales.LAYER: [0.013], Scales.HEAD: [0.013, 0.4], Scales.TOKEN: [0.013]}[scales]
    source = pages_of(form, given, device)
    target = pages_of(replace(form, encoding=FNUZ), [2 * scale_value for scale_value in given], device)
    found = convert_pages(source, target, ids(2, device=device), ids(1, device=device))
    assert found == Conversion(saturated=0, rounded=0, not_numbers=2 * 2 * 2)
    assert not found.is_exact
    assert torch.equal(worth(target, 1), worth(source, 2).nan_to_num())
    assert not worth(target, 0).any()


def test_back_only_the_largest_has_no_like_and_that_is_reported(device: torch.device) -> None:
    form = replace(FORM, encoding=FNUZ)
    source, target = pages_of(form, [0.5], device), pages_of(FORM, [0.25], device)
    found = convert_pages(source, target, ids(2, device=device), ids(1, device=device))
    assert found == Conversion(saturated=2 * 2 * 2, rounded=0, not_numbers=2 * 2)
    change = worth(target, 1) - worth(source, 2).nan_to_num()
    assert set(change.abs().flatten().tolist()) == {0.0, (240 - 224) * 0.5}


def test_under_one_scale_what_is_beyond_saturates_and_what_is_small_rounds(device: torch.device) -> None:
    source = pages_of(FORM, [1.0], device)
    target = pages_of(replace(FORM, encoding=FNUZ), [1.0], device)
    found = convert_pages(source, target, ids(2, device=device), ids(1, device=device))
    # 256, 288, 320, 352, 384, 416 and 448, of both signs, in two heads of K and of V.
    assert found == Conversion(saturated=7 * 2 * 4, rounded=0, not_numbers=2 * 4)
    assert worth(target, 1).abs().max() == 240
    target = pages_of(replace(FORM, encoding=E5M2), [1.0], device)
    found = convert_pages(source, target, ids(2, device=device), ids(1, device=device))
    assert found.saturated == 0
    assert found.rounded > 0
    nearest = worth(source, 2).nan_to_num().to(torch.float8_e5m2).double()
    assert torch.equal(worth(target, 1), nearest)


@pytest.mark.parametrize("scales", [Scales.LAYER, Scales.TOKEN], ids=lambda scales: scales.name)
def test_latent_rows_are_converted_once(scales: Scales, device: torch.device) -> None:
    """V is a part of K: it has no pages and no scales of its own, and counts once."""

    def latents(encoding: Encoding, scale_value: float) -> LayerPages:
        form = PageFormat(encoding, PoolKind.LATENT, 4, 1, 64, 48, scales)
        raw = torch.zeros(3, 4, 1, 64, dtype=torch.uint8, device=device)
        raw[2] = torch.arange(256, dtype=torch.uint8).view(4, 1, 64).to(device)
        k = raw.view(encoding.dtype)
        scale_values = torch.full((3, 1, 4) if scales is Scales.TOKEN else (1,), scale_value, device=device)
        return LayerPages(k, k[..., :48], form, scale_values, scale_values)

    source, target = latents(FN, 0.013), latents(FNUZ, 0.026)
    found = convert_pages(source, target, ids(2, device=device), ids(1, device=device))
    assert found == Conversion(saturated=0, rounded=0, not_numbers=2)
    assert torch.equal(worth(target, 1), worth(source, 2).nan_to_num())


def test_a_conversion_without_change_is_exact_in_vectorised_pages_too(device: torch.device) -> None:
    form = replace(FORM, kind=PoolKind.VECTORIZED, page_size=16)
    numbers = torch.arange(256, dtype=torch.uint8) & 0x77
    raw = numbers.repeat(3 * 16 * 2 * 64 // 256).view(3, 2, 4, 16, 16).to(device)

    def pages(encoding: Encoding, scale_value: float) -> LayerPages:
        k, v = raw.clone(), raw.clone().view(3, 2, 1, 64, 16)
        scale_values = torch.tensor([scale_value, scale_value / 2], device=device)
        of = replace(form, encoding=encoding, scales=Scales.HEAD)
        return LayerPages(k.view(encoding.dtype), v.view(encoding.dtype), of, scale_values, scale_values.clone())

    source, target = pages(FN, 0.01), pages(FNUZ, 0.02)
    target.raw_k.zero_()
    target.raw_v.zero_()
    assert convert_pages(source, target, ids(0, 2, device=device), ids(2, 1, device=device)).is_exact
    assert torch.equal(worth(target, 2), worth(source, 0))
    assert torch.equal(worth(target, 1), worth(source, 2))


def test_what_cannot_be_converted_is_refused_and_nothing_is_written(device: torch.device) -> None:
    source = pages_of(FORM, [1.0], device)
    target = pages_of(replace(FORM, encoding=FNUZ), [1.0], device)
    before = target.raw_k.clone()
    by_head = pages_of(replace(FORM, encoding=FNUZ, scales=Scales.HEAD), [1.0, 1.0], device)
    halves = torch.zeros(3, 4, 2, 64, dtype=torch.float16, device=device)
    one, page = ids(1, device=device), ids(2, device=device)
    form = replace(FORM, kind=PoolKind.LATENT, num_kv_heads=1, head_dim=136, v_head_dim=128, scales=Scales.GROUP)
    records = torch.zeros(3, 4, 1, form.k_row, dtype=torch.uint8, device=device).view(form.encoding.dtype)
    recorded = LayerPages(records, records[..., :128], form)
    refused = [
        ((recorded, recorded, page, one), "both must be in eight bits, no records, and differ only in the encoding"),
        ((source, by_head, page, one), "differ only in the encoding"),
        ((LayerPages.plain(halves, halves), target, page, one), "both must be in eight bits"),
        ((source, target, page, ids(0, device=device)), "names page 0"),
        ((source, target, ids(1, 2, device=device), ids(1, 1, device=device)), "or a page twice"),
        ((source, target, page, ids(3, device=device)), "target_pages are from 3 to 3; there are 3 pages"),
        ((source, target, page, ids(1, 2, device=device)), "1 pages cannot be converted to 2"),
        ((source, target, page.int(), one), "give int64"),
    ]
    for given, sentence in refused:
        with pytest.raises(BadTensor, match=sentence):
            convert_pages(*given)
    assert torch.equal(target.raw_k, before)
    # The same memory under both encodings: a page would be read after it was overwritten.
    k, v = (side.view(FNUZ.dtype) for side in (source.raw_k, source.raw_v))
    itself = LayerPages(k, v, replace(FORM, encoding=FNUZ), source.k_scale, source.v_scale)
    with pytest.raises(BadTensor, match="page 2 is both read and written"):
        convert_pages(source, itself, ids(1, 2, device=device), ids(2, 1, device=device))
