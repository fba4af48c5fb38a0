"""Pages that an engine owns may have strides of their own, and tails that must stay. These tests show which kernels
take them.

Every row is run over such pages on the stand-in. A row that claims to read them gives the right result. The stand-in
refuses every other one, because the real function refuses such pages or is silently wrong.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.problem import PoolKind
from rocm_attn.providers.aiter.entries import ENTRIES
from rocm_attn.providers.contract import KernelEntry, PoolSize, PoolTerms
from tests.amd.aiter.checks import ContractBroken
from tests.amd.aiter.eight_bit_world import EightBitWorld
from tests.amd.aiter.every_kernel import MAX_KV_LEN, STEPS_OF_KIND, Case, cases, selection_of
from tests.amd.aiter.serving import CPU, GFX942
from tests.amd.aiter.stand_in import StandIn

BOUND = [entry for entry in ENTRIES if not entry.not_bound]
each_row = pytest.mark.parametrize("entry", BOUND, ids=lambda entry: f"{entry.name}-{entry.kind.value}")
STRIDES = "it needs contiguous pages, and these may have other strides"
TAILS = "the tail of a sequence's last page must be zeroed for it, and these pages are left unchanged"


def case_of(entry: KernelEntry) -> Case:
    """Returns the row's first case whose pages hold several tokens, or its first case if there is none."""
    found = [case for case in cases(GFX942) if case.entry is entry and case.problem.dtype == entry.limits.dtypes[0]]
    return next((case for case in found if case.problem.page_size > 1), found[0])


@pytest.mark.fast(5)
@each_row
def test_a_row_is_refused_where_it_cannot_serve_an_engines_pages(entry: KernelEntry) -> None:
    problem = case_of(entry).problem
    for terms, is_served, reason in (
        (PoolTerms(page_strides=True), entry.limits.page_strides, STRIDES),
        (PoolTerms(keeps_tails=True), entry.masks_v or problem.page_size == 1, TAILS),
    ):
        refusals = entry.refusals(problem, GFX942, PoolSize(100, MAX_KV_LEN, 8, terms))
        assert (reason in refusals) == (not is_served)
        assert entry.refusals(problem, GFX942, PoolSize(100, MAX_KV_LEN, 8)) == ()


@each_row
def test_no_row_serves_fewer_keys_than_new_tokens(entry: KernelEntry) -> None:
    """The behaviour of AITER's kernels is unknown then."""
    assert not entry.limits.short_kv


@pytest.mark.fast(3)
@each_row
def test_pages_with_strides_of_their_own_are_read_right_or_refused(entry: KernelEntry, aiter: StandIn) -> None:
    case = case_of(entry)
    world = EightBitWorld.build(
        [case.problem],
        CPU,
        "auto",
        num_pages=2 + 4 * -(-MAX_KV_LEN // case.problem.page_size),
        max_kv_len=MAX_KV_LEN,
        target=GFX942,
        selections=[selection_of(case, GFX942, "aiter")],
    )
    pool = world.runtime.pool
    pool._layers[0] = with_strides(pool.layer(0), case.problem.pool)

    def serve() -> None:
        world.served(*STEPS_OF_KIND[entry.kind], pad_to=4)

    if entry.limits.page_strides:
        serve()
        assert world.largest_error > 0
    else:
        with pytest.raises(ContractBroken, match=r"stride|contiguous"):
            serve()


def with_strides(pages: LayerPages, pool: PoolKind) -> LayerPages:
    """Returns the same pages with other strides.

    K and V are packed in rows, with heads before tokens, in split pools. In other pools rows and pages are further
    apart.
    """
    raw_k, raw_v = pages.raw_k, pages.raw_v
    if pool is PoolKind.LATENT:
        k = torch.cat([raw_k, gaps(raw_k)], -1)[..., : raw_k.shape[-1]]
        v = k[..., : raw_v.shape[-1]]
    elif pool is PoolKind.VECTORIZED:
        k, v = (torch.stack([side, gaps(side)], 1)[:, 0] for side in (raw_k, raw_v))
    else:
        packed = torch.cat([raw_k, raw_v], -1).transpose(1, 2).contiguous().transpose(1, 2)
        dim = raw_k.shape[-1]
        k, v = packed[..., :dim], packed[..., dim:]
    dtype = pages.format.encoding.dtype
    return replace(pages, k=k.view(dtype), v=v.view(dtype))


def gaps(raw: Tensor) -> Tensor:
    """Returns a tensor like `raw` that is all NaN."""
    return torch.full_like(raw, 0x80 if raw.dtype == torch.uint8 else float("nan"))
