"""A soak: random calls of one runtime over many steps, with every output of every step compared with the oracle.

scenario has the calls and how often they are drawn, and scene the runtime and the oracle. This module drives both,
audits tables and pages, drops graphs and makes them again, and watches memory. In deterministic mode it also compares
bits; see alone.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from rocm_attn.errors import RocmAttnError, WrongState
from rocm_attn.guards.registry import Guards
from rocm_attn.paging.index_spaces import RESERVED_PAGE
from rocm_attn.paging.page_table import PageTable
from rocm_lab.soak.alone import ServedAlone
from rocm_lab.soak.calls import LAST_CALLS
from rocm_lab.soak.finding import Finding
from rocm_lab.soak.judge import WrongStep
from rocm_lab.soak.scenario import CHANGES, STEPS, Scenario
from rocm_lab.soak.scene import Scene

# Allowed growth between two moments without graphs and held results. Buffers that grow to a power of two with the
# largest eager step need less than this, and so do the kernels of Triton that are compiled late.
MAX_HOST_GROWTH_BYTES = 16 << 20
MAX_DEVICE_GROWTH_BYTES = 1 << 20
# Requests before the first step, so that a short soak has something to do too.
_FIRST_REQUESTS = 4
# Python takes larger objects from the C library: docs.python.org/3/c-api/memory.html, "The pymalloc allocator".
_LARGEST_SMALL_OBJECT = 512


@dataclass(frozen=True, slots=True)
class SoakFault:
    """The fault at which a soak stopped.

    step:    the step that shows it, counted from 1; a soak of that many steps shows it again
    where:   the step and the place in it, in words
    what:    the fault
    history: the last calls before it was seen, in words
    """

    step: int
    where: str
    what: str
    history: tuple[str, ...]


class SoakFailed(RocmAttnError):
    """A soak found a fault; see finding."""

    def __init__(self, finding: SoakFault) -> None:
        self.finding = finding
        super().__init__("\n    ".join((f"{finding.where}: {finding.what}", "before that:", *finding.history)))


@dataclass(frozen=True, slots=True)
class SoakReport:
    """The report of a soak that found no fault, until its end or until it was interrupted.

    replays, captures:   steps that ran as a graph, graphs made
    ways:                how often steps of each kind ran in each way, for instance "tree replayed"
    actions:             how often each call was drawn; refused: calls of them that were refused, and changed nothing
    checked_tokens:      tokens whose outputs, or whose K and V in a page, were compared, in each layer
    worst_error:         the largest error, as a fraction of the allowed one
    deterministic:       whether the runtime was
    served_alone:        sequences of steps that were bitwise equal when served alone; 0 in normal mode
    host_growth_bytes:   memory in use on the host, from the end of the warm-up to the end
    device_growth_bytes: allocated memory, likewise; 0 on a CPU
    guards_off:          safeguards that were switched off
    """

    seed: int
    steps: int
    replays: int
    captures: int
    ways: dict[str, int]
    reopens: int
    actions: dict[str, int]
    refused: int
    checked_tokens: int
    worst_error: float
    deterministic: bool
    served_alone: int
    host_growth_bytes: int
    device_growth_bytes: int
    seconds: float
    guards_off: tuple[str, ...]

    def as_dict(self) -> dict[str, object]:
        """Returns the report for JSON, with steps per second."""
        return {**asdict(self), "steps_per_second": self.steps / self.seconds}

    def __str__(self) -> str:
        drawn = ", ".join(f"{count} {name}" for name, count in self.actions.items() if count)
        return (
            f"{self.steps} steps of seed {self.seed} without a mismatch: {self.replays} replays, "
            f"{self.captures} captures, {self.reopens} reopens; drawn were {drawn}; {self.refused} calls were refused "
            f"and changed nothing; {self.checked_tokens} tokens, worst error "
            f"{self.worst_error:.2f} of the allowed, memory {self.host_growth_bytes / 2**20:+.1f} MiB on the host and "
            f"{self.device_growth_bytes / 2**20:+.1f} MiB on the device, {self.seconds:.1f} s, "
            f"{self.steps / self.seconds:.0f} steps/s"
            + (
                f"; deterministic: {self.served_alone} sequences bitwise equal to runs alone"
                if self.deterministic
                else ""
            )
            + (f"; SAFEGUARDS OFF: {', '.join(self.guards_off)}" if self.guards_off else "")
        )


class SoakInterrupted(KeyboardInterrupt):
    """A soak was interrupted, without a fault until then. report: of its whole steps"""

    def __init__(self, report: SoakReport) -> None:
        super().__init__()
        self.report = report


class _CAllocations(ctypes.Structure):
    """The result of mallinfo2() of glibc 2.33 and later, for all arenas; see man 3 mallinfo."""

    uordblks: int  # bytes that are allocated
    hblkhd: int  # those of them that were mapped one by one, which are not in uordblks
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


def host_bytes_in_use() -> int:
    """Returns an upper bound of the memory that the C library and Python have allocated, and that was not freed.

    It is not the resident memory: the allocators keep freed memory between blocks in use, up to the largest amount that
    was ever needed. In 6,000 steps with recurrent layers that grew by 46 MB, and memory in use by 0.3 MB. In a
    C library without mallinfo2() it is the resident memory all the same.
    """
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
        return resident_pages * os.sysconf("SC_PAGE_SIZE")
    mallinfo2.restype = _CAllocations
    found: _CAllocations = mallinfo2()
    return found.uordblks + found.hblkhd + _LARGEST_SMALL_OBJECT * sys.getallocatedblocks()


@dataclass(frozen=True, slots=True)
class _MemoryUse:
    host_bytes: int
    device_bytes: int

    @classmethod
    def now(cls, device: torch.device) -> _MemoryUse:
        gc.collect()
        device_bytes = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        return cls(host_bytes_in_use(), device_bytes)


def _say_nothing(_: int) -> None: ...


class Soak:
    """One runtime under a scenario.

    seed:     of all random choices
    provider: "auto", "torch" or "triton"
    guards:   not given, those of the environment
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        seed: int,
        device: torch.device,
        provider: str,
        dtype: torch.dtype,
        guards: Guards | None = None,
    ) -> None:
        self._scenario, self._seed = scenario, seed
        setting = scenario.setting(dtype, provider)
        self._scene = Scene("soak", seed, device, guards, lambda *_: setting)
        self._draw = random.Random(seed)
        self._alone = ServedAlone(self._scene, scenario.alone_every) if scenario.deterministic else None
        if self._alone is not None:
            self._scene.checks.append(self._alone.check)
        self._verbs = {name: verb for name, verb in {**CHANGES, **STEPS}.items() if scenario.weights.get(name, 0) > 0}
        self._weights = [scenario.weights[name] for name in self._verbs]
        self._steps = self._reopens = 0
        self._ways: Counter[str] = Counter()
        self._actions: Counter[str] = Counter()
        self._memory: list[_MemoryUse] = []
        self._poison_free_memory()
        for _ in range(_FIRST_REQUESTS):
            CHANGES["admit"](self._scene)

    def run(self, steps: int, on_reopen: Callable[[int], None] = _say_nothing) -> SoakReport:
        """Plays this many steps, once. on_reopen: gets the number played.

        Raises SoakFailed at the first finding, SoakInterrupted, and WrongState for a second run.
        """
        if self._steps:
            raise WrongState(f"this soak has already run {self._steps} steps; make another one")
        started, where = time.perf_counter(), "after step"
        try:
            while self._steps < steps:
                self._steps += 1
                where = "step"
                self._play()
                where = "after step"
                if self._steps % self._scenario.audit_every == 0:
                    self._audit()
                if self._steps % self._scenario.reopen_every == 0 and self._steps < steps:
                    self._reopen()
                    on_reopen(self._steps)
            self._close()
        except KeyboardInterrupt as interrupt:
            self._steps -= where == "step"
            raise SoakInterrupted(self._report(time.perf_counter() - started)) from interrupt
        except WrongStep as wrong:
            step = wrong.step
            raise SoakFailed(SoakFault(step.turn, f"step {step.turn}", str(wrong), step.history)) from wrong
        except Finding as found:
            raise self._failure(where, str(found)) from found
        except Exception as error:  # any exception of a step is a finding, and the step's number is needed to repeat it
            frame = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
            raise self._failure(where, what) from error
        return self._report(time.perf_counter() - started)

    def _play(self) -> None:
        """Draws calls until one of them is a step."""
        scene = self._scene
        scene.turn, scene.log = self._steps, scene.log[-LAST_CALLS:]
        while True:
            name = self._draw.choices(list(self._verbs), self._weights)[0]
            self._actions[name] += 1
            before = scene.runner.counters
            scene.say(f"{name}:")
            self._verbs[name](scene)
            if name in STEPS:
                break
        after = scene.runner.counters
        way = "replayed" if after.replays > before.replays else "eager"
        way = "captured" if after.captures > before.captures else way
        self._ways[f"{name} {way}"] += 1
        if after.graphs_off:
            raise Finding(f"graphs were switched off: {after.graphs_off}")

    def _audit(self) -> None:
        """Checks state that no output shows yet. The last step has published all changes of the table."""
        scene, runtime = self._scene, self._scene.runtime
        scene.judge_all()
        scene.compare_pool("the calls so far")
        scene.runner.check_addresses()
        for layer in range(len(scene.model.layers)):
            if any(part.any() for part in runtime.pool.layer(layer).of_page(RESERVED_PAGE)):
                raise Finding(f"page 0 of layer {layer} is no longer zero")
        for table in runtime.table.spaces:
            if not table.pending and not np.array_equal(table.entries.cpu().numpy(), table.entries_host):
                raise Finding(f"the device's table of the {table.space.name} space differs from the host's")
            free = len(self._free_pages(table))
            if free != table.num_free_pages:
                raise Finding(
                    f"{free} pages{table.pages.of} are held by no row nor kept, but {table.num_free_pages} are "
                    "reported free"
                )
        if runtime.states.memory[:2].any() or runtime.states.headers[:2].any():
            raise Finding("the state of row 0, which no request has, is not 0")
        self._poison_free_memory()

    def _reopen(self) -> None:
        self._scene.judge_all()
        self._reopens += 1
        ladders = self._scenario.ladders[self._reopens % len(self._scenario.ladders)]
        self._scene.last = self._scene.verified = None
        self._scene.runner.reopen(ladders.seqs, ladders.tokens)
        self._memory.append(_MemoryUse.now(self._scene.device))
        growth = self._growth()
        if growth.host_bytes > MAX_HOST_GROWTH_BYTES or growth.device_bytes > MAX_DEVICE_GROWTH_BYTES:
            raise Finding(
                f"memory grew by {growth.host_bytes} bytes on the host and {growth.device_bytes} on the device"
            )

    def _close(self) -> None:
        """Frees all requests, and checks that all rows and pages are free as at the beginning."""
        scene, table = self._scene, self._scene.runtime.table
        scene.runner.check_device()
        scene.judge_all()
        for row in scene.rows:
            scene.end(row)
        scene.drop_all()
        self._audit()
        self._reopen()
        missing = sum(pages.num_usable_pages - pages.num_free_pages for pages in table.spaces)
        states = scene.runtime.states.recurrent.checkpoints - table.kept.num_free_states
        if missing or states or table.num_free_rows != self._scenario.max_num_rows:
            raise Finding(
                f"{missing} pages and {states} checkpoints are held, and {table.num_free_rows} rows are free, when no "
                "request is left"
            )

    def _free_pages(self, table: PageTable) -> list[int]:
        """Returns the pages of a space that no row holds and that are not kept."""
        rows, kept = self._scene.runtime.table, self._scene.kept
        held = {page for row in self._scene.rows for page in rows.pages_of(row, table.space).tolist()}
        held.update(rows.kept.pages(list(kept), table.space).tolist() if kept else ())
        return sorted(set(range(table.pages.first_page, table.pages.num_pages)) - held)

    def _poison_free_memory(self) -> None:
        """Fills free pages with NaN, so that reads of tokens that were not stored or have left the window show.

        So are the states of free rows, which no copy reads after a step.
        """
        runtime = self._scene.runtime
        if not runtime.states.is_empty:
            rows = range(1, self._scenario.max_num_rows + 1)
            slots = [2 * row + at for row in rows if not runtime.table.is_admitted(row) for at in (0, 1)]
            runtime.states.memory.index_fill_(
                0, torch.tensor(slots, dtype=torch.int64, device=self._scene.device), 0xFF
            )
        for table in runtime.table.spaces:
            never = range(RESERVED_PAGE + 1, table.pages.first_page)
            ids = [*never, *self._free_pages(table)]
            free = torch.tensor(ids, dtype=torch.int64, device=self._scene.device)
            for pages in runtime.pool.in_space(table.space).layers:
                pages.fill_nan(free)

    def _growth(self) -> _MemoryUse:
        """Returns the growth since the end of the warm-up: every ladder was open once, or half of the run is over."""
        if len(self._memory) < 2:
            return _MemoryUse(0, 0)
        first, last = self._memory[min(len(self._scenario.ladders), len(self._memory) - 1) - 1], self._memory[-1]
        return _MemoryUse(last.host_bytes - first.host_bytes, last.device_bytes - first.device_bytes)

    def _failure(self, where: str, what: str) -> SoakFailed:
        return SoakFailed(SoakFault(self._steps, f"{where} {self._steps}", what, tuple(self._scene.log[-LAST_CALLS:])))

    def _report(self, seconds: float) -> SoakReport:
        growth, counters = self._growth(), self._scene.runner.counters
        return SoakReport(
            seed=self._seed,
            steps=self._steps,
            replays=counters.replays,
            captures=counters.captures,
            ways=dict(sorted(self._ways.items())),
            reopens=self._reopens,
            actions={name: self._actions[name] for name in self._verbs},
            refused=self._scene.counts["refused"],
            checked_tokens=self._scene.counts["compared"],
            worst_error=self._scene.worst_error,
            deterministic=self._scenario.deterministic,
            served_alone=0 if self._alone is None else self._alone.num_seqs,
            host_growth_bytes=growth.host_bytes,
            device_growth_bytes=growth.device_bytes,
            seconds=seconds,
            guards_off=self._scene.runtime.guards.off,
        )
