"""Two functions at the same time, in order with work before and after them, and as branches of one graph."""

import pytest
import torch
from torch import Tensor

from rocm_attn.hip_graphs.forked import ForkedStream
from rocm_attn.hip_graphs.torch_recorder import TorchRecorder

SLEEP = 20_000_000  # long enough that no order is due to speed


def test_a_device_without_streams_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="got cpu"):
        ForkedStream(torch.device("cpu"))


@pytest.mark.gpu
def test_both_start_after_what_came_before_and_end_before_what_comes_after() -> None:
    side = ForkedStream(torch.device("cuda", torch.cuda.current_device()))
    x = torch.zeros(1 << 16, device="cuda")
    for value in range(1, 6):
        torch.cuda._sleep(SLEEP)  # type: ignore[no-untyped-call]
        x.fill_(value)

        def slow(x: Tensor = x) -> Tensor:
            torch.cuda._sleep(SLEEP)  # type: ignore[no-untyped-call]
            return x + 1

        here, aside = side.run_both(lambda: x * 2, slow)
        joined = here + aside
        x.fill_(-100)
        assert bool((joined == 3 * value + 1).all())


@pytest.mark.gpu
def test_they_are_branches_of_a_graph() -> None:
    side = ForkedStream(torch.device("cuda", torch.cuda.current_device()))
    x = torch.ones(1 << 16, device="cuda")
    recording, outputs = TorchRecorder("cuda").record(lambda: side.run_both(lambda: x * 2, lambda: x + 1))
    for value in range(5):
        x.fill_(value)
        recording.replay()
        here, aside = (output.clone() for output in outputs)
        assert bool((here == 2 * value).all())
        assert bool((aside == value + 1).all())


@pytest.mark.gpu
def test_a_function_that_raises_leaves_no_stream_behind() -> None:
    side = ForkedStream(torch.device("cuda", torch.cuda.current_device()))
    recorder = TorchRecorder("cuda")
    x = torch.ones(4, device="cuda")
    runs = 0

    def raises_while_captured() -> Tensor:
        nonlocal runs
        runs += 1
        if runs > TorchRecorder.WARM_UPS:
            raise ZeroDivisionError
        return x + 1

    with pytest.raises(ZeroDivisionError):
        recorder.record(lambda: side.run_both(lambda: x * 2, raises_while_captured))
    recording, out = recorder.record(lambda: x + 5)
    recording.replay()
    assert out.tolist() == [6.0] * 4
