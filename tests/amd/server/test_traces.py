"""Traces: OpenTelemetry's own exporter in memory gets a span per request and one for each part of its time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rocm_attn.cli import BAD_INPUT
from rocm_serve.models.loading import LoadedModel
from rocm_serve.server.record import RequestRecord
from tests.amd.forked import run_forked
from tests.amd.runner.async_engines import engine
from tests.amd.runner.tiny_model import NAN_TOKEN, with_nan_token
from tests.amd.server.raw import post, requested, send
from tests.amd.server.running import NAME, Running, running, word_model

WITHOUT_LIBRARY = """
import sys
sys.modules["opentelemetry.exporter"] = None
from rocm_attn.cli import main
sys.exit(main(["serve", "--model", "nowhere", "--traces"]))
"""


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return with_nan_token(word_model())


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
