"""Sends a trace of requests, and reports the results."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from rocm_attn.errors import BadSetting
from rocm_lab.bench.request_trace import PREFIX_BLOCK, RequestTrace, TracedRequest

_PERCENTS = (50, 90, 99)
# Ids below this one are often special.
FIRST_TOKEN_ID = 3
_GIVEN_UP = "given up"


@dataclass(slots=True)
class RequestRecord:
    """The record of one request, in seconds of time.perf_counter(), filled in while it is served.

    sent:    when it was sent
    pieces:  when each piece of its text came
    tokens:  new tokens that came
    ended:   when it ended
    failure: why it failed, in a few words; empty if it did not
    """

    sent: float
    pieces: list[float] = field(default_factory=list)
    tokens: int = 0
    ended: float = 0.0
    failure: str = ""


# Sends a request, and waits for its end. Failures are noted in the record, not raised.
Sending = Callable[[RequestRecord], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The settings of sending requests.

    concurrency: the most requests in flight; later ones wait, which their times do not show
    vocabulary:  prompts are made of token ids from FIRST_TOKEN_ID up to this one, excluded
    seed:        of the prompts
    max_seconds: the time after which requests in flight are given up, and counted as failed
    processes:   that share the requests to a server
    """

    concurrency: int = 256
    vocabulary: int = 1000
    seed: int = 0
    max_seconds: float = 3600.0
    processes: int = 1

    def __post_init__(self) -> None:
        if self.vocabulary <= FIRST_TOKEN_ID:
            raise BadSetting(f"a vocabulary of {self.vocabulary} ids; give more than {FIRST_TOKEN_ID}")


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Quantiles of times in seconds; NaN without any."""

    count: int
    mean: float
    percentiles: tuple[float, ...]

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Quantiles:
        """Computes them by linear interpolation between the two nearest."""
        if not seconds:
            return cls(0, float("nan"), (float("nan"),) * len(_PERCENTS))
        return cls(len(seconds), float(np.mean(seconds)), tuple(np.percentile(seconds, _PERCENTS).tolist()))

    def as_json(self) -> dict[str, float]:
        """Returns them for a result file, in milliseconds."""
        named = {f"p{percent}_ms": 1e3 * value for percent, value in zip(_PERCENTS, self.percentiles, strict=True)}
        return {"count": self.count, "mean_ms": 1e3 * self.mean, **named}

    def __str__(self) -> str:
        named = zip(_PERCENTS, self.percentiles, strict=True)
        return ", ".join(f"p{percent} {1e3 * value:.1f} ms" for percent, value in named)


@dataclass(frozen=True, slots=True)
class ServingResult:
    """The results of a trace.

    seconds:      from the first request to the last end
    first_token:  time to first token: from a request to its first piece
    token_gap:    between pieces of a request; a piece may hold several tokens
    token_mean:   per token, of a request's tokens after the first one
    whole:        from a request to its end
    failures:     reason -> requests
    joules:       while it ran; NaN if nothing counts them
    """

    requests: int
    seconds: float
    prompt_tokens: int
    output_tokens: int
    requested_tokens: int
    first_token: Quantiles
    token_gap: Quantiles
    token_mean: Quantiles
    whole: Quantiles
    failures: dict[str, int]
    joules: float = float("nan")

    @property
    def num_failed(self) -> int:
        """The number of requests that failed."""
        return sum(self.failures.values())

    def as_json(self) -> dict[str, Any]:
        """Returns the result for a result file."""
        times = {name: getattr(self, name).as_json() for name in ("first_token", "token_gap", "token_mean", "whole")}
        facts = {name: value for name, value in asdict(self).items() if name not in times and value == value}
        found = {**facts, **times, "output_tokens_per_s": self.output_tokens / self.seconds}
        if self.joules == self.joules and self.output_tokens:
            found["joules_a_token"] = self.joules / self.output_tokens
        return found

    def lines(self) -> list[str]:
        """Returns the result in words."""
        served = self.requests - self.num_failed
        total = (self.prompt_tokens + self.output_tokens) / self.seconds
        lines = [
            f"{served} of {self.requests} requests in {self.seconds:.2f} s, {served / self.seconds:.2f} per second",
            f"tokens per second: {self.output_tokens / self.seconds:.1f} new, {total:.1f} including prompts",
            f"time to first token (TTFT): {self.first_token}",
            f"time between tokens (ITL): {self.token_gap}",
            f"time per token after the first (TPOT): {self.token_mean}",
            f"whole request: {self.whole}",
        ]
        if self.output_tokens != self.requested_tokens:
            lines.append(f"{self.output_tokens} of {self.requested_tokens} requested tokens were generated")
        lines += [f"FAILED: {count} requests: {reason}" for reason, count in self.failures.items()]
        if self.joules == self.joules and self.output_tokens:
            lines.append(f"energy: {self.joules / self.output_tokens:.4g} J per new token")
        return lines


async def send_all(
    requests: Sequence[TracedRequest],
    sendings: Sequence[Sending],
    options: LoadOptions,
    begin: float,
) -> list[RequestRecord]:
    """Sends each request when it arrives after `begin`, a time of time.perf_counter(), and waits for all of them.

    If its task is cancelled, it gives up the requests in flight and returns what came until then.
    """
    room = asyncio.Semaphore(options.concurrency)
    outcomes: list[RequestRecord] = []

    async def one(request: TracedRequest, sending: Sending) -> None:
        await asyncio.sleep(max(0.0, begin + request.arrival_s - time.perf_counter()))
        async with room:
            outcome = RequestRecord(time.perf_counter())
            outcomes.append(outcome)
            try:
                await sending(outcome)
            except BaseException:
                # Now: its connection ends later, and would be another reason.
                outcome.failure = outcome.failure or _GIVEN_UP
                raise
            finally:
                outcome.ended = time.perf_counter()

    tasks = [asyncio.ensure_future(one(*each)) for each in zip(requests, sendings, strict=True)]
    until = f"within {options.max_seconds:g} s"
    try:
        done, late = await asyncio.wait(tasks, timeout=options.max_seconds)
        for task in done:
            task.result()
    except asyncio.CancelledError:
        late, until = set(tasks), "before the interrupt"
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    for outcome in outcomes:
        if outcome.failure == _GIVEN_UP:
            outcome.failure = f"not done {until}"
    never_sent, now = len(tasks) - len(outcomes), time.perf_counter()
    return outcomes + [RequestRecord(now, ended=now, failure=f"not sent {until}") for _ in range(never_sent)]


def result_of(trace: RequestTrace, outcomes: Sequence[RequestRecord], seconds: float, joules: float) -> ServingResult:
    """The results of a trace by the records of its requests."""
    served = [outcome for outcome in outcomes if not outcome.failure]
    gaps = [after - before for each in served for before, after in zip(each.pieces, each.pieces[1:], strict=False)]
    return ServingResult(
        requests=len(outcomes),
        seconds=seconds,
        prompt_tokens=sum(request.prompt_tokens for request in trace.requests),
        output_tokens=sum(outcome.tokens for outcome in outcomes),
        requested_tokens=sum(request.output_tokens for request in trace.requests),
        first_token=Quantiles.of([each.pieces[0] - each.sent for each in served if each.pieces]),
        token_gap=Quantiles.of(gaps),
        token_mean=Quantiles.of(
            [
                (each.pieces[-1] - each.pieces[0]) / (each.tokens - 1)
                for each in served
                if each.tokens > 1 and each.pieces
            ]
        ),
        whole=Quantiles.of([each.ended - each.sent for each in served]),
        failures=dict(Counter(outcome.failure for outcome in outcomes if outcome.failure)),
        joules=joules,
    )


def prompts_of(trace: RequestTrace, options: LoadOptions) -> list[list[int]]:
    """Returns random token ids. Blocks of a prefix with the same id are the same in all prompts."""
    return [
        _prompt(request, options, lambda key: random.Random(f"{options.seed}/{key}"), number)
        for number, request in enumerate(trace.requests)
    ]


def _prompt(
    request: TracedRequest, options: LoadOptions, chooser: Callable[[str], random.Random], number: int
) -> list[int]:
    ids: list[int] = []
    for block in request.prefix:
        ids += _ids(chooser(f"block {block}"), min(PREFIX_BLOCK, request.prompt_tokens - len(ids)), options.vocabulary)
    return ids + _ids(chooser(f"request {number}"), request.prompt_tokens - len(ids), options.vocabulary)


def _ids(chooser: random.Random, count: int, vocabulary: int) -> list[int]:
    return [chooser.randrange(FIRST_TOKEN_ID, vocabulary) for _ in range(max(0, count))]
