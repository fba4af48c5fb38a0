"""Servers run under torch.inference_mode, or not, or in turn: memory that is made in one mode serves in the other."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from rocm_attn.errors import DeviceFault
from tests.amd.worlds.world import World

MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "inference": torch.inference_mode,
    "plain": nullcontext,
}
each_order = pytest.mark.parametrize("order", [("inference", "plain"), ("plain", "inference")], ids="-".join)


@pytest.mark.fast(interpreted=0)
@each_order
def test_what_grows_in_one_mode_serves_in_the_other(
    provider: str, graphs: bool, order: tuple[str, str], device: torch.device
) -> None:
    first, second = (MODES[mode] for mode in order)
    with torch.inference_mode(False):
        serving = World.one_layer(device, graphs=graphs, provider=provider, max_num_seqs=8, capture_sizes=(2, 4))
    with first():
        requests = serving.begun(3, 9, 1, 2)
        serving.step(requests, [1] * 4)
        # A copy of a page, and buffers above the largest graph.
        requests.append(serving.fork(requests[0], 4))
        serving.step(requests, [1] * 5)
    with second():
        serving.step(requests, [2] * 5)
        serving.step(requests[:4], [1] * 4)
        serving.step(requests, [1] * 5)
        serving.runner.check_addresses()
        if graphs:
            serving.runner.reopen((4,))
        serving.step(requests[:4], [1] * 4)
    with first():
        serving.step(requests[:4], [1] * 4)
    with second():
        serving.runtime.check_device()


def test_a_fault_is_reported_outside_of_the_mode_that_the_step_ran_in(device: torch.device) -> None:
    with torch.inference_mode():
        serving = World.one_layer(device, graphs=True)
        requests = serving.begun(3, 1)
        serving.runtime.table.full.entries.zero_()
        serving.run(requests, [1, 1])
    with pytest.raises(DeviceFault, match="a new token had no page"):
        serving.runtime.check_device()
