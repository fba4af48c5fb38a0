"""The two halves of a split step: room for both beyond the request pool, and memory of their own."""

from __future__ import annotations

import re

import pytest
import torch

from rocm_attn.guards.registry import Guards
from rocm_attn.hip_graphs.size_ladder import default_ladder
from rocm_attn.kernels.metadata.slot_layout import HEADER_WORDS
from tests.amd.guards.ways import DEVICE_FAULT, in_each_way, run_elsewhere
from tests.amd.worlds.world import ALL_ON, World


def padded_beyond(device: torch.device, guards: Guards, provider: str, alignment: int, *, graphs: bool) -> World:
    """Returns a server with a pool of 5 rows, whose steps are padded to multiples of `alignment` and may be split."""
    sizes = default_ladder(5, alignment).sizes
    return World.one_layer(device, guards, graphs=graphs, provider=provider, capture_sizes=sizes, split_steps=True)


@pytest.mark.fast
@pytest.mark.parametrize("alignment", [8, 16])
@in_each_way
def test_both_halves_of_a_batch_padded_beyond_the_pool_keep_their_sequences(
    provider: str, alignment: int, graphs: bool, device: torch.device
) -> None:
    """Seed 004, for the halves: a pool of 5 rows, whose steps are padded to 8 or 16 and split in two."""
    sound = padded_beyond(device, ALL_ON, provider, alignment, graphs=graphs)
    requests = sound.admit_all(5)
    for request, length in zip(requests, [5, 1, 9, 4, 3], strict=True):
        sound.step([request], [length])
    for count in (5, 2, 4, 1, 3, 5):
        sound.step(requests[:count], [1] * count, halves=True)
    sound.step(requests, [1] * 5)

    if provider == "triton" or (provider == "csr" and device.type == "cuda"):
        return  # with the guard off, kernels write past the buffers, to memory of others
    off = run_elsewhere(
        "import torch\nfrom tests.amd.guards.test_halves import *\nfrom tests.amd.worlds.world import is_right\n"
        f"cut_short = padded_beyond(torch.device({device.type!r}), "
        f'Guards().without("capacity"), {provider!r}, {alignment}, graphs={graphs})\n'
        "cut_short.run(cut_short.admit_all(5), [1] * 5, halves=True)"
    )
    assert off.returncode != 0
    # The report's own error: a size of the second half meets the rest of the pool's size after the first.
    assert re.search(rf"size.* \(0\) must match .*\(2\)|{DEVICE_FAULT}", off.stderr), off.stderr


LENGTHS = [5, 1, 9, 4, 3]


def prefilled(device: torch.device, guards: Guards, provider: str, *, graphs: bool) -> World:
    """Returns five requests whose next steps may be split."""
    serving = World.one_layer(device, guards, graphs=graphs, provider=provider, split_steps=True)
    for request, length in zip(serving.admit_all(5), LENGTHS, strict=True):
        serving.step([request], [length])
    return serving


@in_each_way
def test_each_half_of_a_step_has_memory_of_its_own(provider: str, graphs: bool, device: torch.device) -> None:
    sound = prefilled(device, ALL_ON, provider, graphs=graphs)
    sound.step(sound.requests, [1] * 5, halves=True)

    # The echo would report that one half has overwritten the other's counts.
    off = run_elsewhere(
        "import torch\nfrom tests.amd.guards.test_halves import *\nfrom tests.amd.worlds.world import is_right\n"
        'guards = Guards().without("child_ranges").without("echo_check", "last_steps")\n'
        f"shared = prefilled(torch.device({device.type!r}), guards, {provider!r}, graphs={graphs})\n"
        "requests = shared.requests\nshared.run(requests, [1] * 5, halves=True)\n"
        "print('right' if is_right(shared, requests, [1] * 5) else 'wrong')"
    )
    assert off.stdout == "wrong\n" or re.search(DEVICE_FAULT, off.stderr), off.stdout + off.stderr


def test_the_inputs_of_the_last_two_steps_wait_in_slots_of_their_own(device: torch.device) -> None:
    """A device that is two split steps late still finds each half's inputs."""
    serving = World.one_layer(device, ALL_ON, graphs=False, split_steps=True)
    requests = serving.admit_all(5)
    serving.step(requests, [3, 1, 4, 1, 5])
    for _ in range(3):
        serving.step(requests, [1] * 5, halves=True)
    rows = [request.row for request in requests]
    lengths = [request.kv_len for request in requests]
    published = {
        tuple(slot.words[HEADER_WORDS : HEADER_WORDS + 2 * int(slot.words[0])].tolist())
        for line in serving.runtime.gate._publisher._lines
        for slot in line.ring._slots
    }
    assert published == {
        (*rows[half], *(length - ago for length in lengths[half]))
        for half in (slice(0, 3), slice(3, 5))
        for ago in (0, 1)
    }
