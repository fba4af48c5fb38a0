"""The nodes that `rocm-attn capture-plan` predicts are those of graphs that are then made, by the host or a driver."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL, byref, c_size_t, c_void_p
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rocm_attn.batch.drafts import Drafts
from rocm_attn.batch.padding import PaddedShape
from rocm_attn.capture import graph_nodes
from rocm_attn.capture.check import NO_CHECK
from rocm_attn.capture.forecast import plan_capture
from rocm_attn.capture.graph_nodes import NodeCounter, count_nodes
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.capture.zero_inputs import ZeroInputs
from rocm_attn.hip_graphs.fake_recorder import FakeRecording
from rocm_attn.hip_graphs.recorder import Recorder, Recording
from rocm_attn.hip_graphs.torch_recorder import TorchRecording
from rocm_attn.machine.target import target_elsewhere
from rocm_attn.paging.state_pool import RecurrentLayers
from rocm_attn.problem import PoolKind
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.step import Part, Series
from tests.amd.graphs.small_models import Tiny, WrappedRecorder
from tests.amd.worlds.hybrid import CHANNELS, GATED_DELTA
from tests.amd.worlds.problems import deterministic_providers, small_problem

OPTIONS = {"max_num_seqs": 8, "max_kv_len": 128, "num_pages": 200, "capture_sizes": [1, 4], "capture_tokens": [4, 8]}
LARGEST = 64


class KeptGraph(torch.cuda.CUDAGraph):
    """A graph of torch's whose nodes can still be counted once it is instantiated."""

    def __new__(cls) -> KeptGraph:
        return super().__new__(cls, True)

    def __init__(self) -> None:
        super().__init__(True)  # type: ignore[call-arg]  # the class below torch's reads its arguments here

    def capture_end(self) -> None:
        super().capture_end()
        self.instantiate()


def nodes_of(recording: Recording) -> int:
    """Returns the nodes of a graph: of the host's recording, or as the driver counts them."""
    if isinstance(recording, FakeRecording):
        return recording.num_nodes
    assert isinstance(recording, TorchRecording)
    count = c_size_t()
    of_hip = torch.version.hip is not None
    get = CDLL("libamdhip64.so").hipGraphGetNodes if of_hip else CDLL("libcuda.so.1").cuGraphGetNodes
    assert get(c_void_p(recording.graph.raw_cuda_graph()), None, byref(count)) == 0
    return count.value


class Counting(WrappedRecorder):
    """A recorder that counts the nodes of what it records."""

    def __init__(self, inner: Recorder) -> None:
        super().__init__(inner)
        self.nodes = list[int]()

    def record(self, fn: Callable[[], Any]) -> tuple[Recording, Any]:
        recording, outputs = self._inner.record(fn)
        self.nodes.append(nodes_of(recording))
        return recording, outputs


class OnlyAttention:
    """A model that is two layers of attention over rows that are there before; it has no node of its own."""

    def __init__(self, tiny: Tiny) -> None:
        device, dtype = tiny.runtime.device, tiny.problem.dtype
        self._q = torch.randn(LARGEST, 6, 16, device=device, dtype=dtype)
        self._kv = torch.randn(LARGEST, 4, 16, device=device, dtype=dtype)
        self._out = torch.zeros_like(self._q)

    def forward(self, step: Part) -> Tensor:
        """Returns [S, 6, 16]."""
        num_tokens, kv, out = len(step.token_ids), self._kv, self._out
        for layer in range(2):
            q, k, v = self._q[:num_tokens], kv[:num_tokens, :2], kv[:num_tokens, 2:]
            step.layers.store_and_attend(layer, q, k, v, out[:num_tokens])
        return out[: step.row_of_seq.shape[0]]

    def draft(self, drafts: Series) -> Tensor:
        """Returns [S, 6, 16]."""
        for step in drafts:
            if step is not drafts[0]:
                step.keep_branches()
            self.forward(step)
        return self._out[: drafts[0].row_of_seq.shape[0]]


@pytest.mark.fast(1)
@pytest.mark.parametrize("provider", deterministic_providers())  # torch's launches have many nodes on a GPU
@pytest.mark.parametrize("mode", [{}, {"drafts": (Drafts(2, 2),), "custom_mask": True}], ids=str)
def test_the_nodes_that_are_predicted_are_those_of_the_graphs_that_are_made(
    provider: str, mode: dict[str, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", KeptGraph)
    tiny = Tiny.build(device, provider, [1, 4], tokens=(4, 8), layers=2, **mode)
    model, recorder = OnlyAttention(tiny), Counting(recorder_for(device))
    runner = StepRunner(
        tiny.runtime, model.forward, recorder, draft=model.draft if "drafts" in mode else None, check=NO_CHECK
    )
    report = runner.capture_all()
    assert not report.skipped
    assert not report.graphs_off
    options = RuntimeOptions(provider=provider, **OPTIONS, **{k: mode[k] for k in mode if k != "custom_mask"})  # type: ignore[arg-type]
    counter = NodeCounter(tiny.problems, tiny.runtime.target, options)
    made = {bucket.key.shape: nodes for bucket, nodes in zip(report.buckets, recorder.nodes, strict=True)}
    predicted = {shape: counter.nodes(shape) for shape in made}
    assert {shape: nodes.total for shape, nodes in predicted.items()} == made
    assert all(nodes.step > 0 and min(nodes.layers) > 0 for nodes in predicted.values())


@pytest.mark.parametrize("provider", deterministic_providers())
def test_so_are_those_of_recurrent_layers(provider: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", KeptGraph)
    problem, inputs = small_problem(), ZeroInputs(device)
    sizes = {"max_num_seqs": 2, "max_kv_len": 32, "num_pages": 40, "capture_sizes": [2], "capture_tokens": [8]}
    options = RuntimeOptions(provider=provider, verify_tokens=3, **sizes)  # type: ignore[arg-type]
    recurrent = RecurrentLayers((GATED_DELTA, CHANNELS, GATED_DELTA), kept=3)
    runtime, recorder = build_runtime([problem], options, recurrent, device=device), Counting(recorder_for(device))

    def forward(step: Part) -> Tensor:
        num_tokens = len(step.token_ids)
        q, k, v, out = inputs.of(problem, num_tokens)
        step.layers.store_and_attend(0, q, k, v, out)
        for layer, form in enumerate(recurrent.layers):
            if form.convolution.channels:
                x, weight, bias, convolved = inputs.of_convolution(form, num_tokens)
                step.states.convolve(layer, x, weight, bias, convolved)
            step.states.recur(layer, *inputs.of_recurrence(form, num_tokens))
        return out[: step.row_of_seq.shape[0]]

    inputs.of(problem, LARGEST)  # the memory of all of them is there before
    inputs.of_convolution(GATED_DELTA, LARGEST)
    for form in recurrent.layers:
        inputs.of_recurrence(form, LARGEST)
    report = StepRunner(runtime, forward, recorder, check=NO_CHECK).capture_all()
    assert not report.skipped
    assert not report.graphs_off
    made = {bucket.key.shape: nodes for bucket, nodes in zip(report.buckets, recorder.nodes, strict=True)}
    counter = NodeCounter([problem], runtime.target, options, recurrent)
    predicted = {shape: counter.nodes(shape) for shape in made}
    assert {shape: nodes.total for shape, nodes in predicted.items()} == made
    for nodes in predicted.values():
        first, other, last = nodes.recurrent
        assert first == last > other > 0  # the other one has no convolution


@pytest.mark.parametrize("arch", ["gfx942", "sm_90"])
def test_a_layer_of_a_round_has_its_nodes_in_each_draft_step(arch: str, device: torch.device) -> None:
    problem = Tiny.build(device, "torch", custom_mask=True).problem
    rounds = [
        NodeCounter(
            [problem] * 3,
            target_elsewhere(arch),
            RuntimeOptions(drafts=(Drafts(2, steps),), **OPTIONS),  # type: ignore[arg-type]
        ).nodes(PaddedShape.of_drafts(Drafts(2, steps), 4, 1))
        for steps in (1, 3)
    ]
    assert [len(each.layers) for each in rounds] == [3, 3]
    assert rounds[1].layers[0] == 3 * rounds[0].layers[0] > 0


def test_where_aiter_serves_the_nodes_are_those_of_our_own_kernels_and_the_plan_says_so(device: torch.device) -> None:
    problem, target = Tiny.build(device, "torch").problem, target_elsewhere("gfx942")
    problem = replace(problem, dtype=torch.bfloat16, head_dim=128, v_head_dim=128, num_q_heads=8, page_size=16)
    options = RuntimeOptions(**OPTIONS)  # type: ignore[arg-type]
    plan = plan_capture([problem], target, options)
    assert any(name.startswith("aiter.") for name in plan.kernels)
    with_aiter = count_nodes(plan, [problem], target, options)
    assert with_aiter.note.startswith("nodes are those of the project's own kernels; AITER's may have more or fewer")
    own = replace(options, provider="triton")
    alone = count_nodes(plan_capture([problem], target, own), [problem], target, own)
    assert (alone.note, alone.of) == ("", with_aiter.of)
    assert set(alone.of) == {bucket.shape for bucket in plan.buckets}


def test_nodes_of_layers_that_only_aiter_serves_are_not_counted(device: torch.device) -> None:
    problem, target = Tiny.build(device, "torch").problem, target_elsewhere("gfx942")
    problem = replace(problem, dtype=torch.bfloat16, head_dim=128, v_head_dim=128, num_q_heads=8, page_size=16)
    problem = replace(problem, pool=PoolKind.VECTORIZED)
    options = RuntimeOptions(**OPTIONS)  # type: ignore[arg-type]
    counted = count_nodes(plan_capture([problem], target, options), [problem], target, options)
    assert not counted.of
    assert counted.note.startswith("nodes are not counted, because only AITER serves these layers (aiter.")


def test_without_triton_the_plan_says_what_counts(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, target = Tiny.build(device, "torch").problem, target_elsewhere("gfx942")
    options = RuntimeOptions(**OPTIONS)  # type: ignore[arg-type]
    plan = plan_capture([problem], target, options)
    monkeypatch.setattr(graph_nodes, "find_spec", lambda name: None)
    counted = count_nodes(plan, [problem], target, options)
    assert (counted.of, counted.note) == (
        {},
        "nodes are not counted, because Triton is not installed: pip install 'triton>=3.6'",
    )
