"""The JSON of call arguments: its numbers are finite and fit Python's types."""

import json
import math
from typing import NoReturn


def _finite(written: str) -> float:
    number = float(written)
    if math.isinf(number):
        raise ValueError(f"{written} is too large")
    return number


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


# Raises ValueError, also for integers of more than 4,300 digits, and RecursionError.
FINITE_JSON = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse)
