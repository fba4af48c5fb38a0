"""`rocm-attn serve` as a process: its start, which never imports torch, signals, ports, ranks."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
from pathlib import Path
from typing import Any

import pytest

from rocm_attn.cli import BAD_INPUT, DONE, FAILED, main
from rocm_attn.errors import BadSetting
from rocm_attn.machine.settings import API_KEYS
from rocm_serve.cli.engine_start import EngineStart
from rocm_serve.cli.ready_engine import _make_ready, loaded_engine
from rocm_serve.engine import Engine
from rocm_serve.engine_thread import EngineThread
from rocm_serve.options import EngineOptions
from rocm_serve.parallel.child_process import SWITCH_SECONDS
from rocm_serve.request import Request
from rocm_serve.server.address import bind
from rocm_serve.server.keys import ApiKeys
from rocm_serve.server.options import ServerOptions
from rocm_serve.server.run import serve
from rocm_serve.server.served_model import ServedModel
from rocm_serve.text.constraint import Constraint, library
from tests.amd.forked import context
from tests.amd.house.source_tree import ROOT
from tests.amd.runner.tiny_model import tiny_model, word_tokenizer
from tests.amd.runner.with_parameters import PROMPT, character_model
from tests.amd.server.load.model_folder import write_model
from tests.amd.server.load.served import Served, family, served

LONG = {"model": "tiny", "prompt": "w9 w12", "max_tokens": 100, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def ask(server: Served, **fields: Any) -> http.client.HTTPResponse:
    """Sends a request; returns its answer after the first byte has come."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    body = json.dumps({**LONG, **fields})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json", "Connection": "close"})
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    return answer


def text(server: Served) -> str:
    """Returns the completion of the prompt."""
    with ask(server) as answer:
        found: str = json.loads(answer.read())["choices"][0]["text"]
        return found


@pytest.mark.nightly
def test_ranks_serve_what_one_rank_serves(model: Path) -> None:
    with served(model) as alone, served(model, "--tp", "2") as ranks:
        assert text(ranks) == text(alone)
        counts = ranks.counts()
        assert counts["new_tokens_total"] == 100
        counts.assert_empty()
        ranks.send(signal.SIGTERM)
        assert ranks.end() == 0


def test_the_signal_that_writes_flight_records_is_passed_on_to_the_ranks(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rocm_serve.cli.ready_engine.RankedEngine", lambda *given, **named: contextlib.nullcontext())
    options, before = EngineOptions(flight_record=tmp_path / "last.json"), signal.getsignal(signal.SIGUSR1)
    rank = context().Process(target=signal.pause)
    rank.start()
    try:
        with loaded_engine(EngineStart("tiny", str(model), options, "cpu", None, 2)):
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    rank.join()
    assert rank.exitcode == -signal.SIGUSR1


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)])
def test_a_signal_lets_what_was_taken_end_and_a_second_one_does_not(number: signal.Signals, model: Path) -> None:
    server = Served(model)
    with ask(server, stream=True) as answer:
        server.send(number)
        server.wait_for("shutting down")
        assert answer.read().endswith(b"data: [DONE]\n\n")
    assert server.end() == 0

    server = Served(model, "--max-kv-len", "500", "--num-pages", "3000")
    server.wait_for("provider torch on cpu")
    server.wait_for("  decode: torch.segments")
    server.wait_for("; 3000 pages, for sequences of up to 500 tokens")
    with ask(server, stream=True, n=16, max_tokens=480):
        server.send(number)
        server.wait_for("shutting down")
        server.send(number)
        assert server.end() == 128 + number


def test_an_engine_that_is_killed_ends_every_answer_with_one_error_and_then_the_server(model: Path) -> None:
    server = Served(model, "--max-kv-len", "500", "--num-pages", "3000")
    with ask(server, stream=True, n=16, max_tokens=480) as answer:
        assert answer.readline().startswith(b"data: ")
        for pid in family(server.pid)[1:]:
            os.kill(pid, signal.SIGKILL)
        rest = answer.read()
    assert rest.count(b'"code":"engine_ended"') == 1
    assert b"was killed by SIGKILL" in rest
    assert b"[DONE]" not in rest
    assert server.end() == FAILED


def test_an_engine_that_hangs_is_killed_after_the_drain_whatever_clients_have_left_in_it(model: Path) -> None:
    server = Served(model, end_seconds=0.01)
    with ask(server, stream=True):
        for pid in family(server.pid)[1:]:
            os.kill(pid, signal.SIGSTOP)
    server.send(signal.SIGTERM)
    assert server.end() == 0


@pytest.mark.parametrize(
    ("missing", "says"),
    [("tokenizer_config.json", "the model has no chat template; "), ("tokenizer.json", "the model has no tokenizer")],
)
def test_a_model_that_serves_only_some_prompts_says_so_at_start(missing: str, says: str, tmp_path: Path) -> None:
    """Each request was refused, while /ready was right."""
    (write_model(tmp_path) / missing).unlink()
    with served(tmp_path) as server:
        assert server.wait_for(says)


# tests/amd/server/test_observed.py has that there are none without it.
def test_each_request_is_a_line_on_stderr_where_that_is_asked_for(model: Path) -> None:
    with served(model, "--access-log") as server:
        assert text(server)
        server.get("/health")
        with pytest.raises(urllib.error.HTTPError):
            server.get("/nowhere")
    lines = [json.loads(line) for line in server.log if line.startswith("{")]
    found = [(line["method"], line["route"], line["status"]) for line in lines]
    assert found == [("POST", "/v1/completions", 200), ("GET", "/health", 200), ("GET", "other", 404)]
    assert not [line for line in server.log if "HTTP/1.1" in line]


def test_an_address_that_is_taken_is_named_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "--model", "nowhere", "--port", port]) == BAD_INPUT
    assert f"the server cannot listen on 127.0.0.1 port {port} (Address already in use)" in capsys.readouterr().err


def test_an_address_that_another_server_takes_meanwhile_is_named() -> None:
    """Two servers may bind one port; the first that has loaded its model listens."""
    with bind(ServerOptions(port=0)) as first:
        port = first.getsockname()[1]
        with bind(ServerOptions(port=port)) as second:
            first.listen()
            loaded = tiny_model(tokenizer=word_tokenizer())
            options = ServerOptions(port=port)
            engine = Engine(loaded, EngineOptions(provider="torch", page_size=4, graphs=False, max_kv_len=64))
            model = ServedModel("tiny", loaded.tokenizer, engine.limits, options)
            with pytest.raises(BadSetting, match=f"cannot listen on 127.0.0.1 port {port}"):
                serve(EngineThread(engine), model, ApiKeys(), second, print)


@pytest.mark.parametrize("host", ["a..b", "x" * 64 + ".example"])
def test_a_host_that_cannot_be_is_named(host: str) -> None:
    with pytest.raises(BadSetting, match="choose another with --host"):
        bind(ServerOptions(host=host))


@pytest.mark.parametrize("seconds", [1e9, 1e300])
def test_clients_may_be_given_any_time_to_read(seconds: float) -> None:
    with bind(ServerOptions(port=0, write_seconds=seconds)) as bound:
        assert bound.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 2**31 - 1


def test_the_first_request_with_a_schema_does_not_wait_for_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the engine's thread would read it, and every other request would wait too."""
    loaded = character_model()
    engine = Engine(loaded, EngineOptions(provider="torch", page_size=4, graphs=False, max_kv_len=64))
    _make_ready(engine, "cpu")
    monkeypatch.setattr(library(), "LLTokenizer", None)
    (completion,) = engine.generate([Request(PROMPT, 8, constraint=Constraint.json_object())])
    assert completion.text.lstrip().startswith("{")


def test_a_public_address_without_keys_is_refused_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(API_KEYS, raising=False)
    assert main(["serve", "--model", "nowhere", "--host", "0.0.0.0"]) == BAD_INPUT
    assert "--allow-anonymous" in capsys.readouterr().err


# Serves some requests of each kind, and prints which of the libraries are imported at which moment.
SERVING = """
import gc, json, os, signal, sys, threading, urllib.request
from multiprocessing.context import SpawnProcess
import rocm_serve.cli.serve as command
from rocm_attn.cli import main

def say(moment):
    print(json.dumps([moment, [name for name in {libraries} if name in sys.modules]]), flush=True)

def begun(process, start=SpawnProcess.start):
    if process.name == "rocm_attn engine":
        say("begin")
    start(process)

def ask(url):
    try:
        for path in ("/health/truth", "/metrics", "/v1/models"):
            urllib.request.urlopen(url + path).read()
        of_json = {{"Content-Type": "application/json"}}
        for each in ({{"logprobs": 2}}, {{"n": 2, "stop": "w9"}}, {{"stream": True, "seed": 3}}):
            body = json.dumps({{"model": "tiny", "prompt": "w9 w12", "max_tokens": 4, **each}}).encode()
            urllib.request.urlopen(urllib.request.Request(url + "/v1/completions", body, of_json)).read()
        assert len(gc.get_objects()) < gc.get_freeze_count() / 2
        assert abs(sys.getswitchinterval() - {switch}) < 1e-6
        say("asked")
    finally:
        os.kill(os.getpid(), signal.SIGTERM)

def announce(line):
    if line.startswith("listening on "):
        threading.Thread(target=ask, args=(line.split()[-1],)).start()

if __name__ == "__main__":
    SpawnProcess.start = begun
    command._announce = announce
    code = main(sys.argv[1:])
    say("end")
    sys.exit(code)
"""
LIBRARIES = ("torch", "numpy", "tokenizers", "jinja2", "fastapi", "pydantic", "uvicorn")


def test_the_engines_process_begins_before_the_servers_imports_which_never_bring_torch_and_it_does_not_pause(
    tmp_path: Path,
) -> None:
    script = tmp_path / "serving.py"
    script.write_text(SERVING.format(libraries=LIBRARIES, switch=SWITCH_SECONDS))
    model = write_model(tmp_path)
    flags = ("--served-model-name", "tiny", "--device", "cpu", "--provider", "torch", "--page-size", "4", "--no-graphs")
    command = [sys.executable, str(script), "serve", "--model", str(model), "--port", "0", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == DONE, done.stderr
    imported = dict(json.loads(line) for line in done.stdout.splitlines())
    assert "asked" in imported, done.stderr
    assert imported["begin"] == []
    assert imported["asked"] == imported["end"]
    assert {"tokenizers", "fastapi", "uvicorn"} <= set(imported["end"])
    assert "torch" not in imported["end"]
