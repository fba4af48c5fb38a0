"""Runs of sparse attention on a simulated arch: index scores and top-k, attention over a selection, and its check."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from rocm_attn.kernels.cache.fold_rows import launch_fold_rows
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.page_format import Encoding, PoolKind, Scales
from rocm_attn.kernels.sparse.arguments import (
    Indexing,
    IndexPages,
    LastTokens,
    LastUnit,
    SelectedArgs,
    SelectedKeys,
    SparseTokens,
)
from rocm_attn.kernels.sparse.attention import launch_selected_segments
from rocm_attn.kernels.sparse.check import launch_check_selection
from rocm_attn.kernels.sparse.cuts import segment_cut, top_k_cut
from rocm_attn.kernels.sparse.top_k import launch_top_k
from rocm_attn.kernels.tuning.sparse_tiles import selected_segment_tiles
from rocm_attn.kernels.tuning.tiles import CodeKind
from rocm_attn.problem import Row
from tests.amd.kernels.fold_cases import assert_folded, folded_by
from tests.amd.kernels.sparse_cases import (
    IndexCase,
    IndexProblem,
    SelectedCase,
    SelectedProblem,
    Step,
    TwoChoices,
    assert_units,
    best_units,
    build_index,
    build_selected,
    empty_selection,
    run_attention,
    run_select,
)
from tests.amd.simulator.case import KernelCase, own_encoding
from tests.amd.simulator.large_pools import LARGE_POOL_BYTES, pool_ending_with

CPU, BF16 = torch.device("cpu"), torch.bfloat16
STEP = Step([70, 1, 35], [2, 1, 1], page_size=16, tail=1)
TOKENS = IndexCase(STEP, Indexing(0.125, 7), 16, 64, dtype=BF16, key_dtype=BF16)
BLOCKS = replace(TOKENS, indexing=Indexing(0.25, 3, sets=4, rectified=False, unit_keys=8, last=1), weighted=False)
POOLS = replace(TOKENS, indexing=Indexing(0.25, 3, key_tokens=4, last_unit=LastUnit.ADDED), scales=Scales.TOKEN)
LEAVING = Indexing(0.125, 5, candidate_blocks=3, block_keys=8)
LATENT = SelectedCase(STEP, (16, 1), (96, 64), latent=True, width=40, dtype=BF16, sinks=True)
MANY_HEADS = replace(LATENT, heads=(40, 1), dims=(304, 256))
RECORDS = SelectedCase(STEP, (16, 1), (304, 256), latent=True, width=40, dtype=BF16, scales=Scales.GROUP, sinks=True)
# DeepSeek-V4's records.
FOOTERS = replace(RECORDS, dims=(512, 512), scales=Scales.FOOTER)
ROWS = SelectedCase(STEP, (16, 1), (64, 64), latent=True, width=70, dense=True, dtype=BF16)
SPLIT = SelectedCase(STEP, (6, 2), (64, 64), sets=2, width=6, unit_tokens=8, dtype=BF16)


def with_large_keys(problem: IndexProblem) -> IndexProblem:
    """Returns the same step with its keys, and their scales, at the end of a pool above 4 GiB."""
    args, (keys, scale) = problem.args, problem.args.pages
    num_pages = LARGE_POOL_BYTES // keys[0].nbytes
    if scale is not None and scale.dim() == 2:
        scale = pool_ending_with(scale, num_pages)
    pages = IndexPages(pool_ending_with(keys, num_pages), scale)
    return replace(problem, args=args._replace(pages=pages, table=args.table + (num_pages - len(keys))))


def with_large_pages(args: SelectedArgs) -> SelectedArgs:
    """Returns the same step with its rows at the end of a pool above 4 GiB."""
    pages = args.pages
    num_pages = LARGE_POOL_BYTES // min(pages.k[0].nbytes, pages.v[0].nbytes)
    if pages.format.kind is PoolKind.LATENT:
        memory = pool_ending_with(pages.lines[0].flatten(1), num_pages)
        moved = LayerPages.latent(memory.view(pages.k.dtype), pages.format)
    else:
        k, v = (pool_ending_with(each, num_pages) for each in (pages.k, pages.v))
        moved = LayerPages(k, v, pages.format)
    return args._replace(pages=moved, table=args.table + (num_pages - len(pages.k)))


def run_choice(arch: str, case: IndexCase, *, is_coded: bool, is_large: bool = False) -> None:
    """Runs scores and top-k of a step. is_coded: true if keys are codes, and so is q if keys have no scales"""
    if is_coded:
        dtype = own_encoding(arch).dtype
        case = replace(case, key_dtype=dtype, dtype=dtype if case.scales is Scales.NONE else case.dtype)
    problem = build_index(case, CPU)
    run_select(arch, with_large_keys(problem) if is_large else problem, programs=3)
    problem.assert_selected()


def run_candidates(arch: str) -> None:
    """Runs a choice of blocks, and a choice by other queries among them."""
    both = TwoChoices.build(replace(TOKENS, indexing=LEAVING), CPU)
    for problem in (both.of_blocks, both.later):
        run_select(arch, problem, programs=3)
    both.assert_chosen()


def run_long_lines() -> None:
    """Runs lines that are cut down before the search, with random and with equal scores, and a check of the result."""
    indexing, num_units = Indexing(1.0, 5), 200
    scores = torch.randn(2, 1, num_units, generator=torch.Generator().manual_seed(0))
    scores[1] = 0.5
    cut = top_k_cut(num_units, indexing, longest_part=64)
    position = torch.full((2,), num_units - 1, dtype=torch.int32)
    tokens = SparseTokens(position, position, torch.tensor([2], dtype=torch.int32), 1, num_units)
    selection = empty_selection(2, indexing, CPU)
    scratch = torch.empty(2 * cut.line_words, dtype=torch.int32)
    faults = torch.zeros(2, dtype=torch.int32)
    launch_top_k(scores, scratch, tokens, selection, indexing=indexing, cut=cut)
    launch_check_selection(selection, tokens, faults[:1])
    launch_check_selection(SelectedKeys(selection.units + num_units, selection.counts, 1), tokens, faults[1:])
    assert_units(selection, [[best_units(line, num_units, indexing)] for line in scores[:, 0].tolist()])
    assert faults.bool().tolist() == [False, True]


def _placed(problem: SelectedProblem, *, is_large: bool) -> SelectedProblem:
    return replace(problem, args=with_large_pages(problem.args)) if is_large else problem


def run_attended(arch: str, case: SelectedCase, *, is_coded: bool, is_large: bool = False) -> None:
    """Runs attention over a selection in several parts. is_coded: true if pages are codes, with scales of tokens"""
    if is_coded:
        case = replace(case, encoding=own_encoding(arch), scales=Scales.TOKEN)
    problem = build_selected(case, CPU)
    run_attention(arch, _placed(problem, is_large=is_large), 60, least_parts=2)


def run_records(arch: str, case: SelectedCase, encoding: Encoding, *, is_large: bool = False) -> None:
    """Runs attention to records, over selections in several parts, then to the last 50 tokens that each sees."""
    problem = build_selected(replace(case, encoding=encoding), CPU)
    dense = build_selected(replace(case, encoding=encoding, dense=True, width=50), CPU)
    everything = replace(dense, args=dense.args._replace(selection=LastTokens(50)))
    for each in (_placed(problem, is_large=is_large), everything):
        run_attention(arch, each, 60, least_parts=2)


def run_rows(arch: str) -> None:
    """Runs folds of rows of 4 tokens that overlap, and of 3 from bfloat16, then attention in both modes."""
    dense, exact = build_selected(ROWS, CPU), build_selected(ROWS, CPU)
    given = dense.args._replace(selection=LastTokens(dense.args.tokens.max_kv_len))
    exact_tiles, by_pairs = selected_segment_tiles(arch, dims=(64, 64), dtype=BF16, codes=CodeKind.NONE, is_latent=True)
    words = segment_cut(given.selection.width, heads=given.heads, tiles=exact_tiles).words(len(given.q), 64)
    segments = exact.args._replace(selection=given.selection, workspace=torch.full((words,), float("nan")))
    folds = [
        folded_by(launch_fold_rows, row, 150, [4, 9, 12, 3], [4, 3, 8, 1], page_size, CPU)
        for row, page_size in ((Row(4, overlaps=True), 8), (Row(3, state_dtype=torch.bfloat16), 6))
    ]
    run_attention(arch, replace(dense, args=given), 60, least_parts=2)
    launch_selected_segments(segments, scale=exact.scale, tiles=exact_tiles, by_pairs=by_pairs)
    for found, wanted in folds:
        assert_folded(found, wanted)
    exact.assert_served()


def sparse_cases(arch: str) -> list[KernelCase]:
    """Every kernel of sparse attention, over codes and above 4 GiB."""
    runs: dict[str, Callable[[], None]] = {
        "coded_tokens": partial(run_choice, arch, TOKENS, is_coded=True),
        "candidates": partial(run_candidates, arch),
        "long_lines": run_long_lines,
        "coded_latent": partial(run_attended, arch, LATENT, is_coded=True),
        "footers": partial(run_records, arch, FOOTERS, own_encoding(arch)),
        "rows": partial(run_rows, arch),
        "tokens-above": partial(run_choice, arch, TOKENS, is_coded=False, is_large=True),
        "latent-above": partial(run_attended, arch, LATENT, is_coded=False, is_large=True),
        "split": partial(run_attended, arch, SPLIT, is_coded=False),
    }
    return [KernelCase(f"sparse-{name}", arch, run) for name, run in runs.items()]


def more_sparse_cases(arch: str) -> list[KernelCase]:
    """The other granularities, and pages without codes and above 4 GiB."""
    runs = {
        "tokens": partial(run_choice, arch, TOKENS, is_coded=False),
        "blocks": partial(run_choice, arch, BLOCKS, is_coded=False),
        "coded_pools": partial(run_choice, arch, POOLS, is_coded=True),
        "coded_pools-above": partial(run_choice, arch, POOLS, is_coded=True, is_large=True),
        "latent": partial(run_attended, arch, LATENT, is_coded=False),
        "latent_of_40_heads": partial(run_attended, arch, MANY_HEADS, is_coded=False),
        "coded_latent_of_40_heads": partial(run_attended, arch, MANY_HEADS, is_coded=True),
        "records": partial(run_records, arch, RECORDS, own_encoding(arch)),
        "records-above": partial(run_records, arch, RECORDS, Encoding.E4M3FN, is_large=True),
        "footers-above": partial(run_records, arch, FOOTERS, Encoding.E4M3FN, is_large=True),
        "coded_split": partial(run_attended, arch, SPLIT, is_coded=True),
        "split-above": partial(run_attended, arch, SPLIT, is_coded=False, is_large=True),
    }
    return [KernelCase(f"sparse-{name}", arch, run) for name, run in runs.items()]
