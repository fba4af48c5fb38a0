"""Forwards that return more than one tensor, or none: a step's outputs, eager, replayed, and in two halves."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from rocm_attn.capture.check import tensors_of
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.errors import BadTensor
from rocm_attn.step.outputs import PerToken
from rocm_attn.step.step import Part
from rocm_attn.watch.sampled_check import LayerTap, SampledCheck
from tests.amd.graphs.small_models import SERVED, Forgetful, Lazy, Requests, Tiny, same

CPU = torch.device("cpu")
# Prompts; decode steps, which have as many tokens as sequences; others with the same number by accident; none.
STEPS = [*SERVED, [2, 0], [3, 1, 2], [0, 3, 0], [1, 1, 1], [3, 1, 2]]


@dataclass(frozen=True)
class Draft:
    """The first layers' result for each token, and the token that each sequence would take."""

    hidden: PerToken
    best: Tensor


class Everything(NamedTuple):
    """A tree with every kind of branch."""

    logits: Tensor
    draft: Draft
    of_parts: dict[str, list[Tensor | PerToken]]
    nothing: None
    pair: tuple[PerToken, Tensor]


def everything(step: Part, rows: Tensor) -> Everything:
    """rows: [S, 96]; in tensors of tokens, each token has its own values"""
    places = step.positions.float() + 100.0 * step.row_of_token
    hidden = torch.stack([places, step.token_ids.float()], 1)
    parts: dict[str, list[Tensor | PerToken]] = {"of sequences": [rows[:, 3:5]], "of tokens": [PerToken(places)]}
    return Everything(rows, Draft(PerToken(hidden), rows.argmax(1)), parts, None, (PerToken(hidden * 2), rows[:, 0]))


def served(
    forward: Callable[[Tiny], Callable[[Part], Any]], *, graphs: bool, split: bool
) -> tuple[StepRunner[Any], list[dict[str, Tensor]], list[Tensor]]:
    """Returns the runner, copies of the outputs of STEPS, and the K and V that all of them have stored."""
    tiny = Tiny.build(CPU, "torch", [4], [8, 16], split_steps=True)
    runner = StepRunner(tiny.runtime, forward(tiny), recorder_for(CPU) if graphs else None)
    requests, outs = tiny.admitted(3), []
    for q_len in STEPS:
        run = partial(runner.run, halves=2) if split else runner.run
        outputs = tensors_of(run(requests.batch(q_len)))
        outs.append({path: tensor.clone() for path, tensor in outputs.items()})
    return runner, outs, requests.stored()


def rows_alone(tiny: Tiny) -> Callable[[Part], Tensor]:
    return tiny.forward


@pytest.mark.fast(1)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_a_tree_comes_back_with_the_rows_of_real_sequences_and_tokens(graphs: bool, split: bool) -> None:
    runner, outs, _ = served(lambda tiny: lambda step: everything(step, tiny.forward(step)), graphs=graphs, split=split)
    _, rows, _ = served(rows_alone, graphs=False, split=split)
    assert runner.counters.replays == (len(STEPS) if graphs else 0)
    row_of_seq, seen = [1, 2, 3], [0, 0, 0]
    ids = Requests(runner._runtime).random
    for q_len, out, want in zip(STEPS, outs, rows, strict=True):
        places, tokens = [], torch.from_numpy(ids.integers(1, 50, sum(q_len))).float()
        for seq, new in enumerate(q_len):
            places += [100.0 * row_of_seq[seq] + seen[seq] + at for at in range(new)]
            seen[seq] += new
        hidden = torch.stack([torch.tensor(places), tokens], 1)
        assert torch.equal(out[".logits"], want[""])
        assert torch.equal(out[".draft.hidden"], hidden)
        assert torch.equal(out[".draft.best"], want[""].argmax(1))
        assert torch.equal(out[".of_parts['of sequences'][0]"], want[""][:, 3:5])
        assert torch.equal(out[".of_parts['of tokens'][0]"], hidden[:, 0])
        assert torch.equal(out[".pair[0]"], hidden * 2)
        assert torch.equal(out[".pair[1]"], want[""][:, 0])


@pytest.mark.fast(1)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_a_forward_that_returns_nothing_stores_what_another_one_stores(graphs: bool, split: bool) -> None:
    runner, outs, stored = served(lambda tiny: lambda step: _ignored(tiny.forward(step)), graphs=graphs, split=split)
    assert outs == [{}] * len(STEPS)
    assert runner.counters.replays == (len(STEPS) if graphs else 0)
    assert runner.counters.graphs_off == ""
    assert same(stored, served(rows_alone, graphs=False, split=split)[2])


def _ignored(rows: Tensor) -> None:
    """Discards the rows, as on a rank that sends them to another one."""


@pytest.mark.parametrize("recorder", ["forgets to store", "works once"])
def test_a_graph_of_a_forward_that_returns_nothing_is_compared_by_what_it_stores(recorder: str) -> None:
    tiny = Tiny.build(CPU, "torch", [4])
    inner = recorder_for(CPU)
    wrong = Lazy(inner) if recorder == "works once" else Forgetful(inner, tiny.runtime, "store_kv")
    runner = StepRunner(tiny.runtime, lambda step: _ignored(tiny.forward(step)), wrong)
    assert "of K of layer 0 of the full space" in runner.capture_all().graphs_off


WRONG: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "a number": (lambda rows, hidden: {"rows": rows, "loss": [0.5]}, r"forward returned a float at \['loss'\]\[0\]"),
    "a set": (lambda rows, hidden: {rows}, "forward returned a set; it must return"),
    "no dimension": (lambda rows, hidden: (rows, rows.sum()), r"a tensor without dimensions at \[1\]; it must return"),
    "tokens as sequences": (
        lambda rows, hidden: [rows, hidden],
        r"8 rows at \[1\] for 4 padded sequences; wrap a tensor that has a row for each token in PerToken",
    ),
    "sequences as tokens": (lambda rows, hidden: PerToken(rows), "forward returned 4 rows for 8 padded tokens$"),
    "a row too few": (lambda rows, hidden: (PerToken(hidden), rows[1:]), r"3 rows at \[1\] for 4 padded sequences$"),
    "a wrapped list": (
        lambda rows, hidden: PerToken([hidden]),  # type: ignore[arg-type]
        "forward returned a PerToken of a list; it must return",
    ),
}


@pytest.mark.parametrize(("outputs", "says"), WRONG.values(), ids=WRONG)
def test_what_is_no_tree_of_rows_is_refused(graphs: bool, outputs: Callable[[Tensor, Tensor], Any], says: str) -> None:
    tiny = Tiny.build(CPU, "torch", [4], [8])
    runner = StepRunner(
        tiny.runtime,
        lambda step: outputs(tiny.forward(step), step.token_ids.float()),
        recorder_for(CPU) if graphs else None,
    )
    requests = tiny.admitted(3)
    for q_len in ([2, 3, 2], [2, 2, 2]):
        with pytest.raises(BadTensor, match=says):
            runner.run(requests.batch(q_len))


def test_halves_with_different_trees_are_refused() -> None:
    tiny = Tiny.build(CPU, "torch", [4], split_steps=True)
    runner: StepRunner[Any] = StepRunner(
        tiny.runtime, lambda step: [tiny.forward(step)] if step.half else tiny.forward(step), None
    )
    requests = tiny.admitted(2)
    with pytest.raises(BadTensor, match=r"Tensor for one half and list\(\[0\]: Tensor\) for the other; both must have"):
        runner.run(requests.batch([3, 3]), halves=2)


def test_a_forward_whose_tree_changes_between_calls_serves_without_graphs() -> None:
    tiny, runs = Tiny.build(CPU, "torch", [4]), 0

    def forward(step: Part) -> dict[str, Tensor]:
        nonlocal runs
        runs += 1
        return {"rows": tiny.forward(step)} if runs % 2 else {"logits": tiny.forward(step)}

    runner = StepRunner(tiny.runtime, forward, recorder_for(CPU))
    assert re.fullmatch(
        r"forward returned dict\(\['.*'\]: Tensor\) when the graph of decode of 4 sequences was made, and "
        r"dict\(\['.*'\]: Tensor\) when it ran eagerly; it must return the same structure.*",
        runner.capture_all().graphs_off,
    )
    requests = tiny.admitted(1)
    (rows,) = runner.run(requests.batch([3])).values()
    assert rows.shape == (1, 96)


def test_ids_that_were_picked_from_nan_prove_nothing() -> None:
    tiny = Tiny.build(CPU, "torch", [4])

    def forward(step: Part) -> tuple[Tensor, Tensor]:
        rows = tiny.forward(step) * float("nan")
        return rows, rows.argmax(1)

    off = StepRunner(tiny.runtime, forward, recorder_for(CPU)).capture_all().graphs_off
    assert off.endswith("cannot be compared with the eager run: forward returns only NaN or infinity")


def test_a_graph_that_is_wrong_in_one_leaf_is_refused_by_its_name() -> None:
    tiny = Tiny.build(CPU, "torch", [4], [8])

    def forward(step: Part) -> dict[str, Tensor | PerToken]:
        return {"rows": tiny.forward(step), "hidden": PerToken(step.token_ids.float() + step.num_seqs)}

    off = StepRunner(tiny.runtime, forward, recorder_for(CPU)).capture_all().graphs_off
    assert "differs from the eager run in rows" in off
    assert "of ['hidden'] (KV lengths" in off


@pytest.mark.parametrize("wrong", [False, True])
def test_the_sampled_check_compares_every_leaf(wrong: bool) -> None:
    tiny, tap = Tiny.build(CPU, "torch", [4]), LayerTap()
    tiny.around = tap.around
    runs = 0

    def forward(step: Part) -> tuple[Tensor, PerToken]:
        nonlocal runs
        runs += 1
        return tiny.forward(step), PerToken(step.token_ids.float() + float(wrong and runs == 2))

    runner = StepRunner(tiny.runtime, forward, None)
    checked = SampledCheck(runner, tiny.runtime, tiny.problems, tap, every=1)
    requests = tiny.admitted(2)
    rows, tokens = checked.run(requests.batch([3, 2]))
    assert (rows.shape, tokens.tensor.shape) == ((2, 96), (5,))
    assert checked.counters.rows_differ == wrong
    assert ("of [1] of a step of 2 sequences" in checked.counters.finding) == wrong
