"""Layers with windows, soft caps, sinks and slopes next to plain ones, through whole steps, against the reference."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from rocm_attn.errors import BadTensor, WrongState
from rocm_attn.guards.registry import Guards
from rocm_attn.paging.index_spaces import Space
from rocm_attn.problem import KVEncoding, PoolKind, Problem, Scales
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.head_weights import HeadWeights
from rocm_attn.step.kv_scales import KVScales
from rocm_attn.step.layer_kinds import LayerKinds
from rocm_attn.step.options import RuntimeOptions
from tests.amd.runtime.interrupts import every_line
from tests.amd.worlds.problems import record_layer, small_problem
from tests.amd.worlds.world import World, page_zero_is_zero

GEMMA2 = [small_problem(window_left=6, logits_soft_cap=1.5), small_problem(logits_soft_cap=1.5)]
GPT_OSS = [small_problem(window_left=5, has_sinks=True), small_problem(has_sinks=True)]
BLOOM = [small_problem(has_alibi_slopes=True)]
TOGETHER = [small_problem(window_left=5, logits_soft_cap=1.5, has_sinks=True), *BLOOM]
GEOMETRIES = [small_problem(), small_problem(num_q_heads=4, num_kv_heads=4, head_dim=32, v_head_dim=8), small_problem()]
ENCODINGS = [
    small_problem(),
    small_problem(kv_encoding=KVEncoding.E4M3FNUZ, kv_scales=Scales.TOKEN),
    small_problem(kv_encoding=KVEncoding.E5M2, kv_scales=Scales.LAYER, window_left=3),
]
FAMILIES = {
    "together": TOGETHER,
    "geometries": GEOMETRIES,
    "encodings": ENCODINGS,
    "gemma2": GEMMA2,
    "gpt_oss": GPT_OSS,
    "bloom": BLOOM,
}
# The pages of a layer that are copied whole where requests share one.
PAGES = {
    **{
        f"eight bits, {scales.name}": small_problem(kv_encoding=KVEncoding.E4M3FN, kv_scales=scales)
        for scales in (Scales.LAYER, Scales.HEAD, Scales.TOKEN)
    },
    **{f"records, {scales.name}": record_layer(scales=scales) for scales in (Scales.GROUP, Scales.FOOTER)},
    "vectorised": replace(small_problem(8, head_dim=24), pool=PoolKind.VECTORIZED),
}


@pytest.mark.fast(3, interpreted=1)
@pytest.mark.parametrize("problems", FAMILIES.values(), ids=FAMILIES)
def test_every_kind_of_layer_equals_the_oracle(problems: list[Problem], provider: str, device: torch.device) -> None:
    world = World.build(problems, device, provider)
    old, new = world.admit(), world.admit()
    world.step([old], [5])
    world.step([old, new], [1, 3])
    world.step([new, old], [1, 1], pad_to=4)
    world.step([], [])
    assert page_zero_is_zero(world)


@pytest.mark.fast(interpreted=0)
@pytest.mark.parametrize("problem", PAGES.values(), ids=PAGES)
def test_a_fork_writes_into_a_copy_of_the_last_page_which_it_shared(
    problem: Problem, provider: str, device: torch.device
) -> None:
    world = World.build([problem], device, "torch" if problem.pool is PoolKind.VECTORIZED else provider)
    (parent,) = world.begun(14)
    child = world.fork(parent, 14)
    world.step([parent, child], [1, 1])
    world.step([child, parent], [3, 1])


def test_a_step_wants_the_sinks_of_every_layer(device: torch.device) -> None:
    runtime = build_runtime(
        GPT_OSS, RuntimeOptions(provider="torch", num_pages=8, max_num_seqs=2, max_kv_len=16), device=device
    )
    world = World(runtime, GPT_OSS, torch.Generator().manual_seed(0))
    with pytest.raises(WrongState, match=r"layer 0 has sinks that were never given; call head_weights\.set"):
        world.step([world.admit()], [3])


BAD_WEIGHTS = {
    "none": (HeadWeights(), "layer 0 has sinks and got none"),
    "of another layer": (HeadWeights(torch.zeros(6), torch.zeros(6)), "alibi_slopes were given to layer 0, whose"),
    "too many": (HeadWeights(torch.zeros(7)), r"sinks has shape \[7\]; the layer needs \[6\], one per query head"),
    "one for each row": (HeadWeights(torch.zeros(6, 1)), r"sinks has shape \[6, 1\]"),
    "whole numbers": (HeadWeights(torch.zeros(6, dtype=torch.int32)), "sinks is torch.int32; it must be floating poin"),
    "on meta": (HeadWeights(torch.zeros(6, device="meta")), "sinks is on the meta device"),
    "a list": (HeadWeights([0.0] * 6), "sinks is a list; give a tensor"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("weights", "complaint"), BAD_WEIGHTS.values(), ids=BAD_WEIGHTS)
def test_weights_that_do_not_fit_are_refused_and_change_nothing(
    weights: HeadWeights, complaint: str, device: torch.device
) -> None:
    world = World.build(GPT_OSS, device, "torch")
    before = world.runtime.head_weights.of(0)
    with pytest.raises(BadTensor, match=complaint):
        world.runtime.head_weights.set(0, weights)
    assert world.runtime.head_weights.of(0) is before
    world.step([world.admit()], [3])


def test_an_interrupt_leaves_no_old_values_of_a_layer_next_to_new_ones() -> None:
    problem = small_problem(has_sinks=True, has_alibi_slopes=True, kv_encoding=KVEncoding.E5M2, kv_scales=Scales.LAYER)
    options = RuntimeOptions(provider="torch", num_pages=8, max_num_seqs=2, max_kv_len=16)
    runtime, numbers = build_runtime([problem], options, device="cpu"), itertools.count(1)

    def change() -> None:
        number = float(next(numbers))
        runtime.head_weights.set(0, HeadWeights(*torch.full((2, 6), number)))
        runtime.set_kv_scales(0, KVScales(number, number))

    change()
    for _ in every_line(change):
        weights, pages = runtime.head_weights.of(0), runtime.pool.layer(0)
        assert weights.sinks is not None
        assert weights.alibi_slopes is not None
        assert torch.equal(weights.sinks, weights.alibi_slopes)
        assert pages.k_scale == pages.v_scale


GIVEN = {
    "bfloat16": lambda: torch.arange(6, dtype=torch.bfloat16),
    "float64": lambda: torch.arange(6, dtype=torch.float64),
    "with gaps": lambda: torch.arange(12, dtype=torch.float32)[::2] / 2,
    "a parameter": lambda: torch.nn.Parameter(torch.arange(6, dtype=torch.float32)),
}


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_weights_are_copied_from_wherever_they_are(given: Callable[[], torch.Tensor], device: torch.device) -> None:
    world = World.build(GPT_OSS, device, "torch")
    owned = world.runtime.head_weights.of(0).sinks
    assert owned is not None
    with torch.inference_mode():
        world.runtime.head_weights.set(0, HeadWeights(given()))
    sinks = given()
    world.runtime.head_weights.set(0, HeadWeights(sinks))
    with torch.no_grad():
        sinks.fill_(9.0)  # the caller's own
    now = world.runtime.head_weights.of(0).sinks
    assert now is owned
    assert now.tolist() == [0, 1, 2, 3, 4, 5]
    assert (now.dtype, now.device, now.requires_grad) == (torch.float32, world.runtime.device, False)
    world.step([world.admit()], [3])


@pytest.mark.fast(interpreted=0)
def test_the_space_of_a_layer_is_said_and_does_not_follow_from_its_window(provider: str, device: torch.device) -> None:
    """Two equal layers with a window, one of which keeps all of its pages in the full space."""
    problem = small_problem(window_left=3)
    options = RuntimeOptions(
        num_pages=24, swa_pages=36, first_swa_page=24, max_num_seqs=2, max_kv_len=32, provider=provider
    )
    (selection,) = build_runtime([problem], options, device=device).selections
    spaces = [Space.FULL, Space.SWA]
    kinds = LayerKinds.of([problem, problem], spaces, [selection])
    assert (len(kinds.selections), kinds.of_layer) == (2, (0, 1))
    of_three = LayerKinds.of([problem] * 3, [*spaces, Space.FULL], [selection])
    assert (len(of_three.selections), of_three.of_layer) == (2, (0, 1, 0)), "layers that are alike share a kind"
    runtime = AttentionRuntime(kinds, options, device=device, guards=Guards())
    assert [runtime.pool.space_of_layer(layer) for layer in range(2)] == spaces
    world = World(runtime, [problem, problem], torch.Generator().manual_seed(0))
    requests = world.served([5, 9], [1, 1], [7, 2], *[[1, 1]] * 8)
    held = {space: runtime.table.num_held(requests[0].row, space) for space in spaces}
    assert held[Space.FULL] == -(-requests[0].kv_len // problem.page_size) > held[Space.SWA]
    runtime.check_device()
