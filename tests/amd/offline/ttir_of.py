"""The TTIR of what a call launches, for a GPU that is not present. Nothing after TTIR is made: it takes a moment."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import triton
from triton._C.libtriton import ir
from triton.compiler import ASTSource, make_backend

from tests.amd.offline.offline_driver import GPU_TARGETS, launched_offline


def ttir_by(call: Callable[[], object], arch: str, *, skips: Callable[[str], bool] = lambda _: False) -> dict[str, str]:
    """The TTIR of each variant that call launches, by the kernel's name and a number. Gluon's kernels have none.

    skips: true for names of kernels that are left out
    """
    found: dict[str, str] = {}

    def hook(*, key: str, fn: Any, compile: dict[str, Any], **rest: object) -> bool:
        function = fn.jit_function
        name = str(function.repr(None)).rpartition(".")[2]
        if not function.is_gluon() and not skips(name) and not (name, key) in seen:
            seen[name, key] = None
            number = sum(each == name for each, _ in seen)
            found[f"{name} {number}"] = _ttir(function, compile, arch)
        return True  # it is not compiled

    seen: dict[tuple[str, str], None] = {}
    with launched_offline(arch), patch.object(triton.knobs.runtime, "jit_cache_hook", hook):
        call()
    return found


def _ttir(function: Any, compile: dict[str, Any], arch: str) -> str:
    target = GPU_TARGETS[arch]
    backend, context = make_backend(target), ir.context()
    source = ASTSource(function, compile["signature"], compile["constants"], compile["configs"][0])
    options = backend.parse_options({k: v for k, v in compile.items() if k in ("num_warps", "num_stages", "debug")})
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    module = source.make_ir(
        target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    )
    return str(stages["ttir"](module, {}))
