"""Predicts the nodes that layers add to each graph, without a GPU: their launches are counted, and none is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec

import numpy as np
import torch

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.capture.forecast import CapturePlan
from rocm_attn.capture.graphs import takes_inputs
from rocm_attn.capture.prewarm import (
    goes_on_in_trees,
    one_of_each_kind,
    rows_without_requests,
    runtime_of_kinds,
)
from rocm_attn.capture.probe_requests import as_steps_of, typical_new_tokens
from rocm_attn.capture.zero_inputs import ZeroInputs
from rocm_attn.errors import Unsupported
from rocm_attn.hip_graphs.fake_recorder import FakeRecorder
from rocm_attn.kernels.launch import observe_launches
from rocm_attn.machine.target import Target
from rocm_attn.paging.state_pool import NO_RECURRENT_LAYERS, RecurrentLayers
from rocm_attn.problem import AllKeys, Indexer, Problem
from rocm_attn.recurrence import Recurrence
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.step import Part

_FEWEST_PAGES = 2  # the null page, and one to store in


@dataclass(frozen=True, slots=True)
class GraphNodes:
    """Nodes of one graph of steps. Those of the model around attention come on top, and those that join two halves.

    step:   that take the inputs in and derive the step's data
    layers: of each layer, which stores and attends; a round of drafts does so in each of its draft steps
    recurrent: of each recurrent layer
    """

    step: int
    layers: tuple[int, ...]
    recurrent: tuple[int, ...]

    @property
    def total(self) -> int:
        return self.step + sum(self.layers) + sum(self.recurrent)


@dataclass(frozen=True, slots=True)
class CountedNodes:
    """The nodes of each graph of a plan; none if they cannot be counted. note: which are left out, or why"""

    of: Mapping[PaddedShape, GraphNodes]
    note: str = ""


def count_nodes(
    plan: CapturePlan,
    problems: Sequence[Problem],
    target: Target,
    options: RuntimeOptions,
    recurrent: RecurrentLayers = NO_RECURRENT_LAYERS,
) -> CountedNodes:
    """Counts the nodes of a plan's graphs, with the project's own kernels: AITER's launches are known to it alone.

    recurrent: layers that keep states in place of K and V
    """
    if target.is_gpu and find_spec("triton") is None:
        return CountedNodes({}, "nodes are not counted, because Triton is not installed: pip install 'triton>=3.6'")
    foreign = ", ".join(sorted(name for name in plan.kernels if name.startswith("aiter.")))
    try:
        counter = NodeCounter(problems, target, replace(options, provider="auto") if foreign else options, recurrent)
    except Unsupported:
        return CountedNodes({}, f"nodes are not counted, because only AITER serves these layers ({foreign})")
    shapes = [bucket.shape for bucket in plan.buckets if not (recurrent.layers and goes_on_in_trees(bucket.shape))]
    nodes = {shape: counter.nodes(shape) for shape in shapes}
    note = f"nodes are those of the project's own kernels; AITER's may have more or fewer ({foreign})"
    return CountedNodes(nodes, note if foreign else "")


class NodeCounter:
    """Counts the nodes of graphs of these layers and options, one graph at a time.

    The runtime's own code makes the launches, at the sizes that will be served. On a CPU, whose graphs the host
    replays, a node is an operation of torch, and these run.
    Raises what build_runtime raises, BadSetting.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        target: Target,
        options: RuntimeOptions,
        recurrent: RecurrentLayers = NO_RECURRENT_LAYERS,
    ) -> None:
        self._problems, self._kinds = problems, list(dict.fromkeys(problems))
        self._recurrent = recurrent.layers
        # Pools change no number of launches, so they have room for the largest step alone.
        few = replace(options, num_pages=_FEWEST_PAGES)
        self._runtime = runtime_of_kinds(problems, target, few, one_of_each_kind(recurrent), torch.device("cpu"))
        self._staged = _dropped if target.is_gpu else nullcontext
        self._recorder = FakeRecorder(_observe_dropped if target.is_gpu else observe_launches)
        self._inputs = ZeroInputs(torch.device("cpu"))

    def nodes(self, shape: PaddedShape) -> GraphNodes:
        """The nodes of the graph of a shape, one of those that capture_shapes() and draft_shapes() return."""
        runtime = self._runtime
        q_len = typical_new_tokens(runtime, shape)
        assert q_len is not None, "the small pool has room for a step of each shape"
        kinds = self._runtime.states.recurrent.layers
        of_kind = dict.fromkeys((*self._kinds, *kinds), 0)
        with rows_without_requests(runtime, np.zeros_like(q_len), q_len) as rows, self._staged():
            batch = as_steps_of(runtime, shape, StepBatch(rows, q_len, q_len), torch.Generator())
            with runtime.stage(batch, runtime.plan(batch, shape)) as step:
                calls: list[tuple[Problem | Recurrence, Callable[[], None]]] = []
                for part in step.parts:
                    for layer, problem in enumerate(self._kinds):
                        calls += [(problem, call) for call in self._calls(part, layer, problem)]
                    for layer, form in enumerate(kinds):
                        calls += [(form, call) for call in self._recurrent_calls(part, layer, form)]
                branches = [part.keep_branches for part in step.parts if part.number % shape.drafts.steps]
                with self._recorder.capture() as recording:
                    if takes_inputs(runtime, step):
                        runtime.gate.take_inputs(step)
                    step.fill()
                    for keep in branches:
                        keep()
                    of_step = recording.num_nodes
                    for kind, call in calls:
                        before = recording.num_nodes
                        call()
                        of_kind[kind] += recording.num_nodes - before
        of_layers, of_recurrent = (
            tuple(of_kind[each] for each in layers) for layers in (self._problems, self._recurrent)
        )
        return GraphNodes(of_step, of_layers, of_recurrent)

    def _calls(self, part: Part, layer: int, problem: Problem) -> Iterator[Callable[[], None]]:
        """Yields the calls of a layer, with inputs that are there before anything is recorded."""
        num_tokens, indexer, layers = len(part.token_ids), problem.indexer, part.layers
        q, k, v, out = self._inputs.of(problem, num_tokens)
        if isinstance(indexer, AllKeys):
            yield partial(layers.store_and_attend, layer, q, k, v, out)
            return
        yield partial(layers.store, layer, k, v)
        if isinstance(indexer, Indexer):
            index_k, index_q, of_heads = self._inputs.of_index(indexer, problem.dtype, num_tokens)
            yield partial(layers.store_index, layer, index_k)
            yield partial(layers.select, layer, index_q, of_heads)
        yield partial(layers.attend_selected, layer, q, out)

    def _recurrent_calls(self, part: Part, layer: int, form: Recurrence) -> Iterator[Callable[[], None]]:
        """Likewise of a recurrent layer."""
        num_tokens = len(part.token_ids)
        if form.convolution.channels:
            x, weight, bias, out = self._inputs.of_convolution(form, num_tokens)
            yield partial(part.states.convolve, layer, x, weight, bias, out)
        yield partial(part.states.recur, layer, *self._inputs.of_recurrence(form, num_tokens))


def _dropped() -> AbstractContextManager[None]:
    return observe_launches(lambda launch: None)


def _observe_dropped(note: Callable[[Callable[[], object]], None]) -> AbstractContextManager[None]:
    """Launches are noted and not made."""
    return observe_launches(lambda launch: note(_nothing))


def _nothing() -> None:
    """Stands for a launch."""
