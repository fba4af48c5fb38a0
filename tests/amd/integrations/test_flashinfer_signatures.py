"""Our functions have FlashInfer's names, its parameters in its order, and its defaults."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rocm_attn.integrations import flashinfer
from rocm_attn.integrations.flashinfer.signatures import recorded
from tests.amd.integrations.signatures import LEFT_OUT, NAMES, of_flashinfer

pytestmark = pytest.mark.fast(interpreted=0)

# An unpacked wheel of FlashInfer; without one, the recorded signatures are used.
FOLDER = os.environ.get("FLASHINFER_PACKAGE", "")
THEIRS = of_flashinfer(Path(FOLDER)) if FOLDER else recorded()


def parameters(function: Callable[..., Any]) -> str:
    """Returns a function's parameters as the record has them."""
    signature = inspect.signature(function)
    return str(
        signature.replace(
            parameters=[each.replace(annotation=each.empty) for each in signature.parameters.values()],
            return_annotation=signature.empty,
        )
    )[1:-1]


@pytest.mark.parametrize("name", [name for name in THEIRS if name.rpartition(".")[2] not in LEFT_OUT])
def test_every_parameter_is_where_flashinfer_has_it(name: str) -> None:
    owner, _, method = name.partition(".")
    found = inspect.getattr_static(getattr(flashinfer, owner), method) if method else getattr(flashinfer, owner)
    if isinstance(found, property):
        found = found.fget
    elif method:
        found = getattr(getattr(flashinfer, owner), method)
        found = getattr(found, "__func__", found)
    assert parameters(found) == THEIRS[name]


def test_each_name_is_in_the_module_of_flashinfers_and_in_the_package() -> None:
    for module, names in NAMES.items():
        for name in names:
            assert getattr(flashinfer, name) is getattr(getattr(flashinfer, module), name)
            assert name in flashinfer.__all__
