"""A recorded step is run by a process that has compiled nothing, as `read-report` and `replay-step` are."""

from dataclasses import replace
from pathlib import Path

import torch

from rocm_attn.machine.target import known_target
from rocm_attn.watch.sampled_check import LayerTap
from rocm_lab.simulator.launcher import simulated
from tests.amd.forked import run_python
from tests.amd.offline.compiling import ONLY_OLDEST
from tests.amd.rocm.test_simulated import LAYERS, record

# From Triton 3.9 on LLVM has its assembler always.
pytestmark = list(ONLY_OLDEST)
ARCH = "gfx942"
RUN = """
import sys
from pathlib import Path
from rocm_attn.watch.evidence import StepEvidence
from rocm_lab.simulator.evidence import output_of
evidence = StepEvidence.read(Path(sys.argv[1]))
print(evidence.is_right(output_of(evidence, ())))
"""


def test_a_process_that_has_compiled_nothing_runs_recorded_code(tmp_path: Path) -> None:
    """Triton's LLVM has no assembler before it is asked for one, by a compile or otherwise."""
    path = tmp_path / "a.evidence"
    with simulated(ARCH):
        target = replace(known_target(ARCH), compute_units=2)
        record(LAYERS["heads of 64"], "prompt", torch.device("cpu"), target, path, LayerTap())
    assert run_python("-c", RUN, str(path)) == "True"
