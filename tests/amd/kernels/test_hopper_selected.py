"""Attention over a selection of latents for Hopper against a float64 reference, with NaN in all that may not be read.

It needs that GPU.
"""

from dataclasses import replace

import pytest
import torch

from rocm_attn.kernels.cache.page_format import Encoding, Scales
from rocm_attn.kernels.refs.sparse import selected_attention
from rocm_attn.kernels.sparse.arguments import LastTokens
from rocm_attn.kernels.sparse.cuts import selected_cut
from rocm_attn.kernels.tuning.sparse_tiles import HOPPER_RECORD_TILES, HOPPER_SELECTED_TILES
from rocm_attn.providers.triton_later import hopper_launches
from tests.amd.kernels.gpus import OF_HOPPERS_KERNELS
from tests.amd.kernels.sparse_cases import UNTOUCHED, SelectedCase, SelectedProblem, Step, build_selected

pytestmark = OF_HOPPERS_KERNELS

# A sequence that sees one token, blocks that are full and begun, several tokens, and a pad.
STEP = Step([150, 1, 97], [3, 1, 2], tail=1)
LATENTS = SelectedCase(STEP, heads=(128, 1), dims=(576, 512), latent=True, width=140, dtype=torch.bfloat16)
RECORDS = replace(
    LATENTS, step=Step([90, 1, 70], [2, 1, 1], tail=1), width=80, encoding=Encoding.E4M3FN, scales=Scales.GROUP
)
# One program for each block of heads walks all tokens, or several programs have parts of each.
PROGRAMS = (1, 132)


def attended(problem: SelectedProblem, programs: int) -> None:
    """Runs the kernel with scratch memory of NaN, and checks all that it writes."""
    args, case = problem.args, problem.case
    tiles = HOPPER_SELECTED_TILES if args.pages.record is None else HOPPER_RECORD_TILES
    keys = case.width * case.unit_tokens
    cut = selected_cut(len(args.q), keys, heads=args.heads, tiles=tiles.selected, programs=programs)
    words = cut.words(len(args.q), case.dims[1])
    args.out.fill_(UNTOUCHED)
    args = args._replace(workspace=torch.full((words,), float("nan"), device=args.q.device))
    hopper_launches.launch_hopper_selected(args, scale=problem.scale, tiles=tiles, programs=programs)
    problem.assert_served()


def served(case: SelectedCase, device: torch.device) -> None:
    problem = build_selected(case, device)
    for programs in PROGRAMS:
        attended(problem, programs)


@pytest.mark.parametrize(
    ("heads", "page_size", "dtype"),
    [
        (128, 16, torch.bfloat16),
        (100, 1, torch.float16),
        (64, 64, torch.bfloat16),
        (16, 3, torch.float16),
        (5, 48, torch.bfloat16),
    ],
    ids=str,
)
def test_latents_equal_the_reference(heads: int, page_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Heads fill two programs, one, and none; entries are in any order, some twice, and some are no keys."""
    served(replace(LATENTS, heads=(heads, 1), step=replace(STEP, page_size=page_size), dtype=dtype), device)


@pytest.mark.parametrize(("heads", "page_size"), [(128, 16), (100, 1), (16, 64)])
def test_records_equal_the_reference(heads: int, page_size: int, device: torch.device) -> None:
    served(replace(RECORDS, heads=(heads, 1), step=replace(RECORDS.step, page_size=page_size)), device)


@pytest.mark.parametrize("case", [LATENTS, RECORDS], ids=["latents", "records"])
def test_units_of_several_tokens_are_seen_up_to_the_token(case: SelectedCase, device: torch.device) -> None:
    served(replace(case, unit_tokens=4, width=20), device)


@pytest.mark.parametrize("case", [LATENTS, RECORDS], ids=["latents", "records"])
def test_without_a_selection_tokens_see_the_last_ones(case: SelectedCase, device: torch.device) -> None:
    """Rows that are read are those of a selection of everything, and so are results."""
    problem = build_selected(replace(case, dense=True, width=75), device)
    args = problem.args._replace(selection=LastTokens(75))
    for programs in PROGRAMS:
        attended(replace(problem, args=args), programs)


def test_many_tokens_are_walked_by_few_programs(device: torch.device) -> None:
    """Places in shared memory and barriers go on from a token to the next one, whose selection may be empty."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(0, 200, (150,), generator=generator).tolist()
    step = Step(lengths, [min(length, 1) for length in lengths], page_size=16)
    for case in (LATENTS, RECORDS):
        problem = build_selected(replace(case, step=step, heads=(64, 1)), device)
        counts = problem.args.selection.counts
        assert counts is not None
        counts[::7] = 0
        args = problem.args
        selected_attention(args, scale=problem.scale)
        expected = args.out.clone()
        workspace = torch.empty(0, device=device)
        tiles = HOPPER_SELECTED_TILES if args.pages.record is None else HOPPER_RECORD_TILES
        for programs in (3, 132):
            args.out.fill_(UNTOUCHED)
            given = args._replace(workspace=workspace)
            hopper_launches.launch_hopper_selected(given, scale=problem.scale, tiles=tiles, programs=programs)
            torch.testing.assert_close(args.out, expected, rtol=0.02, atol=0.02)
            assert not args.out[::7].any()
