"""Graphs of steps with a mask."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rocm_attn.batch.mask import TokenSpans, TreeMask, random_mask
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.kernels.metadata.step_tensors import NO_PARENT
from rocm_attn.step.accepting import accept_drawn, verified
from rocm_attn.step.step import Part
from tests.amd.graphs.small_models import Tiny


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
