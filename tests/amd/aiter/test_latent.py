"""Latent pools: one row per token that holds K and, in its first part, V."""

from __future__ import annotations

import pytest
import torch

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.errors import BadProblem, BadTensor, Unsupported
from rocm_attn.machine.target import known_target
from rocm_attn.problem import PoolKind, Problem
from rocm_attn.providers.aiter.mla_persistent import SharesOfFew
from rocm_attn.providers.select import select
from tests.amd.aiter.checks import ContractBroken
from tests.amd.aiter.serving import CPU, GFX942, latent_problem, world
from tests.amd.aiter.stand_in import StandIn
from tests.amd.worlds.world import World, page_zero_is_zero


def small_latent(page_size: int = 4) -> Problem:
    return Problem(6, 1, 24, torch.float32, page_size, v_head_dim=16, scale=0.3, pool=PoolKind.LATENT)


# Query heads -> launches of an extend step: the kernels are for 16 and for 128 heads.
LAUNCHES = {1: 1, 8: 1, 16: 1, 24: 2, 64: 4, 128: 1}


@pytest.mark.fast(1)
def test_every_kind_of_step_over_a_latent_pool_equals_dense_attention(release: StandIn) -> None:
    serve_every_kind_of_step(16, 1, release)


@pytest.mark.fast(1)
@pytest.mark.parametrize(("num_q_heads", "launches"), LAUNCHES.items())
def test_any_number_of_heads_is_served(num_q_heads: int, launches: int, aiter: StandIn) -> None:
    serve_every_kind_of_step(num_q_heads, launches, aiter)


def serve_every_kind_of_step(num_q_heads: int, launches: int, aiter: StandIn) -> None:
    serving = world(latent_problem(num_q_heads), max_kv_len=80)
    requests = [serving.admit() for _ in range(3)]
    aiter.calls.clear()
    serving.step(requests, [70, 2, 13])
    serving.step(requests, [5, 1, 0])
    assert aiter.calls == ["mla_prefill_fwd"] * 2 * launches
    aiter.calls.clear()
    for pad_to in (3, 4, 9):
        serving.step(requests, [1, 1, 1], pad_to=pad_to)
    has_schedule = num_q_heads <= 16
    assert aiter.calls == (["get_mla_metadata_v1"] * has_schedule + ["mla_decode_fwd"]) * 3
    serving.step(requests, [2, 2, 5], pad_to=4)
    assert page_zero_is_zero(serving)


# The devices have 304 and 256 compute units, and a sequence has at most 16 splits.
@pytest.mark.parametrize(("arch", "most"), [("gfx942", 18), ("gfx950", 15)])
def test_a_schedule_is_made_for_as_many_sequences_as_equal_splits_do_not_fill_the_device(arch: str, most: int) -> None:
    target = known_target(arch)
    bound = select(latent_problem(), target, "aiter").kernels[StepKind.DECODE].bound
    schedule = bound.schedule
    assert isinstance(schedule, SharesOfFew)
    for num_seqs in (most, most + 1):
        shape = PaddedShape(StepKind.DECODE, num_seqs, num_seqs)
        given = schedule.as_arguments(shape, torch.zeros(schedule.words(shape), dtype=torch.int32))
        assert ("work_info_set" in given) == (num_seqs == most)
        splits = given.get("num_kv_splits_indptr")
        assert splits is None or len(splits) == num_seqs + 1  # type: ignore[arg-type]  # a tensor


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("function", "q_len"), [("mla_decode_fwd", [1, 1]), ("mla_decode_fwd", [2, 3]), ("mla_prefill_fwd", [2, 5])]
)
def test_heads_that_a_kernel_gets_on_top_are_zero(function: str, q_len: list[int], aiter: StandIn) -> None:
    serving = world(latent_problem(5), max_kv_len=80)
    requests = serving.begun(9, 4)
    seen = aiter.noted(function)
    serving.step(requests, q_len)
    (call,) = seen
    assert not call["q"][:, 5:].any()
    assert bool(call["q"][:, :5].any())


def test_a_schedule_of_other_lengths_is_noticed(aiter: StandIn) -> None:
    """The stand-in would raise this if a schedule were kept from one step to the next."""
    serving = world(latent_problem(), max_kv_len=80)
    requests = serving.begun(40, 9)
    serving.step(requests, [1, 1])
    aiter.bodies["get_mla_metadata_v1"] = lambda call: None
    with pytest.raises(ContractBroken):
        serving.step(requests, [1, 1])


def test_more_heads_than_the_kernels_have_are_refused() -> None:
    with pytest.raises(Unsupported) as caught:
        select(latent_problem(160), GFX942, "aiter")
    assert "decode: aiter.mla_decode_fwd: 160 query heads share a KV head; at most 128 may" in caught.value.reasons


def test_v_of_a_latent_layer_must_be_part_of_k() -> None:
    serving = World.build([small_latent()], CPU, "torch")
    request = serving.admit()
    step = serving.runtime.step(serving.batch([request], [2])).parts[0]
    k = serving.random(step.token_ids.shape[0], 1, 24)
    with pytest.raises(BadTensor, match=r"pass k\[\.\.\., :16\] as v"):
        step.layers.store(0, k, k[..., :16].clone())
    serving.runtime.end_step()


def test_a_latent_pool_has_one_kv_head() -> None:
    with pytest.raises(BadProblem, match="num_kv_heads must be 1"):
        Problem(8, 2, 24, torch.float32, 4, v_head_dim=16, scale=1.0, pool=PoolKind.LATENT)
