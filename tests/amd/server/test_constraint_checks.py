"""Requests do not wait for others' constraints that take for ever, or are many."""

import asyncio
import io
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import pytest

from rocm_attn.errors import BadRequest, FitsLater
from rocm_serve.engine import Engine
from rocm_serve.server import constraint_checks
from rocm_serve.text import constraint_trial
from rocm_serve.text.constraint import Constraint
from rocm_serve.text.constraint_trial import TrialProcess, TrialTokens
from tests.amd.runner.with_parameters import PROMPT
from tests.amd.server.raw import Client, Reply, post, requested, send
from tests.amd.server.running import Running, letter_model, running
from tests.amd.server.test_requested import OPTIONS

# The library needs longer than clients wait to decide if all patterns can hold at once; none of its limits ends it.
ENDLESS = {"allOf": [{"type": "string", "pattern": f"[ab]*a[ab]{{{number}}}"} for number in range(10, 40)]}

TOKENS = TrialTokens("{}", 8)  # not used, and not read before something is tried


@pytest.fixture
def server() -> Iterator[Running]:
    loaded = letter_model()
    with running(Engine(loaded, OPTIONS), tokenizer=loaded.tokenizer, constraint_seconds=1) as served:
        yield served


def ask(server: Running, schema: dict[str, Any], name: str = "response_format") -> Reply:
    """name: of the field that has the schema"""
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    fields = {"response_format": form, "structured_outputs": {"json": schema}, "guided_json": schema}
    return post(server, requested(prompt=list(PROMPT), **{name: fields[name]}))


def test_endless_constraints_end_and_others_are_served_after_them(server: Running) -> None:
    """There are as many as are compiled at a time: if they did not end, no place would be left for the last one."""
    with ThreadPoolExecutor(2) as pool:
        for reply in pool.map(ask, [server] * 2, [ENDLESS] * 2, ["structured_outputs", "guided_json"]):
            assert reply.status == 400
            assert "it takes more than 1 CPU seconds" in reply.error["message"]
    assert ask(server, {"enum": ["x", "yes"]}).status == 200
    assert server.holds_nothing()


def test_deadlines_and_clients_that_leave_end_requests_whose_constraints_are_tried(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end, tried = threading.Semaphore(0), threading.Event(), list[str]()

    def held_up(trial: TrialProcess, constraint: Constraint) -> None:
        tried.append(constraint.text)
        begun.release()
        may_end.wait()

    def body(number: int, **fields: Any) -> dict[str, Any]:
        return requested(prompt=list(PROMPT), guided_json={"enum": [f"a{number}"]}, **fields)

    monkeypatch.setattr(TrialProcess, "check", held_up)
    try:
        for number in range(2):  # both places of trials
            with Client(server, body(number)):
                begun.acquire()
            server.jobs_are_done()
        assert post(server, body(2, timeout=0.01)).status == 504  # it waits for a place
        assert post(server, body(1, timeout=0.01, stream=True)).status == 504  # it waits for the trial of another one
    finally:
        may_end.set()
    assert post(server, body(3)).status == 200
    assert [text[-5:-2] for text in tried] == ['a0"', 'a1"', 'a3"']
    assert server.holds_nothing()


def test_a_constraint_that_finds_too_many_waiting_may_come_again(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end, check = threading.Semaphore(0), threading.Event(), TrialProcess.check

    def held_up(trial: TrialProcess, constraint: Constraint) -> None:
        begun.release()
        may_end.wait()
        check(trial, constraint)

    monkeypatch.setattr(TrialProcess, "check", held_up)
    monkeypatch.setattr(constraint_checks, "MOST_WAITING", 1)
    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(ask, server, {"enum": [f"a{number}"]}) for number in range(3)]
        for _ in range(2):
            begun.acquire()
        server.wait_until(lambda: server.generations._checks._num_waiting)
        refused = ask(server, {"enum": ["b"]})
        assert (refused.status, refused.error["code"]) == (429, "too_many_requests")
        assert int(refused.headers["retry-after"]) >= 1
        assert b'rocm_attn_http_refused_total{reason="constraints"} 1\n' in send(server, "GET", "/metrics").body
        may_end.set()
        assert [each.result().status for each in asking] == [200] * 3
    assert ask(server, {"enum": ["b"]}).status == 200


async def test_a_constraint_that_others_ask_for_is_tried_once_and_finds_room_however_many_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    good, bad, waiting, new = (Constraint.choice([text]) for text in ("good", "bad", "waiting", "new"))
    may_end, tried = threading.Event(), list[Constraint]()

    def held_up(trial: TrialProcess, constraint: Constraint) -> None:
        tried.append(constraint)
        may_end.wait()
        if constraint == bad:
            raise BadRequest("it is bad")

    monkeypatch.setattr(TrialProcess, "check", held_up)
    monkeypatch.setattr(constraint_checks, "MOST_WAITING", 1)
    checks = constraint_checks.ConstraintChecks(lambda: TrialProcess(TOKENS, 1))
    try:
        requested_for = (good, bad, waiting, new, good, bad, waiting, good, waiting)
        asking = [asyncio.ensure_future(checks.check(each)) for each in requested_for]
        await asyncio.sleep(0)  # each has come as far as it can
        asking[requested_for.index(waiting)].cancel()  # the others take its place
        asking.append(asyncio.ensure_future(checks.check(good)))
        await asyncio.sleep(0)
        may_end.set()
        found = await asyncio.gather(*asking, return_exceptions=True)
    finally:
        checks.close()
    assert [type(each) for each in found if each is not None] == [
        BadRequest,
        asyncio.CancelledError,
        FitsLater,
        BadRequest,
    ]
    assert [found[index] for index in (0, 4, 6, 7, 8, 9)] == [None] * 6
    assert sorted(each.text for each in tried) == sorted(each.text for each in (good, bad, waiting))


def test_a_constraint_that_is_known_to_be_fine_is_not_tried_again(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask(server, {"enum": ["x"]}).status == 200
    monkeypatch.setattr(TrialProcess, "check", None)
    assert ask(server, {"enum": ["x"]}).status == 200


def test_a_process_that_was_ended_while_idle_refuses_no_constraint(server: Running) -> None:
    assert ask(server, {"enum": ["x"]}).status == 200
    (trial,) = server.server._checks._idle
    trial._process.kill()
    trial._process.wait()
    assert ask(server, {"enum": ["yes"]}).status == 200


async def test_a_server_that_ends_waits_for_no_process_that_begins() -> None:
    began: list[TrialProcess] = []

    def begin() -> TrialProcess:
        assert checks._lock.acquire(blocking=False), "close() would wait"
        checks._lock.release()
        checks.close()
        began.append(TrialProcess(TOKENS, 1))
        return began[0]

    checks = constraint_checks.ConstraintChecks(begin)
    with pytest.raises(BadRequest, match="the server is shutting down, and checks no more constraints"):
        await checks.check(Constraint.choice(["a"]))
    assert began[0].has_ended


async def test_a_server_that_ends_says_so_to_who_waits_for_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = TrialProcess(TOKENS, 1)
    checks = constraint_checks.ConstraintChecks(lambda: trial)
    send = TrialProcess._send

    def ends_and_sends(sender: TrialProcess, line: dict[str, Any]) -> None:
        checks.close()
        send(sender, line)  # into a broken pipe

    monkeypatch.setattr(TrialProcess, "_send", ends_and_sends)
    with pytest.raises(
        BadRequest, match="the process that checked it was ended, which happens when the server ends; send it again"
    ):
        await checks.check(Constraint.choice(["a"]))


@pytest.mark.parametrize(
    ("signal_of_end", "says"),
    [
        (signal.SIGXCPU, "it takes more than 7 CPU seconds"),
        (signal.SIGABRT, r"the library gave up \(SIGABRT\)"),
        (signal.SIGKILL, "the process that checked it was ended by SIGKILL; simplify it, or send it again"),
    ],
)
def test_what_has_ended_a_process_is_reported(signal_of_end: signal.Signals, says: str) -> None:
    trial = TrialProcess(TOKENS, 7)
    try:
        os.kill(trial._process.pid, signal_of_end)
        with pytest.raises(BadRequest, match=f"^the constraint cannot be used: {says}"):
            trial.check(Constraint.choice(["a"]))
        assert trial.has_ended
    finally:
        trial.close()


def test_a_process_that_only_stops_answering_is_not_waited_for() -> None:
    trial = TrialProcess(TOKENS, 1)
    trial.end()
    trial.close()
    deaf = [sys.executable, "-S", "-c", "import os, signal; os.close(1); signal.pause()"]
    trial._process = subprocess.Popen(deaf, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    trial._is_given_up = False
    try:
        with pytest.raises(BadRequest, match="was ended by SIGKILL"):
            trial.check(Constraint.choice(["a"]))
    finally:
        trial.end()
        trial.close()


class Panic(BaseException):
    """Like the library's exception, which is no Exception."""


@pytest.mark.parametrize(
    ("raised", "says"),
    [
        (Panic("index out of bounds"), r"the library fails (Panic: index out of bounds)"),
        (MemoryError(), "it takes more than 1 GiB to compile; simplify it"),
    ],
)
def test_a_panic_is_reported_and_the_process_goes_on(
    raised: BaseException, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked_of = [Constraint.choice(["a"]), Constraint.choice(["b"])]

    def compile_or_panic(constraint: Constraint, tokens: Any) -> None:
        if constraint == asked_of[0]:
            raise raised

    lines = [asdict(TOKENS), *({**asdict(each), "seconds": 60} for each in asked_of)]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(map(json.dumps, lines))))
    monkeypatch.setattr(constraint_trial, "tokens_of", lambda *given: None)
    monkeypatch.setattr(constraint_trial, "compiled_of", compile_or_panic)
    monkeypatch.setattr(constraint_trial, "_lower", lambda which, soft: None)  # in this process
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: None)
    constraint_trial.run()
    assert list(map(json.loads, capsys.readouterr().out.splitlines())) == [f"the constraint cannot be used: {says}", ""]


def test_an_interrupt_of_the_terminal_does_not_reach_the_process() -> None:
    trial = TrialProcess(TOKENS, 1)
    try:
        assert os.getsid(trial._process.pid) == trial._process.pid != os.getsid(0)
    finally:
        trial.end()
        trial.close()
