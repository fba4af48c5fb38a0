"""Compiles the variants of AITER's batch prefill that the provider calls, into the checkout in the working directory.

AITER compiles them at the first call that needs them, and PREBUILD_KERNELS=1 leaves them out. A variant's name and its
sources' generator come from AITER's own function, which runs alone: the module that contains it needs a GPU when it is
imported, and a build has none.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

_MODULE = "module_mha_batch_prefill"
_NAMING = "cmdGenFunc_mha_batch_prefill"
_DTYPES = (torch.bfloat16, torch.float16)


def naming_function(source: str, composable_kernel: str) -> Callable[..., dict[str, Any]]:
    """AITER's function from a call's arguments to the variant that serves it, cut out of aiter/ops/mha.py."""
    (body,) = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == _NAMING]
    # Annotations stay text, as in this file: the names in them are not imported here.
    code = compile(ast.Module([body], []), "aiter/ops/mha.py", "exec")
    dtypes = SimpleNamespace(fp16=torch.float16, bf16=torch.bfloat16, fp8=torch.float8_e4m3fnuz)
    names: dict[str, Any] = {"torch": torch, "dtypes": dtypes, "CK_DIR": composable_kernel}
    exec(code, names)
    function: Callable[..., dict[str, Any]] = names[_NAMING]
    return function


def variants(naming: Callable[..., dict[str, Any]]) -> list[dict[str, Any]]:
    """Lists the variants to build for causal attention, without a window, slopes, sinks, a soft cap or an LSE."""
    given = {
        "max_seqlen_q": 2,
        "max_seqlen_k": 2,
        "dropout_p": 0.0,
        "softmax_scale": 1.0,
        "logits_soft_cap": 0.0,
        "is_causal": True,
        "window_size_left": -1,
        "window_size_right": -1,
        "sink_size": 0,
        "zero_tensors": False,
        "return_softmax_lse": False,
        "return_dropout_randval": False,
    }
    parameters = inspect.signature(naming).parameters
    return [
        naming(**{name: SimpleNamespace(dtype=dtype) if name == "q" else given.get(name) for name in parameters})
        for dtype in _DTYPES
    ]


def _main() -> None:
    sys.path.insert(0, str(Path("aiter").resolve()))
    core = importlib.import_module("jit.core")  # as AITER's setup.py imports it
    naming = naming_function(Path("aiter/ops/mha.py").read_text(), core.CK_DIR)
    for variant in variants(naming):
        build = {**core.get_args_of_build(_MODULE), **variant}
        given = {name: build[name] for name in inspect.signature(core.build_module).parameters if name in build}
        core.build_module(**given)
        print(f"compiled {variant['md_name']}")


if __name__ == "__main__":
    _main()
