"""What a round launches after its step, and where the host reads what came of it.

At first its parts are launched one by one: the step, the picks, what is accepted, the inputs of the next round. When
all of them have run they are one graph, of those that the step has and of what comes after it. What a round tells lies
in one piece on the device, from where each round is copied to memory of its own.
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
from rocm_attn.kernels.speculative.arguments import TOLD_WORDS, GuessedRound
from rocm_attn.providers.launches import MakeNextRound
from rocm_attn.runner.asking_picker import ShapedRows, overlaid
from rocm_attn.runner.sampling import Found, TokenPicker
from rocm_attn.runner.speculation.kept import MOST_BUCKETS
from rocm_attn.runner.speculation.round_trees import Guessed
from rocm_attn.step.host_ring import Fence, NoFence, wait_for_all
from rocm_attn.step.prepared import RepeatedLauncher

# Words that each part of what is told begins at a multiple of: kernels take addresses of 16 bytes.
_PART = 4


class Told(NamedTuple):
    """What a round tells, of n sequences with W places each: parts of one piece of memory.

    words: int32 [any], all of it
    found: int32 [n * W, 2], as of launch_pick_rows
    told:  int32 [n, TOLD_WORDS], as of GuessedRound
    path:  int32 [n, W], as of Accepted
    """

    words: Tensor
    found: Tensor
    told: Tensor
    path: Tensor

    @classmethod
    def of(cls, words: Tensor, num_seqs: int, width: int) -> Told:
        """Of memory for as many sequences, or more."""
        parts, begin = list[Tensor](), 0
        for lines, columns in ((num_seqs * width, 2), (num_seqs, TOLD_WORDS), (num_seqs, width)):
            parts.append(words[begin : begin + lines * columns].view(lines, columns))
            begin = _next_part(begin + lines * columns)
        return cls(words[:begin], *parts)


def _next_part(end: int) -> int:
    return -(-end // _PART) * _PART


def told_words(most_seqs: int, width: int, device: torch.device, *, pinned: bool = False) -> Tensor:
    """Memory for what rounds of so many sequences tell."""
    sizes = most_seqs * width * 2, most_seqs * TOLD_WORDS, most_seqs * width
    return torch.zeros(sum(map(_next_part, sizes)), dtype=torch.int32, device=device, pin_memory=pinned)


class RoundMemory:
    """Where the device tells the host of a round, and the fence after that.

    words:  as of Told
    shaped: int32 [most_rows, 2], what was found of rows that were shaped
    """

    def __init__(self, most_seqs: int, width: int, device: torch.device) -> None:
        pinned, host = device.type == "cuda", torch.device("cpu")
        self.words = told_words(most_seqs, width, host, pinned=pinned)
        self.shaped = torch.zeros(most_seqs * width, 2, dtype=torch.int32, pin_memory=pinned)
        self.done: Fence = torch.Event(device) if pinned else NoFence()
        # torch knows of no kernel that writes pinned memory, and gives a dropped one's to the next who asks.
        held: list[Any] = [self.words, self.shaped]
        weakref.finalize(self, wait_for_all, [self.done], held).atexit = False


class ToldOnHost:
    """What the host reads of rounds that tell in one memory. n, W: as of Told

    told, path: as there
    """

    def __init__(self, memory: RoundMemory, num_seqs: int, width: int) -> None:
        to = Told.of(memory.words, num_seqs, width)
        self.words, self.shaped = to.words, memory.shaped
        self.told: Int32Array = to.told.numpy()
        self.path: Int32Array = to.path.numpy()
        self._found = Found.of(to.found.numpy())

    def found(self, rows: ShapedRows) -> Found:
        """What was found in each place, when the round is done. rows: that were shaped in it"""
        return overlaid(self._found, rows.rows, Found.of(self.shaped[: len(rows.rows)].numpy()))


class RoundOps(NamedTuple):
    """What rounds are launched by. stream: as of RepeatedLauncher; joiner: makes graphs of what comes after a step"""

    picker: TokenPicker
    next_round: MakeNextRound
    stream: Callable[[], int] | None
    joiner: Joiner


class RoundLaunches:
    """What each round of a step launches after it.

    given:    what the round after it is made of
    guessed:  its guesses
    to:       where it tells, on the device
    on_host:  where it tells the host, by memory
    draws:    whether tokens are drawn
    looks_up: as of Guesses
    """

    def __init__(
        self,
        ops: RoundOps,
        given: GuessedRound,
        guessed: Guessed,
        to: Told,
        on_host: Many[ToldOnHost],
        *,
        draws: bool,
        looks_up: bool,
    ) -> None:
        width = to.path.shape[1]
        self.guessed, self.on_host = guessed, on_host
        self._ops, self._draws, self._terms, self._to = ops, draws, given.terms, to
        # Logits in a graph's own memory. Others are not kept: the size of the pool leaves no room for them.
        self._logits: Tensor | None = None
        self._graph: Graph[Tensor] | None = None
        self._pick: Callable[[], None] = _nothing
        make_next = partial(ops.next_round, guessed.picked, given, width, draws=draws, looks_up=looks_up)
        self._record_next = partial(run_as_launch, make_next)
        self._next = RepeatedLauncher(
            ops.stream, ops.next_round, guessed.picked, given, width, draws=draws, looks_up=looks_up
        )
        # By a step's graph: there is one for each bucket of lengths.
        self._joined: dict[int, tuple[Graph[Tensor], Recording]] = {}
        self._may_join = True

    def pick(self, logits: Tensor, graph: Graph[Tensor] | None) -> None:
        """Pick its tokens.

        logits: [num_seqs, W, vocab]
        graph:  that has put them where it puts them each time; None: no graph has
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
        """Pick the tokens of rows that ask for more, after pick(). logits: as there; found: as of ToldOnHost.shaped"""
        rows.pick(logits.flatten(0, 1), rows.terms_of(self._terms), found[: len(rows.rows)])

    def make_next(self) -> None:
        """Accept what was picked, and make the next round but for its guesses."""
        self.guessed.accept()
        self._next()

    def tell(self, on_host: ToldOnHost) -> None:
        """Have the host told of the round that was launched last."""
        on_host.words.copy_(self._to.words, non_blocking=True)

    def as_one(self, graph: Graph[Tensor] | None) -> Recording | None:
        """A step's graph and all that comes after it; None: there is none of this step's. graph: the step's"""
        joined = self._joined.get(id(graph))
        return joined[1] if joined is not None else None

    def join(self, graph: Graph[Tensor] | None) -> None:
        """Make as_one() of what was launched part by part, if all of that are launches by now. graph: the step's"""
        accepting = self.guessed.accepting
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
    """What no round picks by."""
