"""Observers: an ended request is reported as a line of JSON, to the counts of its API key, to health and to traces."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from rocm_serve.server.health import Health
from rocm_serve.server.http_metrics import HttpMetrics
from rocm_serve.server.record import GENERATING, RequestRecord
from rocm_serve.server.traces import OtelTraces

# Its lines are JSON; run.py gives it a handler.
LOGGER = "rocm_serve.requests"


@dataclass(frozen=True, slots=True)
class Observers:
    """The places that an ended request is reported to.

    model:      name of the served model
    access_log: whether each request has a line, and not only those that the server has failed to answer
    """

    model: str
    access_log: bool
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
