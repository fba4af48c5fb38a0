"""Tokenizer: text to token ids and back, for whole texts and for streams."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tokenizers

from rocm_attn.errors import BadRequest
from rocm_serve.text.characters import require_characters
from rocm_serve.text.chat_template import PLAIN, ChatTemplate, Rendering
from rocm_serve.text.token_bytes import TokenBytes
from rocm_serve.text.written_forms import kept_marks

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Bytes of the longest character.
_MOST_BYTES = 4
# A few times the tokens of the longest character.
_MOST_HELD = 16
# More tokens than a template writes after its last text.
_MOST_MARKS = 64


def any_number(num_tokens: int) -> None:
    """The check that allows every number of tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class Tokenizer:
    """A model's tokenizer.

    backend:       splits and joins
    bos_token_id:  put before a plain text; None if the model needs none, or the backend adds it
    chat_template: None if the model came without one
    """

    backend: tokenizers.Tokenizer
    bos_token_id: int | None
    chat_template: ChatTemplate | None
    silent: Mapping[str, int] = field(init=False, repr=False)  # name of a token that is no text -> its id
    _silent: frozenset[int] = field(init=False, repr=False)  # these ids
    _bytes: TokenBytes = field(init=False, repr=False)
    _marks: Mapping[str, int] = field(init=False, repr=False)  # those that are a text all the same -> their ids

    def __post_init__(self) -> None:
        # A file may have those of its training, which cut every prompt, or fill it up.
        self.backend.no_truncation()
        self.backend.no_padding()
        tokens = self.backend.get_added_tokens_decoder()
        added = {token.content: number for number, token in tokens.items()}
        kept = kept_marks(added)
        silent = {text: number for text, number in added.items() if tokens[number].special and text not in kept}
        object.__setattr__(self, "silent", silent)
        object.__setattr__(self, "_silent", frozenset(self.silent.values()))
        object.__setattr__(self, "_bytes", TokenBytes(self.backend))
        object.__setattr__(self, "_marks", {text: added[text] for text in added.keys() & kept})

    def mark(self, text: str) -> int | None:
        """Token id of a mark of written_forms.py, if it is one token beyond the vocabulary of texts; None otherwise."""
        return self._marks.get(text)

    def with_template(self, source: str) -> Tokenizer:
        """The same tokenizer with another chat template, which may write the same special tokens."""
        before, other = self.chat_template or ChatTemplate(""), copy.copy(self)  # replace() would make all of it again
        object.__setattr__(other, "chat_template", ChatTemplate(source, before.tokens))
        return other

    def encode(self, text: str, check: Callable[[int], None] = any_number) -> list[int]:
        """Token ids of a plain text, with the model's BOS token before it, if it needs one. Raises BadRequest.

        check: gets the number of tokens before any id is made: a million of them is long in the making, and Python's
               lock is held meanwhile. It may raise an error
        """
        if self.bos_token_id is None:
            return _ids(self.backend, text, check, add_special_tokens=True)
        return [self.bos_token_id, *_ids(self.backend, text, lambda n: check(n + 1), add_special_tokens=True)]

    def encode_unmarked(self, text: str, check: Callable[[int], None] = any_number) -> list[int]:
        """Like encode(), without any token that the text itself does not have: a template writes its own."""
        return _ids(self.backend, text, check, add_special_tokens=False)

    def encode_chat(self, user: str) -> list[int]:
        """Token ids of a conversation that starts with the user's text, up to where the model continues.

        Raises BadRequest if the model has no chat template, or for a text that is not Unicode; BadModel for a template
        that is damaged.
        """
        return self.encode_messages([{"role": "user", "content": user}])

    def encode_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        rendering: Rendering = PLAIN,
    ) -> list[int]:
        """Likewise, for a conversation; see ChatTemplate.render. Raises like encode_chat."""
        return self.encode_unmarked(self.conversation(messages, tools, rendering))

    def conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        rendering: Rendering = PLAIN,
    ) -> str:
        """The text that the chat template writes of a conversation. Raises BadRequest, BadModel like encode_chat."""
        if self.chat_template is None:
            raise BadRequest(
                "the model has no chat template; pass the prompt unchanged (--raw, or /v1/completions of a server)"
            )
        return self.chat_template.render(messages, tools, rendering)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the tokens; bytes that are not UTF-8 become U+FFFD.

        Special tokens have no text, except for the marks of written_forms.py.
        """
        said = token_ids
        if not self._silent.isdisjoint(token_ids):
            said = [token for token in token_ids if token not in self._silent]
        return str(self.backend.decode(said, skip_special_tokens=False))

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Likewise, with the names of special ones."""
        return str(self.backend.decode(token_ids, skip_special_tokens=False))

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token, which may be a part of a character, or the name of a special one."""
        return self._bytes.of(token_id)

    def is_text(self, token_id: int) -> bool:
        """True if decode() writes the token. It writes no special one, and no id beyond the vocabulary."""
        return token_id not in self._silent and self.backend.id_to_token(token_id) is not None

    def stream(self, before: Sequence[int] = ()) -> TextStream:
        """The stream of a text that goes on from the text of other tokens. before: those tokens"""
        of_text = (token for token in reversed(before[-_MOST_MARKS:]) if self.is_text(token))
        last = list(itertools.islice(of_text, _MOST_BYTES))[::-1]
        while last and self.decode(last).endswith(_REPLACEMENT):  # its first one is a part of a character, or its end
            del last[0]
        return TextStream(self, last)


@dataclass(slots=True)
class TextStream:
    """Decodes token by token. The pieces joined are the text of the tokens, and no piece ends inside a character.

    _context: tokens whose text was returned already; some tokenizers write a token differently at a text's start
    _held:    tokens whose text still ends inside a character
    """

    tokenizer: Tokenizer
    _context: list[int] = field(default_factory=list)
    _held: list[int] = field(default_factory=list)

    def push(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""
        self._held.append(token_id)
        text = self._text_of_held()
        if text and not text.endswith(_REPLACEMENT):
            self._context, self._held = self._held, []
            return text
        if not self.tokenizer.is_text(token_id):
            self._held.pop()
        return self._known(text) if len(self._held) > _MOST_HELD else ""

    def _known(self, text: str) -> str:
        """The part of the held text that no further token changes. Else a long text that is no UTF-8 would be decoded
        again, whole, for each of its tokens.
        """
        for num_left in range(1, _MOST_BYTES + 1):
            rest, self._held = self._held[-num_left:], self._held[:-num_left]
            known = self._text_of_held()
            if len(known) < len(text) and text.startswith(known):  # then no character of it goes on in the rest
                self._context, self._held = self._held, rest
                return known
            self._held += rest
        return ""

    def finish(self) -> str:
        """The rest of the text: a character that was never completed becomes U+FFFD."""
        text = self._text_of_held()
        self._held = []
        return text

    def _text_of_held(self) -> str:
        before = self.tokenizer.decode(self._context)
        return self.tokenizer.decode(self._context + self._held)[len(before) :]


def encoding_of(backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> tokenizers.Encoding:
    """The tokens of a text. Raises BadRequest for one that the tokenizer has no tokens for."""
    try:
        # encode() would hold Python's lock throughout: with megabytes of text, no other thread would run for seconds.
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    except Exception as error:  # the library has no narrower one
        raise BadRequest(
            f"the model's tokenizer has no token for a part of the text ({error}); leave out characters that the "
            "model does not know"
        ) from error
    return encoding


def _ids(
    backend: tokenizers.Tokenizer, text: str, check: Callable[[int], None], *, add_special_tokens: bool
) -> list[int]:
    require_characters(text)
    encoding = encoding_of(backend, text, add_special_tokens=add_special_tokens)
    try:
        check(len(encoding))
        ids: list[int] = encoding.ids
    finally:
        # An error's traceback would keep it until the event loop has answered, which would then free its many parts.
        del encoding
    return ids
