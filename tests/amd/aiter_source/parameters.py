"""The parameters of AITER's functions as a checkout's files declare them, read without importing anything."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any

from tests.amd.aiter_source.checkout import Checkout

# Files in which each function has been, the newest first.
_PLACES = {
    "unified_attention": (
        "aiter/ops/triton/attention/unified_attention.py",
        "aiter/ops/triton/unified_attention.py",
    ),
    "pa_decode_gluon": ("aiter/ops/triton/gluon/pa_decode_gluon.py",),
    "paged_attention_ragged": ("aiter/ops/attention.py",),
    "mha_batch_prefill_func": ("aiter/ops/mha.py",),
    "flash_attn_varlen_func": ("aiter/ops/mha.py",),
    "pa_fwd_asm": ("aiter/ops/attention.py",),
    "mla_decode_fwd": ("aiter/mla.py",),
    "mla_prefill_fwd": ("aiter/mla.py",),
    "get_mla_metadata_v1": ("aiter/ops/attention.py",),
}
NAMES = tuple(_PLACES)


def declared(checkout: Checkout, name: str) -> Callable[..., None]:
    """Returns a function of this name that does nothing and has the checkout's parameters; every default is None."""
    (path, *_) = (path for path in _PLACES[name] if (checkout.root / path).is_file())
    tree = ast.parse((checkout.root / path).read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name]
    # The last definition counts, as in the module.
    parameters = found[-1].args
    others = (*parameters.kwonlyargs, parameters.vararg, parameters.kwarg)
    assert not any(others), f"{name} takes more than plain parameters"
    names = [each.arg for each in (*parameters.posonlyargs, *parameters.args)]
    required = len(names) - len(parameters.defaults)
    signature = [
        inspect.Parameter(
            each,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=inspect.Parameter.empty if index < required else None,
        )
        for index, each in enumerate(names)
    ]

    def function(*args: Any, **kwargs: Any) -> None: ...

    function.__name__ = name
    function.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
    return function
