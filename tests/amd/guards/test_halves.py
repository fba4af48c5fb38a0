"""The two halves of a split step: room for both beyond the request pool, and memory of their own."""

import re

import torch

from rocm_attn.guards.registry import Guards
from tests.amd.guards.ways import DEVICE_FAULT, in_each_way, run_elsewhere
from tests.amd.worlds.world import ALL_ON, World

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
