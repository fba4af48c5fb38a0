"""RankedEngine: the results of an Engine, from a process per rank; and no call is left waiting when a rank fails."""

import asyncio
import multiprocessing
import selectors
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rocm_attn.errors import BadRequest, BadSetting, CapacityExceeded, NeverFits
from rocm_attn.machine.devices import memory_of
from rocm_serve.async_engine import AsyncEngine
from rocm_serve.engine import Engine
from rocm_serve.engine_process import EngineProcess
from rocm_serve.models.loading import LoadedModel
from rocm_serve.parallel import processes
from rocm_serve.parallel.messages import Progressed, Raised, RankError, sendable
from rocm_serve.parallel.processes import RankFailed
from rocm_serve.parallel.rank_process import options_of_rank
from rocm_serve.parallel.ranked_engine import RankedEngine
from rocm_serve.ranks import Ranks
from rocm_serve.request import AbortEvent, Completion, Event, Request, TokenEvent
from tests.amd.house.source_tree import ROOT
from tests.amd.runner.serving import BASE as OF_EIGHT
from tests.amd.runner.serving import salt_of_a_class_that_others_lack, tokens_of
from tests.amd.runner.test_prompt_logprobs import TOLERANCE
from tests.amd.runner.test_ranks_in_step import REQUESTS
from tests.amd.runner.thread_ranks import LoadSabotaged, assert_all_end, pids
from tests.amd.runner.tiny_model import tiny_model, with_nan_token
from tests.amd.runner.with_parameters import CONSTRAINED, character_model

pytestmark = pytest.mark.usefixtures("torch_is_imported")

BASE = replace(OF_EIGHT, max_batch_size=4, graphs=True)


def load_poisoned(*, device: torch.device, ranks: Ranks) -> LoadedModel:
    loaded = tiny_model(device=device, ranks=ranks)
    head = loaded.weights.head.clone()
    with_nan_token(loaded)
    if ranks.shard.rank > 0:  # its rows of the head are those of other tokens
        loaded.weights.head.copy_(head)
    return loaded


def load_not_on_rank_1(*, device: torch.device, ranks: Ranks) -> LoadedModel:
    if ranks.shard.rank == 1:
        raise CapacityExceeded("the weights do not fit beside what another process holds")
    return tiny_model(device=device, ranks=ranks)


def must_not_load(*, device: torch.device, ranks: Ranks) -> LoadedModel:
    raise AssertionError("weights were read")


@pytest.fixture(scope="module")
def ranked(torch_is_imported: None) -> Iterator[RankedEngine]:
    with RankedEngine(load_poisoned, BASE, num_ranks=2) as engine:
        yield engine


@pytest.fixture(scope="module")
def alone() -> list[Completion]:
    return Engine(with_nan_token(tiny_model()), BASE).generate(REQUESTS)


def serve(engine: RankedEngine, method: str) -> None:
    """Until something goes wrong in that method."""
    if method == "step":
        engine.generate(REQUESTS)
    else:
        engine.capture_all(lambda *_: None)


def test_ranks_give_the_tokens_of_one_rank(ranked: RankedEngine, alone: list[Completion]) -> None:
    events: list[Event] = []
    assert ranked.generate(REQUESTS, events.append) == alone
    for number, completion in enumerate(alone):
        tokens = [event.token_id for event in events if isinstance(event, TokenEvent) and event.request == number]
        assert tuple(tokens) == completion.token_ids
    report = ranked.report()
    assert (report.ranks, report.graphs) == (2, "on")
    assert report.metrics.replays > 0
    assert not ranked.has_work


def test_ranks_give_the_logprobs_of_prompts_of_one_rank(ranked: RankedEngine) -> None:
    """The first prompt takes two steps."""
    requests = [Request(tuple(range(8, 28)), 3, prompt_logprobs=2), Request((9, 8, 10), 2, prompt_logprobs=0)]
    alone = Engine(with_nan_token(tiny_model()), BASE).generate(requests)
    for one, other in zip(alone, ranked.generate(requests), strict=True):
        assert [each.token_id for each in other.prompt_logprobs] == [each.token_id for each in one.prompt_logprobs]
        values = [torch.tensor([each.logprob for each in done.prompt_logprobs]) for done in (one, other)]
        torch.testing.assert_close(*values, **TOLERANCE)


def test_the_truth_probe_of_ranks_changes_no_text(ranked: RankedEngine, alone: list[Completion]) -> None:
    """Their heads are too small to tell keys apart; test_live_truth.py has ranks with larger ones."""
    verdict = ranked.probe_truth(0)
    assert (verdict.word, verdict.num_layers) == ("not checked", 2)
    assert tokens_of(ranked.generate(REQUESTS)) == tokens_of(alone)


async def test_tasks_of_an_event_loop_share_ranks(ranked: RankedEngine, alone: list[Completion]) -> None:
    async with AsyncEngine(ranked) as front:
        assert await asyncio.gather(*(front.complete(request) for request in REQUESTS)) == alone
        assert (await front.report()).ranks == 2


def test_what_cannot_be_served_is_refused_and_the_ranks_go_on(ranked: RankedEngine, alone: list[Completion]) -> None:
    with pytest.raises(BadRequest, match="token 64 is not in the model's vocabulary"):
        ranked.generate([Request((1, 64), 4)])
    with pytest.raises(BadRequest, match="there is no request 999"):
        ranked.abort(999)
    assert ranked.generate(REQUESTS[:1]) == alone[:1]


@pytest.mark.parametrize("is_found_here", [False, True])
def test_a_request_with_a_class_that_no_rank_knows_is_refused_and_the_ranks_go_on(
    is_found_here: bool, ranked: RankedEngine, alone: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks were ended, and all requests with them. is_found_here: whether pickle finds it in this process"""
    salt = salt_of_a_class_that_others_lack(monkeypatch)
    if not is_found_here:
        monkeypatch.delitem(sys.modules, type(salt).__module__)
    with pytest.raises(BadRequest, match="the request cannot be sent to the engine's process"):
        ranked.generate([REQUESTS[0], replace(REQUESTS[1], cache_salt=salt)])
    assert not ranked.has_work
    assert ranked.generate(REQUESTS[:1]) == alone[:1]


def test_a_signal_to_all_processes_is_for_the_one_in_front(ranked: RankedEngine, alone: list[Completion]) -> None:
    """A manager of services sends SIGTERM to each; the server drains then."""
    for rank in ranked._processes._ranks:
        rank.process.terminate()
    assert ranked.generate(REQUESTS[:1]) == alone[:1]


def test_an_aborted_request_ends_on_all_ranks_and_the_others_go_on(
    ranked: RankedEngine, alone: list[Completion]
) -> None:
    numbers = [ranked.submit(request) for request in REQUESTS]
    ranked.step()
    ranked.step()
    ranked.abort(numbers[2])
    events = [event for event in ranked.step() if isinstance(event, AbortEvent)]
    assert [event.request for event in events] == [numbers[2]]
    while ranked.has_work:
        ranked.step()
    completions = [ranked.completion(number) for number in numbers]
    assert completions[2].finish_reason == "abort"
    assert completions[2].token_ids == alone[2].token_ids[: len(completions[2].token_ids)]
    assert completions[:2] + completions[3:] == alone[:2] + alone[3:]


@pytest.mark.nightly
def test_ranks_in_a_collective_end_when_the_process_in_front_is_killed() -> None:
    script = (
        "import os, signal\n"
        "from rocm_serve.parallel.ranked_engine import RankedEngine\n"
        "from tests.amd.runner.thread_ranks import LoadSabotaged, pids\n"
        "from tests.amd.runner.test_ranked_engine import BASE, REQUESTS\n"
        "if __name__ == '__main__':\n"
        "    engine = RankedEngine(LoadSabotaged('hangs', 6), BASE, num_ranks=2)\n"
        "    print(engine._processes.store, *pids(engine), flush=True)\n"
        "    engine.submit(REQUESTS[0])\n"
        "    signal.setitimer(signal.ITIMER_REAL, 0.5)\n"
        "    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))\n"
        "    while True:\n"
        "        engine.step()\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert finished.returncode == -signal.SIGKILL, finished.stderr
    store, *ranks = finished.stdout.split()
    assert_all_end(list(map(int, ranks)))
    assert not Path(store).parent.exists()


@pytest.mark.parametrize("where", ["step", pytest.param("capture_all", marks=pytest.mark.nightly)])
def test_a_rank_that_is_killed_ends_all_with_a_sentence(where: str) -> None:
    """In mid-step, or while a graph is made: in either case rank 0 waits for its sum."""
    with RankedEngine(LoadSabotaged("dies", 6), BASE, num_ranks=2) as engine:
        ranks = pids(engine)
        with pytest.raises(RankFailed, match=rf"^rank 1 was killed by SIGKILL in {where}\(\), and all") as why:
            serve(engine, where)
        assert why.value.rank == 1
        assert str(why.value).endswith("and all ranks were ended; its last output was: rank 1 gives up")
        assert_all_end(ranks)
        with pytest.raises(RankFailed, match="the ranks of this engine were ended; make another engine"):
            engine.submit(REQUESTS[0])
        assert not engine.has_work


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        ("step", r"^rank 1 raised {} in step\(\) and other ranks did not, so they are out of step"),
        ("capture_all", r"^rank 1 could not make a graph in capture_all\(\) \({}\), and the others wait for it"),
    ],
)
def test_an_exception_of_one_rank_inside_of_a_collective_ends_all_with_a_sentence(
    where: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(processes, "AGREE_SECONDS", 0.5)
    with RankedEngine(LoadSabotaged("raises", 6), BASE, num_ranks=2) as engine:
        ranks = pids(engine)
        with pytest.raises(RankFailed, match=sentence.format("OutOfMemoryError: rank 1 has no memory left")):
            serve(engine, where)
        assert_all_end(ranks)


@pytest.mark.nightly
def test_a_rank_that_cannot_load_its_part_ends_all_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits for it meanwhile, to agree on kernels."""
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.5)
    what = "rank 1 raised CapacityExceeded: the weights do not fit beside what another process holds while its engine"
    with pytest.raises(RankFailed, match=what) as why:
        RankedEngine(load_not_on_rank_1, BASE, num_ranks=2)
    assert isinstance(why.value.__cause__, CapacityExceeded)


@pytest.mark.parametrize(
    ("given", "why"),
    [(lambda: None, "cannot be sent to another process .*<lambda>.*"), (None, "is None"), (5, "is 5")],
    ids=["lambda", "None", "number"],
)
def test_a_function_that_no_other_process_finds_is_refused(given: Any, why: str) -> None:
    for name, make in (("load", partial(RankedEngine, given, num_ranks=2)), ("make", partial(EngineProcess, given))):
        with pytest.raises(BadSetting, match=f"^{name} {why}; give a function of a module, or a partial of one"):
            make()


def test_ranks_that_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadSetting, match="num_ranks is 0; it must be at least 1"):
        RankedEngine(load_poisoned, BASE, num_ranks=0)
    with pytest.raises(BadSetting, match=r"num_ranks is 2\.0; it must be a whole number"):
        RankedEngine(load_poisoned, BASE, num_ranks=2.0)  # type: ignore[arg-type]
    with pytest.raises(BadSetting, match="options is a dict; it must be of type EngineOptions"):
        RankedEngine(must_not_load, {}, num_ranks=2)  # type: ignore[arg-type]
    monkeypatch.setattr("os.cpu_count", lambda: 12)
    with pytest.raises(BadSetting, match="13 ranks need a process each, and this CPU serves at most 12; use fewer"):
        RankedEngine(must_not_load, num_ranks=13)
    with pytest.raises(BadSetting, match="device_type 'xpu' is not served"):
        RankedEngine(load_poisoned, BASE, num_ranks=2, device_type="xpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(BadSetting, match="4 ranks need a GPU each, and torch sees 2"):
        RankedEngine(load_poisoned, BASE, num_ranks=4, device_type="cuda")
    with pytest.raises(
        BadSetting, match="eagle:seeded and 2 ranks share the model, but a draft model runs on one rank"
    ):
        RankedEngine(must_not_load, replace(BASE, speculative="eagle:seeded"), num_ranks=2)
    has = memory_of(torch.device("cpu"))
    with pytest.raises(NeverFits, match=f"taken by each of 2 ranks, {2 * has} together; .* at most {has // 2}$"):
        RankedEngine(load_poisoned, replace(BASE, host_kv_bytes=has), num_ranks=2)


def test_a_prompt_goes_to_the_ranks_once_and_not_each_time_they_are_asked_for_its_constraint() -> None:
    """They are asked between any two steps, and other requests wait meanwhile."""
    engine, sent = object.__new__(RankedEngine), list[Request]()
    engine.limits = Engine(character_model(), BASE).limits

    def call_all(method: str, request: Request) -> list[bool]:
        sent.append(request)
        return [True, method == "is_prepared"]

    processes: Any = SimpleNamespace(call_all=call_all)
    engine._processes = processes
    assert engine.is_prepared(CONSTRAINED[0])
    assert not engine.can_prepare(CONSTRAINED[0])
    with pytest.raises(BadRequest, match="the request is a NoneType; it must be of type Request"):
        engine.can_prepare(None)  # type: ignore[arg-type]
    assert sent == [replace(CONSTRAINED[0], prompt_token_ids=CONSTRAINED[0].prompt_token_ids[:1])] * 2
    with pytest.raises(BadRequest, match="the prompt has 99 tokens"):
        engine.is_prepared(replace(CONSTRAINED[0], prompt_token_ids=(1,) * 99))


def test_each_rank_has_a_flight_record_of_its_own() -> None:
    options = replace(BASE, flight_record=Path("records/last.json"), evidence=Path("records/wrong.evidence"))
    assert options_of_rank(options, 1).flight_record == Path("records/last.rank1.json")
    assert options_of_rank(options, 1).evidence == Path("records/wrong.rank1.evidence")
    assert options_of_rank(BASE, 1) == BASE


class TwoWords(Exception):
    """Cannot be unpickled: it takes more than its message."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} and {other}")


def test_an_exception_that_cannot_be_sent_is_sent_in_words() -> None:
    sent = sendable(TwoWords("this", "that"))
    assert isinstance(sent, RankError)
    assert str(sent) == "TwoWords: this and that"
    for error in (BadRequest("no"), RankFailed("rank 1 has died", 1)):
        assert sendable(error) is error


@pytest.mark.parametrize("has_answers", [False, True])
def test_an_interrupt_of_a_call_ends_the_ranks_and_an_error_of_all_of_them_does_not(has_answers: bool) -> None:
    ours, killed = processes.RankProcesses(), list[bool]()
    error = BadRequest("of all ranks") if has_answers else KeyboardInterrupt()

    def collect(_: object) -> list[object]:
        ours._is_calling = not has_answers
        raise error

    ours._require_whole = lambda: None  # type: ignore[method-assign]
    ours._collect = collect  # type: ignore[method-assign,assignment]
    ours.kill = lambda: killed.append(True)  # type: ignore[method-assign]
    with pytest.raises(type(error)):
        ours.call("step")
    assert killed == [True] * (not has_answers)
    del ours.kill
    ours.kill()


class Held:
    """A process that the kernel holds: who waits for its end waits for ever."""

    def kill(self) -> None:
        """It stays."""

    def join(self, seconds: float | None = None) -> None:
        assert seconds is not None


def held_ranks() -> tuple[processes.RankProcesses, list[Connection]]:
    """Two ranks without processes, and the ends of their pipes."""
    ours, theirs, held = processes.RankProcesses(), list[Connection](), Held()
    for number in range(2):
        pipe, other = multiprocessing.Pipe()
        process: Any = held
        ours._ranks.append(processes._Rank(number, process, pipe, deque(), process))
        ours._selector.register(pipe, selectors.EVENT_READ, ours._ranks[-1])
        theirs.append(other)
    return ours, theirs


def test_a_refusal_is_raised_however_long_another_rank_compiles_before_it_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No rank is in a collective then, and the ranks have other requests."""
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.0)
    ours, (first, second) = held_ranks()
    refusal = Raised(BadRequest("no text can begin with it"), has_work=True)
    first.send(refusal)
    late = threading.Timer(0.3, second.send, [refusal])
    late.start()
    with pytest.raises(BadRequest, match="no text can begin with it"):
        ours._collect(lambda *_: None)
    late.join()
    assert ours.has_work
    ours.kill()


def test_ranks_that_are_ended_during_a_call_end_it_with_a_sentence_though_the_kernel_holds_their_processes() -> None:
    """close() in another thread ends them so."""
    ours, (first, _) = held_ranks()
    first.send(Progressed(()))
    with pytest.raises(RankFailed, match="the ranks of this engine were ended; make another engine"):
        ours._collect(ours.kill)


def test_who_waits_for_the_ranks_has_the_next_turn() -> None:
    """A thread that steps does not keep another one from a report, however quickly it calls again."""
    ours, order = processes.RankProcesses(), list[str]()
    has_begun, may_end = threading.Event(), threading.Semaphore(0)

    def collect(_: object) -> list[object]:
        order.append(threading.current_thread().name)
        ours._is_calling = False
        has_begun.set()
        may_end.acquire()
        return ["what rank 0 returns"]

    ours._require_whole = lambda: None  # type: ignore[method-assign]
    ours._collect = collect  # type: ignore[method-assign,assignment]
    steps = threading.Thread(target=lambda: [ours.call("step") for _ in range(3)], name="steps")
    report = threading.Thread(target=ours.call, args=("report",), name="report")
    steps.start()
    has_begun.wait()
    report.start()
    while not ours._next_turn.locked():
        pass
    may_end.release(4)
    steps.join()
    report.join()
    ours.kill()
    assert order == ["steps", "report", "steps", "steps"]
