"""What the functions of C hand to a GPU's driver, of which a stand-in notes every call."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rocm_attn.kernels import driver_functions, packed_launches
from rocm_attn.kernels.driver_call import Place
from rocm_attn.kernels.driver_functions import DRIVER, DriverCalls, driver_calls, driver_of
from rocm_attn.kernels.packed_launches import Prepared, as_one_call, packed, put_together
from rocm_attn.step.host_ring import DriverFence, HostRing, NoFence, fence_of

STREAM, EVENT, NOT_READY, SOME_ERROR = 99, 555, 600, 700

_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    *[ctypes.c_uint] * 7,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.POINTER(ctypes.c_uint64)),
    ctypes.c_void_p,
)
_DESCRIBE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))
_OF_TWO = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_OF_ONE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_CURRENT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))
_RETAIN = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int)


class Driver:
    """A driver that runs nothing. calls: what it was asked; errors: what a function gives, by its name; 0 otherwise."""

    def __init__(self, *, context: int = 1) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.errors: dict[str, int] = {}
        self.context = context
        self.num_parameters = 3
        functions = (
            _LAUNCH(self._launch),
            _DESCRIBE(self._describe),
            _OF_TWO(lambda event, stream: self._note("record", event, stream)),
            _OF_ONE(lambda event: self._note("query", event)),
            _OF_ONE(lambda event: self._note("synchronize", event)),
            _CURRENT(self._current),
            _RETAIN(self._retain),
            _OF_ONE(self._set),
        )
        self._kept = functions
        addresses = [ctypes.cast(each, ctypes.c_void_p).value for each in functions]
        self.bytes = DRIVER.pack(*addresses, 3)

    def _note(self, name: str, *given: object) -> int:
        self.calls.append((name, *given))
        return self.errors.get(name, 0)

    def _launch(self, function: int, *given: Any) -> int:
        *sizes, stream, parameters, _ = given
        values = tuple(parameters[at][0] for at in range(self.num_parameters))
        return self._note("launch", function, tuple(sizes), stream, values)

    def _describe(self, error: int, text: Any) -> int:
        text[0] = b"an illegal memory access was encountered"
        return 0

    def _current(self, context: Any) -> int:
        context[0] = self.context
        return 0

    def _retain(self, context: Any, device: int) -> int:
        context[0] = 7
        return self._note("retain", device)

    def _set(self, context: int) -> int:
        self.context = context
        return self._note("set", context)


@pytest.fixture
def calls() -> DriverCalls:
    built = driver_calls()
    assert built is not None, "Triton's compiler of C is here: without one Triton launches nothing"
    return built


def variant(signature: Mapping[str, object], *, function: int = 111, **others: Any) -> SimpleNamespace:
    """What Triton compiles, as far as a launch looks at it."""
    metadata = {"target": SimpleNamespace(backend="cuda", warp_size=32), "launch_pdl": False}
    run = SimpleNamespace(launch=print, launch_cooperative_grid=False, global_scratch_size=0, profile_scratch_size=0)
    run.__dict__.update(others.pop("run", {}))
    metadata.update(others.pop("metadata", {}))
    made = {"run": run, "function": function, "packed_metadata": (4, 1, 1024), "src": SimpleNamespace()}
    compiled = SimpleNamespace(**(made | others), metadata=SimpleNamespace(**metadata))
    compiled.src.signature = signature
    return compiled


POINTERS: dict[str, object] = {"q": "*fp16", "out": "*fp16", "n": "i32"}


def record_of(compiled: SimpleNamespace, *arguments: object) -> bytes:
    record = packed(compiled, (5, 2), arguments)
    assert record is not None
    return record


def test_a_record_is_launched_with_the_addresses_that_are_given(calls: DriverCalls) -> None:
    driver = Driver()
    record = record_of(variant(POINTERS), Place(2), Place(1), 12)
    for addresses in ((1 << 40, 2 << 40), (3 << 40, 2**64 - 16)):
        driver.calls.clear()
        calls.launch(driver.bytes, STREAM, record, addresses)
        sizes = 5, 2, 1, 4 * 32, 1, 1, 1024
        assert driver.calls == [("launch", 111, sizes, STREAM, (addresses[1], addresses[0], 12))]


def test_records_are_launched_in_their_order_on_one_stream(calls: DriverCalls) -> None:
    driver = Driver()
    records = b"".join(record_of(variant(POINTERS, function=at), Place(1), 1 << 41, at) for at in (5, 6, 7))
    calls.launch(driver.bytes, STREAM, records, (1 << 40,))
    assert [call[1] for call in driver.calls] == [5, 6, 7]
    assert [call[4] for call in driver.calls] == [(1 << 40, 1 << 41, at) for at in (5, 6, 7)]
    calls.launch(driver.bytes, STREAM, b"", ())
    assert len(driver.calls) == 3


@pytest.mark.parametrize(
    ("kind", "value", "written"),
    [
        ("i32", -3, struct.pack("=iI", -3, 0)),
        ("i64", -3, struct.pack("=q", -3)),
        ("u64", 2**64 - 1, struct.pack("=Q", 2**64 - 1)),
        ("i1", True, struct.pack("=Q", 1)),
        ("i8", -1, struct.pack("=b", -1).ljust(8, b"\0")),
        ("fp32", 0.25, struct.pack("=fI", 0.25, 0)),
        ("fp32", 2, struct.pack("=fI", 2.0, 0)),
        ("fp64", 0.1, struct.pack("=d", 0.1)),
        ("*fp8e4nv", None, bytes(8)),
        ("*i64", 2**63 + 16, struct.pack("=Q", 2**63 + 16)),
    ],
)
def test_a_number_is_written_as_the_kernel_reads_it(
    calls: DriverCalls, kind: str, value: object, written: bytes
) -> None:
    driver = Driver()
    calls.launch(driver.bytes, STREAM, record_of(variant({"x": kind, "G": "constexpr"}), value, 16), ())
    assert driver.calls[0][4] == (*struct.unpack("=Q", written), 0, 0), "no scratch memory"


@pytest.mark.parametrize(
    ("changed", "arguments"),
    [
        ({"packed_metadata": (4, 2, 1024)}, (1, 2, 3)),
        ({"packed_metadata": (4, 1, 229 * 1024)}, (1, 2, 3)),
        ({"metadata": {"launch_pdl": True}}, (1, 2, 3)),
        ({"run": {"launch_cooperative_grid": True}}, (1, 2, 3)),
        ({"run": {"global_scratch_size": 128}}, (1, 2, 3)),
        ({"run": {"profile_scratch_size": 128}}, (1, 2, 3)),
        ({"run": {"gsan_enabled": True}}, (1, 2, 3)),
        ({}, (1, 2)),
        ({}, (1, 2, 2**31)),
        ({}, (1, 2, 0.5)),
        ({}, (1, 2, "n")),
        ({}, (torch.zeros(1), 2, 3)),
        ({}, (1, 2, Place(1))),
    ],
)
def test_what_is_no_plain_launch_is_not_written_down(changed: dict[str, Any], arguments: tuple[object, ...]) -> None:
    assert packed(variant(POINTERS), (1,), (1, 2, 3)) is not None
    assert packed(variant(POINTERS, **changed), (1,), arguments) is None


@pytest.mark.parametrize("kind", ["tensordesc<fp16[64, 64]>", "nvTmaDesc", ("*fp16", "i32"), "fp16", "i128"])
def test_a_parameter_of_another_kind_is_not_written_down(kind: object) -> None:
    assert packed(variant({"q": kind}), (1,), (1,)) is None


def test_whatever_else_runs_a_kernel_is_not_written_down() -> None:
    whole = variant(POINTERS)
    for name in ("run", "metadata", "packed_metadata", "src"):
        parts = {key: value for key, value in vars(whole).items() if key != name}
        assert packed(SimpleNamespace(**parts), (1,), (1, 2, 3)) is None
    assert packed(SimpleNamespace(**(vars(whole) | {"run": print})), (1,), (1, 2, 3)) is None


def test_a_kernel_of_more_parameters_than_the_functions_take_is_not_written_down(calls: DriverCalls) -> None:
    driver = Driver()
    driver.num_parameters = 256
    most = {f"x{at}": "i32" for at in range(254)}
    calls.launch(driver.bytes, STREAM, record_of(variant(most), *range(254)), ())
    assert driver.calls[0][4] == (*range(254), 0, 0)
    assert packed(variant({**most, "last": "i32"}), (1,), range(255)) is None


def test_what_the_driver_refuses_is_raised_in_its_words_and_nothing_follows(calls: DriverCalls) -> None:
    driver = Driver()
    driver.errors["launch"] = SOME_ERROR
    record = record_of(variant(POINTERS), Place(1), 2, 3)
    with pytest.raises(RuntimeError, match="error 700: an illegal memory access was encountered"):
        calls.launch(driver.bytes, STREAM, record + record, (16,))
    assert len(driver.calls) == 1


def test_bad_records_and_arguments_are_refused(calls: DriverCalls) -> None:
    driver = Driver()
    record = record_of(variant(POINTERS), Place(2), 2, 3)
    for records, addresses in ((record[:-1], (1, 2)), (record[:20], (1, 2)), (record, (1,))):
        with pytest.raises(ValueError, match="records end within a launch, or name an address that was not given"):
            calls.launch(driver.bytes, STREAM, records, addresses)
    with pytest.raises(ValueError, match="too many addresses"):
        calls.launch(driver.bytes, STREAM, record, tuple(range(65)))
    with pytest.raises(TypeError, match="launch takes a driver"):
        calls.launch(driver.bytes, STREAM, bytearray(record), (1, 2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="launch takes a driver"):
        calls.launch(driver.bytes, STREAM, record)
    with pytest.raises(TypeError, match="driver_of"):
        calls.launch(b"", STREAM, record, (1, 2))
    with pytest.raises((TypeError, OverflowError)):
        calls.launch(driver.bytes, STREAM, record, (-1, 2))
    assert not driver.calls


def test_a_thread_without_a_context_enters_the_devices_once(calls: DriverCalls) -> None:
    driver = Driver(context=0)
    record = record_of(variant(POINTERS), 1, 2, 3)
    for _ in range(2):
        calls.launch(driver.bytes, STREAM, record, ())
    assert [call[0] for call in driver.calls] == ["retain", "set", "launch", "launch"]
    assert driver.calls[:2] == [("retain", 3), ("set", 7)]


def test_an_event_is_waited_for_only_where_it_was_not_reached(calls: DriverCalls) -> None:
    driver = Driver()
    calls.record(driver.bytes, EVENT, STREAM)
    assert calls.reached(driver.bytes, EVENT)
    calls.wait_for(driver.bytes, EVENT)
    assert driver.calls == [("record", EVENT, STREAM), ("query", EVENT), ("query", EVENT)]
    driver.errors["query"] = NOT_READY
    assert not calls.reached(driver.bytes, EVENT)
    calls.wait_for(driver.bytes, EVENT)
    assert driver.calls[-1] == ("synchronize", EVENT)
    driver.errors |= {"synchronize": SOME_ERROR, "query": SOME_ERROR, "record": SOME_ERROR}
    asked: list[Callable[[], object]] = [
        lambda: calls.wait_for(driver.bytes, EVENT),
        lambda: calls.reached(driver.bytes, EVENT),
        lambda: calls.record(driver.bytes, EVENT, STREAM),
    ]
    for ask in asked:
        with pytest.raises(RuntimeError, match="error 700"):
            ask()
    driver.errors["query"] = NOT_READY
    with pytest.raises(RuntimeError, match="error 700"):
        calls.wait_for(driver.bytes, EVENT)


@pytest.fixture
def on_stand_in(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Launches that are put together go to a stand-in."""
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(packed_launches, "driver_of", lambda backend, device: driver.bytes)
    return driver


def made(launches: Sequence[Prepared], *addresses: int) -> int:
    """Put launches together and make them; of how many calls they are."""
    together, constants = put_together(launches, len(addresses))
    for run, arguments in together:
        run(*arguments((STREAM, *addresses, *constants)))
    return len(together)


def test_launches_that_are_put_together_are_one_call(on_stand_in: Driver) -> None:
    launches = [(variant(POINTERS, function=at), (at,), (Place(1), Place(2), at)) for at in (1, 2, 3)]
    assert made(launches, 1 << 40, 2 << 40) == 1
    assert [(call[1], call[4]) for call in on_stand_in.calls] == [(at, (1 << 40, 2 << 40, at)) for at in (1, 2, 3)]


def test_what_was_put_together_apart_is_made_by_one_call(on_stand_in: Driver) -> None:
    parts = []
    for at in (1, 2):
        ((run, arguments),), constants = put_together([(variant(POINTERS, function=at), (at,), (Place(1), 2, at))], 1)
        parts.append((run, arguments((STREAM, at << 40, *constants))))
    ((run, given),) = as_one_call(tuple(parts))
    run(*given)
    assert [(call[1], call[3], call[4]) for call in on_stand_in.calls] == [
        (at, STREAM, (at << 40, 2, at)) for at in (1, 2)
    ]
    by_triton = (print, (1, 2))
    assert as_one_call((parts[0], by_triton)) == (parts[0], by_triton)
    assert as_one_call((by_triton, by_triton)) == (by_triton, by_triton)
    assert as_one_call((parts[0],)) == (parts[0],)


def test_one_launch_that_is_not_plain_leaves_all_to_triton(on_stand_in: Driver) -> None:
    handed: list[tuple[object, ...]] = []
    other = variant(POINTERS, function=2, run={"launch_cooperative_grid": True})
    for compiled in (first := variant(POINTERS, function=1), other):
        compiled.run = lambda *given: handed.append(given)
    assert made([(first, (1,), (Place(1), 2, 3)), (other, (1,), (Place(1), 2, 3))], 16) == 2
    assert [given[4] for given in handed] == [1, 2]
    assert not on_stand_in.calls


@pytest.mark.parametrize("lacking", ["driver_of", "driver_calls"])
def test_without_a_driver_or_a_compiler_all_is_left_to_triton(
    on_stand_in: Driver, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    monkeypatch.setattr(packed_launches, lacking, lambda *of_what: None)
    handed: list[tuple[object, ...]] = []
    compiled = variant(POINTERS, run={"launch": lambda *given: handed.append(given)})
    compiled.run = lambda *given: handed.append(given)
    assert made([(compiled, (1,), (Place(1), 2, 3))] * 2, 16) == 2
    assert [given[-3:] for given in handed] == [(16, 2, 3)] * 2


def test_a_driver_that_was_not_loaded_is_not_there() -> None:
    if torch.cuda.is_available():
        pytest.skip("it is")
    assert driver_of("cuda", 0) is None
    assert driver_of("hip", 0) is None
    assert driver_of("another", 0) is None


def test_a_library_that_is_loaded_is_found_by_its_name() -> None:
    assert driver_functions._loaded("libc.so").rsplit("/", 1)[-1].startswith("libc.so")
    assert not driver_functions._loaded("libnever.so")


class _Events:
    """torch's event, which has a handle once it was recorded."""

    def __init__(self, device: object) -> None:
        self.event_id = 0

    def record(self) -> None:
        self.event_id = EVENT


def test_a_fence_is_torchs_event_which_the_driver_is_asked_for(
    calls: DriverCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, device = Driver(), torch.device("cuda", 0)
    monkeypatch.setattr(torch, "Event", _Events)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM + index, raising=False)
    fence = DriverFence(device, calls, driver.bytes)
    fence.synchronize()
    assert fence.query(), "one that was never recorded has been reached"
    fence.record()
    assert not driver.calls, "torch makes the event"
    fence.record()
    assert driver.calls == [("record", EVENT, STREAM)]
    driver.errors["query"] = NOT_READY
    assert not fence.query()
    fence.synchronize()
    assert driver.calls[-1] == ("synchronize", EVENT)


def test_a_ring_has_fences_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(fence_of(torch.device("cpu")), NoFence)
    monkeypatch.setattr(torch, "Event", _Events)
    monkeypatch.setattr("rocm_attn.step.host_ring.driver_of", lambda backend, device: None)
    assert isinstance(fence_of(torch.device("cuda", 0)), _Events), "without the driver's functions, torch's event"
    monkeypatch.setattr("rocm_attn.step.host_ring.driver_of", lambda backend, device: bytes(DRIVER.size))
    assert isinstance(fence_of(torch.device("cuda", 0)), DriverFence)
    assert isinstance(HostRing(torch.device("cpu"))._done[0], NoFence)
