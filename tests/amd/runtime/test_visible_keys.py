"""Layers of every visibility in one runtime: windows, chunks, spans of a step, blocks, prefixes, and all keys.

The reference goes key by key through the definition of each, in plain Python, and attends in float64.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rocm_attn.batch.inputs import DeviceInputs
from rocm_attn.batch.mask import TokenSpans, TreeMask, spans_of_blocks
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.errors import BadBatch, BadProblem, Unsupported
from rocm_attn.kernels.attention.scores import Visibility
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.kernels.refs import metadata as twins
from rocm_attn.machine.target import detect_target, known_target
from rocm_attn.oracle.reference import attend_sequence
from rocm_attn.paging.index_spaces import Space
from rocm_attn.problem import UNLIMITED_WINDOW, PoolKind, Problem
from rocm_attn.providers import triton
from rocm_attn.providers.contract import SMALLEST_POOL
from rocm_attn.providers.select import select
from rocm_attn.providers.triton_hopper import RANGED_LIMITS
from tests.amd.kernels.gpus import OF_HOPPERS_KERNELS
from tests.amd.tolerances import assert_attention_close, assert_lse_close
from tests.amd.worlds.problems import deterministic_providers, providers, small_problem
from tests.amd.worlds.world import Request, World, page_zero_is_zero

Span = tuple[int, int, int]

MASKED = small_problem(custom_mask=True)
LAYERS = {
    "spans": MASKED,
    "a window that hides spans": replace(MASKED, window_left=5, has_sinks=True),
    "a window that spans pass": replace(MASKED, window_left=5, spans_pass_window=True),
    "chunks": small_problem(),
    "scores of chunks": replace(small_problem(has_sinks=True, logits_soft_cap=2.0, has_alibi_slopes=True), chunk=8),
    "chunks with a window": replace(small_problem(window_left=3), chunk=8),
    "chunks that hide spans": replace(MASKED, chunk=8),
    "chunks that spans pass": replace(MASKED, chunk=8, spans_pass_window=True),
    "a window on both sides": small_problem(window_left=5, window_right=5, has_sinks=True),
    "scores of a window on both sides": small_problem(
        window_left=9, window_right=3, logits_soft_cap=2.0, has_alibi_slopes=True
    ),
    "a few later keys": small_problem(window_right=4),
    "a window and all later keys": small_problem(window_left=3, window_right=UNLIMITED_WINDOW),
    "a window on both sides that hides spans": replace(MASKED, window_left=4, window_right=2),
    "a window on both sides that spans pass": replace(MASKED, window_left=4, window_right=2, spans_pass_window=True),
    "all keys": replace(MASKED, window_right=UNLIMITED_WINDOW),
    "causal": small_problem(),
}
LAYERS["chunks"] = replace(LAYERS["chunks"], chunk=8)


def sees(problem: Problem, spans: Sequence[tuple[int, int]], query: int, key: int) -> bool:
    """True if a query sees a key of its sequence, by the definitions. spans: of the sequence in this step"""
    together = problem.custom_mask and any(begin <= query < end and begin <= key < end for begin, end in spans)
    if key > query:
        return together or problem.window_right == UNLIMITED_WINDOW or key - query <= problem.window_right
    too_far = problem.window_left != UNLIMITED_WINDOW and query - key > problem.window_left
    elsewhere = problem.chunk > 0 and query // problem.chunk != key // problem.chunk
    return not (too_far or elsewhere) or (together and problem.spans_pass_window)


def dense(problem: Problem, spans: Sequence[Span], seq: int, kv_len: int, q_len: int) -> Tensor:
    """bool [q_len, kv_len]: the keys that new tokens of a sequence see."""
    own = [(begin, end) for of, begin, end in spans if of == seq]
    rows = [[sees(problem, own, query, key) for key in range(kv_len)] for query in range(kv_len - q_len, kv_len)]
    return torch.tensor(rows, dtype=torch.bool).view(q_len, kv_len)


def check(world: World, requests: Sequence[Request], q_len: Sequence[int], spans: Sequence[Span]) -> None:
    """Checks every layer of the last step; tokens of no sequence are 0."""
    used = torch.from_numpy(world.places).to(world.runtime.device)
    for layer, (problem, rows) in enumerate(zip(world.problems, world.rows, strict=True)):
        unlimited = replace(problem, window_left=UNLIMITED_WINDOW, chunk=0, spans_pass_window=False)
        weights, first = world.runtime.head_weights.of(layer), 0
        for seq, (request, new) in enumerate(zip(requests, q_len, strict=True)):
            at = used[first : first + new]
            visible = dense(problem, spans, seq, request.kv_len, new).to(used.device)
            k, v = request.k[layer], request.v[layer]
            want, want_lse = attend_sequence(rows.q[at], k, v, unlimited, weights, visible)
            assert_attention_close(rows.out[at], want, problem.dtype)
            assert_lse_close(rows.lse[at], want_lse, problem.dtype)
            first += new
        pads = used[first:]
        assert (rows.out[pads] == 0).all()
    assert page_zero_is_zero(world)


def run(
    world: World,
    requests: Sequence[Request],
    q_len: Sequence[int],
    spans: Sequence[Span] | None,
    *,
    halves: bool = False,
) -> None:
    """Runs a step, with spans or without a mask, and checks it. spans: counted from the first new token"""
    if spans is not None:
        spans = [(seq, requests[seq].kv_len + begin, requests[seq].kv_len + end) for seq, begin, end in spans]
    batch = world.batch(requests, q_len)
    if spans is not None:
        batch = replace(batch, mask=TokenSpans(spans, world.runtime.device))
    world.run_batch(requests, q_len, batch, halves=halves)
    check(world, requests, q_len, spans or [])


# q_len of three sequences, and spans, whose places are counted from a sequence's first new token: one that begins or
# ends at a border of the step, one inside, two side by side, and one of one token.
STORY: list[tuple[list[int], list[Span] | None]] = [
    ([13, 20, 2], [(0, 0, 13), (1, 3, 9), (1, 9, 19)]),
    ([1, 1, 1], None),
    ([9, 1, 0], [(0, 1, 9)]),
    ([1, 7, 5], None),
    ([2, 3, 4], []),
    ([1, 1, 6], [(0, 0, 1), (2, 0, 6)]),
]


def built(
    device: torch.device, provider: str, names: Sequence[str] = tuple(LAYERS), **options: Any
) -> tuple[World, list[Request]]:
    """A world of layers, and three requests."""
    world = World.build([LAYERS[name] for name in names], device, provider, **options)
    return world, world.admit_all(3)


@pytest.mark.fast(interpreted=0)
def test_every_layer_sees_what_its_definition_says(provider: str, device: torch.device) -> None:
    world, requests = built(device, provider)
    for q_len, spans in STORY:
        run(world, requests, q_len, spans)
    world.runtime.check_device()


@pytest.mark.fast(interpreted=0)
def test_graphs_replay_spans_and_chunks(provider: str, device: torch.device) -> None:
    """Masked steps of one size share a graph, whether they bring spans or cells of trees, in turn."""
    names = ["spans", "chunks", "chunks that spans pass", "a window on both sides", "a few later keys"]
    world, requests = built(
        device, provider, names, graphs=True, capture_sizes=(4,), capture_tokens=(48,), max_kv_len=128, num_pages=99
    )
    for q_len, spans in [*STORY, *STORY[:2]]:
        run(world, requests, q_len, spans)
    metrics = world.runner.counters
    assert metrics.replays >= len(STORY), metrics


@pytest.mark.fast(interpreted=0)
@pytest.mark.parametrize("most_nodes", [0, 256])
def test_trees_and_spans_take_turns(
    most_nodes: int, provider: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spans of an earlier step, at the same addresses, are nothing to a step of trees.

    most_nodes: in steps of longer sequences those with cells and those without have a kernel each
    """
    monkeypatch.setattr(triton, "_MOST_NODES", most_nodes)
    layers = [layer for layer in LAYERS.values() if layer.causal and not layer.chunk]
    world = World.build(layers, device, provider, graphs=True, capture_sizes=(2,), capture_tokens=(8,))
    requests = world.admit_all(2)
    run(world, requests, [5, 3], [(0, 0, 4), (1, 0, 3)])
    for _ in range(2):
        run(world, requests, [4, 4], [(0, 0, 4), (1, 0, 4)])
        run_trees(world, requests, [[-1, 0, 0, 2], [-1, -1, 1, 2]], (0, len(layers) - 2))


def run_trees(
    world: World, requests: Sequence[Request], parents: Sequence[Sequence[int]], layers: Sequence[int]
) -> None:
    """Runs a step of trees, and checks some layers."""
    nodes, device = len(parents[0]), world.runtime.device
    q_len = [nodes] * len(requests)
    mask = TreeMask(torch.tensor(parents, dtype=torch.int32).to(device))
    world.run_batch(requests, q_len, replace(world.batch(requests, q_len), mask=mask))
    for seq, request in enumerate(requests):
        start, ancestors = request.kv_len - nodes, list[set[int]]()
        for node, parent in enumerate(parents[seq]):
            ancestors.append({node} | (ancestors[parent] if parent >= 0 else set()))
        seen = torch.ones(nodes, request.kv_len, dtype=torch.bool)
        for node, known in enumerate(ancestors):
            seen[node, start:] = torch.tensor([other in known for other in range(nodes)])
        places = torch.tensor([start + len(known) - 1 for known in ancestors])
        used = torch.from_numpy(world.places[nodes * seq : nodes * (seq + 1)]).to(device)
        for layer in layers:
            problem = world.problems[layer]
            want, _ = attend_sequence(
                world.rows[layer].q[used],
                request.k[layer],
                request.v[layer],
                replace(problem, window_left=UNLIMITED_WINDOW, spans_pass_window=False),
                world.runtime.head_weights.of(layer),
                _in_window(seen, start, places, problem, ancestors).to(device),
            )
            assert_attention_close(world.rows[layer].out[used], want, problem.dtype)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("graphs", [pytest.param(graphs, marks=OF_HOPPERS_KERNELS) for graphs in (False, True)])
def test_hoppers_kernel_sees_what_the_definitions_say(graphs: bool, deterministic: bool, device: torch.device) -> None:
    """Sequences with cells are the plain kernel's; both kernels are launched in each masked step of many tokens."""
    large = replace(MASKED, dtype=torch.bfloat16, page_size=16, head_dim=64, v_head_dim=64)
    window = RANGED_LIMITS.least_window + 100
    layers = [
        large,
        replace(large, window_left=window, has_sinks=True),
        replace(large, window_left=window, spans_pass_window=True),
        replace(large, window_right=UNLIMITED_WINDOW),
        replace(large, logits_soft_cap=30.0),
    ]
    for problem in layers:
        entry = selected(problem, StepKind.MASKED, deterministic, device)
        assert entry == ("triton.hopper_segment_masked" if deterministic else "triton.hopper_masked")
    sizes: dict[str, Any] = {
        "num_pages": 400,
        "max_kv_len": 2 * window + 800,
        "capture_sizes": (2,),
        "capture_tokens": (300,),
    }
    sizes |= {"graphs": graphs, "deterministic": deterministic}
    world = World.build(layers, device, "triton", max_num_seqs=2, max_tokens=2 * window, **sizes)
    requests = world.admit_all(2)
    run(world, requests, [window + 150, 200], [(0, 10, 300), (1, 0, 130), (1, 130, 199)])
    for _ in range(2):
        run(world, requests, [200, 100], [(0, 0, 200), (1, 40, 50)])
        run_trees(world, requests, [[node - 1 for node in range(100)], [node // 2 - 1 for node in range(100)]], (0, 1))
        run(world, requests, [120, 1], [])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("graphs", [pytest.param(graphs, marks=OF_HOPPERS_KERNELS) for graphs in (False, True)])
def test_hoppers_kernel_sees_chunks(graphs: bool, deterministic: bool, device: torch.device) -> None:
    chunk = RANGED_LIMITS.least_window
    plain = small_problem(16, torch.bfloat16, head_dim=128, v_head_dim=128)
    layers = [replace(plain, chunk=chunk), replace(plain, custom_mask=True, chunk=chunk, spans_pass_window=True)]
    for problem in layers:
        entry = selected(problem, StepKind.EXTEND, deterministic, device)
        assert entry == ("triton.hopper_segment_ranges" if deterministic else "triton.hopper_ranges")
    sizes: dict[str, Any] = {"num_pages": 700, "max_kv_len": 3 * chunk, "capture_sizes": (2,), "capture_tokens": (300,)}
    sizes |= {"graphs": graphs, "deterministic": deterministic}
    world = World.build(layers, device, "triton", max_num_seqs=2, max_tokens=3 * chunk, **sizes)
    requests = world.admit_all(2)
    run(world, requests, [chunk - 70, 100], None)
    run(world, requests, [150, 100], [(0, 60, 80)])
    run(world, requests, [150, 1], None)
    run(world, requests, [chunk, 130], None)


def selected(problem: Problem, kind: StepKind, deterministic: bool, device: torch.device) -> str:
    """Returns the name of the entry that serves a kind of step."""
    return select(problem, detect_target(device), "triton", deterministic=deterministic).kernel(kind).entry.name


def _in_window(seen: Tensor, start: int, places: Tensor, problem: Problem, ancestors: Sequence[set[int]]) -> Tensor:
    """Hides keys whose depth in the branch is too far from a node's."""
    if problem.window_left == UNLIMITED_WINDOW:
        return seen
    kept = seen.clone()
    for node in range(len(ancestors)):
        depth_of_key = [*range(start), *(start + len(ancestors[other]) - 1 for other in range(len(ancestors)))]
        for key, depth in enumerate(depth_of_key):
            if int(places[node]) - depth > problem.window_left:
                kept[node, key] = False
    return kept


def test_halves_have_their_own_spans(provider: str, device: torch.device) -> None:
    world, requests = built(device, provider, ["spans", "chunks"], split_steps=True)
    run(world, requests, [6, 7, 8], [(0, 1, 6), (1, 0, 3), (2, 2, 8)], halves=True)


@pytest.mark.fast(interpreted=0)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("provider", deterministic_providers())
def test_latent_layers_see_spans_ranges_and_chunks(provider: str, deterministic: bool, device: torch.device) -> None:
    """With and without a window, in sequences that decode serves and in longer ones."""
    plain = small_problem(num_kv_heads=1, head_dim=24, pool=PoolKind.LATENT)
    masked = replace(plain, custom_mask=True)
    layers = [
        masked,
        replace(masked, window_left=5, spans_pass_window=True),
        replace(plain, window_left=5, window_right=4),
        replace(plain, window_right=3, has_sinks=True),
        replace(plain, chunk=8),
    ]
    world = World.build(layers, device, provider, deterministic=deterministic)
    requests = world.admit_all(2)
    run(world, requests, [3, 20], [(0, 0, 2), (1, 4, 18)])
    run(world, requests, [20, 2], [(0, 1, 19), (1, 0, 2)])
    run(world, requests, [1, 1], None)


@pytest.mark.fast(interpreted=0)
@pytest.mark.parametrize("provider", deterministic_providers())
def test_deterministic_steps_see_the_same(provider: str, device: torch.device) -> None:
    names = ["spans", "scores of chunks", "a window that spans pass", "scores of a window on both sides"]
    world, requests = built(device, provider, names, deterministic=True)
    for q_len, spans in STORY[:4]:
        run(world, requests, q_len, spans)


def test_blocks_of_drafts_see_each_other_and_all_before(provider: str, device: torch.device) -> None:
    world, requests = built(device, provider, ["spans", "causal"])
    run(world, requests, [5, 9, 3], None)
    q_len = [8, 6, 4]
    batch = world.batch(requests, q_len)
    blocks = spans_of_blocks(batch.kv_len, batch.q_len, 4, world.runtime.device)
    assert blocks.spans.tolist() == [[0, 5, 9], [0, 9, 13], [1, 9, 13], [1, 13, 15], [2, 3, 7]]
    world.run_batch(requests, q_len, replace(batch, mask=blocks))
    check(world, requests, q_len, [(0, 5, 9), (0, 9, 13), (1, 9, 13), (1, 13, 15), (2, 3, 7)])
    with pytest.raises(BadBatch, match="a block is of 0 tokens; give 1 or more"):
        spans_of_blocks(batch.kv_len, batch.q_len, 0, world.runtime.device)


@pytest.mark.fast(interpreted=0)
def test_pages_before_a_chunk_are_given_back(provider: str, device: torch.device) -> None:
    """A chunk is a window too: a space of windows keeps the pages that it reaches, and the others hold NaN."""
    layers = [LAYERS["chunks"], LAYERS["chunks that spans pass"]]
    world = World.build(layers, device, provider, swa_pages=24)
    requests = world.admit_all(2)
    for _ in range(6):
        run(world, requests, [5, 4], [(0, 0, 5)])
        run(world, requests, [1, 1], None)
    held = world.runtime.table.space(Space.SWA).entries_host[requests[0].row]
    assert (held[:5] == 0).all(), "the pages of the first 20 tokens have left every chunk"


@pytest.mark.parametrize(
    ("spans", "sentence"),
    [
        ([(0, 4, 9)], r"span 0 is \[4, 9\) of sequence 0, whose new tokens are \[5, 12\)"),
        ([(0, 5, 13)], r"span 0 is \[5, 13\) of sequence 0, whose new tokens are \[5, 12\)"),
        ([(0, 6, 8), (3, 0, 1)], "span 1 is of sequence 3, and the step has 2"),
        ([(0, 6, 6)], "0 <= first < end"),
        ([(-1, 6, 8)], "give a sequence of the step"),
        ([(0, 6, 9), (0, 8, 10)], "let none overlap"),
        ([(1, 3, 4), (0, 6, 9)], "sort spans"),
        ([(0, 6)], "of shape"),
        ([(0.5, 6, 7)], "give integers"),
    ],
)
def test_spans_that_do_not_lie_among_new_tokens_are_refused(spans: Sequence[Span], sentence: str) -> None:
    """A span that straddles the border of a chunked prompt, too: its first tokens did not see its last ones."""
    lengths = np.array([12, 6], np.int32), np.array([7, 4], np.int32)
    with pytest.raises(BadBatch, match=sentence):
        StepBatch(np.array([1, 2], np.int32), *lengths, mask=TokenSpans(spans, torch.device("cpu")))


def test_spans_need_lengths_on_the_host() -> None:
    lengths = torch.tensor([4], dtype=torch.int32)
    with pytest.raises(BadBatch, match="need the lengths on the host"):
        StepBatch([1], [4], [4], inputs=DeviceInputs(kv_len=lengths), mask=TokenSpans([], torch.device("cpu")))


def test_chunks_refuse_trees_and_other_kernels_refuse_chunks(device: torch.device) -> None:
    world = World.build([LAYERS["chunks that hide spans"]], device, providers()[0])
    request = world.admit()
    batch = world.batch([request], [2])
    tree = TreeMask(torch.tensor([[-1, 0]], dtype=torch.int32, device=device))
    with pytest.raises(Unsupported, match="trees in layers with chunks"):
        world.runtime.plan(replace(batch, mask=tree))
    llama4 = Problem(40, 8, 128, torch.bfloat16, 16, chunk=8192)
    chosen = select(llama4, known_target("gfx942"), "auto")
    assert {kernel.entry.provider for kernel in chosen.kernels.values()} == {"triton"}
    assert any("no chunks of keys (8192)" in refusal.reason for refusal in chosen.refusals)
    hopper = select(llama4, known_target("sm_90"), "auto")
    assert next(iter(hopper.kernels.values())).entry.name == "triton.chunk_decode"
    pages = select(replace(llama4, page_size=24), known_target("sm_90"), "auto")
    assert next(iter(pages.kernels.values())).entry.name == "triton.ranges"


@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "sm_90", "cpu"])
@pytest.mark.parametrize("right", [64, UNLIMITED_WINDOW])
def test_kernels_that_read_no_ranges_refuse_windows_with_later_keys(arch: str, right: int) -> None:
    """AITER's kernels take a window and later keys, but each function means something of its own by both."""
    modern_bert = Problem(12, 12, 64, torch.bfloat16, 16, window_left=64, window_right=right)
    chosen = select(modern_bert, known_target(arch), "auto")
    names = {kernel.entry.name for kernel in chosen.kernels.values()}
    assert names == ({"cpu.decode", "cpu.extend"} if arch == "cpu" else {"triton.ranges"})
    refusals = {refusal.reason for refusal in chosen.refusals if "window with later keys" in refusal.reason}
    assert (len(refusals) > 0) == (arch != "cpu")
    assert all(f"window_left 64, window_right {right}" in reason for reason in refusals)


def test_sequences_with_fewer_keys_than_new_tokens_have_no_window_of_later_keys() -> None:
    pool = replace(SMALLEST_POOL, terms=replace(SMALLEST_POOL.terms, short_kv=True))
    problem = small_problem(window_left=5, window_right=5)
    with pytest.raises(Unsupported, match="later keys need a place"):
        select(problem, known_target("cpu"), "auto", pool=pool)
    assert select(replace(problem, window_right=UNLIMITED_WINDOW), known_target("cpu"), "auto", pool=pool).kernels


def test_problems_of_chunks_and_spans_are_checked() -> None:
    assert replace(MASKED, chunk=8).window_left == 7
    assert replace(MASKED, chunk=8, window_left=3).window_left == 3
    # Kernels add a few tokens to a window in 32 bits.
    assert replace(MASKED, chunk=2**31 - 2).window_left == 2**30 - 1
    with pytest.raises(BadProblem, match="chunk is -1"):
        replace(MASKED, chunk=-1)
    with pytest.raises(BadProblem, match="spans_pass_window is True"):
        replace(MASKED, spans_pass_window=True)
    with pytest.raises(BadProblem, match="chunks need window_right 0"):
        replace(MASKED, window_right=UNLIMITED_WINDOW, chunk=8)


@st.composite
def _steps(draw: st.DrawFn) -> tuple[Problem, list[int], list[int], list[Span], int]:
    """A layer, lengths of sequences, spans among their new tokens, and padded tokens."""
    q_len = draw(st.lists(st.integers(0, 12), min_size=1, max_size=4))
    kv_len = [new + draw(st.integers(0, 20)) for new in q_len]
    left, right = (draw(st.sampled_from([UNLIMITED_WINDOW, 0, 2, 7, 2**31 - 2])) for _ in range(2))
    right = draw(st.sampled_from([0, right]))
    chunk = draw(st.sampled_from([0, 1, 3, 8])) if right == 0 else 0
    limited = chunk > 0 or left != UNLIMITED_WINDOW
    windows = {"window_left": left, "window_right": right}
    problem = replace(MASKED, **windows, chunk=chunk, custom_mask=draw(st.booleans()))  # type: ignore[arg-type]
    problem = replace(problem, spans_pass_window=limited and problem.custom_mask and draw(st.booleans()))
    spans: list[Span] = []
    for seq, (length, new) in enumerate(zip(kv_len, q_len, strict=True)):
        borders = sorted(draw(st.sets(st.integers(length - new, length), max_size=6)))
        pairs = itertools.pairwise(borders)
        spans += [(seq, begin, end) for begin, end in pairs if draw(st.booleans())]
    return problem, kv_len, q_len, spans, draw(st.integers(0, 5))


@pytest.mark.fast(interpreted=0)
@settings(max_examples=300, deadline=None)
@given(_steps())
def test_ranges_are_what_the_definition_says_key_by_key(
    step_of: tuple[Problem, list[int], list[int], list[Span], int],
) -> None:
    problem, kv_len, q_len, spans, tail = step_of
    step = step_tensors(kv_len, q_len, tail)
    twins.place_spans(TokenSpans(spans, torch.device("cpu")).placed, step)
    first, end = twins.visible_ranges(step, problem.visibility)
    assert_ranges(problem, kv_len, q_len, spans, first, end)


def test_no_range_begins_before_its_sequence() -> None:
    """An engine's span may begin below 0; Hopper's kernel loads every key of a range."""
    problem = replace(MASKED, window_left=3, spans_pass_window=True)
    step = step_tensors([9], [4], 0)
    twins.place_spans(torch.tensor([[0, -200, 8]], dtype=torch.int32), step)
    first, end = twins.visible_ranges(step, problem.visibility)
    assert first.tolist() == [0, 0, 0, 5]
    assert end.tolist() == [8, 8, 8, 9]
    # With fewer keys than new tokens the first places are below 0.
    short = step_tensors([0, 2], [3, 5], 0)
    twins.place_spans(torch.zeros(0, 3, dtype=torch.int32), short)
    first, end = twins.visible_ranges(short, replace(MASKED, chunk=8).visibility)
    assert first.tolist() == [0] * 8
    assert end.tolist() == [0] * 6 + [1, 2]


def assert_ranges(
    problem: Problem, kv_len: list[int], q_len: list[int], spans: list[Span], first: Tensor, end: Tensor
) -> None:
    """Checks ranges against the dense mask; tokens of no sequence see nothing."""
    token = 0
    for seq, (length, new) in enumerate(zip(kv_len, q_len, strict=True)):
        for row in dense(problem, spans, seq, length, new):
            keys = row.nonzero().flatten().tolist()
            assert keys == list(range(int(first[token]), int(end[token])))
            token += 1
    assert not end[token:].any()


def step_tensors(kv_len: Sequence[int], q_len: Sequence[int], tail: int, device: str = "cpu") -> StepTensors:
    """A masked step as fill leaves it, with garbage where spans and ranges are written."""
    num_tokens = sum(q_len) + tail

    def ints(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    seq = [seq for seq, new in enumerate(q_len) for _ in range(new)]
    places = [place for length, new in zip(kv_len, q_len, strict=True) for place in range(length - new, length)]
    return StepTensors.of(
        ints([]),
        counts=ints([len(q_len), sum(q_len), 0, 0]),
        kv_len=ints(kv_len),
        q_len=ints(q_len),
        seq_of_token=ints([*seq, *[len(q_len) - 1] * tail]),
        position_of_token=ints([*places, *[0] * tail]),
        mask_start=ints([-5] * len(q_len)),
        **{name: ints([77] * num_tokens) for name in ("mask_positions", "span_begin", "span_end", "window_start")},
    )


def test_visibility_is_one_value() -> None:
    assert Problem(4, 2, 16, torch.float32, 4, chunk=8).visibility == Visibility(window_left=7, chunk=8)
