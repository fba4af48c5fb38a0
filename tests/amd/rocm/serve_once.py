"""`python -m tests.amd.rocm.serve_once`: captures and serves; prints the kernels that had to be compiled as JSON."""

import json

import numpy as np
import torch

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.kernels.compile_only import CompileEvent, observe_compiles
from tests.amd.rocm.test_serving import Layers


def main() -> None:
    """Graphs of every size, then a few steps with and without one."""
    events: list[CompileEvent] = []
    device = torch.device("cuda")
    with observe_compiles(events.append):
        layers = Layers(device)
        runner = StepRunner(layers.runtime, layers.forward, recorder_for(device))
        runner.capture_all()
        rows = np.array([layers.runtime.table.admit() for _ in range(5)], np.int32)
        kv_len = np.zeros(5, np.int32)
        for new in (400, 1, 3, 1):
            q_len = np.full(5, new, np.int32)
            kv_len = kv_len + q_len
            for row, length in zip(rows.tolist(), kv_len.tolist(), strict=True):
                layers.runtime.table.reserve(row, length)
            runner.run(StepBatch(rows, kv_len, q_len, np.ones(5 * new, np.int32)))
    assert events, "nothing was looked up: the count says nothing"
    print(json.dumps([event.name for event in events if not event.was_cached]))


if __name__ == "__main__":
    main()
