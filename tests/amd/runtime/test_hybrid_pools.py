"""Layers with a window in a separate pool: every step equals the reference while pages leave the windows.

Every page that no row holds is NaN when a step begins, including those that it has just given back, and no id is handed
out in both spaces.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from rocm_attn.errors import BadBatch, BadProblem, BadSetting, CapacityExceeded, DeviceFault, NeverFits, OutOfPages
from rocm_attn.paging.index_spaces import Space
from rocm_attn.problem import Problem
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.options import RuntimeOptions
from tests.amd.worlds.bounds import lengths_on_device, run_within_bounds
from tests.amd.worlds.problems import small_problem
from tests.amd.worlds.world import Request, World, page_zero_is_zero, poison_free_pages, take_back

pytestmark = pytest.mark.fast(interpreted=0)

WINDOWS = (7, 3)
KEPT = 3


def hybrid_problems(page_size: int) -> list[Problem]:
    """A full layer between two with windows, of other geometry."""
    wide, narrow = (
        small_problem(page_size, window_left=window, num_q_heads=heads, has_sinks=heads == 4)
        for window, heads in zip(WINDOWS, (2, 4), strict=True)
    )
    return [wide, small_problem(page_size), narrow]


def hybrid(
    device: torch.device,
    provider: str,
    *,
    page_size: int = 4,
    swa_tokens: int = 64,
    capture_sizes: Sequence[int] | None = None,
) -> World:
    return World.build(
        hybrid_problems(page_size),
        device,
        provider,
        num_pages=1 + -(-256 // page_size),
        swa_pages=-(-swa_tokens // page_size),
        swa_kept=KEPT,
        max_num_seqs=5,
        capture_sizes=capture_sizes,
    )


def assert_accounts(world: World) -> None:
    """Every page is held, still to be copied, or free, and the device's tables are the host's."""
    for table in world.runtime.table.spaces:
        held = set(np.unique(table.entries_host).tolist()) - {0} | set(table.pending.copies.values())
        assert len(held) + table.num_free_pages == table.num_usable_pages
        if not table.pending:
            assert np.array_equal(table.entries.cpu().numpy(), table.entries_host)
    full, swa = (set(np.unique(table.entries_host).tolist()) - {0} for table in world.runtime.table.spaces)
    assert not full & swa


def draw_step(world: World, random: np.random.Generator) -> tuple[list[Request], list[int]]:
    """Some requests with new tokens: decodes, drafts to verify, chunks, or all in one step."""
    some = [request for request in world.requests if random.random() < 0.8]
    kind = int(random.integers(4))
    q_len = [[1, 3, int(random.integers(1, 12)), int(random.choice([0, 1, 9]))][kind] for _ in some]
    fits = [(r, new) for r, new in zip(some, q_len, strict=True) if r.kv_len + new <= world.runtime.max_kv_len]
    return [request for request, _ in fits], [new for _, new in fits]


def change(world: World, random: np.random.Generator) -> None:
    """A request comes, goes, or is forked."""
    if len(world.requests) < 2 or (world.runtime.table.num_free_rows and random.random() < 0.4):
        world.admit()
        return
    request = world.requests[int(random.integers(len(world.requests)))]
    if random.random() < 0.3:
        world.free(request)
    elif world.runtime.table.num_free_rows:
        world.fork(request, request.kv_len)


@pytest.mark.fast(1)
@pytest.mark.parametrize("page_size", [1, 4, 5])
def test_random_steps_equal_the_oracle_while_pages_leave_the_windows(
    page_size: int, provider: str, device: torch.device
) -> None:
    world = hybrid(device, provider, page_size=page_size)
    random = np.random.default_rng(page_size)
    given_back = 0
    # The interpreter takes seconds for work that takes a GPU microseconds.
    num_steps = 16 if world.runtime.target.arch == "interpreter" else 50
    for _ in range(num_steps):
        if random.random() < 0.5:
            change(world, random)
        requests, q_len = draw_step(world, random)
        try:
            world.step(requests, q_len)
        except OutOfPages:
            world.free(world.requests[-1])
        assert_accounts(world)
        given_back += sum(not world.runtime.table.pages_of(r.row, Space.SWA).all() for r in world.requests)
    assert given_back >= num_steps // 4
    assert page_zero_is_zero(world)
    world.runtime.check_device()


def test_rejected_drafts_are_computed_again_within_what_is_kept(provider: str, device: torch.device) -> None:
    world = hybrid(device, provider)
    requests = world.begun(20, 9)
    for rejected in (3, 0, 2, 3, 3):
        world.step(requests, [4, 4])
        for request in requests:
            take_back(request, rejected)
    # The pages of the window outside of the kept ones are gone.
    world.step(requests, [1, 1])
    take_back(requests[0], KEPT + 7)
    with pytest.raises(BadBatch, match="raise swa_kept"):
        world.step(requests, [1, 1])
    world.step(requests[1:], [1])


@pytest.mark.fast(2)
@pytest.mark.parametrize("halves", [False, True], ids=["whole", "halves"])
def test_graphs_are_replayed_across_evictions(graphs: bool, halves: bool, provider: str, device: torch.device) -> None:
    serving = World.one_layer(
        device,
        graphs=graphs,
        provider=provider,
        problem=small_problem(window_left=6),
        swa_pages=24,
        capture_sizes=(4,),
        capture_tokens=(16,),
        split_steps=True,
    )
    requests = serving.admit_all(3)
    serving.step(requests, [3, 9, 4], halves=halves)
    for step in range(9):
        serving.run(requests, [1, 1, 1] if step % 3 else [2, 5, 1], halves=halves)
        serving.check_step(requests, [1, 1, 1] if step % 3 else [2, 5, 1])
        poison_free_pages(serving.runtime)
    if graphs:
        assert serving.runner.counters.replays > 6
    held = np.count_nonzero(serving.runtime.table.space(Space.SWA).entries_host, axis=1)
    assert held.max() <= 4
    serving.runtime.check_device()


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
