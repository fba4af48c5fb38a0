"""Finding: what ends a seed, because it must not be; and the outcome of a seed."""

from collections.abc import Callable
from dataclasses import dataclass


class Finding(Exception):
    """Something went wrong and nothing reported it; the message says what."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a seed or of some sequences of calls.

    findings: what went wrong unreported, with the last calls
    counts:   calls, comparisons and what was reported or refused, by a word for each kind
    """

    findings: tuple[str, ...]
    counts: dict[str, int]


def finding_of(life: Callable[[], None]) -> str:
    """Runs a function. Returns what it finds, or an empty string."""
    try:
        life()
    except Finding as found:
        return str(found)
    except Exception as error:
        # Whatever is no word of the runtime's own came from inside it.
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return ""
