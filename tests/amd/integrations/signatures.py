"""FlashInfer's names and public signatures, read from its files: parameters, kinds and defaults.

    python -m tests.amd.integrations.signatures FOLDER

writes the names to flashinfer_names.json, and the signatures to the file that our functions take theirs from. FOLDER:
its package, as in its wheel. None of its code runs.
"""

import ast
import json
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path

from rocm_attn.integrations import flashinfer
from rocm_attn.integrations.flashinfer.signatures import DATA

NAMES_DATA = Path(__file__).with_name("flashinfer_names.json")
RELEASE = "0.7.4"

# Methods of FlashInfer that mean nothing here, because they concern its own memory and kernels.
LEFT_OUT = {"workspace_size", "prewarm_paged_kv_stride_variant", "resolved_backend"}


def _parameters(of: ast.arguments) -> str:
    """Returns parameters as they are written, without types."""
    for each in (*of.args, *of.kwonlyargs, of.vararg, of.kwarg):
        if each is not None:
            each.annotation = None
    return ast.unparse(of)


def _functions(tree: ast.Module, names: Collection[str]) -> Iterator[tuple[str, ast.FunctionDef]]:
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
    """Returns the parameters of each served function or Class.method of a package. A module may be a folder there."""
    found: dict[str, str] = {}
    for module, names in served_names().items():
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
        # Names that its __getattr__ imports are in sets: those of fused_moe, and modules.
        if isinstance(node, ast.Assign) and (names := [each for each in ast.walk(node) if isinstance(each, ast.Set)]):
            module = "." if "_COMPAT_SUBMODULES" in ast.unparse(node.targets[0]) else "fused_moe"
            found[module] |= {str(ast.literal_eval(each)) for each in names[0].elts}
    public = {module: sorted(name for name in names if not name.startswith("_")) for module, names in found.items()}
    return {module: " ".join(names) for module, names in sorted(public.items()) if names}


def recorded_names() -> dict[str, str]:
    """Returns the names of the release that was read last, each with its module."""
    by_module: dict[str, str] = json.loads(NAMES_DATA.read_text(encoding="utf-8"))
    return {name: module for module, names in by_module.items() for name in names.split()}


def served_names() -> dict[str, list[str]]:
    """Returns FlashInfer's modules, and the names in each that are served here; one of them is not at its top."""
    found = defaultdict(list)
    for name, module in {**recorded_names(), "MLAPlanMetadata": "mla"}.items():
        if name in flashinfer.__all__ and module != ".":
            found[module].append(name)
    return found


if __name__ == "__main__":
    package = Path(sys.argv[1])
    kept = {"release": RELEASE, "signatures": of_flashinfer(package)}
    for file, content in ((DATA, kept), (NAMES_DATA, names_of_flashinfer(package))):
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
