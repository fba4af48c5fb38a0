"""ExternalRuns: how steps over an engine's storage run, for each shape that steps have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.errors import BadTensor, NeverFits, Unsupported, WrongState
from rocm_attn.kernels.metadata.engine_tensors import LengthBounds, PublishedLengths
from rocm_attn.kernels.tuning.tiles import next_power_of_2
from rocm_attn.machine.devices import on_device
from rocm_attn.paging.adopted import AdoptedTables
from rocm_attn.providers.contract import Baked
from rocm_attn.step.core import StepCore
from rocm_attn.step.external_step import Causality, ExternalStep, NoCells
from rocm_attn.step.memory import DeviceStep
from rocm_attn.step.plan import StepPlan, kv_len_bucket, make_plan

# Runs of steps that are not captured are kept for so many shapes.
_MOST_KEPT = 64


@dataclass(slots=True, eq=False)
class ExternalRun:
    """How steps of one shape run, and where. bounds: they follow the tables"""

    core: StepCore
    plan: StepPlan
    children: tuple[DeviceStep]
    to: PublishedLengths
    bounds: LengthBounds

    @property
    def step(self) -> DeviceStep:
        return self.children[0]


class ExternalRuns:
    """The runs of one ExternalAttention.

    cores:    what runs the steps of each causality
    num_seqs, num_tokens: padded ones of the largest step
    short_kv: whether sequences may have fewer tokens in their KV than new ones
    """

    def __init__(
        self,
        cores: Mapping[Causality, StepCore],
        tables: AdoptedTables,
        device: torch.device,
        num_seqs: int,
        num_tokens: int,
        *,
        short_kv: bool,
    ) -> None:
        self._cores, self._tables, self._device = cores, tables, device
        self._num_seqs, self._num_tokens, self._short_kv = num_seqs, num_tokens, short_kv
        self._engine_row = torch.zeros(num_seqs, dtype=torch.int32, device=device)
        self._captured: dict[tuple[object, ...], ExternalRun] = {}
        self._kept: dict[tuple[object, ...], ExternalRun] = {}
        self._kept_at: tuple[object, ...] = ()
        self._changes_seen = 0
        self._is_sealed = False

    def seal(self, num_seqs: int, num_tokens: int) -> None:
        """Fix the addresses that graphs read, with room for steps that are padded to so many, and smaller ones."""
        for core in self._cores.values():
            kinds = [StepKind.EXTEND, StepKind.MIXED]
            if any(problem.custom_mask for problem in core.kinds.problems):
                kinds.append(StepKind.MASKED)
            shapes = [PaddedShape(kind, num_seqs, num_tokens) for kind in kinds]
            with on_device(self._device):
                core.memory.seal([PaddedShape(StepKind.DECODE, num_seqs, num_seqs), *shapes])
        self._is_sealed = True

    def core(self, causality: Causality) -> StepCore:
        """What runs the steps of a causality. Raises WrongState."""
        core = self._cores.get(causality)
        if core is None:
            named = ", ".join(each.name for each in self._cores)
            raise WrongState(
                f"no kernels were chosen for steps that say {causality.name}; build with causalities=..., which has "
                f"{named} now"
            )
        return core

    def of(self, step: ExternalStep) -> ExternalRun:
        """How a step runs: kept for captured ones, and for the latest of others.

        Raises NeverFits, WrongState, Unsupported, BadTensor.
        """
        if self._tables.changes != self._changes_seen:
            self._follow_tables()
        max_kv_len = 0 if step.captured else kv_len_bucket(step.max_kv_len, self._tables.max_kv_len)
        key = step.shape, step.min_q_len, step.max_q_len, max_kv_len, step.causality
        kept = self._captured if step.captured else self._kept
        run = kept.get(key)
        if run is None or (not step.captured and self._kept_at != run.core.memory.epochs):
            self._check(step)
            run = self._new_run(step, max_kv_len)
            if not step.captured and (len(kept) >= _MOST_KEPT or self._kept_at != run.core.memory.epochs):
                kept.clear()
                self._kept_at = run.core.memory.epochs
            kept[key] = run
        return run

    def _follow_tables(self) -> None:
        """Tables have other rows now. Graphs keep what they read; lengths and rows are looked at outside of them."""
        self._kept.clear()
        csr_indptr = self._tables.csr_indptr
        for run in self._captured.values():
            run.bounds = replace(run.bounds, csr_indptr=csr_indptr)
        self._changes_seen = self._tables.changes

    def _new_run(self, step: ExternalStep, max_kv_len: int) -> ExternalRun:
        core, shape = self.core(step.causality), step.shape
        bakes = {baked for selection in core.selections for baked in selection.kernel(shape.kind).row.bakes}
        if step.captured or Baked.MAX_KV_LEN not in bakes:
            max_kv_len = self._tables.max_kv_len
        max_q_len = 1 if shape.kind.decodes else min(step.max_q_len, shape.num_tokens)
        if Baked.MAX_Q_LEN in bakes:
            max_q_len = next_power_of_2(max_q_len)
        kernels = [selection.kernel(shape.kind) for selection in core.selections]
        plan = make_plan(shape, kernels, max_q_len=max_q_len, max_kv_len=max_kv_len, may_capture=step.captured)
        _check_plan(plan, captured=step.captured)
        try:
            (device_step,) = core.memory.new_device_steps(plan)
        except NeverFits as error:  # of captured steps alone: others get more memory
            raise NeverFits(
                f"a captured step of {shape.num_seqs} sequences and {shape.num_tokens} tokens is larger than seal() "
                "has made room for; give it larger bounds"
            ) from error
        bounds = LengthBounds(
            rows=self._tables.rows,
            kv_len=max_kv_len,
            min_q_len=step.min_q_len,
            max_q_len=min(step.max_q_len, max_q_len),
            num_tokens=shape.num_tokens,
            page_size=self._tables.page_size,
            causal=not self._short_kv or any(problem.causal for problem in core.kinds.problems),
            csr_indptr=self._tables.csr_indptr,
        )
        return ExternalRun(core, plan, (device_step,), self._published_to(device_step, plan, shape), bounds)

    def _published_to(self, device_step: DeviceStep, plan: StepPlan, shape: PaddedShape) -> PublishedLengths:
        """Where counts, rows and lengths of steps of a shape go."""
        tensors = device_step.tensors
        return PublishedLengths(
            counts=tensors.counts,
            engine_row=self._engine_row[: shape.num_seqs],
            row_of_seq=tensors.row_of_seq,
            kv_len=tensors.kv_len,
            q_len=tensors.q_len,
            pad_kv_len=plan.pads.kv_len,
            pad_q_len=plan.pads.q_len,
            gathered=self._tables.gathered,
        )

    def _check(self, step: ExternalStep) -> None:
        """Refuse a step that was not built for."""
        shape = step.shape
        if shape.num_seqs > self._num_seqs:
            raise NeverFits(
                f"the step is padded to {shape.num_seqs} sequences, built for {self._num_seqs}; "
                "raise num_seqs of the bounds"
            )
        if shape.num_tokens > self._num_tokens:
            raise NeverFits(
                f"the step is padded to {shape.num_tokens} tokens, built for {self._num_tokens}; "
                "raise num_tokens of the bounds"
            )
        if step.captured and not self._is_sealed:
            raise WrongState("graphs would read memory that may move; call seal() before the first captured step")
        core = self.core(step.causality)
        if not isinstance(step.mask, NoCells) and not any(p.custom_mask for p in core.kinds.problems):
            raise WrongState("the step has a mask and no layer looks at it; build with problems of custom_mask")
        if step.lengths.kv_len.device != self._device:
            raise BadTensor(f"kv_len is on {step.lengths.kv_len.device}, not on {self._device}")


def _check_plan(plan: StepPlan, *, captured: bool) -> None:
    """Refuse kernels that cannot run such steps."""
    if captured and not plan.replayable:
        names = sorted({kernel.row.name for kernel in plan.kernels if not kernel.row.graph_safe})
        raise WrongState(f"{', '.join(names)} cannot be captured; run such steps eagerly, or choose a provider")
    needy = sorted({kernel.row.name for kernel in plan.kernels if kernel.row.needs_host_lengths})
    if needy:
        raise Unsupported(f"{', '.join(needy)} must know the lengths on the host, and an engine's are on the device")
