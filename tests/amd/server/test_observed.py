"""An operator sees of requests their ids, lines of the log, causes of errors, health, counts of keys, and traces."""

import json
import logging
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from rocm_attn.cli import BAD_INPUT
from rocm_attn.errors import BadSetting
from rocm_serve.models.loading import LoadedModel
from rocm_serve.server.http_metrics import HttpMetrics
from rocm_serve.server.keys import ANONYMOUS, ApiKeys, Sender
from rocm_serve.server.observers import LOGGER
from rocm_serve.server.record import RequestRecord
from tests.amd.forked import run_forked
from tests.amd.runner.async_engines import engine
from tests.amd.runner.tiny_model import NAN_TOKEN, with_nan_token
from tests.amd.server.raw import Client, post, requested, send
from tests.amd.server.running import NAME, Running, gate_of, running, word_model
from tests.amd.server.scraped import families_of, value_of

SECRETS = ["team-a sk-aaaaaaaaaaaa", "sk-bbbbbbbbbbbb"]
FAILING = requested(prompt=f"w{NAN_TOKEN}")


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return with_nan_token(word_model())


class Lines(logging.Handler):
    """The lines of requests, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.put(record.getMessage())

    def next(self, server: Running) -> Any:
        """Returns the JSON of the next line, once all answers have ended. Raises queue.Empty if there is none."""
        server.between_loops(lambda: None)
        server.jobs_are_done()
        text = self._lines.get_nowait()
        assert "\n" not in text
        return json.loads(text)

    @property
    def is_empty(self) -> bool:
        return self._lines.empty()


@contextmanager
def logged(loaded: LoadedModel, **options: Any) -> Iterator[tuple[Running, Lines]]:
    """A server, and its lines of requests."""
    lines = Lines()
    with running(engine(loaded), **options) as server:
        logging.getLogger(LOGGER).addHandler(lines)
        try:
            yield server, lines
        finally:
            logging.getLogger(LOGGER).removeHandler(lines)


def test_an_id_that_is_given_comes_back_and_another_one_is_made(loaded: LoadedModel) -> None:
    with running(engine(loaded)) as server:
        given = post(server, requested(), X_Request_Id="trace/7:a.b-c_d=+@")
        assert given.headers["x-request-id"] == "trace/7:a.b-c_d=+@"
        ids = {send(server, "GET", path).headers["x-request-id"] for path in ("/health", "/metrics", "/nowhere")}
        ids.add(post(server, requested(stream=True)).headers["x-request-id"])
        assert len(ids) == 4
        for bad in ("x" * 129, "two words", 'a"b', "\xe9", ""):
            made = post(server, requested(), X_Request_Id=bad).headers["x-request-id"]
            assert made.startswith("req-")
            assert made not in ids


def test_an_error_names_the_request_wherever_it_is_made(loaded: LoadedModel) -> None:
    with running(engine(loaded), keys=SECRETS) as server:
        for body, secret in ((b"{", "sk-bbbbbbbbbbbb"), (FAILING, "sk-bbbbbbbbbbbb"), (requested(), "wrong-key")):
            reply = post(server, body, X_Request_Id="mine", Authorization=f"Bearer {secret}")
            assert (reply.error["request_id"], reply.headers["x-request-id"]) == ("mine", "mine")
        # In a stream that has begun, the error is an event.
        body = requested(prompt=[[5, 6, 8], [NAN_TOKEN]], stream=True)
        stream = post(server, body, X_Request_Id="mine", Authorization="Bearer sk-bbbbbbbbbbbb")
        assert stream.status in (200, 500)
        assert b'"request_id":"mine"' in stream.body


def test_a_request_is_one_line_that_has_its_counts_and_neither_its_prompt_nor_its_key(loaded: LoadedModel) -> None:
    with logged(loaded, keys=SECRETS, access_log=True) as (server, lines):
        body = requested(prompt="w9 w12 w33 w9 w12 w33 w14 w15 w16", n=2, max_tokens=3)
        for secret in ("sk-aaaaaaaaaaaa", "sk-bbbbbbbbbbbb"):
            usage = post(server, body, Authorization=f"Bearer {secret}", X_Request_Id="one").json["usage"]
        line, other = lines.next(server), lines.next(server)
        assert (line["key"], other["key"]) == ("team-a", "key-2")
        assert {name: line[name] for name in ("id", "method", "route", "status", "model", "client")} == {
            "id": "one",
            "method": "POST",
            "route": "/v1/completions",
            "status": 200,
            "model": NAME,
            "client": "127.0.0.1",
        }
        counts = [line[f"{kind}_tokens"] for kind in ("prompt", "completion")]
        assert counts == [usage["prompt_tokens"], usage["completion_tokens"]] == [9, 6]
        assert 0 < line["first_token_seconds"] < line["seconds"]
        assert "error" not in line
        text = json.dumps([line, other])
        assert "w33" not in text
        assert "sk-" not in text


def test_cached_tokens_are_in_the_usage_and_in_the_line(loaded: LoadedModel) -> None:
    body = requested(prompt="w9 w12 w33 w9 w12 w33 w14 w15 w16", max_tokens=2)
    with logged(loaded, access_log=True) as (server, lines):
        first, second = (post(server, body).json["usage"] for _ in range(2))
        assert first["prompt_tokens_details"] == {"cached_tokens": 0}
        assert second["prompt_tokens_details"] == {"cached_tokens": 8}  # two pages of four; the last token is computed
        assert (lines.next(server)["cached_tokens"], lines.next(server)["cached_tokens"]) == (0, 8)
        streamed = post(server, {**body, "stream": True, "stream_options": {"include_usage": True}})
        assert b'"prompt_tokens_details":{"cached_tokens":8}' in streamed.body


def test_words_of_clients_cannot_make_a_line_long_or_two_lines(loaded: LoadedModel) -> None:
    with logged(loaded, access_log=True) as (server, lines):
        send(server, "X" * 4000, "/" + "y" * 4000)
        line = lines.next(server)
        assert (line["method"], line["route"], line["status"]) == ("X" * 16, "other", 404)
        assert len(json.dumps(line)) < 1000


async def test_an_error_amid_an_answer_is_reported_with_its_kind_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})
        raise ValueError("text of a prompt")

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        pass

    counts = HttpMetrics()
    scope = {"type": "http", "method": "GET", "path": "/health", "headers": []}
    with pytest.raises(ValueError, match="text of a prompt"):
        await gate_of(app, counts)(scope, receive, send)
    (line,) = (json.loads(each.getMessage()) for each in caplog.records if each.name == LOGGER)
    assert (line["status"], line["error"]) == (200, "internal_error")
    assert line["cause"] == "ValueError, whose traceback is in the log"
    assert (counts.open, counts.disconnects) == (0, 1)


def test_a_server_error_is_logged_with_its_cause_without_an_access_log(loaded: LoadedModel) -> None:
    with logged(loaded) as (server, lines):
        post(server, requested())
        post(server, b"{")
        post(server, FAILING, X_Request_Id="bad")
        line = lines.next(server)
        assert (line["id"], line["status"], line["error"]) == ("bad", 500, "request_failed")
        assert "no token can be sampled" in line["cause"]
        post(server, requested(prompt=[[5, 6, 8], [NAN_TOKEN]], stream=True), X_Request_Id="stream")
        line = lines.next(server)
        assert (line["id"], line["error"]) == ("stream", "request_failed")
        assert lines.is_empty
    with logged(loaded, unhealthy_after=1) as (server, lines):
        post(server, FAILING)
        lines.next(server)
        send(server, "GET", "/health")
        line = lines.next(server)
        assert (line["route"], line["status"], line["error"]) == ("/health", 503, "failing")
        assert "the last 1 requests have failed" in line["cause"]


def test_a_client_that_leaves_is_logged_with_the_tokens_that_it_cost(loaded: LoadedModel) -> None:
    with logged(loaded, access_log=True) as (server, lines):
        client = Client(server, requested(prompt="w9", max_tokens=60, ignore_eos=True, stream=True))
        client.read_until(b"data: ")
        client.leave()
        line = lines.next(server)
        assert line["status"] == 200
        assert 1 <= line["completion_tokens"] < 1000


def test_health_tells_when_requests_fail_and_when_one_is_served_again(loaded: LoadedModel) -> None:
    with running(engine(loaded), unhealthy_after=3) as server:
        for _ in range(2):
            assert post(server, FAILING).status == 500
        assert send(server, "GET", "/health").status == 200
        post(server, requested())  # a success between
        for place in range(3):
            assert send(server, "GET", "/health").status == 200, place
            post(server, {**FAILING, "stream": place == 1})
        for path in ("/health", "/ready"):
            reply = send(server, "GET", path)
            assert (reply.status, reply.json["status"]) == (503, "failing")
            assert "the last 3 requests have failed" in reply.json["reason"]
            assert "no token can be sampled" in reply.json["reason"]
        found = families_of(send(server, "GET", "/metrics").body.decode())
        assert value_of(found, "rocm_attn_failing") == 1
        post(server, b"{")  # an answer that says nothing about the server
        assert send(server, "GET", "/health").status == 503
        assert post(server, requested()).status == 200
        assert send(server, "GET", "/health").json == {"status": "ok"}
        assert send(server, "GET", "/ready").status == 200


def test_deadlines_of_clients_do_not_make_a_server_ill(loaded: LoadedModel) -> None:
    with running(engine(loaded), unhealthy_after=1) as server:
        reply = post(server, requested(max_tokens=60, ignore_eos=True, timeout=0.01))
        assert reply.status == 504
        assert send(server, "GET", "/health").status == 200


def test_each_key_has_its_counts_from_the_beginning(loaded: LoadedModel) -> None:
    with running(engine(loaded), keys=SECRETS) as server:
        prompt = "w9 w12 w33 w9 w12 w33"
        for _ in range(2):
            post(server, requested(prompt=prompt, max_tokens=3), Authorization="Bearer sk-aaaaaaaaaaaa")
        post(server, requested(), Authorization="Bearer nobodys-key")
        server.jobs_are_done()
        found = families_of(send(server, "GET", "/metrics").body.decode())
        requests = {key: value_of(found, "rocm_attn_http_key_requests_total", key=key) for key in ("team-a", "key-2")}
        assert requests == {"team-a": 2, "key-2": 0}
        tokens = "rocm_attn_http_key_tokens_total"
        kinds = ("prompt", "cached", "completion")
        assert [value_of(found, tokens, key="team-a", kind=kind) for kind in kinds] == [12, 4, 6]
        assert [value_of(found, tokens, key="key-2", kind=kind) for kind in kinds] == [0, 0, 0]
        assert {each.labels["key"] for each in found["rocm_attn_http_key_requests"].samples} == set(requests)


def test_the_scrape_says_what_serves_and_how_much_is_let_in(loaded: LoadedModel) -> None:
    with running(engine(loaded), max_requests=7) as server:
        post(server, requested(prompt="w9 w12 w33", max_tokens=4))
        found = families_of(send(server, "GET", "/metrics").body.decode())
        (build,) = found["rocm_attn_build_info"].samples
        assert (build.value, build.labels["model_name"], build.labels["arch"]) == (1, NAME, "cpu")
        assert set(build.labels) == {"version", "commit", "torch", "triton", "aiter", "arch", "model_name"}
        assert build.labels["torch"]
        assert value_of(found, "rocm_attn_http_max_requests") == 7
        for name, length, shorter in (("prompt", "4", "2"), ("new", "4", "2")):
            bucket = f"rocm_attn_request_{name}_tokens_bucket"
            assert (value_of(found, bucket, le=length), value_of(found, bucket, le=shorter)) == (1, 0)


def test_a_key_may_have_a_name_which_no_other_has() -> None:
    keys = ApiKeys.of(["a sk-aaaaaaaa", "sk-bbbbbbbb"])
    assert keys.names == ("a", "key-2")
    senders = [keys.sender_of(b"Bearer sk-aaaaaaaa"), keys.sender_of(b"Bearer sk-bbbbbbbb")]
    assert [each.name for each in senders if each is not None] == ["a", "key-2"]
    assert keys.sender_of(b"Bearer a") is keys.sender_of(b"Basic sk-aaaaaaaa") is keys.sender_of(None) is None
    assert ApiKeys().sender_of(None) == Sender(ANONYMOUS)
    for bad in (
        ["a sk-aaaaaaaa", "a sk-bbbbbbbb"],
        ['a" sk-aaaaaaaa'],
        [f"{'a' * 65} sk-aaaaaaaa"],
        ["anonymous sk-a12345678"],
    ):
        with pytest.raises(BadSetting, match="cannot have its name"):
            ApiKeys.of(bad)
    with pytest.raises(BadSetting, match="API key 3 is also that of a; give each client its own key"):
        ApiKeys.of(["a sk-aaaaaaaa", "b sk-bbbbbbbb", "c sk-aaaaaaaa"])


WITHOUT_LIBRARY = """
import sys
sys.modules["opentelemetry.exporter"] = None
from rocm_attn.cli import main
sys.exit(main(["serve", "--model", "nowhere", "--traces"]))
"""


@contextmanager
def traced(loaded: LoadedModel, noted_late: float = 0.0) -> Iterator[tuple[Running, Any]]:
    """A server, and the exporter that has its spans once the server has ended.

    noted_late: seconds by which a thread that had to wait notes late that the engine got a request
    """
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    exports = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()
    from rocm_serve.server.traces import OtelTraces

    class Traces(OtelTraces):
        def send(self, record: RequestRecord) -> None:
            record.given += noted_late
            super().send(record)

    provider = sdk.TracerProvider()
    provider.add_span_processor(exports.SimpleSpanProcessor(memory))
    with running(engine(loaded), traces=[Traces(provider, NAME)], keys=["team-a sk-aaaaaaaaaaaa"]) as server:
        yield server, memory


def by_name(memory: Any) -> dict[str, Any]:
    """The spans; each name is there once."""
    spans = memory.get_finished_spans()
    found = {span.name: span for span in spans}
    assert len(found) == len(spans)
    return found


@pytest.mark.parametrize("noted_late", [0.0, 60.0])
def test_a_request_is_a_span_of_the_callers_trace_with_one_for_each_part_of_its_time(
    loaded: LoadedModel, noted_late: float
) -> None:
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    with traced(loaded, noted_late) as (server, memory):
        body = requested(prompt="w9 w12 w33", max_tokens=5, temperature=0.5, top_p=0.9, seed=3, n=2)
        headers = {"Authorization": "Bearer sk-aaaaaaaaaaaa", "Traceparent": f"00-{trace}-{parent}-01"}
        post(server, body, X_Request_Id="mine", **headers)
        send(server, "GET", "/health")
    spans = by_name(memory)
    assert list(spans) == ["waiting", "prefill", "decode", f"text_completion {NAME}"]
    whole = spans[f"text_completion {NAME}"]
    assert f"{whole.context.trace_id:032x}" == trace
    assert f"{whole.parent.span_id:016x}" == parent
    attributes = dict(whole.attributes)
    assert {name: attributes[name] for name in attributes if name.startswith(("gen_ai", "rocm_attn"))} == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "rocm_attn",
        "gen_ai.request.model": NAME,
        "gen_ai.response.model": NAME,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.choice.count": 2,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": 10,
        "gen_ai.response.finish_reasons": ("length", "length"),
        "rocm_attn.request.id": "mine",
        "rocm_attn.request.key": "team-a",
    }
    assert (attributes["http.route"], attributes["http.response.status_code"]) == ("/v1/completions", 200)
    assert not [value for value in attributes.values() if "w33" in str(value) or "sk-" in str(value)]
    parts = [spans[name] for name in ("waiting", "prefill", "decode")]
    assert {part.parent.span_id for part in parts} == {whole.context.span_id}
    moments = [whole.start_time, *(each.end_time for each in parts)]
    assert [part.start_time for part in parts] == moments[:-1]
    assert moments == sorted(moments)
    assert abs(whole.end_time - moments[-1]) < 1000  # rounding of floats to nanoseconds


def test_a_failure_is_an_error_of_its_span_and_a_refusal_is_not(loaded: LoadedModel) -> None:
    with traced(loaded) as (server, memory):
        headers = {"Authorization": "Bearer sk-aaaaaaaaaaaa"}
        post(server, requested(prompt=f"w{NAN_TOKEN}"), **headers)
        post(server, b"{", **headers)
    found = {span.attributes.get("error.type"): span for span in memory.get_finished_spans() if span.parent is None}
    failed, refused = found["request_failed"], found["invalid_json"]
    assert not failed.status.is_ok
    assert "no token can be sampled" in failed.status.description
    assert refused.status.is_unset
    assert refused.attributes["http.response.status_code"] == 400


def test_without_the_library_one_sentence_says_what_to_install_before_anything_is_loaded() -> None:
    done = run_forked(WITHOUT_LIBRARY)
    assert done.returncode == BAD_INPUT
    assert "--traces needs OpenTelemetry's library" in done.stderr
    assert "./rocm_serve[server,otel]" in done.stderr
    assert "Traceback" not in done.stderr


def test_traces_are_sent_over_http_where_the_variable_says(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    import queue
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    from rocm_serve.server.traces import otlp_traces

    came: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            came.put((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *words: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        traces = otlp_traces("a model")
        traces.send(RequestRecord("mine", "POST", "/v1/chat/completions"))
        traces.close()
        path, body = came.get()
        collector.shutdown()
        thread.join()
    assert path == "/v1/traces"
    assert b"chat a model" in body
    assert b"rocm-attn" in body
