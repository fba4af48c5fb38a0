"""Layers that keep no K and V themselves and read another layer's, like the last layers of Gemma 3n."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.batch.padding import PadTo
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.step import Part
from tests.amd.runtime.stepping import World, providers, small_problem

# the runtime's layers: one with a window and one without, each storing K and V
STORING = [small_problem(window_left=6), small_problem()]

# the model's layers: the layers whose K and V they read; only the first two store any
READS = (0, 1, 1, 0, 1)


@pytest.mark.fast(interpreted=0)
@pytest.mark.parametrize("provider", providers())
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


class SharingModel:
    """Five layers of attention whose q, k and v are looked up by token; three of them read the first two's K and V."""

    def __init__(self, runtime: AttentionRuntime) -> None:
        self.runtime = runtime
        generator = torch.Generator().manual_seed(1)
        self.q, self.k, self.v = (
            torch.randn(len(READS), 32, heads, 16, generator=generator).to(runtime.device) for heads in (6, 2, 2)
        )

    def forward(self, step: Part) -> Tensor:
        """[S, layers * heads * dim]: what each sequence's last token sees in every layer."""
        outs = []
        for layer, read in enumerate(READS):
            q = self.q[layer].index_select(0, step.token_ids)
            if layer < len(STORING):
                k, v = (side[layer].index_select(0, step.token_ids) for side in (self.k, self.v))
                step.layers.store(layer, k, v)
            out = torch.empty_like(q)
            step.layers.attend(read, q, out)
            outs.append(out.flatten(1))
        return torch.cat(outs, 1).index_select(0, step.last_token_of_seq)


@pytest.mark.fast(interpreted=0)
@pytest.mark.parametrize("provider", providers())
def test_shared_layers_replay_as_they_run(provider: str, device: torch.device) -> None:
    results = []
    for recorder in (None, recorder_for(device)):
        runtime = build_runtime(
            STORING, RuntimeOptions(num_pages=40, max_num_seqs=4, max_kv_len=32, provider=provider), device=device
        )
        runner = StepRunner(runtime, SharingModel(runtime).forward, recorder)
        tokens = np.random.default_rng(2)
        rows = np.array([runtime.table.admit() for _ in range(3)], np.int32)
        kv_len = np.zeros(3, np.int32)
        outs = []
        for q_len in ([5, 9, 1], *[[1, 1, 1]] * 8):
            kv_len = kv_len + np.array(q_len, np.int32)
            runtime.table.reserve_all(rows, kv_len)
            ids = tokens.integers(0, 32, sum(q_len)).astype(np.int32)
            outs.append(runner.run(StepBatch(rows, kv_len, np.array(q_len, np.int32), ids)).clone())
        assert (runner.counters.replays > 0) == (recorder is not None)
        results.append(torch.stack(outs))
    torch.testing.assert_close(*results, atol=0, rtol=0)
