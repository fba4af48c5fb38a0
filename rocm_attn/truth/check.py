"""Truth: a needle test of a runtime: checks that attention finds every key of a long context, also in replayed graphs.

A runtime runs sequences of the given lengths as a server would: chunked prefill while others decode, then decode steps,
all captured and replayed. Every query asks for a needle (needles.py), so each output is known without computing
attention. Long prompts show faults that short ones do not: overflows of 32-bit offsets, a pool that is written in one
layout or encoding and read in another, a window that is off by one, selections of an earlier step.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch
from rocm_attn.capture.check import NO_CHECK
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.errors import BadSetting
from rocm_attn.machine.settings import whole_number
from rocm_attn.paging.index_spaces import RESERVED_PAGE, num_pages
from rocm_attn.problem import Problem
from rocm_attn.providers.select import Selection
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.head_weights import HeadWeights
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.step import Part
from rocm_attn.truth.needle_layer import NeedleLayer, Tally, WrongNeedle
from rocm_attn.truth.wide_pages import place_rows, rows_needed, wrapping_pages

# The most needles per layer that a report names, of those that were missed or seen although hidden.
_MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class TruthPlan:
    """The load that is served.

    lengths:      tokens of each sequence when it begins to decode
    first_chunk:  tokens of a prompt's first chunk, if the prompt is longer
    chunk:        of its later chunks
    decode_steps: steps in which all sequences decode, after the last prompt
    num_pages:    of the pool, at least; 0: as many as the sequences need
    graphs:       whether steps are captured and replayed

    Raises BadSetting.
    """

    lengths: tuple[int, ...] = (2048, 6144, 10240, 40960, 86016)
    first_chunk: int = 1000
    chunk: int = 9216
    decode_steps: int = 4
    num_pages: int = 0
    provider: str = "auto"
    graphs: bool = True
    deterministic: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("first_chunk", "chunk", "decode_steps", "num_pages", "seed"):
            whole_number(name, getattr(self, name), least=int(name.endswith("chunk")))
        if not self.lengths or min(self.lengths) < 2:
            raise BadSetting(f"lengths are {self.lengths}; give one or more, each at least 2")

    @property
    def num_seqs(self) -> int:
        return len(self.lengths)

    def steps(self) -> Iterator[list[int]]:
        """Yields each sequence's new tokens, step by step: one prompt after the other, while earlier ones decode."""
        for seq, length in enumerate(self.lengths):
            done = 0
            while done < length:
                new = min(self.first_chunk if done == 0 else self.chunk, length - done)
                done += new
                yield [1] * seq + [new] + [0] * (self.num_seqs - seq - 1)
        for _ in range(self.decode_steps):
            yield [1] * self.num_seqs

    @property
    def kv_len(self) -> tuple[int, ...]:
        """Tokens of each sequence at the end."""
        return tuple(np.sum(list(self.steps()), axis=0).tolist())

    @property
    def most_tokens(self) -> int:
        return max(sum(q_len) for q_len in self.steps())


@dataclass(frozen=True, slots=True)
class Miss:
    """A needle that was not found, or one that was found although it is hidden.

    token, key: places in the sequence's KV, of the query and of the key that it asked for
    head:       query head
    distance:   |out - v| / |v|, v being the value of the key
    page, byte: the key's page, and that page's first byte in the layer's K pages
    replayed:   whether the step was a replay of a graph
    """

    layer: int
    length: int
    token: int
    key: int
    head: int
    visible: bool
    distance: float
    page: int
    byte: int
    replayed: bool

    def __str__(self) -> str:
        what = "was not found" if self.visible else "was seen although it is hidden"
        how = "a replayed" if self.replayed else "an eager"
        return (
            f"layer {self.layer}, sequence of {self.length}: key {self.key} {what} by head {self.head} of token "
            f"{self.token} in {how} step (its value is off by {self.distance:.3g}; page {self.page}, from byte "
            f"{self.byte} on)"
        )


@dataclass(slots=True)
class TruthReport:
    """The results.

    problems:  of the layers
    kernels:   of each layer, in words: a line per kind of step, and one for each kernel that selects or attends to it
    lengths:   of the sequences
    tallies:   [layer][sequence]
    misses:    the first of each layer
    steps, replays: the number of steps that ran, and how many of them were graphs
    pool_bytes: of the largest side of a layer's pages
    """

    problems: tuple[Problem, ...]
    kernels: tuple[tuple[str, ...], ...]
    lengths: tuple[int, ...]
    pool_bytes: int
    tallies: list[list[Tally]]
    misses: list[Miss] = field(default_factory=list)
    steps: int = 0
    replays: int = 0

    @property
    def passed(self) -> bool:
        """True if every sequence of every layer returned exactly the needles that were asked for."""
        return all(tally.passed for of_layer in self.tallies for tally in of_layer)


class NeedleCheck:
    """The needles of a model's layers, and the runtime that has to find them.

    problems: the layers; one of each kind is enough
    plan:     the load that is served
    build:    (problems, options) -> the runtime
    Raises the errors of build, BadProblem for rows that are too short to tell the keys apart, and BadSetting.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        plan: TruthPlan,
        build: Callable[[Sequence[Problem], RuntimeOptions], AttentionRuntime],
    ) -> None:
        self._plan = plan
        kv_len, page_size = plan.kv_len, problems[0].page_size
        wanted = 1 + sum(num_pages(length, page_size) + 1 for length in kv_len)
        pages = max(plan.num_pages, wanted)
        boundaries = wrapping_pages(problems, pages)
        width = num_pages(max(kv_len), page_size)
        captured = tuple(sorted({plan.num_seqs + plan.first_chunk, plan.most_tokens}))
        self.runtime = build(
            problems,
            RuntimeOptions(
                num_pages=pages,
                max_num_seqs=plan.num_seqs,
                max_kv_len=width * page_size,
                max_num_rows=plan.num_seqs + rows_needed(pages, width, len(boundaries)),
                provider=plan.provider,
                capture_sizes=(plan.num_seqs,),
                capture_tokens=captured,
                deterministic=plan.deterministic,
            ),
        )
        device = self.runtime.device
        num_tokens = max(plan.most_tokens, *captured)
        self._layers: list[NeedleLayer] = []
        for number, problem in enumerate(problems):
            generator = torch.Generator(device).manual_seed(plan.seed + number)
            earlier = self._layers[-1].source if self._layers else None
            self._layers.append(NeedleLayer(problem, kv_len, num_tokens, generator, earlier))
        for number, problem in enumerate(problems):
            self._give_head_weights(number, problem, max(kv_len))
        self._rows, self._others = place_rows(self.runtime.table, kv_len, boundaries)
        self._done = [0] * plan.num_seqs
        recorder = recorder_for(device) if plan.graphs else None
        # Graphs are not checked, because every output of every step is known here.
        self._runner = StepRunner(self.runtime, self._forward, recorder, check=NO_CHECK)
        side = max(pages.k.nbytes for pages in map(self.runtime.pool.layer, range(len(problems))))
        self.report = TruthReport(
            tuple(problems),
            tuple(_kernels(self.runtime.selections[kind]) for kind in self.runtime.kinds.of_layer),
            plan.lengths,
            side,
            [[Tally() for _ in plan.lengths] for _ in problems],
        )

    def run(self, progress: Callable[[int, int], None] = lambda done, total: None) -> TruthReport:
        """Serves all steps, and returns the report. progress: called with the steps done and all steps.

        Raises DeviceFault and all errors of the runtime.
        """
        steps = list(self._plan.steps())
        for number, q_len in enumerate(steps):
            progress(number, len(steps))
            self._step(q_len)
        self.runtime.check_device()
        progress(len(steps), len(steps))
        return self.report

    def _step(self, q_len: Sequence[int]) -> None:
        serving = [seq for seq, (done, new) in enumerate(zip(self._done, q_len, strict=True)) if done or new]
        for layer in self._layers:
            layer.prepare(self._done, q_len)
        kv_len = [self._done[seq] + q_len[seq] for seq in serving]
        batch = StepBatch([self._rows[seq] for seq in serving], kv_len, [q_len[seq] for seq in serving], NO_TOKEN_IDS)
        replays = self._runner.metrics.replays
        self._runner.run(batch)
        replayed = self._runner.metrics.replays > replays
        for number, layer in enumerate(self._layers):
            for wrong in layer.judge(self.report.tallies[number]):
                if sum(miss.layer == number for miss in self.report.misses) < _MOST_NAMED:
                    self.report.misses.append(self._miss(number, wrong, replayed))
        self._done = [done + new for done, new in zip(self._done, q_len, strict=True)]
        self.report.steps += 1
        self.report.replays += replayed

    def _forward(self, step: Part) -> Tensor:
        outs = [layer.run(step.layers, number, step.token_ids.shape[0]) for number, layer in enumerate(self._layers)]
        return outs[-1][step.last_token_of_seq.long()]

    def _miss(self, layer: int, wrong: WrongNeedle, replayed: bool) -> Miss:
        """Returns the description of a wrong needle, with the key's place in the pool."""
        page, byte = self._place(layer, wrong.seq, wrong.key)
        return Miss(
            layer=layer,
            length=self._plan.lengths[wrong.seq],
            token=self._done[wrong.seq] + wrong.token,
            key=wrong.key,
            head=wrong.head,
            visible=wrong.visible,
            distance=wrong.distance,
            page=page,
            byte=byte,
            replayed=replayed,
        )

    def _place(self, layer: int, seq: int, key: int) -> tuple[int, int]:
        """Returns the page of a key, and its first byte in the layer's K pages."""
        pages = self.runtime.table.pages_of(self._rows[seq])
        page = int(pages[key // self.runtime.table.page_size])
        k = self.runtime.pool.layer(layer).k
        assert page != RESERVED_PAGE
        return page, page * k.stride(0) * k.element_size()

    def _give_head_weights(self, layer: int, problem: Problem, kv_len: int) -> None:
        """Sets sinks of a usual size, and slopes so small that every key keeps enough weight."""
        generator = torch.Generator().manual_seed(self._plan.seed)
        weights = HeadWeights.random(problem, generator)
        if weights.alibi_slopes is not None:
            weights = HeadWeights(weights.sinks, weights.alibi_slopes / kv_len)
        self.runtime.head_weights.set(layer, weights.to(self.runtime.device))


def _kernels(selection: Selection) -> tuple[str, ...]:
    """Returns the kernels of one layer, in words."""
    dense = [f"{kind.value}: {kernel.entry.name}" for kind, kernel in selection.kernels.items()]
    return (*dense, *(f"over a selection: {name}" for name in (selection.sparse.entries if selection.sparse else ())))
