"""FlashInfer's names and public signatures, read from its files: parameters, kinds and defaults.

    python -m tests.amd.integrations.signatures FOLDER

writes the names to flashinfer_names.json, and the signatures to the file that our functions take theirs from. FOLDER:
its package, as in its wheel. None of its code runs.
"""

from __future__ import annotations

import ast
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from rocm_attn.integrations.flashinfer.signatures import DATA

NAMES_DATA = Path(__file__).with_name("flashinfer_names.json")
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


def _parameters(of: ast.arguments) -> str:
    """Returns parameters as they are written, without types."""
    for each in (*of.args, *of.kwonlyargs, of.vararg, of.kwarg):
        if each is not None:
            each.annotation = None
    return ast.unparse(of)


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


def of_flashinfer(folder: Path) -> dict[str, str]:
    """Returns the parameters of each function or Class.method of a package, in which a module may be a folder."""
    found: dict[str, str] = {}
    for module, names in NAMES.items():
        for path in [folder / f"{module}.py", *sorted((folder / module).rglob("*.py"))]:
            if path.is_file():
                tree = ast.parse(path.read_text(encoding="utf-8"))
                found |= {name: _parameters(node.args) for name, node in _functions(tree, names)}
    return found


def names_of_flashinfer(folder: Path) -> dict[str, str]:
    """Returns the public names at FlashInfer's top by the module that they are from; "." for modules themselves."""
    found: dict[str, set[str]] = defaultdict(set)
    for node in ast.walk(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            found[node.module or "."] |= {each.asname or each.name for each in node.names}
        # Names of fused_moe that its __getattr__ imports are in a set.
        if isinstance(node, ast.Set):
            found["fused_moe"] |= {str(ast.literal_eval(each)) for each in node.elts}
    public = {module: sorted(name for name in names if not name.startswith("_")) for module, names in found.items()}
    return {module: " ".join(names) for module, names in sorted(public.items()) if names}


def recorded_names() -> dict[str, str]:
    """Returns the names of the release that was read last, each with its module."""
    by_module: dict[str, str] = json.loads(NAMES_DATA.read_text(encoding="utf-8"))
    return {name: module for module, names in by_module.items() for name in names.split()}


if __name__ == "__main__":
    package = Path(sys.argv[1])
    kept = {"release": RELEASE, "signatures": of_flashinfer(package)}
    for file, content in ((DATA, kept), (NAMES_DATA, names_of_flashinfer(package))):
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
