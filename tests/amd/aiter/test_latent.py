"""Latent pools: one row a token that holds K and, in its first part, V."""

from __future__ import annotations

import pytest
import torch

from rocm_attn.errors import BadProblem, BadTensor, Unsupported
from rocm_attn.kv_pool import KVPool, page_bytes
from rocm_attn.problem import PoolKind, Problem
from rocm_attn.providers.select import select
from tests.amd.aiter.serving import CPU, GFX942, latent_problem, partly_torch, world
from tests.amd.aiter.stand_in import StandIn
from tests.amd.runtime.stepping import World


def small_latent(page_size: int = 4) -> Problem:
    return Problem(6, 1, 24, 16, torch.float32, page_size, scale=0.3, pool=PoolKind.LATENT)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_torch_serves_a_latent_pool(page_size: int) -> None:
    serving = World.build([small_latent(page_size)], CPU, "torch", num_pages=200)
    requests = [serving.admit() for _ in range(3)]
    for q_len in ([5, page_size, 7], [1, 1, 1], [2, 1, 3]):
        serving.step(requests, q_len)
    assert serving.page_zero_is_zero()


def test_a_shared_latent_page_is_copied_whole_before_it_is_written() -> None:
    serving = World.build([small_latent(4)], CPU, "torch")
    parent = serving.admit()
    serving.step([parent], [6])
    child = serving.fork(parent, 6)
    serving.runtime.table.reserve(child.row, 7)
    grandchild = serving.fork(child, 6)
    serving.step([grandchild, child, parent], [2, 1, 1])


@pytest.mark.parametrize("num_q_heads", [16, 128])
def test_mla_decode_equals_dense_attention(num_q_heads: int, release: StandIn) -> None:
    problem = latent_problem(num_q_heads)
    serving = world(problem, max_kv_len=80, selections=[partly_torch(problem)])
    requests = [serving.admit() for _ in range(3)]
    serving.step(requests, [70, 1, 13])
    release.calls.clear()
    for pad_to in (3, 4, 9):
        serving.step(requests, [1, 1, 1], pad_to=pad_to)
    assert release.calls == ["mla_decode_fwd"] * 3
    assert serving.page_zero_is_zero()


def test_a_latent_token_takes_one_row() -> None:
    problem = small_latent()
    pool = KVPool([problem], num_pages=3, device=CPU)
    assert pool.num_bytes == 3 * page_bytes([problem]) == 3 * 4 * 24 * 4
    pool.layer(0).k[2, 1] = 5.0
    assert bool((pool.layer(0).v[2, 1] == 5.0).all())


def test_v_of_a_latent_layer_must_be_part_of_k() -> None:
    serving = World.build([small_latent()], CPU, "torch")
    request = serving.admit()
    step = serving.runtime.begin_step(serving.batch([request], [2]))
    k = serving.random(step.token_ids.shape[0], 1, 24)
    with pytest.raises(BadTensor, match=r"pass k\[\.\.\., :16\] as v"):
        serving.runtime.store(0, k, k[..., :16].clone())
    serving.runtime.end_step()


def test_a_latent_pool_has_one_kv_head() -> None:
    with pytest.raises(BadProblem, match="1 KV head"):
        Problem(8, 2, 24, 16, torch.float32, 4, scale=1.0, pool=PoolKind.LATENT)


def test_triton_and_the_other_kernels_of_aiter_say_that_they_read_another_pool() -> None:
    with pytest.raises(Unsupported) as caught:
        select(latent_problem(), GFX942, "auto")
    for kernel in ("extend: triton.extend", "decode: aiter.unified_attention"):
        assert any(kernel in reason and "this layer has latent pages" in reason for reason in caught.value.reasons)
    assert any("extend: aiter.mla_prefill_fwd: not bound" in reason for reason in caught.value.reasons)


def test_mla_decode_is_refused_on_larger_pages() -> None:
    paged = Problem(16, 1, 576, 512, torch.bfloat16, 16, scale=0.05, pool=PoolKind.LATENT)
    with pytest.raises(Unsupported) as caught:
        select(paged, GFX942, "aiter")
    assert "decode: aiter.mla_decode_fwd: page_size 16 is not 1" in caught.value.reasons
