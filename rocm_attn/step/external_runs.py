"""ExternalRuns and EnginePublisher: plans and memory of an engine's steps for each shape, and their publication."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_batch import INT32_MAX
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.errors import BadTensor, DeviceFault, NeverFits, Unsupported, WrongState
from rocm_attn.kernels.metadata.engine_tensors import LengthBounds, PublishedLengths
from rocm_attn.kernels.metadata.slot_layout import ECHO, HEADER_WORDS, NO_ECHO, STEP, STEP_BEFORE
from rocm_attn.kernels.tuning.tiles import next_power_of_2
from rocm_attn.machine.devices import on_device
from rocm_attn.paging.adopted import AdoptedTables
from rocm_attn.paging.stored_tokens import NO_STORES
from rocm_attn.problem import require_cells
from rocm_attn.providers.contract import Baked
from rocm_attn.providers.launches import StepOps
from rocm_attn.step.core import StepCore
from rocm_attn.step.external_step import BoolCells, Causality, EngineMask, ExternalStep, NoCells
from rocm_attn.step.host_ring import HostRing, RingSlot
from rocm_attn.step.layers import StepLayers
from rocm_attn.step.memory import DeviceStep
from rocm_attn.step.plan import StepPlan, kv_len_bucket, make_plan
from rocm_attn.step.protocols import LayerCalls
from rocm_attn.step.publisher import Found, PublishingGuards, StepChain
from rocm_attn.step.selections import StepSelections

# Number of shapes for which runs of steps that are not captured are kept.
_MOST_KEPT = 64


@dataclass(frozen=True, slots=True, eq=False)
class ExternalRun:
    """How steps of one shape run, and in which memory. layers: their layer calls, which check no step"""

    core: StepCore
    plan: StepPlan
    step: DeviceStep
    layers: LayerCalls
    to: PublishedLengths
    bounds: LengthBounds


class ExternalRuns:
    """The runs of one ExternalAttention.

    cores:    the core that runs the steps of each causality
    selections: the current selections of the running step
    num_seqs, num_tokens: padded sizes of the largest step
    has_cells: whether memory is kept for masks of cells
    """

    def __init__(
        self,
        cores: Mapping[Causality, StepCore],
        tables: AdoptedTables,
        selections: StepSelections,
        num_seqs: int,
        num_tokens: int,
        *,
        has_cells: bool,
    ) -> None:
        self._cores, self._tables, self._selections, self._has_cells = cores, tables, selections, has_cells
        self._num_seqs, self._num_tokens = num_seqs, num_tokens
        self._engine_row, self._keys_of_cells = torch.zeros(2, num_seqs, dtype=torch.int32, device=tables.device)
        kernels = [each for core in cores.values() for s in core.selections for each in s.kernels.values()]
        self._bakes_kv_len = any(Baked.MAX_KV_LEN in kernel.entry.bakes for kernel in kernels)
        self._captured: dict[tuple[object, ...], ExternalRun] = {}
        self._kept: dict[tuple[object, ...], ExternalRun] = {}
        self._changes_seen = 0
        self._is_sealed = False

    def seal(self, num_seqs: int, num_tokens: int) -> None:
        """Fixes the addresses that graphs read, with room for steps padded to these sizes, and smaller ones."""
        for core in self._cores.values():
            kinds = [StepKind.EXTEND, StepKind.MIXED]
            if any(problem.custom_mask for problem in core.kinds.problems):
                kinds.append(StepKind.MASKED)
            shapes = [PaddedShape(kind, num_seqs, num_tokens) for kind in kinds]
            if _verifies(core):
                shapes.append(PaddedShape(StepKind.VERIFY, num_seqs, num_tokens))
            with on_device(self._tables.device):
                core.memory.seal([PaddedShape(StepKind.DECODE, num_seqs, num_seqs), *shapes])
        self._is_sealed = True

    def core(self, causality: Causality) -> StepCore:
        """The core that runs the steps of a causality. Raises WrongState."""
        core = self._cores.get(causality)
        if core is None:
            named = ", ".join(each.name for each in self._cores)
            raise WrongState(
                f"no kernels were chosen for steps with {causality.name}; add it to causalities=..., which has "
                f"{named} now"
            )
        return core

    def of(self, step: ExternalStep) -> ExternalRun:
        """The run of a step: kept for captured steps, and for the latest others.

        Raises NeverFits, WrongState, Unsupported, BadTensor.
        """
        self._check_devices(step)
        if self._tables.changes != self._changes_seen:
            self._kept.clear()  # they read tables that are replaced
            self._changes_seen = self._tables.changes
        max_kv_len = self._tables.max_kv_len
        if self._bakes_kv_len and not step.captured:
            max_kv_len = kv_len_bucket(step.max_kv_len, max_kv_len)
        has_cells = isinstance(step.mask, BoolCells)
        key = step.shape, step.min_q_len, step.max_q_len, max_kv_len, step.causality, has_cells
        kept = self._captured if step.captured else self._kept
        run = kept.get(key)
        if run is None:
            self._check(step)
            run = self._new_run(step, max_kv_len)
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            kept[key] = run
        return run

    def _new_run(self, step: ExternalStep, max_kv_len: int) -> ExternalRun:
        core, tables = self.core(step.causality), self._tables
        shape = step.shape.of_few(step.max_q_len) if _verifies(core) else step.shape
        kernels = [selection.kernel(shape.kind) for selection in core.selections]
        bakes = {baked for kernel in kernels for baked in kernel.entry.bakes}
        if Baked.MAX_KV_LEN not in bakes:
            max_kv_len = tables.max_kv_len
        # A bound of 1 says that each sequence has one token, and others may have none.
        most = 1 if shape.kind.decodes else max(2, min(step.max_q_len, shape.num_tokens))
        max_q_len = next_power_of_2(most) if Baked.MAX_Q_LEN in bakes else most
        plan = make_plan(shape, kernels, max_q_len=max_q_len, max_kv_len=max_kv_len, may_capture=step.captured)
        _check_plan(plan, captured=step.captured)
        views = self._new_views(core, plan)
        tensors = views.tensors
        bounds = LengthBounds(
            rows=tables.rows,
            kv_len=max_kv_len,
            min_q_len=step.min_q_len,
            max_q_len=most,
            num_tokens=shape.num_tokens,
            page_size=tables.page_size,
            causal=not tables.short_kv or any(problem.causal for problem in core.kinds.problems),
            # More cells than int32 counts are not packed.
            num_cells=min(32 * tensors.mask_words.numel(), INT32_MAX) if isinstance(step.mask, BoolCells) else 0,
        )
        to = PublishedLengths(
            counts=tensors.counts,
            engine_row=self._engine_row[: shape.num_seqs],
            row_of_seq=tensors.row_of_seq,
            kv_len=tensors.kv_len,
            q_len=tensors.q_len,
            keys_of_cells=self._keys_of_cells[: shape.num_seqs],
            pad_kv_len=plan.pads.kv_len,
            pad_q_len=plan.pads.q_len,
            gathered=tables.gathered,
        )
        # The gate finds the run of the step, which may run: its layers check nothing.
        layers = StepLayers(core.layers, views, plan, lambda: None, NO_STORES, self._selections, 0)
        return ExternalRun(core, plan, views, layers, to, bounds)

    def _new_views(self, core: StepCore, plan: StepPlan) -> DeviceStep:
        """Views of the memory of steps of a plan. Raises NeverFits."""
        epochs = core.memory.epochs
        try:
            (views,) = core.memory.new_device_steps(plan)
        except NeverFits as error:  # only for captured steps; other steps get more memory
            raise NeverFits(
                f"a captured step of {plan.shape.num_seqs} sequences and {plan.shape.num_tokens} tokens is larger "
                "than the bounds given to seal(); give larger bounds"
            ) from error
        finally:
            if core.memory.epochs != epochs:
                self._kept.clear()  # they hold memory that was given up
        return views

    def _check_devices(self, step: ExternalStep) -> None:
        """Refuses tensors on another device. Every step has its own, so each is checked, not each shape alone."""
        device, lengths = self._tables.device, step.lengths
        for name, tensor in (("kv_len", lengths.kv_len), ("rows", lengths.rows), ("q", lengths.q)):
            if tensor is not None and tensor.device != device:
                raise BadTensor(f"{name} is on {tensor.device}, not on {device}")
        for name, tensor in _mask_tensors(step.mask).items():
            if tensor.device != device:
                raise BadTensor(f"the mask's {name} are on {tensor.device}, not on {device}")

    def _check(self, step: ExternalStep) -> None:
        """Refuses a step that does not fit the settings of the build."""
        for bound, things, found, most in (
            ("num_seqs", "sequences", step.shape.num_seqs, self._num_seqs),
            ("num_tokens", "tokens", step.shape.num_tokens, self._num_tokens),
        ):
            if found > most:
                raise NeverFits(
                    f"the step is padded to {found} {things}, and the most is {most}; raise {bound} of the bounds"
                )
        if step.captured and not self._is_sealed:
            raise WrongState("graphs would read memory that may move; call seal() before the first captured step")
        core = self.core(step.causality)
        if not isinstance(step.mask, NoCells) and not any(p.custom_mask for p in core.kinds.problems):
            raise WrongState("the step has a mask and no layer uses one; build with problems of custom_mask")
        if isinstance(step.mask, BoolCells):
            if not self._has_cells:
                raise WrongState("the step has a mask of cells and no memory is kept for them; build with mask_cells")
            require_cells(core.kinds.problems, "a mask of cells", "leave the mask out")


def _mask_tensors(mask: EngineMask) -> dict[str, Tensor]:
    """The tensors of a mask, by name."""
    if isinstance(mask, BoolCells):
        return {"cells": mask.cells, "positions": mask.positions}
    return {} if isinstance(mask, NoCells) else {"spans": mask.of_step}


def _verifies(core: StepCore) -> bool:
    """True if a layer has a kernel for verify steps."""
    return any(StepKind.VERIFY in selection.kernels for selection in core.selections)


def _check_plan(plan: StepPlan, *, captured: bool) -> None:
    """Refuses kernels that cannot run such steps."""
    if captured and not plan.replayable:
        names = sorted({kernel.entry.name for kernel in plan.kernels if not kernel.entry.graph_safe})
        raise WrongState(f"{', '.join(names)} cannot be captured; run such steps eagerly, or choose another provider")
    needy = sorted({kernel.entry.name for kernel in plan.kernels if kernel.entry.needs_host_lengths})
    if needy:
        raise Unsupported(f"{', '.join(needy)} cannot run with the lengths on the device, where an engine keeps them")


class EnginePublisher:
    """Writes the header of a ring slot and launches the kernel that reads it, one launch per step.

    on_fault: called once with the faults of earlier steps; it may raise
    """

    def __init__(
        self, ops: StepOps, device: torch.device, guards: PublishingGuards, on_fault: Callable[[DeviceFault], None]
    ) -> None:
        self.line = StepChain(HostRing(device, wait=guards.ring_wait), guards.new_echo_check(), device)
        self._launch, self._on_fault, self._of_last_step = ops.publish_engine, on_fault, guards.of_last_step
        # The words of a slot, counts and number of a publication that has begun and not ended.
        self._launching: tuple[memoryview, Tensor, int] | None = None
        self._found: Found = []

    def hear(self) -> RingSlot:
        """Returns the next slot, once its readers are done and the faults that it echoes are reported."""
        if self._launching is not None:
            self._settle()
        slot = self.line.ring.acquire(HEADER_WORDS)
        if slot.words[ECHO]:
            self.line.look(slot.words, self._found)
        if self._found:
            self._report()
        return slot

    def publish(self, slot: RingSlot, step: ExternalStep, run: ExternalRun) -> None:
        """Launches the kernel that writes a step's counts, rows and lengths. slot: from hear(), which comes before"""
        line, words, counts = self.line, slot.words, run.to.counts
        number = line.number % INT32_MAX + 1
        words[0], words[STEP], words[STEP_BEFORE] = step.num_seqs, number, line.number
        # In one statement, so an interrupt comes before all of it or after.
        words[ECHO], self._launching = NO_ECHO, (words, counts, number)
        try:
            before = counts if line.counts is None else line.counts
            self._launch(slot.tensor, before, step.lengths, run.bounds, run.to)
        finally:
            line.ring.release()
        line.counts, line.number, self._launching = counts, number, None

    def find_faults(self) -> None:
        """Reports all faults of steps that were not reported yet. The device has nothing left to do."""
        if self._launching is not None:
            self._settle()
        self.line.find_all(self._found, self._of_last_step)
        if self._found:
            self._report()

    def _report(self) -> None:
        fault = DeviceFault.of_all(self._found)
        self._found.clear()
        self._on_fault(fault)

    def _settle(self) -> None:
        """Finishes a publication that an exception has interrupted."""
        assert self._launching is not None
        words, counts, number = self._launching
        if self.line.settle(words, counts, number, by_graph=False):
            self.line.counts, self.line.number = counts, number
        self._launching = None
