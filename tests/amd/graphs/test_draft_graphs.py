"""Graphs of rounds of drafts: all draft steps and the picks between them, bitwise equal to eager runs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rocm_attn.batch.drafts import Drafts
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.capture.graphs import draft_shapes, recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.errors import BadBatch, BadSetting
from rocm_attn.providers.contract import LayerKernel
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.layer_kinds import LayerKinds
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.watch.flight_recorder import FlightRecorder, read_dump
from tests.amd.graphs.small_models import Requests, Tiny
from tests.amd.worlds.problems import providers, small_problem

CHAIN, TREE = Drafts(1, 3), Drafts(2, 2)
each_shape = pytest.mark.parametrize("drafts", [CHAIN, TREE], ids=["chain", "tree"])

tree_mostly = pytest.mark.parametrize(
    "drafts", [pytest.param(CHAIN, marks=pytest.mark.nightly), TREE], ids=["chain", "tree"]
)
host_only = pytest.mark.parametrize("provider", [name for name in providers() if name == "torch"])


def build(device: torch.device, provider: str, drafts: Drafts, *, split: bool = False) -> Tiny:
    """Returns a model with graphs for the drafts of two and of four sequences, or halves of them."""
    return Tiny.build(
        device, provider, (2, 4), split_steps=split, custom_mask=drafts.branches > 1, drafts=[drafts], max_num_seqs=12
    )


def prompted(tiny: Tiny) -> Requests:
    requests = tiny.admitted(3)
    requests.run(tiny.runner(graphs=False), [9, 2, 5])
    return requests


@pytest.mark.fast(1)
@each_shape
def test_a_replayed_round_is_bitwise_the_eager_one(provider: str, drafts: Drafts, device: torch.device) -> None:
    """Covers rounds of three, one and no sequences, with decode steps of another runner between them."""
    tiny = build(device, provider, drafts)
    requests = prompted(tiny)
    runner = tiny.runner(draft=tiny.draft)
    steps = tiny.runner()
    for count in (3, 1, 3, 2, 0, 3):
        batch = requests.draft_batch(drafts, count)
        picked = runner.run(batch).clone()
        assert picked.shape == (count, drafts.tokens)
        assert torch.equal(picked, runner.run_eagerly(batch))
        requests.run(steps, [1, 1, 1])
    assert (runner.counters.graphs_off, runner.counters.captures) == ("", 2)
    assert runner.counters.replays >= 5
    runner.check_addresses()
    tiny.runtime.check_device()


@pytest.mark.nightly
@host_only
@tree_mostly
def test_rounds_in_two_halves_are_captured_and_keep_the_order_of_the_batch(
    drafts: Drafts, provider: str, device: torch.device
) -> None:
    tiny = build(device, provider, drafts, split=True)
    requests = prompted(tiny)
    runner = tiny.runner(draft=tiny.draft)
    eager = tiny.runner(graphs=False, draft=tiny.draft)
    for count in (3, 1, 2):
        batch = requests.draft_batch(drafts, count)
        picked = runner.run(batch, halves=2).clone()
        assert torch.equal(picked, eager.run(batch, halves=2))
        # A whole step rounds its sums differently; the first picks follow from the ids and the prefix.
        assert len(picked) == len(runner.run(batch)) == count
    names = {bucket.name.partition(",")[0] for bucket in runner.capture_report().buckets}
    branches = "1 branch" if drafts is CHAIN else "2 branches"
    assert f"{drafts.steps} draft steps of 4 sequences with {branches} in two halves" in names
    assert runner.counters.graphs_off == ""


@host_only
def test_rounds_that_were_not_asked_for_run_eagerly(provider: str, device: torch.device) -> None:
    tiny = build(device, provider, CHAIN)
    requests = prompted(tiny)
    runner = tiny.runner(draft=tiny.draft)
    picked = runner.run(requests.draft_batch(Drafts(1, 2), 3))
    assert picked.shape == (3, 2)
    assert runner.counters.replays == runner.counters.captures == 0
    with pytest.raises(BadSetting, match="drafts with several branches need masks in every layer"):
        RuntimeOptions(num_pages=9, max_num_seqs=2, max_kv_len=16, drafts=[TREE]).padding([small_problem()])


@host_only
def test_a_graph_that_a_kernel_cannot_serve_is_never_made(provider: str, device: torch.device) -> None:
    """A kernel that may not be captured runs the draft steps eagerly, and reports it. No graph of it is tried."""
    tiny = build(device, provider, TREE)
    options, selections = tiny.runtime.options, []
    for selection in tiny.runtime.selections:
        kernels = {
            kind: LayerKernel(replace(kernel.entry, graph_safe=kind is not StepKind.MASKED), kernel.bound)
            for kind, kernel in selection.kernels.items()
        }
        selections.append(replace(selection, kernels=kernels))
    problems = tiny.problems
    kinds = LayerKinds.of(problems, options.spaces(problems), selections)
    runtime = AttentionRuntime(kinds, options, device=device, guards=tiny.runtime.guards)
    tiny = replace(tiny, runtime=runtime)
    runner = StepRunner(runtime, tiny.forward, recorder_for(device), draft=tiny.draft)
    report = runner.capture_all()
    reasons = [report.skipped[shape] for shape in draft_shapes(runtime.padding)]
    assert all("not every kernel can be captured" in reason for reason in reasons)
    made = runner.counters.captures
    requests = prompted(tiny)
    assert runner.run(requests.draft_batch(TREE, 3)).shape == (3, 4)
    assert (runner.counters.replays, runner.counters.captures) == (0, made)


def test_a_dump_knows_rounds_of_drafts(device: torch.device, tmp_path: Path) -> None:
    tiny = build(device, "torch", TREE)
    flight = FlightRecorder(tiny.runtime, tmp_path / "flight.json")
    runner = tiny.runner(flight=flight, draft=tiny.draft)
    runner.run(prompted(tiny).draft_batch(TREE, 3))
    flight.dump("asked for")
    dump = read_dump(tmp_path / "flight.json")
    assert dump.runtime.options.drafts == (TREE,)
    step = dump.step(None)
    assert (step.branches, step.draft_steps, step.children, step.padded_seqs) == (2, 2, 2, 4)
    with pytest.raises(BadBatch, match="is a round of drafts"):
        step.batch()
