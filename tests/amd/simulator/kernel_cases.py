"""Runs of the project's kernels on a simulated arch: each builds its inputs, launches, and compares with a reference.

Attention is compared with float64, like its torch twins; the store with its twin. Shapes are small, and still cross
pages, tiles, and the shares of programs.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from rocm_attn.kernels.attention.finish import launch_finish
from rocm_attn.kernels.attention.merge_states import launch_merge_states
from rocm_attn.kernels.attention.plain_decode import launch_plain_decode
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.page_format import Encoding, PageFormat, PoolKind, Scales
from rocm_attn.kernels.cache.rope_store import launch_rope_store
from rocm_attn.kernels.cache.row_work import Projected, QkvWork, RopePairs, RopeTable, RowNorm, TokenPlaces
from rocm_attn.kernels.cache.store import launch_store_kv
from rocm_attn.kernels.experts.arguments import ProductArgs
from rocm_attn.kernels.experts.choose import SHARED, SHARED_BY_LOGIT, ChoiceRule
from rocm_attn.kernels.experts.product import launch_expert_product
from rocm_attn.kernels.metadata.error_word import NOT_FINITE
from rocm_attn.kernels.refs import cache as cache_twins
from rocm_attn.kernels.refs import rope as rope_twins
from rocm_attn.kernels.refs.merge_states import merge_states
from rocm_attn.kernels.tuning.decode_tiles import DECODE_CHOICES
from rocm_attn.kernels.tuning.expert_tiles import expert_tiles, tiles_of_fixed_bits
from rocm_attn.kernels.tuning.tiles import DecodeTiles
from rocm_lab.simulator.launcher import ARCHS
from tests.amd.kernels.attention_cases import (
    UNTOUCHED,
    Case,
    assert_served,
    build,
    run_decode,
    run_extend,
    run_shared_extend,
    tiles_of,
)
from tests.amd.kernels.expert_cases import random_problem
from tests.amd.kernels.mixture_cases import FewTokens, assert_combined, assert_sorted, random_choice
from tests.amd.kernels.model_cases import (
    FORMS,
    OneOfRanks,
    assert_few_rows_multiplied,
    assert_gated,
    assert_row_multiplied,
    sum_of_rows,
)
from tests.amd.simulator.case import KernelCase, own_encoding
from tests.amd.simulator.cdna_cases import cdna_cases, more_cdna_cases
from tests.amd.simulator.check_cases import PATHS, check_cases
from tests.amd.simulator.large_pools import LARGE_POOL_BYTES, zeros
from tests.amd.simulator.large_steps import build_step
from tests.amd.simulator.latent_cases import latent_cases, more_latent_cases
from tests.amd.simulator.segment_cases import more_segment_cases, segment_cases
from tests.amd.simulator.sparse_cases import more_sparse_cases, sparse_cases
from tests.amd.simulator.state_cases import state_cases
from tests.amd.simulator.truth_cases import more_truth_cases, truth_cases
from tests.amd.tolerances import assert_attention_close, assert_lse_close

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
_HALVES = {"bfloat16": BF16, "float16": FP16}
CPU = torch.device("cpu")

NUM_PROGRAMS = 3
Run = Callable[[], None]

# Extends with and without a prefix, decodes that several programs share, an empty decode, no new tokens, no sequence.
STEP = Case(
    kv_len=[100, 20, 17, 0, 0, 50, 35, 12], q_len=[1, 9, 17, 0, 1, 1, 2, 0], dims=(128, 128), heads=(8, 2), tail=3
)
# Gemma 4's layers without a window, shorter: the simulator takes most of its time for rows of 512.
WIDE = replace(STEP, kv_len=[20, 6], q_len=[1, 2], dims=(512, 512), heads=(8, 1), dtype=BF16)


def run_step(arch: str, case: Case, *, is_large: bool) -> None:
    """Runs a mixed step: extend serves sequences with more than one new token, decode those with one."""
    tensors = build_step(case, is_large=is_large)
    decode, extend = tiles_of(arch, case)
    decoded = tensors.q_indptr[:-1][tensors.q_len == 1].long()
    run_extend(tensors, min_q_len=2, tiles=extend)
    assert (tensors.out[decoded] == UNTOUCHED).all(), "extend wrote to tokens that are decode's"
    run_decode(tensors, num_programs=NUM_PROGRAMS, tiles=decode)
    assert_served(tensors)


def run_merge(num_seqs: int, num_programs: int) -> None:
    """Runs a decode whose rows num_programs programs share; for each number the merge is cut differently."""
    kv_len = [70 + seq for seq in range(num_seqs)]
    tensors = build(Case(kv_len, [1] * num_seqs, heads=(2, 1), dims=(16, 16), dtype=BF16, page_size=8), CPU)
    tiles = DecodeTiles(key_block=16, num_warps=1, num_stages=1, programs_per_cu=1)
    run_decode(tensors, num_programs=num_programs, tiles=tiles)
    assert_served(tensors)


def run_masked(arch: str, case: Case) -> None:
    """Runs a masked step, also of sequences with one new token."""
    tensors = build(replace(case, masked=True), CPU)
    tiles = tiles_of(arch, case)[1].of_masked_steps(tensors.gqa_ratio, case.codes)
    run_extend(tensors, tiles=tiles)
    assert_served(tensors)


def run_ranges(arch: str, case: Case) -> None:
    """Runs a step whose tokens each see a range of keys."""
    tensors = build(case, CPU)
    run_extend(tensors, tiles=tiles_of(arch, case)[1])
    assert_served(tensors)


def run_shared_rows(arch: str, case: Case) -> None:
    """Runs an extend of which every row is shared out among several programs."""
    tensors = build(case, CPU)
    run_shared_extend(tensors, tiles=tiles_of(arch, case)[1])
    assert_served(tensors)


def run_suffixes(arch: str, case: Case) -> None:
    """Runs a decode of keys that begin after the first pages of each row."""
    tensors = build(replace(case.decodes(), tail=0), CPU)
    run_decode(tensors, num_programs=NUM_PROGRAMS, tiles=tiles_of(arch, case)[0])
    assert_served(tensors)


def run_merge_states(dtype: torch.dtype) -> None:
    """Merges two sides, each of them empty and NaN for some token."""
    generator = torch.Generator().manual_seed(0)
    sides = []
    for empty in (1, 2):
        out, lse = torch.randn(5, 3, 80, generator=generator).to(dtype), torch.randn(5, 3, generator=generator)
        for token in (empty, 4):
            out[token], lse[token] = float("nan"), float("-inf")
        sides += [out, lse]
    merged, wanted = ((torch.full((5, 3, 80), UNTOUCHED, dtype=dtype), torch.full((5, 3), UNTOUCHED)) for _ in range(2))
    launch_merge_states(sides[0], sides[1], sides[2], sides[3], *merged)
    merge_states(sides[0], sides[1], sides[2], sides[3], *wanted)
    assert_attention_close(merged[0], wanted[0].double(), dtype)
    assert_lse_close(merged[1], wanted[1].double(), torch.float32)


def run_plain_decode() -> None:
    """Runs the kernel to read first."""
    tensors = build(replace(STEP.decodes(), dims=(80, 48), dtype=BF16, window_left=30, tail=0), torch.device("cpu"))
    launch_plain_decode(tensors.args(), scores=tensors.scores)
    assert_served(tensors)


def run_experts(arch: str, dtype: torch.dtype, rows: int) -> None:
    """Runs a full block and one that is not, an expert without tokens, columns and elements that fill no tile.

    Then it runs some of the tokens alone, which get the same bits, and all with a gate.
    """
    tiles = replace(expert_tiles(arch, dtype, rows), columns=64)
    problem = random_problem(tiles.rows + 5, 3, 1, (tiles.step + 24, 72), dtype=dtype, has_bias=rows == 1)
    problem = replace(problem, expert=torch.zeros_like(problem.expert).index_fill_(0, torch.tensor([2, 9]), 1))
    out = problem.empty_out()
    launch_expert_product(problem.args(out), tiles=tiles)
    together = problem.by_pair(out)
    problem.assert_served(together)
    alone = replace(problem, x=problem.x[2:10], expert=problem.expert[2:10])
    again = alone.empty_out()
    launch_expert_product(alone.args(again), tiles=tiles)
    assert torch.equal(alone.by_pair(again), together[2:10]), "a row's bits depend on no other row"
    small = replace(problem, x=problem.x / 6)  # products of about one
    gated = small.empty_out(2)
    launch_expert_product(small.args(gated, FORMS[0]), tiles=tiles)
    small.assert_gated(small.by_pair(gated), FORMS[0])


def run_one_order(arch: str, dtype: torch.dtype) -> None:
    """Runs a product with one matrix by the tiles for few rows and those for many, which give a row the same bits."""
    few, many = (replace(tiles_of_fixed_bits(arch, dtype, rows), columns=64) for rows in (1, 1000))
    problem = random_problem(many.rows + 5, 1, 1, (2 * few.step + 24, 72), dtype=dtype, has_bias=True)
    assert problem.bias is not None
    weight, bias = problem.weight[0], problem.bias[0]
    together, gated = problem.empty_out(), problem.empty_out(2)
    launch_expert_product(ProductArgs.of_all(problem.x, weight, bias, together), tiles=many)
    launch_expert_product(ProductArgs.of_all(problem.x, weight, bias, gated, FORMS[0]), tiles=many)
    problem.assert_served(together)
    alone, alone_gated = (torch.empty_like(out[: few.rows + 1]) for out in (together, gated))
    launch_expert_product(ProductArgs.of_all(problem.x[: len(alone)], weight, bias, alone), tiles=few)
    launch_expert_product(ProductArgs.of_all(problem.x[: len(alone)], weight, bias, alone_gated, FORMS[0]), tiles=few)
    assert torch.equal(alone, together[: len(alone)])
    assert torch.equal(alone_gated, gated[: len(alone)])


def run_choice(dtype: torch.dtype) -> None:
    """Runs choices out of groups and out of more experts than a wave has, sums that do not fill a block, and the
    experts of few tokens.
    """
    groups, all_ = ChoiceRule(3, 2, 2, False, True, 2.5, SHARED), ChoiceRule(1, 1, 1, True, True, 1.0, SHARED_BY_LOGIT)
    for sizes, rule in (((3, 60, 3), groups), ((1, 1030, 2), all_)):
        random_choice(sizes, rule, dtype=dtype, is_corrected=rule is groups).assert_served()
    assert_combined((3, 2, 520), dtype, has_shared=False, has_weight=False)
    assert_combined((2, 3, 40), dtype, has_shared=True, has_weight=True)
    few = FewTokens(2, 9, 3, 72, 37)
    few.assert_inner(None, dtype, has_bias=True)
    few.assert_inner(FORMS[0], dtype)
    few.assert_sums(dtype, has_bias=True, has_shared=True, has_factor=True)


def run_pairs(num_tokens: int) -> None:
    """Sorts pairs, of which the last expert has none."""
    assert_sorted(torch.arange(3 * num_tokens).view(-1, 3) % 4, 5)


def run_model(dtype: torch.dtype) -> None:
    """Runs sums with norms whose rows do not fill a block, each gate, products of one row and of a few, and sums over
    ranks."""
    for terms in (1, 3):
        sum_of_rows(3, 1000, dtype, terms=terms).assert_served()
    for form in FORMS:
        assert_gated(2, 1032, form, dtype)
    assert_few_rows_multiplied((3, 64, 128), FORMS[0], dtype)
    assert_few_rows_multiplied((3, 64, 128), None, dtype, parts=2, has_bias=True)
    assert_row_multiplied((5, 2056), dtype, has_bias=True)
    sum_of_rows(1, 1000, dtype).assert_multiplied(37, None, has_bias=True)
    sum_of_rows(1, 1000, dtype).assert_multiplied(19, FORMS[0])
    OneOfRanks(3, 1).assert_sums(dtype, 520)


def linear_pools(num_pages: int, page_size: int, heads: int, dims: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """K and V pages of zeros."""
    return [zeros((num_pages, page_size, heads, dim), dtype) for dim in dims]


def vectorised_pools(
    num_pages: int, page_size: int, heads: int, dims: tuple[int, int], dtype: torch.dtype
) -> list[Tensor]:
    """K and V pages of zeros, cut into vectors of 16 bytes."""
    shapes = (num_pages, heads, dims[0] // 8, page_size, 8), (num_pages, heads, page_size // 8, dims[1], 8)
    return [zeros(shape, dtype) for shape in shapes]


def run_store(dtype: torch.dtype, pools_of: Callable[..., list[Tensor]], *, is_large: bool) -> None:
    """Stores new keys and values to pages in random order; drops pads, slots of page 0, and NaN."""
    page_size, heads, dims, num_tokens = 8, 2, (80, 48), 11
    page_bytes = page_size * heads * min(dims) * 2
    num_pages = LARGE_POOL_BYTES // page_bytes if is_large else 64
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(num_tokens, heads, dim, generator=generator).to(dtype) for dim in dims)
    k[-1], v[-1], v[1, 1, 7] = float("nan"), float("nan"), float("-inf")
    page = num_pages - 1 - torch.randperm(16, generator=generator)[:num_tokens]
    page[3] = 0
    slots = (page * page_size + torch.arange(num_tokens) % page_size).int()
    counts = [torch.tensor([1, num_tokens - 2, 0, 0], dtype=torch.int32) for _ in range(2)]
    pools = [pools_of(num_pages, page_size, heads, dims, dtype) for _ in range(2)]
    launch_store_kv(k, v, slots, counts[0], LayerPages.plain(*pools[0]))
    cache_twins.store_kv(k, v, slots, counts[1], LayerPages.plain(*pools[1]))
    assert counts[0].tolist() == counts[1].tolist() == [1, num_tokens - 2, 0, NOT_FINITE]
    for stored, expected in zip(*pools, strict=True):
        # Compares the target pages and the first ones, not gigabytes of zeros.
        for pages in (slice(0, 16), slice(num_pages - 16, num_pages)):
            assert torch.equal(stored[pages], expected[pages]), "the pages are not those of the twin"


def run_coded_store(encoding: Encoding, scales: Scales) -> None:
    """Stores new keys and values to eight-bit pages, with their scales."""
    form = PageFormat(encoding, PoolKind.SPLIT, 8, 2, 80, 48, scales)
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(5, 2, dim, generator=generator).to(BF16) for dim in (80, 48))
    k[1] *= 1e4
    v[2, 1, 3] = float("inf")
    slots = torch.tensor([8, 31, 17, 9, 40], dtype=torch.int32)
    stored = []
    for _ in range(2):
        k_pages, v_pages = (torch.zeros(8, 8, 2, dim, dtype=torch.uint8).view(encoding.dtype) for dim in (80, 48))
        scale_values = torch.zeros(8, 2, 8) if scales is Scales.TOKEN else torch.tensor([0.01, 0.03])
        stored.append(LayerPages(k_pages, v_pages, form, scale_values, scale_values.clone()))
    counts = [torch.tensor([1, 4, 0, 0], dtype=torch.int32) for _ in range(2)]
    launch_store_kv(k, v, slots, counts[0], stored[0])
    cache_twins.store_kv(k, v, slots, counts[1], stored[1])
    assert counts[0].tolist() == counts[1].tolist() == [1, 4, 0, NOT_FINITE]
    for name, found in stored[0].tensors().items():
        assert torch.equal(found, stored[1].tensors()[name]), f"{name} is not the twin's"


def run_record_store(arch: str, scales: Scales) -> None:
    """Stores rows as records, as they are, and normalised and turned; one is not finite, one has no slot."""
    encoding = own_encoding(arch)
    dims = {Scales.GROUP: (576, 512), Scales.FOOTER: (512, 512)}[scales]
    form = PageFormat(encoding, PoolKind.LATENT, 8, 1, *dims, scales)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(5, heads, dims[0], generator=generator).to(BF16) for heads in (2, 1))
    k[1] *= 1e4
    k[2, 0, 3] = float("inf")
    rope = RopeTable(torch.randn(40, 64, generator=generator), at_end=True)
    work = QkvWork(rope, k_norm=RowNorm(torch.rand(form.coded, generator=generator).to(BF16), 1e-5))
    slots, positions = (torch.tensor(each, dtype=torch.int32) for each in ([8, 31, 17, 3, 40], [0, 3, 39, 5, 7]))
    results = []
    for store, rope_store in (
        (launch_store_kv, launch_rope_store),
        (cache_twins.store_kv, rope_twins.rope_store),
    ):
        records = [torch.zeros(8, form.line, dtype=torch.uint8) for _ in range(2)]
        plain, turned = (LayerPages.latent(each.view(encoding.dtype), form) for each in records)
        counts = torch.tensor([1, 4, 0, 0], dtype=torch.int32)
        q_out = torch.empty_like(q)
        store(k, k[..., :512], slots, counts, plain)
        rope_store(Projected(q, k, k[..., :512], q_out), TokenPlaces(positions, slots, counts), work, turned)
        results.append((records[0], counts, q_out, turned.read_keys(slots.long() // 8, slots.long() % 8)))
    for found, expected in zip(*results, strict=True):
        # The order of a norm's sum may change a code to the next one.
        is_exact = not found.is_floating_point()
        torch.testing.assert_close(found, expected, rtol=0.0 if is_exact else 0.13, atol=0.0 if is_exact else 1e-4)
    assert results[0][1][3] == NOT_FINITE


def run_row_work(pool: PoolKind, *, is_large: bool) -> None:
    """Runs the fused store of partly rotary rows, and the work after attention, both in place, against their twins."""
    is_latent = pool is PoolKind.LATENT
    (heads, kv_heads), (dim, v_dim), turned, normed = (
        ((4, 1), (80, 64), 16, 64) if is_latent else ((6, 2), (80, 48), 24, 80)
    )
    generator = torch.Generator().manual_seed(0)
    num_tokens, page_size = 5, 8
    num_pages = LARGE_POOL_BYTES // (page_size * kv_heads * v_dim * 2) if is_large else 64

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(BF16)

    rope = RopeTable(torch.randn(40, turned, generator=generator), RopePairs.NEIGHBOURS, at_end=is_latent)
    norm = RowNorm(random(normed), 1e-5, 1.0)
    work = QkvWork(rope, k_norm=norm) if is_latent else QkvWork(rope, norm, norm, RowNorm(random(v_dim), 1e-5))
    q, k = random(num_tokens, heads, turned if is_latent else dim), random(num_tokens, kv_heads, dim)
    v = k[..., :v_dim] if is_latent else random(num_tokens, kv_heads, v_dim)
    k[1, 0, 3] = float("inf")
    page = num_pages - 1 - torch.arange(num_tokens)
    slots = (page * page_size + torch.arange(num_tokens)).int()
    positions = torch.tensor([0, 3, 39, 40, 5], dtype=torch.int32)
    out, gate = random(num_tokens, heads, v_dim), random(num_tokens, heads)
    results = []
    for store, finish in ((launch_rope_store, launch_finish), (rope_twins.rope_store, rope_twins.finish)):
        pools = linear_pools(num_pages, page_size, kv_heads, (dim, v_dim), BF16)
        pages = LayerPages.plain(pools[0], pools[0][..., :v_dim] if is_latent else pools[1], kind=pool)
        counts = torch.tensor([1, num_tokens - 1, 0, 0], dtype=torch.int32)
        q_out, finished = q.clone(), out.clone()
        store(Projected(q_out, k, v, q_out), TokenPlaces(positions, slots, counts), work, pages)
        finish(finished, gate, replace(rope, at_end=True), positions, counts)
        last = slice(num_pages - 8, num_pages)
        results.append([q_out, pages.k[last], pages.v[last], finished, counts.float()])
    for found, want in zip(*results, strict=True):
        # Sums of a norm have another order, and an element may be rounded to its other neighbour.
        torch.testing.assert_close(found, want, rtol=2**-7, atol=1e-6, equal_nan=True)


def _cases(arch: str, runs: Mapping[str, Run]) -> list[KernelCase]:
    return [KernelCase(name, arch, run) for name, run in runs.items()]


def _step_cases(arch: str, cases: Sequence[Case], widths: tuple[bool, ...]) -> list[KernelCase]:
    return _cases(
        arch,
        {
            f"{_named(case)}-{_width(is_large)}": partial(run_step, arch, case, is_large=is_large)
            for case in cases
            for is_large in widths
        },
    )


def _on_cases(arch: str, name: str, run: Callable[[str, Case], None], cases: Sequence[Case]) -> dict[str, Run]:
    return {f"{name}-{_named(case)}": partial(run, arch, case) for case in cases}


def _merges(sizes: Sequence[tuple[int, int]]) -> dict[str, Run]:
    return {f"merge-{seqs}x{programs}": partial(run_merge, seqs, programs) for seqs, programs in sizes}


def _stores(stores: Sequence[tuple[str, str, tuple[bool, ...]]]) -> dict[str, Run]:
    """stores: layout of pages, dtype, and whether pools are large"""
    return {
        f"store{layout}-{name}-{_width(is_large)}": partial(
            run_store, _HALVES[name], vectorised_pools if layout else linear_pools, is_large=is_large
        )
        for layout, name, widths in stores
        for is_large in widths
    }


def _width(is_large: bool) -> str:
    return "above" if is_large else "below"


def _named(case: Case) -> str:
    heads, dims = ("x".join(map(str, pair)) for pair in (case.heads, case.dims))
    kv = "" if case.kv is None else f"-{case.kv.name}_{case.scales.name}"
    window = "-window" * (case.window_left >= 0)
    return f"{heads}-{dims}-{str(case.dtype).removeprefix('torch.')}{kv}-page{case.page_size}{window}"


# Decode, extend and the store run by day on both archs. Each other case runs on one, by turns: the machine code of the
# two differs in how it is scheduled, and rarely in its effect. The grid has both.
ON_BOTH = frozenset(
    {
        "16x2-64x64-bfloat16-page64-above",
        *(f"store-{own_encoding(arch).name}-TOKEN" for arch in ARCHS),
        "store-footers",
        "store-bfloat16-below",
        "cdna-extend-plain",
        *(path.removesuffix(".py") for path in PATHS),
    }
)
WHOLE = replace(STEP, dtype=BF16)
PAGES_OF_64 = replace(STEP, heads=(16, 2), dims=(64, 64), page_size=64, dtype=BF16)
ODD = replace(STEP, heads=(6, 2), dims=(80, 48), page_size=5, dtype=FP16, spread=True)
# Several blocks of keys, all of them masked.
WINDOW = replace(WHOLE, kv_len=[150, 20, 17, 0, 0, 230, 35, 12], q_len=[5, 9, 17, 0, 1, 40, 2, 0], window_left=120)
RANGES = [
    replace(WHOLE, kv_len=[60, 20], q_len=[5, 20], spans=((0, 55, 58), (1, 3, 18))),
    replace(ODD, kv_len=[60, 20], q_len=[5, 20], chunk=16, window_left=15, spans=((1, 8, 18),), spans_pass=True),
]
CODED = replace(STEP, kv_len=[40, 20, 0, 35], q_len=[1, 9, 1, 2], dtype=BF16, scales=Scales.HEAD)


def cases_by_day(arch: str) -> list[KernelCase]:
    """Every kernel in every dtype that it has code for on AMD, below and above 4 GiB."""
    own = own_encoding(arch)
    runs: dict[str, Run] = {
        f"store-{own.name}-TOKEN": partial(run_coded_store, own, Scales.TOKEN),
        "store-E5M2-HEAD": partial(run_coded_store, Encoding.E5M2, Scales.HEAD),
        "store-records": partial(run_record_store, arch, Scales.GROUP),
        "store-footers": partial(run_record_store, arch, Scales.FOOTER),
        **_stores([("", "bfloat16", (False, True)), ("", "float16", (True,))]),
        **_stores([("_vectorised", "bfloat16", (False, True))]),
        **_merges([(1, 20), (17, 20)]),
        **_on_cases(arch, "masked", run_masked, [WHOLE]),
        **_on_cases(arch, "ranges", run_ranges, RANGES),
        **_on_cases(
            arch,
            "shared_rows",
            run_shared_rows,
            [replace(WHOLE, kv_len=[100, 20], q_len=[5, 9], heads=(4, 2)), replace(RANGES[0], heads=(6, 2))],
        ),
        **_on_cases(arch, "suffixes", run_suffixes, [replace(WHOLE, first_page=[3, 0, 9, 0, 1, 0, 4, 2])]),
        "plain_decode": run_plain_decode,
        **{f"merge_states-{name}": partial(run_merge_states, dtype) for name, dtype in _HALVES.items()},
        **{f"experts-{name}-1": partial(run_experts, arch, dtype, 1) for name, dtype in _HALVES.items()},
        **{f"one-order-{name}": partial(run_one_order, arch, dtype) for name, dtype in _HALVES.items()},
        **{f"choice-{name}": partial(run_choice, dtype) for name, dtype in _HALVES.items()},
        **{f"pairs-{num}": partial(run_pairs, num) for num in (90, 1500)},
        **{f"model-{name}": partial(run_model, dtype) for name, dtype in _HALVES.items()},
        "row_work-split-below": partial(run_row_work, PoolKind.SPLIT, is_large=False),
        "row_work-latent-above": partial(run_row_work, PoolKind.LATENT, is_large=True),
    }
    return [
        *_step_cases(arch, [WHOLE, replace(CODED, kv=own), ODD, WINDOW], (False,)),
        *_step_cases(arch, [PAGES_OF_64], (True,)),
        *_cases(arch, runs),
        *segment_cases(arch),
        *cdna_cases(arch),
        *check_cases(arch),
        *sparse_cases(arch),
        *state_cases(arch),
        *latent_cases(arch),
        *truth_cases(arch),
    ]


def grid_cases(arch: str) -> list[KernelCase]:
    """Every decode row of the tuning table, which meet every extend row, in every dtype and at both pool sizes.

    And other widths, page sizes and pools of the kernels of the day.
    """
    steps = [
        replace(STEP, heads=(row.max_q_rows // row.tiles.heads_per_row * 2, 2), dims=(dim, dim), dtype=dtype)
        for row in DECODE_CHOICES
        if row.arch == arch
        for dim in (row.max_head_dim,)
        for dtype in ((FP32,) if row.item_bytes == 4 else (BF16, FP16))
    ]
    odd = [
        replace(STEP, heads=(32, 1), dtype=BF16, page_size=1),
        WIDE,
        replace(ODD, kv_len=CODED.kv_len, q_len=CODED.q_len, kv=Encoding.E5M2, scales=Scales.TOKEN),
        replace(STEP, heads=(3, 1), dims=(192, 128), page_size=128, dtype=BF16),
        replace(STEP, heads=(71, 1), dims=(32, 32), page_size=7, dtype=FP16),
        replace(STEP, heads=(2, 2), dims=(96, 64), page_size=1, dtype=BF16, spread=True),
        replace(STEP, heads=(3, 1), dims=(80, 96), page_size=1, dtype=FP16, spread=True),
        replace(STEP, heads=(1, 1), dims=(1, 7), page_size=2, dtype=FP16),
        replace(STEP, heads=(6, 2), dims=(256, 80), page_size=16, dtype=FP32),
    ]
    small = [case for case in steps if case.dtype != FP32]
    runs: dict[str, Run] = {
        **_stores([("", "float16", (False,)), ("_vectorised", "float16", (False, True))]),
        **_merges([(5, 9), (1, 260)]),
        **_on_cases(arch, "masked", run_masked, [replace(ODD, window_left=9)]),
        **_on_cases(
            arch, "shared_rows", run_shared_rows, [replace(ODD, kv_len=[40, 60], q_len=[9, 3], window_left=30)]
        ),
        **_on_cases(arch, "suffixes", run_suffixes, [replace(ODD, first_page=[2] * 8)]),
        "experts-bfloat16-1000": partial(run_experts, arch, BF16, 1000),
    }
    return [
        *cases_by_day(arch),
        *_step_cases(arch, [WHOLE, PAGES_OF_64, replace(STEP, dtype=FP16)], (False, True)),
        *_step_cases(arch, [*steps, *odd], (False,)),
        *_step_cases(arch, small, (True,)),
        *_cases(arch, runs),
        *more_segment_cases(arch),
        *more_sparse_cases(arch),
        *more_latent_cases(arch),
        *more_cdna_cases(arch),
        *more_truth_cases(arch),
    ]


def _by_turns(arch: str) -> Iterator[KernelCase]:
    """The arch's cases by day. Both archs have as many, in the same order."""
    turns = itertools.cycle(ARCHS)
    for case in cases_by_day(arch):
        if case.name in ON_BOTH or next(turns) == arch:
            yield case


QUICK = tuple(case for arch in ARCHS for case in _by_turns(arch))
GRID = tuple({str(case): case for arch in ARCHS for case in grid_cases(arch)}.values())
