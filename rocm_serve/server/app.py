"""The application: routes, and errors in OpenAI's form."""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp

import rocm_serve.request as engine_request
from rocm_attn.errors import RocmAttnError
from rocm_serve.sampling.logprobs import NO_LOGPROBS
from rocm_serve.server.api_errors import ApiError, bad_request
from rocm_serve.server.description import with_answers
from rocm_serve.server.emitted_tokens import EmittedTokens
from rocm_serve.server.event_stream import EventStream, error_response
from rocm_serve.server.gate import JOB, ServerGate
from rocm_serve.server.generation import Generations
from rocm_serve.server.health import Health
from rocm_serve.server.job import Job
from rocm_serve.server.keys import ApiKeys
from rocm_serve.server.long_json import long_json
from rocm_serve.server.observers import Observers
from rocm_serve.server.parsing import BodyRoutes
from rocm_serve.server.record import note_error, request_id
from rocm_serve.server.replies import (
    ChatReplies,
    CompletionReplies,
    PromptReport,
    Replies,
    with_prompt_logprobs,
    without_new_tokens,
)
from rocm_serve.server.response_replies import ResponseReplies
from rocm_serve.server.responses_body import ResponsesBody
from rocm_serve.server.schema import LEAST_DEADLINE_SECONDS, SHAPES, ChatBody, CompletionBody, GenerationBody
from rocm_serve.server.scrape import Scrape
from rocm_serve.server.served_model import ServedModel
from rocm_serve.server.text_routes import add_text_routes
from rocm_serve.server.truth import TruthProbe
from rocm_serve.server.unserved import no_such_path, refuse_unserved

# The header with which a client sets a deadline, in seconds. The body's field timeout does the same.
DEADLINE_HEADER = "x-request-timeout"
_CODES = {405: "method_not_allowed"}


def build_app(
    generations: Generations, model: ServedModel, keys: ApiKeys, observers: Observers, truth: TruthProbe
) -> ASGIApp:
    """Builds the ASGI application of a server."""
    app = FastAPI(title="rocm-attn", docs_url=None, redoc_url=None, redirect_slashes=False)
    routes = BodyRoutes(app)
    _add_status(app, generations, model, observers.health, truth)
    _add_generation(routes, generations, model)
    add_text_routes(app, routes, generations, model)
    _add_errors(app, generations)
    _document(app)
    return ServerGate(routes, generations, keys, observers, model.options)


def _add_status(app: FastAPI, generations: Generations, model: ServedModel, health: Health, truth: TruthProbe) -> None:
    scrape = Scrape(generations, model.name, health)

    @app.get("/health")
    async def server_health() -> Response:
        """Returns 200 if the server is well, and 503 with the reason if the engine has ended or the server fails."""
        generations.front.check()
        return _failing(health) if health.trouble else JSONResponse({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        """Returns 200 if requests should be sent here, and 503 while the server shuts down or is not well."""
        generations.front.check()
        if generations.jobs.is_draining:
            note_error(503, "draining", "the server is shutting down")
            return JSONResponse({"status": "draining"}, 503)
        return _failing(health) if health.trouble else JSONResponse({"status": "ready"})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Returns counts and times, in Prometheus' text format."""
        return PlainTextResponse(await scrape.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models")
    async def models() -> Response:
        """Returns the model that is served."""
        return JSONResponse({"object": "list", "data": [model.card]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        """Returns the model of this name."""
        model.require(name)
        return JSONResponse(model.card)

    @app.get("/health/truth")
    async def layers_truth() -> Response:
        """Returns the truth probe's verdict on each layer, with 503 if any is wrong."""
        verdict, age = await truth.verdict()
        content = {**verdict.as_dict(), "age_seconds": round(age, 3)}
        if verdict.word == "wrong":
            note_error(503, "wrong", verdict.sentence)
            return JSONResponse(content, 503)
        return JSONResponse(content)


def _failing(health: Health) -> Response:
    note_error(503, "failing", health.trouble)
    return JSONResponse({"status": "failing", "reason": health.trouble}, 503)


def _add_generation(routes: BodyRoutes, generations: Generations, model: ServedModel) -> None:
    @routes.post("/v1/completions", CompletionBody, model.refuse_large)
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continues prompts."""
        job = _job(request, body, model)
        requests = await job.wait_for(model.completion_requests(body, job.salt))
        echoed = model.echoed(body) if body.echo else ()
        replies = CompletionReplies(model.name, EmittedTokens(model.tokenizer), echoed, PromptReport.of(body))
        return await _answer(generations, job, requests, body, replies)

    @routes.post("/v1/chat/completions", ChatBody)
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Continues a conversation."""
        job = _job(request, body, model)
        requests = await job.wait_for(model.chat_requests(body, job.salt))
        reader, prompts = partial(model.reader_of, body, requests[0]), PromptReport.of(body)
        replies = ChatReplies(model.name, EmittedTokens(model.tokenizer), reader, prompts)
        return await _answer(generations, job, requests, body, replies)

    @routes.post("/v1/responses", ResponsesBody)
    async def responses(body: ResponsesBody, request: Request) -> Response:
        """Continues a conversation, in the form of OpenAI's newer API. Nothing is kept."""
        chat = body.as_chat
        job = _job(request, chat, model)
        requests = await job.wait_for(model.chat_requests(chat, job.salt))
        reader = partial(model.reader_of, chat, requests[0])
        replies = ResponseReplies(model.name, body, requests[0].sampling, reader, model.count_tokens)
        return await _answer(generations, job, requests, chat, replies)


def _job(request: Request, body: GenerationBody, model: ServedModel) -> Job:
    """Returns the job of a request, with its own deadline. Raises ApiError for requests that can be refused at once."""
    job: Job = request.scope[JOB]
    model.require(body.model)
    refuse_unserved(body.model_extra or {})
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options is for streams; leave it out, or set stream to true", "stream_options")
    if body.is_answered_by_echo and body.stream:
        raise bad_request("max_tokens is 0, so there is nothing to stream; set stream to false", "stream")
    header = request.headers.get(DEADLINE_HEADER)
    if header is not None:
        job.hasten(_seconds(header))
    if body.timeout is not None:
        job.hasten(body.timeout)
    return job


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds >= LEAST_DEADLINE_SECONDS:
        raise bad_request(
            f"the header {DEADLINE_HEADER} is {text[:100]!r}; it must be a number of seconds, at least "
            f"{LEAST_DEADLINE_SECONDS}"
        )
    return seconds


async def _answer(
    generations: Generations,
    job: Job,
    requests: Sequence[engine_request.Request],
    body: GenerationBody,
    replies: Replies,
) -> Response:
    num_choices = body.n or 1
    generation = await generations.begin(job, requests, num_choices)
    if body.stream:
        return EventStream(generations, generation, replies, usage=body.includes_usage)
    completions = await generation.completions()
    if body.is_answered_by_echo:
        completions = list(map(without_new_tokens, completions))
    usage = generation.usage(sum(len(each.token_ids) for each in completions))
    if requests[0].logprobs == requests[0].prompt_logprobs == NO_LOGPROBS:
        return JSONResponse(replies.whole(completions, usage))
    completions = with_prompt_logprobs(completions, num_choices)
    # Logprobs decode every token again, and up to 20 others with it: a long answer would block the event loop.
    answer = await asyncio.to_thread(lambda: long_json(replies.whole(completions, usage)))
    return Response(answer, media_type="application/json")


def _add_errors(app: FastAPI, generations: Generations) -> None:
    @app.exception_handler(ApiError)
    async def of_api(request: Request, error: ApiError) -> Response:
        return error_response(error)

    @app.exception_handler(RocmAttnError)
    async def of_engine(request: Request, error: RocmAttnError) -> Response:
        return error_response(generations.as_answer(error))

    @app.exception_handler(ValidationError)
    async def of_body(request: Request, error: ValidationError) -> Response:
        return error_response(_bad_body(error.errors()))

    @app.exception_handler(HTTPException)
    async def of_http(request: Request, error: HTTPException) -> Response:
        if error.status_code == 404:
            served = (route.path for route in app.routes if isinstance(route, Route))
            return error_response(no_such_path(request.url.path, served))
        headers, sentence = error.headers or {}, str(error.detail)
        if error.status_code == 405:
            sentence = f"{request.url.path} does not serve {request.method}; it serves {headers.get('Allow', 'others')}"
        answer = ApiError(error.status_code, sentence, code=_CODES.get(error.status_code, "bad_request"))
        response = error_response(answer)
        response.headers.update(headers)
        return response

    @app.exception_handler(Exception)
    async def of_mistake(request: Request, error: Exception) -> Response:
        logging.getLogger(__name__).error("an internal error in request %s", request_id(), exc_info=error)
        note_error(500, "internal_error", f"{type(error).__name__}, whose traceback is in the log")
        return error_response(
            ApiError(500, "an internal error of the server; its log has the details", code="internal_error")
        )


def _bad_body(errors: Sequence[Any]) -> ApiError:
    """Returns the first error. The answer repeats nothing of the body, which may be long or not Unicode."""
    first = errors[0]
    where = list(map(str, first["loc"]))
    if first["type"] == "string_unicode" and not where:
        return bad_request("the name of a field has half of a character; give whole characters")
    if not where:
        return bad_request("the body must be a JSON object, sent with Content-Type: application/json")
    field = where[0]
    if first["type"] == "missing" and len(where) == 1:
        return bad_request(f"{field} is missing", field, code="missing_required_parameter")
    if field in SHAPES and (len(where) > 1 or first["type"] != "string_type"):  # /tokenize has a prompt of one form
        at = f"; {_place(errors)} is wrong" if len(where) > 1 and where[1].isdigit() else ""
        return bad_request(f"{SHAPES[field]}{at}", field)
    return bad_request(f"{'.'.join(where)}: {first['msg']}", field)


def _place(errors: Sequence[Any]) -> str:
    """Returns the innermost wrong place in the first wrong item, without pydantic's names of a value's forms."""
    item = errors[0]["loc"][:2]
    innermost = max((error for error in errors if error["loc"][:2] == item), key=lambda error: len(error["loc"]))
    place = map(str, innermost["loc"])
    return ".".join(part for part in place if part.isdigit() or (part.isidentifier() and part != "str"))


def _document(app: FastAPI) -> None:
    """Adds answers and errors to the OpenAPI description."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        # made() caches its description, and with_answers() changes that in place at the first call
        return app.openapi_schema or with_answers(made())

    app.openapi = openapi  # type: ignore[method-assign]
