"""A compile of Triton that hangs is named; those that end or raise are not, and other hooks keep working."""

import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import triton

from rocm_attn.kernels.compile_only import CompileEvent, hook_compiles, observe_compiles
from rocm_attn.machine.compile_watch import CompileWatch
from tests.amd.offline.offline_driver import offline
from tests.amd.offline.small_kernels import constant_kernel

SOON, NEVER = 0.05, 300.0


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Restores Triton's hooks afterwards. Returns the calls of hooks that a program has set before."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    calls: list[str] = []
    knobs = triton.knobs.runtime
    monkeypatch.setattr(knobs, "jit_cache_hook", lambda **compile: calls.append("before"))
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **compile: calls.append("after"))
    return calls


def compile_anew(value: int) -> None:
    """Compiles a variant of the kernel that no test before has compiled."""
    with offline("gfx942"):
        constant_kernel[(1,)](torch.zeros(1), value)


def test_a_compile_that_hangs_is_named_with_its_stack(
    hooks: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = threading.Event()
    compile_anew(0)  # the kernel holds the compiler from now on
    hooks.clear()
    compile_it = constant_kernel.compile

    def hangs(*source: Any, **options: Any) -> Any:
        assert said.wait(NEVER), "nothing was reported"
        return compile_it(*source, **options)

    with open(tmp_path / "said", "w+") as stream:
        watch = CompileWatch(SOON, stream=stream, on_hang=lambda sentence: said.set())
        hook_compiles(watch.begins, watch.ended)
        monkeypatch.setattr(constant_kernel, "compile", hangs)
        compile_anew(1)
        stream.seek(0)
        text = stream.read()
    assert text.startswith("rocm-attn: Triton's compile of constant_kernel has not finished after 0.05 s\n")
    assert "in hangs" in text
    assert hooks == ["before", "after"]


def test_compiles_are_counted_and_kernels_of_the_cache_are_not(hooks: list[str]) -> None:
    watch = CompileWatch(NEVER)
    hook_compiles(watch.begins, watch.ended)
    compile_anew(4)
    assert watch.num_compiled == 1
    waited = watch.seconds
    assert waited > 0
    constant_kernel.device_caches.clear()  # as in another process
    compile_anew(4)
    assert watch.num_compiled == 1
    assert watch.seconds > waited


def test_compiles_are_counted_while_another_observes_them(hooks: list[str]) -> None:
    watch, seen = CompileWatch(NEVER), list[CompileEvent]()
    hook_compiles(watch.begins, watch.ended)
    with observe_compiles(seen.append):
        compile_anew(5)
    assert (watch.num_compiled, [event.was_cached for event in seen]) == (1, [False])
    assert not watch._timers


def test_a_compile_that_has_ended_or_raised_is_not(hooks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    watch = CompileWatch(NEVER)
    hook_compiles(watch.begins, watch.ended)
    compile_anew(2)
    assert not watch._timers

    monkeypatch.setattr(constant_kernel, "compile", Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        compile_anew(3)
    reports: list[str] = []
    monkeypatch.setattr(watch, "_on_hang", reports.append)
    (thread,) = watch._timers
    watch._report_if_compiling("constant_kernel", thread)  # as its timer does, when the thread does something else
    watch.ended(was_cached=False)
    assert reports == []
    assert "_do_compile" not in {frame.f_code.co_name for frame in sys._current_frames().values()}
