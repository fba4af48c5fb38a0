"""Gate: the first part of the server that sees every HTTP request, and the last that sees its answer.

It gives each request an id, counts it, checks its key, and reports it once it has ended. It refuses requests that
cannot be served now without keeping a byte of the body. It reads bodies within their bounds, and watches whether the
client stays connected.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rocm_attn.errors import FitsLater, RocmAttnError
from rocm_serve.server import record as records
from rocm_serve.server.api_errors import CLIENT_GONE, ApiError, client_gone, draining
from rocm_serve.server.connections import MOST_HEAD_BYTES, head_too_large
from rocm_serve.server.event_stream import error_response
from rocm_serve.server.generation import Generations
from rocm_serve.server.job import Job
from rocm_serve.server.keys import ApiKeys, Sender
from rocm_serve.server.observers import Observers
from rocm_serve.server.options import ServerOptions
from rocm_serve.server.parsing import LONG_BODY
from rocm_serve.server.record import GENERATING, RequestRecord
from rocm_serve.server.waiting import WaitingBody, WaitingBytes, client_at

_ID_HEADER = b"x-request-id"
_TRACE_HEADERS = ("traceparent", "tracestate")
# Methods are words of the client's choice.
_LONGEST_METHOD = 16
# The paths whose bodies are kept. Their requests take places.
_WITH_BODY = GENERATING | {"/tokenize", "/detokenize"}
# Paths that need a key, in addition to those of /v1/.
_KEYED = _WITH_BODY | {"/tokenizer_info"}
_ROUTES = _KEYED | {
    *("/v1/models", "/health", "/health/truth", "/ready", "/metrics", "/openapi.json", "/ping", "/version", "/load"),
}
_OF_A_MODEL = "/v1/models/"
# Code of an error -> the reason for a refusal in http_metrics.py.
_REFUSED_FOR = {
    "headers_too_large": "head",
    "invalid_api_key": "key",
    "body_too_large": "body",
    "body_too_slow": "body",
    "too_many_requests": "queue",
    "draining": "draining",
}
# Values of Content-Encoding. Others, such as a charset, are put there by mistake, and the body is read.
_COMPRESSED = frozenset({b"gzip", b"x-gzip", b"deflate", b"compress", b"br", b"zstd"})
# The key of a job in an ASGI scope.
JOB = "rocm_attn.job"
# A body that is too long is read up to this multiple of its bound. Otherwise the client would lose its connection while
# it sends, and would never see the reason.
_READ_IN_VAIN = 2
_BYTES_A_SECOND = 100 * 2**20  # of long bodies, which the parser reads 20 times as fast
# At most this multiple of max_requests exist at a time, including those whose answers only wait to be read.
_MOST_READ = 2


class ServerGate:
    """An ASGI application around another one."""

    def __init__(
        self, app: ASGIApp, generations: Generations, keys: ApiKeys, observers: Observers, options: ServerOptions
    ) -> None:
        self._app, self._generations, self._keys, self._observers = app, generations, keys, observers
        self._options = options
        self._waiting = WaitingBytes(options, generations.counts)
        self._parsing = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        counts, sender = self._generations.counts, self._sender_of(scope)
        record = _record_of(scope, sender)
        records.begin(record)
        answer = _Answer(send, record)
        counts.open += 1
        try:
            await self._pass(scope, receive, answer, sender)
        except ApiError as error:
            if error.status != CLIENT_GONE:
                counts.refused[_REFUSED_FOR.get(error.code, "other")] += 1
                await error_response(error)(scope, receive, answer)
        except Exception as error:  # while an answer was sent
            records.note_error(500, "internal_error", f"{type(error).__name__}, whose traceback is in the log")
            raise
        finally:
            record.end()
            counts.open -= 1
            counts.disconnects += not answer.is_whole
            counts.note(record.route, record.status or CLIENT_GONE, record.seconds)
            self._observers.report(record)

    def _sender_of(self, scope: Scope) -> Sender | None:
        """Returns the sender of a request; None if it must have a key, and has none that fits."""
        path = scope["path"]
        if not path.startswith("/v1/") and path not in _KEYED:
            return Sender("")
        return self._keys.sender_of(dict(scope["headers"]).get(b"authorization"))

    async def _pass(self, scope: Scope, receive: Receive, send: _Answer, sender: Sender | None) -> None:
        """Passes a request on. Raises ApiError for requests that the application must not see."""
        salt = self._admit(scope, sender)
        if _has_body(scope):
            await self._generate(scope, receive, send, salt)
        else:
            # These routes have no use for a body, and nothing bounds the number of such requests.
            await _read_body(receive, self._options, None)
            # An ASGI server leaves out the body of the answer to a HEAD.
            method = "GET" if scope["method"] == "HEAD" else scope["method"]
            await self._app({**scope, "method": method}, _Replay(b"", send.client_left, self._parsing), send)

    def _admit(self, scope: Scope, sender: Sender | None) -> str:
        """Returns the salt of the client. Raises ApiError."""
        if _head_bytes(scope) > MOST_HEAD_BYTES:  # h11 bounds only heads that come in parts
            raise head_too_large()
        headers = dict(scope["headers"])
        if b"content-length" in headers and b"transfer-encoding" in headers:
            # RFC 9112, 6.1: a proxy in front may have taken the other one, and would see another request in the body.
            raise ApiError(
                400,
                "the request has a Content-Length and a Transfer-Encoding, which say different lengths; send one of "
                "them",
                code="ambiguous_length",
            )
        if sender is None:
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as the header Authorization: Bearer KEY",
                code="invalid_api_key",
            )
        if _length(scope) > self._options.max_body_bytes * _READ_IN_VAIN:
            raise _too_large(self._options.max_body_bytes)
        if _has_body(scope) and not _is_json(headers.get(b"content-type", b"")):
            # A page in a browser may send text to a server on the loopback address without asking, but not JSON.
            raise ApiError(
                415,
                "the body must be a JSON object, sent with Content-Type: application/json",
                code="unsupported_media_type",
            )
        coding = headers.get(b"content-encoding", b"").strip().lower()
        if _has_body(scope) and coding in _COMPRESSED:
            raise ApiError(
                415,
                f"the body is compressed (Content-Encoding: {coding.decode()}), and this server reads none that is; "
                "send it as it is",
                code="unsupported_media_type",
            )
        return sender.salt

    async def _generate(self, scope: Scope, receive: Receive, send: _Answer, salt: str) -> None:
        """Runs a job from its start to its end. Raises ApiError."""
        generations, options = self._generations, self._options
        if generations.jobs.is_draining:
            # The answer closes the connection. Bytes that come later would reset it, and the answer would be lost.
            await _read_body(receive, options, None)
            raise draining(generations.retry_after)
        try:
            generations.front.check()
            self._require_place()
            waiting = self._waiting.begin(salt or _client_of(scope), min(_length(scope), options.max_body_bytes))
        except RocmAttnError as error:
            raise generations.as_answer(error) from error
        # A body is forgotten once its request is taken: its tokens, which took most memory, are made by then.
        job = Job(salt, options.deadline_seconds, waiting.free)
        try:
            with generations.jobs.taken(job):
                try:
                    body = await _read_body(receive, options, waiting)
                    self._require_place()  # others may have come meanwhile, whose bodies are shorter
                except FitsLater as error:
                    raise generations.as_answer(error) from error
                generations.jobs.note_read(job)
                replay = _Replay(body, send.client_left, self._parsing)
                del body
                watcher = asyncio.ensure_future(_watch(receive, job, send.client_left))
                try:
                    await self._app({**scope, JOB: job}, replay, send)
                finally:
                    watcher.cancel()
                    with suppress(asyncio.CancelledError):
                        await watcher
        finally:
            waiting.free()

    def _require_place(self) -> None:
        """Raises FitsLater if all places are taken. A body that is being read has none: only its bytes are bounded."""
        jobs, most = self._generations.jobs, self._options.max_requests
        is_full = self._generations.front.num_requests >= most
        # Each job is looked at only where enough are read: a burst would take a time that grows with its square.
        is_full |= jobs.num_read >= most and jobs.num_served >= most
        if is_full or jobs.num_read >= most * _MOST_READ:
            raise FitsLater("all places for running and waiting requests are taken; send this one again later")


class _Answer:
    """Sends an answer with its request's id, and records its status and how far it got.

    is_whole:    whether its last byte was sent
    client_left: set once the client has gone. Data sent after that is lost, and the ASGI server does not report it: an
                 answer that was computed by then would look whole
    """

    def __init__(self, send: Send, record: RequestRecord) -> None:
        self._send, self._record, self.is_whole = send, record, False
        self.client_left = asyncio.Event()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._record.status = message["status"]
            request_id = (_ID_HEADER, self._record.request_id.encode())
            message = {**message, "headers": [*message.get("headers", ()), request_id]}
        await self._send(message)
        is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
        self.is_whole = is_last and not self.client_left.is_set()


class _Replay:
    """Gives the application the body that was read, and later the message that the client has gone.

    parsing: held while a long body waits for its turn
    """

    def __init__(self, body: bytes, client_left: asyncio.Event, parsing: asyncio.Lock) -> None:
        self._body: bytes | None = body
        self._client_left, self._parsing = client_left, parsing

    async def __call__(self) -> Message:
        if self._body is not None:
            if len(self._body) > LONG_BODY:
                # The application parses it at once, with Python's lock held. Between two, others have most time.
                async with self._parsing:
                    await asyncio.sleep(len(self._body) / _BYTES_A_SECOND)
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._client_left.wait()
        return {"type": "http.disconnect"}


def _record_of(scope: Scope, sender: Sender | None) -> RequestRecord:
    headers: dict[bytes, bytes] = dict(scope["headers"])
    peer = scope.get("client")
    return RequestRecord(
        records.id_from(headers.get(_ID_HEADER)),
        scope["method"][:_LONGEST_METHOD],
        _route_of(scope["path"]),
        peer[0] if peer else "",
        sender.name if sender is not None else "",
        {name: headers[name.encode()].decode("latin-1") for name in _TRACE_HEADERS if name.encode() in headers},
    )


def _client_of(scope: Scope) -> str:
    """Returns the client at the other end; one name for all whose address the ASGI server does not know."""
    peer = scope.get("client")
    return client_at(peer[0]) if peer else ""


def _has_body(scope: Scope) -> bool:
    """True if the body of a request is kept."""
    return scope["method"] == "POST" and scope["path"] in _WITH_BODY


def _route_of(path: str) -> str:
    """Returns the route of a path for HttpMetrics.note. Unknown paths are "other", so clients cannot add names."""
    if path.startswith(_OF_A_MODEL):
        return f"{_OF_A_MODEL}{{name}}"
    return path if path in _ROUTES else "other"


async def _watch(receive: Receive, job: Job, client_left: asyncio.Event) -> None:
    """Ends a job whose client has left or has its answer: an ASGI server reports both in the same way."""
    while (await receive())["type"] != "http.disconnect":
        pass
    client_left.set()
    job.end(client_gone())


async def _read_body(receive: Receive, options: ServerOptions, waiting: WaitingBody | None) -> bytes:
    """Returns the body, within its bounds, and counts its bytes; keeps none if nothing counts them.

    Raises ApiError, FitsLater.
    """
    try:
        return await asyncio.wait_for(_read(receive, options.max_body_bytes, waiting), options.body_seconds)
    except asyncio.TimeoutError:
        raise ApiError(
            408,
            f"the body did not arrive within {options.body_seconds:g} seconds; send it faster, or send less",
            code="body_too_slow",
        ) from None


async def _read(receive: Receive, most: int, waiting: WaitingBody | None) -> bytes:
    parts: list[bytes] = []
    num_bytes, more = 0, True
    while more and num_bytes <= most * _READ_IN_VAIN:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise client_gone()
        part, more = message.get("body", b""), message.get("more_body", False)
        num_bytes += len(part)
        if waiting is not None and num_bytes <= most:
            waiting.add(len(part))
            parts.append(part)
        elif waiting is not None:
            parts.clear()
            waiting.free()
    if num_bytes > most:
        raise _too_large(most)
    return b"".join(parts)


def _length(scope: Scope) -> int:
    """Returns the length of the body as the client has given it; 0 if it has not."""
    length = dict(scope["headers"]).get(b"content-length", b"")
    return int(length) if length.isdigit() else 0


def _head_bytes(scope: Scope) -> int:
    """Returns the bytes of the target and of the headers as lines."""
    lines = sum(len(name) + len(value) for name, value in scope["headers"]) + 4 * len(scope["headers"])
    return len(scope.get("raw_path", b"")) + len(scope.get("query_string", b"")) + lines


def _is_json(content_type: bytes) -> bool:
    kind = content_type.partition(b";")[0].strip().lower()
    return kind == b"application/json" or (kind.startswith(b"application/") and kind.endswith(b"+json"))


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body has more than the {most} bytes that this server accepts", code="body_too_large")
