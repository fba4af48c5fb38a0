"""World: a runtime, the oracle beside it, and what was promised of each request."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rocm_attn.batch.prefixes import SharedPrefixes
from rocm_attn.capture.check import NO_CHECK, CaptureCheck
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.errors import DeviceFault, RocmAttnError, Unsupported
from rocm_attn.guards.registry import Guards
from rocm_attn.paging.index_spaces import Space
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.selection.build import build_runtime
from tests.amd.random_calls.finding import Finding
from tests.amd.random_calls.model import VOCABULARY, Model
from tests.amd.random_calls.oracle import Oracle
from tests.amd.random_calls.setting import Setting

# A fault is reported when its step's ring slot is used again, two steps later; of a split step, two split steps or one
# whole one. Never later than this many steps.
STEPS_UNTIL_REPORTED = 4

Pages = dict[tuple[int, Space], tuple[int, ...]]


@dataclass(slots=True)
class Request:
    """The tester's knowledge of a row, in addition to the oracle's.

    script:    ids that it mostly takes, by place; several requests have the same one
    end:       tokens that it has stored; what lies after them is over
    reserved:  tokens that it has room for
    doubtful:  places up to here were begun by a step that failed, or were stored before it
    ancestor:  the admission that its first pages came from
    may_be_refused: whether it was cut, perhaps to before what its windows need, or shares room without tokens
    """

    script: list[int]
    end: int
    reserved: int
    doubtful: int
    ancestor: int
    may_be_refused: bool = False


@dataclass(slots=True)
class Kept:
    """A page that is kept.

    looked_up: what the tokens in it looked up; UNKNOWN where that is not known
    spaces:    in which it is kept
    script, ancestor: of the request that it is of
    """

    page_no: int
    looked_up: list[int]
    spaces: set[Space]
    script: list[int]
    ancestor: int


@dataclass(slots=True, eq=False)
class ExpectedFault:
    """A step that was made to go wrong on the device.

    steps:    the numbers under which it may be reported
    must:     whether it must be reported; some need not be, where the runtime makes up for them
    left:     steps that may still pass before it is reported
    """

    steps: range
    must: bool
    left: int = STEPS_UNTIL_REPORTED
    reported: bool = False


def served(rng: random.Random, device: torch.device, guards: Guards | None) -> tuple[Setting, AttentionRuntime]:
    """A setting that some kernel serves, and a runtime of it."""
    for _ in range(50):
        setting = Setting.random(rng, device)
        try:
            return setting, build_runtime(setting.problems, setting.options, device=device, guards=guards)
        except Unsupported:
            continue
    raise Finding("no setting is served")


@dataclass(frozen=True, slots=True)
class Held:
    """Rows and pages that are free, the pages of each row, and those that are kept."""

    free_rows: int
    free_pages: dict[Space, int]
    pages: Pages
    kept: dict[Space, tuple[int, ...]]

    def is_but_evictions(self, before: Held) -> bool:
        """True if nothing changed but pages that have left a window, or that were kept to be copied."""
        if self.free_rows != before.free_rows or self.pages.keys() != before.pages.keys() or self.kept != before.kept:
            return False
        for (_, space), pages in self.pages.items():
            then = before.pages[_, space]
            if len(pages) != len(then):
                return False
            if any(a != b and not (a == 0 and space is Space.SWA) for a, b in zip(pages, then, strict=True)):
                return False
        return all(self.free_pages[space] >= free for space, free in before.free_pages.items())


class World:
    """One seed's runtime and requests.

    log: the moves so far, in words
    """

    def __init__(self, seed: int, device: torch.device, guards: Guards | None) -> None:
        self.rng = rng = random.Random(seed)
        self.device = device
        self.log: list[str] = []
        self.setting, self.runtime = served(rng, device, guards)
        setting = self.setting
        self.model = Model(setting.problems, seed, device)
        self.oracle = Oracle([])
        self.set_weights()
        self.requests: dict[int, Request] = {}
        self.kept: dict[int, Kept] = {}
        self.dropped: list[int] = []
        self.faults: list[ExpectedFault] = []
        self.is_disturbed = False  # whether memory ran out or the user interrupted
        self.was_interrupted = False  # pages and rows that were changing hands may be lost
        self.reported: dict[str, int] = {}
        self.kept_prefixes: SharedPrefixes | None = None  # given again while the groups are the same
        self.bits: dict[tuple[int, tuple[int, ...], int], bytes] = {}
        self.num_compared = self.num_admitted = 0
        self.scripts = [[rng.randint(1, VOCABULARY - 1) for _ in range(256)] for _ in range(2)]
        self.poison()
        check = CaptureCheck(vocabulary=VOCABULARY, seed=seed) if setting.checks_graphs else NO_CHECK
        recorder = recorder_for(device) if setting.has_graphs else None
        self.runner = StepRunner(self.runtime, self.model.forward, recorder, check=check)

    @property
    def num_layers(self) -> int:
        return len(self.model.layers)

    def say(self, what: str) -> None:
        """Add a line to the log."""
        self.log.append(what)

    def failed(self, cause: BaseException) -> None:
        """Memory ran out, or the user interrupted, perhaps while a fault was on its way."""
        self.say(f"failed: {type(cause).__name__}")
        if isinstance(cause.__context__, DeviceFault):
            self.heard(cause.__context__)
        self.is_disturbed = True
        self.was_interrupted |= isinstance(cause, KeyboardInterrupt)

    def set_weights(self) -> None:
        """Give every layer that has sinks or slopes new ones, at random; others none."""
        self.oracle.layers = self.model.renew_weights(self.rng, self.runtime.head_weights.set)

    def spaces(self) -> list[Space]:
        """The spaces that rows have pages in."""
        return [Space.FULL, Space.SWA] if self.setting.options.swa_pages else [Space.FULL]

    def pages(self) -> Pages:
        """Returns the pages of every row."""
        table = self.runtime.table
        return {
            (row, space): tuple(table.pages_of(row, space).tolist()) for row in self.requests for space in self.spaces()
        }

    def kept_pages(self) -> dict[Space, tuple[int, ...]]:
        """Returns the kept pages; 0 for no page."""
        return {space: tuple(self.runtime.table.kept.pages([*self.kept], space).tolist()) for space in self.spaces()}

    def state(self) -> Held:
        """Returns the state that a refused call must leave unchanged."""
        table = self.runtime.table
        free = {space: table.space(space).num_free_pages for space in self.spaces()}
        return Held(table.num_free_rows, free, self.pages(), self.kept_pages())

    def check_counts(self, *, nothing_waits: bool) -> None:
        """No row and no page is lost, none is both held and free, and holders are counted as there are.

        nothing_waits: whether no page is kept back because it has still to be copied
        """
        table, held, kept = self.runtime.table, self.pages(), self.kept_pages()
        rows = table.num_free_rows + len(self.requests)
        if not self._is_all(rows, self.setting.options.num_rows):
            raise Finding(f"{table.num_free_rows} rows are free beside {len(self.requests)} requests")
        for space in self.spaces():
            holders = Counter(page for (_, at), pages in held.items() if at is space for page in pages)
            holders.update(kept[space])
            del holders[0]
            pages = set(holders)
            of_space = table.space(space)
            counted = {page: table.kept.num_holders(page, space) for page in holders}
            if counted != holders and not (
                self.was_interrupted and all(holders[page] <= counted[page] for page in pages)
            ):
                raise Finding(f"{space.name}: pages have the holders {holders}, and are said to have {counted}")
            count = of_space.num_free_pages + len(pages)
            if count > of_space.num_usable_pages or (
                nothing_waits and not self._is_all(count, of_space.num_usable_pages)
            ):
                raise Finding(
                    f"{space.name}: {len(pages)} pages held and {of_space.num_free_pages} free of "
                    f"{of_space.num_usable_pages}"
                )

    def _is_all(self, count: int, all_of_them: int) -> bool:
        return count <= all_of_them if self.was_interrupted else count == all_of_them

    def poison(self) -> None:
        """NaN in every page without holders; only right after a step, when no page waits to be copied."""
        held, kept, pool = self.pages(), self.kept_pages(), self.runtime.pool
        for space in self.spaces():
            of_space = {page for (_, at), pages in held.items() if at is space for page in pages} | {*kept[space]}
            free = [page for page in range(1, pool.in_space(space).num_pages) if page not in of_space]
            if free:
                index = torch.tensor(free, device=self.device)
                for layer in pool.in_space(space).layers:
                    layer.k.index_fill_(0, index, float("nan"))
                    layer.v.index_fill_(0, index, float("nan"))

    def refusal(self, call: Callable[[], object]) -> str:
        """The refusal of a call, which must have changed nothing; or nothing."""
        before = self.state()
        try:
            call()
        except DeviceFault:
            raise
        except RocmAttnError as refusal:
            if self.state() != before:
                raise Finding(f"refused, and yet something changed: {refusal}") from refusal
            return f"{type(refusal).__name__}: {refusal}"
        return ""

    def heard(self, fault: DeviceFault) -> None:
        """The runtime reported a fault."""
        self.say(f"reported: {fault}")
        self.reported["reported"] = self.reported.get("reported", 0) + 1
        steps = {one.step for one in fault.each}
        of = [expected for expected in self.faults if steps.intersection(expected.steps)]
        for expected in of:
            if expected.reported and len(expected.steps) == 1 and not self.is_disturbed:
                raise Finding(f"the fault of one step was reported twice: {fault}")
            expected.reported = True
        if not of and not self.is_disturbed:
            raise Finding(f"a fault that nothing explains: {fault}")

    def listen(self) -> bool:
        """Ask the device for faults until it has no more; whether it had one."""
        for heard in range(4):
            try:
                self.runtime.check_device()
            except DeviceFault as fault:
                self.heard(fault)
            else:
                return heard > 0
        raise Finding("check_device() raises again and again")

    def step_passed(self) -> None:
        """A step was run: what was to be reported by now has been."""
        for fault in self.faults:
            fault.left -= 1
            if fault.must and not fault.reported and fault.left < 0:
                raise Finding(
                    f"the fault of step {fault.steps[-1]} was not reported by {STEPS_UNTIL_REPORTED} later steps"
                )
        self.faults = [fault for fault in self.faults if fault.left >= -8]

    def admit(self) -> int:
        """A new request. Raises what the table does."""
        row = self.runtime.table.admit()
        self.num_admitted += 1
        self.requests[row] = Request(self.rng.choice(self.scripts), 0, 0, 0, self.num_admitted)
        self.oracle.admit(row)
        return row

    def fork(self, row: int, kv_len: int) -> int:
        """A request that goes on from the first tokens of another. Raises what the table does."""
        child = self.runtime.table.fork(row, kv_len)
        parent = self.requests[row]
        script = parent.script if self.rng.random() < 0.5 else self.rng.choice(self.scripts)
        # Room that is shared before anything is stored there must be cut before it is.
        parent.may_be_refused |= kv_len > parent.end
        self.requests[child] = Request(
            script,
            min(parent.end, kv_len),
            kv_len,
            min(parent.doubtful, kv_len),
            parent.ancestor,
            parent.may_be_refused,
        )
        self.oracle.fork(row, child, kv_len)
        return child

    def keep(self, row: int, first: int, end: int, spaces: Sequence[Space]) -> None:
        """Keep pages of a request. Raises what the table does."""
        table, request = self.runtime.table, self.requests[row]
        ids = table.kept.keep(row, first, end, spaces).tolist()
        # A step that is said to have gone back would store tokens again, and is refused.
        request.may_be_refused |= end * table.page_size > request.end
        for page_no, id_ in enumerate(ids, first):
            tokens = self.oracle.page(row, page_no, table.page_size)
            self.kept[id_] = Kept(page_no, tokens, {*spaces}, request.script, request.ancestor)

    def begin_over(self, ids: Sequence[int], kv_len: int) -> int:
        """A request over kept pages. Raises what the table does."""
        row = self.runtime.table.kept.admit_over(ids, kv_len)
        last = self.kept[ids[-1]]
        self.requests[row] = Request(last.script, kv_len, kv_len, kv_len, last.ancestor)
        self.oracle.begin(row, [token for id_ in ids for token in self.kept[id_].looked_up][:kv_len])
        return row

    def drop(self, ids: Sequence[int], spaces: Sequence[Space]) -> None:
        """Let go of kept pages. Raises what the table does."""
        self.runtime.table.kept.drop(ids, spaces)
        for id_ in ids:
            self.kept[id_].spaces -= {*spaces}
            if not self.kept[id_].spaces:
                del self.kept[id_]
                self.dropped.append(id_)

    def free(self, row: int) -> None:
        """Give a request back."""
        self.runtime.table.free(row)
        del self.requests[row]
        self.oracle.free(row)

    def truncate(self, row: int, kv_len: int) -> None:
        """The request goes back. Raises what the table does."""
        self.runtime.table.truncate(row, kv_len)
        request = self.requests[row]
        request.may_be_refused |= kv_len < request.end
        request.end, request.reserved = min(request.end, kv_len), kv_len
        request.doubtful = min(request.doubtful, kv_len)
        self.oracle.truncate(row, kv_len)

    def end(self, row: int) -> int:
        """Where the request's next new token goes."""
        return self.requests[row].end

    def reserve(self, rows: Sequence[int], kv_len: Sequence[int]) -> None:
        """Room in several rows. Raises what the table does."""
        self.runtime.table.reserve_all(np.array(rows, np.int32), np.array(kv_len, np.int32))
        for row, length in zip(rows, kv_len, strict=True):
            self.requests[row].reserved = max(self.requests[row].reserved, length)
