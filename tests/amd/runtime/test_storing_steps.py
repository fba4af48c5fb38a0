"""A layer of a decode step stores and attends in one launch if its kernel can, with the results of both calls."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.batch.padding import PadTo
from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.guards.registry import Guards
from rocm_attn.kernels.launch import observe_launches
from rocm_attn.machine.target import known_target
from rocm_attn.problem import UNLIMITED_WINDOW, KVEncoding, Problem, Scales
from rocm_attn.providers.contract import StoringKernel
from rocm_attn.providers.select import select
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.protocols import LayerCalls
from tests.amd.worlds.problems import providers, small_problem

with_triton = pytest.mark.skipif("triton" not in providers(), reason="only Triton's decode stores, and it cannot run")

PROBLEM = small_problem()
FIRST = 2
ALL_GUARDS = Guards()
Layer = Callable[[LayerCalls, Tensor, Tensor, Tensor, Tensor], None]


def at_once(layers: LayerCalls, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    layers.store_and_attend(0, q, k, v, out)


def over_keys(layers: LayerCalls, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """Like `at_once`, but with outputs in the memory that K comes in."""
    memory = torch.cat([k.flatten(), torch.zeros(q.numel() - k.numel(), dtype=k.dtype, device=k.device)])
    layers.store_and_attend(0, q, memory[: k.numel()].view_as(k), v, memory.view_as(q))
    out.copy_(memory.view_as(q))


def over_values(layers: LayerCalls, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """Like `at_once`, but with V in the middle of the memory that outputs go to."""
    memory = torch.zeros(q.numel(), dtype=v.dtype, device=v.device)
    given = memory[32 : 32 + v.numel()].view_as(v).copy_(v)
    layers.store_and_attend(0, q, k, given, memory.view_as(q))
    out.copy_(memory.view_as(q))


def one_by_one(layers: LayerCalls, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    layers.store(0, k, v)
    layers.attend(0, q, out)


def serve(
    layer: Layer,
    q_lens: Sequence[int],
    device: torch.device,
    guards: Guards = ALL_GUARDS,
    problem: Problem = PROBLEM,
) -> tuple[list[Tensor], AttentionRuntime, int]:
    """Two requests get q_lens new tokens in turn, in decode steps with two pads.

    Returns the outputs, the runtime, and the number of launches of the last layer.
    """
    options = RuntimeOptions(num_pages=32, max_num_seqs=4, max_kv_len=32, provider="triton")
    runtime = build_runtime([problem], options, device=device, guards=guards)
    generator = torch.Generator().manual_seed(0)
    rows = np.array([runtime.table.admit() for _ in range(2)], np.int32)
    kv_len, outs, launches = np.zeros(2, np.int32), [], 0

    def random(heads: int) -> Tensor:
        return torch.randn(step.token_ids.shape[0], heads, 16, generator=generator).to(device)

    def counted(launch: Callable[[], object]) -> None:
        nonlocal launches
        launches += 1
        launch()

    for q_len in q_lens:
        kv_len = kv_len + np.int32(q_len)
        runtime.table.reserve_all(rows, kv_len)
        batch = StepBatch(rows, kv_len, np.full(2, q_len, np.int32), NO_TOKEN_IDS)
        step = runtime.step(batch, runtime.plan(batch, PadTo(4) if q_len == 1 else None)).parts[0]
        q, k, v = random(6), random(2), random(2)
        outs.append(torch.full_like(q, float("nan")))
        launches = 0
        with observe_launches(counted):
            layer(step.layers, q, k, v, outs[-1])
        runtime.end_step()
    return outs, runtime, launches


@with_triton
@pytest.mark.parametrize("chunk", [0, PROBLEM.page_size])
def test_a_layer_that_stores_and_attends_is_both_calls_with_a_launch_less(
    chunk: int, kernel_device: torch.device
) -> None:
    q_lens, problem = [chunk or FIRST, 1, 1], replace(PROBLEM, chunk=chunk)
    outs, runtime, launches = serve(at_once, q_lens, kernel_device, problem=problem)
    others, other_runtime, more = serve(one_by_one, q_lens, kernel_device, problem=problem)
    assert (launches, more) == (2, 3)
    assert all(map(torch.equal, outs, others))
    pages, other_pages = runtime.pool.layer(0), other_runtime.pool.layer(0)
    for side, other in ((pages.raw_k, other_pages.raw_k), (pages.raw_v, other_pages.raw_v)):
        assert torch.equal(side.view(torch.int32), other.view(torch.int32)), "unused pages hold NaN"
    assert not pages.raw_k[0].any(), "pads are not stored"


@pytest.mark.fast(interpreted=0)
@with_triton
@pytest.mark.parametrize("layer", [over_keys, over_values])
def test_outputs_may_lie_where_k_or_v_came_in(
    layer: Callable[[LayerCalls, Tensor, Tensor, Tensor, Tensor], None], kernel_device: torch.device
) -> None:
    """One launch for both would write there before all of it is stored: there are two."""
    q_lens = [FIRST, 1, 1]
    outs, _, launches = serve(layer, q_lens, kernel_device)
    others, _, apart = serve(one_by_one, q_lens, kernel_device)
    assert all(map(torch.equal, outs, others))
    assert launches == apart


@with_triton
def test_an_extend_step_stores_by_itself(kernel_device: torch.device) -> None:
    _, _, launches = serve(at_once, [FIRST], kernel_device)
    _, _, apart = serve(one_by_one, [FIRST], kernel_device)
    assert launches == apart


@with_triton
def test_a_store_that_is_not_the_kernels_own_is_asked_for_by_itself(kernel_device: torch.device) -> None:
    """A disabled safeguard has its own store, which a kernel that stores would bypass."""
    _, runtime, _ = serve(at_once, [1], kernel_device, Guards().without("store_drops"))
    assert runtime.pool.layer(0).raw_k[0].any(), "that store keeps pads"


@pytest.mark.parametrize(
    ("arch", "change", "stores"),
    [
        ("sm_90", {}, True),
        ("sm_90", {"window_left": 127, "has_sinks": True}, True),
        ("sm_90", {"chunk": 4096}, True),
        ("sm_90", {"window_right": UNLIMITED_WINDOW}, False),
        ("sm_90", {"kv_encoding": KVEncoding.E4M3FN, "kv_scales": Scales.HEAD}, False),
        ("gfx942", {}, False),
        ("gfx950", {}, False),
    ],
)
def test_which_kernels_store(arch: str, change: dict[str, object], stores: bool) -> None:
    problem = replace(small_problem(16, torch.bfloat16, head_dim=128, v_head_dim=128), **change)  # type: ignore[arg-type]
    kernels = select(problem, known_target(arch), "triton").kernels
    assert isinstance(kernels[StepKind.DECODE].bound, StoringKernel) == stores
    assert not isinstance(kernels[StepKind.MIXED].bound, StoringKernel)
