"""Tables that their engine writes while a step runs, and what may not move under graphs."""

from dataclasses import replace

import pytest
import torch

from rocm_attn.errors import DeviceFault, WrongState
from rocm_attn.paging.adopted import CsrSource, TableSource
from rocm_attn.paging.index_spaces import Space
from rocm_attn.step.external_step import ExternalStep
from rocm_attn.step.plan import StepPlan
from tests.amd.external.engines import VLLM, Engine, FlashInfer, SGLang


def scramble(engine: Engine) -> None:
    """Replaces the rows of the step by those of another request."""
    if isinstance(engine, SGLang):
        engine.req_to_token.copy_(engine.req_to_token.flip(0).clone())
    elif isinstance(engine, VLLM):
        for table in engine.block_tables.values():
            table.copy_(table[:2].flip(0).repeat(8, 1))
    elif isinstance(engine, FlashInfer):
        engine.indices.copy_(engine.indices.flip(0).clone())
        engine.indptr.zero_()


def write_ahead(engine: Engine) -> None:
    begin = engine.attention.begin

    def begin_and_write(step: ExternalStep) -> StepPlan:
        plan = begin(step)
        scramble(engine)
        return plan

    engine.attention.begin = begin_and_write  # type: ignore[method-assign]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("kind", "page_size"),
    [(SGLang, 1), (SGLang, 16), (VLLM, 16), (FlashInfer, 16)],
)
@pytest.mark.parametrize("graphed", [False, True])
def test_a_table_that_is_copied_may_be_written_while_its_step_runs(
    kind: type[Engine], page_size: int, graphed: bool, device: torch.device, provider: str
) -> None:
    windows, spaces = ((-1, 20), (Space.FULL, Space.SWA)) if kind is SGLang else ((-1,), (Space.FULL,))
    engine = kind(page_size, windows, spaces=spaces, device=device, provider=provider, copied=True)
    requests = engine.begun(20, 9)
    engine.attention.seal()
    graph = engine.capture(4)
    write_ahead(engine)
    for _ in range(3):
        if graphed:
            graph.run(requests)
        else:
            engine.run(requests, [1, 1])
    engine.run(requests, [3, 2])
    engine.attention.check_device()


@pytest.mark.parametrize("kind", [SGLang, VLLM, FlashInfer])
def test_a_scheduler_may_write_a_table_from_its_own_stream_after_the_event_of_the_copies(
    kind: type[Engine], device: torch.device, provider: str
) -> None:
    """The step's stream is late: a scheduler that does not wait writes before the step's rows were copied."""
    engine = kind(16, device=device, provider=provider, copied=True)
    requests = engine.begun(20, 9)
    begin, copied = engine.attention.begin, engine.attention.tables.copied

    def begin_and_write(step: ExternalStep) -> StepPlan:
        if device.type == "cpu":
            plan = begin(step)
            copied.wait()
            copied.synchronize()
            assert copied.query()
            scramble(engine)
            return plan
        torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
        plan, scheduler = begin(step), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        copied.wait(scheduler)
        with torch.cuda.stream(scheduler):
            scramble(engine)
        torch.cuda.current_stream().wait_stream(scheduler)  # this engine's next writes come after
        return plan

    engine.attention.begin = begin_and_write  # type: ignore[method-assign]
    for _ in range(3):
        engine.run(requests, [1, 1])
    engine.attention.check_device()


@pytest.mark.parametrize("kind", [SGLang, VLLM, FlashInfer])
def test_the_event_is_recorded_once_a_step_after_its_rows_were_copied(
    kind: type[Engine], device: torch.device, provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = kind(16, device=device, provider=provider, copied=True)
    request, tables = engine.admit(), engine.attention.tables
    found: list[list[int]] = []
    monkeypatch.setattr(tables, "note_copies", lambda: found.append(tables.spaces[0].entries[1, :2].tolist()))
    engine.run([request], [20])
    engine.run([request], [1])
    assert found == [request.pages[Space.FULL]] * 2


def test_tables_that_are_read_in_place_or_in_fill_have_no_such_event(device: torch.device, provider: str) -> None:
    for page_size in (1, 16):
        engine = SGLang(page_size, device=device, provider=provider)
        with pytest.raises(WrongState, match=r"no table is copied.*; build with TableSource\(copied=True\)"):
            _ = engine.attention.tables.copied


@pytest.mark.parametrize(("kind", "page_size"), [(SGLang, 1), (SGLang, 16), (VLLM, 16), (FlashInfer, 16)])
def test_a_table_that_is_not_copied_is_read_until_its_step_is_over(
    kind: type[Engine], page_size: int, device: torch.device, provider: str
) -> None:
    """The engine must not write it earlier: rows would be another request's, or are reported."""
    engine = kind(page_size, device=device, provider=provider, empty=3.0)
    requests = engine.begun(20, 9)
    write_ahead(engine)

    def step() -> None:
        engine.run(requests, [1, 1])
        engine.attention.check_device()

    with pytest.raises((AssertionError, DeviceFault)):
        step()


def test_lists_and_maps_keep_their_length_under_graphs(device: torch.device, provider: str) -> None:
    lists = FlashInfer(16, device=device, provider=provider)
    lists.attention.seal()
    lists.attention.tables.use(CsrSource(lists.indptr[:3], lists.indices))
    with pytest.raises(WrongState, match="the table of the FULL space has moved"):
        lists.attention.tables.use(CsrSource(lists.indptr, lists.indices[:-1]))
    spaces = Space.FULL, Space.SWA
    mapped = SGLang(16, (-1, 20), spaces=spaces, device=device, provider=provider)
    mapped.attention.seal()
    source = mapped.sources()[Space.SWA]
    assert isinstance(source, TableSource)
    with pytest.raises(WrongState, match="the table of the SWA space has moved"):
        mapped.attention.tables.use(replace(source, slot_map=mapped.to_swa[:-1]), Space.SWA)
