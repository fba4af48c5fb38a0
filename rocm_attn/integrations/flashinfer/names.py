"""FlashInfer's names that are not served: for each one the reason, and what to use.

flashinfer_refused.json has them. The served names are those of __init__.pyi. Both lists follow FlashInfer's own
__init__.py.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rocm_attn.errors import Unsupported

# Table -> reason, and what to use -> the names that it is the reason for.
TABLES: Mapping[str, Mapping[str, Sequence[str]]] = json.loads(
    Path(__file__).parent.with_name("flashinfer_refused.json").read_text("utf-8")
)


def reasons(table: str) -> dict[str, str]:
    """Returns name -> why it is not served, of one of the tables."""
    return {name: reason for reason, names in TABLES[table].items() for name in names}


# FlashInfer's names, and attributes of its wrappers that are not public and that engines read.
REFUSED, REFUSED_ATTRIBUTES = reasons("names"), reasons("attributes")


class NotServed(Unsupported, AttributeError):
    """A name that is not served was read. It is an AttributeError, so getattr() with a default and hasattr() work."""


class NotImportable(Unsupported, ImportError):
    """A name that is not served was imported."""


def refuse_name(name: str) -> None:
    """Raises NotServed, or NotImportable in an import statement, if FlashInfer has the name and it is not served."""
    reason = REFUSED.get(name)
    if reason is None:
        return
    sentence = f"flashinfer.{name} is not served: {reason}"
    # `from flashinfer import name` asks by hasattr() in importlib, and replaces an AttributeError by a sentence without
    # the reason. Frame 1 is __getattr__, and frame 2 its caller.
    if sys._getframe(2).f_code.co_name == "_handle_fromlist":
        raise NotImportable(sentence)
    raise NotServed(sentence)
