"""Parsing of bodies: by pydantic's parser, which reads long texts in a tenth of the time of Python's own.

Either parser holds Python's lock from a body's first byte to its last. After a long one streams have a turn.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from fastapi import Depends, Request, Response
from fastapi.routing import APIRoute
from pydantic import TypeAdapter

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
    """Returns parsed(body). Raises JSONDecodeError alone: FastAPI hides the reason of any other error."""
    try:
        return parsed(body)
    except json.JSONDecodeError:
        raise
    except UnicodeDecodeError as error:
        raise json.JSONDecodeError(f"byte {error.start} is not UTF-8; send text in UTF-8", "", 0) from error
    except RecursionError as error:
        raise json.JSONDecodeError("it is nested too deeply; send fewer levels", "", 0) from error
    except ValueError as error:  # Python's bound on the digits of an integer
        raise json.JSONDecodeError("an integer has too many digits; send at most 4300", "", 0) from error


class ParsedRequest(Request):
    """A request whose body is read by parsed(), once. Its bytes are not kept: FastAPI would until it is answered."""

    async def body(self) -> bytes:
        """Returns a blank in the place of a body that is not empty. Raises like json.loads."""
        if not hasattr(self, "_body"):
            body = (await self.receive())["body"]  # the gate gives it whole
            if body:
                self._json, num_bytes, body = _value_of(body), len(body), b" "
                await let_streams_write(num_bytes)
            self._body = body
        return self._body

    async def json(self) -> Any:
        """Returns the value of the body. Raises like json.loads."""
        return self._json if await self.body() else parsed(b"")


class ParsedRoute(APIRoute):
    """A route whose handler gets a ParsedRequest."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Returns the handler of the route."""
        handle = super().get_route_handler()

        async def handle_parsed(request: Request) -> Response:
            return await handle(ParsedRequest(request.scope, request.receive))

        return handle_parsed


def looks_at(name: str, check: Callable[[object], None]) -> Any:
    """Returns a route's dependency: check gets a field of the body before pydantic looks at each item.

    It gets None if there is no such field, and may raise ApiError. The body is parsed once for both.
    """

    async def look(request: Request) -> None:
        with suppress(ValueError):  # not JSON, which FastAPI reports
            content = await request.json()
            check(content.get(name) if isinstance(content, dict) else None)

    return Depends(look)
