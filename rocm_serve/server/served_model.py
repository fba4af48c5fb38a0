"""ServedModel: the server's description of its model, and the conversion of texts to requests."""

from __future__ import annotations  # array takes no parameter before Python 3.12

import asyncio
import hashlib
import secrets
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import numpy as np

from rocm_attn.errors import BadRequest
from rocm_attn.machine.choices import AUTO
from rocm_serve.limits import RequestLimits
from rocm_serve.request import Request
from rocm_serve.sampling.logprobs import NO_LOGPROBS
from rocm_serve.sampling.sampling_options import Sampling
from rocm_serve.server.api_errors import ApiError, bad_request
from rocm_serve.server.call_forms import form_of, reasoning_of, require_tools, with_ids
from rocm_serve.server.call_grammar import calls_only, lead_of
from rocm_serve.server.call_reader import AnswerReader, Reader
from rocm_serve.server.generation_config import OPENAI_DEFAULTS
from rocm_serve.server.options import ServerOptions
from rocm_serve.server.parsing import let_streams_write
from rocm_serve.server.schema import SHAPES, ChatBody, CompletionBody, GenerationBody, Message
from rocm_serve.server.tokenising import Tokenising
from rocm_serve.server.tools import NamedTool
from rocm_serve.text.chat_template import ChatTemplate
from rocm_serve.text.constraint import Constraint
from rocm_serve.text.constraint_trial import TrialProcess, TrialTokens
from rocm_serve.text.tokenizer import Tokenizer
from rocm_serve.text.written_forms import CALL_FORMS, NONE, REASONING_FORMS, CallForm, ReasoningForm, form_named

# OpenAI's default number of new tokens for a plain prompt. It is less if there is no room.
_COMPLETION_TOKENS = 16
# More than the tokens of a mark that begins reasoning, and of blanks after it.
_TOKENS_OF_A_MARK = 32
# Bytes of a token's id in a body, with its comma.
_ID_BYTES = 6
# Fields of a body that Sampling has under the same name and with the same meaning; the others are converted.
_CONVERTED = {"top_k", "seed", "logit_bias"}
_SAMPLED = {each.name for each in fields(Sampling)} & GenerationBody.model_fields.keys() - _CONVERTED


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as clients see it.

    name:       by which they ask for it
    tokenizer:  None if prompts must be token ids
    limits:     of the engine
    defaults:   sampling of requests that do not say how they are sampled
    created:    when the server began, in seconds since 1970
    tokenising: turns texts into tokens; None if there is no tokenizer
    """

    name: str
    tokenizer: Tokenizer | None
    limits: RequestLimits
    options: ServerOptions
    defaults: Sampling = OPENAI_DEFAULTS
    created: int = field(default_factory=lambda: int(time.time()))
    tokenising: Tokenising | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        threads = None
        if self.tokenizer is not None:
            threads = Tokenising(self.tokenizer, self._most_prompt_tokens, self._too_long)
        object.__setattr__(self, "tokenising", threads)
        biases = tuple(pair for pair in self.defaults.logit_bias if pair[0] < self.limits.vocab_size)
        object.__setattr__(self, "defaults", replace(self.defaults, logit_bias=biases))

    @property
    def max_len(self) -> int:
        """The most tokens of prompt and answer together."""
        return self.limits.max_len

    @property
    def card(self) -> dict[str, object]:
        """The model's entry in /v1/models."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "rocm-attn",
            "max_model_len": self.max_len,
        }

    @property
    def trial_of_constraints(self) -> Callable[[], TrialProcess] | None:
        """A function that begins a process that tries constraints; None if the model has no tokenizer."""
        if self.tokenizer is None:
            return None
        tokens = TrialTokens(self.tokenizer.backend.to_str(), self.limits.vocab_size)
        return partial(TrialProcess, tokens, self.options.constraint_seconds)

    def require(self, name: str) -> None:
        """Raises ApiError for a model that is not this one."""
        if name != self.name:
            raise ApiError(
                404,
                f"there is no model {name[:200]!r} here; this server has {self.name!r}",
                code="model_not_found",
                param="model",
            )

    def refuse_large(self, body: Mapping[str, object]) -> None:
        """Refuses more prompts, or longer lists of token ids, than can be served, before any item is looked at.

        body: that nothing has checked yet. Raises ApiError.
        """
        prompt = body.get("prompt")
        if not isinstance(prompt, list) or not prompt:
            return
        prompts = prompt if isinstance(prompt[0], str | list) else [prompt]
        self._check_answers(len(prompts), 1)
        for each in prompts:
            if isinstance(each, list) and len(each) > self._most_prompt_tokens:
                raise self._too_long("", len(each))

    def refuse_many_tokens(self, body: Mapping[str, object]) -> None:
        """Refuses to write a text of more tokens than the context holds. body: as for refuse_large"""
        tokens = body.get("tokens")
        if isinstance(tokens, list) and len(tokens) > self.max_len:
            raise bad_request(
                f"the body has {len(tokens)} tokens and this server writes the text of at most {self.max_len} at once, "
                "as many as its context holds; send them in parts",
                "tokens",
            )

    async def completion_requests(self, body: CompletionBody, salt: str) -> list[Request]:
        """Returns the requests of a body: n per prompt, those of a prompt in a row. Raises ApiError, BadRequest."""
        prompts = body.prompts
        if not prompts:
            raise bad_request("the list of prompts is empty; give at least one", "prompt")
        self._check_options(len(prompts), body)
        tokens = [await self._tokens(prompt) for prompt in prompts]
        # An engine picks one token at least. It is left out of an answer that is the prompt alone.
        most = 1 if body.is_answered_by_echo else body.max_tokens
        return await self._requests(body, tokens, most, _COMPLETION_TOKENS, salt, body.constraint)

    def echoed(self, body: CompletionBody) -> list[str]:
        """Returns the prompt's text, as it was sent, for each of a body's answers. Raises ApiError."""
        if self.tokenizer is None:
            raise bad_request(
                "echo is set and the model has no tokenizer, so a prompt has no text; leave it out", "echo"
            )
        texts = [prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt) for prompt in body.prompts]
        return [text for text in texts for _ in range(body.n or 1)]

    async def chat_requests(self, body: ChatBody, salt: str) -> list[Request]:
        """Returns the requests of a body: n for its conversation. Raises ApiError, BadRequest, BadModel."""
        self._check_options(1, body)
        if self.tokenising is None:
            raise bad_request("the model has no tokenizer; give token ids to /v1/completions", "messages")
        writer = self.writer(self.tokenising.tokenizer, body.chat_template)
        constraint = await asyncio.to_thread(self._calls_of, body, writer)
        messages, tools = self.messages(body.messages, writer), body.tools_as_template
        rendering = body.rendering(messages[-1])
        tokens = await self.tokenising.conversation(messages, partial(writer.conversation, messages, tools, rendering))
        most = body.max_completion_tokens or body.max_tokens
        constraint, form = constraint or body.constraint, self._reasoning(writer.chat_template)
        if constraint is not None and form is not None:
            is_inside, is_text = self._is_inside(form, tokens, body), not body.must_call
            lead = lead_of(form, writer.mark, is_inside=is_inside, is_text=is_text)
            constraint = replace(constraint, lead=lead)
        return await self._requests(body, [tokens], most, self.max_len, salt, constraint)

    def messages(self, said: Sequence[Message], writer: Tokenizer) -> list[dict[str, Any]]:
        """Returns a conversation as the chat template expects it. Raises ApiError. writer: from writer()"""
        messages, template = [each.as_template for each in said], writer.chat_template
        if template is not None and any("tool_calls" in each for each in messages):
            with suppress(BadRequest):  # calls of a form that is not known may be written all the same
                if (form := self._calls(template)).call_id:
                    with_ids(messages, form)
        return messages

    def reader_of(self, body: ChatBody, request: Request) -> Reader:
        """Returns the reader of one choice's text. Call it after chat_requests(), which raises all errors.

        request: one of a body's
        """
        if self.tokenizer is None:
            return Reader()
        template = self.writer(self.tokenizer, body.chat_template).chat_template
        calls = self._calls(template) if template is not None and body.may_call else None
        reasoning = self._reasoning(template)
        if calls is None and reasoning is None:
            return Reader()
        is_inside = reasoning is not None and self._is_inside(reasoning, request.prompt_token_ids, body)
        tools = (tool["function"] for tool in body.must_call or body.tools_as_template)
        functions = {tool["name"]: tool["parameters"] for tool in tools}
        several = body.parallel_tool_calls is not False
        return AnswerReader(calls, functions, reasoning, is_inside=is_inside, several=several)

    def count_tokens(self, text: str) -> int:
        """Returns the number of tokens of a part of an answer."""
        return len(self.tokenizer.encode_unmarked(text)) if self.tokenizer is not None else 0

    def writer(self, tokenizer: Tokenizer, template: str | None) -> Tokenizer:
        """Returns the tokenizer with a request's own chat template, if it has one. Raises ApiError."""
        if template is None:
            return tokenizer
        if not self.options.trust_request_chat_template:
            raise bad_request(
                "chat_template is not taken from requests by this server (--trust-request-chat-template); leave it out",
                "chat_template",
            )
        return tokenizer.with_template(template)

    def _calls_of(self, body: ChatBody, writer: Tokenizer) -> Constraint | None:
        """Returns a constraint that allows only calls, or None if none must be made. Raises ApiError, BadRequest."""
        template, must_call, may_call = writer.chat_template, body.must_call, body.may_call
        if not body.tools or template is None:
            return None
        require_tools(template)
        form = self._calls(template) if may_call else None
        if form is None or not must_call:
            return None
        several = not isinstance(body.tool_choice, NamedTool) and body.parallel_tool_calls is not False
        return calls_only(form, must_call, writer.mark, several=several)

    def _calls(self, template: ChatTemplate) -> CallForm:
        """Returns the form of the model's calls. Raises BadRequest."""
        name = self.options.tool_parser
        if name == NONE:
            raise BadRequest("this server reads no calls (--tool-parser none); leave tools out")
        return form_of(template) if name == AUTO else form_named(name, CALL_FORMS)

    def _reasoning(self, template: ChatTemplate | None) -> ReasoningForm | None:
        name = self.options.reasoning_parser
        if name == NONE or template is None:
            return None
        return reasoning_of(template) if name == AUTO else form_named(name, REASONING_FORMS)

    def _is_inside(self, form: ReasoningForm, prompt: Sequence[int], body: ChatBody) -> bool:
        """True if a prompt ends with the mark that begins reasoning, or in it: the answer goes on from there."""
        assert self.tokenizer is not None
        last = body.messages[-1].as_template
        if body.rendering(last).goes_on and last["content"].lstrip().startswith(form.opens):
            return form.closes not in last["content"]
        return self.tokenizer.decode(prompt[-_TOKENS_OF_A_MARK:]).rstrip().endswith(form.opens)

    async def _tokens(self, prompt: str | Sequence[int]) -> array[int]:
        if not isinstance(prompt, str):
            num_bytes = _ID_BYTES * len(prompt)
            await let_streams_write(num_bytes)
            with suppress(OverflowError):
                token_ids = array("i", prompt)
                await let_streams_write(num_bytes)
                if not prompt or np.asarray(token_ids).min() >= 0:
                    return token_ids
            raise bad_request(SHAPES["prompt"], "prompt")
        if self.tokenising is None:
            raise bad_request("the model has no tokenizer; give the prompt as token ids", "prompt")
        return await self.tokenising.prompt(prompt)

    def _check_options(self, num_prompts: int, body: CompletionBody | ChatBody) -> None:
        """Checks the numbers of answers, stops and logprobs, before anything is tokenised. Raises ApiError."""
        self._check_answers(num_prompts, body.n or 1)
        stops = len(body.stops) + len(body.stop_token_ids or ())
        if stops > self.options.max_stops:
            raise bad_request(
                f"the request has {stops} stops and this server allows at most {self.options.max_stops}; leave "
                "some out",
                "stop",
            )
        most_logprobs = max(body.num_logprobs, body.num_prompt_logprobs)
        if most_logprobs > self.options.max_logprobs:
            raise bad_request(
                f"the request asks for {most_logprobs} likely tokens at each position and this server allows "
                f"at most {self.options.max_logprobs}; ask for fewer",
                "logprobs",
            )

    async def _requests(
        self,
        body: CompletionBody | ChatBody,
        prompts: Sequence[array[int]],
        max_new_tokens: int | None,
        by_default: int,
        salt: str,
        constraint: Constraint | None,
    ) -> list[Request]:
        """max_new_tokens: None if the request does not say; then it is by_default, or less if there is no room"""
        most = self.options.max_new_tokens or self.max_len
        if max_new_tokens is not None and self.options.max_new_tokens is not None and max_new_tokens > most:
            raise bad_request(
                f"the request asks for up to {max_new_tokens} new tokens and this server allows at most {most}; "
                "lower max_tokens",
                "max_tokens",
            )
        for prompt in prompts:
            if len(prompt) > self._most_prompt_tokens:
                raise self._too_long("", len(prompt))
            if max_new_tokens is not None:
                self.limits.check_room(len(prompt), max_new_tokens)
        by_default = min(by_default, most)
        seed = body.seed if body.seed is not None else secrets.randbits(63)
        sampling = _sampling(body, self.defaults)
        allowed = tuple(sorted(set(body.allowed_token_ids or ())))
        # A special token has no text in which its name could be found.
        silent = self.tokenizer.silent if self.tokenizer is not None else {}
        vocabulary = range(self.limits.vocab_size)
        named = (token for text in body.stops if (token := silent.get(text, -1)) in vocabulary)
        stop_token_ids = (*(body.stop_token_ids or ()), *named)
        return [
            Request(
                prompt_token_ids=prompt,
                max_new_tokens=max_new_tokens or min(by_default, self.limits.room(len(prompt))),
                sampling=replace(sampling, seed=seed_of_answer(seed, place, choice)),
                stop=body.stops,
                stop_token_ids=stop_token_ids,
                allowed_token_ids=allowed,
                ignore_eos=bool(body.ignore_eos),
                min_tokens=body.min_tokens or 0,
                logprobs=body.num_logprobs,
                # One choice computes those of the prompt for all (replies.with_prompt_logprobs).
                prompt_logprobs=NO_LOGPROBS if choice else body.num_prompt_logprobs,
                include_stop=bool(body.include_stop_str_in_output),
                priority=body.priority or 0,
                constraint=constraint,
                cache_salt=f"{salt}:{body.cache_salt}" if body.cache_salt else salt,
            )
            for place, prompt in enumerate(prompts)
            for choice in range(body.n or 1)
        ]

    def _check_answers(self, num_prompts: int, n: int) -> None:
        requested, most = num_prompts * n, min(self.options.max_choices, self.options.max_requests)
        if requested > most:
            raise bad_request(
                f"the request asks for {requested} answers (prompts: {num_prompts}, n: {n}) and this server allows "
                f"at most {most}; split it",
                "n",
            )

    @property
    def _most_prompt_tokens(self) -> int:
        return min(self.max_len - 1, self.options.max_prompt_tokens or self.max_len)

    def _too_long(self, about: str, num_tokens: int) -> ApiError:
        return ApiError(
            400,
            f"the prompt has {about}{num_tokens} tokens and this server allows at most {self._most_prompt_tokens} "
            f"(prompt and answer together {self.max_len}); shorten it",
            code="context_length_exceeded",
            param="prompt",
        )


def _sampling(body: GenerationBody, defaults: Sampling) -> Sampling:
    """Returns the sampling, with defaults for all that the body does not say. Raises ApiError, BadRequest."""
    said = {name: getattr(body, name) for name in _SAMPLED if getattr(body, name) is not None}
    if body.top_k is not None:
        said["top_k"] = max(0, body.top_k)
    biases, given = body.biases, dict(body.biases)
    others = [(token, bias) for token, bias in defaults.logit_bias if token not in given]
    return replace(defaults, **said, logit_bias=(*biases, *others))


def seed_of_answer(seed: int, place: int, choice: int) -> int:
    """Returns the seed of one of n answers to the prompt at a place of the request. The first one's: seed mod 2**64.

    Each answer has its own seed: with one seed for all prompts, equal prompts would get equal answers.
    """
    if place == choice == 0:
        return seed % 2**64
    return int.from_bytes(hashlib.sha256(f"{seed}:{place}:{choice}".encode()).digest()[:8], "big")
