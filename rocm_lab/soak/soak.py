"""A soak: random steps of a tiny model, with every output of every step compared with the float64 reference.

world draws the actions, and model runs the steps and has the reference. This module drives both, audits tables and
pages, drops graphs and makes them again, and watches memory. In deterministic mode it also compares bits; see alone.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from rocm_attn.batch.drafts import NO_DRAFTS
from rocm_attn.batch.halves import HALVES
from rocm_attn.batch.padding import PaddedShape, PadTo, token_places
from rocm_attn.batch.prefixes import NO_PREFIXES
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.errors import RocmAttnError, WrongState
from rocm_attn.hip_graphs.size_ladder import round_up
from rocm_attn.paging.index_spaces import RESERVED_PAGE
from rocm_attn.paging.page_table import PageTable
from rocm_attn.paging.state_pool import RecurrentLayers
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.head_weights import HeadWeights
from rocm_attn.step.metrics import Metrics
from rocm_attn.step.options import RuntimeOptions
from rocm_lab.soak.alone import NoAloneCheck, ServedAlone, SoloCheck
from rocm_lab.soak.checker import Checker, LayerTables, PlayedStep, SoakModel, soak_problems
from rocm_lab.soak.recurrent import RecurrentReference, RecurrentTables, soak_recurrences
from rocm_lab.soak.rounds import SoakRounds
from rocm_lab.soak.scenario import Action, Scenario
from rocm_lab.soak.world import World

# Allowed growth between two moments without graphs and held results. Buffers that grow to a power of two with the
# largest eager step need less than this, and so do the kernels of Triton that are compiled late.
MAX_HOST_GROWTH_BYTES = 16 << 20
MAX_DEVICE_GROWTH_BYTES = 1 << 20
# Python takes larger objects from the C library: docs.python.org/3/c-api/memory.html, "The pymalloc allocator".
_LARGEST_SMALL_OBJECT = 512

# One in this many of the steps with a given padded number of sequences gets a padded number of tokens too.
_TOKENS_EVERY = 3


@dataclass(frozen=True, slots=True)
class SoakFault:
    """The fault at which a soak stopped.

    step:    the step that shows it, counted from 1; a soak of that many steps shows it again
    where:   the step and the place in it, in words
    what:    the fault
    history: the last actions before it, in words
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
    """The report of a soak that found no fault.

    replays, captures:   steps that ran as a graph, graphs made
    split_steps:         steps that ran as two halves
    ways:                how often steps of each kind ran in each way, for instance "masked replayed"
    actions:             how often each action was drawn and done
    moved_paths:         accepted paths of trees whose K and V were moved
    page_copies:         pages that were copied before a row wrote to them
    checked_tokens:      tokens whose outputs were compared, in each layer
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
    split_steps: int
    ways: dict[str, int]
    reopens: int
    actions: dict[str, int]
    moved_paths: int
    page_copies: int
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
        return (
            f"{self.steps} steps of seed {self.seed} without a mismatch: {self.replays} replays, "
            f"{self.captures} captures, {self.split_steps} split steps; drawn were {self.actions['tree']} steps of "
            f"trees ({self.moved_paths} paths moved), {self.actions['draft']} rounds of drafts, "
            f"{self.actions['share']} shared steps, {self.reopens} reopens, {self.actions['preempt']} preemptions, "
            f"{self.actions['fork']} forks, {self.page_copies} page copies, {self.checked_tokens} tokens, worst error "
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


def _way(before: Metrics, after: Metrics) -> str:
    """Returns how the step between the two ran."""
    if after.captures > before.captures:
        return "captured"
    return "replayed" if after.replays > before.replays else "eager"


def _runtime_options(scenario: Scenario, provider: str, deterministic: bool) -> RuntimeOptions:
    first = scenario.ladders[0]
    return RuntimeOptions(
        num_pages=scenario.num_pages,
        # No page id is used in both spaces, so a mix-up meets a page that no request has.
        swa_pages=scenario.num_pages + scenario.swa_pages,
        first_swa_page=scenario.num_pages,
        swa_kept=scenario.verify_len,
        max_num_seqs=scenario.max_num_seqs,
        max_num_rows=scenario.max_num_rows,
        max_kv_len=scenario.max_kv_len,
        provider=provider,
        capture_sizes=first.seqs,
        capture_tokens=first.tokens,
        split_steps=True,
        deterministic=deterministic,
        shared_prefixes=not deterministic,
        drafts=scenario.drawn_rounds,
    )


class Soak:
    """One runtime under a scenario.

    seed:     of all random choices
    provider: "auto", "torch" or "triton"
    deterministic: whether the runtime is; then some sequences are compared bitwise with the same ones served alone
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        seed: int,
        device: torch.device,
        provider: str,
        dtype: torch.dtype,
        deterministic: bool = False,
    ) -> None:
        if deterministic:  # this mode has no kernels for masks
            scenario = scenario.without(Action.TREE).without(Action.SHARE).without(Action.DRAFT)
        self._scenario = scenario
        self._seed = seed
        problems = soak_problems(dtype, scenario.page_size, custom_mask=not deterministic)
        forms = soak_recurrences(dtype) if scenario.recurrent else ()
        # A verify step keeps all of its tokens, so that any of them may be taken back.
        layers = RecurrentLayers(forms, kept=scenario.verify_len, checkpoints=scenario.checkpoints if forms else 0)
        options = _runtime_options(scenario, provider, deterministic)
        self._runtime = build_runtime(problems, options, layers, device=device)
        self._layers = [self._runtime.pool.layer(layer) for layer in range(len(problems))]
        self._world = World(scenario, self._runtime.table, seed)
        self._poison_free_memory()
        generator = torch.Generator().manual_seed(seed)
        tables = [LayerTables.random(p, scenario.vocabulary, scenario.max_kv_len, generator) for p in problems]
        on_device = [rows.to(device=self._runtime.device) for rows in tables]
        # All positions of token id 0 are those of padding.
        entries, pads = scenario.vocabulary * scenario.max_kv_len, scenario.max_kv_len
        recurrent = [RecurrentTables.random(form, entries, pads, generator) for form in forms]
        states = [each.to(self._runtime.device) for each in recurrent]
        self._model = SoakModel(on_device, states, max_kv_len=scenario.max_kv_len, max_tokens=scenario.max_tokens)
        self._rounds = SoakRounds(
            on_device,
            vocabulary=scenario.vocabulary,
            max_kv_len=scenario.max_kv_len,
            most_seqs=scenario.most_seqs,
            rounds=scenario.drawn_rounds,
        )
        weights = [HeadWeights.random(problem, generator) for problem in problems]
        for layer, drawn in enumerate(weights):
            self._runtime.head_weights.set(layer, drawn.to(self._runtime.device))
        exact = [rows.to(dtype=torch.float64) for rows in tables]
        references = [RecurrentReference(each, scenario.max_kv_len) for each in recurrent]
        self._checker = Checker(problems, exact, weights, references, scenario.max_kv_len)
        self._alone: SoloCheck = NoAloneCheck()
        if deterministic:
            self._alone = ServedAlone(
                problems,
                on_device,
                weights,
                states,
                device=device,
                provider=provider,
                max_kv_len=scenario.max_kv_len,
                every=scenario.alone_every,
            )
        recorder = recorder_for(self._runtime.device)
        self._runner = StepRunner(self._runtime, self._model.forward, recorder, draft=self._rounds.forward)
        self._unchecked: list[PlayedStep] = []
        self._steps = self._reopens = self._page_copies = self._split_steps = self._moved_paths = 0
        self._ways: Counter[str] = Counter()
        self._memory: list[_MemoryUse] = []

    def run(self, steps: int, on_reopen: Callable[[int], None] = _say_nothing) -> SoakReport:
        """Plays this many steps, once. on_reopen: gets the number played.

        Raises SoakFailed at the first finding, and WrongState for a second run.
        """
        if self._steps:
            raise WrongState(f"this soak has already run {self._steps} steps; make another one")
        started = time.perf_counter()
        try:
            while self._steps < steps:
                self._steps += 1
                self._play(self._steps)
                if self._steps % self._scenario.audit_every == 0:
                    self._audit(self._steps)
                if self._steps % self._scenario.reopen_every == 0 and self._steps < steps:
                    self._reopen(self._steps)
                    on_reopen(self._steps)
            self._close(self._steps)
        except SoakFailed:
            raise
        except Exception as error:  # any exception of a step is a finding, and the step's number is needed to repeat it
            frame = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
            raise self._failure(self._steps, f"step {self._steps}", what) from error
        return self._report(time.perf_counter() - started)

    def _play(self, number: int) -> None:
        drawn = self._world.draw_step(self._runtime.padding.seqs.sizes)
        batch = drawn.batch_on(self._runtime.device)
        shape = self._shape(number, batch, drawn.pad_to)
        self._page_copies += sum(len(table.pending.copies) for table in self._runtime.table.spaces)
        self._model.poison()
        self._rounds.poison()
        drafts = drawn.action is Action.DRAFT
        before = self._runner.counters
        rows = self._runner.run(batch, shape)
        moves = drawn.moves_on(self._runtime.device)
        if moves is not None:
            self._runtime.move_accepted(*moves)
            self._moved_paths += len(moves[1])
        after = self._runner.counters
        way = _way(before, after)
        self._ways[f"{Action.DRAFT.value if drafts else shape.kind.value} {way}"] += 1
        self._split_steps += shape.num_halves > 1
        if after.graphs_off:
            raise self._failure(number, f"step {number}", f"graphs were switched off: {after.graphs_off}")
        self._unchecked.append(
            PlayedStep(
                number=number,
                action=drawn.action.value,
                shape=shape,
                way=way,
                sequences=drawn.truths(),
                outputs=self._rounds.outputs(batch, shape, rows)
                if drafts
                else self._model.outputs(token_places(batch, shape), rows),
                history=tuple(self._world.history),
            )
        )
        self._world.finish(drawn)
        if len(self._unchecked) >= self._scenario.max_unchecked:
            self._check()

    def _shape(self, number: int, batch: StepBatch, seqs: int | None) -> PaddedShape:
        """Returns the padded shape of a step, whole or as two halves. seqs: None if the ladder decides"""
        padding = self._runtime.padding
        # Steps with prefixes are not split: both halves would read them.
        if number % self._scenario.split_every or batch.prefixes is not NO_PREFIXES:
            return padding.shape(batch, _pad_to(number, batch, seqs, 1))
        return padding.split_shape(batch, _pad_to(number, batch, seqs, HALVES))

    def _check(self) -> None:
        """Compares the steps played since the last time. Until here the host ran ahead of the device."""
        for step in self._unchecked:
            mismatch = self._checker.check(step) or self._alone.check(step)
            if mismatch is not None:
                where = str(step)
                if mismatch.layer is not None:
                    where += f", layer {mismatch.layer}"
                if mismatch.seq is not None:
                    where += f", sequence {mismatch.seq} ({step.sequences[mismatch.seq]})"
                raise SoakFailed(SoakFault(step.number, where, mismatch.what, step.history))
        self._unchecked.clear()

    def _audit(self, number: int) -> None:
        """Checks state that no output shows yet. The last step has published all changes of the table."""
        self._check()
        self._runner.check_addresses()
        for layer, pages in enumerate(self._layers):
            if not pages.is_zero(RESERVED_PAGE):
                raise self._failure(number, f"after step {number}", f"page 0 of layer {layer} is no longer zero")
        for table in self._runtime.table.spaces:
            if not table.pending and not np.array_equal(table.entries.cpu().numpy(), table.entries_host):
                what = f"the device's table of the {table.space.name} space differs from the host's"
                raise self._failure(number, f"after step {number}", what)
            free = len(self._free_pages(table))
            if free != table.num_free_pages:
                what = (
                    f"{free} pages{table.pages.of} are held by no row nor kept, but {table.num_free_pages} are "
                    "reported free"
                )
                raise self._failure(number, f"after step {number}", what)
        if self._runtime.states.memory[:2].any() or self._runtime.states.headers[:2].any():
            raise self._failure(number, f"after step {number}", "the state of row 0, which no request has, is not 0")
        self._poison_free_memory()

    def _reopen(self, number: int) -> None:
        self._check()
        self._reopens += 1
        ladders = self._scenario.ladders[self._reopens % len(self._scenario.ladders)]
        self._runner.reopen(ladders.seqs, ladders.tokens)
        self._memory.append(_MemoryUse.now(self._runtime.device))
        growth = self._growth()
        if growth.host_bytes > MAX_HOST_GROWTH_BYTES or growth.device_bytes > MAX_DEVICE_GROWTH_BYTES:
            what = f"memory grew by {growth.host_bytes} bytes on the host and {growth.device_bytes} on the device"
            raise self._failure(number, f"after step {number}", what)

    def _close(self, number: int) -> None:
        """Frees all requests, and checks that all rows and pages are free as at the beginning."""
        self._runner.check_device()
        self._world.free_all()
        self._audit(number)
        self._reopen(number)
        table = self._runtime.table
        missing = sum(pages.num_usable_pages - pages.num_free_pages for pages in table.spaces)
        states = self._runtime.states.recurrent.checkpoints - table.kept.num_free_states
        if missing or states or table.num_free_rows != self._scenario.max_num_rows:
            what = (
                f"{missing} pages and {states} checkpoints are held, and {table.num_free_rows} rows are free, when no "
                "request is left"
            )
            raise self._failure(number, f"after step {number}", what)

    def _free_pages(self, table: PageTable) -> list[int]:
        """Returns the pages of a space that no row holds and that are not kept."""
        every = set(range(table.pages.first_page, table.pages.num_pages))
        return sorted(every - self._world.held_pages(table.space))

    def _poison_free_memory(self) -> None:
        """Fills free pages with NaN, so that reads of tokens that were not stored or have left the window show.

        So are the states of free rows, which no copy reads after a step.
        """
        rows = range(1, self._scenario.max_num_rows + 1)
        free_rows = [row for row in rows if not self._runtime.table.is_admitted(row)]
        if not self._runtime.states.is_empty:
            slots = torch.tensor([2 * row + at for row in free_rows for at in (0, 1)], device=self._runtime.device)
            self._runtime.states.memory.index_fill_(0, slots.long(), 0xFF)
        for table in self._runtime.table.spaces:
            never = range(RESERVED_PAGE + 1, table.pages.first_page)
            ids = [*never, *self._free_pages(table)]
            free = torch.tensor(ids, dtype=torch.int64, device=self._runtime.device)
            for pages in self._runtime.pool.in_space(table.space).layers:
                pages.fill_nan(free)

    def _growth(self) -> _MemoryUse:
        """Returns the growth since the end of the warm-up: every ladder was open once, or half of the run is over."""
        if len(self._memory) < 2:
            return _MemoryUse(0, 0)
        first, last = self._memory[min(len(self._scenario.ladders), len(self._memory) - 1) - 1], self._memory[-1]
        return _MemoryUse(last.host_bytes - first.host_bytes, last.device_bytes - first.device_bytes)

    def _failure(self, number: int, where: str, what: str) -> SoakFailed:
        return SoakFailed(SoakFault(number, where, what, tuple(self._world.history)))

    def _report(self, seconds: float) -> SoakReport:
        growth = self._growth()
        counters = self._runner.counters
        return SoakReport(
            seed=self._seed,
            steps=self._steps,
            replays=counters.replays,
            captures=counters.captures,
            split_steps=self._split_steps,
            ways=dict(sorted(self._ways.items())),
            reopens=self._reopens,
            actions={action.value: self._world.counts[action] for action in Action},
            moved_paths=self._moved_paths,
            page_copies=self._page_copies,
            checked_tokens=self._checker.num_tokens,
            worst_error=self._checker.worst,
            deterministic=self._runtime.deterministic,
            served_alone=self._alone.num_seqs,
            host_growth_bytes=growth.host_bytes,
            device_growth_bytes=growth.device_bytes,
            seconds=seconds,
            guards_off=self._runtime.guards.off,
        )


def _pad_to(number: int, batch: StepBatch, seqs: int | None, num_children: int) -> PadTo | None:
    """Returns a padding to this many sequences. One step in three also pads tokens, as if another rank prefilled."""
    if seqs is None:
        return None
    can_take = batch.prefixes is NO_PREFIXES and batch.drafts is NO_DRAFTS
    takes_tokens = can_take and number % _TOKENS_EVERY == 0
    return PadTo(round_up(seqs, num_children), HALVES * max(1, batch.num_tokens) if takes_tokens else 0)
