"""The guards of steps over an engine's storage: one switched off alone is noticed; with all on, nothing is reported."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from rocm_attn.errors import DeviceFault
from rocm_attn.external import Bounds
from rocm_attn.guards.registry import GUARDS, Guards
from rocm_attn.paging.index_spaces import Space
from tests.amd.external.engines import ROOM, VLLM, Engine, SGLang
from tests.amd.guards.csr_kernels import put_in_stand_ins
from tests.amd.guards.ways import run_elsewhere

SWA = (Space.FULL, Space.SWA)
Make = Callable[..., Engine]


def build(kind: type[Engine], make: Make, *windows: int, page_size: int = 16, **others: object) -> Engine:
    return make(kind, page_size, windows or (-1,), **others)


def sealed_tensors(engine: Engine) -> Mapping[str, Tensor]:
    (core,) = engine.attention.cores.values()
    return core.sealed_tensors()


def list_tails(make: Make) -> None:
    """Uses a kernel of page lists, which reads ahead: after a long step, a short one's list keeps nothing of it."""
    engine = build(SGLang, make, page_size=4, provider="csr")
    long, short = engine.admit(), engine.admit()
    engine.run([long], [60])
    engine.run([short], [3])
    engine.run([short], [1])
    step = engine.attention.gate.running().step.tensors
    assert (step.page_list[1:] == 0).all(), "the list holds what an earlier step left"


def new_sizes(make: Make) -> None:
    """Captures a graph that is too large: memory that graphs read does not grow."""
    engine = build(VLLM, make)
    engine.attention.seal(Bounds(num_seqs=4, num_tokens=4, kv_len=ROOM, num_pages=engine.num_pages))
    small = engine.capture(4)
    requests = [engine.admit() for _ in range(3)]
    engine.run(requests, [5, 20, 2])
    small.run(requests)
    where = {name: tensor.data_ptr() for name, tensor in sealed_tensors(engine).items()}
    with pytest.raises(Exception, match=r"larger than the bounds given to seal"):
        engine.capture(16)
    assert where == {name: tensor.data_ptr() for name, tensor in sealed_tensors(engine).items()}


def two_spaces(make: Make) -> None:
    """Runs layers of two spaces that share no id."""
    engine = build(VLLM, make, -1, 5, spaces=SWA)
    requests = [engine.admit(), engine.admit()]
    engine.run(requests, [5, 17])
    engine.run(requests, [1, 1])


def late_fault(make: Make) -> None:
    """Checks that a fault comes back by itself, in a ring slot of the step after it."""
    engine = build(VLLM, make, empty=3.0)
    first, second = engine.admit(), engine.admit()

    def lie(kv_len: Tensor, slots: Tensor) -> None:
        kv_len[0] = ROOM + 5

    engine.run_unseen([first], [1], corrupt=lie)
    number = engine.attention.step_number
    engine.run([second], [1])
    engine.run([second], [1])
    with pytest.raises(DeviceFault, match=f"step {number}: .*a length on the device") as raised:
        engine.run([second], [1])
    assert raised.value.step == number


CASES: dict[str, Callable[[Make], None]] = {
    "table_tails": list_tails,
    "sealed_growth": new_sizes,
    "layer_space": two_spaces,
    "echo_check": late_fault,
}
# Without this guard a kernel may leave its memory, which ends a process on a GPU.
MAY_FAULT = "layer_space"
# The random tester finds each of them off in an engine: tests/amd/random_calls/test_pairs.py.
FOUND_AT_RANDOM = {
    "pads",
    "store_drops",
    "finite_kv",
    "capacity",
    "full_refresh",
    "length_bounds",
    "v_mask",
    "head_weights",
    "slots_in_table",
    "null_page",
    "table_moved",
    "last_steps",
}
# Guards that do not apply to an engine's storage -> the reason.
NOT_HERE = {
    "row_zero": "the engine writes its table",
    "slot_in_row": "a length is cut at the row's end before slots follow from it",
    "table_first": "the engine writes its table",
    "row_width": "the engine hands out pages",
    "copy_on_write": "the engine hands out pages",
    "shared_floor": "the engine knows what its requests share",
    "kept_ids": "the engine keeps pages",
    "stored_tokens": "the engine knows what was stored",
    "copy_sources": "the engine copies pages",
    "batch_check": "lengths are the device's",
    "window_reach": "the engine gives pages back",
    "pending_changes": "the engine writes its table",
    "planner_inputs": "a captured step is planned at the longest length, others by the engine's bounds",
    "graph_key": "the engine keys its graphs",
    "graph_epoch": "the engine replays its graphs",
    "sealed_capture": "a captured step before seal() is refused, with no way around",
    "child_ranges": "the engine's steps are whole",
    "draft_lengths": "an engine makes a step of each draft step: tests/amd/guards/test_drafts.py",
    "draft_order": "an engine makes a step of each draft step: tests/amd/guards/test_same_rows.py",
    "same_rows": "the engine runs its graphs again, and moves what it accepts: tests/amd/guards/test_same_rows.py",
    "path_pages": "the engine moves what it accepts: tests/amd/guards/test_drafts.py",
    **dict.fromkeys(("state_lineage", "sent_state"), "the engine owns the states of recurrent layers"),
    **dict.fromkeys(("host_bytes", "host_lineage"), "the engine keeps pages"),
    "kv_scales": "the engine owns the factors: tests/amd/guards/test_formats.py",
    "fresh_selection": "of layers that select keys: tests/amd/external/test_selections.py",
    "selection_place": "of layers that select keys: tests/amd/guards/test_selections.py",
    "page_format": "of bind(), before any step: tests/amd/guards/test_formats.py",
    "cut_points": "of the kernels: tests/amd/guards/test_cut_points.py",
    "mask_room": "of steps that draft: tests/amd/guards/test_drafts.py",
    "ring_wait": "of the ring: tests/amd/guards/test_publication.py, and on a CPU the device is never late",
}


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds the provider "csr", whose kernels read ahead of a list's end."""
    put_in_stand_ins(monkeypatch.setattr)


def maker(device: torch.device, provider: str, guards: Guards) -> Make:
    def make(kind: type[Engine], page_size: int, windows: tuple[int, ...], **others: object) -> Engine:
        given = {"device": device, "provider": provider, "guards": guards, **others}
        return kind(page_size, windows, **given)  # type: ignore[arg-type]

    return make


def run_without(guard: str, device: str, provider: str) -> None:
    """Runs a case with its guard off, for a process of its own."""
    CASES[guard](maker(torch.device(device), provider, Guards().without(guard)))


def test_every_safeguard_is_here_or_said_why_not() -> None:
    assert sorted(guard.id for guard in GUARDS) == sorted([*CASES, *FOUND_AT_RANDOM, *NOT_HERE])


@contextmanager
def noticed() -> Iterator[None]:
    """Expects any error that a case raises when something goes wrong."""
    with pytest.raises((AssertionError, pytest.fail.Exception, DeviceFault, IndexError, RuntimeError)):
        yield


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # Triton's interpreter computes with NaN in NumPy
@pytest.mark.parametrize("guard", CASES)
def test_a_safeguard_that_is_off_is_noticed(guard: str, device: torch.device, provider: str) -> None:
    case = CASES[guard]
    case(maker(device, provider, Guards()))
    if device.type == "cuda" and guard == MAY_FAULT:
        code = "from tests.amd.external.test_guards_off import run_without\n"
        finished = run_elsewhere(f"{code}run_without({guard!r}, 'cuda', {provider!r})")
        assert finished.returncode != 0
        assert "Error" in finished.stderr or "Fault" in finished.stderr
    else:
        with noticed():
            case(maker(device, provider, Guards().without(guard)))
