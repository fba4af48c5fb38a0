"""Replies: what is sent back for a completion or a conversation, whole or in chunks, in OpenAI's form."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rocm_attn.runner.logprobs import TokenLogprobs
from rocm_attn.runner.request import Completion, FinishReason, Request
from rocm_attn.runner.request_stream import Piece
from rocm_attn.server.told_tokens import Json, ToldTokens


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request: those of each prompt once, and those of every answer."""

    prompt_tokens: int
    completion_tokens: int

    @classmethod
    def of(cls, requests: Sequence[Request], num_choices: int, completion_tokens: int) -> Usage:
        """num_choices: answers to each prompt, whose requests lie side by side"""
        prompts = requests[::num_choices]
        return cls(sum(len(request.prompt_token_ids) for request in prompts), completion_tokens)

    def as_dict(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


class Replies(Protocol):
    """How one kind of request is answered."""

    def whole(self, completions: Sequence[Completion], usage: Usage) -> Json:
        """The answer."""

    def opening(self, index: int) -> Json | None:
        """The chunk before a choice's first one."""

    def chunk(self, index: int, piece: Piece) -> Json:
        """What a piece of a choice is sent as."""

    def counts(self, usage: Usage) -> Json:
        """The last chunk."""


@dataclass(frozen=True, slots=True)
class CompletionReplies:
    """Of /v1/completions.

    told:     writes logprobs
    echoed:   text before each choice's own; empty where the prompts are not asked for
    _offsets: index of a choice -> characters of the tokens that were told of
    """

    model: str
    told: ToldTokens
    echoed: Sequence[str] = ()
    _offsets: dict[int, int] = field(default_factory=dict)
    reply_id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, completions: Sequence[Completion], usage: Usage) -> Json:
        """The answer."""
        choices = [self._choice(index, each) for index, each in enumerate(completions)]
        for choice, text in zip(choices, self.echoed, strict=False):
            choice["text"] = text + choice["text"]
        return {**self._head(), "choices": choices, "usage": usage.as_dict()}

    def opening(self, index: int) -> Json | None:
        """The chunk before a choice's first one: its prompt, where that is asked for."""
        if not self.echoed:
            return None
        return {**self._head(), "choices": [self._choice(index, Piece((), self.echoed[index], None))]}

    def chunk(self, index: int, piece: Piece) -> Json:
        """What a piece of a choice is sent as."""
        return {**self._head(), "choices": [self._choice(index, piece)]}

    def counts(self, usage: Usage) -> Json:
        """The last chunk."""
        return {**self._head(), "choices": [], "usage": usage.as_dict()}

    def _choice(self, index: int, said: Completion | Piece) -> Json:
        logprobs, offset = None, self._offsets.get(index, 0)
        if said.logprobs:
            logprobs, self._offsets[index] = self.told.beside_text(said.logprobs, offset)
        return {"index": index, "text": said.text, "logprobs": logprobs, "finish_reason": said.finish_reason}

    def _head(self) -> Json:
        return {"id": self.reply_id, "object": "text_completion", "created": self.created, "model": self.model}


@dataclass(frozen=True, slots=True)
class ChatReplies:
    """Of /v1/chat/completions. told: writes logprobs"""

    model: str
    told: ToldTokens
    reply_id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, completions: Sequence[Completion], usage: Usage) -> Json:
        """The answer."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": each.text, "refusal": None},
                "logprobs": self.told.in_messages(each.logprobs),
                "finish_reason": each.finish_reason,
            }
            for index, each in enumerate(completions)
        ]
        return {**self._head("chat.completion"), "choices": choices, "usage": usage.as_dict()}

    def opening(self, index: int) -> Json | None:
        """The chunk before a choice's first one, which says who speaks."""
        return self._chunk(index, {"role": "assistant", "content": ""}, None, ())

    def chunk(self, index: int, piece: Piece) -> Json:
        """What a piece of a choice is sent as."""
        return self._chunk(index, {"content": piece.text} if piece.text else {}, piece.finish_reason, piece.logprobs)

    def counts(self, usage: Usage) -> Json:
        """The last chunk."""
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": usage.as_dict()}

    def _chunk(
        self, index: int, delta: Mapping[str, str], reason: FinishReason | None, logprobs: Sequence[TokenLogprobs]
    ) -> Json:
        told = self.told.in_messages(logprobs)
        choice = {"index": index, "delta": delta, "logprobs": told, "finish_reason": reason}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _head(self, kind: str) -> Json:
        return {"id": self.reply_id, "object": kind, "created": self.created, "model": self.model}


def as_event(content: Mapping[str, object]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
