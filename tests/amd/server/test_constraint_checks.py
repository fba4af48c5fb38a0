"""Requests do not wait for others' constraints that take for ever, or are many."""

from __future__ import annotations

import asyncio
import io
import json
import os
import resource
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import pytest

from rocm_attn.errors import BadRequest
from rocm_attn.runner import constraint_trial
from rocm_attn.runner.constraint import Constraint
from rocm_attn.runner.constraint_trial import Tokens, Trial
from rocm_attn.runner.engine import Engine
from rocm_attn.server import constraint_checks
from tests.amd.runner.asking import PROMPT, character_model
from tests.amd.server.raw import Reply, asked, post, send
from tests.amd.server.running import Running, running
from tests.amd.server.test_requested import OPTIONS

# Whether all patterns can hold at once takes the library longer than anybody waits, and no limit of its ends it.
ENDLESS = {"allOf": [{"type": "string", "pattern": f"[ab]*a[ab]{{{number}}}"} for number in range(10, 40)]}

TOKENS = Tokens("{}", 8)  # of no use, and not looked at before something is tried


@pytest.fixture
def server() -> Iterator[Running]:
    loaded = character_model()
    with running(Engine(loaded, OPTIONS), tokenizer=loaded.tokenizer, constraint_seconds=1) as served:
        yield served


def ask(server: Running, schema: dict[str, Any]) -> Reply:
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    return post(server, asked(prompt=list(PROMPT), response_format=form))


def test_endless_constraints_end_and_others_are_served_after_them(server: Running) -> None:
    """As many as are compiled at a time: were they not ended, nothing would be left for the last one."""
    with ThreadPoolExecutor(2) as pool:
        for reply in pool.map(ask, [server] * 2, [ENDLESS] * 2):
            assert reply.status == 400
            assert "it takes more than 1 seconds of a core to be compiled; simplify it" in reply.error["message"]
    assert ask(server, {"enum": ["x", "yes"]}).status == 200
    assert server.holds_nothing()


def test_a_constraint_that_finds_too_many_waiting_may_come_again(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end, check = threading.Semaphore(0), threading.Event(), Trial.check

    def held_up(trial: Trial, constraint: Constraint) -> None:
        begun.release()
        may_end.wait()
        check(trial, constraint)

    monkeypatch.setattr(Trial, "check", held_up)
    monkeypatch.setattr(constraint_checks, "MOST_WAITING", 1)
    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(ask, server, {"enum": [f"a{number}"]}) for number in range(3)]
        for _ in range(2):
            begun.acquire()
        while not server.between_loops(lambda: server.generations._checks._num_waiting):
            pass
        refused = ask(server, {"enum": ["b"]})
        assert (refused.status, refused.error["code"]) == (429, "too_many_requests")
        assert int(refused.headers["retry-after"]) >= 1
        assert b'rocm_attn_http_refused_total{reason="constraints"} 1\n' in send(server, "GET", "/metrics").body
        may_end.set()
        assert [each.result().status for each in asking] == [200] * 3
    assert ask(server, {"enum": ["b"]}).status == 200


def test_those_that_wait_with_a_constraint_that_another_one_has_tried_do_not_try_it_again(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, tried, check = threading.Event(), list[Constraint](), Trial.check

    def held_up(trial: Trial, constraint: Constraint) -> None:
        tried.append(constraint)
        may_end.wait()
        check(trial, constraint)

    monkeypatch.setattr(Trial, "check", held_up)
    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask, server, {"enum": ["c"]}) for _ in range(4)]
        while server.between_loops(lambda: server.generations._checks._num_waiting) < 2:
            pass
        may_end.set()
        assert [each.result().status for each in asking] == [200] * 4
    assert len(tried) == 2


def test_a_constraint_that_is_known_to_be_fine_is_not_tried_again(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask(server, {"enum": ["x"]}).status == 200
    monkeypatch.setattr(Trial, "check", None)
    assert ask(server, {"enum": ["x"]}).status == 200


def test_a_server_that_ends_waits_for_no_process_that_begins() -> None:
    began: list[Trial] = []

    def begin() -> Trial:
        assert checks._lock.acquire(blocking=False), "close() would wait"
        checks._lock.release()
        checks.close()
        began.append(Trial(TOKENS, 1))
        return began[0]

    checks = constraint_checks.ConstraintChecks(begin)
    with pytest.raises(BadRequest, match="the server ends, and tries no constraint any more"):
        asyncio.run(checks.check(Constraint.choice(["a"])))
    assert began[0].has_ended


def test_a_server_that_ends_says_so_to_who_waits_for_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(TOKENS, 1)
    checks = constraint_checks.ConstraintChecks(lambda: trial)
    send = Trial._send

    def sends_and_ends(sender: Trial, line: dict[str, Any]) -> None:
        send(sender, line)
        checks.close()

    monkeypatch.setattr(Trial, "_send", sends_and_ends)
    with pytest.raises(BadRequest, match="the process that tried it was ended, as when the server ends; send it again"):
        asyncio.run(checks.check(Constraint.choice(["a"])))


@pytest.mark.parametrize(
    ("signal_of_end", "says"),
    [
        (signal.SIGXCPU, "it takes more than 7 seconds of a core to be compiled; simplify it"),
        (signal.SIGABRT, r"the library gave up \(SIGABRT\), as it does where 1 GiB are not enough; simplify it"),
        (signal.SIGKILL, "the process that tried it was ended by SIGKILL; simplify it, or send it again"),
    ],
)
def test_what_has_ended_a_process_is_told(signal_of_end: signal.Signals, says: str) -> None:
    trial = Trial(TOKENS, 7)
    try:
        os.kill(trial._process.pid, signal_of_end)
        with pytest.raises(BadRequest, match=f"^the constraint cannot be used: {says}$"):
            trial.check(Constraint.choice(["a"]))
        assert trial.has_ended
    finally:
        trial.close()


class Panic(BaseException):
    """As the library's, which is no Exception."""


@pytest.mark.parametrize(
    ("raised", "says"),
    [
        (Panic("index out of bounds"), r"the library fails of it (Panic: index out of bounds)"),
        (MemoryError(), "it takes more than 1 GiB to be compiled; simplify it"),
    ],
)
def test_a_panic_is_told_and_the_process_goes_on(
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
    monkeypatch.setattr(constraint_trial, "_lower", lambda which, soft: None)  # of this process
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: None)
    constraint_trial.run()
    assert list(map(json.loads, capsys.readouterr().out.splitlines())) == [f"the constraint cannot be used: {says}", ""]


def test_an_interrupt_of_the_terminal_does_not_reach_the_process() -> None:
    trial = Trial(TOKENS, 1)
    try:
        assert os.getsid(trial._process.pid) == trial._process.pid != os.getsid(0)
    finally:
        trial.end()
        trial.close()
