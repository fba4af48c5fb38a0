"""Deterministic mode: the bits of a sequence's attention in every batch, bucket and chunking, eager and replayed."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.errors import Unsupported
from rocm_attn.machine.target import detect_target, known_target
from rocm_attn.problem import Problem
from rocm_attn.providers.select import select
from tests.amd.kernels.matrix_unit import use_matrix_unit
from tests.amd.runtime.token_stories import Story, Teller, Told, same_bits
from tests.amd.worlds.problems import deterministic_providers, small_problem

# Under the interpreter a segment has 64 keys, on a GPU 512 or more, with torch 128.
NUM_TOKENS = 150

LAYERS: Mapping[str, Problem] = {
    "plain": small_problem(),
    "window_sinks": small_problem(5, window_left=70, has_sinks=True, v_head_dim=24),
    "chunks": replace(small_problem(has_sinks=True), chunk=48),
    "cap_slopes_fp16": small_problem(16, torch.float16, logits_soft_cap=2.0, has_alibi_slopes=True),
}
# Several problems, so that pages, dims and ratios differ; each is served in every way.
deterministic = pytest.mark.parametrize("provider", deterministic_providers())

Way = Callable[[Teller, Story], Told]


def in_chunks(*chunks: int) -> Way:
    """Serves it alone, in chunks."""
    assert sum(chunks) == NUM_TOKENS

    def way(teller: Teller, story: Story) -> Told:
        return teller.tell(teller.begin(story), chunks)

    return way


def beside_others(teller: Teller, story: Story) -> Told:
    """Serves it in mixed batches: after a longer story, before a shorter one; decoding while others extend."""
    others = [teller.begin(Story.random(teller.problems[0], 300, seed)) for seed in (11, 12, 13)]
    teller.serve([(others[0], 130), (others[1], 3)])
    reported = teller.begin(story)
    teller.serve([(others[0], 1), (reported, 90), (others[2], 17)])
    teller.serve([(reported, 1), (others[1], 9), (others[0], 40)])
    teller.serve([(others[2], 1), (others[0], 1), (reported, 1)])
    teller.serve([(others[1], 1), (reported, 1), (others[0], 1), (others[2], 1)], pad_to=8)
    teller.serve([(others[2], 5), (others[1], 0), (reported, 57)])
    return reported


def in_scattered_pages(teller: Teller, story: Story) -> Told:
    """Serves it in pages that others held, in another order, with their numbers in them."""
    others = [teller.begin(Story.random(teller.problems[0], 120, seed)) for seed in (21, 22, 23)]
    for chunk in (7, 40, 22, 31):
        teller.serve([(other, chunk) for other in others])
    teller.free(others[1])
    reported = teller.begin(story)
    teller.serve([(reported, 70)])
    teller.free(others[0])
    return teller.tell(reported, (20, 60))


def over_a_cached_prefix(teller: Teller, story: Story) -> Told:
    """Serves it after pages that another request has filled, and shares."""
    parent = teller.tell(teller.begin(story), (101,))
    reported = teller.fork(parent, 97)
    teller.serve([(parent, 5), (reported, 20)])
    return teller.tell(reported, (32, 1))


def in_halves(teller: Teller, story: Story) -> Told:
    """Serves it in steps that are split in two: as part of the first half, then of the second."""
    others = [teller.begin(Story.random(teller.problems[0], 200, seed)) for seed in (31, 32)]
    reported = teller.begin(story)
    teller.serve([(reported, 100), (others[0], 30), (others[1], 60)], halves=True)
    teller.serve([(others[0], 70), (others[1], 2), (reported, 49)], halves=True)
    teller.serve([(others[0], 1), (reported, 1)], halves=True)
    return reported


WAYS: Mapping[str, Way] = {
    "one_token_last": in_chunks(149, 1),
    "tokens_last": in_chunks(140, *[1] * 10),
    "tokens_first": in_chunks(*[1] * 10, 139, 1),
    "at_a_cut": in_chunks(64, 64, 22),
    "around_a_cut": in_chunks(63, 1, 1, 62, 1, 1, 21),
    "small": in_chunks(*[9] * 16, 6),
    "odd": in_chunks(1, 31, 33, 2, 60, 5, 18),
    "beside_others": beside_others,
    "scattered": in_scattered_pages,
    "cached": over_a_cached_prefix,
    "halves": in_halves,
}


@pytest.fixture(autouse=True)
def _matrix_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    use_matrix_unit(monkeypatch)


def ways_for(provider: str, device: torch.device, *, graphs: bool) -> Mapping[str, Way]:
    """Returns all ways, except those with many steps under the interpreter, which takes a second per step.

    Two ways are left, and two more with graphs.
    """
    if provider == "torch" or device.type == "cuda":
        return WAYS
    return {name: WAYS[name] for name in ("around_a_cut", "beside_others", *["cached", "halves"] * graphs)}


@deterministic
def test_decode_of_chunks_has_the_bits_of_extend(graphs: bool, provider: str, device: torch.device) -> None:
    """Chunks are whole segments: decode begins where the last token's chunk does."""
    chunk = 1024 if device.type == "cuda" else 64
    problem = replace(small_problem(16, torch.float16), chunk=chunk)
    kernel = select(problem, detect_target(device), provider, deterministic=True).kernel(StepKind.DECODE)
    assert provider != "triton" or kernel.entry.name == "triton.segment_chunk_decode"
    story = Story.random(problem, chunk + 9, 1)
    most = 2 * chunk
    sizes: dict[str, Any] = {
        "max_kv_len": most,
        "max_tokens": most,
        "capture_sizes": (1,),
        "capture_tokens": (16, most),
    }
    told = []
    for chunks in ((chunk + 9,), (chunk - 2, *[1] * 5, 3, *[1] * 3)):
        teller = Teller.of(device, provider, problem, graphs=graphs, **sizes)
        told.append(teller.tell(teller.begin(story), chunks))
        teller.check_told(told[-1])
    assert same_bits(*told)


@pytest.mark.fast(1, interpreted=0)
@deterministic
@pytest.mark.parametrize("layer", LAYERS)
def test_a_sequence_gives_the_same_bits_in_every_way(
    graphs: bool, layer: str, provider: str, device: torch.device
) -> None:
    problem = LAYERS[layer]
    story = Story.random(problem, NUM_TOKENS, 1)
    teller = Teller.of(device, provider, problem)
    alone = teller.tell(teller.begin(story), (NUM_TOKENS,))
    teller.check_told(alone)
    different = []
    for name, way in ways_for(provider, device, graphs=graphs).items():
        teller = Teller.of(device, provider, problem, graphs=graphs)
        reported = way(teller, story)
        teller.check_told(reported)
        if not same_bits(reported, alone):
            different.append(name)
        if graphs:
            assert teller.runner.counters.replays > 0
    assert not different


@pytest.mark.fast(interpreted=0)
@deterministic
def test_the_log_sum_exp_that_is_not_asked_for_changes_no_output(provider: str, device: torch.device) -> None:
    problem = small_problem(has_sinks=True)
    teller = Teller.of(device, provider, problem)
    story = Story.random(problem, 80, 3)
    with_lse = teller.tell(teller.begin(story), (79, 1))
    reported = teller.tell(teller.begin(story), (79,))
    runtime, token = teller.runtime, slice(79, 80)
    runtime.table.reserve(reported.row, 80)
    decode = (np.array([number], np.int32) for number in (reported.row, reported.kv_len + 1, 1))
    step = runtime.step(StepBatch(*decode)).parts[0]
    q, k, v = (part[token].to(runtime.device) for part in (story.q, story.k, story.v))
    out = torch.empty_like(with_lse.out[token])
    step.layers.store_and_attend(0, q, k, v, out)
    runtime.end_step()
    assert torch.equal(out, with_lse.out[token])


def test_only_kernels_that_do_not_depend_on_the_batch_are_chosen() -> None:
    chosen = select(small_problem(16), known_target("gfx942"), "auto", deterministic=True)
    assert chosen.deterministic
    assert [kernel.entry.name for kernel in chosen.kernels.values()] == [
        "triton.segment_decode",
        "triton.segment_extend",
        "triton.segment_extend+decode",
    ]
    reasons = {(each.kind, each.kernel): each.reason for each in chosen.refusals}
    assert reasons[StepKind.DECODE, "triton.decode"] == "a sequence's result may depend on the batch"
    assert not select(small_problem(16), known_target("gfx942"), "triton").deterministic


@pytest.mark.parametrize(
    ("provider", "arch", "reason"),
    [
        ("aiter", "gfx942", "a sequence's result may depend on the batch"),
        ("torch", "gfx942", "arch gfx942 is not one of cpu, interpreter"),
    ],
)
def test_a_provider_without_such_kernels_is_refused(provider: str, arch: str, reason: str) -> None:
    with pytest.raises(Unsupported, match=f"no deterministic kernel of provider '{provider}' serves decode") as refused:
        select(small_problem(16), known_target(arch), provider, deterministic=True)
    assert any(reason in line for line in refused.value.reasons)


# Layers of real models; long enough for several segments of the GPU's tiles.
GPU_LAYERS: Mapping[str, Problem] = {
    "llama8b": small_problem(16, torch.bfloat16, num_q_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128),
    "gptoss": small_problem(
        16, torch.bfloat16, num_q_heads=64, num_kv_heads=8, head_dim=64, v_head_dim=64, window_left=127, has_sinks=True
    ),
    "gemma2": small_problem(
        16, torch.bfloat16, num_q_heads=8, num_kv_heads=4, head_dim=256, v_head_dim=256, logits_soft_cap=50.0
    ),
    "long_window": small_problem(
        64, torch.float16, num_q_heads=8, num_kv_heads=8, head_dim=80, v_head_dim=80, window_left=1500
    ),
    "float32": small_problem(16, num_q_heads=8, num_kv_heads=2, head_dim=64, v_head_dim=64, has_alibi_slopes=True),
}


@pytest.mark.gpu
@pytest.mark.parametrize("layer", GPU_LAYERS)
def test_long_sequences_give_the_same_bits_on_a_gpu(layer: str, graphs: bool, device: torch.device) -> None:
    problem, num_tokens = GPU_LAYERS[layer], 2600
    sizes: dict[str, Any] = {"max_kv_len": 4096, "max_tokens": 4096, "num_pages": 12000 // problem.page_size}
    story = Story.random(problem, num_tokens, 1)
    teller = Teller.of(device, "triton", problem, **sizes)
    alone = teller.tell(teller.begin(story), (num_tokens,))
    teller.check_told(alone)
    different = []
    for chunks in ((2599, 1), (1024, 1024, 552), (300, 700, 1, 1, 30, 1000, 568), (2048, 500, *[1] * 52)):
        for companions in (0, 3):
            teller = Teller.of(device, "triton", problem, graphs=graphs, **sizes)
            reported = teller.begin(story)
            others = [teller.begin(Story.random(problem, 2700, seed)) for seed in range(2, 2 + companions)]
            for other in others:
                teller.serve([(other, 1000)])
            for step, chunk in enumerate(chunks):
                beside = [(other, 1 if (step + place) % 2 else 25) for place, other in enumerate(others)]
                teller.serve([*beside[:1], (reported, chunk), *beside[1:]])
            if not same_bits(reported, alone):
                different.append((chunks, companions))
    assert not different


@pytest.mark.parametrize(("dim", "v_dim"), [(8, 7), (10, 10), (7, 5)])
def test_rows_of_no_multiple_of_16_bytes_have_the_same_bits_too(dim: int, v_dim: int) -> None:
    problem = small_problem(16, head_dim=dim, v_head_dim=v_dim)
    story = Story.random(problem, 150, 4)

    def teller() -> Teller:
        return Teller.of(torch.device("cpu"), "torch", problem)

    alone = in_chunks(150)(teller(), story)
    for name in ("one_token_last", "small", "odd", "beside_others", "halves"):
        assert same_bits(WAYS[name](teller(), story), alone), name
