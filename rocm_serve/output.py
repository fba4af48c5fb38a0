"""Output: a request's output so far: tokens, text and logprobs."""

import time
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from rocm_attn.batch.step_batch import Int32Array
from rocm_serve.request import AbortEvent, Completion, Event, FailureEvent, FinishReason, Sequence, TokenEvent
from rocm_serve.sampling.logprobs import ManyLogprobs, TokenLogprobs
from rocm_serve.text.request_text import RequestText
from rocm_serve.text.tokenizer import Tokenizer

# Makes an event of its fields, in half the time: TokenEvent(...) is a function of Python.
_new = tuple.__new__


@dataclass(slots=True, eq=False)
class Output:
    """The result of a request so far.

    tokenizer:  None: there is no text, and nothing that could end it
    num_tokens: new tokens of the sequence that were published
    prompt_words: logprobs of the prompt's tokens from the second on that steps have taken in; see PromptPart
    num_likeliest: of each of these tokens
    reason:     why it has ended; None: it goes on
    error:      why it has failed
    is_own_fault: see Completion
    """

    sequence: Sequence
    tokenizer: Tokenizer | None
    text: str = ""
    num_tokens: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_words: bytearray = field(default_factory=bytearray)
    num_likeliest: int = 0
    reason: FinishReason | None = None
    error: str = ""
    is_own_fault: bool = False
    _written: RequestText = field(init=False)

    def __post_init__(self) -> None:
        self._written = RequestText(self.tokenizer, self.sequence.request)

    def take(
        self,
        token_ids: Many[int],
        reason: FinishReason | None,
        logprobs: Many[TokenLogprobs],
        events: list[Event],
    ) -> bool:
        """Takes in the tokens of a step, at least one, and adds their events to a list. True if it has ended.

        Tokens after one that completes a text of Request.stop are dropped.
        reason:   why it ends with the last token; None: its tokens do not end it
        logprobs: of each of them, or none
        """
        if self.tokenizer is None and not logprobs:
            number = self.sequence.number
            for token in token_ids:
                events.append(_new(TokenEvent, (number, token, "", None, None)))
            self.num_tokens += len(token_ids)
            if reason is not None:
                self.reason = reason
                events[-1] = TokenEvent(number, token_ids[-1], "", reason)
            return reason is not None
        new, self.reason = self._with_text(token_ids, reason, logprobs)
        self.text += "".join([event.text for event in new])
        self.logprobs += logprobs[: len(new)]
        self.num_tokens += len(new)
        events += new
        return self.reason is not None

    def end_early(self, reason: FinishReason, error: str, events: list[Event]) -> None:
        """Ends it with the tokens published so far, and adds the event of that to a list.

        error: why it has failed; empty if it was aborted
        """
        number, piece = self.sequence.number, self._written.rest()  # for example of an incomplete character
        self.text, self.reason, self.error = self.text + piece, reason, error
        events.append(FailureEvent(number, piece, error) if error else AbortEvent(number, piece))

    @property
    def seconds(self) -> float:
        """Seconds since the request was taken."""
        return time.perf_counter() - self.sequence.times.taken

    def completion(self) -> Completion:
        """The completion of a request that has ended."""
        assert self.reason is not None, "it has ended"
        new = self.sequence.new_token_ids[: self.num_tokens]
        prompt, times = self.sequence.request.prompt_token_ids, self.sequence.times
        return Completion(
            prompt,
            new,
            self.text,
            self.reason,
            self.error,
            tuple(self.logprobs),
            self.sequence.num_cached,
            times.queue_seconds,
            self._prompt_logprobs(),
            self.is_own_fault,
        )

    def take_prompt(self, first: int, words: Int32Array) -> None:
        """Takes in the logprobs of tokens of the prompt, from the place `first` on; see PromptPart."""
        self.num_likeliest = words.shape[1] // 2
        del self.prompt_words[4 * words.shape[1] * (first - 1) :]
        self.prompt_words += words.tobytes()

    def _prompt_logprobs(self) -> Many[TokenLogprobs]:
        if not self.prompt_words:
            return ()
        num = len(self.prompt_words) // (4 * (1 + 2 * self.num_likeliest))
        return ManyLogprobs(self.sequence.token_ids[1 : 1 + num], bytes(self.prompt_words), self.num_likeliest)

    def _with_text(
        self, token_ids: Many[int], reason: FinishReason | None, logprobs: Many[TokenLogprobs]
    ) -> tuple[list[TokenEvent], FinishReason | None]:
        """The events of tokens, and the reason why the request ends, if it does. Publishes nothing."""
        events: list[TokenEvent] = []
        why: FinishReason | None = None
        for place, token in enumerate(token_ids):
            why = reason if place == len(token_ids) - 1 else None
            piece = self._written.push(token) if why is None else self._written.end(token, is_text=why != "stop")
            if self._written.has_stopped:
                why = "stop"
            emitted = logprobs[place] if logprobs else None
            events.append(TokenEvent(self.sequence.number, token, piece, why, emitted))
            if why is not None:
                break
        return events, why
