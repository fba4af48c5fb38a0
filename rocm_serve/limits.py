"""RequestLimits: checks whether an engine can ever serve a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rocm_attn.errors import BadRequest
from rocm_serve.request import Request
from rocm_serve.text.constraint import library

if TYPE_CHECKING:  # an engine's process begins before tokenizers is imported
    from rocm_serve.text.tokenizer import Tokenizer


class ContextExceeded(BadRequest):
    """A prompt, or a prompt with its answer, is longer than the model's context or than the pool's sequences."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits of one engine.

    context_len: tokens that the model was made for
    max_kv_len:  tokens of the longest sequence in the pool
    vocab_size:  tokens have ids below it
    tokenizer:   of the model; None: tokens have no texts
    """

    context_len: int
    max_kv_len: int
    vocab_size: int
    tokenizer: Tokenizer | None

    @property
    def max_len(self) -> int:
        """The most tokens of a prompt and its answer together."""
        return min(self.context_len, self.max_kv_len)

    def room(self, prompt_len: int) -> int:
        """The most new tokens after a prompt, at least 0."""
        return max(0, self.max_len - prompt_len)

    def check_room(self, prompt_len: int, max_new_tokens: int) -> None:
        """Raises ContextExceeded for a request whose answer may not fit. An engine would end it early: "length"."""
        if max_new_tokens > self.room(prompt_len):
            raise ContextExceeded(
                f"the prompt has {prompt_len} tokens and the answer may have {max_new_tokens}, together "
                f"{prompt_len + max_new_tokens}, and the context holds {self.max_len}; shorten the prompt, or lower "
                "max_tokens"
            )

    def check(self, request: Request) -> None:
        """Raises BadRequest for a request that the engine can never serve."""
        if not isinstance(request, Request):
            raise BadRequest(f"the request is a {type(request).__name__}; give a Request")
        prompt = request.prompt_token_ids
        if len(prompt) > self.context_len:
            raise ContextExceeded(
                f"the prompt has {len(prompt)} tokens and the model's context is {self.context_len}; shorten it"
            )
        if len(prompt) > self.max_kv_len:
            raise ContextExceeded(
                f"the prompt has {len(prompt)} tokens and the KV pool holds sequences of up to {self.max_kv_len}; "
                "shorten it, or raise max_kv_len, kv_bytes or num_pages"
            )
        if (request.stop or request.constraint is not None) and self.tokenizer is None:
            what = "stop texts" if request.stop else "a constraint"
            raise BadRequest(f"the request has {what} and the model has no tokenizer; leave them out")
        if request.constraint is not None:
            library()
        biased = (token for token, _ in request.sampling.logit_bias)
        self.check_tokens(prompt)
        self.check_tokens((*request.stop_token_ids, *biased, *request.allowed_token_ids))

    def check_tokens(self, token_ids: Sequence[int]) -> None:
        """Raises BadRequest for a token that the model does not have."""
        import numpy as np  # here, because an engine's process begins before numpy is imported

        try:
            ids = np.asarray(token_ids)  # an array is read in place
        except ValueError:
            raise BadRequest("a token id is a list or an array; give whole numbers") from None
        is_plain = ids.ndim == 1 and ids.dtype.kind in "iu"
        if token_ids and not is_plain and not all(type(token) is int for token in token_ids):  # beyond 64 bits
            raise BadRequest(f"the token ids are of type {ids.dtype}; give whole numbers")
        for token in (ids.min(), ids.max()) if token_ids else ():
            if not 0 <= token < self.vocab_size:
                raise BadRequest(f"token {token} is not in the model's vocabulary, 0 to {self.vocab_size - 1}")
