"""SamplingParameters: what sampling needs in addition to random numbers: penalties, biases, masks, logprobs."""

import math

import numpy as np

from rocm_attn.batch.step_batch import Int32Array
from rocm_attn.errors import BadRequest
from rocm_serve.request import Request, Sequence
from rocm_serve.sampling.logprobs import NO_LOGPROBS
from rocm_serve.sampling.parameter_picker import NO_BIASES, Biases, RowParameters, RowShape
from rocm_serve.sampling.sampling_options import Sampling
from rocm_serve.sampling.token_counts import CountedText
from rocm_serve.text.matching import TextMatcher


class SamplingParameters:
    """The parts of one request that go beyond a draw.

    stops:      tokens that end its text
    matcher:    of its constraint, if it has one
    vocab_size: tokens have ids below it

    needs_tokens: True if the host must know all tokens of the text before the next one is picked
    takes_drafts: True if its tokens may be picked after draft tokens. False if a pick depends on all tokens before it
                  and only accepted tokens can be taken into account
    """

    def __init__(self, request: Request, stops: frozenset[int], matcher: TextMatcher | None, vocab_size: int) -> None:
        self._sampling, self._min_tokens, self._num_likeliest = request.sampling, request.min_tokens, request.logprobs
        self._stops, self._matcher = stops, matcher
        self.needs_tokens = matcher is not None
        self.takes_drafts = matcher is None and not self._sampling.has_penalties
        biases = self._sampling.logit_bias
        self._biases = _biases_of(biases)
        self._early_biases = _biases_of((*biases, *((token, -math.inf) for token in sorted(stops))))
        self._top_k, self._depth = _cut_of(self._sampling)
        self._allowed = _mask_of(request.allowed_token_ids, vocab_size) if request.allowed_token_ids else None

    def of(self, sequence: Sequence, place: int) -> RowParameters:
        """Returns the RowParameters of new token number `place`, counted from 0."""
        return RowParameters(self._shape(sequence, place), self._num_likeliest)

    def _shape(self, sequence: Sequence, place: int) -> RowShape | None:
        is_early, sampling = place < self._min_tokens, self._sampling
        counted, mask, why = None, None, ""
        if sampling.has_penalties:
            counted = CountedText(
                sequence.number, sequence.token_ids, len(sequence.request.prompt_token_ids), sequence.pending_at
            )
        if self._matcher is not None:
            assert self._matcher.num_asked == sequence.num_read
            try:
                mask = self._matcher.mask(self._stops if is_early else ())
            except BadRequest as error:
                mask, why = self._matcher.nothing, str(error)
        if self._allowed is not None:
            mask = self._allowed if mask is None else mask & self._allowed
        biases = self._early_biases if is_early and self._matcher is None else self._biases
        if counted is None and mask is None and not len(biases[0]) and not self._top_k and self._depth == -math.inf:
            return None
        penalties = sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty
        return RowShape(penalties, counted, biases, mask, self._top_k, self._depth, why)


def sampling_parameters_of(
    request: Request, stops: frozenset[int], matcher: TextMatcher | None, vocab_size: int
) -> SamplingParameters | None:
    """The SamplingParameters of a request; None if it asks only for a draw, or for the likeliest token."""
    sampling = request.sampling
    needs_shape = sampling.has_penalties or sampling.logit_bias or _cut_of(sampling) != _cut_of(Sampling())
    is_held_on = request.allowed_token_ids or (request.min_tokens > 0 and stops)
    if needs_shape or is_held_on or matcher is not None or request.logprobs != NO_LOGPROBS:
        return SamplingParameters(request, stops, matcher, vocab_size)
    return None


def _cut_of(sampling: Sampling) -> tuple[int, float]:
    """top_k and depth; see RowShape. A greedy request needs neither: both always keep the likeliest token."""
    if sampling.is_greedy:
        return 0, -math.inf
    return sampling.top_k, sampling.temperature * math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf


def _mask_of(token_ids: tuple[int, ...], vocab_size: int) -> Int32Array:
    """int32 [vocab_size / 32, rounded up], a bit for each of the tokens; see RowShape."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def _biases_of(pairs: tuple[tuple[int, float], ...]) -> Biases:
    if not pairs:
        return NO_BIASES
    ids, values = zip(*pairs, strict=True)
    return np.array(ids, np.int64), np.array(values, np.float32)
