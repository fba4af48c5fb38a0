"""Times of one layer of attention, replayed as a graph; for the report, on a correct result.

The prediction of `rocm-attn explain --cost`, if there is one, is reported with each time; a time outside of that range
refutes the model, and fails no test.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rocm_attn.batch.padding import PadTo
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.oracle.reference import attend_sequence
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.options import RuntimeOptions
from rocm_lab.cost.cost import SHAPES, CostShape, predicted
from tests.amd.rocm.models import HEADS, Measured, layer
from tests.amd.tolerances import assert_attention_close

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

REPLAYS = 20
# More than any current GPU has: a time that implies more did not measure this work.
IMPOSSIBLE_BYTES_PER_S, IMPOSSIBLE_FLOP_PER_S = 20e12, 5e15


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("model", ["Llama-3-8B", "Llama-3-70B on one of 8 GPUs"])
def test_one_layer(model: str, shape: CostShape, device: torch.device, measured: Measured) -> None:
    problem = layer(model)
    num_q_heads, num_kv_heads, head_dim = HEADS[model]
    runtime = build_runtime(
        [problem],
        RuntimeOptions(
            num_pages=1 + shape.num_seqs * (shape.kv_len // problem.page_size),
            max_num_seqs=shape.num_seqs,
            max_kv_len=shape.kv_len,
            provider="triton",
        ),
        device=device,
    )
    pages = runtime.pool.layer(0)
    for side in (pages.k, pages.v):
        side[1:].normal_()
    rows = [runtime.table.admit() for _ in range(shape.num_seqs)]
    for row in rows:
        runtime.table.reserve(row, shape.kv_len)
    runtime.table.mark_stored(np.array(rows), np.full(shape.num_seqs, shape.kv_len))
    lengths = [np.full(shape.num_seqs, tokens, np.int32) for tokens in (shape.kv_len, shape.q_len)]
    batch = StepBatch(np.array(rows, np.int32), *lengths)
    step = runtime.step(batch, runtime.plan(batch, PadTo(shape.num_seqs))).parts[0]
    q = torch.randn(step.token_ids.shape[0], num_q_heads, head_dim, device=device, dtype=problem.dtype)
    out = torch.full_like(q, float("nan"))

    def attend() -> torch.Tensor:
        step.layers.attend(0, q, out)
        return out

    recording, _ = recorder_for(device).record(attend)
    out.fill_(float("nan"))
    start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    recording.replay()
    start.record()
    for _ in range(REPLAYS):
        recording.replay()
    end.record()
    end.synchronize()
    runtime.end_step()

    held = torch.from_numpy(runtime.table.pages_of(rows[-1]))[: shape.kv_len // problem.page_size].to(device)
    k, v = (side[held].flatten(0, 1).double() for side in (pages.k, pages.v))
    last = slice((shape.num_seqs - 1) * shape.q_len + max(0, shape.q_len - 8), shape.num_seqs * shape.q_len)
    want, _ = attend_sequence(q[last], k, v, problem)
    assert_attention_close(out[last], want, problem.dtype)

    us = start.elapsed_time(end) * 1e3 / REPLAYS
    kv_bytes = 2 * shape.num_seqs * shape.kv_len * num_kv_heads * head_dim * problem.dtype.itemsize
    keys = shape.num_seqs * shape.q_len * (shape.kv_len - (shape.q_len - 1) / 2)
    measured("us", round(us, 2))
    measured("GB/s of K and V", round(kv_bytes / us / 1e3, 1))
    prediction = predicted(problem, runtime.target, shape)
    if prediction is not None:
        measured("predicted kernel", prediction.kernel)
        measured("predicted us", prediction.seconds.text(1e-6, 2))
        measured("as predicted", prediction.seconds.holds(us / 1e6))
    measured("TFLOP/s", round(4 * keys * num_q_heads * head_dim / us / 1e6, 2))
    assert kv_bytes / us * 1e6 < IMPOSSIBLE_BYTES_PER_S or kv_bytes < 256 << 20  # below that the caches may hold it
    assert 4 * keys * num_q_heads * head_dim / us * 1e6 < IMPOSSIBLE_FLOP_PER_S
