"""RequestStream: the output of a request of AsyncEngine, for the asyncio task that submitted it."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType

from rocm_attn.errors import RocmAttnError, WrongState
from rocm_attn.machine.settings import whole_number
from rocm_serve.request import Completion, FinishReason, Request
from rocm_serve.sampling.logprobs import TokenLogprobs
from rocm_serve.text.request_text import RequestText
from rocm_serve.text.tokenizer import Tokenizer


class RequestFailed(RocmAttnError, RuntimeError):
    """A request has failed; the message is the reason. Other requests are not affected.

    completion: its result so far
    """

    def __init__(self, completion: Completion) -> None:
        self.completion = completion
        super().__init__(completion.error)


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """The output of a request since the last chunk: one token, or several if the reader was late.

    token_ids:     the new tokens; empty if only the rest of the text comes, at the end
    text:          the text that can be printed now
    finish_reason: None unless this is the last chunk
    logprobs:      those of the new tokens if the request asks for them, else none
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(slots=True, eq=False)
class Inbox:
    """The output of a request that was not read yet. It makes the text of the tokens. Used in one event loop.

    tokenizer:  None: there is no text
    completion: once it has ended
    error:      raised to its reader after the last chunk: the request has failed, or the engine has ended
    on_late:    called when a token comes while more than most_unread of the request's tokens are unread
    on_output:  called when something has come, or the end
    num_tokens: that have come, read or not
    first_token_at: when the first of them came, in seconds of time.perf_counter(); 0 if none did
    """

    request: Request
    tokenizer: Tokenizer | None
    completion: Completion | None = None
    error: Exception | None = None
    most_unread: float = math.inf
    on_late: Callable[[], None] = lambda: None
    on_output: Callable[[], None] = lambda: None
    _token_ids: list[int] = field(default_factory=list)
    _logprobs: list[TokenLogprobs] = field(default_factory=list)
    _texts: list[str] = field(default_factory=list)  # of the whole answer
    _num_read_texts: int = 0
    _writing: RequestText = field(init=False)
    _reader: asyncio.Future[None] | None = None
    _reads_end_only: bool = False
    num_tokens: int = 0
    first_token_at: float = 0.0

    def __post_init__(self) -> None:
        self._writing = RequestText(self.tokenizer, self.request)

    @property
    def has_stopped(self) -> bool:
        """True if a stop text has ended the text. The engine does not know that by itself."""
        return self._writing.has_stopped

    @property
    def has_ended(self) -> bool:
        """True if nothing more comes."""
        return self.completion is not None or self.error is not None

    @property
    def is_empty(self) -> bool:
        """True if there is no chunk to read. A request that ends without an error has a last chunk with its reason."""
        return not self._token_ids and len(self._texts) == self._num_read_texts

    def add(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = (), completion: Completion | None = None
    ) -> None:
        """Takes in tokens of the request, with their logprobs if it asks for them, and its completion if it ends."""
        before, writing, text = self.num_tokens, self._writing, ""
        is_stop = completion is not None and completion.finish_reason == "stop"
        last = len(token_ids) - 1
        for place, token in enumerate(token_ids):
            if writing.has_stopped:
                break
            text += writing.end(token, is_text=False) if is_stop and place == last else writing.push(token)
        self.num_tokens = writing.num_tokens
        if completion is not None and not writing.has_stopped:
            text += writing.rest()
        num = self.num_tokens - before
        if num:
            self._token_ids += token_ids[:num]
            self._logprobs += logprobs[:num]
            self.first_token_at = self.first_token_at or time.perf_counter()
        if text:
            self._texts.append(text)
        if completion is not None:
            self._complete(completion)
        self._wake()
        if len(self._token_ids) > self.most_unread and not self.has_ended:
            self.on_late()

    def _complete(self, engines: Completion) -> None:
        completion = replace(engines, prompt_token_ids=self.request.prompt_token_ids, text="".join(self._texts))
        if self.has_stopped:  # the engine may have computed more tokens, or ended it for another reason meanwhile
            num = self.num_tokens
            completion = replace(
                completion,
                token_ids=completion.token_ids[:num],
                logprobs=completion.logprobs[:num],
                finish_reason="stop",
                error="",
            )
        self.completion = completion
        if completion.error:
            self.error = RequestFailed(completion)

    def fail(self, error: Exception) -> None:
        """Ends the request with an error."""
        self.error = error
        try:
            self._wake()
        except (Exception, asyncio.CancelledError) as raised:
            # on_output has raised it, and other requests wait for this call to return.
            logging.getLogger(__name__).error("the end of a request could not be reported", exc_info=raised)

    def take(self) -> OutputChunk:
        """Returns everything that can be read."""
        reason = self.completion.finish_reason if self.completion is not None and self.error is None else None
        text = "".join(self._texts[self._num_read_texts :])
        piece = OutputChunk(tuple(self._token_ids), text, reason, tuple(self._logprobs))
        self._token_ids, self._logprobs, self._num_read_texts = [], [], len(self._texts)
        return piece

    async def wait(self, *, end_only: bool) -> None:
        """Waits until there is something to read, or until the end. Raises WrongState for a second reader."""
        if self._reader is not None:
            raise WrongState("another task waits for this request; only one task at a time may")
        self._reader, self._reads_end_only = asyncio.get_running_loop().create_future(), end_only
        try:
            await self._reader
        finally:
            self._reader = None

    def release(self) -> None:
        """Ends the wait of its reader, if there is one."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _wake(self) -> None:
        try:
            self.on_output()
        finally:
            if self.has_ended or not self._reads_end_only:
                self.release()


class RequestStream:
    """The output of a request that is being served: iterate over its chunks, or wait for its completion.

    The request ends early and frees its pages when a task that waits here is cancelled, when an `async with` over the
    stream is left, on close(), and when the stream is garbage collected. A late reader gets several tokens in one
    chunk, and delays no other request.

    number: the request's number, for AsyncEngine.abort
    forget: ends the request with this number; may be called in any thread, and more than once
    """

    def __init__(self, number: int, inbox: Inbox, forget: Callable[[int], None]) -> None:
        self.number = number
        self._inbox, self._forget = inbox, forget
        self._is_over = False

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> OutputChunk:
        """The next piece. Raises RequestFailed and EngineEnded, after the pieces that came before."""
        while (piece := self.take()) is None:
            if self._is_over:
                raise StopAsyncIteration
            await self._wait(end_only=False)
        return piece

    def take(self) -> OutputChunk | None:
        """Returns the next chunk if there is one, else None. Raises like __anext__."""
        inbox = self._inbox
        if self._is_over or (inbox.is_empty and not inbox.has_ended):
            return None
        if inbox.is_empty and inbox.error is not None:
            self._is_over = True
            raise inbox.error
        piece = inbox.take()
        self._is_over = piece.finish_reason is not None
        return piece

    async def completion(self) -> Completion:
        """Waits for the end; returns the whole completion, also after chunks were read.

        Raises RequestFailed, EngineEnded, and WrongState if the stream is closed before the end.
        """
        if not self.has_ended:
            await self._wait(end_only=True)
        if self._inbox.error is not None:
            raise self._inbox.error
        if self._inbox.completion is None:
            raise WrongState(
                "the stream was closed before its request had ended; wait for the completion, then close the stream"
            )
        return self._inbox.completion

    @property
    def has_ended(self) -> bool:
        """True if nothing more comes except unread chunks."""
        return self._inbox.has_ended or self._is_over

    @property
    def num_tokens(self) -> int:
        """New tokens so far, read or not."""
        return self._inbox.num_tokens

    @property
    def first_token_at(self) -> float:
        """Time of the first token, in seconds of time.perf_counter(); 0 if there was none."""
        return self._inbox.first_token_at

    @property
    def ended_with(self) -> Completion | None:
        """The completion of a request that has ended in the engine, failed ones included; else None."""
        return self._inbox.completion

    def bound(self, most_unread: int, on_late: Callable[[], None]) -> None:
        """Calls on_late in the event loop whenever a token comes while more than most_unread tokens are unread.

        Raises BadSetting for no whole number of at least 0.
        """
        self._inbox.most_unread, self._inbox.on_late = whole_number("most_unread", most_unread, least=0), on_late

    def listen(self, on_output: Callable[[], None]) -> None:
        """Calls on_output in the event loop whenever take() has something to return or to raise."""
        self._inbox.on_output = on_output

    def give_up(self, error: Exception) -> None:
        """Ends the request, unless it has ended; its reader gets this error after the chunks so far."""
        if not self._inbox.has_ended:
            self._inbox.fail(error)
            self._forget(self.number)

    def close(self) -> None:
        """Ends the request, unless it has ended; no more chunks come. Never waits."""
        self._is_over = True
        if not self._inbox.has_ended:
            self._forget(self.number)
            self._inbox.release()

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    async def _wait(self, *, end_only: bool) -> None:
        try:
            await self._inbox.wait(end_only=end_only)
        except (asyncio.CancelledError, GeneratorExit):
            self.close()
            raise


def cached_tokens(streams: Sequence[RequestStream]) -> int:
    """Tokens of the prompts of requests that were found in the prefix cache; none of a request that has not ended."""
    ended = [stream.ended_with for stream in streams]
    return sum(each.cached_tokens for each in ended if each is not None)
