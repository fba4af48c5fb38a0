"""EventStream: an answer that is sent as server-sent events while it is generated."""

import asyncio
import json
from collections.abc import Mapping
from json.encoder import encode_basestring_ascii

from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from rocm_attn.errors import RocmAttnError
from rocm_serve.request_stream import OutputChunk, RequestStream
from rocm_serve.server.api_errors import CLIENT_GONE, ApiError, reader_late
from rocm_serve.server.generation import Generation, Generations, Pieces
from rocm_serve.server.record import WRITER, StreamWriter
from rocm_serve.server.replies import Replies, TextChunk, as_event

# A text that is in no model's name.
_MARK = "\0text\0"
# Seconds without data after which a comment shows the client and all proxies that the server is alive.
_PING_SECONDS = 15.0
_PING = b": the request waits or is computed\n\n"


class EventStream(Response):
    """The chunks of a generation.

    Headers are sent with the first chunk, or after a while without one. An error before that has its own status. A
    later error is an event with "error", after which the stream ends without [DONE].
    """

    def __init__(self, generations: Generations, generation: Generation, replies: Replies, *, usage: bool) -> None:
        self.status_code, self.background = 200, None
        self._generations, self._generation, self._replies = generations, generation, replies
        self._has_usage, self._has_begun, self._is_late, self._num_tokens = usage, False, False, 0
        self._more = {"usage": None} if usage else {}
        self._frames: dict[int, _Frame] = {}
        self._pieces = Pieces(generation.streams, self._write_now)
        self._loop = asyncio.get_running_loop()
        self._sent_at = self._loop.time()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send, self._task = send, asyncio.current_task()
        self._writer: StreamWriter = scope[WRITER]
        for stream in self._generation.streams:
            stream.bound(self._generations.max_unread_tokens, self._give_up_late)
        self._timer = self._loop.call_later(_PING_SECONDS, self._look)
        try:
            await self._send_all(scope, receive)
        except asyncio.CancelledError:
            if not self._is_late:
                raise
            # Data that was sent stays with the kernel. The connection is closed because the answer is incomplete.
        finally:
            self._timer.cancel()

    async def _send_all(self, scope: Scope, receive: Receive) -> None:
        """Sends the chunks and the end. Any of it may be cancelled: other choices may go on while an error is sent."""
        try:
            await self._send_chunks()
        except (ApiError, RocmAttnError) as error:
            answer = error if isinstance(error, ApiError) else self._generations.as_answer(error)
            if answer.status == CLIENT_GONE:
                return
            if self._has_begun:
                answer.note()
                await self._end(as_event(answer.body()))
            else:
                await error_response(answer)(scope, receive, self._send)
        else:
            await self._end(self._replies.done)

    def _give_up_late(self) -> None:
        """Ends the request of a client that does not read. The task itself waits until the client takes some bytes."""
        if not self._is_late:
            self._is_late = True
            self._generations.counts.late_readers += 1
            self._generation.job.end(reader_late(self._generations.max_unread_tokens))
            assert self._task is not None, "it runs in a task"
            self._task.cancel()

    async def _send_chunks(self) -> None:
        while self._pieces.num_left:
            found = await self._pieces.next()
            if chunks := _PING if found is None else self._chunks(*found):
                await self._send_part(chunks)
        self._generation.note(self._num_tokens)
        for each in self._replies.ending(self._generation.usage(self._num_tokens), is_asked=self._has_usage):
            await self._send_part(as_event(each))

    async def _send_part(self, data: bytes) -> None:
        """Sends bytes, when the client has taken enough of the earlier ones, and headers before the first of them."""
        if not self._has_begun:
            self._has_begun = True
            await self._send(_start())
        if self._writer.is_full:
            await self._writer.drain()
        self._writer.write(data)
        self._sent_at = self._loop.time()

    async def _end(self, data: bytes) -> None:
        await self._send_part(data)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def _write_now(self, place: int, stream: RequestStream) -> bool:
        """Sends a piece that is neither the answer's first nor a choice's last, if the client has taken the others."""
        if not self._has_begun or self._writer.is_full:
            return False
        piece = stream.take()
        if piece is not None and (chunks := self._chunks(place, piece)):
            self._writer.write(chunks)
            self._sent_at = self._loop.time()
        return True

    def _look(self) -> None:
        """Wakes the task when nothing was sent for a while."""
        wait = self._sent_at + _PING_SECONDS - self._loop.time()
        if wait <= 0:
            self._pieces.wake()
        self._timer = self._loop.call_later(wait if wait > 0 else _PING_SECONDS, self._look)

    def _chunks(self, place: int, piece: OutputChunk) -> bytes:
        """Returns the events of a piece; empty if it has nothing to show yet."""
        self._num_tokens += len(piece.token_ids)
        chunks, frame = b"", self._frames.get(place)
        if frame is None:
            frame = self._frames[place] = _Frame(self._more)
            chunks = b"".join(as_event({**each, **self._more}) for each in self._replies.opening(place))
        if piece.text or piece.logprobs or piece.finish_reason is not None:
            chunks += b"".join(map(frame.event, self._replies.chunk(place, piece)))
        return chunks


class _Frame:
    """Writes the events of a choice. A text that is the only news is put between bytes that were written once.

    more: fields that each event has
    """

    def __init__(self, more: Mapping[str, object]) -> None:
        self._more, self._around = more, (b"", b"")

    def event(self, chunk: Mapping[str, object] | TextChunk) -> bytes:
        """Returns the bytes of an event."""
        if not isinstance(chunk, TextChunk):
            return as_event({**chunk, **self._more})
        before, after = self._around
        if not before:
            whole = as_event({**chunk.make(chunk.choice, _MARK), **self._more})
            before, _, after = whole.partition(json.dumps(_MARK).encode())
            self._around = before, after
        return before + encode_basestring_ascii(chunk.text).encode() + after


def error_response(error: ApiError) -> JSONResponse:
    """Returns an error as a separate answer."""
    error.note()
    return JSONResponse(error.body(), error.status, error.headers())


def _start() -> Message:
    headers: Mapping[str, str] = {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        "x-accel-buffering": "no",  # nginx would keep the chunks until there are many
    }
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": 200, "headers": raw}
