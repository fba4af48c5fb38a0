"""Bytes that a layer must move and products it must compute, counted key by key."""

from dataclasses import replace

import pytest
import torch

from rocm_attn.problem import KVEncoding, Problem, Scales
from rocm_lab.bench.batch_spec import BatchSpec
from rocm_lab.bench.work import work_of
from tests.amd.bench.layers import LATENT, LAYER

WINDOWS = ((-1, 0), (0, 0), (5, 0), (100, 0), (5, 3), (0, 9), (3, -1), (-1, 2), (-1, -1))


def seen(problem: Problem, batch: BatchSpec) -> list[list[set[int]]]:
    """Returns the keys that each new token of each sequence sees."""
    left, right = (1 << 30 if keys < 0 else keys for keys in (problem.window_left, problem.window_right))
    chunk = problem.chunk or 1 << 30
    return [
        [
            {
                key
                for key in range(kv_len)
                if place - left <= key and key // chunk >= place // chunk
                if key <= place + right or (problem.custom_mask and any(key in s and place in s for s in spans))
            }
            for place in range(kv_len - q_len, kv_len)
        ]
        for kv_len, q_len, spans in zip(batch.kv_len, batch.q_len, batch.spans, strict=True)
    ]


@pytest.mark.parametrize(
    "problem",
    [
        *(replace(LAYER, window_left=left, window_right=right) for left, right in WINDOWS),
        replace(LAYER, chunk=8),
        replace(LAYER, chunk=20, window_left=3),
        replace(LAYER, custom_mask=True),
        replace(LAYER, custom_mask=True, window_left=90, window_right=3),
    ],
)
@pytest.mark.parametrize("text", ["1d1", "3d40", "2x7", "2x7+30", "1x40+3", "2d9+1x12+4", "2x320+5", "1x319", "1x1344"])
def test_bytes_and_products_are_those_of_what_tokens_see(text: str, problem: Problem) -> None:
    batch = BatchSpec.parse(text)
    keys = seen(problem, batch)
    rows = sum(len(set().union(*of_seq)) for of_seq in keys)
    pairs = sum(len(of_token) for of_seq in keys for of_token in of_seq)
    work = work_of(problem, batch)
    assert work.kv_bytes == rows * 2 * (16 + 16) * 4
    assert work.num_bytes == work.kv_bytes + batch.num_tokens * 4 * (16 + 16) * 4
    assert work.flops == 2 * 4 * (16 + 16) * pairs


def test_a_latent_row_is_read_once() -> None:
    assert work_of(LATENT, BatchSpec.parse("3d40")).kv_bytes == 3 * 40 * 24 * 4


def test_scales_of_tokens_are_read_too() -> None:
    problem = replace(LAYER, dtype=torch.bfloat16, kv_encoding=KVEncoding.E4M3FN, kv_scales=Scales.TOKEN)
    assert work_of(problem, BatchSpec.parse("3d40")).kv_bytes == 3 * 40 * 2 * (16 + 16 + 2 * 4)


def test_the_floor_is_the_slower_one_of_memory_and_products() -> None:
    work = work_of(LAYER, BatchSpec.parse("3d40"))
    assert work.lower_bound_us(bytes_per_s=1e6, flops_per_s=1e15) == pytest.approx(work.num_bytes)
    assert work.lower_bound_us(bytes_per_s=1e15, flops_per_s=1e6) == pytest.approx(work.flops)
