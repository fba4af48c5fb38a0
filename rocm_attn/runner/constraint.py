"""Constraint: what a request's text must look like. Which library checks it is runner/matching.py's to know."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rocm_attn.errors import BadRequest

# Characters of a constraint: longer ones take a while to be read, which is for nobody's good.
MOST_CHARACTERS = 1 << 16

ConstraintKind = Literal["json_schema", "regex", "lark"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the whole of a request's new text must match. Made by one of the functions below.

    kind: what the text is: a JSON schema, a regular expression, or a grammar in Lark's notation
    text: at most 65,536 characters

    Raises BadRequest.
    """

    kind: ConstraintKind
    text: str

    def __post_init__(self) -> None:
        if len(self.text) > MOST_CHARACTERS:
            raise BadRequest(
                f"the constraint has {len(self.text)} characters; at most {MOST_CHARACTERS} are allowed, so ask for less"
            )
        if not self.text:
            raise BadRequest("the constraint is empty; leave it out, or say what the text must match")

    @classmethod
    def json_schema(cls, schema: str | Mapping[str, Any]) -> Constraint:
        """A JSON value that a schema accepts. schema: as an object, or as its text"""
        return cls("json_schema", schema if isinstance(schema, str) else _as_json(schema))

    @classmethod
    def json_object(cls) -> Constraint:
        """Any JSON object."""
        return cls("json_schema", '{"type": "object"}')

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """A text that a regular expression matches from its first to its last character."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Constraint:
        """One of these texts."""
        if not texts or not all(texts):
            raise BadRequest("a choice needs texts to choose from, each with at least one character")
        return cls("lark", f"start: {' | '.join(map(_as_json, texts))}")

    @classmethod
    def grammar(cls, lark: str) -> Constraint:
        """A text that a context-free grammar gives, in the notation of Lark, from its rule `start` on."""
        return cls("lark", lark)


def _as_json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRequest(f"the constraint cannot be written as JSON ({error})") from error
