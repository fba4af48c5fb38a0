"""Request, its events and its Completion; and Sequence, the scheduler's state of a request."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from rocm_attn.errors import BadRequest, DeviceFault, RocmAttnError
from rocm_attn.machine.settings import check_fields, require_kind, whole_number
from rocm_serve.request_times import RequestTimes
from rocm_serve.sampling.logprobs import MOST_LIKELIEST, NO_LOGPROBS, TokenLogprobs
from rocm_serve.sampling.sampling_options import Sampling
from rocm_serve.text.characters import require_characters
from rocm_serve.text.constraint import Constraint

if TYPE_CHECKING:  # a server's front has requests, and imports no torch
    from rocm_serve.prefix_cache import CachedRow
    from rocm_serve.sampling.parameter_picker import RowParameters
    from rocm_serve.sampling.sampling import Sampler

FinishReason = Literal["stop", "length", "error", "abort"]

ALL_READ = -1

# Texts of Request.stop, and characters of each: every new token is searched for all of them.
MOST_STOPS = 64
LONGEST_STOP = 1024


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to be continued.

    prompt_token_ids: at least one; for a long prompt best an array of int32 (array("i"))
    max_new_tokens:   most new tokens, at least 1
    stop_token_ids:   tokens that end the text, in addition to the model's EOS tokens
    ignore_eos:       whether the model's EOS tokens do not end the text
    priority:         lower numbers are served first, and preempt running requests with higher numbers; equal ones are
                      served in order of submission. EngineOptions.priority_aging bounds how long better ones can keep a
                      request waiting
    cache_salt:       only requests with equal salts share cached prefixes. Give each tenant its own, so that no tenant
                      can find out from response times which prompts another one has sent
    prefix_caching:   whether this request may use cached prefixes and leave its own in the cache
    stop:             stop texts: the new text ends before them. At most 64, of 1 to 1,024 characters each; the first
                      one that occurs counts, and of several that end together the longest
    include_stop:     whether the new text includes the stop text
    min_tokens:       least number of new tokens: before it, no stop token is sampled, and stop texts count only if they
                      end in a later token
    logprobs:         number of likeliest tokens reported for each new token, 0 to 20, in addition to its own logprob;
                      NO_LOGPROBS (-1): neither
    prompt_logprobs:  the same for each token of the prompt except the first. Such a request bypasses the prefix cache,
                      because tokens of cached pages have no logits
    constraint:       structured output: the form that all of the new text must match. It needs a tokenizer, and the
                      extra `server`
    allowed_token_ids: the only tokens that may be sampled; (): all. The text ends early only if an end token is allowed
    detokenise:       whether the engine turns the new tokens into text; if not, `stop` must be empty

    Raises BadRequest.
    """

    prompt_token_ids: tuple[int, ...] | array[int]
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
    prompt_logprobs: int = NO_LOGPROBS
    allowed_token_ids: tuple[int, ...] = ()
    detokenise: bool = True

    def __post_init__(self) -> None:
        check_fields(self, BadRequest)
        if not isinstance(self.sampling, Sampling):
            raise BadRequest(f"sampling is {self.sampling!r}; it must be a Sampling")
        for name, of in (("stop_token_ids", "token ids"), ("stop", "texts"), ("allowed_token_ids", "token ids")):
            if not isinstance(getattr(self, name), tuple):
                raise BadRequest(f"{name} is {getattr(self, name)!r}; give a tuple of {of}")
        if not isinstance(self.prompt_token_ids, tuple | list | array):
            raise BadRequest(f"the prompt is a {type(self.prompt_token_ids).__name__}; give a tuple of token ids")
        if not self.prompt_token_ids:
            raise BadRequest("the prompt is empty; give at least one token")
        whole_number("max_new_tokens", self.max_new_tokens, BadRequest, least=1)
        if not 0 <= self.min_tokens <= self.max_new_tokens:
            raise BadRequest(
                f"min_tokens is {self.min_tokens}; it must be at least 0 and at most {self.max_new_tokens}, the most "
                "new tokens of the request"
            )
        for name in ("logprobs", "prompt_logprobs"):
            if not NO_LOGPROBS <= getattr(self, name) <= MOST_LIKELIEST:
                raise BadRequest(
                    f"{name} is {getattr(self, name)}; it must be {NO_LOGPROBS} (none), or the number of likeliest "
                    f"tokens, 0 to {MOST_LIKELIEST}"
                )
        if len(self.stop) > MOST_STOPS:
            raise BadRequest(f"stop has {len(self.stop)} texts; at most {MOST_STOPS} are allowed")
        if self.stop and not self.detokenise:
            raise BadRequest("detokenise is False and the request has stop texts; leave one of the two out")
        for text in self.stop:
            if not isinstance(text, str):
                raise BadRequest(f"stop has {text!r}; give a tuple of texts")
            if not 1 <= len(text) <= LONGEST_STOP:
                raise BadRequest(f"a text of stop has {len(text)} characters; it must have 1 to {LONGEST_STOP}")
            require_characters(text, "a text of stop")
        if self.constraint is not None:
            require_kind("constraint", self.constraint, Constraint, BadRequest)
        if self.constraint is not None and self.ignore_eos:
            raise BadRequest(
                "ignore_eos is set together with a constraint, which determines where the text ends; leave "
                "one of them out"
            )


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of a request.

    token_ids:     the new tokens, the stop token included
    text:          text of the new tokens, as it continues the prompt's, without the stop token and other special
                   tokens; empty without a tokenizer
    finish_reason: "stop" after a stop token or a stop text, "length" at max_new_tokens or at the longest KV length,
                   "error" if the request failed, "abort" if Engine.abort() has ended it
    error:         why it failed; empty if it did not. After a device fault the tokens may be wrong
    logprobs:      those of each new token if the request asks for them, else none
    cached_tokens: prompt tokens that were found in the prefix cache when the request was first admitted
    queue_seconds: from submission to its first step; 0 if it had none
    prompt_logprobs: those of each prompt token except the first, if the request asks for them, else none; fewer if it
                   ended before its prefill was complete
    is_own_fault:  whether it failed because its own options exclude every token

    Completions that differ only in cached_tokens and queue_seconds are equal.
    """

    prompt_token_ids: tuple[int, ...] | array[int]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    error: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    cached_tokens: int = field(default=0, compare=False)
    queue_seconds: float = field(default=0.0, compare=False)
    prompt_logprobs: Many[TokenLogprobs] = ()
    is_own_fault: bool = False


# A tuple: every token makes one, and a tuple takes a quarter of the time of a class with fields.
class TokenEvent(NamedTuple):
    """One new token.

    request:       number of the request, as submit() has returned it
    text:          the text that can be printed now. A character of several tokens comes with the last of them; text
                   that may be the beginning of a stop text comes with the token that decides it
    finish_reason: None unless this is the last token
    logprobs:      if the request asks for them, else None
    """

    request: int
    token_id: int
    text: str
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class FailureEvent:
    """A request has failed; it gets no more tokens. After a device fault, this may come for a request that had ended.

    request: as in TokenEvent
    text:    text that was held back
    error:   why, in a sentence
    """

    request: int
    text: str
    error: str


@dataclass(frozen=True, slots=True)
class AbortEvent:
    """Engine.abort() has ended a request; it gets no more tokens.

    request: as in TokenEvent
    text:    text that was held back
    """

    request: int
    text: str


Event = TokenEvent | FailureEvent | AbortEvent


class RequestsFailed(RocmAttnError, RuntimeError):
    """Some requests of Engine.generate() failed; the others were served to their end.

    completions: those of all requests, in the given order; that of a failed one has its error
    """

    def __init__(self, completions: Iterable[Completion], faults: Iterable[DeviceFault] = ()) -> None:
        self.completions = tuple(completions)
        failed = [(number, done.error) for number, done in enumerate(self.completions) if done.error]
        first = f"request {failed[0][0]}: {failed[0][1]}" if failed else "; ".join(map(str, faults))
        super().__init__(f"{len(failed)} of {len(self.completions)} requests failed; {first}")


class RequestsFaulted(RequestsFailed, DeviceFault):
    """RequestsFailed, because of a device fault."""


class SequenceParameters(Protocol):
    """The demands of a request beyond a draw; see SamplingParameters."""

    @property
    def needs_tokens(self) -> bool: ...
    @property
    def takes_drafts(self) -> bool: ...
    def of(self, sequence: Sequence, place: int) -> RowParameters: ...


@dataclass(slots=True, eq=False)
class Sequence:
    """A request while it is served.

    number:     number of the request, in order of submission
    stops:      tokens that end the text
    token_ids:  the prompt and the tokens generated so far; int32
    num_stored: tokens whose K and V are stored once all launched steps have run
    cached_row: its record in the prefix cache
    row:        row of the request table; 0 while it waits
    is_suspect: whether it may have caused a fault of a step that it was in; then it is recomputed alone
    times:      times since the request was accepted
    num_cached: tokens of the prompt that were in the prefix cache when it was first admitted
    pending_at: index of its unread token among those sampled in the last launched step; ALL_READ if the host has read
                all of them
    most_tokens: most tokens of prompt and text together; set by Scheduler.add
    parameters: what sampling needs in addition to random numbers, such as penalties; None: nothing
    is_plain:   whether each of its tokens is simply the likeliest one
    is_held:    whether steps go on without it, because the mask of its next token is not there
    level:      its priority, adjusted for age; see Scheduler.add
    """

    number: int
    request: Request
    stops: frozenset[int]
    sampler: Sampler
    token_ids: array[int]
    cached_row: CachedRow
    num_stored: int = 0
    row: int = 0
    is_suspect: bool = False
    times: RequestTimes = field(default_factory=RequestTimes)
    num_cached: int = 0
    pending_at: int = ALL_READ
    most_tokens: int = 0
    parameters: SequenceParameters | None = None
    is_held: bool = False
    is_plain: bool = field(init=False)
    level: int = field(init=False)

    def __post_init__(self) -> None:
        self.is_plain = self.sampler.is_greedy and self.parameters is None
        self.level = self.request.priority

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the text, including the one that was not read yet."""
        return len(self.token_ids) + (self.pending_at != ALL_READ)

    @property
    def num_left(self) -> int:
        """Tokens to be stored before the next one can be picked; 1 while it decodes."""
        return len(self.token_ids) + (self.pending_at != ALL_READ) - self.num_stored

    @property
    def urgency(self) -> tuple[int, int]:
        """Sort key of sequences: they are served by level, then by age."""
        return self.level, self.number

    @property
    def num_new(self) -> int:
        """Tokens generated so far, including the one that was not read yet."""
        return self.num_tokens - len(self.request.prompt_token_ids)

    @property
    def new_token_ids(self) -> tuple[int, ...]:
        """The tokens that were generated and read so far."""
        return tuple(self.token_ids[len(self.request.prompt_token_ids) :])

    @property
    def num_read(self) -> int:
        """Number of new_token_ids."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)
