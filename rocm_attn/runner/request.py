"""Request, what comes back for it, and its state while it is served."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from rocm_attn.batch.step_batch import INT32_MAX
from rocm_attn.errors import BadRequest, DeviceFault, RocmAttnError
from rocm_attn.runner.asking_picker import RowAsk
from rocm_attn.runner.constraint import Constraint
from rocm_attn.runner.logprobs import MOST_LIKELIEST, NO_LOGPROBS, TokenLogprobs
from rocm_attn.runner.prefix_cache import CachedRow
from rocm_attn.runner.request_times import RequestTimes
from rocm_attn.runner.sampling import Sampler
from rocm_attn.runner.sampling_options import Sampling

FinishReason = Literal["stop", "length", "error", "abort"]

ALL_READ = -1

# Texts of Request.stop, and characters of each: all of them are looked for at each new token.
MOST_STOPS = 64
LONGEST_STOP = 1024


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to be continued.

    prompt_token_ids: at least one
    max_new_tokens:   the text ends after so many, at the latest; at least 1
    stop_token_ids:   tokens that end the text, on top of the model's own
    ignore_eos:       whether the model's own end tokens are passed over
    priority:         a request with a lower number is served first, and takes the pages and the place of running ones
                      with higher numbers; among equals the order of submission counts
    cache_salt:       cached prefixes are shared by requests of one salt: give each tenant one of its own, so that none
                      can tell by the time that it takes which prompts another one has sent
    prefix_caching:   whether this request may find cached prefixes and leave its own in the cache
    stop:             texts that end the text before they begin, at most 64, of 1 to 1,024 characters each; the first
                      one that the text comes to counts, and of several that end together the longest
    include_stop:     whether the text ends after such a text, and not before it
    min_tokens:       so many new tokens come at least: before, no stop token is picked, and texts of `stop` count only
                      where they end in a later token
    logprobs:         how many of the likeliest tokens are told of each new token, 0 to 20, beside its own logprob;
                      NO_LOGPROBS (-1): neither
    constraint:       what the new text must match from beginning to end; it needs a tokenizer and the extra [serve]

    Raises BadRequest.
    """

    prompt_token_ids: tuple[int, ...]
    max_new_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    priority: int = 0
    cache_salt: str = ""
    prefix_caching: bool = True
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    logprobs: int = NO_LOGPROBS
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise BadRequest("the prompt is empty; give at least one token")
        if self.max_new_tokens < 1:
            raise BadRequest(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if not 0 <= self.min_tokens <= self.max_new_tokens:
            raise BadRequest(
                f"min_tokens is {self.min_tokens}; it must be at least 0 and at most max_new_tokens, "
                f"which is {self.max_new_tokens}"
            )
        if not NO_LOGPROBS <= self.logprobs <= MOST_LIKELIEST:
            raise BadRequest(
                f"logprobs is {self.logprobs}; it must be {NO_LOGPROBS} (none), or the number of likeliest tokens, "
                f"0 to {MOST_LIKELIEST}"
            )
        if isinstance(self.stop, str):
            raise BadRequest(f"stop is the text {self.stop!r}; give a tuple of texts")
        if len(self.stop) > MOST_STOPS:
            raise BadRequest(f"stop has {len(self.stop)} texts; at most {MOST_STOPS} are allowed")
        for text in self.stop:
            if not 1 <= len(text) <= LONGEST_STOP:
                raise BadRequest(f"a text of stop has {len(text)} characters; it must have 1 to {LONGEST_STOP}")
        if self.constraint is not None and self.ignore_eos:
            raise BadRequest("ignore_eos is set and a constraint says where the text ends; leave one of them out")


@dataclass(frozen=True, slots=True)
class Completion:
    """What a request came to.

    token_ids:     the new tokens, the stop token included
    text:          of the new tokens, without the stop token and other special ones; empty without a tokenizer
    finish_reason: "stop" after a stop token or a text of Request.stop, "length" at max_new_tokens or where the KV may
                   not grow any more, "error" where the request failed, "abort" where Engine.abort() has ended it
    error:         why it failed; empty where it did not. After a fault of the device the tokens may be wrong
    logprobs:      of each new token where the request asks for them, else none
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    error: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()


# A tuple: every token makes one, and these are made in a quarter of the time of a class with fields.
class TokenEvent(NamedTuple):
    """One new token.

    request:       number of the request, in the order of submission
    text:          what can be printed now; a character that needs several tokens comes with the last of them, and what
                   may begin a text of Request.stop with the token that decides it
    finish_reason: None while there is more to come
    logprobs:      where the request asks for them, else None
    """

    request: int
    token_id: int
    text: str
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class FailureEvent:
    """A request has failed, and no more tokens come. After a fault of the device that may be one that had ended.

    request: as in TokenEvent
    text:    what was held back
    error:   why, in a sentence
    """

    request: int
    text: str
    error: str


@dataclass(frozen=True, slots=True)
class AbortEvent:
    """Engine.abort() has ended a request, and no more tokens come.

    request: as in TokenEvent
    text:    what was held back
    """

    request: int
    text: str


Event = TokenEvent | FailureEvent | AbortEvent


class RequestsFailed(RocmAttnError, RuntimeError):
    """Some requests of Engine.generate() failed; the others were served to their end.

    completions: of all of them, in the order in which they were given; a failed one says why
    """

    def __init__(self, completions: Iterable[Completion], faults: Iterable[DeviceFault] = ()) -> None:
        self.completions = tuple(completions)
        failed = [(number, done.error) for number, done in enumerate(self.completions) if done.error]
        first = f"request {failed[0][0]}: {failed[0][1]}" if failed else "; ".join(map(str, faults))
        super().__init__(f"{len(failed)} of {len(self.completions)} requests failed; {first}")


class RequestsFaulted(RequestsFailed, DeviceFault):
    """RequestsFailed, because something went wrong on the device."""


class Asking(Protocol):
    """What a request asks for beyond a draw; see asks.Asks."""

    @property
    def needs_tokens(self) -> bool: ...
    @property
    def takes_drafts(self) -> bool: ...
    def stays_from(self, place: int) -> bool:
        """Whether rows are shaped alike from new token number `place` on, whatever comes, and no more is asked for."""
        ...

    def of(self, sequence: Sequence, place: int) -> RowAsk: ...


@dataclass(slots=True, eq=False)
class Sequence:
    """A request while it is served.

    number:     in the order of submission
    stops:      tokens that end the text
    token_ids:  the prompt and what was generated
    num_stored: tokens whose K and V are in the pool when all steps have run that were launched
    cached_row: what the prefix cache knows of it
    row:        of the request table; 0 while it waits
    is_suspect: whether a step in which it was had a fault that may be its own; then it is computed again alone
    times:      since the request was taken
    unread_at:  its place among the picks of the step that was launched last, whose token the host has not read yet;
                ALL_READ where there is none
    most_tokens: of prompt and text together: with so many the text ends
    asks:       what its tokens are picked with beside draws; None: nothing
    is_plain:   whether each of its tokens is simply the likeliest one
    """

    number: int
    request: Request
    stops: frozenset[int]
    sampler: Sampler
    token_ids: list[int]
    cached_row: CachedRow
    num_stored: int = 0
    row: int = 0
    is_suspect: bool = False
    times: RequestTimes = field(default_factory=RequestTimes)
    unread_at: int = ALL_READ
    most_tokens: int = INT32_MAX
    asks: Asking | None = None
    is_plain: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_plain = self.sampler.is_greedy and self.asks is None

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, and what was generated: the one that was not read yet, too."""
        return len(self.token_ids) + (self.unread_at != ALL_READ)

    @property
    def num_left(self) -> int:
        """Tokens to be stored before the next one can be picked; 1 while it decodes."""
        return len(self.token_ids) + (self.unread_at != ALL_READ) - self.num_stored

    @property
    def urgency(self) -> tuple[int, int]:
        """Sequences are served in this order: by priority, then by age."""
        return self.request.priority, self.number

    @property
    def num_new(self) -> int:
        """Tokens that were generated so far, the one that was not read yet too."""
        return self.num_tokens - len(self.request.prompt_token_ids)

    @property
    def new_token_ids(self) -> tuple[int, ...]:
        """What was generated and read so far."""
        return tuple(self.token_ids[len(self.request.prompt_token_ids) :])

    @property
    def num_read(self) -> int:
        """How many these are."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)
