"""Ctrl-C or SIGTERM while an engine serves waits for the end of a step, a second one does not; memory that runs out."""

import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import reduce
from typing import Any
from unittest.mock import Mock

import pytest

from rocm_attn.errors import WrongState
from rocm_serve.engine import Engine
from rocm_serve.held_interrupts import HeldInterrupts
from rocm_serve.models.loading import LoadedModel
from rocm_serve.sampling.parameter_picker import TokensWithLogprobs
from tests.amd.runner.serving import BASE, all_pages_are_free, alone, served_to_the_end, short_requests, until_done


@pytest.fixture(autouse=True)
def _pythons_own_handler() -> Iterator[None]:
    """A shell lets what it runs in the background ignore Ctrl-C, and Python then installs no handler."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def pressing(engine: Engine, *by: signal.Signals) -> list[str]:
    """Sends these signals in the engine's third step. Returns a list of how each step ended."""
    ends, advance = list[str](), engine._advance

    def pressed() -> None:
        ends.append("halfway")
        advance()
        for number in by * (len(ends) == 3):
            signal.raise_signal(number)
        ends[-1] = "whole"

    engine._advance = pressed  # type: ignore[method-assign]
    return ends


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_wait_for_the_end_of_a_step_and_the_engine_serves_on(
    by: signal.Signals, loaded: LoadedModel
) -> None:
    engine = Engine(loaded, BASE)
    ends = pressing(engine, by)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(short_requests())
    assert ends == ["whole"] * 3
    assert not engine.has_work
    assert all_pages_are_free(engine)
    assert engine.generate(short_requests())[1] == alone(loaded, short_requests()[1])


def test_a_second_ctrl_c_does_not_wait_and_the_engine_says_that_it_is_unusable(loaded: LoadedModel) -> None:
    engine = Engine(loaded, BASE)
    ends = pressing(engine, signal.SIGTERM, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(short_requests())
    assert ends == ["whole", "whole", "halfway"]
    for call in (engine.step, lambda: engine.submit(short_requests()[0])):
        with pytest.raises(
            WrongState, match="an interrupt or an error has ended a step of this engine halfway; make another"
        ):
            call()


@pytest.mark.parametrize(
    "name", ["_run", "_scheduler._cache.admit", "_scheduler._cache.find", "_scheduler._reserve_first"]
)
def test_memory_that_runs_out_in_a_step_leaves_the_engine_usable(
    name: str, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(loaded, BASE)
    *path, method = name.split(".")
    owner = reduce(getattr, path, engine)
    numbers = [engine.submit(request) for request in short_requests()]

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            engine.step()
    assert served_to_the_end(engine, numbers) == [alone(loaded, each) for each in short_requests()]


@pytest.mark.parametrize(
    "name",
    [
        "_scheduler._enter_pages",
        "_scheduler.finish_step",
        "_scheduler._cache.leave",
        "_scheduler._cache._give_up",
        "_scheduler._table._rows.states.begin_at",
        "_masks.ask",
        "_speculation.follow",
        "_publish_step",
    ],
)
def test_memory_that_runs_out_while_tokens_are_noted_makes_the_engine_say_that_it_is_unusable(
    name: str, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that went on had other tokens, or none for some requests."""
    engine = Engine(loaded, replace(BASE, num_pages=17, max_batch_size=2))
    *path, method = name.split(".")
    owner = reduce(getattr, path, engine)
    number, *_ = [engine.submit(request) for request in short_requests(4, 30)]

    monkeypatch.setattr(owner, method, Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        until_done(engine)
    monkeypatch.undo()
    engine.cancel(number)
    with pytest.raises(WrongState, match="an interrupt or an error has ended a step of this engine halfway; make"):
        until_done(engine)


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("method", ["read", "logprobs"])
def test_tokens_that_could_not_be_read_are_read_again(
    method: str, steps_ahead: int, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, request = Engine(loaded, replace(BASE, steps_ahead=steps_ahead)), replace(short_requests()[0], logprobs=2)
    number, calls, real = engine.submit(request), list[bool](), getattr(TokensWithLogprobs, method)

    def read(*given: Any) -> Any:
        calls.append(True)
        if len(calls) == 2:
            raise MemoryError
        return real(*given)

    monkeypatch.setattr(TokensWithLogprobs, method, read)
    with pytest.raises(MemoryError):
        until_done(engine)
    until_done(engine)
    assert engine.completion(number) == alone(loaded, request)


@pytest.mark.parametrize("leave", [HeldInterrupts.let_through, lambda held: None], ids=["let through", "left"])
def test_the_applications_own_handler_gets_a_ctrl_c_once(leave: Callable[[HeldInterrupts], None]) -> None:
    got, before = list[int](), signal.getsignal(signal.SIGINT)
    own = lambda number, frame: got.append(number)  # noqa: E731
    signal.signal(signal.SIGINT, own)
    try:
        with HeldInterrupts() as held:
            signal.raise_signal(signal.SIGINT)
            assert not got
            leave(held)
        assert got == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)


def test_in_another_thread_and_where_ctrl_c_is_ignored_nothing_changes() -> None:
    seen, before = list[Any](), signal.getsignal(signal.SIGINT)

    def enter() -> None:
        with HeldInterrupts():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        enter()
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [before, signal.SIG_IGN]
