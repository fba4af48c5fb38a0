"""No side door: every public callable that reaches pages, rows, states or graphs is called by a random tester."""

from collections.abc import Iterator
from types import CodeType
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_lab.soak.scene import Scene
from rocm_lab.soak.setting import STATES_IN_GRAPHS
from tests.amd.random_calls import doors
from tests.amd.random_calls.engine_scene import EngineScene
from tests.amd.random_calls.engine_step_verbs import capture, recorded_fill, seal
from tests.amd.random_calls.engine_verbs import engine_prefill
from tests.amd.random_calls.pairs import ENGINE, SERVER, STATES, drive
from tests.amd.random_calls.step_calls import step_whole
from tests.amd.random_calls.verbs import prefill

# The verbs that others continue from.
FIRST = {SERVER.kinds: "export_pages", ENGINE.kinds: "seal"}

# A callable, or the class of some -> why no tester calls it. Callables that are driven, or are gone, must not be here.
_GATE = "steps, runners and tables call it; each verb goes through it"
_SELECTS = "no layer of these runs selects keys: tests/amd/guards/test_selections.py"
_FOLDS = "no layer of these runs has rows of several tokens: tests/amd/runtime/test_compressed_layers.py"
_VALUES = "it touches nothing that a runtime or an engine holds"
_HALVES = "no step of these runs is split: tests/amd/runtime/test_split_steps.py"
_HOST = "no page of these runs moves to host memory: tests/amd/integrations/test_host_pages.py"
_SERVER = "it is driven by the soak, and by the tests of tests/amd/runner and tests/amd/server"
NOT_DRIVEN: dict[str, str] = {
    **dict.fromkeys(("StepGate", "RoundTree", "StoredTokens", "BatchChecks", "PageTable", "FaultReports"), _GATE),
    **dict.fromkeys(
        ("HybridKVPool", "StatePool", "LayerPages", "DeviceStep", "ExternalGate", "AdoptedTables.note_copies"), _GATE
    ),
    **{
        f"{layers}.{name}": _SELECTS
        for layers in ("StepLayers", "WrappedLayers")
        for name in ("select", "select_among", "store_index", "give_selection", "attend_selected")
    },
    "AdoptedPages.index": _SELECTS,
    **dict.fromkeys(("Step.num_first", "Step.num_first_tokens"), _HALVES),
    **dict.fromkeys(("StepLayers.fold", "WrappedLayers.fold", "AdoptedPages.state"), _FOLDS),
    **dict.fromkeys(("among", "known_target", "default_ladder", "eager_steps_before_capture"), _VALUES),
    **dict.fromkeys(("guards_from_settings", "pick_tokens", "merge_states", "arithmetic_id"), _VALUES),
    **dict.fromkeys(("HostPages", "HostMemory"), _HOST),
    "load_model": _SERVER,
    "compile_forward": "torch compiles for seconds; what it calls is driven: CompiledLayers",
    **dict.fromkeys(
        ("Engine", "AsyncEngine", "RankedEngine", "RequestStream", "SampledCheck", "FlightRecorder"), _SERVER
    ),
    **dict.fromkeys(("EngineClient", "EngineProcess"), _SERVER),
    "CompiledForward": "torch compiles for seconds; what it calls is driven: CompiledLayers",
    **dict.fromkeys(("Sampler", "CaptureCheck", "Watchdog", "LogAndCount", "RanksOfGroup"), _VALUES),
}


def scenes(device: torch.device) -> tuple[list[object], list[Tensor | np.ndarray]]:
    """Returns objects that callers hold, of every kind, and the tensors and arrays that only the gate may reach."""
    plain, latent, states = (Scene(kind, 1, device, None) for kind in ("graphs", "latent", STATES_IN_GRAPHS))
    for scene in (plain, latent, states):
        prefill(scene)
    while plain.over is None:
        step_whole(plain)
    engine = EngineScene("in place", 1, device, None)
    engine_prefill(engine)
    while not engine.is_sealed:
        seal(engine)
    capture(engine)
    while not engine.fills:
        recorded_fill(engine)
    movers = [plain.movers.exporter, plain.movers.importer, engine.movers.exporter]
    held = [plain.runner, plain.compiled, plain.over, plain.runtime, latent.runtime, states.runtime, *movers]
    held += [latent.runtime.expanded_prefill(0), engine.attention, engine.fills[0][1]]
    tensors: list[Tensor | np.ndarray] = [*engine.kv, engine.tables.entries]
    for core in engine.attention.cores.values():
        tensors += core.sealed_tensors().values()
    for scene in (plain, latent):
        table = scene.runtime.table
        tensors += [*scene.runtime.seals.tensors().values(), table.full.entries_host, table.tokens.first_writable]
    tensors += [states.runtime.states.memory, states.runtime.states.headers, states.runtime.states.tags]
    return held, tensors


def callables(device: torch.device) -> dict[str, list[CodeType]]:
    """The doors that there are, with their code."""
    held, tensors = scenes(device)
    storages = {doors.storage_of(tensor) for tensor in tensors} - {0}
    found: dict[str, list[CodeType]] = {**doors.public_functions()}
    for cls, is_door in doors.public_classes(held, storages).items():
        if is_door:
            found |= doors.doors_of(cls)
    return found


class Driven(NamedTuple):
    """The callables that the tester has called, and its findings."""

    called: set[str]
    findings: list[str]


def drive_all(device: torch.device) -> Iterator[str]:
    """The pairs of every run, and each verb but those of states a few times in a row. Yields the findings."""
    for side in (SERVER, ENGINE):
        for kind, pairs in side.pairs().items():
            in_a_row = [(FIRST[side.kinds], *[one] * 6) for one, other in pairs if one == other]
            yield from drive(side, kind, [*side.part(kind, 0), *in_a_row], 1, device).findings
    for kind in STATES.kinds:
        yield from drive(STATES, kind, STATES.part(kind, 0), 1, device).findings


def why_not_driven(name: str) -> str:
    """The reason of a callable or of its class, or nothing."""
    return NOT_DRIVEN.get(name, NOT_DRIVEN.get(name.partition(".")[0], ""))


@pytest.fixture(scope="module")
def there(device: torch.device) -> dict[str, list[CodeType]]:
    """The doors that there are, with their code."""
    return callables(device)


@pytest.fixture(scope="module")
def driven(device: torch.device, there: dict[str, list[CodeType]]) -> Driven:
    """The outcome of the tester, once for all tests."""
    tracer = doors.Tracer(there)
    with tracer.watching():
        findings = list(drive_all(device))
    return Driven(tracer.called, findings)


def test_every_pair_of_calls_of_a_run_is_refused_reported_or_right(driven: Driven) -> None:
    assert not driven.findings, "\n".join(driven.findings)


def test_every_public_callable_that_reaches_storage_is_called_by_a_driver(
    there: dict[str, list[CodeType]], driven: Driven
) -> None:
    side_doors = [name for name in sorted(there) if name not in driven.called and not why_not_driven(name)]
    assert not side_doors, (
        f"{', '.join(side_doors)} can reach pages, rows, states or graphs, and no random tester calls it: give it a "
        "verb in tests/amd/random_calls/verbs.py or engine_verbs.py, or say in NOT_DRIVEN why there is none"
    )


def test_every_class_of_the_interface_is_met_by_a_driver(device: torch.device) -> None:
    held, _ = scenes(device)
    met = {each.__name__ for cls in doors.public_classes(held, set()) for each in cls.__mro__}
    unknown = {cls.__name__ for cls in doors.classes_with_behaviour()} - met - {*NOT_DRIVEN}
    assert not unknown, f"no tester holds a {', '.join(sorted(unknown))}; drive it, or say in NOT_DRIVEN why not"


def test_what_is_said_not_to_be_driven_is_there_and_is_not(there: dict[str, list[CodeType]], driven: Driven) -> None:
    classes = {name.partition(".")[0] for name in there} | {cls.__name__ for cls in doors.classes_with_behaviour()}
    gone = [name for name in NOT_DRIVEN if name not in there and name not in classes]
    assert not gone, f"{', '.join(gone)} is in NOT_DRIVEN and is no door any more; take it out"
    called = [name for name in NOT_DRIVEN if name in driven.called]
    assert not called, f"{', '.join(called)} is in NOT_DRIVEN, and a tester calls it; take it out"


class Door:
    """Holds on to a tensor of pages, and has no verb."""

    def __init__(self, pages: Tensor) -> None:
        self.pages = pages

    def write(self) -> None:
        """Reach it."""
        self.pages.zero_()


def test_an_object_that_holds_on_to_pages_is_a_door(device: torch.device) -> None:
    pages, other = torch.zeros(2, 3, device=device)[:1], torch.zeros(4, device=device)
    storages = {doors.storage_of(pages)}
    assert doors.reaches(Door(pages), storages)
    assert doors.reaches([{"deep": (lambda: pages[0])}], storages), "by what a function closes over"
    assert doors.reaches(Door(pages).write, storages), "by what a method is bound to"
    assert not doors.reaches(Door(other), storages)
