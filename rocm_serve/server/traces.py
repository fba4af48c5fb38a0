"""Traces: the spans of requests, sent by OpenTelemetry's own library.

A request has a span, and within it one for each part of its time: waiting, prefill up to the first token, and decode.
The names of attributes are those of OpenTelemetry's conventions for HTTP and for generative AI
(https://opentelemetry.io/docs/specs/semconv/gen-ai/). Spans are made when a request has ended, from the times that are
noted anyway, so a request does no work for them while it is served.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rocm_attn.errors import BadSetting
from rocm_attn.machine.distributions import installing

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from rocm_serve.server.record import RequestRecord

SYSTEM = "rocm_attn"
# Route -> gen_ai.operation.name.
_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion", "/v1/responses": "chat"}


class OtelTraces:
    """Sends the spans of requests for text to an OpenTelemetry provider. model: name of the served model"""

    def __init__(self, provider: TracerProvider, model: str) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider, self._model = provider, model
        self._tracer = provider.get_tracer("rocm_serve")
        self._propagator = TraceContextTextMapPropagator()

    def send(self, record: RequestRecord) -> None:
        """Sends the spans of a request that has ended."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        operation = _OPERATIONS.get(record.route)
        if operation is None:
            return
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            self._propagator.extract(record.parent),
            SpanKind.SERVER,
            self._attributes(record, operation),
            start_time=record.began_at,
        )
        if record.has_failed or record.error_status in (503, 504):
            span.set_status(Status(StatusCode.ERROR, record.cause))
        within = set_span_in_context(span)
        for name, (begin, end) in _parts_of(record).items():
            part = self._tracer.start_span(name, within, start_time=_at(record, begin))
            part.end(_at(record, end))
        span.end(_at(record, record.began + record.seconds))

    def close(self) -> None:
        """Sends the spans that are left."""
        shutdown = getattr(self._provider, "shutdown", None)
        if shutdown is not None:
            shutdown()

    def _attributes(self, record: RequestRecord, operation: str) -> dict[str, str | int | float | list[str]]:
        found: dict[str, str | int | float | list[str]] = {
            "http.request.method": record.method,
            "http.route": record.route,
            "http.response.status_code": record.status,
            "client.address": record.client,
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": SYSTEM,
            "gen_ai.request.model": self._model,
            "rocm_attn.request.id": record.request_id,
            "rocm_attn.request.key": record.key,
        }
        if record.error_status:
            found["error.type"] = record.error_code
        if record.streams:
            sampling = record.requests[0].sampling
            ended = [stream.ended_with for stream in record.streams]
            found |= {
                "gen_ai.response.model": self._model,
                "gen_ai.request.max_tokens": record.requests[0].max_new_tokens,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                "gen_ai.request.choice.count": record.num_choices,
                "gen_ai.usage.input_tokens": record.prompt_tokens,
                "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
                "gen_ai.usage.output_tokens": record.completion_tokens,
                "gen_ai.response.finish_reasons": [each.finish_reason for each in ended if each is not None],
            }
        return found


def _parts_of(record: RequestRecord) -> dict[str, tuple[float, float]]:
    """Returns the name of each part of a request's time -> its begin and its end, as far as it got."""
    end = record.began + record.seconds
    if not record.streams:
        return {}
    first_token = record.first_token
    first_step = first_token or end
    if record.queue_seconds:  # 0: it has had no step, or its client left before it was known
        # `given` is noted just after the engine had the requests, so the sum can be later than a first token.
        first_step = min(first_step, record.given + record.queue_seconds)
    parts = {"waiting": (record.began, first_step)}
    if first_token:
        parts["prefill"] = (first_step, first_token)
        parts["decode"] = (first_token, end)
    elif first_step < end:
        parts["prefill"] = (first_step, end)
    return parts


def _at(record: RequestRecord, seconds: float) -> int:
    """Returns the Unix time in ns of a time of time.perf_counter()."""
    return record.began_at + int((seconds - record.began) * 1e9)


def otlp_traces(model: str) -> OtelTraces:
    """Returns traces that are sent by OTLP over HTTP, in a thread of their own.

    OpenTelemetry's variables say where to and how much, such as OTEL_EXPORTER_OTLP_ENDPOINT and OTEL_TRACES_SAMPLER.
    Raises BadSetting if its library is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise BadSetting(
            f"--traces needs OpenTelemetry's library ({error}); {installing('rocm_serve', 'server,otel')}"
        ) from error
    # A name that OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES gives takes the place of this one.
    provider = TracerProvider(resource=Resource.create({"service.name": "rocm-attn"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return OtelTraces(provider, model)
