"""The fused store and its twin: norms, rotary embedding and store of a layer's rows, against float64."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.page_format import Encoding, PageFormat, PoolKind, Scales
from rocm_attn.kernels.cache.rope_store import launch_rope_queries, launch_rope_store
from rocm_attn.kernels.cache.row_work import Projected, QkvWork, RopePairs, RopeTable, RowNorm, TokenPlaces
from rocm_attn.kernels.cache.store import launch_store_kv
from rocm_attn.kernels.metadata.error_word import NOT_FINITE
from rocm_attn.kernels.refs import cache as cache_twins
from rocm_attn.kernels.refs import rope as twins
from tests.amd.kernels.attention_cases import UNTOUCHED, dtypes, ints
from tests.amd.kernels.rope_cases import assert_rounded, normalised, random_norm, random_rope, turned

Launch = Callable[..., None]
# Numpy warns of infinities and overflows under the interpreter.
not_finite = pytest.mark.filterwarnings("ignore::RuntimeWarning")
either = pytest.mark.parametrize("store", [launch_rope_store, twins.rope_store], ids=["kernel", "twin"])

PAGE_SIZE, NUM_PAGES, NUM_POSITIONS = 4, 9, 50
# Token 3 points to page 0, as one without a page would; tokens 5 and 6 are pads.
POSITIONS, SLOTS, NUM_TOKENS = [3, 49, 7, 20, 0, 0, 0], [4, 15, 9, 3, 22, 0, 17], 5
STORED = [0, 1, 2, 4]


@dataclass(frozen=True)
class Case:
    """A layer. turned: number of rotated elements, 0: none; normed: of q and k, 0: none"""

    heads: tuple[int, int] = (6, 2)
    dims: tuple[int, int] = (24, 40)
    turned: int = 8
    pairs: RopePairs = RopePairs.HALVES
    at_end: bool = False
    normed: int = 24
    offset: float = 1.0
    kind: PoolKind = PoolKind.SPLIT
    dtype: torch.dtype = torch.float32

    def work(self, device: torch.device) -> QkvWork:
        rope = None
        if self.turned:
            rope = random_rope(self.turned, NUM_POSITIONS, self.pairs, at_end=self.at_end, device=device)
        if not self.normed:
            return QkvWork(rope)
        norm = random_norm(self.normed, self.offset, self.dtype, device)
        if self.kind is PoolKind.LATENT:
            return QkvWork(rope, k_norm=norm)
        return QkvWork(rope, norm, norm, random_norm(self.dims[1], 0.0, torch.float32, device))

    def given(self, device: torch.device) -> Projected:
        """Returns rows between others; those of pads are NaN."""
        generator = torch.Generator().manual_seed(0)

        def rows(heads: int, dim: int) -> Tensor:
            wide = torch.randn(len(SLOTS), heads + 1, dim + 8, generator=generator).to(device, self.dtype)
            wide[NUM_TOKENS:] = float("nan")
            return wide[:, :heads, :dim]

        is_latent = self.kind is PoolKind.LATENT
        q = rows(self.heads[0], self.turned if is_latent else self.dims[0])
        k = rows(self.heads[1], self.dims[0])
        v = k[..., : self.dims[1]] if is_latent else rows(self.heads[1], self.dims[1])
        return Projected(q, k, v, torch.full_like(q, UNTOUCHED))

    def pages(self, device: torch.device) -> LayerPages:
        shape = NUM_PAGES, PAGE_SIZE, self.heads[1]
        k = torch.full((*shape, self.dims[0]), UNTOUCHED, dtype=self.dtype, device=device)
        if self.kind is PoolKind.LATENT:
            return LayerPages.plain(k, k[..., : self.dims[1]], kind=PoolKind.LATENT)
        return LayerPages.plain(k, torch.full((*shape, self.dims[1]), UNTOUCHED, dtype=self.dtype, device=device))


def places(device: torch.device) -> TokenPlaces:
    return TokenPlaces(ints(POSITIONS, device), ints(SLOTS, device), ints([3, NUM_TOKENS, 1, 0], device))


CASES = {
    "partial": Case(),
    "whole row": Case(dims=(24, 24), turned=24),
    "neighbours": Case(pairs=RopePairs.NEIGHBOURS),
    "at the end": Case(at_end=True, normed=0),
    "at the end, neighbours": Case(pairs=RopePairs.NEIGHBOURS, at_end=True, offset=0.0),
    "no norm": Case(normed=0),
    "no turn": Case(turned=0),
    "nothing": Case(turned=0, normed=0),
    "qwen3": Case(heads=(4, 1), dims=(128, 128), turned=128, normed=128, offset=0.0),
    "qwen3.5": Case(heads=(16, 1), dims=(256, 256), turned=64, normed=256),
    "gemma 4": Case(heads=(8, 1), dims=(512, 512), turned=512, normed=512, offset=0.0),
    "latent": Case((5, 1), (72, 64), 8, RopePairs.NEIGHBOURS, True, 64, 0.0, PoolKind.LATENT),
    "latent of 512": Case((16, 1), (576, 512), 64, RopePairs.NEIGHBOURS, True, 512, 0.0, PoolKind.LATENT),
    "V turns with K": Case((4, 1), (64, 64), 16, RopePairs.NEIGHBOURS, True, 64, 0.0, PoolKind.LATENT),
}


@pytest.mark.fast
@either
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_rows_are_normalised_turned_and_stored(
    case: Case, dtype: torch.dtype, store: Launch, kernel_device: torch.device
) -> None:
    case = replace(case, dtype=dtype)
    given, tokens, pages = case.given(kernel_device), places(kernel_device), case.pages(kernel_device)
    work = case.work(kernel_device)
    before = [tensor.clone() for tensor in given[:3]]
    store(given, tokens, work, pages)
    assert_rounded(given.q_out[:NUM_TOKENS], turned(normalised(given.q, work.q_norm), tokens.positions, work.rope)[:5])
    sides = [(pages.k, turned(normalised(given.k, work.k_norm), tokens.positions, work.rope))]
    if case.kind is PoolKind.SPLIT:
        sides.append((pages.v, normalised(given.v, work.v_norm)))
    for stored, want in sides:
        rows = stored.view(-1, *stored.shape[2:])
        slots = [SLOTS[token] for token in STORED]
        assert_rounded(rows[slots], want[STORED])
        others = [slot for slot in range(len(rows)) if slot not in slots]
        assert (rows[others] == UNTOUCHED).all(), "what is no token's was written"
    assert tokens.counts.tolist() == [3, NUM_TOKENS, 1, 0]
    assert all(torch.equal(tensor.nan_to_num(), was.nan_to_num()) for tensor, was in zip(given, before, strict=False))


@pytest.mark.fast
@pytest.mark.parametrize("queries", [launch_rope_queries, twins.rope_queries], ids=["kernel", "twin"])
@pytest.mark.parametrize("case", [Case(), Case(heads=(1, 1), dims=(64, 64), normed=0, turned=16)], ids=["norm", "one"])
def test_queries_alone_are_those_of_the_fused_store_in_place_too(
    case: Case, queries: Launch, kernel_device: torch.device
) -> None:
    given, tokens, work = case.given(kernel_device), places(kernel_device), case.work(kernel_device)
    launch_rope_store(given, tokens, work, case.pages(kernel_device))
    in_place = given.q.clone()
    queries(in_place, in_place, tokens.positions, work)
    torch.testing.assert_close(in_place, given.q_out, rtol=1e-6, atol=1e-6, equal_nan=True)


@either
def test_a_position_that_the_table_has_not_spoils_no_other_token(store: Launch, kernel_device: torch.device) -> None:
    case = Case()
    given, pages, work = case.given(kernel_device), case.pages(kernel_device), case.work(kernel_device)
    right, wrong = places(kernel_device), places(kernel_device)
    wrong.positions[1], wrong.positions[2] = NUM_POSITIONS, -1
    store(given, wrong, work, pages)
    assert wrong.counts.tolist() == [3, NUM_TOKENS, 1, NOT_FINITE]
    again, whole = case.given(kernel_device), case.pages(kernel_device)
    store(again, right, work, whole)
    assert given.q_out[1:3, :, :8].isnan().all()
    assert torch.equal(given.q_out[[0, 3, 4]], again.q_out[[0, 3, 4]])
    rows, want = (side.k.view(-1, *side.k.shape[2:]) for side in (pages, whole))
    for token in (1, 2):
        assert (rows[SLOTS[token], :, :8] == 0).all(), "a NaN was stored"
        want[SLOTS[token], :, :8] = 0
    assert torch.equal(rows, want)


@pytest.mark.fast
@not_finite
@either
@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_no_number_is_stored_as_zero_and_reported(
    side: str, value: float, store: Launch, kernel_device: torch.device
) -> None:
    """Through a norm one such element makes a row of NaN."""
    for case in (Case(normed=0), Case()):
        given, tokens, pages = case.given(kernel_device), places(kernel_device), case.pages(kernel_device)
        getattr(given, side)[1, 1, 20] = value
        getattr(given, side)[3, 1, 20] = value  # dropped, and no fault
        store(given, tokens, case.work(kernel_device), pages)
        assert tokens.counts.tolist() == [3, NUM_TOKENS, 1, NOT_FINITE]
        rows = getattr(pages, side)
        assert rows.isfinite().all()
        assert rows.view(-1, *rows.shape[2:])[SLOTS[1], 1, 20] == 0


@not_finite
def test_a_number_that_overflows_its_dtype_is_no_number(kernel_device: torch.device) -> None:
    """60000 rotated by 45 degrees with itself is 0, up to rounding, and 84853; float16 ends at 65504."""
    case = Case(normed=0, dtype=torch.float16, turned=24, dims=(24, 24))
    half = torch.full((NUM_POSITIONS, 24), 0.5**0.5, device=kernel_device)
    for store in (launch_rope_store, twins.rope_store):
        given, tokens, pages = case.given(kernel_device), places(kernel_device), case.pages(kernel_device)
        given.k[1] = 60000.0
        store(given, tokens, QkvWork(RopeTable(half)), pages)
        assert tokens.counts.tolist() == [3, NUM_TOKENS, 1, NOT_FINITE]
        stored = pages.k.view(-1, 2, 24)[SLOTS[1]]
        assert (stored[:, :12].abs() < 60000.0 * 2**-23).all()
        assert (stored[:, 12:] == 0).all()


def eight_bit_pages(
    encoding: Encoding, scales: Scales, kind: PoolKind, dims: tuple[int, int], device: torch.device
) -> LayerPages:
    """Returns pages for one head of a latent layer, or for two heads."""
    heads = 1 if kind is PoolKind.LATENT else 2
    form = PageFormat(encoding, kind, PAGE_SIZE, heads, *dims, scales=scales)
    k = torch.zeros(NUM_PAGES, PAGE_SIZE, heads, dims[0], dtype=torch.uint8, device=device).view(encoding.dtype)
    v = torch.zeros(NUM_PAGES, PAGE_SIZE, heads, dims[1], dtype=torch.uint8, device=device).view(encoding.dtype)
    by_page = (NUM_PAGES,) if scales is Scales.TOKEN else ()

    def factors(first: float) -> Tensor | None:
        shape = (*by_page, *form.scale_shape)
        if scales is Scales.NONE:
            return None
        return torch.arange(torch.Size(shape).numel(), device=device).view(shape) * 0.25 + first

    k_scale = factors(0.01)
    if kind is PoolKind.LATENT:
        return LayerPages(k, k[..., : dims[1]], form, k_scale, k_scale)
    return LayerPages(k, v, form, k_scale, factors(0.02))


@pytest.mark.fast
@pytest.mark.parametrize("encoding", [Encoding.E4M3FN, Encoding.E4M3FNUZ, Encoding.E5M2])
@pytest.mark.parametrize(
    ("kind", "scales"),
    [
        (PoolKind.SPLIT, Scales.LAYER),
        (PoolKind.SPLIT, Scales.HEAD),
        (PoolKind.SPLIT, Scales.TOKEN),
        (PoolKind.LATENT, Scales.LAYER),
        (PoolKind.LATENT, Scales.TOKEN),
    ],
)
def test_eight_bit_pages_get_the_codes_of_a_store_of_the_same_rows(
    encoding: Encoding, kind: PoolKind, scales: Scales, kernel_device: torch.device
) -> None:
    """Values beyond the largest code become the largest, and a token's scale is that of its largest element."""
    case = Case(dtype=torch.float16)
    if kind is PoolKind.LATENT:
        case = replace(CASES["latent"], dtype=torch.float16)
    given, work = case.given(kernel_device), case.work(kernel_device)
    given.k[0] *= 1000.0
    found, separate = (eight_bit_pages(encoding, scales, kind, case.dims, kernel_device) for _ in range(2))
    tokens = places(kernel_device)
    launch_rope_store(given, tokens, work, found)
    k, v = twins.stored_rows(given, tokens, work, found)
    launch_store_kv(k, v, tokens.slot_of_token, tokens.counts, separate)
    for ours, theirs in ((found.raw_k, separate.raw_k), (found.raw_v, separate.raw_v)):
        # The kernel's sums in a norm may differ from torch's in the last place.
        apart = ours.int() - theirs.int()
        assert int(apart.abs().max()) <= 1
        assert int(apart.count_nonzero()) <= 0.01 * apart.numel()
    if scales is Scales.TOKEN:
        assert found.k_scale is not None
        assert separate.k_scale is not None
        torch.testing.assert_close(found.k_scale, separate.k_scale)


@pytest.mark.parametrize("store", [launch_store_kv, cache_twins.store_kv], ids=["kernel", "twin"])
def test_without_work_the_fused_store_is_the_store_bit_by_bit(store: Launch, kernel_device: torch.device) -> None:
    case = Case(turned=0, normed=0, dtype=torch.float16)
    given, tokens = case.given(kernel_device), places(kernel_device)
    found, want = case.pages(kernel_device), case.pages(kernel_device)
    launch_rope_store(given, tokens, QkvWork(), found)
    store(given.k, given.v, tokens.slot_of_token, tokens.counts, want)
    assert torch.equal(found.k, want.k)
    assert torch.equal(found.v, want.v)
    assert torch.equal(given.q_out[:NUM_TOKENS], given.q[:NUM_TOKENS])


def test_a_table_of_frequencies_turns_each_pair_by_its_angle() -> None:
    table = RopeTable.of_frequencies(torch.tensor([1.0, 0.25, 0.0]), 9, factor=2.0)
    angle = torch.arange(9)[:, None] * torch.tensor([1.0, 0.25, 0.0])
    assert (table.dim, table.num_positions) == (6, 9)
    torch.testing.assert_close(table.cos_sin, 2.0 * torch.cat((angle.cos(), angle.sin()), 1))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RopeTable(torch.zeros(4, 7)), r"cos_sin has shape \[4, 7\].*an even number of elements"),
        (lambda: RopeTable(torch.zeros(4, 16)[:, :8]), r"strides \[16, 1\]; it must be contiguous"),
        (lambda: RopeTable(torch.zeros(4, 8, dtype=torch.float64)), "cos_sin is torch.float64; it must be one of"),
        (lambda: RopeTable.of_frequencies(torch.zeros(4).double(), 3), "inv_freq is torch.float64"),
        (lambda: RowNorm(torch.zeros(2, 4), 1e-6), r"a norm's weight is torch.float32 \[2, 4\]; it must be contiguous"),
        (lambda: RowNorm(torch.zeros(4), float("nan")), "a norm's eps is nan; it must be a finite number"),
        (lambda: RopeTable(torch.zeros(4, 8), True), "pairs is True and at_end is False; they must be a RopePairs"),  # type: ignore[arg-type]
        (lambda: RopeTable(torch.zeros(4, 8), at_end="no"), "at_end is 'no'; they must be a RopePairs, and True"),  # type: ignore[arg-type]
        (lambda: RopeTable([[1.0, 0.0]]), "cos_sin is a list; give a tensor"),  # type: ignore[arg-type]
        (lambda: RopeTable.of_frequencies(torch.zeros(4), 2.5), "num_positions is 2.5; it must be a whole number"),  # type: ignore[arg-type]
        (lambda: RopeTable.of_frequencies(torch.zeros(4), -1), "num_positions is -1; it must be a whole number of at"),
        (
            lambda: RopeTable.of_frequencies(torch.zeros(4), 3, factor=float("nan")),
            "factor is nan; it must be a finite",
        ),
        (lambda: RowNorm(torch.zeros(4), "0"), "a norm's eps is '0'; it must be a finite number of at least 0"),  # type: ignore[arg-type]
        (lambda: RowNorm(torch.zeros(4), 1e-6, float("nan")), "a norm's offset is nan; it must be a finite number"),
        (lambda: RowNorm(None, 1e-6), "a norm's weight is a NoneType; give a tensor"),  # type: ignore[arg-type]
    ],
)
def test_work_that_cannot_be_done_is_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
