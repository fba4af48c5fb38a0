"""A launcher called repeatedly with the same tensors is examined twice, and then the driver launches it."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from rocm_attn.kernels.launch import does_only_launch, launch, only_launches, repeated_launches
from rocm_attn.kernels.sampling.pick_rows import launch_pick_rows
from rocm_attn.kernels.speculative.next_step import launch_next_step
from rocm_attn.step.prepared import RepeatedLauncher, stream_of
from tests.amd.host.test_host_calls import calls_in
from tests.amd.host.test_prepared_calls import STREAM, Kernel, rows

HANDLES = "function", "metadata", None, None, None


def launcher_of(kernel: Kernel) -> Callable[..., None]:
    @only_launches
    def launch_kernel(q: torch.Tensor, out: torch.Tensor, *, scale: float) -> None:
        launch(kernel, (3, 2), q, out, scale)

    return launch_kernel


def test_the_third_call_and_those_after_it_are_handed_to_the_driver() -> None:
    kernel, q, out = Kernel(("q", "out", "scale")), rows(), rows()
    again = RepeatedLauncher(lambda: STREAM, launcher_of(kernel), q, out, scale=0.5)
    for num in range(1, 6):
        again()
        assert kernel.by_triton == min(num, 2)
    assert kernel.ran == [(3, 2, 1, STREAM, *HANDLES, q.data_ptr(), out.data_ptr(), 0.5)] * 3
    assert calls_in(again) <= 12


def test_another_stream_gets_its_own_launch() -> None:
    kernel, handles = Kernel(("q", "out", "scale")), [5]
    again = RepeatedLauncher(lambda: handles[0], launcher_of(kernel), rows(), rows(), scale=0.5)
    for handles[0] in (5, 5, 5, 6, 6, 5):
        again()
    assert [ran[3] for ran in kernel.ran] == [5, 6, 6, 5]


def test_a_launcher_that_does_more_than_to_launch_is_called_each_time() -> None:
    calls = list[int]()
    again = RepeatedLauncher(lambda: STREAM, lambda q: calls.append(1), rows())
    for _ in range(4):
        again()
    assert len(calls) == 4


def test_where_there_is_no_stream_the_launcher_is_called_each_time() -> None:
    kernel = Kernel(("q", "out", "scale"))
    again = RepeatedLauncher(stream_of(torch.device("cpu")), launcher_of(kernel), rows(), rows(), scale=0.5)
    for _ in range(4):
        again()
    assert (kernel.by_triton, kernel.ran) == (4, [])


@pytest.mark.parametrize("launcher", [launch_pick_rows, launch_next_step])
def test_what_a_round_launches_is_nothing_but_launches(launcher: Callable[..., object]) -> None:
    assert does_only_launch(launcher)


def test_a_repeated_launch_is_handed_on_too() -> None:
    kernel, q, out = Kernel(("q", "out", "G")), rows(), rows()
    variant = repeated_launches(kernel)

    @only_launches
    def launch_kernel(q: torch.Tensor, out: torch.Tensor) -> None:
        variant(1)(torch.device("cpu"), (4, 1, 1), q, out, 1, num_warps=4)

    again = RepeatedLauncher(lambda: STREAM, launch_kernel, q, out)
    again()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
        again()
    before = len(kernel.ran)
    again()
    assert kernel.ran[before:] == [(4, 1, 1, STREAM, *HANDLES, q.data_ptr(), out.data_ptr(), 1)]
    assert kernel.by_triton == 1


def test_on_amd_memory_of_2_gib_is_not_reached_by_the_kept_variant_of_a_smaller_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There Triton's variant for less memory has places of 32 bits."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
    far = torch.from_numpy(np.zeros(2**31, np.int8))  # which nothing touches: torch would fill it
    for hip, variants in (("7.0", 2), (None, 1)):
        monkeypatch.setattr(torch.version, "hip", hip)
        kernel = Kernel(("q", "out", "G"))
        again = repeated_launches(kernel)(1)
        for tensor in (rows(), far[:8], rows(), far):
            again(torch.device("cpu"), (4, 1, 1), tensor, rows(), 1)
        assert kernel.by_triton == variants
