"""Graphs of split steps: both halves in one graph, bitwise equal to the eager halves, whatever ran before them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rocm_attn.batch.mask import TreeMask, random_trees
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.capture.check import rows_beyond_bounds
from rocm_attn.capture.graphs import capture_shapes, recorder_for, shape_name
from rocm_attn.capture.split_forward import SplitForward, side_by_side
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.cli import DONE, main
from rocm_attn.hip_graphs.forked import ForkedStream
from rocm_attn.hip_graphs.recorder import Recorder
from rocm_attn.kernels.metadata.step_tensors import NO_PARENT
from rocm_attn.step.step import Part, Step
from rocm_attn.watch.flight_recorder import FlightRecorder
from tests.amd.graphs.small_models import Forgetful, Requests, Tiny, same

# Prompts of five requests, then split decode and verify steps: odd, even, a single sequence, none.
PROMPTS = [5, 2, 7, 1, 4]
SPLIT = [[1] * 5, [1] * 2, [1], [], [1] * 4, [1] * 3, [3, 3], [1] * 5, [2, 1, 4], [1] * 2]


def build(device: torch.device, provider: str, sizes: Sequence[int] = (2, 8), rows: int = 5) -> Tiny:
    """Returns a model with room for verify steps in graphs of 6 and 12 tokens."""
    return Tiny.build(device, provider, sizes, (6, 12), max_num_seqs=rows, split_steps=True)


def runner_of(tiny: Tiny, *, graphs: bool = True, split_forward: SplitForward | None = None) -> StepRunner:
    recorder = recorder_for(tiny.runtime.device) if graphs else None
    return StepRunner(tiny.runtime, tiny.forward, recorder, split_forward=split_forward)


def served(
    runner: StepRunner, tiny: Tiny, run: Callable[[StepBatch], Tensor], steps: Sequence[Sequence[int]] = SPLIT
) -> list[Tensor]:
    """Returns the rows of these steps of fresh requests. run: called for each step except the prompts"""
    requests = tiny.admitted(5)
    for seq, length in enumerate(PROMPTS):
        runner.run_eagerly(_only(requests, seq, length))
    outs = [run(requests.batch(q_len)).clone() for q_len in steps]
    requests.free()
    return outs


def _only(requests: Requests, seq: int, length: int) -> StepBatch:
    q_len = [0] * seq + [length]
    whole = requests.batch(q_len)
    return StepBatch(whole.rows[seq:], whole.kv_len[seq:], whole.q_len[seq:], whole.token_ids)


@pytest.mark.fast(1)
@pytest.mark.parametrize("sizes", [(2, 8), (1, 3, 5), pytest.param((8,), marks=pytest.mark.nightly), (16,)], ids=str)
def test_replayed_halves_are_bitwise_the_eager_ones(
    sizes: tuple[int, ...], provider: str, device: torch.device
) -> None:
    """The pool has 5 rows, and ladders are padded to 8 and to 16, too. Real rows come back in the batch's order."""
    outs = []
    for graphs in (False, True):
        tiny = build(device, provider, sizes)
        runner = runner_of(tiny, graphs=graphs)
        outs.append(served(runner, tiny, partial(runner.run, halves=2)))
        assert [len(rows) for rows in outs[-1]] == [len(q_len) for q_len in SPLIT]
        assert runner.counters.graphs_off == ""
        runner.check_addresses()
    assert same(*outs)
    assert runner.counters.replays >= len(SPLIT) - 1
    tiny = build(device, provider, sizes)
    runner = runner_of(tiny, graphs=False)
    for split, whole in zip(outs[0], served(runner, tiny, runner.run), strict=True):
        assert torch.isfinite(whole).all()
        assert not rows_beyond_bounds(split, whole)


def test_trees_of_drafts_are_verified_in_halves(provider: str, device: torch.device) -> None:
    """Results are bitwise those of the eager halves, and equal a whole step's; each replay has other trees."""
    generator, trees = torch.Generator(device).manual_seed(2), list[TreeMask]()

    def outs(which: str) -> list[Tensor]:
        tiny = Tiny.build(device, provider, (2, 8), (6, 12), max_num_seqs=5, split_steps=True, custom_mask=True)
        runner, num = runner_of(tiny, graphs=which == "replayed"), iter(range(len(SPLIT)))

        def run(batch: StepBatch) -> Tensor:
            at = next(num)
            if at == len(trees):
                trees.append(random_trees(batch.q_len, generator))
            batch = replace(batch, mask=trees[at])
            return runner.run(batch) if which == "whole" else runner.run(batch, halves=2)

        rows = served(runner, tiny, run, [[3, 3], [2, 1, 4], [1] * 5, [], [4, 2], [3, 2, 1], [3, 3]])
        assert runner.counters.graphs_off == ""
        assert (runner.counters.replays > 4) == (which == "replayed")
        return rows

    eager, replayed, whole = outs("eager"), outs("replayed"), outs("whole")
    assert same(eager, replayed)
    for split, other in zip(eager, whole, strict=True):
        assert torch.isfinite(other).all()
        assert not rows_beyond_bounds(split, other)
    chains = [tree.parents for tree in trees]
    trees[:] = [TreeMask(torch.full_like(parents, NO_PARENT)) for parents in chains]
    assert not same(eager, outs("eager")), "a tree that is left out shows"


def test_split_shapes_are_captured_ahead_and_predicted(provider: str, device: torch.device) -> None:
    sizes, rows = (3, 6), 6
    tiny = build(device, provider, sizes, rows)
    report = runner_of(tiny).capture_all()
    assert (report.skipped, report.graphs_off) == ({}, "")
    shapes = [bucket.key.shape for bucket in report.buckets]
    assert shapes == list(capture_shapes(tiny.runtime.padding))
    assert sum(shape.num_children == 2 for shape in shapes) >= len(shapes) // 3
    assert all("bitwise in 3 random batches" in bucket.check for bucket in report.buckets)
    assert any("decode of 6 sequences in two halves" in line for line in report.lines())
    plan = tiny.planned()
    assert [bucket.shape for bucket in plan.buckets] == shapes
    assert {part.name: part.num_bytes for part in plan.parts} == tiny.held()


def test_without_split_steps_nothing_is_sealed_for_them_and_they_run_eagerly(
    provider: str, device: torch.device
) -> None:
    tiny = Tiny.build(device, provider, (2, 8), max_num_seqs=5)
    runner = runner_of(tiny)
    outs = served(runner, tiny, partial(runner.run, halves=2))
    assert (runner.counters.replays, runner.counters.captures) == (0, 0)
    assert tiny.runtime.seals.tensors()["counts"].numel() == 4
    split = build(device, provider)
    eager = runner_of(split, graphs=False)
    for mine, other in zip(outs, served(eager, split, partial(eager.run, halves=2)), strict=True):
        assert not rows_beyond_bounds(mine, other)


@pytest.mark.parametrize("launch", ["fill", "store_kv"])
def test_a_wrong_split_graph_is_refused(launch: str, provider: str, device: torch.device) -> None:
    outs = []
    for graphs in (False, True):
        tiny = build(device, provider)
        recorder: Recorder | None = Forgetful(recorder_for(tiny.runtime.device), tiny.runtime, launch)
        runner = StepRunner(tiny.runtime, tiny.forward, recorder if graphs else None)
        outs.append(served(runner, tiny, partial(runner.run, halves=2), SPLIT[:3]))
    assert "in two halves differs from the eager run" in runner.counters.graphs_off
    assert same(*outs)


def test_a_split_forward_that_is_not_bitwise_is_replaced_with_a_reason(provider: str, device: torch.device) -> None:
    """A result within the bounds of the sequential halves does not suffice: the order of the halves must not show."""

    def inexact(forward: Callable[[Part], Tensor]) -> SplitForward:
        return lambda step: tuple(forward(part) * (1 + 2e-6) for part in step.parts)  # type: ignore[return-value]

    def wrong(forward: Callable[[Part], Tensor]) -> SplitForward:
        return lambda step: (forward(step.parts[1]), forward(step.parts[0]))

    def counts(forward: Callable[[Part], Tensor]) -> SplitForward:
        def run(step: Step) -> tuple[Tensor, Tensor]:
            int(step.num_first)
            return forward(step.parts[0]), forward(step.parts[1])

        return run

    for broken, reason in (
        (inexact, "because the given split_forward is not bitwise equal"),
        (wrong, "in two halves differs from the eager run"),
        (counts, "cannot repeat on replay"),
    ):
        outs = []
        for graphs in (False, True):
            tiny = build(device, provider, (8,))
            runner = runner_of(tiny, graphs=graphs, split_forward=broken(tiny.forward))
            outs.append(served(runner, tiny, partial(runner.run, halves=2), [[1] * 5, [1] * 3]))
        assert same(*outs)
        assert (runner.counters.replays, runner.counters.graphs_off) == (2, "")
        (bucket,) = runner.capture_report().buckets
        assert "; one half after the other, because " in bucket.check
        assert reason in bucket.check


def test_a_noted_split_step_is_replayed_as_one(
    provider: str, device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = build(device, provider)
    flight = FlightRecorder(tiny.runtime, tmp_path / "dump.json")
    runner = tiny.runner(flight=flight)
    served(runner, tiny, partial(runner.run, halves=2))
    assert [shape_name(step.shape) for step in flight.steps()][:2] == [
        "decode of 8 sequences in two halves",
        "decode of 2 sequences in two halves",
    ]
    dump = str(flight.dump("a test"))
    for number in (0, 3, 6, 8):  # an odd number of sequences, none, two verified, and three of unlike lengths
        q_len = SPLIT[number]
        assert main(["replay-step", dump, "--step", str(number), "--device", str(device)]) == DONE
        printed = capsys.readouterr().out
        assert f"{len(q_len)} of" in printed
        assert ", in two halves, " in printed
        assert "layer kind 0: graph: agrees, bitwise equal to eager" in printed or not q_len


@pytest.mark.gpu
@pytest.mark.parametrize("provider", ["torch", "triton"])
def test_halves_side_by_side_are_bitwise_the_halves_one_after_the_other(provider: str, device: torch.device) -> None:
    outs = []
    for split in (False, True):
        tiny = build(device, provider)
        forward, side = tiny.forward, ForkedStream(tiny.runtime.device)
        runner = runner_of(tiny, split_forward=side_by_side(forward, side) if split else None)
        for _ in range(3):
            outs.append(served(runner, tiny, partial(runner.run, halves=2)))
        assert runner.counters.graphs_off == ""
        assert runner.counters.replays >= 3 * (len(SPLIT) - 1)
        checks = [bucket.check for bucket in runner.capture_report().buckets]
        assert all("bitwise" in check and "one half after the other" not in check for check in checks)
    for other in outs[1:]:
        assert same(outs[0], other)
