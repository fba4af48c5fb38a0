"""Matching: finds the tokens that may come next in a text with a constraint. It uses llguidance, imported late."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as Many
from concurrent.futures import Future
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np

from rocm_attn.errors import BadRequest
from rocm_serve.text.constraint import MOST_COMPILING, Constraint, compiled_of, failed_of, tokens_of, why_failed
from rocm_serve.text.mask_threads import NUM_OF_EACH, Threads, mask_after
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
# A step waits no longer for masks, which is about the time of a step of a small model.
MOST_MASK_SECONDS = 0.005

_Key = tuple[Constraint, tuple[int, ...]]


class CompiledConstraint:
    """A compiled constraint. The texts of its copies share a lexer, which learns from each of them.

    The lexer's limits hold for all these texts together, and so does its failure: a text whose copy fails goes on with
    a matcher of its own, and later texts with another CompiledConstraint.

    matcher:    at the beginning of a text
    failed:     a matcher of the same tokens, in its state of error
    num_tokens: of the matchers, which may be more than the logits
    words:      of a mask of the logits
    again:      compiles the constraint again. Raises BadRequest

    first:      mask of the first token
    """

    def __init__(
        self, matcher: LLMatcher, failed: LLMatcher, num_tokens: int, words: int, again: Callable[[], LLMatcher]
    ) -> None:
        self.matcher, self.failed, self.num_tokens, self.words, self.again = matcher, failed, num_tokens, words, again
        self.first = self.mask_after(matcher.deep_copy(), ())
        self.has_failed = False

    def mask_after(self, matcher: LLMatcher, new: Many[int]) -> Int32Array:
        """The mask of one of its matchers after some more tokens. Raises BadRequest if the library gives up."""
        found = mask_after(matcher, new, self.failed, self.num_tokens)
        if isinstance(found, str):
            raise BadRequest(f"the constraint cannot be applied any further: {found}")
        return found[: self.words]


class TextMatcher:
    """The masks of one text with a constraint, one after another. Other threads compute them.

    compiled: the constraint
    threads:  for texts whose last mask was quick, and for the others
    computed: is notified of each mask

    num_asked: tokens of the text that the mask follows
    is_ready:  whether mask() may be called
    is_quick:  whether the last mask was computed within MOST_MASK_SECONDS
    was_late:  whether a step has gone on without the mask that is not ready yet
    why:       the reason why no token may follow, if the library has given up
    """

    def __init__(
        self, compiled: CompiledConstraint, threads: tuple[Threads, Threads], computed: threading.Condition
    ) -> None:
        self._compiled, self._computed = compiled, computed
        self._quick, self._slow = threads
        self._matcher, self._is_shared = compiled.matcher.deep_copy(), True
        self._mask: Int32Array = compiled.first
        self._text: list[int] = []
        self.num_asked = 0
        self.is_ready = self.is_quick = True
        self.was_late = False
        self.why = ""
        self.nothing: Int32Array = np.zeros_like(self._mask)  # a mask that allows no token

    def ask(self, new: Many[int]) -> None:
        """Begins to compute the mask after these further tokens of the text. The mask before must be ready."""
        assert self.is_ready, "a token is picked with its mask"
        self.num_asked += len(new)
        self.is_ready = self.was_late = False
        (self._quick if self.is_quick else self._slow).call(partial(self._compute, list(new)))

    def mask(self, banned: Collection[int]) -> Int32Array:
        """int32 [words], a bit for each token that may come next; it is ready.

        banned: tokens that are excluded too, as long as others are left
        Raises BadRequest if the library has given up.
        """
        assert self.is_ready
        if self.why:
            raise BadRequest(self.why)
        if banned:
            others: Int32Array = self._mask.copy()
            for token in banned:
                others[token // 32] &= ~np.int32(np.uint32(1 << (token % 32)).view(np.int32))
            if others.any():
                return others
        return self._mask

    def _compute(self, new: list[int], *, anew: bool = False) -> None:
        """Computes the mask after some more tokens, in the current thread.

        anew: from the beginning of the text on, with a lexer that no other text has
        """
        started = time.perf_counter()
        try:
            if anew:
                self._matcher, new = self._compiled.again(), self._text
            else:
                self._text += new
            self._mask = self._compiled.mask_after(self._matcher, new)
        except BaseException as error:  # a panic of the library is not an Exception
            if self._is_shared:  # another text may have brought the lexer to its limit
                self._compiled.has_failed, self._is_shared = True, False
                self._slow.call(partial(self._compute, new, anew=True))
                return
            self.why = str(error) if isinstance(error, BadRequest) else why_failed(error)
        with self._computed:
            self.is_quick = time.perf_counter() - started <= MOST_MASK_SECONDS
            self.is_ready = True
            self._computed.notify_all()


class Matching:
    """The constraints of one engine's requests. New ones are compiled in other threads.

    tokenizer:     of the model
    vocab_size:    of the logits
    eos_token_ids: tokens that end a text; if the model has none, a request brings its own
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._vocab_size, self._eos_token_ids = vocab_size, eos_token_ids
        # The library's tokenizer by the tokens that end a text. Raises BadRequest if it cannot read the model's.
        self._tokens_ending_in = lru_cache(_MOST_TOKENIZERS)(
            lambda ends: tokens_of(tokenizer.backend.to_str(), vocab_size, ends)
        )
        self._compiled: dict[_Key, Future[CompiledConstraint]] = {}  # least recently used first
        self._compile_threads = Threads(_AT_A_TIME)
        self._mask_threads = Threads(NUM_OF_EACH), Threads(NUM_OF_EACH)
        self.computed = threading.Condition()  # notified of each mask

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
        return TextMatcher(compiled, self._mask_threads, self.computed)

    def _key(self, constraint: Constraint, stop_token_ids: tuple[int, ...]) -> _Key:
        ends = self._eos_token_ids or stop_token_ids
        if not ends:
            raise BadRequest(
                "the model has no token that ends a text, which a constraint needs; give one in stop_token_ids"
            )
        return constraint, ends

    def _compiling(self, key: _Key) -> Future[CompiledConstraint]:
        """The future of a compiled constraint. Compiling begins if it is new, or has failed for a text."""
        compiling = self._compiled.pop(key, None)
        if compiling is None or _has_failed(compiling):
            compiling = Future()
            self._compile_threads.call(partial(self._finish, key, compiling))
        self._compiled[key] = compiling
        done = [each for each, future in self._compiled.items() if future.done()]
        for oldest in done[: max(0, len(done) - _MOST_KEPT)]:
            del self._compiled[oldest]
        return compiling

    def _finish(self, key: _Key, compiling: Future[CompiledConstraint]) -> None:
        """Compiles a constraint, in the current thread."""
        try:
            compiling.set_result(self._compiled_of(key))
        except BadRequest as error:
            compiling.set_exception(error)
        except BaseException as error:  # a panic of the library is not an Exception
            compiling.set_exception(BadRequest(why_failed(error)))

    def _compiled_of(self, key: _Key) -> CompiledConstraint:
        """Compiles a constraint that texts are to share. Raises BadRequest."""
        again, tokens = partial(self._compile, *key), self._tokens_ending_in(key[1])
        matcher, failed = again(), failed_of(tokens)
        return CompiledConstraint(matcher, failed, tokens.vocab_size, -(-self._vocab_size // 32), again)

    def _compile(self, constraint: Constraint, ends: tuple[int, ...]) -> LLMatcher:
        """Compiles a constraint. Raises BadRequest."""
        return compiled_of(constraint, self._tokens_ending_in(ends))


def _has_failed(compiling: Future[CompiledConstraint]) -> bool:
    """True if a constraint was compiled, and has failed for a text since then."""
    return compiling.done() and compiling.exception() is None and compiling.result().has_failed


def matching_of(loaded: LoadedModel) -> Matching | None:
    """The Matching of a model's texts; None without a tokenizer."""
    if loaded.tokenizer is None:
        return None
    return Matching(loaded.tokenizer, loaded.config.vocab_size, loaded.config.eos_token_ids)
