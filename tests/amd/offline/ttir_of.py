"""The TTIR of what a call launches, for a GPU that is not present. Nothing after it is made: a kernel takes 30 ms."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import triton
from triton._C.libtriton import ir
from triton.compiler import ASTSource, make_backend

from tests.amd.offline.offline_driver import GPU_TARGETS, launched_offline


def ttir_by(call: Callable[[], object], arch: str, *, wants: Callable[[str], bool] = lambda name: True) -> list[str]:
    """The TTIR of each variant that call launches, of kernels with wanted names. Gluon's kernels have none."""
    found: dict[tuple[str, str], str] = {}

    def hook(*, key: str, fn: Any, compile: dict[str, Any], **rest: object) -> bool:
        function = fn.jit_function
        name = str(function.repr(None)).rpartition(".")[2]
        if not function.is_gluon() and wants(name) and (name, key) not in found:
            found[name, key] = _ttir(function, compile, arch)
        return True  # it is not compiled

    with launched_offline(arch), patch.object(triton.knobs.runtime, "jit_cache_hook", hook):
        call()
    return list(dict.fromkeys(found.values()))


def _ttir(function: Any, compile: dict[str, Any], arch: str) -> str:
    target = GPU_TARGETS[arch]
    backend, context = make_backend(target), ir.context()
    source = ASTSource(function, compile["signature"], compile["constants"], compile["configs"][0])
    options = backend.parse_options({})
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    helpers, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    return str(stages["ttir"](source.make_ir(target, options, helpers, modules, context), {}))
