"""Routes that OpenAI lacks, with vLLM's names and fields: texts and their tokens, and small facts about the server."""

import asyncio
import json
from collections.abc import Sequence
from typing import Annotated

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from rocm_attn.machine.distributions import version_of_package
from rocm_serve.server.api_errors import bad_request
from rocm_serve.server.gate import JOB
from rocm_serve.server.generation import Generations
from rocm_serve.server.job import Job
from rocm_serve.server.parsing import BodyRoutes
from rocm_serve.server.schema import Messages, TokenIds
from rocm_serve.server.served_model import ServedModel
from rocm_serve.server.template_fields import TemplateFields
from rocm_serve.server.tools import MOST_TOOLS, Tool
from rocm_serve.server.unserved import refuse_unserved
from rocm_serve.text.chat_template import ChatTemplate
from rocm_serve.text.tokenizer import Tokenizer

# Items of a list that one call writes as JSON.
PIECE = 4096


class _TextBody(BaseModel):
    """model: the one that is served, if it is given"""

    model_config = ConfigDict(strict=True, extra="allow")

    model: Annotated[str, Field(max_length=1024)] | None = None


class TokenizeBody(_TextBody, TemplateFields):
    """The body of /tokenize. The fields of a template are for messages.

    prompt, messages:   one of the two
    add_special_tokens: whether a prompt gets the tokens that the model puts before a text; it does by default. A
                        conversation has those of its template
    return_token_strs:  whether the vocabulary's entries are returned too
    """

    prompt: str | None = None
    messages: Messages | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(_TextBody):
    """The body of /detokenize."""

    tokens: TokenIds


def add_text_routes(app: FastAPI, routes: BodyRoutes, generations: Generations, model: ServedModel) -> None:
    """Adds the routes to an application."""

    @routes.post("/tokenize", TokenizeBody)
    async def tokenize(body: TokenizeBody, request: Request) -> Response:
        """Returns the tokens of a prompt, or of a conversation."""
        tokenizer = model.writer(_tokenizer_for(model, body), body.chat_template)
        assert model.tokenising is not None, "there is a tokenizer"
        said = [body.prompt or "", *(each.as_template["content"] for each in body.messages or ())]
        job: Job = request.scope[JOB]
        answer = await job.wait_for(
            model.tokenising.in_thread(sum(map(len, said)), _tokens_answer, tokenizer, body, model)
        )
        return Response(answer, media_type="application/json")

    @routes.post("/detokenize", DetokenizeBody, model.refuse_many_tokens)
    async def detokenize(body: DetokenizeBody, _: Request) -> Response:
        """Returns the text of tokens, with the names of special ones."""
        tokenizer = _tokenizer_for(model, body)
        model.limits.check_tokens(body.tokens)
        return JSONResponse({"prompt": await asyncio.to_thread(tokenizer.decode_all, body.tokens)})

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """Returns the chat template, and the texts of the tokens that it may name; null for what the model lacks."""
        tokenizer = _require_tokenizer(model)
        template = tokenizer.chat_template or ChatTemplate("")
        answer = {"chat_template": template.source, "bos_token": "", "eos_token": "", **template.tokens}
        return JSONResponse({name: text or None for name, text in answer.items()})

    @app.get("/version")
    async def served_version() -> Response:
        """Returns the version of the package rocm-serve."""
        return JSONResponse({"version": version_of_package("rocm_serve")})

    @app.get("/ping")
    @app.post("/ping")
    async def ping() -> Response:
        """Returns 200 if the engine serves."""
        generations.front.check()
        return JSONResponse({})

    @app.get("/load")
    async def load() -> Response:
        """Returns the number of requests that are not answered to the last byte."""
        return JSONResponse({"server_load": len(generations.jobs)})


def _tokenizer_for(model: ServedModel, body: _TextBody) -> Tokenizer:
    """Raises ApiError for a body that is not served."""
    if body.model is not None:
        model.require(body.model)
    refuse_unserved(body.model_extra or {})
    return _require_tokenizer(model)


def _require_tokenizer(model: ServedModel) -> Tokenizer:
    if model.tokenizer is None:
        raise bad_request("the model has no tokenizer, so texts have no tokens and tokens no text")
    return model.tokenizer


def _tokens_answer(tokenizer: Tokenizer, body: TokenizeBody, model: ServedModel) -> bytes:
    """Returns the answer, as JSON. Raises like _tokens_of."""
    tokens = _tokens_of(tokenizer, body, model)
    entries = "null"
    if body.return_token_strs:
        entries = _written([tokenizer.backend.id_to_token(token) for token in tokens])
    numbers = f'"count":{len(tokens)},"max_model_len":{model.max_len}'
    return f'{{{numbers},"tokens":{_written(tokens)},"token_strs":{entries}}}'.encode()


def _written(items: Sequence[int | str | None]) -> str:
    """Returns a list as JSON. It is written in pieces, between which other threads can have Python's lock."""
    pieces = (items[begin : begin + PIECE] for begin in range(0, len(items), PIECE))
    return f"[{','.join(json.dumps(piece, separators=(',', ':'))[1:-1] for piece in pieces)}]"


def _tokens_of(tokenizer: Tokenizer, body: TokenizeBody, model: ServedModel) -> list[int]:
    """Raises ApiError, BadRequest, BadModel."""
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("the body has both prompt and messages, or neither; give one of them", "prompt")
    if body.prompt is not None:
        return (
            tokenizer.encode_unmarked(body.prompt)
            if body.add_special_tokens is False
            else tokenizer.encode(body.prompt)
        )
    if body.add_special_tokens:
        raise bad_request(
            "add_special_tokens is set together with messages, whose template writes special tokens itself; leave it "
            "out",
            "add_special_tokens",
        )
    messages = model.messages(body.messages or (), tokenizer)
    return tokenizer.encode_messages(
        messages, [tool.as_template for tool in body.tools or ()], body.rendering(messages[-1])
    )
