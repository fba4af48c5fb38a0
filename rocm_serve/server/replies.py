"""Replies: answers to completions and conversations, whole or in chunks, in OpenAI's form."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from rocm_serve.request import Completion, FinishReason
from rocm_serve.request_stream import OutputChunk
from rocm_serve.sampling.logprobs import NO_LOGPROBS, TokenLogprobs
from rocm_serve.server.call_reader import Reader, Thought, ToolCall
from rocm_serve.server.emitted_tokens import EmittedTokens, Json
from rocm_serve.server.schema import GenerationBody

# The last event of a stream of completions or conversations.
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request: those of each prompt once, those of every answer, and prompt tokens found in the cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def as_dict(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class TextChunk(NamedTuple):
    """The chunk of a piece that is nothing but text: make(choice, text). All of one choice differ in the text alone."""

    choice: int
    text: str
    make: Callable[[int, str], Json]


class Replies(Protocol):
    """The form of answers to one kind of request."""

    def whole(self, completions: Sequence[Completion], usage: Usage) -> Json:
        """Returns the whole answer."""

    @property
    def done(self) -> bytes:
        """The bytes that end a stream."""

    def opening(self, index: int) -> Sequence[Json]:
        """Returns the chunks before a choice's first piece."""

    def chunk(self, index: int, piece: OutputChunk) -> Sequence[Json | TextChunk]:
        """Returns the chunks of a choice's piece: none if it waits for the next one."""

    def ending(self, usage: Usage, *, is_asked: bool) -> Sequence[Json]:
        """Returns the last chunks. is_asked: whether the client asked for the usage"""


@dataclass(frozen=True, slots=True)
class PromptReport:
    """The logprobs of prompts that are in an answer: numbers of likeliest tokens, or NO_LOGPROBS.

    num_likeliest: in vLLM's form
    num_echoed:    in OpenAI's, with the echoed prompt
    """

    num_likeliest: int = NO_LOGPROBS
    num_echoed: int = NO_LOGPROBS

    @classmethod
    def of(cls, body: GenerationBody) -> PromptReport:
        """Returns what a body asks for."""
        asked = body.prompt_logprobs
        return cls(NO_LOGPROBS if asked is None else asked, body.num_echoed_logprobs)


def without_new_tokens(completion: Completion) -> Completion:
    """Returns the completion of a request that asks for its prompt alone."""
    return replace(completion, token_ids=(), text="", logprobs=(), finish_reason="length")


def with_prompt_logprobs(completions: Sequence[Completion], num_choices: int) -> list[Completion]:
    """Returns completions that all have the logprobs of their prompts, which each prompt's first choice has."""
    return [
        replace(each, prompt_logprobs=completions[place - place % num_choices].prompt_logprobs)
        for place, each in enumerate(completions)
    ]


class _WithChoices:
    """The common part of answers with choices.

    kind:    of the chunks
    emitted: writes logprobs
    prompts: what is reported of the prompts
    """

    done = DONE

    def __init__(self, model: str, kind: str, reply_id: str, emitted: EmittedTokens, prompts: PromptReport) -> None:
        self._head = {"id": f"{reply_id}-{secrets.token_hex(12)}", "object": kind, "created": int(time.time())}
        self._head["model"] = model
        self._emitted, self._prompts = emitted, prompts

    def ending(self, usage: Usage, *, is_asked: bool) -> list[Json]:
        """Returns the chunk with the usage, if that is asked for."""
        return [{**self._head, "choices": [], "usage": usage.as_dict()}] if is_asked else []

    def _of_prompt(self, logprobs: Sequence[TokenLogprobs]) -> Json:
        """Returns the logprobs of a prompt under their name; nothing if they are not asked for."""
        num = self._prompts.num_likeliest
        return {} if num == NO_LOGPROBS else {"prompt_logprobs": self._emitted.of_prompt(logprobs, num)}


class CompletionReplies(_WithChoices):
    """Answers of /v1/completions. echoed: text before each choice's own; empty if the prompts are not asked for"""

    def __init__(self, model: str, emitted: EmittedTokens, echoed: Sequence[str], prompts: PromptReport) -> None:
        super().__init__(model, "text_completion", "cmpl", emitted, prompts)
        self._echoed = echoed
        self._offsets: dict[int, int] = {}  # index of a choice -> characters of the tokens whose logprobs were sent

    def whole(self, completions: Sequence[Completion], usage: Usage) -> Json:
        """Returns the whole answer."""
        choices = []
        for index, done in enumerate(completions):
            before = self._echo(index, done)
            choice = self._choice(index, done)
            choice["text"] = before["text"] + choice["text"]
            choice["logprobs"] = _joined(before["logprobs"], choice["logprobs"])
            choices.append(choice | self._of_prompt(done.prompt_logprobs))
        return {**self._head, "choices": choices, "usage": usage.as_dict()}

    def opening(self, index: int) -> list[Json]:
        """Returns the chunk before a choice's first piece: its prompt, if that is asked for."""
        return [self._text(index, self._echoed[index])] if self._echoed else []

    def chunk(self, index: int, piece: OutputChunk) -> list[Json | TextChunk]:
        """Returns the chunk of a choice's piece."""
        if not piece.logprobs and piece.finish_reason is None:
            return [TextChunk(index, piece.text, self._text)]
        return [{**self._head, "choices": [self._choice(index, piece)]}]

    def _text(self, index: int, text: str) -> Json:
        return {**self._head, "choices": [self._choice(index, OutputChunk((), text, None))]}

    def _echo(self, index: int, done: Completion) -> Json:
        """Returns the part of a choice that repeats its prompt."""
        if not self._echoed:
            return {"text": "", "logprobs": None}
        logprobs, num, text = None, self._prompts.num_echoed, self._echoed[index]
        if num != NO_LOGPROBS:
            logprobs = self._emitted.of_echo(done.prompt_token_ids, text, done.prompt_logprobs, num)
            self._offsets[index] = len(text)
        return {"text": text, "logprobs": logprobs}

    def _choice(self, index: int, said: Completion | OutputChunk) -> Json:
        logprobs, offset = None, self._offsets.get(index, 0)
        if said.logprobs:
            logprobs, self._offsets[index] = self._emitted.beside_text(said.logprobs, offset)
        return {"index": index, "text": said.text, "logprobs": logprobs, "finish_reason": said.finish_reason}


def _joined(before: Json | None, after: Json | None) -> Json | None:
    """Joins the logprobs of a prompt and of its continuation."""
    if before is None or after is None:
        return before or after
    return {name: [*values, *after[name]] for name, values in before.items()}


@dataclass(slots=True)
class _Read:
    """The reader of a choice's text. num_calls: calls so far"""

    reader: Reader
    num_calls: int = 0

    def take(self, said: Completion | OutputChunk) -> tuple[str, str, list[ToolCall]]:
        """Reads a piece. Returns the reasoning, the text and the calls that are decided now."""
        found = self.reader.push(said.text)
        if said.finish_reason is not None:
            found += self.reader.finish(is_cut=said.finish_reason != "stop")
        calls = [each for each in found if isinstance(each, ToolCall)]
        self.num_calls += len(calls)
        thought = "".join(each.text for each in found if isinstance(each, Thought))
        return thought, "".join(each for each in found if isinstance(each, str)), calls

    def reason(self, reason: FinishReason | None) -> str | None:
        """Returns the reason why the choice ends, in OpenAI's words."""
        return "tool_calls" if reason == "stop" and self.num_calls else reason


def _as_json(call: ToolCall) -> Json:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class ChatReplies(_WithChoices):
    """Answers of /v1/chat/completions. reader: makes the reader of a choice's text"""

    def __init__(self, model: str, emitted: EmittedTokens, reader: Callable[[], Reader], prompts: PromptReport) -> None:
        super().__init__(model, "chat.completion.chunk", "chatcmpl", emitted, prompts)
        self._reader = reader
        self._readers: dict[int, _Read] = {}  # by the index of a choice

    def whole(self, completions: Sequence[Completion], usage: Usage) -> Json:
        """Returns the whole answer."""
        choices = [self._choice(index, each) for index, each in enumerate(completions)]
        whole = {**self._head, "object": "chat.completion", "choices": choices, "usage": usage.as_dict()}
        return whole | self._of_prompt(completions[0].prompt_logprobs)

    def opening(self, index: int) -> list[Json]:
        """Returns the chunk before a choice's first piece, which has the role."""
        return [self._chunk(index, {"role": "assistant", "content": ""}, None, ())]

    def chunk(self, index: int, piece: OutputChunk) -> list[Json | TextChunk]:
        """Returns the chunk of a choice's piece, or nothing if all of it may become a function call."""
        read = self._readers.get(index)
        if read is None:
            read = self._readers[index] = _Read(self._reader())
        first = read.num_calls
        thought, text, calls = read.take(piece)
        if text and not (thought or calls or piece.logprobs or piece.finish_reason):
            return [TextChunk(index, text, self._text)]
        delta: Json = {"reasoning_content": thought} if thought else {}
        delta |= {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = [{"index": first + place, **_as_json(call)} for place, call in enumerate(calls)]
        if not delta and not piece.logprobs and piece.finish_reason is None:
            return []
        return [self._chunk(index, delta, read.reason(piece.finish_reason), piece.logprobs)]

    def _choice(self, index: int, done: Completion) -> Json:
        read = _Read(self._reader())
        thought, text, calls = read.take(done)
        message: Json = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = list(map(_as_json, calls))
        reason = read.reason(done.finish_reason)
        logprobs = self._emitted.in_messages(done.logprobs)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _text(self, index: int, text: str) -> Json:
        return self._chunk(index, {"content": text}, None, ())

    def _chunk(
        self, index: int, delta: Mapping[str, object], reason: str | None, logprobs: Sequence[TokenLogprobs]
    ) -> Json:
        emitted = self._emitted.in_messages(logprobs)
        choice = {"index": index, "delta": delta, "logprobs": emitted, "finish_reason": reason}
        return {**self._head, "choices": [choice]}


def as_event(content: Mapping[str, object]) -> bytes:
    """Returns the bytes of a server-sent event, which has a name if its content is of a type.

    They are ASCII: clients that read lines of text, as httpx gives them, would end one at U+2028 or U+0085, too.
    """
    kind = content.get("type")
    name = f"event: {kind}\n".encode() if isinstance(kind, str) else b""
    return name + b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"
