"""Predicts what a runtime captures and how much memory it takes, without a GPU and without capturing anything.

The runtime is built on torch's meta device, so the prediction comes from the code that allocates on a GPU. The memory
of the graphs themselves, which holds the activations of forward, depends on the model and is measured on capture.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from rocm_attn.batch.padding import PaddedShape, PaddingPolicy
from rocm_attn.capture.graphs import capture_shapes, draft_shapes
from rocm_attn.kernels.metadata.step_tensors import FIELDS, Need, Unit
from rocm_attn.machine.target import Target
from rocm_attn.paging.index_spaces import Space
from rocm_attn.paging.kv_pool import page_bytes, state_bytes
from rocm_attn.paging.state_pool import NO_RECURRENT_LAYERS, SLOTS_OF_ROW, RecurrentLayers, slot_bytes
from rocm_attn.problem import Problem
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.buffers import ALL_MEMORY_GUARDS, PADDED_BATCH
from rocm_attn.step.memory import SELECTION_COUNTS, SELECTION_UNITS, WORKSPACE, StepMemory
from rocm_attn.step.options import RuntimeOptions


@dataclass(frozen=True, slots=True)
class Allocation:
    """One allocation. knob: the settings that determine its size, with their values"""

    name: str
    num_bytes: int
    knob: str


@dataclass(frozen=True, slots=True)
class Bucket:
    """One graph that would be made, with the bytes of its steps' index buffers and schedules, and of the workspace."""

    shape: PaddedShape
    step_bytes: int
    workspace_bytes: int


@dataclass(frozen=True, slots=True)
class PlannedPages:
    """The pages that hold all tokens of a sequence. num_pages: with the reserved page 0; page_bytes: over all layers"""

    num_pages: int
    page_bytes: int
    page_size: int


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """The memory that a runtime of these settings allocates, and the graphs that it captures.

    buckets: graphs, in the order in which they are made; none if a kernel cannot be captured
    lengths: True if more graphs follow, one for each length bucket, because a kernel bakes in a length
    parts:   every allocation that is made before the first step
    pages:   those of the pool for layers without a window, or of all layers
    kv_bytes: of all pools
    checkpoint_bytes: of states that a prefix cache keeps, whose number grows with the pages
    draft_bytes: bytes that would not be allocated without rounds of drafts; num_pages is the same
    """

    buckets: tuple[Bucket, ...]
    lengths: bool
    parts: tuple[Allocation, ...]
    pages: PlannedPages
    kv_bytes: int
    checkpoint_bytes: int
    draft_bytes: int

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


def plan_capture(
    problems: Sequence[Problem],
    target: Target,
    options: RuntimeOptions,
    recurrent: RecurrentLayers = NO_RECURRENT_LAYERS,
) -> CapturePlan:
    """Predicts what a runtime of these layers and options allocates and what StepRunner.capture_all() captures.

    recurrent: layers that keep states in place of K and V
    Raises what build_runtime raises.
    """
    runtime = build_runtime(problems, options, recurrent, device=torch.device("meta"), target=target)
    padding = runtime.padding
    shapes = [
        shape
        for shape in (*capture_shapes(padding), *draft_shapes(padding))
        if all(selection.kernel(shape.kind).entry.graph_safe for selection in runtime.selections)
    ]
    entries = [kernel.entry for selection in runtime.selections for kernel in selection.kernels.values()]
    parts = _step_parts(runtime, padding)
    full = [p for layer, p in enumerate(problems) if runtime.pool.space_of_layer(layer) == Space.FULL]
    without = _step_parts(runtime, replace(padding, drafts=())) if padding.drafts else parts
    return CapturePlan(
        buckets=tuple(_bucket(runtime, shape) for shape in shapes),
        lengths=bool(shapes) and any(entry.bakes for entry in entries),
        parts=(*parts, *_request_parts(runtime, problems), *_state_parts(runtime)),
        pages=PlannedPages(runtime.pool.in_space(Space.FULL).num_pages, page_bytes(full), runtime.pool.page_size),
        kv_bytes=sum(runtime.pool.in_space(table.space).num_bytes for table in runtime.table.spaces),
        checkpoint_bytes=recurrent.checkpoints * slot_bytes(recurrent),
        draft_bytes=sum(part.num_bytes for part in parts) - sum(part.num_bytes for part in without),
    )


def _bucket(runtime: AttentionRuntime, shape: PaddedShape) -> Bucket:
    specs = runtime.core.memory.specs
    num_bytes = {spec.name: PADDED_BATCH.elements(spec, shape) * spec.dtype.itemsize for spec in specs}
    workspace_bytes = num_bytes.pop(WORKSPACE)
    return Bucket(shape, sum(num_bytes.values()), workspace_bytes)


def _step_parts(runtime: AttentionRuntime, padding: PaddingPolicy) -> list[Allocation]:
    """The buffers of captured steps, at the size of the largest step. padding: says which steps are captured"""
    memory = StepMemory(
        runtime.kinds, runtime.table, runtime.device, ALL_MEMORY_GUARDS, runtime.states, mask_keys=padding.mask_keys
    )
    memory.seal(padding.largest_shapes())
    knobs = _knobs(runtime)
    return [Allocation(name, tensor.nbytes, knobs[name]) for name, tensor in memory.sealed_tensors().items()]


def _knobs(runtime: AttentionRuntime) -> dict[str, str]:
    """The settings that determine the size of each buffer, by name."""
    seqs = f"capture_sizes up to {runtime.padding.seqs.largest}"
    tokens = f"capture_tokens up to {runtime.padding.tokens.largest}"
    of_unit = {
        Unit.COUNT: "split_steps" if runtime.padding.max_children > 1 else "always the same",
        Unit.SEQ: seqs,
        Unit.SEQ_BOUNDARY: seqs,
        Unit.TOKEN: f"{seqs} or {tokens}",
        Unit.LIST_ENTRY: f"{seqs} x {_row_width(runtime)}",
        Unit.TABLE_ENTRY: f"{seqs} x {_row_width(runtime)}",
        Unit.MASK_WORD: f"{tokens}, mask_keys {runtime.padding.mask_keys}",
        Unit.DRAFT: f"{seqs}, drafts",
        Unit.WORD: f"{seqs}, {tokens}, {runtime.target.compute_units} compute units",
    }
    of_buffer = {spec.name: of_unit[spec.unit] for spec in runtime.core.memory.specs}
    of_need = {Need.PREFIXES: f"shared_prefixes, {seqs}"}
    of_prefixes = {name: of_need[need] for name, field in FIELDS.items() for need in field.needs if need in of_need}
    # Deterministic decode has a slot for each segment of the longest sequence.
    lengths = f", {_row_width(runtime)}" if runtime.options.deterministic else ""
    chosen = dict.fromkeys((SELECTION_UNITS, SELECTION_COUNTS), f"{of_unit[Unit.TOKEN]}, keys chosen by an indexer")
    others = {"mask_positions": tokens, WORKSPACE: of_unit[Unit.WORD] + lengths}
    return {**of_buffer, **of_prefixes, **chosen, **others}


def _request_parts(runtime: AttentionRuntime, problems: Sequence[Problem]) -> Iterator[Allocation]:
    """The memory of requests: their tables, then the pools."""
    options, spaces = runtime.options, runtime.table.spaces
    for table in spaces:
        entries = f"{_rows_knob(runtime)} {options.num_rows} x {_row_width(runtime)}"
        yield Allocation(f"{_prefix(table.space)}request table", table.entries.nbytes, entries)
    for table in spaces:
        pool, pages = runtime.pool.in_space(table.space), table.pages
        of_space = [p for layer, p in enumerate(problems) if runtime.pool.space_of_layer(layer) is table.space]
        of_page = page_bytes(of_space)
        if table.space is runtime.pool.space_of_states:
            of_page += state_bytes(problems)
        assert pool.num_bytes == pool.num_pages * of_page, "the pool holds its pages and no other buffer"
        knob = f"{pages.knob} {pages.num_pages} of {of_page} bytes"
        yield Allocation(f"{_prefix(table.space)}KV pool", pool.num_bytes, knob)


def _state_parts(runtime: AttentionRuntime) -> Iterator[Allocation]:
    """The memory of recurrent layers' states, if there are any."""
    states, num = runtime.states, runtime.states.recurrent.checkpoints
    if states.is_empty:
        return
    of_slot = slot_bytes(states.recurrent)
    of_rows = f"{SLOTS_OF_ROW} x {_rows_knob(runtime)} {runtime.options.num_rows}"
    of_checkpoints = num * of_slot
    of_each = f"{of_slot} bytes, kept {states.recurrent.kept}"
    yield Allocation("states of requests", states.num_bytes - of_checkpoints, f"{of_rows} of {of_each}")
    yield Allocation("kept states", of_checkpoints, f"checkpoints {num} of {of_each}")
    yield Allocation("state headers", states.headers.nbytes, f"{of_rows}, checkpoints {num}")
    yield Allocation("state tags", states.tags.nbytes, f"{_rows_knob(runtime)} {runtime.options.num_rows}")


def _rows_knob(runtime: AttentionRuntime) -> str:
    return "max_num_rows" if runtime.options.max_num_rows else "max_num_seqs"


def _row_width(runtime: AttentionRuntime) -> str:
    return f"max_kv_len {runtime.max_kv_len} / page_size {runtime.pool.page_size}"


def _prefix(space: Space) -> str:
    return "" if space == Space.FULL else f"{space.name} "
