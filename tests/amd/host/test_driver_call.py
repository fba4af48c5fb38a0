"""A driver call gets the arguments that Triton's launchers pass, in every release."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import triton
from triton.backends.amd.driver import HIPLauncher
from triton.backends.nvidia.driver import CudaLauncher

from rocm_attn.kernels.driver_call import ArgumentPlace, arguments_of, driver_call

STREAM, SLOT, COUNTS = 99, 1000, 2000
Handed = list[tuple[object, ...]]


@pytest.fixture(autouse=True)
def driver() -> Iterator[None]:
    """Provides the driver that launchers ask for, which a machine without a GPU lacks."""
    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(SimpleNamespace(utils=SimpleNamespace()))
    yield
    triton.runtime.driver._active = before


def launcher_of(kind: Any, **others: object) -> tuple[Any, Handed]:
    """Returns one of Triton's launchers, as after loading a kernel, and the record of its driver arguments."""
    launcher, handed = kind.__new__(kind), Handed()
    made = {
        "num_ctas": 1,
        "global_scratch_size": 0,
        "global_scratch_align": 1,
        "profile_scratch_size": 0,
        "profile_scratch_align": 1,
        "launch_cooperative_grid": False,
        "launch_pdl": False,
        "gsan_enabled": False,
        "arg_annotations": ("*", "*"),
        "kernel_signature": b"signature",
        "warp_size": 64,
        "launch": lambda *args: handed.append(args),
    }
    launcher.__dict__.update(made | others)
    return launcher, handed


def compiled_with(run: Callable[..., object]) -> SimpleNamespace:
    return SimpleNamespace(run=run, function=111, packed_metadata=(1, 2))


def launched(compiled: SimpleNamespace) -> None:
    """Launches by a driver call that was made for any stream and addresses."""
    run, template = driver_call(
        compiled, (5, 2), ArgumentPlace(0), (ArgumentPlace(1), ArgumentPlace(2), None, 7, ("bundle", 1))
    )
    constants: list[object] = []
    arguments = arguments_of(template, 3, constants)
    run(*arguments((STREAM, SLOT, COUNTS, *constants)))


WHOLE = (5, 2, 1, STREAM, 111, (1, 2), None, None, None, SLOT, COUNTS, None, 7, ("bundle", 1))


@pytest.mark.parametrize("kind", [CudaLauncher, HIPLauncher])
def test_a_driver_call_is_what_a_launcher_calls(kind: Any) -> None:
    launcher, handed = launcher_of(kind)
    run, _ = driver_call(compiled_with(launcher), (5, 2), ArgumentPlace(0), ())
    assert run is launcher.launch, "nothing of the launcher is left out"
    launched(compiled_with(launcher))
    launcher(*WHOLE)
    assert len(handed) == 2
    assert handed[0] == handed[1]


@pytest.mark.parametrize("kind", [CudaLauncher, HIPLauncher])
def test_a_launcher_that_takes_scratch_memory_is_asked_each_time(kind: Any) -> None:
    launcher, _ = launcher_of(kind, profile_scratch_size=8)
    assert driver_call(compiled_with(launcher), (1,), STREAM, ())[0] is launcher


def test_whatever_else_runs_a_kernel_is_called_as_it_is() -> None:
    handed = Handed()
    launched(compiled_with(lambda *args: handed.append(args)))
    assert handed == [WHOLE]


def test_a_launcher_that_hands_over_twice_is_called_as_it_is() -> None:
    class Twice:
        def __init__(self) -> None:
            self.launch: Callable[..., None] = lambda *args: None

        def __call__(self, *args: object) -> None:
            self.launch(*args)
            self.launch(*args)

    launcher = Twice()
    assert driver_call(compiled_with(launcher), (1,), STREAM, ())[0] is launcher
