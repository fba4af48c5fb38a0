"""Checks of the kernels of sparse attention, as those of checks.py."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.page_format import Encoding, Scales
from rocm_attn.kernels.sparse.arguments import NO_UNIT, NOT_ASCENDING, Indexing, IndexPages, SelectedKeys, SparseTokens
from rocm_attn.kernels.sparse.attention import launch_selected_attention
from rocm_attn.kernels.sparse.candidates import launch_leave_out
from rocm_attn.kernels.sparse.check import launch_check_selection
from rocm_attn.kernels.sparse.cuts import selected_cut, top_k_cut
from rocm_attn.kernels.sparse.index_scores import launch_index_scores
from rocm_attn.kernels.sparse.top_k import launch_top_k
from rocm_attn.kernels.tuning.latent_tiles import SelectedTiles
from rocm_attn.kernels.tuning.sparse_tiles import IndexTiles
from tests.amd.kernels.sparse_cases import (
    IndexCase,
    IndexProblem,
    SelectedCase,
    SelectedProblem,
    Step,
    assert_units,
    best_units,
    build_index,
    build_selected,
    empty_selection,
)
from tests.amd.mutation.arguments import placed
from tests.amd.mutation.memory import Memory

CPU = torch.device("cpu")
GARBAGE = 0x7FFFFFF0
STEP = Step([21, 1, 7], [3, 1, 2], page_size=4, tail=1)
# Tokens of several sequences share a block of columns, and the last block is not full.
INDEX_TILES = IndexTiles(key_block=16, columns=64, num_warps=1, num_stages=1, programs_per_cu=1)
SELECTED_TILES = SelectedTiles(query_rows=16, key_block=16, num_warps=1, num_stages=1, programs_per_cu=1)


def index_scores(memory: Memory) -> None:
    """Checks odd numbers of heads, of sets and of elements; a score for each candidate, and nothing else is written."""
    for indexing, heads in (
        (Indexing(0.25, 3), 3),
        (Indexing(0.25, 3, sets=3, unit_keys=4, rectified=False), 3),
    ):
        problem = placed_index(memory, build_index(IndexCase(STEP, indexing, heads, 24, scales=Scales.TOKEN), CPU))
        args = problem.args
        max_units = indexing.max_units(args.tokens.max_kv_len)
        scores = memory.put(torch.full((len(args.q), indexing.sets, max_units), float("nan")))
        launch_index_scores(args, scores, indexing=indexing, tiles=INDEX_TILES, programs=3)
        for token, expected in enumerate(problem.scores):
            found = scores[token, :, : expected.shape[1]]
            assert torch.equal(found.double(), expected), f"token {token}: {found.tolist()}"
            assert scores[token, :, expected.shape[1] :].isnan().all(), "a score of no candidate was written"


def placed_index(memory: Memory, problem: IndexProblem) -> IndexProblem:
    """The problem in memory, with a table that leads out of the pages after a sequence's end."""
    args = problem.args
    assert args.pages.scale is not None
    # The last page belongs to no sequence, and so do table entries that must not be read.
    pages = IndexPages(args.pages.keys[:-1].contiguous(), args.pages.scale[:-1].contiguous())
    tokens = in_the_sixth_place(args.tokens)
    return replace(problem, args=placed(memory, args._replace(pages=pages, tokens=tokens)))


def in_the_sixth_place(tokens: SparseTokens) -> SparseTokens:
    """Tokens, those of no sequence in a place all the same."""
    position = tokens.position_of_token.clone()
    position[int(tokens.num_tokens) :] = 5
    return tokens._replace(position_of_token=position)


def top_k(memory: Memory) -> None:
    """Lines of one part and of three, of nothing, of fewer units than are wanted; random scores, and equal ones."""
    generator = torch.Generator().manual_seed(0)
    for positions, longest_part in (([33, 0, 12, 38], 16), ([33, 0, 12, 38], 64)):
        for equal in (False, True):
            given = torch.randn(4, 1, 40, generator=generator)
            given = torch.zeros_like(given) if equal else given
            indexing = Indexing(1.0, 5)
            cut = top_k_cut(40, indexing, longest_part=longest_part)
            one = torch.tensor([3], dtype=torch.int32)
            numbers = torch.tensor(positions, dtype=torch.int32)
            tokens = placed(memory, in_the_sixth_place(SparseTokens(numbers, numbers, one, 1, 40)))
            selection = placed(memory, empty_selection(4, indexing, CPU))
            scratch = placed_scratch(memory, 4 * (cut.line_words - cut.stride)).view(torch.int32)
            launch_top_k(memory.put(given), scratch, tokens, selection, indexing=indexing, cut=cut)
            lines, seen = given.tolist(), [position + 1 for position in positions[:3]]
            assert_units(
                selection,
                [[best_units(lines[token][0], visible, indexing)] for token, visible in enumerate(seen)],
            )


def candidates(memory: Memory) -> None:
    """Lines of 33, 1 and 39 units; three blocks of four units are left of each, or as many as it has."""
    indexing = Indexing(1.0, 5, candidate_blocks=3, block_keys=4)
    left = [[1, 4, 8], [0], [0, 2, 9]]
    units = torch.tensor([[each + [NO_UNIT] * (3 - len(each))] for each in [*left, []]], dtype=torch.int32)
    counts = torch.tensor([[len(each)] for each in [*left, []]], dtype=torch.int32)
    position = torch.tensor([32, 0, 38, 0], dtype=torch.int32)
    three = torch.tensor([3], dtype=torch.int32)
    tokens = placed(memory, in_the_sixth_place(SparseTokens(position, position, three, 1, 40)))
    among = placed(memory, SelectedKeys(units, counts, 4))
    scores = memory.put(torch.zeros(4, 1, 40))
    launch_leave_out(scores, tokens, among, indexing=indexing)
    for line, (blocks, seen) in enumerate(zip([*left, []], [33, 1, 39, 0], strict=True)):
        for unit, score in enumerate(scores[line, 0].tolist()):
            assert math.isnan(score) == (unit < seen and unit // 4 not in blocks)


def placed_scratch(memory: Memory, words: int) -> Tensor:
    """Words that nothing was written to: a large number, and as float32 NaN."""
    return memory.put(torch.full((words,), GARBAGE, dtype=torch.int32).view(torch.float32)) if words else torch.empty(0)


def selected_attention(memory: Memory) -> None:
    """Three query heads on a KV head, odd dims, gaps between rows; one part, and several that are merged."""
    for case in (
        SelectedCase(STEP, heads=(6, 2), dims=(24, 40), sets=2, width=7, unit_tokens=3, sinks=True),
        SelectedCase(STEP, heads=(3, 1), dims=(40, 24), width=9, latent=True, sinks=True),
        SelectedCase(STEP, heads=(6, 2), dims=(24, 40), width=40, sinks=True),
        SelectedCase(
            STEP,
            heads=(3, 1),
            dims=(396, 384),
            width=9,
            latent=True,
            encoding=Encoding.E4M3FN,
            scales=Scales.GROUP,
            sinks=True,
        ),
        # With a dense selection the last row of the memory is read.
        *(
            SelectedCase(
                Step([21, 1, 7, 8], [3, 1, 2, 1], page_size=4, tail=1),
                heads=(3, 1),
                dims=(192, 192),
                width=21,
                latent=True,
                encoding=Encoding.E4M3FN,
                scales=Scales.FOOTER,
                sinks=True,
                dense=dense,
            )
            for dense in (False, True)
        ),
    ):
        for programs in (1, 100):
            problem = placed_selected(memory, build_selected(case, CPU))
            args = problem.args
            cut = selected_cut(
                len(args.q), case.width * case.unit_tokens, heads=args.heads, tiles=SELECTED_TILES, programs=programs
            )
            workspace = placed_scratch(memory, cut.words(len(args.q), case.dims[1]))
            launch_selected_attention(
                args._replace(workspace=workspace), scale=problem.scale, tiles=SELECTED_TILES, programs=programs
            )
            problem.assert_served()


def placed_selected(memory: Memory, problem: SelectedProblem) -> SelectedProblem:
    """The problem in memory; out and LSE have gaps between rows."""
    args, pages = problem.args, problem.args.pages
    assert args.lse is not None
    # The last page has no room after its rows and footer.
    if problem.case.latent:
        pages = LayerPages.latent(pages.lines[0][:-1].flatten(1).contiguous().view(pages.k.dtype), pages.format)
    else:
        pages = LayerPages(pages.k[:-1].contiguous(), pages.v[:-1].contiguous(), pages.format)
    out = torch.zeros(*args.out.shape[:2], args.out.shape[2] + 3)[..., : args.out.shape[2]]
    lse = torch.zeros(args.lse.shape[1] + 2, args.lse.shape[0]).t()[:, : args.lse.shape[1]]
    tokens = in_the_sixth_place(args.tokens)
    return replace(problem, args=placed(memory, args._replace(pages=pages, tokens=tokens, out=out, lse=lse)))


def check_selection(memory: Memory) -> None:
    """Five entries of two lines; then one of them twice."""
    right = [0, 1, 2, 3, 4]
    for last, fault in ((right, 0), ([0, 1, 2, 3, 3], NOT_ASCENDING)):
        units = [[right], [last]]
        counts = torch.full((2, 1), 5, dtype=torch.int32)
        selection = placed(memory, SelectedKeys(torch.tensor(units, dtype=torch.int32), counts, 2))
        position, two = torch.tensor([9, 9], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
        faults = memory.put(torch.zeros(1, dtype=torch.int32))
        tokens = placed(memory, in_the_sixth_place(SparseTokens(position, position, two, 1, 10)))
        launch_check_selection(selection, tokens, faults)
        assert faults.tolist() == [fault]
