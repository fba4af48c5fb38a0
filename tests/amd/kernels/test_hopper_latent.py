"""Decode and selections over latent pages for Hopper against float64, with NaN in everything that may not be read.

It needs that GPU.
"""

from dataclasses import replace

import pytest
import torch

from rocm_attn.kernels.attention.decode_schedule import launch_decode_schedule
from rocm_attn.kernels.attention.scores import LOG2_E
from rocm_attn.kernels.attention.softmax import SLACK
from rocm_attn.kernels.cache.page_format import Encoding, Scales
from rocm_attn.kernels.latent.limits import ANY_TOKENS
from rocm_attn.kernels.refs.sparse import selected_attention
from rocm_attn.kernels.sparse.arguments import LastTokens
from rocm_attn.kernels.tuning.latent_tiles import HOPPER_LATENT_TILES
from rocm_attn.kernels.tuning.sparse_tiles import HOPPER_RECORD_TILES, HOPPER_SELECTED_TILES
from rocm_attn.problem import UNLIMITED_WINDOW
from rocm_attn.providers.triton_later import hopper_launches
from tests.amd.kernels.attention_cases import UNTOUCHED, Case, Tensors, assert_serves, build
from tests.amd.kernels.gpus import OF_HOPPERS_KERNELS
from tests.amd.kernels.latent_cases import latent_decode_args
from tests.amd.kernels.sparse_cases import SelectedCase, SelectedProblem, Step, build_selected, with_parts
from tests.amd.tolerances import assert_attention_close

pytestmark = OF_HOPPERS_KERNELS

# Blocks of 64 keys: none, one key, a block and one key more or less, many.
KV_LEN = [33, 0, 1, 64, 700, 129, 65, 63]
DECODES = Case(
    kv_len=KV_LEN, q_len=[1] * len(KV_LEN), heads=(128, 1), dims=(576, 512), latent=True, dtype=torch.bfloat16
)
# One to eight new tokens, none, and a sequence without keys.
DRAFTS = replace(DECODES, kv_len=[40, 9, 700, 5, 33, 120, 0, 66], q_len=[3, 1, 8, 2, 0, 5, 0, 4])
# One row per program, several rows, and many programs per row.
UNITS = (5, 40, 132)


def run_hopper_latent(tensors: Tensors, *, compute_units: int, most: int = 1, launches: int = 1) -> None:
    """Runs schedule, decode and merge, with scratch memory of NaN or garbage. launches: over one schedule"""
    tiles = HOPPER_LATENT_TILES
    args, cut = latent_decode_args(tensors, tiles.latent, compute_units=compute_units, most=most)
    launch_decode_schedule(tensors.queries, args.schedule, cut)
    for _ in range(launches):
        tensors.out.fill_(UNTOUCHED)
        hopper_launches.launch_hopper_latent_decode(args, scores=tensors.scores, cut=cut, tiles=tiles)


def assert_right(case: Case, device: torch.device, *, most: int = 1) -> None:
    """Checks the case with each number of programs."""
    for units in UNITS:
        assert_serves(run_hopper_latent, case, device, compute_units=units, most=most)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "page_size"), [(128, 64), (128, 1), (100, 16), (64, 128), (40, 3), (17, 5), (8, 48)])
def test_decode_equals_the_reference(heads: int, page_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Pages hold a block of keys, parts of one, and neither; heads fill two programs, one, and none."""
    assert_right(replace(DECODES, heads=(heads, 1), page_size=page_size, dtype=dtype), device)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "to_all"])
@pytest.mark.parametrize("heads", [128, 64, 33, 16, 8, 5])
def test_a_few_new_tokens_see_the_keys_before_them(heads: int, causal: bool, device: torch.device) -> None:
    """With few heads several tokens share a program, and each sees other keys."""
    case = replace(DRAFTS, heads=(heads, 1), window_right=0 if causal else UNLIMITED_WINDOW, page_size=16)
    assert_right(case, device, most=ANY_TOKENS)


@pytest.mark.parametrize(("heads", "page_size"), [(128, 64), (40, 16), (16, 1), (5, 32)])
def test_prompts_and_chunks_see_the_keys_before_them(heads: int, page_size: int, device: torch.device) -> None:
    """A prompt's first rows see few of the keys that its cost counts, and single tokens are in the same step."""
    case = replace(DECODES, kv_len=[70, 400, 40, 1, 200, 0], q_len=[70, 20, 1, 1, 9, 0])
    assert_right(replace(case, heads=(heads, 1), page_size=page_size), device, most=ANY_TOKENS)


def test_one_long_sequence_is_shared_by_all_programs(device: torch.device) -> None:
    assert_right(replace(DECODES, kv_len=[9000], q_len=[1], page_size=64), device)


def test_a_second_launch_over_a_schedule_gives_the_same_bits(device: torch.device) -> None:
    """A launch changes nothing in the schedule, and the next one reads nothing that it left in the workspace."""
    first, second = build(DRAFTS, device), build(DRAFTS, device)
    run_hopper_latent(first, compute_units=20, most=ANY_TOKENS)
    run_hopper_latent(second, compute_units=20, most=ANY_TOKENS, launches=3)
    assert torch.equal(first.out, second.out)


def test_keys_that_outweigh_those_before_them_scale_what_was_added(device: torch.device) -> None:
    """Maxima are rarely raised: here each block's maximum is much larger than the previous one's."""
    blocks, v_dim = 6, DECODES.dims[1]
    tensors = build(replace(DECODES, kv_len=[64 * blocks], q_len=[1], page_size=64), device)
    pages = tensors.table[int(tensors.row_of_seq[0]), :blocks].long()
    for block in range(blocks):
        # The part of K that is not V.
        tensors.k_pages[int(pages[block]), ..., v_dim:] *= 1 + 16 * block
    run_hopper_latent(tensors, compute_units=2)
    keys = tensors.k_pages[pages].double().flatten(0, 2)
    logits = tensors.q[0].double() @ keys.T * (tensors.scores.base_2_scale / LOG2_E)
    maxima = logits.view(-1, blocks, 64).amax(2)
    assert bool((maxima.diff(dim=1) * LOG2_E > SLACK.value).any(0).all()), "no row's maximum is raised"
    assert_attention_close(tensors.out[0], logits.softmax(-1) @ keys[:, :v_dim], tensors.case.dtype)


def test_results_stay_within_the_tokens_that_the_cut_serves(device: torch.device) -> None:
    """Tokens of sequences with more new tokens, and the padded tail, belong to other launches."""
    case = replace(DRAFTS, q_len=[3, 1, 9, 2, 0, 5, 0, 4], kv_len=[40, 9, 700, 5, 33, 120, 0, 66], tail=3)
    tensors = build(case, device)
    run_hopper_latent(tensors, compute_units=20, most=8)
    first = int(tensors.queries.q_indptr[2])
    assert bool((tensors.out[first : first + 9] == UNTOUCHED).all())
    assert bool((tensors.out[int(tensors.queries.q_indptr[-1]) :] == UNTOUCHED).all())


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
    tiles = HOPPER_SELECTED_TILES if problem.args.pages.record is None else HOPPER_RECORD_TILES
    problem.args.out.fill_(UNTOUCHED)
    args = with_parts(problem.args, tiles.latent, programs)
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
