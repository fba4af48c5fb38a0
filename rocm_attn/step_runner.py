"""StepRunner: runs a model's forward over the runtime, eagerly or as a graph, on one path.

What is captured is fill and forward, as one function; an eager step calls the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rocm_attn.errors import BadTensor
from rocm_attn.hip_graphs.errors import RecordingRefused
from rocm_attn.hip_graphs.graph_cache import Entry, GraphCache
from rocm_attn.hip_graphs.pinned import PinnedTensors
from rocm_attn.hip_graphs.recorder import Recorder
from rocm_attn.plan import StepPlan
from rocm_attn.runtime import AttentionRuntime, Step
from rocm_attn.step_batch import NO_TOKEN_IDS, StepBatch

Forward = Callable[[Step], Tensor]


@dataclass(frozen=True, slots=True)
class StepCounters:
    """What a runner has done so far.

    steps:            all of them
    replays:          of them, run as a graph
    captures:         graphs made
    capture_seconds:  spent making them
    real_seqs:        sequences over all steps
    padded_seqs:      padded sequences that came on top of them
    graphs_off:       why graphs were switched off; empty while they are on or were never asked for
    """

    steps: int
    replays: int
    captures: int
    capture_seconds: float
    real_seqs: int
    padded_seqs: int
    graphs_off: str


class StepRunner:
    """Runs steps of one forward function.

    forward:  Step -> tensor [S, ...], one row for each sequence. It must not synchronise, must not branch on lengths,
              and must do the same work each time it is called with the same metadata.
    recorder: makes graphs of steps at the runtime's capture sizes; None runs every step eagerly
    """

    def __init__(self, runtime: AttentionRuntime, forward: Forward, recorder: Recorder | None) -> None:
        self._runtime = runtime
        self._forward = forward
        self._recorder = recorder
        self._pinned = PinnedTensors()
        self._graphs = GraphCache(self._pinned)
        self._entry_of_plan: dict[StepPlan, Entry[Tensor]] = {}
        self._steps = self._real_seqs = self._padded_seqs = 0
        self._capture_seconds = 0.0
        self._graphs_off = ""
        if recorder is not None:
            self._seal()

    @property
    def counters(self) -> StepCounters:
        """A snapshot of what was done so far."""
        counted = self._graphs.counters
        return StepCounters(
            steps=self._steps,
            replays=counted.replays,
            captures=counted.captures,
            capture_seconds=self._capture_seconds,
            real_seqs=self._real_seqs,
            padded_seqs=self._padded_seqs,
            graphs_off=self._graphs_off,
        )

    def run(self, batch: StepBatch, pad_to: int | None = None) -> Tensor:
        """One step. Returns forward's rows for the real sequences, [num_seqs, ...]; valid until the next step.

        Raises what begin_step and forward raise; the runtime is ready for another step then.
        """
        step = self._runtime.stage(batch, pad_to)
        try:
            rows = self._replay(step) if self._recorder is not None and step.plan.replayable else self._body(step)
        finally:
            self._runtime.end_step()
        num_padded = step.plan.shape.num_seqs
        if rows.shape[0] != num_padded:
            raise BadTensor(f"forward returned {rows.shape[0]} rows for {num_padded} padded sequences")
        self._steps += 1
        self._real_seqs += batch.num_seqs
        self._padded_seqs += num_padded - batch.num_seqs
        return rows if num_padded == batch.num_seqs else rows[: batch.num_seqs]

    def capture_all(self) -> None:
        """Make a graph of every capture size, largest first, before the first request arrives.

        Kernels that bake a length are captured at their smallest length bucket; others need no second graph.
        """
        empty = StepBatch(NO_TOKEN_IDS, NO_TOKEN_IDS, NO_TOKEN_IDS)
        for size in reversed(self._runtime.padding.seqs.sizes):
            self.run(empty, pad_to=size)

    def reopen(self, capture_sizes: Sequence[int], capture_tokens: Sequence[int] = (1,)) -> None:
        """Drain the device, drop every graph and its memory, and seal again for other capture sizes.

        Graphs are made anew as steps need them, or by capture_all(). Requests, pages and their content stay.
        Under tensor parallelism all ranks must call it between the same two steps. Raises BadSetting, WrongState.
        """
        self._runtime.unseal(capture_sizes, capture_tokens)
        self._entry_of_plan.clear()
        self._graphs.drop_all()
        self._pinned.release()
        if self._recorder is not None:
            self._recorder.release_memory()
            self._seal()

    def check_addresses(self) -> None:
        """Compare the address, shape, stride and dtype of everything that graphs read. Raises StaleRecording."""
        self._pinned.check()

    def _seal(self) -> None:
        self._runtime.seal()
        for name, tensor in self._runtime.sealed_tensors().items():
            self._pinned.pin(name, tensor, partial(_sealed_tensor, self._runtime, name))

    @torch.no_grad()
    def _body(self, step: Step) -> Tensor:
        self._runtime.fill()
        return self._forward(step)

    def _replay(self, step: Step) -> Tensor:
        entry = self._entry_of_plan.get(step.plan)
        if entry is None:
            entry = self._capture(step)
        return self._body(step) if entry is None else self._graphs.replay_entry(entry)

    def _capture(self, step: Step) -> Entry[Tensor] | None:
        """A graph of the step, or None with graphs switched off when forward cannot be captured."""
        assert self._recorder is not None
        try:
            entry = self._graphs.record(step.plan.key, self._recorder, lambda: self._body(step))
        except RecordingRefused as refusal:
            self._recorder = None
            self._graphs_off = str(refusal)
            return None
        self._capture_seconds += entry.capture_seconds
        self._entry_of_plan[step.plan] = entry
        return entry


def _sealed_tensor(runtime: AttentionRuntime, name: str) -> Tensor:
    return runtime.sealed_tensors()[name]
