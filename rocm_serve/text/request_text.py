"""RequestText: the text of a request, made token by token: up to a stop text, and without parts of characters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rocm_serve.text.stop_texts import StopTexts
from rocm_serve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rocm_serve.request import Request


class RequestText:
    """The text of the new tokens.

    It goes on from the prompt's text: a space between the two is a part of it.

    tokenizer:  None: there is none, and all pieces are empty
    num_tokens: that were pushed
    """

    def __init__(self, tokenizer: Tokenizer | None, request: Request) -> None:
        self._stream = tokenizer.stream(request.prompt_token_ids) if tokenizer is not None else None
        self._stops, self._min_tokens = StopTexts(request.stop, request.include_stop), request.min_tokens
        self.num_tokens = 0

    @property
    def has_stopped(self) -> bool:
        """True if a stop text was found: the text ends, with the token that was pushed last."""
        return self._stops.has_stopped

    def push(self, token_id: int) -> str:
        """The text that can be printed now that there is another token."""
        self.num_tokens += 1
        if self._stream is None:
            return ""
        return self._stops.push(self._stream.push(token_id), counts=self.num_tokens > self._min_tokens)

    def end(self, token_id: int, *, is_text: bool) -> str:
        """The rest of the text, with its last token. is_text: False of a stop token, which need not be a special one"""
        if is_text:
            return self.push(token_id) + self.rest()
        self.num_tokens += 1
        return self.rest()

    def rest(self) -> str:
        """The text that is still held back; no more tokens come."""
        if self._stream is None:
            return ""
        counts = self.num_tokens > self._min_tokens
        return self._stops.push(self._stream.finish(), counts=counts) + self._stops.finish()
