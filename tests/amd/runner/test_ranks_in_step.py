"""Two ranks of a model over Gloo, each with its own Engine, as torchrun starts them: tokens, graphs and faults.

All cases run in one pair of processes; each test reads the results of one of them.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rocm_attn.batch.padding import PadTo
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.errors import BadSetting, DeviceFault
from rocm_attn.hip_graphs.recorder import Recorder, Recording
from rocm_attn.kernels.cache.row_work import QkvWork
from rocm_attn.machine.agreement import RanksDiverged, SentFault, faults_of_any
from rocm_attn.machine.settings import DISABLE_GUARDS, Settings
from rocm_serve import alike_ranks, engine_runtime, pool_size
from rocm_serve import engine as engine_module
from rocm_serve.engine import Engine
from rocm_serve.ranks import RanksOfGroup
from rocm_serve.request import Completion, FailureEvent, Request
from rocm_serve.sampling.compared import RankComparison
from rocm_serve.sampling.sampling_options import Sampling
from tests.amd.ranks import NUM_RANKS, on_every_rank
from tests.amd.runner.metered_memory import MeteredMemory
from tests.amd.runner.round_texts import OPTIONS, repeating_requests, round_model
from tests.amd.runner.serving import BASE as OF_EIGHT
from tests.amd.runner.test_host_tier import FEW, flip
from tests.amd.runner.test_host_tier import requests as more_than_the_pool_holds
from tests.amd.runner.tiny_model import NAN_TOKEN, tiny_model, word_tokenizer

BASE = replace(OF_EIGHT, max_batch_size=4)
DRAFTING = replace(OPTIONS, max_kv_len=200)
REQUESTS = tuple(
    Request(tuple(range(10 + number, 14 + 3 * number)), 8, Sampling(temperature=0.7 * (number % 2), seed=number))
    for number in range(4)
)
LONG = tuple(replace(request, max_new_tokens=30) for request in REQUESTS)
POISONED = Request((3, NAN_TOKEN, 4), 6)


def ranks() -> RanksOfGroup:
    assert dist.group.WORLD is not None
    return RanksOfGroup(dist.group.WORLD)


def engine(**changes: Any) -> Engine:
    return Engine(tiny_model(ranks=ranks()), replace(BASE, **changes))


def shown(completions: Sequence[Completion]) -> list[str]:
    return [f"{completion.token_ids} {completion.finish_reason}" for completion in completions]


def served(rank: int, **changes: Any) -> list[str]:
    """Returns the completions of the requests, and whether steps were replayed."""
    serving = engine(**changes)
    return [*shown(serving.generate(REQUESTS)), f"replays {serving.metrics.replays > 0}"]


def one_at_a_time(rank: int) -> list[str]:
    return [line for request in REQUESTS for line in shown(engine(deterministic=True).generate([request]))]


def on_few_pages(rank: int) -> list[str]:
    serving = engine(num_pages=17)
    return [*shown(serving.generate(LONG)), f"preempted {serving.metrics.preemptions > 0}"]


def second_turns(serving: Engine) -> list[str]:
    """Each request continues where it ended, over few pages, with priorities; one is aborted on the way."""
    first = serving.generate(REQUESTS)
    numbers = [
        serving.submit(
            replace(request, prompt_token_ids=(*done.prompt_token_ids, *done.token_ids, 9), priority=number % 2)
        )
        for number, (request, done) in enumerate(zip(REQUESTS, first, strict=True))
    ]
    for _ in range(3):
        serving.step()
    serving.abort(numbers[2])
    while serving.has_work:
        serving.step()
    metrics = serving.metrics
    return [*shown([serving.completion(number) for number in numbers]), f"hits {metrics.prefix_hits}"]


def through_host_memory(serving: Engine, *, flips: bool) -> list[str]:
    """Prompts come again after their pages have gone to host memory. flips: bits of them flip on this rank at times"""
    lines = []
    for number, request in enumerate(more_than_the_pool_holds(18)):
        lines += shown(serving.generate([request]))
        if flips and number % 6 == 5:
            flip(serving, number)
    return [*lines, f"hits {serving.metrics.host_kv_hits}"]


def host_memory_of_one_rank_flips(rank: int) -> list[str]:
    serving = engine(**FEW)
    lines = through_host_memory(serving, flips=rank == 1)
    assert bool(serving.metrics.host_kv_refusals) == (rank == 1)
    return lines


def memory_of_one_rank_is_short(rank: int) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        memory = MeteredMemory(30_000 if rank == 1 else 1 << 30)
        patch.setattr(engine_runtime, "memory_of", lambda device: memory)
        patch.setattr(pool_size, "_ALLOCATION_BYTES", 0)
        patch.setattr(pool_size, "_CODE_BYTES", 0)
        serving = engine(gpu_memory_share=1.0)
    num_pages = serving.report().num_pages
    return [f"fewer than wanted: {num_pages < 1 + 4 * 16}", str(num_pages), *shown(serving.generate(REQUESTS))]


class WrongRecorder:
    """A recorder that makes its graph with the other ranks. Then it raises, or gives a graph of other numbers."""

    def __init__(self, raises: bool) -> None:
        self._inner, self._raises = recorder_for(torch.device("cpu")), raises

    def record(self, fn: Callable[[], Any]) -> tuple[Recording, Any]:
        recording, rows = self._inner.record(fn)
        if self._raises:
            raise RuntimeError("the driver is out of handles")
        replay = recording.replay

        def other() -> None:
            replay()
            rows.add_(1)

        recording.replay = other  # type: ignore[method-assign]
        return recording, rows

    def release_memory(self) -> None:
        self._inner.release_memory()


def a_graph_is_wrong_on_one_rank(rank: int, *, raises: bool) -> list[str]:
    def recorder(device: torch.device) -> Recorder:
        return WrongRecorder(raises) if rank == 1 else recorder_for(device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "recorder_for", recorder)
        serving = engine(graphs=True)
    completions = serving.generate(REQUESTS)
    return [serving.report().graphs, *shown(completions)]


class PoisonedLayers:
    """Layers of a step with NaN in the K of one token."""

    def __init__(self, layers: Any, token_ids: Tensor) -> None:
        self._layers = layers
        self._is_nan = (token_ids == NAN_TOKEN)[:, None, None]

    def rope_and_store(self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_out: Tensor, work: QkvWork) -> None:
        self._layers.rope_and_store(layer, q, k.masked_fill(self._is_nan, float("nan")), v, q_out, work)

    def attend(self, layer: int, q: Tensor, out: Tensor) -> None:
        self._layers.attend(layer, q, out)


def nan_in_the_kv_of_one_rank(rank: int, **changes: Any) -> list[str]:
    """Returns the requests that fail, and the completions of the others."""
    serving = engine(**changes)
    if rank == 1:
        forward = serving._runner._forward

        def poisoned(step: Any) -> Tensor:
            return forward(replace(step, layers=PoisonedLayers(step.layers, step.token_ids)))

        serving._runner._forward = poisoned
    return ended(serving, [REQUESTS[0], POISONED, *REQUESTS[1:]])


def ended(serving: Engine, requests: Sequence[Request]) -> list[str]:
    """Serves requests with faults on the way: the step of each fault, and the completion of each request."""
    numbers = [serving.submit(request) for request in requests]
    return [*gone_through(serving), *shown([serving.completion(number) for number in numbers])]


def gone_through(serving: Engine) -> list[str]:
    """Runs steps to the end: the step of each fault, and the requests that failed."""
    lines, steps = list[str](), 0
    while serving.has_work:
        steps += 1
        try:
            events = serving.step()
        except DeviceFault as fault:
            lines.append(f"fault at step {steps}: rows {fault.rows}, contained {fault.is_contained}, {fault}")
            continue
        failed = [event.request for event in events if isinstance(event, FailureEvent)]
        lines += [f"request {number} failed at step {steps}" for number in failed]
    return lines


def drafted(serving: Engine) -> list[str]:
    """The texts with drafts that were looked up in them, and whether drafts were accepted."""
    completions = serving.generate(repeating_requests())
    return [*shown(completions), f"accepted {serving.metrics.accepted_drafts > 50}"]


def the_table_of_one_rank_is_wiped(rank: int) -> list[str]:
    serving, number = engine(), 0
    run = serving._runner.run

    def wiping(batch: StepBatch, pad_to: PadTo | None = None) -> Tensor:
        nonlocal number
        number += 1
        if rank == 1 and number == 3:
            serving.runtime.gate._publisher.apply_table_changes()
            serving.runtime.table.full.entries.zero_()
        return run(batch, pad_to)

    serving._runner.run = wiping  # type: ignore[assignment, method-assign]
    lines = ended(serving, REQUESTS)
    known_by = f"known by step {3 + serving.runtime.faults.steps_until_known}"
    return [*lines, known_by, *shown(serving.generate([REQUESTS[0]]))]


def given_other_requests(rank: int) -> list[str]:
    """The requests have equal length, so that the collectives of the ranks still meet."""
    serving = engine()
    serving.submit(Request((1, 2, 3 + rank), 8))
    try:
        while serving.has_work:
            serving.step()
    except RanksDiverged as error:
        return [str(error)]
    return ["served"]


def given_other_files_or_options(rank: int) -> list[str]:
    """Refused at once on all ranks, which then serve what they have in common."""
    lines = list[str]()
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"chunk": 8 + rank, "graphs": rank == 0, "hang_after": 60.0 + rank}, {}),
        ({}, {"seed": rank}),
        ({}, {"eos_token_ids": (9 + rank,)}),
        ({}, {"tokenizer": word_tokenizer() if rank else None}),
    ]
    for options, model in cases:
        with pytest.raises(BadSetting) as refused:
            Engine(tiny_model(ranks=ranks(), **model), replace(BASE, **options))
        lines.append(re.sub(r"\b[0-9a-f]{8}\b", "X", str(refused.value)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alike_ranks, "settings", lambda: Settings(debug=True, disable_guards=("graph_key",) * rank))
        with pytest.raises(BadSetting) as refused:
            engine()
    return [*lines, str(refused.value), *served(rank)]


def picked_apart(rank: int) -> list[str]:
    """Rank 1 picks another token, which neither rank's host knows when the next step is launched."""
    serving = engine(steps_ahead=1)
    plain = serving._picker.plain
    pick = plain.pick
    plain.pick = lambda logits, draws: pick(-logits if rank == 1 else logits, draws)  # type: ignore[method-assign]
    try:
        serving.generate([Request((1, 2, 3), 8)])
    except RanksDiverged as error:
        return [str(error)]
    return ["served"]


BODIES: Mapping[str, Callable[[int], list[str]]] = {
    "eager": lambda rank: served(rank),
    "graphs": lambda rank: served(rank, graphs=True),
    "deterministic": lambda rank: served(rank, deterministic=True),
    "ahead": lambda rank: served(rank, graphs=True, steps_ahead=1),
    "one at a time": one_at_a_time,
    "few free pages": on_few_pages,
    "second turns": lambda rank: second_turns(engine(num_pages=19)),
    "host memory": host_memory_of_one_rank_flips,
    "short memory": memory_of_one_rank_is_short,
    "failed graph": lambda rank: a_graph_is_wrong_on_one_rank(rank, raises=True),
    "other graph": lambda rank: a_graph_is_wrong_on_one_rank(rank, raises=False),
    "nan, eager": lambda rank: nan_in_the_kv_of_one_rank(rank),
    "nan, graphs": lambda rank: nan_in_the_kv_of_one_rank(rank, graphs=True),
    "nan, ahead": lambda rank: nan_in_the_kv_of_one_rank(rank, steps_ahead=1),
    "drafts": lambda rank: drafted(Engine(round_model(ranks=ranks()), DRAFTING)),
    "wiped": the_table_of_one_rank_is_wiped,
    "not alike": given_other_files_or_options,
    "diverged": given_other_requests,
    "picked apart": picked_apart,
}
_SEPARATOR = "---"


def everything(rank: int) -> list[str]:
    return [line for body in BODIES.values() for line in (*body(rank), _SEPARATOR)]


Found = Mapping[str, list[list[str]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """name of a body -> its output on each rank."""
    of_rank = []
    for lines in on_every_rank(everything, tmp_path_factory.mktemp("ranks")):
        parts: list[list[str]] = [[]]
        for line in lines:
            if line == _SEPARATOR:
                parts.append([])
            else:
                parts[-1].append(line)
        of_rank.append(dict(zip(BODIES, parts, strict=False)))
    return {name: [parts[name] for parts in of_rank] for name in BODIES}


@pytest.fixture(scope="module")
def alone() -> list[str]:
    """Returns the completions of the requests on one rank."""
    return shown(Engine(tiny_model(), BASE).generate(REQUESTS))


def same_on_all(lines: list[list[str]]) -> list[str]:
    assert len(lines) == NUM_RANKS
    assert all(other == lines[0] for other in lines)
    return lines[0]


@pytest.mark.parametrize("name", ["eager", "graphs", "deterministic", "ahead"])
def test_tokens_are_those_of_one_rank(name: str, found: Found, alone: list[str]) -> None:
    assert same_on_all(found[name]) == [*alone, f"replays {name in ('graphs', 'ahead')}"]


def test_what_a_prompt_gives_deterministically_does_not_depend_on_those_beside_it(found: Found) -> None:
    assert same_on_all(found["one at a time"]) == found["deterministic"][0][: len(REQUESTS)]


def test_preemption_is_the_same_on_all_ranks_and_changes_no_token(found: Found) -> None:
    one_rank = shown(Engine(tiny_model(), BASE).generate(LONG))
    assert same_on_all(found["few free pages"]) == [*one_rank, "preempted True"]


def test_ranks_find_the_same_prefixes_admit_in_the_same_order_and_abort_together(found: Found) -> None:
    lines = same_on_all(found["second turns"])
    one_rank = second_turns(Engine(tiny_model(), replace(BASE, num_pages=19)))
    assert lines == one_rank, "though ranks wait longer until a step is known to be right"
    assert int(lines[-1].removeprefix("hits ")) > 20


def test_a_page_that_one_rank_refuses_is_computed_again_by_all(found: Found) -> None:
    *lines, hits = same_on_all(found["host memory"])
    *one_rank, whole = through_host_memory(Engine(tiny_model(), replace(BASE, **FEW)), flips=False)
    assert lines == one_rank
    assert 0 < int(hits.removeprefix("hits ")) < int(whole.removeprefix("hits "))


def test_all_ranks_have_as_many_pages_as_that_with_the_least_memory(found: Found, alone: list[str]) -> None:
    first, _, *tokens = same_on_all(found["short memory"])
    assert (first, tokens) == ("fewer than wanted: True", alone)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("failed graph", "off: on rank 1: RuntimeError: the driver is out of handles"),
        ("other graph", "off: on rank 1: the graph of decode of 4 sequences differs from the eager run"),
    ],
)
def test_a_graph_that_fails_on_one_rank_serves_on_none(name: str, why: str, found: Found, alone: list[str]) -> None:
    """The ranks sum in every layer, so each must make and compare it as often as the others."""
    graphs, *tokens = same_on_all(found[name])
    assert graphs.startswith(why)
    assert tokens == alone


@pytest.mark.parametrize("name", ["nan, eager", "nan, graphs", "nan, ahead"])
def test_numbers_that_are_none_on_one_rank_fail_their_request_alone_on_all(
    name: str, found: Found, alone: list[str]
) -> None:
    lines = same_on_all(found[name])
    assert [line.partition(" at")[0] for line in lines if "failed" in line] == ["request 1 failed"]
    first, poisoned, *others = lines[-len(REQUESTS) - 1 :]
    assert [first, *others] == alone
    assert poisoned.endswith("error")


def test_a_fault_of_one_rank_is_raised_by_all_between_the_same_two_steps(found: Found, alone: list[str]) -> None:
    lines = same_on_all(found["wiped"])
    faults = [line for line in lines if line.startswith("fault")]
    assert len(faults) == 1
    assert "contained False, on rank 1: step" in faults[0]
    assert "a new token had no page" in faults[0]
    assert lines[-2] == faults[0].partition(": ")[0].replace("fault at", "known by"), "at the latest, and no sooner"
    assert lines[-1] == alone[0], "all ranks go on afterwards"


def test_ranks_draft_the_same_tokens_and_have_the_texts_of_plain_decoding_on_one(found: Found) -> None:
    plain = Engine(round_model(), replace(DRAFTING, speculative="off", draft_tokens=4, steps_ahead=0))
    assert same_on_all(found["drafts"]) == [*shown(plain.generate(repeating_requests())), "accepted True"]


def test_ranks_that_were_given_other_files_or_options_are_refused_at_once(found: Found, alone: list[str]) -> None:
    options, weights, config, tokenizer, guards, *tokens = same_on_all(found["not alike"])
    begin = "ranks that share a model must have the same files and options; on rank 0: "
    assert options == f"{begin}chunk 8, graphs True; on rank 1: chunk 9, graphs False"
    assert weights == f"{begin}embedding with the checksum X; on rank 1: embedding with the checksum X"
    assert config == f"{begin}config.eos_token_ids (9,); on rank 1: config.eos_token_ids (10,)"
    assert tokenizer == f"{begin}tokenizer None; on rank 1: tokenizer with the checksum X"
    assert guards == f"{begin}{DISABLE_GUARDS} ; on rank 1: {DISABLE_GUARDS} graph_key"
    assert tokens == [*alone, "replays False"]


@pytest.mark.parametrize("name", ["diverged", "picked apart"])
def test_ranks_that_were_given_other_requests_or_picked_other_tokens_are_reported_apart(
    name: str, found: Found
) -> None:
    (error,) = same_on_all(found[name])
    assert error.startswith("rank 1 ran another step than rank 0 after step ")


def test_faults_are_reported_in_each_ranks_own_numbers_of_steps() -> None:
    """A graph that was given up early has left rank 1 two steps behind."""
    wrong, anywhere = ("step 9: wrong", 9, (3, 4), True), ("page 0 was written", None, (), False)
    of_rank: list[tuple[int, list[SentFault]]] = [(12, [("step 11: wrong", 11, (3,), True)]), (10, [wrong, anywhere])]
    (fault, everywhere), (theirs, _) = faults_of_any(of_rank, 12), faults_of_any(of_rank, 10)
    assert (fault.step, theirs.step, everywhere.step) == (11, 9, None)
    assert (fault.rows, fault.is_contained, everywhere.is_contained) == ((3, 4), True, False)
    assert str(fault) == "on rank 0: step 11: wrong; on rank 1: step 9: wrong"


def test_ranks_compare_a_token_once() -> None:
    """Otherwise a step would take longer with each token that was ever read."""
    meetings, digests = Mock(), list[int]()
    compared = RankComparison(meetings, has_ranks=True)
    for token in (7, 7, 8):
        compared.note([[token]])
        compared.before_step(np.ones(3, np.int32))
        digests.append(meetings.digest)
    assert digests[0] == digests[1] != digests[2]
