"""The contents of memory before a step change no bit of it: poison wherever a step may not read, step after step."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.amd.guards.ways import PROVIDERS, in_each_way
from tests.amd.worlds.world import World

# New tokens of up to five requests, step by step: every kind of step, at several padded sizes, large before small.
STEPS = [
    [2, 3, 4, 5, 6],  # extend
    [1, 1, 1, 1, 1],  # decode
    [1, 1],
    [3, 3, 3],  # verify: uniform, several tokens
    [1, 5, 0, 2],  # mixed, one of them idle
    [1],
    [9, 1, 1, 1, 8],  # mixed, more tokens than any graph has
    [1, 1, 1, 1, 1],
    [0, 0],
    [2, 3, 4, 5, 6],
    [],
    [1, 1, 1],
]

Before = Callable[[World], None]


def fill_with_bytes(tensor: Tensor) -> None:
    """Fills every byte with 0x7F: in floats a number near their largest, in integers far beyond every buffer."""
    tensor.view(torch.uint8).fill_(0x7F)


def fill_with_nan(tensor: Tensor) -> None:
    """Fills floats with NaN, and integers as fill_with_bytes does."""
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    else:
        fill_with_bytes(tensor)


def serve(device: torch.device, provider: str, graphs: bool, before: Before) -> list[Tensor]:
    """Returns outputs and log-sum-exps of STEPS, run twice, pads included. before: called ahead of each step

    The request with the most tokens is freed in between, and another one takes its place.
    """
    serving = World.one_layer(
        device, graphs=graphs, provider=provider, capture_sizes=(2, 8), capture_tokens=(8, 16), num_pages=80
    )
    requests = serving.admit_all(5)
    results = []
    for _ in range(2):
        for q_len in STEPS:
            before(serving)
            serving.run(requests[: len(q_len)], q_len)
            results += [tensor[: len(serving.places)].clone() for tensor in (serving.rows[0].out, serving.rows[0].lse)]
        serving.free(requests[0])
        requests[:1] = serving.admit_all(1)
    if graphs:
        assert serving.runner.counters.replays == 2 * (len(STEPS) - 3)
    return results


def without_live_tokens(serving: World) -> Tensor:
    """Returns bool [pages, page_size]: slots without a request's token, except page 0, which is always zero."""
    problem, table = serving.problems[0], serving.runtime.table
    dead = torch.ones(serving.runtime.pool.num_pages, problem.page_size, dtype=torch.bool)
    dead[0] = False
    for request in serving.requests:
        pages = table.pages_of(request.row)
        for kv_index in range(request.kv_len):
            dead[int(pages[kv_index // problem.page_size]), kv_index % problem.page_size] = False
    return dead.to(serving.runtime.device)


@pytest.mark.fast
@in_each_way
@pytest.mark.parametrize("fill", [fill_with_bytes, fill_with_nan], ids=["bytes", "nan"])
def test_a_step_writes_all_that_it_reads(
    graphs: bool, provider: str, fill: Callable[[Tensor], None], device: torch.device
) -> None:
    """Poison fills index buffers, schedules and workspace of graphs and of eager steps, and the outputs of graphs.

    Only the counts are exempt: the next step reads the result of the previous one there.
    """

    def poison(serving: World) -> None:
        memory = serving.runtime.core.memory
        for part in (memory._sealed, memory._open):
            for name, tensor in part.tensors().items():
                if name != "counts":
                    fill(tensor)
        for entry in serving.runner._graph_of_plan.values():
            fill(entry.outputs)

    clean = serve(device, provider, graphs, lambda serving: None)
    poisoned = serve(device, provider, graphs, poison)
    assert all(torch.equal(one, other) for one, other in zip(clean, poisoned, strict=True))


@pytest.mark.parametrize("sides", [*(pytest.param(side, marks=pytest.mark.nightly) for side in "kv"), "kv"])
@in_each_way
def test_no_slot_without_a_live_token_is_read(graphs: bool, provider: str, sides: str, device: torch.device) -> None:
    """NaN in K, in V and in both: in page tails, in free pages and in pages that were freed."""

    def fill_dead(value: float) -> Before:
        def before(serving: World) -> None:
            pages, dead = serving.runtime.pool.layer(0), without_live_tokens(serving)
            for side in "kv":
                getattr(pages, side)[dead] = value if side in sides else 0.0

        return before

    clean = serve(device, provider, graphs, fill_dead(0.0))
    poisoned = serve(device, provider, graphs, fill_dead(float("nan")))
    assert all(torch.equal(one, other) for one, other in zip(clean, poisoned, strict=True))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_memory_that_is_given_back_and_taken_again_is_not_read_by_graphs(provider: str, device: torch.device) -> None:
    """Larger eager steps make their buffers grow, and the next owner gets the old memory and fills it."""
    serving = World.one_layer(device, graphs=True, provider=provider, capture_sizes=(1, 4), num_pages=80)
    requests = serving.begun(3, 2, 4, 5, 6)
    held: list[Tensor] = []
    for pad_to in (None, 9, 33, 65, 140, 9):
        serving.step(requests[:3], [1, 1, 1])
        serving.step(requests[:1], [1])
        serving.step(requests, [1] * 5, pad_to)
        serving.step(requests[:2], [2, 1])
        held = held[1::2] + [torch.empty(size, device=device) for size in (4, 8, 64, 100, 256, 1000, 4096) * 4]
        for tensor in held:
            fill_with_bytes(tensor)
    assert serving.runner.counters.replays == 12
    serving.runner.check_addresses()
