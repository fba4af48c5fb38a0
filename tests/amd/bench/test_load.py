"""Traces sent to a server: every request is accounted for, the failed ones too."""

import asyncio
import json
import math
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rocm_attn.cli import BAD_INPUT, DONE, FAILED, INTERRUPTED, main
from rocm_attn.errors import BadSetting
from rocm_lab.bench.energy import EnergyMeter
from rocm_lab.bench.load import LoadOptions, Quantiles, RequestRecord, Sending, ServingResult, send_all
from rocm_lab.bench.openai_load import OpenAITarget, _Answer, run_load
from rocm_lab.bench.request_trace import RequestTrace, TracedRequest
from rocm_lab.cli import bench_serve
from tests.amd.bench.openai_stand_in import StandIn
from tests.amd.forked import run_python

NO_METER = EnergyMeter(lambda: math.nan, "", "none here")
TRACE = RequestTrace(tuple(TracedRequest(0.0, 4 + number, 3) for number in range(6)))


def put(server: StandIn, options: LoadOptions, key: str = "") -> ServingResult:
    async def serve() -> ServingResult:
        async with server.running():
            return await run_load(server.url, "", key, TRACE, options, NO_METER)

    return asyncio.run(serve())


def test_every_request_is_sent_as_the_trace_has_it_and_counted() -> None:
    server = StandIn()
    result = put(server, LoadOptions(vocabulary=50), key="secret")
    assert (result.requests, result.num_failed) == (6, 0)
    assert (result.prompt_tokens, result.output_tokens, result.requested_tokens) == (39, 18, 18)
    assert sorted(len(body["prompt"]) for body in server.bodies) == [4, 5, 6, 7, 8, 9]
    assert {(body["model"], body["max_tokens"], body["ignore_eos"]) for body in server.bodies} == {
        ("stand-in", 3, True)
    }
    assert all(3 <= token < 50 for body in server.bodies for token in body["prompt"])
    assert set(server.keys) == {"bearer secret"}
    assert result.first_token.count == result.whole.count == 6
    assert result.token_mean.count == 6
    assert 0 < result.first_token.percentiles[0] <= result.whole.percentiles[2]


def test_several_processes_send_each_request_once_and_their_times_are_of_one_clock() -> None:
    server = StandIn()
    result = put(server, LoadOptions(processes=2, concurrency=2))
    assert (result.requests, result.num_failed, result.output_tokens) == (6, 0, 18)
    assert sorted(len(body["prompt"]) for body in server.bodies) == [4, 5, 6, 7, 8, 9]
    assert server.most_at_once <= 2
    assert 0 < result.first_token.percentiles[0] <= result.whole.percentiles[2] <= result.seconds


def test_a_process_that_sends_requests_imports_no_torch() -> None:
    assert run_python("-c", "import sys, rocm_lab.bench.openai_load; print('torch' in sys.modules)") == "False"


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_an_answer_is_read_however_its_bytes_are_cut(size: int) -> None:
    """In chunks of HTTP that hold parts of a line, and in reads that hold parts of a chunk."""
    events = [{"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}]}, {"usage": {"completion_tokens": 2}}]
    lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    cut = [lines[at : at + 11].encode() for at in range(0, len(lines), 11)]
    chunks = b"".join(b"%x;more=1\r\n%s\r\n" % (len(each), each) for each in cut) + b"0\r\n\r\n"
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks

    async def read() -> RequestRecord:
        outcome = RequestRecord(0.0)
        reading = _Answer(b"", outcome)
        for at in range(0, len(answer), size):
            reading.data_received(answer[at : at + size])
        assert reading.ended.done()
        reading.connection_lost(None)
        return outcome

    outcome = asyncio.run(read())
    assert (len(outcome.pieces), outcome.tokens, outcome.failure) == (2, 2, "")


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"SSH-2.0-OpenSSH_9\r\n\r\n", "not an answer of HTTP: SSH-2.0-OpenSSH_9"),
        (b"HTTP/1.1 OK\r\n\r\n", "not an answer of HTTP: HTTP/1.1 OK"),
        (CHUNKED + b"zz\r\ndata", "not an answer of HTTP: HTTP/1.1 200 OK"),
        (CHUNKED + b"-5\r\ndata", "not an answer of HTTP: HTTP/1.1 200 OK"),  # it would be cut for ever
        (b"HTTP/1.1 200 OK\r\n\r\ndata: " + b"[" * 100_000 + b"\n", "not an event of OpenAI's API: [["),
    ],
)
def test_an_answer_of_something_else_ends_its_request(answer: bytes, said: str) -> None:
    async def read() -> RequestRecord:
        outcome = RequestRecord(0.0)
        reading = _Answer(b"", outcome)
        reading.data_received(answer)
        assert reading.ended.done()
        reading.data_received(b"more")  # what came before the connection was closed
        reading.connection_lost(None)
        return outcome

    assert asyncio.run(read()).failure.startswith(said)


def test_all_requests_are_made_before_the_first_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    async def send(outcome: RequestRecord) -> None:
        events.append("sent")

    def prepared(target: OpenAITarget, prompt: Sequence[int], output_tokens: int) -> Sending:
        events.append("made")
        return send

    monkeypatch.setattr(OpenAITarget, "prepared", prepared)
    joules = iter([5.0, 23.0])
    meter = EnergyMeter(lambda: next(joules), "test")
    result = asyncio.run(run_load("http://here", "a model", "", TRACE, LoadOptions(), meter))
    assert events == ["made"] * 6 + ["sent"] * 6
    assert result.joules == 18.0


def test_no_more_requests_are_out_than_allowed() -> None:
    server = StandIn()
    assert put(server, LoadOptions(concurrency=2)).num_failed == 0
    assert 1 <= server.most_at_once <= 2


def test_failures_are_counted_by_reason_and_have_no_times() -> None:
    server = StandIn(refuse={0: 429, 1: 429}, breaks={2})
    result = put(server, LoadOptions(concurrency=1))
    assert result.failures == {'HTTP 429: {"error": {"message": "too many"}}': 2, "the stream ended early": 1}
    assert result.first_token.count == 3
    assert "FAILED: 2 requests: HTTP 429" in "\n".join(result.lines())
    assert result.lines()[0].startswith("3 of 6 requests")


@pytest.mark.parametrize(
    "garbled", ["{", "[1]", "7", '{"choices": 1}', '{"usage": {"tokens": 1}}', '{"usage": {"completion_tokens": "3"}}']
)
def test_what_is_no_event_fails_its_request_alone(garbled: str) -> None:
    result = put(StandIn(garbles={1: garbled}), LoadOptions(concurrency=1))
    assert result.failures == {f"not an event of OpenAI's API: {garbled}": 1}
    assert (result.first_token.count, result.output_tokens) == (5, 15)


def test_a_server_that_never_answers_does_not_hold_the_load_for_ever() -> None:
    result = put(StandIn(stalls={0}), LoadOptions(concurrency=1, max_seconds=0.2))
    assert result.requests == 6
    assert result.num_failed == 6
    assert set(result.failures) <= {"not done within 0.2 s", "not sent within 0.2 s", "ReadTimeout"}


def test_no_server_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(TRACE.text())
    with pytest.raises(BadSetting, match="lists no model"):
        asyncio.run(run_load("http://127.0.0.1:1", "", "", TRACE, LoadOptions(), NO_METER))
    for url in ("127.0.0.1:1", "http://", "http://[::1", "http://127.0.0.1:99999"):
        assert main(["bench", "serve", "--url", url, "--trace", str(trace)]) == BAD_INPUT
        assert "in the form http://127.0.0.1:8000" in capsys.readouterr().err
    no_name = asyncio.run(run_load("http://a..b", "a model", "", TRACE, LoadOptions(), NO_METER))
    assert (no_name.requests, no_name.num_failed) == (6, 6)


@pytest.mark.parametrize("key", ["secret\r\nX-More: 1", "sécret", "a\x00b"])
def test_a_key_that_no_header_may_hold_is_refused_and_not_printed(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was a header of its own, and where urllib refused it, the key was in the sentence."""
    (tmp_path / "trace.jsonl").write_text(TRACE.text())
    monkeypatch.setattr(os, "environ", {**os.environ, "OPENAI_API_KEY": key})
    arguments = ["--url", "http://127.0.0.1:1", "--trace", str(tmp_path / "trace.jsonl")]
    assert main(["bench", "serve", *arguments]) == BAD_INPUT
    sentence = "OPENAI_API_KEY holds a character that no header may have; give the key alone, or unset it"
    assert capsys.readouterr().err == f"rocm-attn: {sentence}\n"


def test_the_end_of_a_line_after_a_key_is_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended the head, and the server read a body without its last bytes."""
    trace, server = tmp_path / "trace.jsonl", StandIn()
    trace.write_text(TRACE.text())
    monkeypatch.setenv("OPENAI_API_KEY", "secret\n")
    with in_a_thread(server) as url:
        assert main(["bench", "serve", "--url", url, "--model", "any", "--trace", str(trace)]) == DONE
    assert set(server.keys) == {"bearer secret"}


def test_a_server_of_something_else_is_bad_input() -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9\r\n\r\n")
        writer.close()

    async def ask() -> None:
        server = await asyncio.start_server(greet, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            await run_load(f"http://127.0.0.1:{port}", "", "", TRACE, LoadOptions(), NO_METER)
        finally:
            server.close()

    with pytest.raises(BadSetting, match="lists no model"):
        asyncio.run(ask())


@contextmanager
def in_a_thread(server: StandIn) -> Iterator[str]:
    """Yields the URL of a server that runs in another thread."""
    started, loop = threading.Event(), asyncio.new_event_loop()
    ending = asyncio.Event()

    async def serve() -> None:
        async with server.running():
            started.set()
            await ending.wait()
        stalled = [task for task in asyncio.all_tasks() if task is not asyncio.current_task() and task.cancel()]
        await asyncio.gather(*stalled, return_exceptions=True)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    started.wait()
    try:
        yield server.url
    finally:
        loop.call_soon_threadsafe(ending.set)
        thread.join()
        loop.close()


def test_the_command_writes_what_came_of_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, out = tmp_path / "trace.jsonl", tmp_path / "out.json"
    trace.write_text(TRACE.text())
    with in_a_thread(StandIn(refuse={5: 503})) as url:
        arguments = ["--trace", str(trace), "--concurrency", "1", "--at-once", "--out", str(out)]
        assert main(["bench", "serve", "--url", f"{url}/v1", *arguments, "--requests", "5"]) == DONE
        assert "5 of 5 requests" in capsys.readouterr().out
        found = json.loads(out.read_text())
        assert (found["kind"], found["rows"][0]["output_tokens"]) == ("serving", 15)
        assert {"p50_ms", "p90_ms", "p99_ms", "mean_ms", "count"} == found["rows"][0]["first_token"].keys()
        assert main(["bench", "serve", "--url", url, *arguments, "--requests", "1"]) == FAILED
        assert "1 of 1 requests failed; first reason: HTTP 503" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ending", "code"), [(KeyboardInterrupt(), INTERRUPTED), (BadSetting("no such server"), BAD_INPUT)], ids=repr
)
def test_servers_that_were_measured_before_one_could_not_be_are_kept(
    ending: BaseException, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, out = tmp_path / "trace.jsonl", tmp_path / "out.json"
    trace.write_text(TRACE.text())

    async def load(url: str, *given: Any) -> ServingResult:
        if url.endswith("2"):
            raise ending
        return await run_load(url, *given)

    monkeypatch.setattr(bench_serve, "run_load", load)
    with in_a_thread(StandIn(refuse={5: 503})) as url:
        servers = ["--url", f"one={url}", "--url", "two=http://127.0.0.1:2"]
        assert main(["bench", "serve", *servers, "--trace", str(trace), "--out", str(out)]) == code
    assert [row["target"] for row in json.loads(out.read_text())["rows"]] == ["one"]


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_what_came_before_an_interrupt_is_written(
    by: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An hour of one server's answers was lost."""
    trace, out, server = tmp_path / "trace.jsonl", tmp_path / "out.json", StandIn(stalls={4})
    trace.write_text(TRACE.text())
    meter = EnergyMeter(lambda: float(len(server.bodies)), "", "counts")
    monkeypatch.setattr(bench_serve, "meter_of", lambda device: meter)

    def interrupt() -> None:
        while not server.at_once or len(server.bodies) < 5:
            time.sleep(0.01)
        os.kill(os.getpid(), by)

    with in_a_thread(server) as url:
        press = threading.Thread(target=interrupt)
        press.start()
        servers = ["--url", f"one={url}", "--url", "never=http://127.0.0.1:1"]
        arguments = [*servers, "--concurrency", "1", "--trace", str(trace), "--out", str(out)]
        assert main(["bench", "serve", *arguments]) == INTERRUPTED
        press.join()
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["target"], row["whole"]["count"], row["output_tokens"]) == ("one", 4, 12)
    assert row["failures"] == {"not done before the interrupt": 1, "not sent before the interrupt": 1}
    assert 0 < row["seconds"] < 60
    assert "4 of 6 requests" in capsys.readouterr().out


def test_a_request_that_was_given_up_does_not_say_how_its_connection_ended() -> None:
    async def sending(outcome: RequestRecord) -> None:
        def lose() -> None:
            outcome.failure = outcome.failure or "the stream ended early"

        try:
            await asyncio.Event().wait()
        finally:
            asyncio.get_running_loop().call_soon(lose)

    options = LoadOptions(max_seconds=0.01)
    (outcome,) = asyncio.run(send_all(TRACE.requests[:1], [sending], options, time.perf_counter()))
    assert outcome.failure == "not done within 0.01 s"


def test_a_load_whose_requests_come_too_late_takes_no_time_below_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that were not sent had ended at 0 on the clock, before the load began."""
    later = RequestTrace(tuple(replace(request, arrival_s=1000.0) for request in TRACE.requests))
    monkeypatch.setitem(globals(), "TRACE", later)
    result = put(StandIn(), LoadOptions(max_seconds=0.01))
    assert result.failures == {"not sent within 0.01 s": 6}
    assert 0 < result.seconds < 60


@pytest.mark.parametrize(
    ("picture", "code", "sentence"),
    [("a.png", FAILED, "matplotlib is not installed"), ("a.svg", BAD_INPUT, "pictures are PNG, so name a file that")],
)
def test_a_picture_that_cannot_be_drawn_is_refused_before_the_load(
    picture: str,
    code: int,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "trace.jsonl").write_text(TRACE.text())
    monkeypatch.setitem(sys.modules, "matplotlib", None if code == FAILED else types.ModuleType("matplotlib"))
    files = ["--trace", str(tmp_path / "trace.jsonl"), "--picture", str(tmp_path / picture)]
    assert main(["bench", "serve", "--url", "http://127.0.0.1:1", *files]) == code
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("places", "sentence"),
    [
        (
            ["--out", "a.png", "--picture", "folder/../a.png"],
            "--picture would overwrite the file of --out, folder/../a",
        ),
        (["--out", "trace.jsonl"], "--out would overwrite the file of --trace, trace.jsonl; name another file"),
    ],
)
def test_a_file_that_would_overwrite_another_of_the_command_is_refused(
    places: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The picture took the place of the samples, and the results that of the trace."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "trace.jsonl").write_text(TRACE.text())
    monkeypatch.setitem(sys.modules, "matplotlib", types.ModuleType("matplotlib"))
    assert main(["bench", "serve", "--url", "http://127.0.0.1:1", "--trace", "trace.jsonl", *places]) == BAD_INPUT
    assert sentence in capsys.readouterr().err


def test_several_servers_get_the_same_load_one_after_the_other_and_are_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, out, picture = tmp_path / "trace.jsonl", tmp_path / "out.json", tmp_path / "servers.png"
    trace.write_text(TRACE.text())
    one, other = StandIn(), StandIn()
    with in_a_thread(one) as first, in_a_thread(other) as second:
        servers = ["--url", f"ours={first}", "--url", f"{second}/v1"]
        files = ["--trace", str(trace), "--out", str(out), "--picture", str(picture)]
        assert main(["bench", "serve", *servers, *files]) == DONE
        assert capsys.readouterr().out.count("6 of 6 requests") == 2
        assert main(["bench", "serve", "--url", f"a={first}", "--url", f"a={second}", *files]) == BAD_INPUT
        assert "two --url have one name" in capsys.readouterr().err
        for flag in ("--out", "--picture"):
            assert main(["bench", "serve", *servers, *files, flag, str(tmp_path)]) == BAD_INPUT
            assert f"{flag} {tmp_path} cannot be written: something that is no file" in capsys.readouterr().err
        assert (len(one.bodies), len(other.bodies)) == (6, 6)
        rows = json.loads(out.read_text())["rows"]
        assert [row["target"] for row in rows] == ["ours", second]
    assert [body["prompt"] for body in one.bodies] == [body["prompt"] for body in other.bodies]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["bench", "plot", str(out), "--folder", str(tmp_path)]) == DONE
    assert (tmp_path / "bench_serving.png").read_bytes() == picture.read_bytes()


def test_quantiles_are_interpolated_and_of_nothing_are_nan() -> None:
    assert list(Quantiles.of([3.0, 1.0, 2.0]).percentiles) == pytest.approx([2.0, 2.8, 2.98])
    assert all(map(math.isnan, Quantiles.of([]).percentiles))


def test_a_vocabulary_of_special_ids_is_refused() -> None:
    with pytest.raises(BadSetting, match="a vocabulary of 3 ids"):
        LoadOptions(vocabulary=3)
