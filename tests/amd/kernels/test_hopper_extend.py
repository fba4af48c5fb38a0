"""Extend for Hopper against a float64 reference, over pages of every kind, with NaN in everything that may not be read.

It needs that GPU.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from triton import JITFunction

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.kernels.attention.cuts import SHARE_WORDS, RowSharing
from rocm_attn.kernels.attention.extend_schedule import SHARE_CUT, launch_extend_schedule
from rocm_attn.kernels.cache.page_format import Encoding, Scales
from rocm_attn.kernels.tuning.hopper_tiles import DIMS, HEAD_DIMS, hopper_segment_tiles, hopper_tiles
from rocm_attn.machine.target import detect_target
from rocm_attn.problem import UNLIMITED_WINDOW
from rocm_attn.providers.select import select
from rocm_attn.providers.triton_hopper import LIMITS, MIN_HEAD_DIM
from rocm_attn.providers.triton_later import hopper_launches
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.options import RuntimeOptions
from tests.amd.kernels.attention_cases import (
    ALL_SHARED,
    UNTOUCHED,
    Case,
    Tensors,
    assert_served,
    build,
    extend_cut,
    garbage,
    run_decode,
    run_extend_twin,
)
from tests.amd.kernels.gpus import OF_HOPPERS_KERNELS
from tests.amd.kernels.hopper_cases import (
    CODINGS,
    NONE_SHARED,
    RAGGED,
    RANGES,
    run_hopper,
    seventh_by_day,
    with_each_loop,
)
from tests.amd.runtime.token_stories import Story, Teller
from tests.amd.schedule_twins import extend_schedule
from tests.amd.tolerances import assert_attention_close
from tests.amd.worlds.problems import small_problem

pytestmark = OF_HOPPERS_KERNELS

of_dims = pytest.mark.parametrize("dims", DIMS, ids=str)


# Every page size of codes, then pages without boxes of eight keys, and a size that does not divide a tile.
CODED_FORMS: list[dict[str, Any]] = [
    {"page_size": 8, "heads": (6, 2), "dtype": torch.float16},
    {"page_size": 16, "heads": (8, 2)},
    {"page_size": 32, "heads": (2, 2)},
    {"page_size": 64, "heads": (16, 1), "dtype": torch.float16},
    {"page_size": 128, "heads": (5, 1)},
]
FORMS = [
    *CODED_FORMS,
    {"page_size": 1, "heads": (6, 2), "dtype": torch.float16},
    {"page_size": 2, "heads": (8, 2)},
    {"page_size": 4, "heads": (2, 2)},
    {"page_size": 12, "heads": (16, 1)},
    {"page_size": 48, "heads": (5, 1), "dtype": torch.float16},
]
SCORES: list[dict[str, Any]] = [
    {"window_left": 0, "page_size": 128},
    {"window_left": 5},
    {"window_left": 100},
    {"window_left": 5000, "page_size": 64},
    {"sinks": True},
    {"sinks": True, "window_left": 63, "page_size": 128},
    {"window_right": UNLIMITED_WINDOW},
    {"window_right": UNLIMITED_WINDOW, "sinks": True, "page_size": 128},
]
AROUND = [edge + more for edge in (8, 16, 64, 128, 192) for more in (-1, 0, 1)]
AROUND_TILES = [(length, new) for length in AROUND for new in (1, 7, 8, 9, length) if new <= length]
LENGTHS = {"kv_len": [length for length, _ in AROUND_TILES], "q_len": [new for _, new in AROUND_TILES]}
# Memory after a row of these heads, of another head or of none, is NaN if no token sees it.
PADDED_DIMS = [
    *((dim, dim) for dim in (MIN_HEAD_DIM, 72, 80, 112, 144, 200, 224)),
    (96, 64),
    (80, 128),
    (256, 144),
    (128, 40),
]
PADDED: list[dict[str, Any]] = [
    {"page_size": 16},
    {"page_size": 2, "heads": (6, 2), "window_left": 100},
    {"page_size": 1, "sinks": True, "soft_cap": 30.0, "window_right": UNLIMITED_WINDOW},
    {"page_size": 64, "dtype": torch.float16, "window_left": 5000},
]
CAPS: list[dict[str, Any]] = [
    {"soft_cap": 1.5},
    {"soft_cap": 30.0, "page_size": 64},
    {"soft_cap": 30.0, "dtype": torch.float16},
    {"soft_cap": 60.0, "sinks": True, "window_left": 100},
    {"soft_cap": 61.0, "sinks": True},
    {"soft_cap": 50.0, "window_right": UNLIMITED_WINDOW},
    {"soft_cap": 50.0, "kv": Encoding.E4M3FN, "scales": Scales.HEAD},
    {"soft_cap": 50.0, "kv": Encoding.E5M2, "scales": Scales.TOKEN, "dtype": torch.float16},
]
FEW_HEADS = {"kv_len": [90, 1, 33], "q_len": [5, 1, 3]}
CODED_DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (64, 128), (256, 256), (80, 48), (16, 16)]
coded_dims = pytest.mark.parametrize("dims", CODED_DIMS, ids=str)
CASES: list[dict[str, Any]] = [
    *({"dims": dims, **more} for dims in DIMS for more in (*FORMS, *SCORES)),
    *({"dims": dims, "page_size": page_size, **LENGTHS} for dims in DIMS for page_size in (1, 4, 8, 64)),
    *({"dims": dims, **more} for dims in PADDED_DIMS for more in PADDED),
    *({"dims": (dim, dim), **more} for dim in HEAD_DIMS for more in CAPS),
    *(
        {"dims": (dim, dim), "heads": heads, **FEW_HEADS}
        for heads, dim in (((1, 1), 64), ((3, 1), 128), ((40, 1), 128), ((65, 1), 64), ((128, 1), 192))
    ),
    *(
        {"dims": dims, "kv": kv, "scales": scales, **more}
        for dims in CODED_DIMS
        for kv, scales in CODINGS
        for more in (*CODED_FORMS, *(SCORES[at] for at in (2, 5, 6)))
    ),
]


@seventh_by_day("more", [(case,) for case in CASES])
def test_extend_equals_the_reference(more: dict[str, Any], device: torch.device) -> None:
    """This includes the padded tail: output 0 and LSE -inf; and NaN in codes and scales that no token sees."""
    case = replace(RAGGED, **more)
    own = hopper_tiles(*case.dims, case.page_size, coded=case.kv is not None)
    for sharing, tiles in product((ALL_SHARED, NONE_SHARED), with_each_loop(own, case)):
        tensors = build(case, device)
        run_hopper(tensors, sharing, tiles=tiles)
        assert_served(tensors)


# Spans at the borders of a step, within it, next to each other and across query blocks; pages of few keys, gathered.
SPANS: dict[str, Any] = {
    "kv_len": [260, 0, 40, 333, 1, 130, 12, 900],
    "q_len": [41, 0, 40, 2, 1, 1, 0, 533],
    "spans": ((0, 219, 250), (2, 0, 40), (3, 331, 333), (7, 370, 400), (7, 400, 401), (7, 401, 720)),
}
CODED_RANGES: list[dict[str, Any]] = [
    {"kv": Encoding.E4M3FN, "scales": Scales.HEAD},
    {"kv": Encoding.E5M2, "scales": Scales.TOKEN, "chunk": 128, "window_left": 127},
]


@seventh_by_day("more", [({**SPANS, "dims": dims, **more},) for dims in DIMS for more in (*RANGES, *CODED_RANGES)])
def test_tokens_that_each_see_a_range_equal_the_reference(more: dict[str, Any], device: torch.device) -> None:
    case = replace(RAGGED, **more)
    own = hopper_tiles(*case.dims, case.page_size, coded=case.kv is not None)
    for sharing, tiles in product((ALL_SHARED, NONE_SHARED), with_each_loop(own, case)):
        tensors = build(case, device)
        run_hopper(tensors, sharing, tiles=tiles)
        assert_served(tensors)


def test_every_page_size_of_codes_has_a_form() -> None:
    assert tuple(form["page_size"] for form in CODED_FORMS) == LIMITS.coded_page_sizes
    assert {replace(RAGGED, **form).dtype for form in CODED_FORMS} == set(LIMITS.dtypes)


@pytest.mark.parametrize("value", [float("inf"), float("nan")], ids=str)
@pytest.mark.parametrize("page_size", [2, 16])
@pytest.mark.parametrize("dim", [72, 80, 96, 128, 144, 160, 224])
def test_neighbouring_heads_of_infinities_change_nothing(
    dim: int, page_size: int, value: float, device: torch.device
) -> None:
    """Columns of K after a head are zeros, or not read: zeros of q times the next head's values would make NaN.

    After the last head of a token comes the first one of the next. Values of V read after a head are never stored.
    """
    case = replace(RAGGED, dims=(dim, dim), heads=(8, 2), page_size=page_size)
    for head, neighbour in ((0, 1), (1, 0)):
        tensors = build(case, device)
        run_hopper(tensors, NONE_SHARED)
        assert_served(tensors)
        wanted = tensors.out.clone()
        for side in (tensors.k_pages, tensors.v_pages):
            side[:, :, neighbour].fill_(value)
        tensors.out.fill_(UNTOUCHED)
        run_hopper(tensors, NONE_SHARED)
        own = slice(4 * head, 4 * head + 4)
        assert torch.equal(tensors.out[:, own], wanted[:, own])


def plant(tensors: Tensors, keys: Tensor, numbers: Tensor) -> None:
    """Sets the first elements of keys of the only sequence, in every head."""
    size = tensors.case.page_size
    pages = tensors.table[tensors.row_of_seq[0].long(), keys // size].long()
    tensors.k_pages[pages, keys % size, :, 0] = numbers[:, None].to(tensors.k_pages.dtype)


@of_dims
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rise", [4.0, 7.5, 8.5, 60.0])
def test_maxima_that_rise_by_less_and_by_more_than_the_slack_are_right(
    rise: float, dtype: torch.dtype, dims: tuple[int, int], device: torch.device
) -> None:
    """In each step of 128 keys, some heads' scores rise by `rise` powers of two, and those of others fall.

    In float16 weights of 2 ** 16 and more would be infinite.
    """
    case = Case([1300], [130], heads=(8, 2), dims=dims, dtype=dtype)
    for sharing in (ALL_SHARED, NONE_SHARED):
        tensors = build(case, device)
        keys = torch.arange(1300, device=device)
        plant(tensors, keys, keys // 128 * (rise / 8))
        tensors.q[..., 0] = 8 / (tensors.scores.base_2_scale * torch.tensor([1, -1], device=device).repeat(4))
        run_hopper(tensors, sharing)
        found, lse = tensors.out.clone(), tensors.lse.clone()
        run_extend_twin(tensors)
        assert_attention_close(found, tensors.out.double(), tensors.case.dtype)
        torch.testing.assert_close(lse, tensors.lse, rtol=1e-4, atol=1e-3)


@of_dims
def test_a_score_of_nan_makes_every_row_nan_that_sees_it(dims: tuple[int, int], device: torch.device) -> None:
    case = Case([900], [130], heads=(8, 2), dims=dims, dtype=torch.bfloat16)
    tensors = build(case, device)
    plant(tensors, torch.tensor([850], device=device), torch.full((1,), float("nan"), device=device))
    run_hopper(tensors, NONE_SHARED)
    of_rows = tensors.out.float().isnan().flatten(1)
    assert of_rows[80:].all()
    assert not of_rows[:80].any()


@of_dims
@pytest.mark.parametrize("cap", [30.0, 60.0, 61.0, 400.0])
def test_scores_at_both_ends_of_a_cap_are_right(cap: float, dims: tuple[int, int], device: torch.device) -> None:
    """One row's scores are all at the lower end, with the smallest exponentials, the other row's at the upper end."""
    case = Case([300, 300], [9, 9], heads=(8, 2), dims=dims, dtype=torch.bfloat16, soft_cap=cap)
    for sharing in (ALL_SHARED, NONE_SHARED):
        tensors = build(case, device)
        tensors.k_pages.fill_(1.0)
        tensors.q[:9], tensors.q[9:] = -1000.0, 1000.0
        run_hopper(tensors, sharing)
        found, lse = tensors.out.clone(), tensors.lse.clone()
        run_extend_twin(tensors)
        assert_attention_close(found, tensors.out.double(), tensors.case.dtype)
        seen = torch.arange(292, 301, device=device).log().repeat(2)[:, None]
        ends = torch.tensor([-cap, cap], device=device).repeat_interleave(9)[:, None]
        torch.testing.assert_close(lse, (seen + ends).expand_as(lse), rtol=1e-4, atol=1e-3)


@of_dims
def test_decode_and_extend_share_a_mixed_step(dims: tuple[int, int], device: torch.device) -> None:
    """Extend leaves single tokens to decode, decode leaves the rest: together they serve everything once."""
    tensors = build(
        replace(RAGGED, kv_len=[40, 20, 17, 0, 50, 33], q_len=[1, 9, 17, 0, 1, 2], tail=0, dims=dims), device
    )
    run_hopper(tensors, ALL_SHARED, min_q_len=2)
    assert (tensors.out[[0, 27]] == UNTOUCHED).all()
    assert (tensors.lse[[0, 27]] == UNTOUCHED).all()
    run_decode(tensors)
    assert_served(tensors)


@pytest.mark.parametrize("dim", [96, 128])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("kv_len", "q_len"), [([], []), ([0, 0], [0, 0]), ([9, 5], [0, 0])])
def test_a_step_of_nothing_but_padding_is_all_zeros(
    kv_len: list[int], q_len: list[int], causal: bool, dim: int, device: torch.device
) -> None:
    case = replace(
        RAGGED, kv_len=kv_len, q_len=q_len, tail=40, dims=(dim, dim), window_right=0 if causal else UNLIMITED_WINDOW
    )
    tensors = build(case, device)
    run_hopper(tensors, ALL_SHARED)
    assert_served(tensors)
    assert (tensors.out == 0).all()


@of_dims
def test_few_tokens_after_many_are_right(dims: tuple[int, int], device: torch.device) -> None:
    """Every program has a part of the only row."""
    tensors = build(replace(RAGGED, kv_len=[70001], q_len=[3], tail=0, heads=(4, 1), dims=dims), device)
    run_hopper(tensors, RowSharing(programs=132))
    assert_served(tensors)


@pytest.mark.parametrize(("heads", "page_size"), [((96, 2), 2), ((24, 2), 16)])
@of_dims
def test_blocks_that_fewer_query_heads_fill_are_right(
    heads: tuple[int, int], page_size: int, dims: tuple[int, int], device: torch.device
) -> None:
    case = replace(RAGGED, kv_len=[90, 1, 133], q_len=[25, 1, 133], heads=heads, dims=dims, page_size=page_size)
    for sharing in (ALL_SHARED, NONE_SHARED):
        tensors = build(case, device)
        tiles = hopper_tiles(*dims, page_size, coded=False)
        run_hopper(tensors, sharing, tiles=replace(tiles, extend=replace(tiles.extend, fills=True)))
        assert_served(tensors)


@of_dims
def test_programs_take_their_share_and_then_whole_rows(dims: tuple[int, int], device: torch.device) -> None:
    """Four blocks are shared, mostly of a long sequence; a program has several of the other rows, with pads."""
    case = replace(RAGGED, kv_len=[3000, 0, *range(60, 72), 9], q_len=[40, 0, *[20] * 12, 1], heads=(8, 2), dims=dims)
    tensors = build(case, device)
    sharing = ALL_SHARED._replace(programs=5, split_keys=0)
    cut = run_hopper(tensors, sharing)
    words = extend_schedule(case.kv_len, case.q_len, cut, tensors.q.shape[0])
    assert words[SHARE_CUT.value - SHARE_WORDS] == 4
    assert_served(tensors)


@pytest.mark.parametrize("heads", [(48, 48), (36, 18), (32, 32)], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (192, 128)], ids=str)
def test_heads_that_come_at_once_leave_none_out(
    heads: tuple[int, int], dims: tuple[int, int], device: torch.device
) -> None:
    """Some blocks are shared; a program has whole rows of several groups of KV heads, with pads."""
    case = replace(RAGGED, kv_len=[3000, 0, *range(60, 72), 9], q_len=[40, 0, *[20] * 12, 1], heads=heads, dims=dims)
    for sharing in (ALL_SHARED._replace(programs=5, split_keys=0), NONE_SHARED._replace(programs=7)):
        tensors = build(case, device)
        run_hopper(tensors, sharing)
        assert_served(tensors)


@of_dims
def test_many_short_sequences_are_right(dims: tuple[int, int], device: torch.device) -> None:
    kv_len, q_len = [20 + at % 37 for at in range(300)], [at % 3 for at in range(300)]
    tensors = build(replace(RAGGED, kv_len=kv_len, q_len=q_len, heads=(2, 1), dims=dims), device)
    run_hopper(tensors, RowSharing(programs=132))
    assert_served(tensors)


@of_dims
def test_a_graph_serves_other_lengths_than_it_was_captured_with(dims: tuple[int, int], device: torch.device) -> None:
    """The sharing depends on the lengths: the first step shares all rows, and the second none."""
    long = replace(RAGGED, kv_len=[900, 30], q_len=[40, 20], tail=0, heads=(4, 1), dims=dims)
    short = replace(long, kv_len=[30, 70], q_len=[9, 51])
    tiles = hopper_tiles(*dims, long.page_size, coded=False)
    first, second = build(long, device), build(short, device, seed=1)
    cut = extend_cut(first, tiles.extend, RowSharing(programs=132))
    schedule = garbage(cut.words(60, 2), device)
    partials = torch.full(
        (cut.partials_words(query_rows=tiles.extend.query_rows, v_head_dim=dims[1]),), float("nan"), device=device
    )
    # The memory of both steps.
    tensors = build(long, device)

    def launch() -> None:
        launch_extend_schedule(tensors.queries, schedule, cut)
        args = tensors.args(schedule, partials)
        hopper_launches.launch_hopper_extend(args, scores=tensors.scores, cut=cut, tiles=tiles)

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for step in (second, first):
        for name in ("q", "kv_len", "q_len", "q_indptr", "row_of_seq"):
            getattr(tensors, name).copy_(getattr(step, name))
        for name in ("k_pages", "v_pages"):
            getattr(tensors, name)[: getattr(step, name).shape[0]].copy_(getattr(step, name))
        tensors.table[:, : step.table.shape[1]].copy_(step.table)
        tensors.out.fill_(UNTOUCHED)
        graph.replay()
        assert_served(replace(tensors, reference=step.reference, reference_lse=step.reference_lse))


LAYERS = {
    "llama": small_problem(16, torch.bfloat16, num_q_heads=8, num_kv_heads=2, head_dim=128, v_head_dim=128),
    "gpt_oss": small_problem(
        32, torch.float16, num_q_heads=16, num_kv_heads=2, head_dim=64, v_head_dim=64, has_sinks=True
    ),
    "gemma_2": small_problem(
        16, torch.bfloat16, num_q_heads=4, num_kv_heads=2, head_dim=256, v_head_dim=256, logits_soft_cap=50.0
    ),
    "one_kv_head": small_problem(16, torch.bfloat16, num_q_heads=128, num_kv_heads=1, head_dim=192, v_head_dim=192),
}
DECODE = {"one_kv_head": "triton.hopper_decode"}


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphed"])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_runtime_serves_extend_and_mixed_steps_by_it(layer: str, graphs: bool, device: torch.device) -> None:
    problem = LAYERS[layer]
    chosen = select(problem, detect_target(device), "triton")
    assert chosen.kernel(StepKind.EXTEND).entry.name == "triton.hopper_extend"
    assert chosen.kernel(StepKind.MIXED).entry.name == "triton.hopper_extend+decode"
    assert chosen.kernel(StepKind.DECODE).entry.name == DECODE.get(layer, "triton.decode")
    teller = Teller.of(device, "triton", problem, graphs=graphs, deterministic=False, max_kv_len=1024, num_pages=200)
    reported, beside = (teller.begin(Story.random(problem, 1000, seed)) for seed in (1, 2))
    teller.serve([(reported, 500)])
    teller.serve([(beside, 300), (reported, 200)])
    for new in (70, 1, 60, 1):
        teller.serve([(reported, new), (beside, 1)])
    teller.serve([(beside, 400), (reported, 1)])
    for each in (reported, beside):
        teller.check_told(each)


@pytest.mark.parametrize("layer", ["llama", "gemma_2", "one_kv_head"])
def test_layers_of_an_eager_step_after_the_first_launch_what_it_did(layer: str, device: torch.device) -> None:
    """Prepared calls, each with descriptors of its own pages, give the same rows the same bits."""
    problem = LAYERS[layer]
    options = RuntimeOptions(num_pages=100, max_num_seqs=4, max_kv_len=512, provider="triton", capture_sizes=[4])
    runtime = build_runtime([problem] * 4, options, device=device)
    rows = np.array([runtime.table.admit() for _ in range(3)], np.int32)
    kv_len = np.zeros(3, np.int32)
    for q_len in ([200, 130, 300], [150, 1, 1]):
        q_lens = np.array(q_len, np.int32)
        kv_len = kv_len + q_lens
        runtime.table.reserve_all(rows, kv_len)
        num_tokens, dtype = int(q_lens.sum()), problem.dtype
        q = torch.randn(num_tokens, problem.num_q_heads, problem.head_dim, device=device).to(dtype)
        k, v = (torch.randn_like(q[:, : problem.num_kv_heads]) for _ in "kv")
        step = runtime.step(StepBatch(rows, kv_len, q_lens)).parts[0]
        outs = [torch.full_like(q, float("nan")) for _ in range(4)]
        with patch.object(JITFunction, "run", side_effect=JITFunction.run, autospec=True) as by_triton:
            counts = []
            for number, out in enumerate(outs):
                step.layers.store_and_attend(number, q, k, v, out)
                counts.append(by_triton.call_count)
        runtime.end_step()
        assert all(torch.equal(out, outs[0]) for out in outs[1:])
        assert not outs[0].isnan().any()
        assert counts[0] > 0
        assert counts[-1] == counts[0], "a later layer was launched by Triton"


@coded_dims
@pytest.mark.parametrize("scales", [Scales.LAYER, Scales.HEAD])
def test_rows_of_zeros_see_all_keys_alike_however_small_the_scale_of_k_is(
    scales: Scales, dims: tuple[int, int], device: torch.device
) -> None:
    """Rows are converted to float16 with a scale, and the product of both scales and -inf must not be NaN."""
    case = replace(RAGGED, dims=dims, kv=Encoding.E5M2, scales=scales, tail=0)
    tensors = build(case, device)
    assert tensors.k_scale is not None
    tensors.q.zero_()
    tensors.k_scale.fill_(2.0**-40)
    run_hopper(tensors, NONE_SHARED)
    seen = [key + 1 for length, new in zip(case.kv_len, case.q_len, strict=True) for key in range(length - new, length)]
    lse = torch.tensor(seen, device=device).float().log()[:, None].expand_as(tensors.lse)
    torch.testing.assert_close(tensors.lse, lse)


Sides = tuple[torch.Tensor, torch.Tensor]


def packed(k: torch.Tensor, v: torch.Tensor, between: int = 0) -> Sides:
    """Returns pages in which K and V of a head lie next to each other, as vLLM packs them, with NaN around them.

    between: pages between a page and the next one, as of other layers
    """
    shape = (len(k), 1 + between, *k.shape[1:3], k.shape[3] + v.shape[3])
    memory = torch.full(shape, float("nan"), device=k.device, dtype=k.dtype)
    memory[:, 0] = torch.cat([k, v], 3)
    return memory[:, 0, ..., : k.shape[3]], memory[:, 0, ..., k.shape[3] :]


def between_layers(k: torch.Tensor, v: torch.Tensor) -> Sides:
    """The same, with pages of two other layers between."""
    return packed(k, v, between=2)


def heads_first(k: torch.Tensor, v: torch.Tensor) -> Sides:
    """Returns pages with the tokens of a head next to each other."""
    k, v = (side.transpose(1, 2).contiguous().transpose(1, 2) for side in (k, v))
    return k, v


LAID_OUT = product([(64, 64), (80, 80), (128, 128), (192, 128), (256, 256)], (False, True))


@seventh_by_day("heads, page_size, lay_out", product(LAID_OUT, (2, 16, 48), (packed, between_layers, heads_first)))
def test_pages_whose_slots_lie_at_equal_distances_are_read_where_they_are(
    heads: tuple[tuple[int, int], bool], page_size: int, lay_out: Callable[..., Sides], device: torch.device
) -> None:
    dims, in_segments = heads
    tensors = build(replace(RAGGED, dims=dims, page_size=page_size), device)
    k, v = lay_out(tensors.k_pages, tensors.v_pages)
    assert not k.is_contiguous()
    tiles = hopper_segment_tiles(*dims, page_size, coded=False) if in_segments else None
    run_hopper(replace(tensors, k_pages=k, v_pages=v), NONE_SHARED if in_segments else ALL_SHARED, tiles=tiles)
    assert_served(tensors)
