"""RequestRecord: the facts of one HTTP request for the operator. It holds no text, no token and no key.

The record of a request is found from any code that runs for it, so errors have the request's id wherever they are made.
"""

import re
import secrets
import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from rocm_serve.request import Request
from rocm_serve.request_stream import RequestStream, cached_tokens

# The routes whose requests generate text.
GENERATING = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses"})
# Ids that are taken from clients; another one is replaced. Others would break lines of logs, or fill them.
_SANE_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
# Statuses of 500 and above that say nothing about the engine: the server ends, and a client's own deadline.
_NOT_FAILURES = frozenset({503, 504})


# The key of the StreamWriter in an ASGI scope.
WRITER = "rocm_attn.writer"


class StreamWriter(Protocol):
    """A connection's own way to send parts of an answer: each layer between takes time for each token of a stream.

    is_full: whether the client has to take some of what was written first; drain() waits for that
    """

    @property
    def is_full(self) -> bool: ...
    def write(self, data: bytes) -> None: ...
    async def drain(self) -> None: ...


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request, from its first byte to the last byte of its answer.

    route:      the template of its path, or "other"
    client:     address
    key:        name of its API key, never the key; empty if none fits
    parent:     the headers traceparent and tracestate, if it has them
    began_at:   Unix time in ns
    began:      seconds of time.perf_counter(), like all times here
    given:      when the engine got its requests; 0: it did not
    status:     that was sent
    error_status, error_code, cause: of its error, whether it was sent as the status or within a stream; 0 and empty if
                there was none
    seconds:    of the whole; 0 until it has ended
    """

    request_id: str
    method: str = ""
    route: str = "other"
    client: str = ""
    key: str = ""
    parent: dict[str, str] = field(default_factory=dict)
    began_at: int = field(default_factory=time.time_ns)
    began: float = field(default_factory=time.perf_counter)
    given: float = 0.0
    status: int = 0
    error_status: int = 0
    error_code: str = ""
    cause: str = ""
    seconds: float = 0.0
    num_choices: int = 1
    requests: Sequence[Request] = ()
    streams: Sequence[RequestStream] = ()

    @property
    def prompt_tokens(self) -> int:
        """Tokens of each prompt, once."""
        return sum(len(request.prompt_token_ids) for request in self.requests[:: self.num_choices])

    @property
    def cached_tokens(self) -> int:
        """Those of them that were found in the prefix cache."""
        return cached_tokens(self.streams[:: self.num_choices])

    @property
    def completion_tokens(self) -> int:
        """New tokens of all answers, those that the client did not wait for included."""
        return sum(stream.num_tokens for stream in self.streams)

    @property
    def first_token(self) -> float:
        """Time of the first token of any answer; 0 if there was none."""
        return min((stream.first_token_at for stream in self.streams if stream.first_token_at), default=0.0)

    @property
    def queue_seconds(self) -> float:
        """Seconds until the first of its requests was in a step, from `given` on."""
        ended = [stream.ended_with for stream in self.streams]
        return min((each.queue_seconds for each in ended if each is not None and each.queue_seconds), default=0.0)

    def end(self) -> None:
        """Notes that the last byte of its answer was sent, or that its client has gone."""
        self.seconds = time.perf_counter() - self.began

    @property
    def has_failed(self) -> bool:
        """True if the server is to blame."""
        return self.error_status >= 500 and self.error_status not in _NOT_FAILURES


_CURRENT: ContextVar[RequestRecord | None] = ContextVar("rocm_serve.request", default=None)


def begin(record: RequestRecord) -> None:
    """Makes this the record of the current task, and of the tasks that it starts."""
    _CURRENT.set(record)


def id_from(header: bytes | None) -> str:
    """Returns the id that a client has given, if it is short and of usual characters, else a new one."""
    if header is not None and _SANE_ID.fullmatch(header):
        return header.decode()
    return f"req-{secrets.token_hex(12)}"


def request_id() -> str:
    """Returns the id of the request that the current task serves; empty outside of one."""
    record = _CURRENT.get()
    return record.request_id if record is not None else ""


def note_error(status: int, code: str, cause: str) -> None:
    """Notes the error that the current request is answered with. cause: a sentence without anything of its body"""
    record = _CURRENT.get()
    if record is not None and not record.error_status:
        record.error_status, record.error_code, record.cause = status, code, cause


def note_streams(requests: Sequence[Request], streams: Sequence[RequestStream], num_choices: int) -> None:
    """Notes what the engine got for the current request. num_choices: see Generation"""
    record = _CURRENT.get()
    if record is not None:
        record.given, record.requests, record.streams = time.perf_counter(), requests, streams
        record.num_choices = num_choices
