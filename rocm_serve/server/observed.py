"""Observed: the outermost part of the server. It gives each request an id, and reports it once it has ended.

The reports are a line of JSON, the counts of its API key, the server's health and, if they are sent, traces.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rocm_serve.server import record as records
from rocm_serve.server.gate import GENERATING, needs_key, route_of
from rocm_serve.server.health import Health
from rocm_serve.server.http_metrics import HttpMetrics
from rocm_serve.server.keys import ApiKeys
from rocm_serve.server.record import RequestRecord
from rocm_serve.server.traces import OtelTraces

ID_HEADER = b"x-request-id"
# Its lines are JSON; run.py gives it a handler.
LOGGER = "rocm_serve.requests"
_TRACE_HEADERS = ("traceparent", "tracestate")
# Methods are words of the client's choice.
_LONGEST_METHOD = 16


@dataclass(frozen=True, slots=True)
class Observers:
    """The places that an ended request is reported to.

    model:      name of the served model
    access_log: whether each request has a line, and not only those that the server has failed to answer
    """

    model: str
    access_log: bool
    keys: ApiKeys
    counts: HttpMetrics
    health: Health
    traces: Sequence[OtelTraces]

    def report(self, record: RequestRecord) -> None:
        """Reports a request that has ended."""
        if record.status >= 500 or record.error_status >= 500:
            logging.getLogger(LOGGER).error(self._line(record))
        elif self.access_log:
            logging.getLogger(LOGGER).info(self._line(record))
        if record.route in GENERATING:
            if record.has_failed:
                self.health.note_failure(record.cause)
            elif record.status == 200 and not record.error_status:
                self.health.note_success()
            if record.key:
                self.counts.note_key(record.key, record.prompt_tokens, record.cached_tokens, record.completion_tokens)
        for each in self.traces:
            each.send(record)

    def _line(self, record: RequestRecord) -> str:
        """Returns the line of a request. Times are in seconds, from its first byte on."""
        first = record.first_token
        line = {
            "time": datetime.fromtimestamp(record.began_at / 1e9, timezone.utc).isoformat(timespec="milliseconds"),
            "id": record.request_id,
            "client": record.client,
            "key": record.key,
            "method": record.method,
            "route": record.route,
            "model": self.model if record.streams else None,
            "status": record.status,
            "seconds": round(record.seconds, 6),
            "first_token_seconds": round(first - record.began, 6) if first else None,
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "completion_tokens": record.completion_tokens,
        }
        if record.error_status:
            line["error"] = record.error_code
        if record.error_status >= 500:
            line["cause"] = record.cause
        return json.dumps(line, ensure_ascii=True)


class Observed:
    """An ASGI application around another one."""

    def __init__(self, app: ASGIApp, observers: Observers) -> None:
        self._app, self._observers = app, observers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = self._begun(scope)
        records.begin(record)
        request_id = (ID_HEADER, record.request_id.encode())

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), request_id]}
            await send(message)

        try:
            await self._app(scope, receive, answer)
        except Exception as error:  # while an answer was sent
            records.note_error(500, "internal_error", f"{type(error).__name__}, whose traceback is in the log")
            raise
        finally:
            record.end()
            self._observers.report(record)

    def _begun(self, scope: Scope) -> RequestRecord:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        client = scope.get("client")
        return RequestRecord(
            records.id_from(headers.get(ID_HEADER)),
            scope["method"][:_LONGEST_METHOD],
            route_of(scope["path"]),
            client[0] if client else "",
            self._observers.keys.name_of(headers.get(b"authorization")) if needs_key(scope["path"]) else "",
            {name: headers[name.encode()].decode("latin-1") for name in _TRACE_HEADERS if name.encode() in headers},
        )
