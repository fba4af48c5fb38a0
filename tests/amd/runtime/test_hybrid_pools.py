"""Layers with a window in a separate pool, whose lengths only the device knows, and pools that cannot be."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.errors import BadProblem, BadSetting, CapacityExceeded, DeviceFault, NeverFits
from rocm_attn.paging.index_spaces import Space
from rocm_attn.problem import Problem
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.options import RuntimeOptions
from tests.amd.worlds.bounds import lengths_on_device, run_within_bounds
from tests.amd.worlds.problems import small_problem
from tests.amd.worlds.world import World, poison_free_pages

pytestmark = pytest.mark.fast(interpreted=0)


def test_lengths_that_only_the_device_knows_give_nothing_back_until_the_host_knows(
    provider: str, device: torch.device
) -> None:
    serving = World.one_layer(
        device, graphs=False, provider=provider, problem=small_problem(window_left=6), swa_pages=30
    )
    runtime, (request,) = serving.runtime, serving.admit_all(1)
    serving.step([request], [20])
    for _ in range(4):
        # The bound is 12 tokens too long: a window before it would be another one.
        run_within_bounds(serving, [request], [1], kv_room=[12])
        serving.check_step([request], [1])
        poison_free_pages(runtime)
    held = np.count_nonzero(runtime.table.pages_of(request.row, Space.SWA))
    assert held == 9
    runtime.table.evict(np.array([request.row], np.int32), np.array([request.kv_len], np.int32))
    # 24 - 6 = 18 is in page 4, and 36 tokens have room
    assert np.count_nonzero(runtime.table.pages_of(request.row, Space.SWA)) == 5
    poison_free_pages(runtime)
    run_within_bounds(serving, [request], [1], kv_room=[3])
    serving.check_step([request], [1])
    # The token at 19 is in page 4 and sees 13, in a page that was given back.
    run_within_bounds(serving, [request], [1], kv_room=[3], inputs=lambda _: lengths_on_device(serving, [20]))
    with pytest.raises(DeviceFault, match="the first key that a new token sees was in a page"):
        runtime.check_device()


def build(device: torch.device, problems: Sequence[Problem], **settings: int) -> AttentionRuntime:
    sizes = {"num_pages": 8, "max_num_seqs": 2, "max_kv_len": 16, **settings}
    return build_runtime(problems, RuntimeOptions(provider="torch", **sizes), device=device)  # type: ignore[arg-type]


def test_a_window_of_the_token_itself_holds_the_pages_of_new_tokens_alone(provider: str, device: torch.device) -> None:
    problem = small_problem(window_left=0)
    options = RuntimeOptions(num_pages=9, max_num_seqs=2, max_kv_len=32, swa_pages=9, provider=provider)
    runtime = build_runtime([problem], options, device=device)
    row, kv_len = runtime.table.admit(), 0
    for new in (9, 1, 1, 6, 1):
        runtime.table.evict([row], [kv_len])
        runtime.table.reserve(row, kv_len + new)
        kv_len += new
        poison_free_pages(runtime)
        with runtime.step(StepBatch([row], [kv_len], [new], range(new))) as step:
            tokens = len(step.parts[0].token_ids)
            q, k, v = (torch.randn(tokens, heads, 16, device=device) for heads in (6, 2, 2))
            out = torch.empty_like(q)
            step.parts[0].layers.store_and_attend(0, q, k, v, out)
        assert torch.equal(out[:new], v.repeat_interleave(3, 1)[:new])
    runtime.check_device()
    assert runtime.table.num_held(row, Space.SWA) == 1


def test_a_pool_for_windows_that_cannot_be_is_refused(device: torch.device) -> None:
    windowed = small_problem(window_left=4)
    with pytest.raises(BadProblem, match="no layer has a window, so the SWA space would be empty; leave swa_pa"):
        build(device, [small_problem()], swa_pages=4)
    with pytest.raises(CapacityExceeded, match="swa_pages is 1 and the first page handed out is 1; at least one page"):
        build(device, [windowed], swa_pages=1)
    with pytest.raises(BadSetting, match="swa_kept is -1"):
        build(device, [windowed], swa_pages=4, swa_kept=-1)
    table = build(device, [windowed], swa_pages=4).table
    row = table.admit()
    with pytest.raises(NeverFits, match=r"4 pages of the SWA space for 16 tokens and there are 3; raise swa_pages"):
        table.reserve(row, 16)
