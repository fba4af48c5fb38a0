"""Checks of the masks of a model's kernels: rotation, norms, gates, products of rows and experts, sums over ranks."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rocm_attn.kernels.attention.finish import launch_finish
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.page_format import Encoding, PageFormat, PoolKind, Scales
from rocm_attn.kernels.cache.rope_store import launch_rope_store
from rocm_attn.kernels.cache.row_work import Projected, QkvWork, RopePairs, RopeTable, RowNorm, TokenPlaces
from rocm_attn.kernels.experts.arguments import ProductArgs
from rocm_attn.kernels.experts.product import launch_expert_product
from rocm_attn.kernels.refs import rope as rope_twins
from rocm_attn.kernels.tuning.expert_tiles import ExpertTiles
from tests.amd.kernels.expert_cases import random_problem
from tests.amd.kernels.model_cases import (
    FORMS,
    OneOfRanks,
    assert_few_rows_multiplied,
    assert_gated,
    assert_row_multiplied,
    sum_of_rows,
)
from tests.amd.mutation.arguments import placed, run_both
from tests.amd.mutation.memory import PAGE_SIZE, Memory, gapped, ints


def rope_store(memory: Memory) -> None:
    """Checks five query heads over three, of odd dims. Rotary dims are first or last; norms cover a part or all.

    The last token is live, and at the table's last position. One token before it is not live; one is beyond the table.
    """
    plain = Encoding.FP32, Scales.NONE
    for turned, normed, at_end, (encoding, scales) in (
        (10, 24, False, plain),
        (6, 18, True, plain),
        (0, 24, False, (Encoding.E4M3FN, Scales.HEAD)),
        (24, 0, False, (Encoding.E5M2, Scales.TOKEN)),
    ):
        rows = Projected(gapped(4, 5, 24), gapped(4, 3, 24), gapped(4, 3, 40), gapped(4, 5, 24))
        pages = paged_rows(PageFormat(encoding, PoolKind.SPLIT, PAGE_SIZE, 3, 24, 40, scales))
        tokens = TokenPlaces(ints([3, 8, 0, 7]), ints([4, 6, 1, 9]), ints([2, 4, 1, 0]))
        rope = RopeTable(torch.rand(8, turned), RopePairs.NEIGHBOURS, at_end) if turned else None
        norms = [RowNorm(torch.rand(dim), 1e-5, 1.0) for dim in (normed, normed, 40)] if normed else [None] * 3
        given = rows, tokens, QkvWork(rope, *norms), pages
        ((got, *_, got_pages), _), ((want, *_, want_pages), _) = run_both(
            memory, launch_rope_store, rope_twins.rope_store, *given
        )
        assert_alike([got.q_out, *got_pages.read(ints(range(5)))], [want.q_out, *want_pages.read(ints(range(5)))])
    for dims, scales in (((396, 384), Scales.GROUP), ((256, 256), Scales.FOOTER)):
        rope_store_of_records(memory, PageFormat(Encoding.E4M3FN, PoolKind.LATENT, PAGE_SIZE, 1, *dims, scales))


def rope_store_of_records(memory: Memory, form: PageFormat) -> None:
    """Checks a head of three groups, and pairs after them. Records that no token has keep their values."""
    q, k, q_out = (gapped(4, heads, form.head_dim) for heads in (5, 1, 5))
    tokens = TokenPlaces(ints([3, 7, 0, 7]), ints([4, 6, 1, 9]), ints([2, 4, 1, 0]))
    rope = RopeTable(torch.rand(8, form.head_dim - form.coded), RopePairs.NEIGHBOURS, at_end=True)
    work = QkvWork(rope, k_norm=RowNorm(torch.rand(form.coded), 1e-5, 1.0))
    records = torch.full((5, form.line), 0x3F, dtype=torch.uint8).view(form.encoding.dtype)
    given = Projected(q, k, k[..., : form.v_head_dim], q_out), tokens, work, LayerPages.latent(records, form)
    got, want = run_both(memory, launch_rope_store, rope_twins.rope_store, *given)
    for found, wanted in zip(*(each[0][-1].read(ints(range(5))) for each in (got, want)), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0.13, atol=1e-5)


def finish(memory: Memory) -> None:
    """Checks five heads of an odd dim, with two pads and without; one token is at the table's end, one beyond it."""
    of_elements, of_heads = gapped(5, 5, 24), torch.rand(5, 5).t()
    for turned, gate, num_tokens in (
        (10, of_elements, 5),
        (10, of_heads, 5),
        (24, None, 3),
        (0, of_elements, 5),
    ):
        rope = RopeTable(torch.rand(8, turned), RopePairs.NEIGHBOURS, at_end=True) if turned else None
        given = gapped(5, 5, 24), gate, rope, ints([7, 0, 8, 3, 7]), ints([4, num_tokens, 1, 0])
        got, want = run_both(memory, launch_finish, rope_twins.finish, *given)
        assert_alike(got[0][:1], want[0][:1])


def paged_rows(form: PageFormat) -> LayerPages:
    """Five pages of small numbers, of which the first is zero."""
    sides = []
    for dim in (form.head_dim, form.v_head_dim):
        side = torch.rand(5, form.page_size, form.num_kv_heads, dim).to(form.encoding.dtype)
        side.view(torch.uint8)[0] = 0
        sides.append(side)
    scales: list[Tensor | None] = [None, None]
    if form.scales is not Scales.NONE:
        by_page = (5,) if form.scales is Scales.TOKEN else ()
        scales = [torch.rand(*by_page, *form.scale_shape) + 0.5 for _ in sides]
    return LayerPages(sides[0], sides[1], form, *scales)


def assert_alike(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """Checks equality up to the order of a norm's sum, which can change an eight-bit code to the next one."""
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=0.26 if got is not found[0] else 1e-5, atol=1e-5, equal_nan=True)


def add_norm(memory: Memory) -> None:
    """Checks rows that do not fill a block."""
    sum_of_rows(3, 40, torch.float32, terms=2).assert_served(memory.put)


def gate(memory: Memory) -> None:
    """Checks rows whose halves do not fill a block, or the second one."""
    for form, inner in zip(FORMS, (40, 1032, 40), strict=True):
        assert_gated(2, inner, form, torch.float32, put=memory.put)


def row_product(memory: Memory) -> None:
    """Checks rows and matrices that fill no tile, or the second one."""
    for sizes in ((7, 52), (7, 2100)):
        assert_row_multiplied(sizes, torch.float32, put=memory.put, has_bias=True)


def normed_product(memory: Memory) -> None:
    """Checks a row that fills no block, and matrices whose rows fill no turn of the programs, gated and not."""
    for form, num_out in ((None, 37), (FORMS[0], 19)):
        sum_of_rows(1, 40, torch.float32).assert_multiplied(num_out, form, memory.put, has_bias=True)


def few_rows(memory: Memory) -> None:
    """Checks rows that do not fill a block, combined and in parts."""
    assert_few_rows_multiplied((3, 64, 128), FORMS[0], torch.float32, put=memory.put)
    assert_few_rows_multiplied((3, 64, 128), None, torch.float32, put=memory.put, parts=2, has_bias=True)


def peer_sum(memory: Memory) -> None:
    """Checks sums that do not fill the last program's block."""
    OneOfRanks(3, 1).assert_sums(torch.float32, 520, memory.put)


def experts(memory: Memory) -> None:
    """Checks experts with more pairs than a tile has rows and with none; sizes that leave parts of tiles empty."""
    tiles = ExpertTiles(rows=16, columns=16, step=16, num_warps=1, num_stages=1)
    problem = random_problem(29, 6, 2, (19, 21), has_bias=True)
    # the first expert has no token, and the last one, whose matrix ends the memory, has some
    problem = replace(
        problem, x=rows_with_gaps(problem.x), weight=rows_with_gaps(problem.weight), expert=5 - problem.expert
    )
    x, weight, bias, groups = placed(memory, (problem.x, problem.weight, problem.bias, problem.groups))
    out = memory.put(rows_with_gaps(problem.empty_out()))
    launch_expert_product(ProductArgs.of_experts(x, weight, bias, groups, groups.tokens, out), tiles=tiles)
    problem.assert_served(problem.by_pair(out))
    # One matrix has all rows, which do not fill the last block.
    problem = random_problem(25, 1, 1, (19, 21), has_bias=True)
    problem = replace(problem, x=rows_with_gaps(problem.x), weight=rows_with_gaps(problem.weight))
    x, weight, bias = placed(memory, (problem.x, problem.weight, problem.bias))
    out = memory.put(rows_with_gaps(problem.empty_out()))
    assert bias is not None
    launch_expert_product(ProductArgs.of_all(x, weight[0], bias[0], out), tiles=tiles)
    problem.assert_served(out)


def rows_with_gaps(rows: Tensor) -> Tensor:
    """The same values, with room after each row."""
    return torch.cat((rows, torch.zeros_like(rows)), -1)[..., : rows.shape[-1]]
