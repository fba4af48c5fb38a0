"""Imports go only down the levels, and a kind of recurrent layer is named in few modules."""

import ast
import re
import sys
from functools import cache
from graphlib import TopologicalSorter

import pytest

from rocm_attn.models.hf_recurrent import GATED_DELTA, KIMI_DELTA, STATE_SPACE
from rocm_attn.models.recurrent import Rule
from rocm_serve.models.recurrent import KINDS
from tests.amd.house.source_tree import HOUSES, ROOT, Source, belongs_to, sources, sources_of

# The levels of the table in docs/architecture.md, from the lowest up: files and folders of rocm_attn/, the engine, and
# the laboratory. A module imports from its own level and from lower ones, at import or later.
LEVELS_UP = re.findall(r"^\| `(\w+)` \| \S", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE)[::-1]

KERNELS, HIP_GRAPHS, SERVER = "rocm_attn.kernels", "rocm_attn.hip_graphs", "rocm_serve.server"
DOCTOR = "rocm_attn.cli.doctor"
VLLM, SGLANG = "rocm_attn.integrations.vllm", "rocm_attn.integrations.sglang"
AITER_MODULE = "rocm_attn.providers.aiter.library"

# The first package that a module belongs to determines the other libraries that it may import.
LIBRARIES = {
    "rocm_attn.models.hub": {"huggingface_hub"},
    KERNELS: {"numpy", "torch", "triton"},
    HIP_GRAPHS: {"torch"},
    AITER_MODULE: {"aiter", "numpy", "torch"},
    DOCTOR: set(),  # it must work when everything else cannot be imported
    "rocm_attn.models": {"gguf", "numpy", "torch"},
    SERVER: {"fastapi", "h11", "numpy", "opentelemetry", "pydantic", "starlette", "uvicorn", "uvloop"},
    "rocm_serve": {"jinja2", "llguidance", "numpy", "safetensors", "tokenizers", "torch"},
    "rocm_lab.bench": {"matplotlib", "numpy", "safetensors", "torch"},
    "rocm_lab.races.addresses": {"z3"},
    "rocm_lab.simulator.pytest_plugin": {"pytest"},
    "rocm_lab.simulator": {"numpy", "torch", "triton"},
    "rocm_lab.tune.ahead": {"torch", "triton"},
    "rocm_lab": {"numpy", "torch"},
    VLLM: {"torch", "vllm"},
    f"{VLLM}_offloading": {"vllm"},
    SGLANG: {"sglang", "torch"},
    "rocm_attn": {"numpy", "torch", "typing_extensions"},
}


@cache
def own_modules() -> frozenset[str]:
    return frozenset(source.module for source in sources())


def own_imports(source: Source) -> list[str]:
    """Returns the modules of this project that source imports, at import or later."""
    modules = own_modules()
    return [
        name.module if name.module in modules else name.module.rpartition(".")[0]
        for name in source.imports()
        if name.module.partition(".")[0] in HOUSES
    ]


def test_a_module_imports_only_the_libraries_of_its_level() -> None:
    for source in sources():
        package = next(package for package in LIBRARIES if belongs_to(source.module, package))
        allowed = LIBRARIES[package] | set(sys.stdlib_module_names) | set(HOUSES)
        found = {name.module.partition(".")[0] for name in source.imports()}
        assert found <= allowed, f"{source.module} imports {sorted(found - allowed)}"


def test_kernels_know_only_kernels() -> None:
    assert_imports_stay_inside(KERNELS)


def test_hip_graphs_know_only_hip_graphs() -> None:
    assert_imports_stay_inside(HIP_GRAPHS)


def assert_imports_stay_inside(package: str) -> None:
    """Checks that nothing in package imports from the rest of the project."""
    members = [source for source in sources() if belongs_to(source.module, package)]
    assert members
    for source in members:
        outside = [module for module in own_imports(source) if not belongs_to(module, package)]
        assert not outside, f"{source.module} imports {outside}"


def test_imports_only_go_down() -> None:
    assert {level_of(source.module) for source in sources()} - {"rocm_attn"} == set(LEVELS_UP)
    for source in sources():
        if source.module == "rocm_attn":
            continue  # it is below all of them
        height = LEVELS_UP.index(level_of(source.module))
        up = [
            module
            for module in own_imports(source)
            if module != "rocm_attn" and LEVELS_UP.index(level_of(module)) > height
        ]
        assert not up, f"{source.module} imports {up}, which are above it"


def level_of(module: str) -> str:
    """Returns the file or folder of rocm_attn/ that a module is in, or the package above it."""
    house, _, rest = module.partition(".")
    return rest.partition(".")[0] if house == "rocm_attn" and rest else house


def test_only_modules_of_http_import_fastapi() -> None:
    """Other modules of the server work with any framework; and --help reads the server's options."""
    http = {"app", "connections", "event_stream", "gate", "parsing", "run", "text_routes"}
    for source in sources():
        if belongs_to(source.module, SERVER) and source.path.stem not in http:
            found = {name.module.partition(".")[0] for name in source.imports()}
            assert not found & {"fastapi", "h11", "starlette", "uvicorn", "uvloop"}, source.module


def test_the_doctor_needs_nothing_that_may_be_broken() -> None:
    here = ("settings", "distributions", "aiter_releases", "aiter_switches", "known_bad", "releases")
    allowed = (DOCTOR, "rocm_attn.errors", *(f"rocm_attn.machine.{name}" for name in here))
    for source in sources():
        if belongs_to(source.module, DOCTOR):
            used = [module for module in own_imports(source) if not any(belongs_to(module, name) for name in allowed)]
            assert not used, f"{source.module} imports {used}"


def test_aiter_is_imported_in_one_file_and_only_when_it_is_asked_for() -> None:
    for source in sources():
        for name in source.imports():
            if belongs_to(name.module, "aiter"):
                assert source.module == AITER_MODULE
                assert not name.at_import


def test_imports_have_no_cycle() -> None:
    graph = {source.module: set(own_imports(source)) - {source.module} for source in sources()}
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("folder", ["kernels", "hip_graphs"])
def test_the_lower_levels_shadow_no_other_package(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()
    assert (ROOT / "rocm_attn" / folder).readlink().as_posix() == f"../{folder}"


MOST_MODULES = 6
# The names in code that stand for a kind, its update of states included.
NAMES = {
    GATED_DELTA: r"(?i:gated_?delta|delta_?net)|^DELTA$",
    KIMI_DELTA: r"(?i:kimi_?delta|kda)",
    STATE_SPACE: r"(?i:mamba|state_?space)|^SUM$",
}
# Engines call all recurrent layers mamba, and so do the plug-ins that call them.
OF_ENGINES = "rocm_attn.integrations"


def modules_that_name(kind: Rule) -> list[str]:
    """Returns the product's modules with a name in their code that stands for a kind."""
    return [
        module for module, found in names_by_module().items() if any(re.search(NAMES[kind], name) for name in found)
    ]


@cache
def names_by_module() -> dict[str, set[str]]:
    """Returns the names in the code of each of the product's modules."""
    return {
        source.module: names(source.tree)
        for house in ("rocm_attn", "rocm_serve")
        for source in sources_of(house)
        if not belongs_to(source.module, OF_ENGINES)
    }


def names(tree: ast.Module) -> set[str]:
    """Returns the names in code: of variables, attributes, parameters, functions, classes and imports."""
    fields = ("id", "attr", "arg", "name", "asname")
    found = (getattr(node, field, None) for node in ast.walk(tree) for field in fields)
    return {name for name in found if isinstance(name, str)}


def test_every_kind_that_runs_is_counted() -> None:
    assert NAMES.keys() == KINDS.keys()


@pytest.mark.parametrize("kind", NAMES, ids=lambda kind: kind.name)
def test_a_kind_is_named_in_few_modules(kind: Rule) -> None:
    modules = modules_that_name(kind)
    # Those that read its config.json and compute it, or else the names above are no longer those in the code.
    assert {"rocm_attn.models.hf_recurrent", "rocm_serve.models.recurrent"} <= set(modules)
    assert len(modules) <= MOST_MODULES, f"{kind.name} is named in {modules}; at most {MOST_MODULES} may"
