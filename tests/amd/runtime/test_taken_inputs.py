"""Steps whose graphs take their inputs: which do, and what is told of those that were broken off or miscounted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.capture.graphs import capture_shapes
from rocm_attn.capture.made_graphs import takes_inputs
from rocm_attn.kernels.metadata.slot_layout import MOST_TAKEN
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.options import RuntimeOptions
from tests.amd.runtime.stepping import small_problem

pytestmark = pytest.mark.long
CPU = torch.device("cpu")


def test_a_step_of_more_sequences_than_one_program_takes_is_published() -> None:
    """Padded sequences may be more than its tokens: prompts are padded to all of the sequences."""
    most = MOST_TAKEN + 1
    options = RuntimeOptions(
        num_pages=most + 8,
        max_num_seqs=most,
        max_kv_len=16,
        provider="torch",
        capture_sizes=(1, most),
        capture_tokens=(64,),
    )
    runtime = build_runtime([small_problem()], options, device=CPU)
    row = runtime.table.admit()
    runtime.table.reserve(row, 2)
    one = np.array([2], np.int32)
    batch = StepBatch(np.array([row], np.int32), one, one, np.zeros(2, np.int32))
    found = dict[bool, set[bool]]()
    for shape in capture_shapes(runtime.padding):
        if shape.num_halves == 1 and 2 <= shape.num_tokens <= MOST_TAKEN:
            step = runtime.stage_as(shape, batch)
            found.setdefault(shape.num_seqs > MOST_TAKEN, set()).add(takes_inputs(runtime, step))
            runtime.abandon_step()
    assert found == {True: {False}, False: {True}}
