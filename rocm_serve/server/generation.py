"""Generation: the engine's requests for a job, and their results."""

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from rocm_attn.errors import FitsLater, RocmAttnError
from rocm_serve.async_engine import EngineClient
from rocm_serve.request import Completion, Request
from rocm_serve.request_stream import OutputChunk, RequestStream, cached_tokens
from rocm_serve.server.api_errors import ApiError, api_error
from rocm_serve.server.constraint_checks import ConstraintChecks
from rocm_serve.server.http_metrics import HttpMetrics
from rocm_serve.server.job import Job, Jobs
from rocm_serve.server.record import note_streams
from rocm_serve.server.replies import Usage
from rocm_serve.text.constraint import Constraint

# The least and the most seconds that a client is asked to wait.
LEAST_WAIT, MOST_WAIT = 1, 60
# The weight of the newest time in the running mean.
_SHARE = 0.1


class Pacing:
    """The running mean of the time per token, waiting included."""

    def __init__(self) -> None:
        self._token_seconds = 0.0

    def note(self, seconds: float, num_tokens: int) -> None:
        """Notes that a request has produced this many tokens in this time."""
        if num_tokens:
            newest = seconds / num_tokens
            share = _SHARE if self._token_seconds else 1.0
            self._token_seconds += share * (newest - self._token_seconds)

    def retry_after(self, jobs: Iterable[Job]) -> int:
        """Returns the seconds until the first of these jobs frees a place, if it uses all the tokens that it may."""
        left = (self._token_seconds * job.most_tokens - job.age for job in jobs if job.most_tokens)
        return min(max(LEAST_WAIT, math.ceil(min(left, default=0.0))), MOST_WAIT)


@dataclass(frozen=True, slots=True)
class Generation:
    """The requests of one job in the engine. Either all of them were taken, or none.

    num_choices: answers to each prompt, whose requests are next to each other
    """

    job: Job
    requests: Sequence[Request]
    streams: Sequence[RequestStream]
    num_choices: int
    pacing: Pacing

    async def completions(self) -> list[Completion]:
        """Returns all completions. Raises the errors of RequestStream.completion, and the one that ended the job."""
        completions = [await stream.completion() for stream in self.streams]
        self.note(sum(len(each.token_ids) for each in completions))
        return completions

    def usage(self, num_tokens: int) -> Usage:
        """Counts the tokens of the job, whose requests have all ended. num_tokens: new ones of all answers"""
        prompts, streams = self.requests[:: self.num_choices], self.streams[:: self.num_choices]
        return Usage(sum(len(each.prompt_token_ids) for each in prompts), num_tokens, cached_tokens(streams))

    def note(self, num_tokens: int) -> None:
        """Notes that all requests have ended, with this many tokens in total."""
        self.pacing.note(self.job.age, num_tokens // len(self.streams))


class Pieces:
    """The pieces of several streams as they come, for one reader.

    A slow reader gets several tokens in a piece, because a stream keeps all that was not read yet as one piece.

    num_left: streams that have not ended
    take_now: may take a piece where it comes, while the reader waits: True if it has taken that of this place. A task
              that is woken for each token would take most of the token's time. Not called for last pieces
    """

    def __init__(self, streams: Sequence[RequestStream], take_now: Callable[[int, RequestStream], bool]) -> None:
        self._streams, self.num_left, self._take_now = streams, len(streams), take_now
        self._due = dict.fromkeys(range(len(streams)))  # places of streams that may have a piece
        self._reader: asyncio.Future[None] | None = None
        for place, stream in enumerate(streams):
            stream.listen(partial(self._note, place))

    async def next(self) -> tuple[int, OutputChunk] | None:
        """Returns the place of a stream and its next piece; None after wake(). Raises like RequestStream.take()."""
        while True:
            while self._due:
                place = next(iter(self._due))
                piece = self._streams[place].take()
                if piece is None or piece.finish_reason is not None or not self._streams[place].has_ended:
                    del self._due[place]
                if piece is not None:
                    self.num_left -= piece.finish_reason is not None
                    return place, piece
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
            if not self._due:
                return None

    def wake(self) -> None:
        """Lets a reader that waits go on."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _note(self, place: int) -> None:
        stream, reader = self._streams[place], self._reader
        if reader is not None and not reader.done() and not stream.has_ended:
            try:
                if self._take_now(place, stream):
                    return
            except Exception as error:  # of this answer alone: other streams have tokens in the same step
                reader.set_exception(error)
                return
        self._due[place] = None
        self.wake()


class Generations:
    """Gives jobs' requests to the engine.

    counts:            of the HTTP requests
    max_unread_tokens: of a streamed answer
    """

    def __init__(self, front: EngineClient, jobs: Jobs, checks: ConstraintChecks, max_unread_tokens: int) -> None:
        self.front, self.jobs, self._checks, self._pacing, self.counts = front, jobs, checks, Pacing(), HttpMetrics()
        self.max_unread_tokens = max_unread_tokens

    @property
    def retry_after(self) -> int:
        """An estimate of the seconds until a place is free."""
        return self._pacing.retry_after(self.jobs)

    async def begin(self, job: Job, requests: Sequence[Request], num_choices: int) -> Generation:
        """Gives the engine all of a job's requests, or none. All have the same constraint, or none. Raises ApiError.

        num_choices: of Generation
        """
        try:
            constraint = requests[0].constraint
            if constraint is not None:
                await job.wait_for(self._check(constraint))
            job.check()
            streams = self.front.streams(requests)
        except RocmAttnError as error:
            raise self.as_answer(error) from error
        note_streams(requests, streams, num_choices)
        job.own(streams, requests)
        return Generation(job, requests, streams, num_choices, self._pacing)

    async def _check(self, constraint: Constraint) -> None:
        began = time.perf_counter()
        try:
            await self._checks.check(constraint)
        except FitsLater:
            self.counts.refused["constraints"] += 1
            raise
        finally:
            self.counts.constraint_seconds.note(time.perf_counter() - began)

    def as_answer(self, error: RocmAttnError) -> ApiError:
        """Converts an error to an answer."""
        return api_error(error, self.retry_after)
