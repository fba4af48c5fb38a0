"""Graphs of a real model's layers, a soak, and the kernels that prewarming leaves to be compiled."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.step import Part
from rocm_lab.soak.scenario import Scenario
from rocm_lab.soak.soak import Soak
from tests.amd.forked import run_python
from tests.amd.rocm.models import Measured, layer

pytestmark = pytest.mark.gpu

SOAK_STEPS = 2000
SIZES = (1, 2, 4, 8, 16, 32)
TOKENS = (1, 64, 256)
VOCABULARY = 512


class Layers:
    """Two layers of Llama-3-8B's attention, whose q, k and v are rows of random tables."""

    def __init__(self, device: torch.device) -> None:
        self.problem = layer("Llama-3-8B")
        self.runtime = build_runtime(
            [self.problem] * 2,
            RuntimeOptions(
                num_pages=4096,
                max_num_seqs=max(SIZES),
                max_kv_len=1024,
                provider="triton",
                capture_sizes=SIZES,
                capture_tokens=TOKENS,
            ),
            device=device,
        )
        generator = torch.Generator().manual_seed(5)
        heads = (self.problem.num_q_heads, self.problem.num_kv_heads, self.problem.num_kv_heads)
        self.tables = [
            torch.randn(VOCABULARY, count, self.problem.head_dim, generator=generator).to(device, self.problem.dtype)
            for count in heads
        ]

    def forward(self, step: Part) -> Tensor:
        """[S, q_heads * head_dim]"""
        q, k, v = (table[(step.token_ids + step.positions) % VOCABULARY] for table in self.tables)
        for index in range(2):
            out = torch.empty_like(q)
            step.layers.store_and_attend(index, q, k, v, out)
            q = out
        return q[step.last_token_of_seq].flatten(1)


def test_every_graph_passes_its_check_and_replays_what_eager_gives(device: torch.device, measured: Measured) -> None:
    layers = Layers(device)
    runner = StepRunner(layers.runtime, layers.forward, recorder_for(device))
    captured = runner.capture_all()
    measured("captures", captured.lines())
    assert captured.graphs_off == ""
    assert captured.skipped == {}
    assert {bucket.key.shape.num_seqs for bucket in captured.buckets} == set(SIZES)

    random = np.random.default_rng(1)
    rows = np.array([layers.runtime.table.admit() for _ in range(11)], np.int32)
    kv_len = np.zeros(11, np.int32)
    for longest in (20, 1, 1, 7, 1):
        q_len = random.integers(1, longest + 1, 11).astype(np.int32)
        kv_len = kv_len + q_len
        for row, length in zip(rows.tolist(), kv_len.tolist(), strict=True):
            layers.runtime.table.reserve(row, length)
        ids = random.integers(1, VOCABULARY, int(q_len.sum())).astype(np.int32)
        batch = StepBatch(rows, kv_len, q_len, ids)
        replays = runner.counters.replays
        got = runner.run(batch).clone()
        assert runner.counters.replays == replays + 1
        assert torch.equal(got, runner.run_eagerly(batch))
        assert bool(got.isfinite().all())


def test_random_steps_never_differ_from_the_reference(device: torch.device, measured: Measured) -> None:
    soak = Soak(Scenario.of_seed(11), seed=11, device=device, provider="triton", dtype=torch.bfloat16)
    report = soak.run(SOAK_STEPS)
    measured("soak", report.as_dict())
    assert report.steps == SOAK_STEPS
    assert report.replays > SOAK_STEPS // 4
    assert report.worst_error <= 1


def test_a_process_that_serves_compiles_nothing_that_was_prewarmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: Measured
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "hidden_size": 4096,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "num_hidden_layers": 2,
                "max_position_embeddings": 1024,
            }
        )
    )
    sizes, tokens = (",".join(map(str, numbers)) for numbers in (SIZES, TOKENS))
    prewarm = ["prewarm", str(config), "--max-batch-size", str(max(SIZES)), "--num-pages", "4096"]
    command = [*prewarm, "--capture-sizes", sizes, "--capture-tokens", tokens, "--json"]
    first, second = (json.loads(run_python("-m", "rocm_attn.cli", *command).splitlines()[-1]) for _ in range(2))
    measured("prewarm", first)
    assert first["ran"]
    assert first["compiled"]["_decode_kernel"] >= 1
    assert second["compiled"] == {}
    assert json.loads(run_python("-m", "tests.amd.rocm.serve_once").splitlines()[-1]) == []
