"""Graphs of decode steps that share prefixes, and of steps with a mask."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rocm_attn.batch.mask import TokenSpans, TreeMask, random_mask
from rocm_attn.batch.padding import PaddedShape, PadTo
from rocm_attn.batch.prefixes import PrefixGroup, SharedPrefixes
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.capture.check import rows_beyond_bounds
from rocm_attn.capture.graphs import recorder_for, shape_name
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.hip_graphs.recorder import Recorder, Recording
from rocm_attn.kernels.metadata.step_tensors import NO_PARENT, StepTensors
from rocm_attn.kernels.refs import metadata
from rocm_attn.step.accepting import accept_drawn, verified
from rocm_attn.step.step import Part
from tests.amd.graphs.small_models import Requests, Tiny, WrappedRecorder

# Groups of three to six requests that share 12 tokens in pages of 4, for steps of some of them.
GROUPINGS = (
    [(4, 12)],
    [(1, 0), (3, 8)],
    [(2, 12), (2, 4)],
    [(1, 12), (1, 0), (1, 8)],
    [(3, 0)],
    [(2, 8), (1, 12), (3, 12)],
    [(6, 12)],
)


def served(tiny: Tiny, recorder: Recorder | None, num_requests: int = 6) -> tuple[StepRunner, Requests]:
    """Returns a runner, and requests that share 12 tokens and have one to three more."""
    runner = StepRunner(tiny.runtime, tiny.forward, recorder)
    requests = tiny.admitted(1)
    runner.run(requests.batch([12]))
    requests.fork(num_requests - 1, 12)
    runner.run(requests.batch([1 + at % 3 for at in range(num_requests)]))
    return runner, requests


def shared(requests: Requests, groups: Sequence[tuple[int, int]]) -> StepBatch:
    """Returns a decode step of the first requests, in these groups."""
    batch = requests.batch([1] * sum(count for count, _ in groups))
    return replace(batch, prefixes=SharedPrefixes([PrefixGroup(*group) for group in groups]))


def test_one_graph_serves_all_groups_of_its_size(provider: str, device: torch.device) -> None:
    """Groups change from step to step. Each replay is bitwise equal to the eager run, and equals plain decode.

    The second layer has a window, and decodes the step without groups.
    """
    tiny = Tiny.build(device, provider, (8,), shared_prefixes=True, window_left=7)
    runner, requests = served(tiny, recorder_for(device))
    for groups in (*GROUPINGS, GROUPINGS[0]):
        batch = shared(requests, groups)
        rows = runner.run(batch).clone()
        assert torch.equal(rows, runner.run_eagerly(batch))
        plain = StepBatch(batch.rows, batch.kv_len, batch.q_len, batch.token_ids)
        assert not rows_beyond_bounds(rows, runner.run_eagerly(plain))
    assert runner.counters.replays == len(GROUPINGS) + 1, runner.counters
    graphs = [b for b in runner.capture_report().buckets if b.key.shape.kind is StepKind.SHARED]
    assert [shape_name(graph.key.shape) for graph in graphs] == ["shared of 8 sequences"]
    assert "equal to the eager run bitwise in 3 random batches" in graphs[0].check
    tiny.runtime.check_device()


def test_without_room_for_probe_requests_the_steps_own_groups_are_tried(provider: str, device: torch.device) -> None:
    tiny = Tiny.build(device, provider, (8,), shared_prefixes=True, max_num_seqs=6)
    runner, requests = served(tiny, recorder_for(device))
    batch = shared(requests, [(2, 8), (1, 0), (3, 12)])
    rows = runner.run(batch).clone()
    assert runner.counters.replays == 1
    assert "of the step itself" in runner.capture_report().buckets[0].check
    assert torch.equal(rows, runner.run_eagerly(batch))


class _FreezesGroups(WrappedRecorder):
    """A recorder whose graphs keep the previous step's starts of groups."""

    def __init__(self, inner: Recorder, patch: pytest.MonkeyPatch) -> None:
        super().__init__(inner)
        self._patch = patch

    def record(self, fn: Callable[[], Any]) -> tuple[Recording, Any]:
        right = metadata._write_groups

        def write_groups(step: StepTensors, page_size: int) -> None:
            before = step.group_indptr.clone()
            right(step, page_size)
            step.group_indptr.copy_(before)

        with self._patch.context() as patch:
            patch.setattr(metadata, "_write_groups", write_groups)
            return self._inner.record(fn)


def test_a_graph_that_freezes_groups_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probe requests come in real groups: groups of one that share nothing would not show the fault.

    The test always runs on the CPU: the recorder breaks the torch twin of fill while it records.
    """
    device = torch.device("cpu")
    tiny = Tiny.build(device, "torch", (4,), shared_prefixes=True)
    runner, requests = served(tiny, _FreezesGroups(recorder_for(device), monkeypatch))
    batch = shared(requests, [(3, 12)])
    rows = runner.run(batch).clone()
    assert "the graph of shared of 4 sequences differs from the eager run" in runner.counters.graphs_off
    assert torch.equal(rows, runner.run_eagerly(batch))


def test_an_idle_rank_replays_the_graph_of_the_others(device: torch.device) -> None:
    tiny = Tiny.build(device, "torch", (4,), shared_prefixes=True)
    runner, requests = served(tiny, recorder_for(device))
    runner.run(shared(requests, [(3, 12)]))
    before = runner.counters.replays
    rows: Tensor = runner.run(shared(requests, []), pad_to=PadTo(4))
    assert len(rows) == 0
    assert runner.counters.replays == before + 1


def test_captures_leave_out_shared_steps_that_no_layer_can_share(device: torch.device) -> None:
    """The other graphs of a deterministic runtime are captured, and the report gives the reason why these are not."""
    tiny = Tiny.build(
        device, "torch" if device.type == "cpu" else "triton", (2,), shared_prefixes=True, deterministic=True
    )
    report = tiny.runner().capture_all()
    assert [bucket.key.shape.kind for bucket in report.buckets].count(StepKind.DECODE) == 1
    ((shape, reason),) = report.skipped.items()
    assert shape == PaddedShape(StepKind.SHARED, 2, 2)
    assert reason.startswith("no layer can share prefixes; leave them out of the step; ")
    assert "\n" not in reason
    assert report.graphs_off == ""


def masked(batch: StepBatch, seed: int, device: torch.device) -> StepBatch:
    return replace(batch, mask=random_mask(batch.kv_len, batch.q_len, torch.Generator(device).manual_seed(seed)))


@pytest.mark.parametrize("split_steps", [False, True])
def test_layers_with_chunks_are_captured_and_checked_with_spans(
    split_steps: bool, provider: str, device: torch.device
) -> None:
    """They serve no cells, with which other masked graphs are checked."""
    tiny = Tiny.build(device, provider, (2,), (8,), max_num_seqs=2, custom_mask=True, chunk=8, split_steps=split_steps)
    runner = tiny.runner()
    assert not runner.capture_all().graphs_off
    requests = tiny.admitted(2)
    batch = requests.batch([4, 4])
    batch = replace(batch, mask=TokenSpans([(0, 0, 3), (1, 1, 4)], tiny.runtime.device))
    rows = runner.run(batch).clone()
    assert runner.counters.replays == 1
    assert torch.equal(rows, runner.run_eagerly(batch))


def test_a_mask_without_room_is_no_replay_of_a_tree_of_its_size(provider: str, device: torch.device) -> None:
    """A mask over all keys follows a tree of the same lengths, whose graph has room only for new keys."""
    tiny = Tiny.build(device, provider, (2,), (8,), custom_mask=True, mask_keys=0)
    runner = tiny.runner()
    requests = tiny.admitted(2)
    runner.run(requests.batch([20, 15]))
    tree = torch.tensor([[NO_PARENT, 0, 0, 1]] * 2, dtype=torch.int32, device=device)
    batch = requests.batch([4, 4])
    runner.run(replace(batch, mask=TreeMask(tree)))
    before = runner.counters.replays
    wide = masked(batch, 0, tiny.runtime.device)
    assert torch.equal(runner.run(wide).clone(), runner.run_eagerly(wide))
    assert runner.counters.replays == before


def test_without_room_for_probe_requests_a_masked_step_makes_no_graph(device: torch.device) -> None:
    """Its own requests would all have the same mask, which proves little."""
    tiny = Tiny.build(device, "torch", (2,), (8,), max_num_seqs=2, custom_mask=True)
    runner = tiny.runner()
    requests = tiny.admitted(2)
    batch = masked(requests.batch([3, 4]), 0, tiny.runtime.device)
    assert runner.run(batch).isfinite().all()
    assert (runner.counters.replays, runner.counters.captures, runner.counters.graphs_off) == (0, 0, "")


def test_drafts_are_accepted_and_moved_in_the_graph_of_their_step(provider: str, device: torch.device) -> None:
    """The tokens that a replay accepts, and the pages that later steps read, equal those of the eager run."""
    parents = torch.tensor([[NO_PARENT, 0, 1, 0, 3], [NO_PARENT, 0, 0, 2, 2]], dtype=torch.int32, device=device)
    # The token that is drawn after each one: the path 0, 3, 4 of the first tree, and 0, 2, 4 of the second.
    after = torch.tensor([3, 0, 0, 4, 0, 7, 5, 9, 5, 5], device=device)
    results = []
    for runs_graphs in (True, False):
        tiny = Tiny.build(device, provider, (2,), (10,), custom_mask=True)

        def forward(step: Part, tiny: Tiny = tiny) -> Tensor:
            hidden = tiny.hidden(step, step.token_ids)
            accepted = accept_drawn(step.token_ids[after], verified(step, parents))
            if step.plan.shape.kind is StepKind.MASKED:  # a prompt has no drafts
                tiny.runtime.move_accepted(accepted)
            return torch.cat([accepted.token_ids, accepted.path, hidden[step.last_token_of_seq].int()], 1)

        runner = StepRunner(tiny.runtime, forward, recorder_for(device))
        requests = tiny.admitted(2)
        run = runner.run if runs_graphs else runner.run_eagerly
        run(requests.batch([5, 5]))
        rows = [run(replace(requests.batch([5, 5]), mask=TreeMask(parents))).clone() for _ in range(2)]
        results.append(rows)
        assert runner.counters.replays == 3 * runs_graphs
    assert all(torch.equal(replayed, eager) for replayed, eager in zip(*results, strict=True))
    assert (results[0][0][:, 5:10].amax(1) >= 3).all(), "a node is accepted that has to move"
