"""A kind of recurrent layer is written in few modules, so that a further one costs few."""

import ast
import functools
import re

import pytest

from rocm_attn.models.hf_recurrent import GATED_DELTA, KIMI_DELTA, STATE_SPACE
from rocm_attn.models.recurrent import Rule
from rocm_serve.models.recurrent import KINDS
from tests.amd.house.source_tree import belongs_to, sources_of

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


@functools.cache
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
