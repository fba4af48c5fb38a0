"""Small steps whose code, inputs and results go into the report, so that a laptop can run them in the simulator."""

import base64
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.machine.target import Target, detect_target
from rocm_attn.problem import Problem
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.protocols import Attended, WrongLayer
from rocm_attn.step.step import Part
from rocm_attn.watch.evidence import EvidenceFile, layer_of_step
from rocm_attn.watch.sampled_check import LayerTap
from tests.amd.rocm.models import Measured

pytestmark = [pytest.mark.gpu, pytest.mark.rocm]

LAYERS = {
    "heads of 64": Problem(2, 1, 64, torch.float16, 16, v_head_dim=64, scale=0.125),
    "heads of 128": Problem(8, 2, 128, torch.bfloat16, 16, v_head_dim=128, scale=128**-0.5, window_left=15),
}
# Tokens of a sequence and new ones: a prompt, and a decode after it.
STEPS = {"prompt": (21, 21), "decode": (22, 1)}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_small_step(layer: str, step: str, device: torch.device, measured: Measured, tmp_path: Path) -> None:
    # Two units keep the grid small: the simulator runs every program.
    target = replace(detect_target(device), compute_units=2)
    path = tmp_path / "step.evidence"
    wrong = record(LAYERS[layer], step, device, target, path, LayerTap())
    measured("evidence", base64.b64encode(zlib.compress(path.read_bytes(), 9)).decode())
    assert wrong == []


def record(problem: Problem, step: str, device: torch.device, target: Target, path: Path, outer: LayerTap) -> list[int]:
    """Runs steps up to this one, and writes its evidence. Returns the sequences that are wrong.

    outer: wraps the layers around the recorded ones
    """
    options = RuntimeOptions(num_pages=6, max_num_seqs=2, max_kv_len=48, provider="triton")
    runtime = build_runtime([problem], options, device=device, target=target)
    generator, tap = torch.Generator().manual_seed(0), LayerTap()
    heads = (problem.num_q_heads, problem.num_kv_heads, problem.num_kv_heads)
    q, k, v = (torch.randn(48, each, problem.head_dim, generator=generator).to(device, problem.dtype) for each in heads)

    def forward(part: Part) -> Tensor:
        at = part.positions
        out = torch.empty_like(q[at])
        tap.around(outer.around(part.layers)).store_and_attend(0, q[at], k[at], v[at], out)
        return out[part.last_token_of_seq].flatten(1)

    runner = StepRunner(runtime, forward, None)
    row = runtime.table.admit()
    runtime.table.reserve(row, max(kv_len for kv_len, _ in STEPS.values()))
    batches = {name: StepBatch([row], [kv_len], [new], NO_TOKEN_IDS) for name, (kv_len, new) in STEPS.items()}

    def attend(context: Callable[[], AbstractContextManager[None]]) -> Attended:
        tap.expect(0, context)
        runner.run_eagerly(batches[step])
        taken = tap.take()
        assert taken is not None
        return taken

    for name, batch in batches.items():
        if name == step:
            break
        runner.run(batch)
    found = attend(nullcontext)
    kept = WrongLayer("kept for a comparison with the simulator", 0, problem, batches[step], [0], found, attend)
    EvidenceFile(runtime, path).keep(kept)
    return layer_of_step(runtime, 0, problem, batches[step]).wrong_seqs(found.q, found.out, [0])
