"""A tiny model over a runtime, requests that come and go, and recorders and forwards with known faults."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rocm_attn.batch.drafts import Drafts
from rocm_attn.batch.step_batch import StepBatch, draft_batch
from rocm_attn.capture.forecast import CapturePlan, plan_capture
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.hip_graphs.recorder import Recorder, Recording
from rocm_attn.hip_graphs.torch_recorder import TorchRecorder
from rocm_attn.paging.index_spaces import Space
from rocm_attn.problem import UNLIMITED_WINDOW, PoolKind, Problem
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.buffers import name_in
from rocm_attn.step.gate import AnyPlan
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.plan import StepPlan
from rocm_attn.step.protocols import LayerCalls, RunsSteps
from rocm_attn.step.step import Part, Series, Step
from tests.amd.worlds.problems import small_problem
from tests.amd.worlds.world import padded_to

VOCABULARY = 50


@dataclass
class Tiny:
    """Layers of attention over random embeddings: every row of the output depends on all of its KV.

    around: a test's wrapper of the layer calls of a step
    """

    runtime: AttentionRuntime
    problems: Sequence[Problem]
    embedding: Tensor
    projections: list[Tensor]
    around: Callable[[LayerCalls], LayerCalls] = lambda layers: layers

    @classmethod
    def build(
        cls,
        device: torch.device,
        provider: str,
        sizes: Sequence[int] | None = (1, 2, 4, 8),
        tokens: Sequence[int] = (1,),
        *,
        layers: int = 1,
        custom_mask: bool = False,
        chunk: int = 0,
        window_left: int = UNLIMITED_WINDOW,
        pool: PoolKind = PoolKind.SPLIT,
        **options: Any,
    ) -> Tiny:
        """Builds the model.

        window_left: of a further layer, which is in the SWA space if there is one. options: of the runtime
        """
        problem = replace(small_problem(custom_mask=custom_mask), pool=pool, chunk=chunk)
        problems = [problem] * layers
        if window_left != UNLIMITED_WINDOW:
            problems.append(replace(problem, window_left=window_left))
        given: dict[str, Any] = {"num_pages": 200, "max_num_seqs": 8, "max_kv_len": 128, **options}
        made = RuntimeOptions(provider=provider, capture_sizes=sizes, capture_tokens=tokens, **given)
        runtime = build_runtime(problems, made, device=device)
        for layer in range(len(problems)):
            # Not NaN: wrong graphs read this, and Triton's interpreter stops at NaN where a GPU program would continue.
            runtime.pool.layer(layer).k[1:] = 100.0
            runtime.pool.layer(layer).v[1:] = 100.0
        generator = torch.Generator().manual_seed(3)
        weights = [torch.randn(96, 64, generator=generator).to(device) / 10 for _ in problems]
        return cls(runtime, problems, torch.randn(VOCABULARY, 96, generator=generator).to(device), weights)

    @property
    def problem(self) -> Problem:
        """The first layer's."""
        return self.problems[0]

    def planned(self, **changes: Any) -> CapturePlan:
        """Returns what is predicted of the runtime. changes: of its options"""
        return plan_capture(self.problems, self.runtime.target, replace(self.runtime.options, **changes))

    def held(self) -> dict[str, int]:
        """Returns the bytes of all that graphs read, by the names of the prediction: tables, pools and the rest."""
        held = {name: tensor.nbytes for name, tensor in self.runtime.seals.tensors().items() if "_pages_" not in name}
        for space in (table.space for table in self.runtime.table.spaces):
            words = "" if space == Space.FULL else f"{space.name} "
            held[f"{words}request table"] = held.pop(name_in(space, "table"))
            held[f"{words}KV pool"] = self.runtime.pool.in_space(space).num_bytes
        return held

    def poison(self) -> None:
        """Fills all memory of graphs with garbage. The table, pages and counts persist between steps."""
        for name, tensor in self.runtime.seals.tensors().items():
            if name not in ("table", "counts") and "pages" not in name:
                tensor.fill_(float("nan") if tensor.is_floating_point() else 0x7F7F7F7F)

    def runner(self, *, graphs: bool = True, **more: Any) -> StepRunner[Tensor]:
        """Returns a runner of the model. more: arguments of StepRunner"""
        return StepRunner(self.runtime, self.forward, recorder_for(self.runtime.device) if graphs else None, **more)

    def admitted(self, count: int) -> Requests:
        """Returns requests without tokens."""
        requests = Requests(self.runtime)
        requests.admit(count)
        return requests

    def forward(self, step: Part) -> Tensor:
        """Returns [S, 96]."""
        return self.hidden(step, step.token_ids)[step.last_token_of_seq]

    def draft(self, drafts: Series) -> Tensor:
        """Returns int32 [S, branches * steps]: the ids that each draft step has picked. It picks their parents, too."""
        ids, picked, branches = drafts[0].token_ids, [], drafts[0].branches
        for step in drafts:
            if step is not drafts[0]:
                step.set_parents(ids % branches)
            scores = self.hidden(step, ids).abs().sum(1)
            ids = (scores * 1000).int() % VOCABULARY
            picked.append(ids.view(-1, branches))
        return torch.cat(picked, 1)

    def hidden(self, step: Part, token_ids: Tensor) -> Tensor:
        """Returns [T, 96]."""
        hidden = self.embedding[token_ids] * (1 + step.positions[:, None] / 100)
        layers = self.around(step.layers)
        for layer, weight in enumerate(self.projections):
            kv = (hidden @ weight).view(-1, 4, 16)
            out = torch.empty_like(hidden).view(-1, 6, 16)
            layers.store_and_attend(layer, hidden.view(-1, 6, 16), kv[:, :2], kv[:, 2:], out)
            hidden = hidden + out.flatten(1)
        return hidden


@dataclass
class Requests:
    """Requests of a runtime; their token ids depend only on the seed."""

    runtime: AttentionRuntime
    seed: int = 1
    rows: list[int] = field(default_factory=list)
    kv_len: list[int] = field(default_factory=list)
    random: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def admit(self, count: int) -> None:
        for _ in range(count):
            self.rows.append(self.runtime.table.admit())
            self.kv_len.append(0)

    def fork(self, count: int, kv_len: int) -> None:
        """Adds `count` requests that share the first kv_len tokens of the first one."""
        for _ in range(count):
            self.rows.append(self.runtime.table.fork(self.rows[0], kv_len))
            self.kv_len.append(kv_len)

    def free(self) -> None:
        for row in self.rows:
            self.runtime.table.free(row)
        self.rows.clear()
        self.kv_len.clear()

    def batch(self, q_len: Sequence[int]) -> StepBatch:
        """Returns a step of the first requests, after reserving pages."""
        for seq, new in enumerate(q_len):
            self.kv_len[seq] += new
            self.runtime.table.reserve(self.rows[seq], self.kv_len[seq])
        count = len(q_len)
        ids = self.random.integers(1, VOCABULARY, sum(q_len))
        return StepBatch(*(np.array(x, np.int32) for x in (self.rows[:count], self.kv_len[:count], q_len, ids)))

    def draft_batch(self, drafts: Drafts, count: int) -> StepBatch:
        """Returns a round of drafts of the first requests, after reserving pages. Their lengths stay."""
        rows, prefix = self.rows[:count], self.kv_len[:count]
        for row, length in zip(rows, prefix, strict=True):
            self.runtime.table.reserve(row, length + drafts.tokens)
        ids = self.random.integers(1, VOCABULARY, count * drafts.branches)
        return draft_batch(np.array(rows, np.int32), np.array(prefix, np.int32), drafts, ids)

    def stored(self) -> list[Tensor]:
        """Returns K and V of every layer and request, [kv_len, kv_heads, 16]."""
        layers = [self.runtime.pool.layer(layer) for layer in range(len(self.runtime.core.layers))]
        return [
            side.read(torch.from_numpy(self.runtime.table.pages_of(row)).to(self.runtime.device)).flatten(0, 1)[:kv_len]
            for row, kv_len in zip(self.rows, self.kv_len, strict=True)
            for pages in layers
            for side in (pages.keys, pages.values)
        ]

    def run(self, steps: RunsSteps, q_len: Sequence[int], pad_to: int | None = None) -> Tensor:
        return steps.run(self.batch(q_len), padded_to(pad_to)).clone()


# New tokens of three requests, step by step: prompts, then decode steps of different counts.
SERVED = [[5, 2, 7], [1, 1, 1], [1, 1], [1, 1, 1], [1], [1, 1, 1], [1, 1]]


def serve(steps: RunsSteps, runtime: AttentionRuntime, served: Sequence[Sequence[int]] = SERVED) -> list[Tensor]:
    """Returns the outputs of these steps of fresh requests."""
    requests = Requests(runtime)
    requests.admit(max(map(len, served)))
    outs = [requests.run(steps, q_len) for q_len in served]
    requests.free()
    return outs


def come_and_go(steps: RunsSteps, runtime: AttentionRuntime, counts: Sequence[int]) -> list[Tensor]:
    """Returns the outputs of decode steps of these numbers of requests, and of prompts of those that come before."""
    requests, outs, random = Requests(runtime), list[Tensor](), np.random.default_rng(1)
    for count in counts:
        while len(requests.rows) > count:
            runtime.table.free(requests.rows.pop())
            requests.kv_len.pop()
        while len(requests.rows) < count:
            requests.admit(1)
            requests.rows.insert(0, requests.rows.pop())  # the new one comes first
            requests.kv_len.insert(0, requests.kv_len.pop())
            outs.append(requests.run(steps, [int(random.integers(2, 12))]))
        outs.append(requests.run(steps, [1] * count))
    requests.free()
    return outs


def same(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """True if all tensors are bitwise equal."""
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


class WrappedRecorder:
    """A recorder that is another one, except in the methods of a subclass."""

    def __init__(self, inner: Recorder) -> None:
        self._inner = inner

    def record(self, fn: Callable[[], Any]) -> tuple[Recording, Any]:
        return self._inner.record(fn)

    def release_memory(self) -> None:
        self._inner.release_memory()


class Forgetful(WrappedRecorder):
    """A recorder whose graphs lack one of the launches around attention; its warm-ups do not."""

    def __init__(self, inner: Recorder, runtime: AttentionRuntime, launch: str) -> None:
        super().__init__(inner)
        self._runtime = runtime
        self._launch = launch
        self._recorded_run = 2 if runtime.device.type == "cpu" else TorchRecorder.WARM_UPS + 1

    def record(self, fn: Callable[[], Any]) -> tuple[Recording, Any]:
        runs = 0

        def forgets() -> Any:
            nonlocal runs
            runs += 1
            return self._without_launch(fn) if runs == self._recorded_run else fn()

        recorded = self._inner.record(forgets)
        assert runs == self._recorded_run
        return recorded

    def _without_launch(self, fn: Callable[[], Any]) -> Any:
        core = self._runtime.core
        ops, launches_alone = core.ops, core.layers._launches_alone
        core.ops = core.layers._ops = replace(ops, **{self._launch: lambda *args, **kwargs: None})
        core.layers._launches_alone = False  # otherwise calls that the warm-ups prepared would still launch
        try:
            return fn()
        finally:
            core.ops = core.layers._ops = ops
            core.layers._launches_alone = launches_alone


class Lazy(WrappedRecorder):
    """A recorder whose graphs do nothing after their first replay."""

    def record(self, fn: Callable[[], Any]) -> tuple[Recording, Any]:
        recording, outputs = self._inner.record(fn)
        return _OnceOnly(recording), outputs


class _OnceOnly:
    def __init__(self, inner: Recording) -> None:
        self._inner = inner
        self._replayed = False

    @property
    def bytes(self) -> int:
        return self._inner.bytes

    def replay(self) -> None:
        if not self._replayed:
            self._inner.replay()
        self._replayed = True


class GivesNaN(WrappedRecorder):
    """A recorder whose graphs write NaN over all of the forward's one output."""

    def record(self, fn: Callable[[], Any]) -> tuple[Recording, Any]:
        recording, outputs = self._inner.record(fn)
        return _WithNaN(recording, outputs), outputs


class _WithNaN:
    def __init__(self, inner: Recording, output: Tensor) -> None:
        self._inner, self._output = inner, output

    @property
    def bytes(self) -> int:
        return self._inner.bytes

    def replay(self) -> None:
        self._inner.replay()
        self._output.fill_(float("nan"))


def counts_on_the_host(tiny: Tiny) -> Callable[[Part], Tensor]:
    """Returns a forward that bakes the number of sequences."""
    return lambda step: tiny.forward(step) * step.num_seqs


def takes_another_bias_each_step(tiny: Tiny) -> Callable[[Part], Tensor]:
    """Returns a forward that reads a tensor which the host replaces before each step: a graph keeps the old address."""
    stage, biases = tiny.runtime.gate.stage, [torch.zeros(96, device=tiny.runtime.device)]

    def replace_bias(batch: StepBatch) -> None:
        # Kept, so that no two of them share an address.
        biases.append(torch.full((96,), float(batch.max_kv_len), device=tiny.runtime.device))

    def staged(batch: StepBatch, plan: AnyPlan | None = None, input_plans: Collection[StepPlan] = ()) -> Step:
        replace_bias(batch)
        return stage(batch, plan, input_plans)

    tiny.runtime.gate.stage = staged  # type: ignore[method-assign]
    return lambda step: tiny.forward(step) + biases[-1]
