"""FlashInfer's public signatures, read from its files: names, kinds and defaults.

    python -m tests.amd.integrations.signatures FOLDER

writes those of FlashInfer to flashinfer_signatures.json. FOLDER: its package, as in its wheel. None of its code runs.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

DATA = Path(__file__).with_name("flashinfer_signatures.json")
RELEASE = "0.7.2.post1"

# Module -> names, as in FlashInfer; a folder of several files has the module's name.
NAMES = {
    "decode": (
        "single_decode_with_kv_cache",
        "BatchDecodeWithPagedKVCacheWrapper",
        "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    ),
    "prefill": (
        "single_prefill_with_kv_cache",
        "BatchPrefillWithPagedKVCacheWrapper",
        "BatchPrefillWithRaggedKVCacheWrapper",
    ),
    "cascade": (
        "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
        "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
        "MultiLevelCascadeAttentionWrapper",
        "merge_state",
        "merge_state_in_place",
        "merge_states",
    ),
    "mla": ("BatchMLAPagedAttentionWrapper", "MLAPlanMetadata"),
    "page": (
        "append_paged_kv_cache",
        "append_paged_mla_kv_cache",
        "get_batch_indices_positions",
        "get_seq_lens",
    ),
}

# Methods of FlashInfer that mean nothing here, because they concern its own memory and kernels.
LEFT_OUT = {"workspace_size", "prewarm_paged_kv_stride_variant", "resolved_backend"}

# function or Class.method -> parameters as "name", "name=default", "*args", and "*" before keyword-only ones
Signatures = dict[str, list[str]]


def _parameters(node: ast.FunctionDef) -> list[str]:
    of = node.args
    defaults: list[ast.expr | None] = [None] * (len(of.args) - len(of.defaults)) + list(of.defaults)
    found = [_said(argument, default) for argument, default in zip(of.args, defaults, strict=True)]
    if of.vararg is not None or of.kwonlyargs:
        found.append("*" if of.vararg is None else f"*{of.vararg.arg}")
    found += [_said(argument, default) for argument, default in zip(of.kwonlyargs, of.kw_defaults, strict=True)]
    return found + ([] if of.kwarg is None else [f"**{of.kwarg.arg}"])


def _said(argument: ast.arg, default: ast.expr | None) -> str:
    return argument.arg if default is None else f"{argument.arg}={ast.unparse(default)}"


def _functions(tree: ast.Module, names: tuple[str, ...]) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yields functions of these names without overloads; for classes, public methods, __init__ and _plan_impl."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name in names and not _is_overload(node):
            yield node.name, node
        if isinstance(node, ast.ClassDef) and node.name in names:
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and not _is_overload(method) and _is_public(method.name):
                    yield f"{node.name}.{method.name}", method


def _is_overload(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator) == "overload" for decorator in node.decorator_list)


def _is_public(name: str) -> bool:
    return not name.startswith("_") or name in ("__init__", "_plan_impl")


def of_flashinfer(folder: Path) -> Signatures:
    """Returns the signatures of a package, in which a module may be a file or a folder."""
    found: Signatures = {}
    for module, names in NAMES.items():
        for path in [folder / f"{module}.py", *sorted((folder / module).rglob("*.py"))]:
            if path.is_file():
                tree = ast.parse(path.read_text(encoding="utf-8"))
                found |= {name: _parameters(node) for name, node in _functions(tree, names)}
    return found


def recorded() -> Signatures:
    """Returns the signatures of the release that was read last."""
    found: Signatures = json.loads(DATA.read_text(encoding="utf-8"))["signatures"]
    return found


if __name__ == "__main__":
    kept = {"release": RELEASE, "signatures": of_flashinfer(Path(sys.argv[1]))}
    DATA.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
