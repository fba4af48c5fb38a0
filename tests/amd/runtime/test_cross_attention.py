"""Layers that attend to K and V which they did not store: an encoder's, in a second runtime, or another layer's."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.batch.padding import PadTo
from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch
from rocm_attn.errors import BadBatch
from rocm_attn.oracle.reference import attend_sequence
from rocm_attn.problem import UNLIMITED_WINDOW
from tests.amd.tolerances import assert_attention_close
from tests.amd.worlds.problems import small_problem
from tests.amd.worlds.world import Request, World

CROSS = replace(small_problem(has_sinks=True), window_right=UNLIMITED_WINDOW)


def encoded(device: torch.device, provider: str, lengths: Sequence[int]) -> tuple[World, list[Request]]:
    """A runtime that has stored encoder outputs of these lengths, in one step that attends to nothing."""
    world = World.build([CROSS, CROSS], device, provider)
    requests = [world.admit() for _ in lengths]
    step = world.runtime.step(world.batch(requests, lengths)).parts[0]
    for layer in range(2):
        _, k, v = world.qkv(CROSS, step)
        world.remember(layer, requests, lengths, k, v)
        step.layers.store(layer, k, v)
    world.runtime.end_step()
    return world, requests


def look_at(world: World, requests: Sequence[Request], q_len: Sequence[int]) -> None:
    """Runs a step in which q_len decoder tokens of each request attend to all of its encoder's KV."""
    lengths = [request.kv_len for request in requests]
    batch = StepBatch(*(np.array(x, np.int32) for x in ([r.row for r in requests], lengths, q_len)))
    step = world.runtime.step(batch).parts[0]
    for layer in range(2):
        q = world.random(step.token_ids.shape[0], 6, 16)
        out = torch.full_like(q, float("nan"))
        step.layers.attend(layer, q, out)
        world.check(layer, requests, q_len, q, out, None)
    world.runtime.end_step()


def stored(world: World) -> list[Tensor]:
    return [
        side.clone()
        for layer in range(2)
        for side in (world.runtime.pool.layer(layer).k, world.runtime.pool.layer(layer).v)
    ]


@pytest.mark.fast(interpreted=1)
@pytest.mark.parametrize("q_len", [[1, 1, 1], pytest.param([3, 2, 5], marks=pytest.mark.nightly), [1, 7, 0]], ids=str)
def test_decoder_tokens_see_the_whole_encoder(q_len: list[int], provider: str, device: torch.device) -> None:
    """However many tokens the decoder has by then: the encoder's lengths are its own, and nothing is stored."""
    world, requests = encoded(device, provider, [20, 9, 5])
    before = stored(world)
    for _ in range(3):
        look_at(world, requests, q_len)
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(before, stored(world), strict=True))
    world.runtime.check_device()


def test_a_prompt_that_is_longer_than_the_encoder_goes_in_chunks(device: torch.device) -> None:
    """A step counts new tokens within the KV, so one has no more of them than the encoder has keys."""
    world, requests = encoded(device, "torch", [4])
    with pytest.raises(BadBatch, match="q_len 6 and kv_len 4"):
        look_at(world, requests, [6])
    q = world.random(6, 6, 16)
    weights = world.runtime.head_weights.of(0)
    want, _ = attend_sequence(q, requests[0].k[0], requests[0].v[0], CROSS, weights)
    out = torch.full_like(q, float("nan"))
    row = np.array([requests[0].row], np.int32)
    for part in (slice(0, 4), slice(4, 6)):
        new = part.stop - part.start
        batch = StepBatch(row, np.array([4], np.int32), np.array([new], np.int32), NO_TOKEN_IDS)
        step = world.runtime.step(batch, world.runtime.plan(batch, PadTo(1))).parts[0]
        step.layers.attend(0, q[part], out[part])
        world.runtime.end_step()
    assert_attention_close(out, want, torch.float32)


# the runtime's layers: one with a window and one without, each storing K and V
STORING = [small_problem(window_left=6), small_problem()]

# the model's layers: the layers whose K and V they read; only the first two store any
READS = (0, 1, 1, 0, 1)


@pytest.mark.fast(interpreted=0)
def test_a_layer_that_stores_nothing_sees_what_another_stored(provider: str, device: torch.device) -> None:
    world = World.build(STORING, device, provider)
    old, new = world.admit(), world.admit()
    for requests, q_len in (([old], [9]), ([old, new], [1, 12]), ([new, old], [1, 1]), ([old, new], [3, 1])):
        batch = world.batch(requests, q_len)
        step = world.runtime.step(batch, world.runtime.plan(batch, PadTo(4))).parts[0]
        for layer, read in enumerate(READS):
            q, k, v = world.qkv(STORING[read], step)
            if layer < len(STORING):
                world.remember(layer, requests, q_len, k, v)
                step.layers.store(layer, k, v)
            out = torch.full_like(q, float("nan"))
            step.layers.attend(read, q, out)
            world.check(read, requests, q_len, q, out, None)
        world.runtime.end_step()
