"""The launches of a round after its step, and the memory from which the host reads its results.

At first its parts are launched one by one: the step, the picks, the acceptance, the inputs of the next round. When all
of them have run they are joined to one graph, from the step's graphs and the later parts. The results of a round lie in
one piece on the device, and are copied from there to the host memory of that round.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from collections.abc import Sequence as Many
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rocm_attn.batch.step_batch import Int32Array
from rocm_attn.capture.graphs import Graph
from rocm_attn.hip_graphs.errors import RecordingRefused, StaleRecording
from rocm_attn.hip_graphs.recorder import Joiner, Recording
from rocm_attn.kernels.launch import run_as_launch
from rocm_attn.kernels.speculative.arguments import EMITTED_WORDS, SpeculativeStep
from rocm_attn.providers.launches import MakeNextStep
from rocm_attn.step.host_ring import Fence, NoFence, wait_for_all
from rocm_attn.step.prepared import RepeatedLauncher
from rocm_serve.sampling.parameter_picker import ShapedRows, overlaid
from rocm_serve.sampling.sampling import PickedRows, TokenPicker
from rocm_serve.speculation.device_trees import DraftTokens
from rocm_serve.speculation.sealed_cache import MOST_BUCKETS

# Each part of the results begins at a multiple of this number of words: kernels take addresses of 16 bytes.
_PART = 4


class StepResults(NamedTuple):
    """The results of a round, for n sequences with W places each: parts of one piece of memory.

    words: int32 [any], all of it
    found: int32 [n * W, 2], see launch_pick_rows
    emitted:  int32 [n, EMITTED_WORDS], see SpeculativeStep
    path:     int32 [n, W], see Accepted
    """

    words: Tensor
    found: Tensor
    emitted: Tensor
    path: Tensor

    @classmethod
    def of(cls, words: Tensor, num_seqs: int, width: int) -> StepResults:
        """The parts of memory for num_seqs sequences, or more."""
        parts, begin = list[Tensor](), 0
        for lines, columns in ((num_seqs * width, 2), (num_seqs, EMITTED_WORDS), (num_seqs, width)):
            parts.append(words[begin : begin + lines * columns].view(lines, columns))
            begin = _next_part(begin + lines * columns)
        return cls(words[:begin], *parts)


def _next_part(end: int) -> int:
    return -(-end // _PART) * _PART


def result_words(most_seqs: int, width: int, device: torch.device, *, pinned: bool = False) -> Tensor:
    """Memory for the results of rounds of at most most_seqs sequences."""
    sizes = most_seqs * width * 2, most_seqs * EMITTED_WORDS, most_seqs * width
    return torch.zeros(sum(map(_next_part, sizes)), dtype=torch.int32, device=device, pin_memory=pinned)


class SpeculativeMemory:
    """Host memory for the results of a round, and the fence after they are copied.

    words:  see StepResults
    shaped: int32 [most_rows, 2], results of rows that were shaped
    """

    def __init__(self, most_seqs: int, width: int, device: torch.device) -> None:
        pinned, host = device.type == "cuda", torch.device("cpu")
        self.words = result_words(most_seqs, width, host, pinned=pinned)
        self.shaped = torch.zeros(most_seqs * width, 2, dtype=torch.int32, pin_memory=pinned)
        self.done: Fence = torch.Event(device) if pinned else NoFence()
        # torch knows of no kernel that writes pinned memory, and gives freed pinned memory to the next caller.
        held: list[Any] = [self.words, self.shaped]
        weakref.finalize(self, wait_for_all, [self.done], held).atexit = False


class StepResultsOnHost:
    """The results of rounds in one host memory. n, W: see StepResults

    emitted, path: see StepResults
    """

    def __init__(self, memory: SpeculativeMemory, num_seqs: int, width: int) -> None:
        to = StepResults.of(memory.words, num_seqs, width)
        self.words, self.shaped = to.words, memory.shaped
        self.emitted: Int32Array = to.emitted.numpy()
        self.path: Int32Array = to.path.numpy()
        self._found = PickedRows.of(to.found.numpy())

    def found(self, rows: ShapedRows) -> PickedRows:
        """The result of each place, when the round is done. rows: those that were shaped in it"""
        return overlaid(self._found, rows.rows, PickedRows.of(self.shaped[: len(rows.rows)].numpy()))


class SpeculativeOps(NamedTuple):
    """The launchers of rounds. stream: see RepeatedLauncher; joiner: makes graphs of the launches after a step"""

    picker: TokenPicker
    next_step: MakeNextStep
    stream: Callable[[], int] | None
    joiner: Joiner


class SpeculativeLaunches:
    """The launches of each round of a step after the step itself.

    given:    the inputs of the round after it
    drafted:  its drafts
    to:       its results on the device
    on_host:  the results on the host, by memory
    draws:    whether tokens are drawn
    looks_up: see DraftTokenMaker
    """

    def __init__(
        self,
        ops: SpeculativeOps,
        given: SpeculativeStep,
        drafted: DraftTokens,
        to: StepResults,
        on_host: Many[StepResultsOnHost],
        *,
        draws: bool,
        looks_up: bool,
    ) -> None:
        width = to.path.shape[1]
        self.drafted, self.on_host = drafted, on_host
        self._ops, self._draws, self._terms, self._to = ops, draws, given.terms, to
        # Logits in a graph's own memory. Others are not kept: the size of the pool leaves no room for them.
        self._logits: Tensor | None = None
        self._graph: Graph[Tensor] | None = None
        self._pick: Callable[[], None] = _nothing
        make_next = partial(ops.next_step, drafted.picked, given, width, draws=draws, looks_up=looks_up)
        self._record_next = partial(run_as_launch, make_next)
        self._next = RepeatedLauncher(
            ops.stream, ops.next_step, drafted.picked, given, width, draws=draws, looks_up=looks_up
        )
        # By the step's graph: there is one for each bucket of lengths.
        self._joined: dict[int, tuple[Graph[Tensor], Recording]] = {}
        self._may_join = True

    def pick(self, logits: Tensor, graph: Graph[Tensor] | None) -> None:
        """Picks the round's tokens.

        logits: [num_seqs, W, vocab]
        graph:  that writes the logits to the same place each time; None: no graph has written them
        """
        if logits is not self._logits:
            ops, rows = self._ops, logits.flatten(0, 1)
            pick = ops.picker.picking(rows, self._terms, self._to.found, ops.stream, draws=self._draws)
            if graph is None:
                pick()
                return
            self._logits, self._graph, self._pick = logits, graph, pick
        self._pick()

    def pick_shaped(self, logits: Tensor, rows: ShapedRows, found: Tensor) -> None:
        """Picks the tokens of rows that ask for more, after pick().

        logits: see pick(); found: see StepResultsOnHost.shaped
        """
        rows.pick(logits.flatten(0, 1), rows.terms_of(self._terms), found[: len(rows.rows)])

    def make_next(self) -> None:
        """Accepts picked tokens, and makes the inputs of the next round except its drafts."""
        self.drafted.accept()
        self._next()

    def tell(self, on_host: StepResultsOnHost) -> None:
        """Copies the results of the last round to the host."""
        on_host.words.copy_(self._to.words, non_blocking=True)

    def as_one(self, graph: Graph[Tensor] | None) -> Recording | None:
        """A step's graph joined with all later launches; None: there is none for this step. graph: the step's"""
        joined = self._joined.get(id(graph))
        return joined[1] if joined is not None else None

    def join(self, graph: Graph[Tensor] | None) -> None:
        """Makes as_one() from the parts that were launched, if all parts are launches by now. graph: the step's"""
        accepting = self.drafted.accepting
        if graph is None or accepting is None or self._logits is None or not self._may_join:
            return
        if graph is not self._graph or self.as_one(graph) is not None:  # the picks read the logits of that one
            return
        ops, rows = self._ops, self._logits.flatten(0, 1)
        pick = ops.picker.picking(rows, self._terms, self._to.found, None, draws=self._draws)
        try:
            picks = ops.joiner.record_launches(partial(run_as_launch, pick.launcher))
            next_one = ops.joiner.record_launches(self._record_next)
            whole = ops.joiner.join([graph.recording, picks, *accepting, next_one])
        except (RecordingRefused, StaleRecording, torch.OutOfMemoryError):
            self._may_join = False
            return
        if len(self._joined) >= MOST_BUCKETS:
            del self._joined[next(iter(self._joined))]
        self._joined[id(graph)] = graph, whole


def _nothing() -> None:
    """The pick before pick() has launchers."""
