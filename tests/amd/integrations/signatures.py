"""FlashInfer's names and public signatures, read from its files: parameters, kinds and defaults.

    python -m tests.amd.integrations.signatures FOLDER

writes them to flashinfer_signatures.json. FOLDER: its package, as in its wheel. None of its code runs.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DATA = Path(__file__).with_name("flashinfer_signatures.json")
RELEASE = "0.7.2.post1"

# Module -> names, as in FlashInfer; a folder of several files has the module's name.
NAMES = {
    "attention": (
        "BatchAttention",
        "BatchAttentionWithAttentionSinkWrapper",
        "BatchPrefillWithCausalBidirectionalRangesWrapper",
    ),
    "decode": (
        "fast_decode_plan",
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
    "pod": ("BatchPODWithPagedKVCacheWrapper", "PODWithPagedKVCacheWrapper"),
    "quantization": ("packbits", "segment_packbits"),
    "rope": tuple(
        f"apply_{form}{copy}"
        for form in (
            "llama31_rope",
            "llama31_rope_pos_ids",
            "rope",
            "rope_pos_ids",
            "rope_with_cos_sin_cache",
        )
        for copy in ("", "_inplace")
    ),
    "sampling": (
        "chain_speculative_sampling",
        "min_p_sampling_from_probs",
        "sampling_from_logits",
        "sampling_from_probs",
        "softmax",
        "top_k_mask_logits",
        "top_k_renorm_probs",
        "top_k_sampling_from_probs",
        "top_k_top_p_sampling_from_logits",
        "top_k_top_p_sampling_from_probs",
        "top_p_renorm_probs",
        "top_p_sampling_from_probs",
    ),
    "sparse": ("BlockSparseAttentionWrapper", "VariableBlockSparseAttentionWrapper"),
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


def names_of_flashinfer(folder: Path) -> dict[str, str]:
    """Returns the public names at FlashInfer's top, each with the module it is from; "." for a module."""
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            found |= {each.asname or each.name: node.module or "." for each in node.names}
        # Names of fused_moe that its __getattr__ imports are in a set.
        if isinstance(node, ast.Set):
            found |= {str(ast.literal_eval(each)): "fused_moe" for each in node.elts}
    return {name: found[name] for name in sorted(found) if not name.startswith("_")}


def _record() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return found


def recorded() -> Signatures:
    """Returns the signatures of the release that was read last."""
    found: Signatures = _record()["signatures"]
    return found


def recorded_names() -> dict[str, str]:
    """Returns the names of the release that was read last, each with its module."""
    found: dict[str, str] = _record()["names"]
    return found


if __name__ == "__main__":
    package = Path(sys.argv[1])
    kept = {"release": RELEASE, "names": names_of_flashinfer(package), "signatures": of_flashinfer(package)}
    DATA.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
