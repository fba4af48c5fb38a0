"""Refuses JSON schemas before they are compiled: those that no finite value matches, and those too expensive."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

from rocm_attn.errors import BadRequest

# Most remainders of a schema: the least common multiple of all its multipleOf, in units of their common divisor. A
# digit's place has a state for each remainder. 10,000 compile in a third of a second, 1,000,000 in more than a minute.
MOST_REMAINDERS = 10_000
_LONGEST_PLACE = 100
# Larger numbers are not written in full: Python refuses to write one of thousands of digits.
_PRINTED = 10**18


def require_ends(schema: Any) -> None:
    """Raises BadRequest for a schema that refers to itself without an end, or whose multipleOf are too large.

    schema: as parsed JSON. The library reports its other errors.
    """
    parts = _Parts(schema)
    endless = parts.endless()
    if endless:
        raise BadRequest(
            f"the JSON schema never ends at {endless[:_LONGEST_PLACE]!r}: each value there requires another one of "
            "its kind; make one of the references optional"
        )
    _require_few_remainders(parts.steps)


def _require_few_remainders(steps: list[int | float]) -> None:
    """Raises BadRequest for too many remainders. steps: the values of multipleOf"""
    # A whole number may be too large for a float.
    exact = [
        Fraction(step) if isinstance(step, int) else Fraction(Decimal(str(step)))
        for step in steps
        if 0 < step < math.inf
    ]
    scale = math.lcm(*(step.denominator for step in exact))
    found = math.lcm(*(int(step * scale) for step in exact))
    if found > MOST_REMAINDERS:
        multiple, unit = (str(number) if number < _PRINTED else f"above {_PRINTED}" for number in (found, scale))
        raise BadRequest(
            f"the values of multipleOf in the JSON schema have the least common multiple {multiple} in units of "
            f"1/{unit}; at most {MOST_REMAINDERS} is allowed, so use rounder ones"
        )


@dataclass(slots=True)
class _Parts:
    """The schemas within a schema that a value may have to match. They are numbered; 0 is the whole.

    places: where each is, as a JSON pointer
    steps:  the values of multipleOf
    """

    root: Any
    places: list[str] = field(default_factory=list)
    steps: list[int | float] = field(default_factory=list)
    _number_of: dict[int, int] = field(default_factory=dict)  # by the object's identity
    _schemas: list[dict[str, Any]] = field(default_factory=list)

    def endless(self) -> str:
        """The place of a schema that no finite value matches; "" if there is none."""
        if self._number(self.root, "#") is None:
            return ""
        needs: list[list[list[int]]] = []
        for number, schema in enumerate(self._schemas):  # it grows
            needs.append(self._needs(schema, self.places[number]))
        unmet, waiting = [len(groups) for groups in needs], dict[int, list[tuple[int, int]]]()
        for number, groups in enumerate(needs):
            for place, group in enumerate(groups):
                for other in group:
                    waiting.setdefault(other, []).append((number, place))
        finite, met = [number for number, left in enumerate(unmet) if not left], set[tuple[int, int]]()
        for number in finite:  # it grows
            for need in waiting.get(number, ()):
                if need not in met:
                    met.add(need)
                    unmet[need[0]] -= 1
                    if not unmet[need[0]]:
                        finite.append(need[0])
        return next((self.places[number] for number, left in enumerate(unmet) if left), "")

    def _needs(self, schema: dict[str, Any], place: str) -> list[list[int]]:
        """The lists of schemas of which one each must have a finite value, so that this schema has one."""
        step = schema.get("multipleOf")
        if isinstance(step, int | float) and not isinstance(step, bool):
            self.steps.append(step)
        groups = [[number] for number in self._referred(schema)]
        for name in ("allOf", "anyOf", "oneOf"):
            numbers = list(self._numbers(schema.get(name), f"{place}/{name}"))
            groups += [[number] for number in numbers] if name == "allOf" else [numbers] if numbers else []
        return groups + self._in_objects(schema, place) + self._in_arrays(schema, place)

    def _referred(self, schema: dict[str, Any]) -> Iterator[int]:
        reference = schema.get("$ref")
        if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
            found = self.root
            for key in reference.split("/")[1:]:
                name = unquote(key).replace("~1", "/").replace("~0", "~")
                if isinstance(found, list):
                    # No list has as many places as a number of ten digits, and Python refuses to read one of thousands.
                    place = int(name) if name.isdecimal() and len(name) < 10 else len(found)
                    found = found[place] if place < len(found) else None
                else:
                    found = found.get(name) if isinstance(found, dict) else None
            number = self._number(found, reference)
            if number is not None:
                yield number

    def _in_objects(self, schema: dict[str, Any], place: str) -> list[list[int]]:
        of_name: dict[str, int | None] = {}
        for keyword in ("properties", "patternProperties"):
            each = schema.get(keyword)
            for name, value in each.items() if isinstance(each, dict) else ():
                number = self._number(value, f"{place}/{keyword}/{name}")
                if keyword == "properties":
                    of_name[name] = number
        self._number(schema.get("additionalProperties"), f"{place}/additionalProperties")
        required = schema.get("required")
        if schema.get("type") != "object" or not isinstance(required, list):
            return []
        numbers = (of_name.get(name) for name in required if isinstance(name, str))
        return [[number] for number in numbers if number is not None]

    def _in_arrays(self, schema: dict[str, Any], place: str) -> list[list[int]]:
        first = schema.get("prefixItems")
        fixed = [self._number(each, f"{place}/prefixItems") for each in first] if isinstance(first, list) else []
        others = self._number(schema.get("items"), f"{place}/items")
        least = schema.get("minItems")
        if schema.get("type") != "array" or not isinstance(least, int):
            return []
        needed = [*fixed[:least], *([others] if least > len(fixed) else [])]
        return [[number] for number in needed if number is not None]

    def _numbers(self, schemas: Any, place: str) -> Iterator[int]:
        """The numbers of a list's schemas; a schema that everything or nothing matches has none."""
        for index, each in enumerate(schemas if isinstance(schemas, list) else ()):
            number = self._number(each, f"{place}/{index}")
            if number is not None:
                yield number

    def _number(self, schema: Any, place: str) -> int | None:
        if not isinstance(schema, dict):
            return None
        if id(schema) not in self._number_of:
            self._number_of[id(schema)] = len(self._schemas)
            self._schemas.append(schema)
            self.places.append(place)
        return self._number_of[id(schema)]
