"""The parts of OpenAI's and similar APIs that this server has not: each is refused with its reason.

An answer that silently differs from the request is worse than none. Fields that change nothing in an answer are ignored
instead, as all unknown ones are.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rocm_serve.server.api_errors import ApiError, bad_request


class Unserved(NamedTuple):
    """A field that is refused. why: in words; harmless: values with which it changes no answer"""

    why: str
    harmless: tuple[Any, ...]


# Table -> why something is refused -> what is: fields, each with its harmless values besides null, or paths.
_REFUSED = json.loads(Path(__file__).with_name("unserved.json").read_text("utf-8"))


def _fields(table: str) -> Mapping[str, Unserved]:
    each = ((why, field) for why, fields in _REFUSED[table].items() for field in fields.items())
    return {name: Unserved(why, (None, *harmless)) for why, (name, harmless) in each}


# The second one is of /v1/responses, where they have another meaning than in a conversation, or none.
FIELDS, OF_RESPONSES = _fields("fields"), _fields("responses")
# Path, with all below it -> why nothing is there.
PATHS: Mapping[str, str] = {path: why for why, paths in _REFUSED["paths"].items() for path in paths}


def refuse_unserved(given: Mapping[str, Any], fields: Mapping[str, Unserved] = FIELDS) -> None:
    """Raises ApiError for a field that would change the answer. given: fields that a body has and its form has not"""
    for name, value in given.items():
        unserved = fields.get(name)
        if unserved is not None and value not in unserved.harmless:
            raise bad_request(f"not served: {name}; {unserved.why}; leave it out", name, code="unsupported_parameter")


def no_such_path(path: str, served: Iterable[str]) -> ApiError:
    """Returns the answer to a request for a path that is not served. served: those that are"""
    parents = (path[:end] for end in range(len(path), 0, -1) if end == len(path) or path[end] == "/")
    why = next((PATHS[parent] for parent in parents if parent in PATHS), None)
    if why is None:
        # Base URLs of clients lack /v1, or have it twice.
        near = [each for each in served if path.rstrip("/").endswith(each.removeprefix("/v1"))]
        hint = f"did you mean {max(near, key=len)}? " if near else ""
        return ApiError(404, f"there is no {path}; {hint}GET /openapi.json lists the paths", code="not_found")
    return ApiError(404, f"not served: {path}; {why}", code="not_served")
