"""A step over an engine's storage belongs to one thread: calls of others are refused."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch

from rocm_attn.errors import NeverFits, WrongState
from rocm_attn.step.external_step import ExternalStep
from rocm_attn.step.head_weights import NO_HEAD_WEIGHTS
from tests.amd.external.engines import DIM, KV_HEADS, Q_HEADS, V_DIM, Engine, Request, SGLang

T = TypeVar("T")
Elsewhere = Callable[[Callable[[], T]], T]


@pytest.fixture(name="elsewhere")
def run_elsewhere() -> Iterator[Elsewhere[object]]:
    """Runs functions in another thread, always the same one, which lives until the test ends."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda call: pool.submit(call).result()


def two_requests(device: torch.device, provider: str) -> tuple[Engine, Request, Request]:
    engine = SGLang(16, device=device, provider=provider)
    first, second = engine.admit(), engine.admit()
    engine.run([first], [20])
    engine.run([second], [9])
    return engine, first, second


def decode(engine: Engine, request: Request) -> ExternalStep:
    kv_len, rows = engine.ints([request.kv_len + 1]), engine.ints([request.row])
    return ExternalStep.decode(kv_len, num_seqs=1, max_kv_len=request.kv_len + 1, rows=rows)


def test_what_another_thread_calls_while_a_step_is_begun_is_refused(
    elsewhere: Elsewhere[object], device: torch.device, provider: str
) -> None:
    engine, first, second = two_requests(device, provider)
    engine.reserve(second, second.kv_len + 1)
    made, step = engine.attention, decode(engine, second)
    (k_pages, v_pages), sources = engine.pages[0], engine.sources()
    rows = torch.zeros(1, KV_HEADS, DIM, device=device), torch.zeros(1, KV_HEADS, V_DIM, device=device)
    q, out = torch.zeros(1, Q_HEADS, DIM, device=device), torch.zeros(1, Q_HEADS, V_DIM, device=device)
    of_the_object: list[tuple[str, Callable[[], object]]] = [
        ("begin", lambda: made.begin(step)),
        ("seal", made.seal),
        ("check_device", made.check_device),
        ("set_head_weights", lambda: made.set_head_weights(0, NO_HEAD_WEIGHTS)),
        ("pages.bind", lambda: made.pages.bind(0, k_pages, v_pages)),
        ("tables.use", lambda: made.tables.use(next(iter(sources.values())))),
        ("tables.write", lambda: made.tables.write([[1]])),
    ]
    for name, call in of_the_object:
        with pytest.raises(WrongState, match=rf"{name}\(\) is refused .* another thread has begun a step"):
            elsewhere(call)
    of_the_step: list[Callable[[], object]] = [
        made.fill,
        lambda: made.layers.store(0, *rows),
        lambda: made.layers.attend(0, q, out),
        made.gate.running,
    ]
    for call in of_the_step:
        with pytest.raises(WrongState, match="belongs to another thread"):
            elsewhere(call)
    engine.run([first, second], [1, 1])


def test_a_thread_that_has_ended_has_no_step(device: torch.device, provider: str) -> None:
    engine, first, second = two_requests(device, provider)
    engine.attention.take_over()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(engine.attention.take_over).result()
    engine.run([first, second], [1, 1])


def test_a_thread_whose_step_was_refused_has_none(
    elsewhere: Elsewhere[object], device: torch.device, provider: str
) -> None:
    engine = SGLang(16, device=device, provider=provider)
    request = engine.admit()
    with pytest.raises(NeverFits, match="raise num_seqs of the bounds"):
        engine.run([request], [1], pads=17)
    elsewhere(lambda: engine.run([request], [1]))


def test_a_graph_that_was_captured_in_one_thread_is_replayed_in_another(
    elsewhere: Elsewhere[object], device: torch.device, provider: str
) -> None:
    engine, first, second = two_requests(device, provider)
    engine.attention.seal()
    graph = engine.capture(4)

    def serve() -> None:
        engine.attention.take_over()
        graph.run([first, second])

    elsewhere(serve)
    engine.attention.take_over()
    graph.run([second])
