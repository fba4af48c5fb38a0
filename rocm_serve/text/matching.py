"""Matching: finds the tokens that may come next in a text with a constraint. It uses llguidance, imported late."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from rocm_attn.errors import BadRequest
from rocm_serve.text.constraint import MOST_COMPILING, Constraint, compiled_of, reason_of, tokens_of, why_failed
from rocm_serve.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # a server's front imports no torch
    from llguidance import LLMatcher

    from rocm_attn.batch.step_batch import Int32Array
    from rocm_serve.models.loading import LoadedModel

# Compiled constraints that are kept: a service sends the same few again and again.
_MOST_KEPT = 64
# Constraints that are compiled at the same time: other threads need cores too.
_AT_A_TIME = 2
# Tokenizers kept in the library's form, one for each set of tokens that ends texts; they take megabytes.
_MOST_TOKENIZERS = 4

_Key = tuple[Constraint, tuple[int, ...]]


class TextMatcher:
    """The matcher of one text with a constraint.

    matcher: at the beginning of the text, not shared
    words:   int32 words of a mask
    """

    def __init__(self, matcher: LLMatcher, words: int) -> None:
        self._matcher, self._words = matcher, words
        self._num_taken = 0
        self.nothing: Int32Array = np.zeros(words, np.int32)  # a mask that allows no token

    def mask(self, token_ids: Sequence[int], banned: Collection[int]) -> Int32Array:
        """int32 [words], a bit for each token that may come next.

        token_ids: the text so far; it continues the token_ids of the call before
        banned:    tokens that are excluded too, as long as others are left
        Raises BadRequest if the library has given up.
        """
        new, self._num_taken = token_ids[self._num_taken :], len(token_ids)
        if new:
            self._matcher.consume_tokens(list(new))
        mask: Int32Array = np.zeros(self._words, np.int32)
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            raise BadRequest(f"the constraint cannot be applied any further: {reason_of(self._matcher.get_error())}")
        if banned:
            others = mask.copy()
            for token in banned:
                others[token // 32] &= ~np.int32(np.uint32(1 << (token % 32)).view(np.int32))
            if others.any():
                mask = others
        return mask


class Matching:
    """The constraints of one engine's requests. New ones are compiled in other threads, which end when none is left.

    tokenizer:     of the model
    vocab_size:    of the logits
    eos_token_ids: tokens that end a text; if the model has none, a request brings its own
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, eos_token_ids
        self._tokens_ending_in = lru_cache(_MOST_TOKENIZERS)(self._read_tokens)
        self._compiled: dict[_Key, Future[LLMatcher]] = {}  # least recently used first
        self._waiting: deque[tuple[_Key, Future[LLMatcher]]] = deque()
        self._num_threads = 0
        self._lock = threading.Lock()  # guards _waiting and _num_threads

    def prepare(self) -> None:
        """Reads the tokenizer before a request waits for it, which takes a second. Raises BadRequest."""
        if self._eos_token_ids:
            self._tokens_ending_in(self._eos_token_ids)

    def has_room(self, constraint: Constraint, stop_token_ids: tuple[int, ...]) -> bool:
        """True if is_ready() may be called: it begins nothing, or fewer than MOST_COMPILING constraints are unfinished.

        has_room() itself begins nothing. Raises BadRequest.
        """
        if self._key(constraint, stop_token_ids) in self._compiled:
            return True
        return sum(not each.done() for each in self._compiled.values()) < MOST_COMPILING

    def is_ready(self, constraint: Constraint, stop_token_ids: tuple[int, ...]) -> bool:
        """True if matcher() does not wait. If False, compiling has begun when this returns. Raises BadRequest."""
        return self._compiling(self._key(constraint, stop_token_ids)).done()

    def matcher(self, constraint: Constraint, stop_token_ids: tuple[int, ...]) -> TextMatcher:
        """The matcher of a new text. stop_token_ids: of the request. Raises BadRequest with the library's reason."""
        key = self._key(constraint, stop_token_ids)
        try:
            compiled = self._compiling(key).result()
        except BadRequest:
            del self._compiled[key]
            raise
        return TextMatcher(compiled.deep_copy(), self._words)

    @property
    def _words(self) -> int:
        return -(-self._vocab_size // 32)

    def _key(self, constraint: Constraint, stop_token_ids: tuple[int, ...]) -> _Key:
        ends = self._eos_token_ids or stop_token_ids
        if not ends:
            raise BadRequest(
                "the model has no token that ends a text, which a constraint needs; give one in stop_token_ids"
            )
        return constraint, ends

    def _compiling(self, key: _Key) -> Future[LLMatcher]:
        """The future of a compiled constraint. Compiling begins if it is new."""
        compiling = self._compiled.pop(key, None)
        if compiling is None:
            compiling = Future()
            self._begin(key, compiling)
        self._compiled[key] = compiling
        done = [each for each, future in self._compiled.items() if future.done()]
        for oldest in done[: max(0, len(done) - _MOST_KEPT)]:
            del self._compiled[oldest]
        return compiling

    def _begin(self, key: _Key, compiling: Future[LLMatcher]) -> None:
        """Compiles a constraint once fewer than _AT_A_TIME others are being compiled, in at most as many threads."""
        with self._lock:
            self._waiting.append((key, compiling))
            if self._num_threads == _AT_A_TIME:
                return
            self._num_threads += 1
        # A daemon thread: the end of a process does not wait for it, as it would for a pool's.
        threading.Thread(target=self._run, name="rocm_attn constraint", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._num_threads -= 1
                    return
                key, compiling = self._waiting.popleft()
            try:
                compiling.set_result(self._compile(*key))
            except BadRequest as error:
                compiling.set_exception(error)
            except BaseException as error:  # a panic of the library is not an Exception
                compiling.set_exception(BadRequest(why_failed(error)))

    def _compile(self, constraint: Constraint, ends: tuple[int, ...]) -> LLMatcher:
        """Compiles a constraint. Raises BadRequest."""
        return compiled_of(constraint, self._tokens_ending_in(ends))

    def _read_tokens(self, ends: tuple[int, ...]) -> Any:
        """The library's tokenizer. Raises BadRequest if it cannot read the model's."""
        return tokens_of(self._tokenizer.backend.to_str(), self._vocab_size, ends)


def matching_of(loaded: LoadedModel) -> Matching | None:
    """The Matching of a model's texts; None without a tokenizer."""
    if loaded.tokenizer is None:
        return None
    return Matching(loaded.tokenizer, loaded.config.vocab_size, loaded.config.eos_token_ids)
