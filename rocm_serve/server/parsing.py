"""Parsing of bodies: by pydantic's parser, which reads long texts in a tenth of the time of Python's own.

Either parser holds Python's lock from a body's first byte to its last. After a long one streams have a turn.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, TypeAdapter
from starlette.types import Receive, Scope, Send

from rocm_serve.server.api_errors import bad_request

_Body = TypeVar("_Body", bound=BaseModel)
_Handler = Callable[[_Body, Request], Awaitable[Response]]
_Route = tuple[type[_Body], Callable[[dict[str, Any]], None], _Handler[_Body]]

FAST: TypeAdapter[Any] = TypeAdapter(Any)
# Bytes of a body that takes a millisecond to parse.
LONG_BODY = 2**16
# Turns of the event loop until a token that has come is written: its pipe is read, the stream that waits for it is
# woken, and writes. One more where the engine is a thread of this process.
_TURNS = 4


async def let_streams_write(num_bytes: int) -> None:
    """Lets all streams write the tokens that came during a pass over a long body, before the next pass.

    num_bytes: of the body. A short one has no turn
    """
    for _ in range(_TURNS if num_bytes > LONG_BODY else 0):
        await asyncio.sleep(0)


def parsed(body: bytes) -> Any:
    """Returns the value of a text of JSON. Raises like json.loads."""
    try:
        return FAST.validate_json(body)
    except ValueError:
        # Python's parser reads more: halves of characters, and other encodings than UTF-8. Its errors say where.
        return json.loads(body)


def _value_of(body: bytes) -> Any:
    """Returns parsed(body). Raises ApiError."""
    try:
        return parsed(body)
    except json.JSONDecodeError as error:
        why = error.msg
    except UnicodeDecodeError as error:
        why = f"byte {error.start} is not UTF-8; send text in UTF-8"
    except RecursionError:
        why = "it is nested too deeply; send fewer levels"
    except ValueError:  # Python's bound on the digits of an integer
        why = "an integer has too many digits; send at most 4300"
    raise bad_request(f"the body is not JSON: {why}", code="invalid_json")


async def content_of(receive: Receive) -> Any:
    """Returns the value of a body, which the gate gives whole; None if it is empty. Raises ApiError."""
    body = (await receive())["body"]
    content, num_bytes = _value_of(body) if body else None, len(body)
    del body  # a long one is not kept until its request is answered
    await let_streams_write(num_bytes)
    return content


class BodyRoutes:
    """An ASGI application around FastAPI's. It serves the routes whose bodies the gate has read.

    FastAPI describes these routes, and answers other methods. Its own way to a handler takes longer than the handler.
    """

    def __init__(self, app: FastAPI) -> None:
        self._app, self._routes = app, dict[str, _Route[Any]]()

    def post(
        self, path: str, body: type[_Body], check: Callable[[dict[str, Any]], None] = lambda _: None
    ) -> Callable[[_Handler[_Body]], _Handler[_Body]]:
        """Returns a decorator of the handler of a path.

        check: looks at a body that is an object before pydantic looks at each item; may raise ApiError
        """

        def add(handler: _Handler[_Body]) -> _Handler[_Body]:
            self._routes[path] = body, check, handler
            return self._app.post(path)(handler)

        return add

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get(scope["path"]) if scope["method"] == "POST" else None
        if route is None:
            await self._app(scope, receive, send)
            return
        (kind, check, handler), request = route, Request(scope)
        try:
            content = await content_of(receive)
            if isinstance(content, dict):
                check(content)
            response = await handler(kind.model_validate(content), request)
        except Exception as error:
            handlers = self._app.exception_handlers
            answer = next(handlers[kind] for kind in type(error).__mro__ if kind in handlers)
            response = await answer(request, error)  # type: ignore[misc]  # none of ours is for websockets
        await response(scope, receive, send)
