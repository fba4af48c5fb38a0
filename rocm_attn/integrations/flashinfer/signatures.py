"""FlashInfer's signatures, and functions of ours that have them.

flashinfer_signatures.json has the parameters of its functions as its files write them, without types. A function here
that is bound to one takes all of its arguments as one value, by FlashInfer's names. So no parameter is written twice,
and one that is not served is refused in one place.
"""

import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

from rocm_attn.errors import Unsupported
from rocm_attn.integrations.flashinfer.names import reasons

DATA = Path(__file__).parent.with_name("flashinfer_signatures.json")
# Arguments that FlashInfer takes -> why they are refused: by each function, and by those here that do not serve them.
ALWAYS_REFUSED, _REFUSED_BY_SOME = reasons("arguments"), reasons("arguments_of_some")

Result = TypeVar("Result")


class Given(SimpleNamespace):
    """The arguments of a call, by FlashInfer's names."""


def refuse(**given: object) -> None:
    """Raises Unsupported with the reason for the first argument that is neither None, False nor empty."""
    for name, value in given.items():
        if value is not None and value is not False and (isinstance(value, Tensor) or value not in ((), {})):
            raise Unsupported(f"{name} is not served: {(ALWAYS_REFUSED | _REFUSED_BY_SOME)[name]}")


@functools.cache
def recorded() -> dict[str, str]:
    """Returns the parameters of each function or Class.method of FlashInfer's."""
    texts: dict[str, str] = json.loads(DATA.read_text("utf-8"))["signatures"]
    return texts


def as_in_flashinfer(function: Callable[[Any, Given], Result]) -> Callable[..., Result]:
    """Gives a function the parameters of FlashInfer's function of its name.

    function: gets the first argument, which may be a wrapper, and the others by their names. Those that are not served
              are refused before. A call raises TypeError as Python does, and Unsupported
    """
    # Python binds arguments by a function that returns them: no other way is as fast, and run() is called per layer.
    bind: Callable[..., dict[str, Any]] = eval(
        f"lambda {recorded()[function.__qualname__]}: locals()", {"torch": torch}
    )
    bind.__qualname__ = function.__qualname__  # in the errors of calls
    signature = inspect.signature(bind)
    first, *others = signature.parameters.values()
    refused = {
        of.name: () if of.kind is of.VAR_POSITIONAL else of.default for of in others if of.name in ALWAYS_REFUSED
    }

    @functools.wraps(function)
    def bound(*args: Any, **named: Any) -> Result:
        given = bind(*args, **named)
        for name, default in refused.items():
            if (value := given[name]) is not default:
                refuse(**{name: None if isinstance(value, str) and value == default else value})
        return function(given.pop(first.name), Given(**given))

    bound.__signature__ = signature  # type: ignore[attr-defined]
    return bound
