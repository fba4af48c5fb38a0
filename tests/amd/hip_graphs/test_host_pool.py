import random

import torch
from torch import Tensor

from rocm_attn.hip_graphs.host_pool import ALIGNMENT, CHUNK_BYTES, HostPool


def test_live_blocks_never_overlap_and_all_memory_comes_back() -> None:
    pool = HostPool()
    draw = random.Random(0)
    live: list[tuple[Tensor, int]] = []
    for mark in range(600):
        if live and draw.random() < 0.5:
            live.pop(draw.randrange(len(live)))
        block = pool.take(draw.choice([1, 63, 64, 65, 1000, 70_000]))
        assert block.data_ptr() % ALIGNMENT == 0
        block.fill_(mark % 251)
        live.append((block, mark % 251))
    assert all(bool((block == mark).all()) for block, mark in live)
    live.clear()
    del block
    peak = pool.bytes
    whole = pool.take(CHUNK_BYTES)
    assert pool.bytes == max(peak, CHUNK_BYTES)
    del whole


def test_more_than_a_chunk_gets_a_chunk_of_its_own_and_outlives_the_pool() -> None:
    pool = HostPool()
    pool.take(64)
    large = pool.take(CHUNK_BYTES + 1)
    del pool
    large[-1] = 7
    assert large[-1] == 7


def test_poison_reaches_what_was_taken_and_nothing_else() -> None:
    pool = HostPool()
    before = pool.take(64).fill_(1)
    pool.poison_taken()
    before.fill_(1)
    after = pool.take(64).fill_(1)
    pool.poison_taken()
    assert bool((before == 1).all())
    assert bool(after.view(torch.float32).isnan().all())
