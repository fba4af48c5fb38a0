"""Steps that no graph replays: those of one size share one plan and one set of views, of which the latest are kept."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rocm_attn.batch.inputs import DeviceInputs
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.capture.zero_inputs import ZeroInputs
from rocm_attn.errors import BadTensor, WrongState
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.memory import DeviceStep
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.plan import MOST_RAGGED, StepPlan
from tests.amd.worlds.problems import small_problem

CPU = torch.device("cpu")
ROOM = 64


class Served:
    """A runtime with one request, for steps of `new` tokens after `cached` ones."""

    def __init__(self) -> None:
        options = RuntimeOptions(num_pages=2 * ROOM, max_num_seqs=2, max_kv_len=ROOM, provider="torch")
        self.runtime: AttentionRuntime = build_runtime([small_problem()], options, device=CPU)
        self.row = self.runtime.table.admit()
        self.runtime.table.reserve(self.row, ROOM)

    def batch(self, new: int, cached: int = 0) -> StepBatch:
        rows, kv_len, q_len = (np.array([number], np.int32) for number in (self.row, cached + new, new))
        return StepBatch(rows, kv_len, q_len)

    def plan(self, new: int, cached: int = 0) -> StepPlan:
        plan = self.runtime.gate.planner.plan(self.batch(new, cached), None, 1)
        assert not plan.replayable
        return plan

    def views(self, plan: StepPlan) -> DeviceStep:
        (views,) = self.runtime.core.memory.device_steps(plan)
        return views


def test_the_latest_plans_are_kept_and_no_more() -> None:
    served = Served()
    # The largest first: growing buffers release all views.
    sizes = [ROOM, *range(2, 1 + MOST_RAGGED)]
    plans = {new: served.plan(new) for new in sizes}
    views = {new: served.views(plan) for new, plan in plans.items()}
    assert served.plan(ROOM) is plans[ROOM]
    assert served.views(plans[ROOM]) is views[ROOM]
    # The plan of two tokens is the least recently used.
    served.views(served.plan(40))
    for new in (ROOM, 3):
        assert served.plan(new) is plans[new]
        assert served.views(plans[new]) is views[new]
    assert served.plan(2) is not plans[2]
    assert served.views(plans[2]) is not views[2]
    memory = served.runtime.core.memory
    assert len(memory._open.views) == len(served.runtime.gate.planner._ragged) == MOST_RAGGED


def test_a_step_that_is_over_is_refused_while_another_one_of_its_size_runs() -> None:
    """Its layers would write K and V to the pages of the other step's requests."""
    served, problem = Served(), small_problem()
    runtime = served.runtime
    earlier = runtime.step(served.batch(7)).parts[0]
    kv = torch.zeros(len(earlier.token_ids), problem.num_kv_heads, problem.head_dim)
    earlier.layers.store(0, kv, kv)
    runtime.end_step()
    later = runtime.step(served.batch(7, cached=7)).parts[0]
    assert later.plan is earlier.plan
    with pytest.raises(WrongState, match="the step of these layers has ended"):
        earlier.layers.store(0, kv, kv)
    later.layers.store(0, kv, kv)
    runtime.end_step()


def test_a_chunk_in_views_of_another_one_reads_its_own_keys() -> None:
    """Attention over tokens with one V each is the mean of the visible ones."""
    served = Served()
    runtime, problem = served.runtime, small_problem()
    for first in range(0, 24, 6):
        step = runtime.step(served.batch(6, cached=first)).parts[0]
        tokens = step.token_ids.shape[0]
        q, k, v, out = ZeroInputs(CPU).of(problem, tokens)
        step.layers.store_and_attend(0, q, k, v.copy_(torch.arange(first, first + tokens)[:, None, None]), out)
        runtime.end_step()
        wanted = torch.arange(first, first + 6).float() / 2
        torch.testing.assert_close(out[:6], wanted[:, None, None].expand(6, *out.shape[1:]))


def test_what_a_batch_may_not_have_is_refused_in_a_plan_that_is_known_too() -> None:
    served = Served()
    plan = served.plan(3)
    elsewhere = DeviceInputs(kv_len=torch.ones(1, dtype=torch.int32, device="meta"))
    with pytest.raises(BadTensor, match="lengths or token ids are on meta"):
        served.runtime.gate.planner.plan(replace(served.batch(3), inputs=elsewhere), None, 1)
    assert served.plan(3) is plan
