"""The work on a layer's rows around attention, as calls of a step: eager and replayed, against the reference."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rocm_attn.batch.mask import random_mask
from rocm_attn.errors import BadTensor, DeviceFault
from rocm_attn.kernels.cache.row_work import QkvWork, RopeTable, RowNorm
from rocm_attn.machine.target import detect_target
from rocm_attn.problem import PoolKind, Problem
from rocm_attn.providers.contract import LayerKernel
from rocm_attn.providers.select import select
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.step import Part
from tests.amd.worlds.problems import providers, small_problem
from tests.amd.worlds.rotating import LAYER as ROTATED
from tests.amd.worlds.rotating import MAX_KV_LEN, Rotating
from tests.amd.worlds.world import World

CPU = torch.device("cpu")


@pytest.mark.fast(interpreted=0)
def test_attention_sees_rows_that_were_normalised_and_turned(provider: str, graphs: bool, device: torch.device) -> None:
    """Chunks, then decodes with pads, then both; K of one step is read by later ones."""
    serving = Rotating.one_layer(device, problem=ROTATED, graphs=graphs, provider=provider, capture_tokens=(1, 8))
    requests = serving.served([5, 1], [1, 1], [1, 1], [3, 1])
    serving.step(requests[:1], [1], pad_to=2)
    assert (serving.runner.counters.replays > 0) == graphs


@pytest.mark.fast(interpreted=0)
def test_both_halves_of_a_split_step_turn_at_their_own_positions(provider: str, device: torch.device) -> None:
    serving = Rotating.one_layer(device, problem=ROTATED, graphs=True, provider=provider, split_steps=True)
    requests = serving.begun(5, 2, 7)
    for _ in range(2):
        serving.step(requests, [1, 1, 1], halves=True)


@pytest.mark.fast(interpreted=0)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, under the interpreter
def test_a_position_beyond_the_table_is_reported_and_harms_no_other_request(
    provider: str, device: torch.device
) -> None:
    masked = replace(ROTATED, custom_mask=True)
    serving = Rotating.one_layer(device, problem=masked, graphs=False, provider=provider)
    lost, other = serving.begun(6, 3)
    batch = serving.batch([lost], [1])
    mask = random_mask(batch.kv_len, batch.q_len, torch.Generator(device))
    serving.runner.run(replace(batch, mask=replace(mask, positions=mask.positions + MAX_KV_LEN)))
    with pytest.raises(DeviceFault, match="a position that its RopeTable does not have"):
        serving.runtime.check_device()
    serving.step([other], [2])


def test_tails_of_pages_are_zeroed_for_kernels_that_multiply_them(device: torch.device) -> None:
    problem, provider = small_problem(), providers()[0]
    chosen = select(problem, detect_target(device), provider)
    kernels = {
        kind: LayerKernel(replace(kernel.entry, masks_v=False), kernel.bound) for kind, kernel in chosen.kernels.items()
    }
    world = World.build([problem], device, provider, selections=[replace(chosen, kernels=kernels)])
    request = world.admit()
    step = world.runtime.step(world.batch([request], [6])).parts[0]
    q, k, v = world.qkv(problem, step)
    step.layers.rope_and_store(0, q, k, v, q, QkvWork())
    last_page = int(world.runtime.table.pages_of(request.row)[1])
    for side in (world.runtime.pool.layer(0).k, world.runtime.pool.layer(0).v):
        assert side[last_page, :2].any()
        assert not side[last_page, 2:].any()


LATENT = Problem(4, 1, 72, torch.float32, 4, v_head_dim=64, scale=0.1, pool=PoolKind.LATENT)


def running(problem: Problem) -> tuple[AttentionRuntime, Part]:
    """Returns a step of one sequence with three new tokens."""
    options = RuntimeOptions(num_pages=8, max_num_seqs=1, max_kv_len=16, provider="torch")
    runtime = build_runtime([problem], options, device=CPU)
    world = World(runtime, [problem], torch.Generator().manual_seed(0))
    return runtime, runtime.step(world.batch([world.admit()], [3])).parts[0]


def rope(dim: int, *, at_end: bool = False) -> RopeTable:
    return RopeTable(torch.zeros(16, dim), at_end=at_end)


def norm(dim: int) -> RowNorm:
    return RowNorm(torch.zeros(dim), 1e-6)


@pytest.mark.parametrize(
    ("problem", "work", "words"),
    [
        (small_problem(), QkvWork(rope(18)), "rope rotates 18 elements; rows have 16"),
        (small_problem(), QkvWork(q_norm=norm(17)), "q_norm has 17 weights; rows have 16 elements"),
        (small_problem(), QkvWork(k_norm=norm(8)), "k_norm has 8 weights; rows have 16 elements"),
        (small_problem(), QkvWork(v_norm=norm(24)), "v_norm has 24 weights; rows have 16 elements"),
        (LATENT, QkvWork(rope(8)), "rope rotates the first elements of a latent layer's rows.*at_end=True"),
        (LATENT, QkvWork(v_norm=norm(64)), "v_norm was given for a latent layer, whose V is part of K"),
        (LATENT, QkvWork(rope(8, at_end=True), norm(64)), "q_norm has 64 weights; rows of q have 72 elements"),
        (
            small_problem(),
            QkvWork(RopeTable(torch.zeros(15, 8))),
            "rope has 15 positions, and sequences may have 16 tokens",
        ),
        (small_problem(), None, "work is a NoneType; it must be of type QkvWork"),
        (small_problem(), QkvWork(torch.zeros(16, 8)), "rope is a Tensor; it must be of type RopeTable"),  # type: ignore[arg-type]
        (small_problem(), QkvWork(k_norm=torch.zeros(16)), "k_norm is a Tensor; it must be of type RowNorm"),  # type: ignore[arg-type]
    ],
)
def test_work_for_other_rows_is_refused(problem: Problem, work: QkvWork, words: str) -> None:
    _, step = running(problem)
    tokens = step.token_ids.shape[0]
    q = torch.zeros(tokens, problem.num_q_heads, problem.head_dim)
    k = torch.zeros(tokens, problem.num_kv_heads, problem.head_dim)
    v = k[..., : problem.v_head_dim]
    with pytest.raises(BadTensor, match=words):
        step.layers.rope_and_store(0, q, k, v, q, work)
    with pytest.raises(BadTensor, match=words):
        step.layers.rope_queries(0, q, q, work)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda s, x: s.rope_and_store(0, x(6, 8), x(2, 16), x(2, 16), x(6, 16), QkvWork(rope(8))), "q has shape"),
        (lambda s, x: s.rope_and_store(0, x(6, 16), x(2, 16), x(2, 16), x(6, 8), QkvWork()), "q_out has shape"),
        (lambda s, x: s.rope_and_store(0, x(6, 16), x(2, 8), x(2, 16), x(6, 16), QkvWork()), "k has shape"),
        (lambda s, x: s.rope_and_store(1, x(6, 16), x(2, 16), x(2, 16), x(6, 16), QkvWork()), "layer 1 does not exist"),
        (
            lambda s, x: s.rope_and_store(0, None, x(2, 16), x(2, 16), x(6, 16), QkvWork()),
            "q is a NoneType; give a tensor",
        ),
        (lambda s, x: s.rope_queries(0, [1.0], x(6, 16), QkvWork()), "q is a list; give a tensor"),
        (lambda s, x: s.rope_queries(0, torch.tensor(1.0), x(6, 16), QkvWork()), r"q has shape \[\]"),
        (lambda s, x: s.finish(0, x(6, 8)), "out has shape"),
        (lambda s, x: s.finish(0, x(6, 16), gate=[1.0]), "gate is a list; give a tensor"),
        (
            lambda s, x: s.finish(0, x(6, 16), gate=x(6, 8)),
            r"gate has shape .*; it must be \[\d+, 6, 16\] or \[\d+, 6\]",
        ),
        (lambda s, x: s.finish(0, x(6, 16), gate=x(6, 16).int()), "gate is torch.int32; it must be floating point"),
        (lambda s, x: s.finish(0, x(6, 16), gate=x(16, 6).mT), "gate has stride"),
        (lambda s, x: s.finish(0, x(6, 16), undo=rope(32)), "undo rotates 32 elements; rows have 16"),
        (lambda s, x: s.finish(0, x(6, 16), undo=RopeTable(torch.zeros(15, 8))), "undo has 15 positions, and"),
        (lambda s, x: s.finish(0, x(6, 16), undo=x(6, 16)), "undo is a Tensor; it must be of type RopeTable"),
    ],
)
def test_tensors_of_other_shapes_are_refused(call: Callable[[Any, Any], None], words: str) -> None:
    _, step = running(small_problem())
    tokens = step.token_ids.shape[0]
    with pytest.raises(BadTensor, match=words):
        call(step.layers, lambda heads, dim: torch.zeros(tokens, heads, dim))
