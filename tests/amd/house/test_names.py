"""The names that `import rocm_attn` gives: each exists, is explained, and costs nothing until it is used."""

import importlib
import inspect
from collections import Counter
from operator import attrgetter

import pytest

import rocm_attn as ra
import rocm_serve
from rocm_attn import errors
from tests.amd.forked import run_python
from tests.amd.house import interface

NAMES = [name for names in interface.groups().values() for name in names]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_what_its_module_has_and_says_what_it_is(name: str) -> None:
    (module,) = (names[name] for names in interface.groups().values() if name in names)
    package = importlib.import_module(module.partition(".")[0])
    value = attrgetter(name)(package)
    tier, _, own_name = name.rpartition(".")
    assert value is getattr(importlib.import_module(module), own_name)
    assert (tier or name) in dir(package)
    if isinstance(value, type) or inspect.isfunction(value):
        assert value.__module__ == module
        assert inspect.getdoc(value)


def test_each_name_is_in_one_group_once() -> None:
    tiers = {name.partition(".")[0] for name in NAMES if "." in name}
    top = [name for name in NAMES if "." not in name]
    assert Counter([*top, *tiers]) == Counter([*vars(ra)["__all__"], *vars(rocm_serve)["__all__"]])
    assert max(Counter(name.rpartition(".")[2] for name in NAMES).values()) == 1


def test_a_name_of_a_module_says_where_it_is() -> None:
    with pytest.raises(AttributeError, match=r"it is rocm_attn\.drafts\.TreeMask"):
        ra.TreeMask  # type: ignore[attr-defined]  # noqa: B018


def test_every_error_is_a_stable_name() -> None:
    raised = {name for name, value in vars(errors).items() if isinstance(value, type) and name[0] != "_"}
    assert {name for name in raised if issubclass(getattr(errors, name), Exception)} <= {
        name.rpartition(".")[2] for name in NAMES
    }


def test_the_page_of_names_is_current() -> None:
    said = interface.PAGE.read_text()
    assert said == interface.page(), "run python -m tests.amd.house.interface, and say in CHANGELOG.md what changed"


def test_importing_rocm_attn_imports_no_torch() -> None:
    code = (
        "import sys, rocm_attn as ra\n"
        "dir(ra), ra.__all__\n"
        "print(sorted({'torch', 'numpy', 'triton'} & set(sys.modules)))\n"
        "print([name for name in sys.modules if name.startswith('rocm_attn.')])\n"
        "ra.errors.BadBatch\n"
        "print([name for name in sys.modules if name.startswith('rocm_attn.')], 'torch' in sys.modules)\n"
    )
    assert run_python("-c", code).splitlines() == [
        "[]",
        "['rocm_attn.stable_names']",
        "['rocm_attn.stable_names', 'rocm_attn.errors'] False",
    ]


def test_a_name_below_the_top_is_reported_with_its_module_and_imports_nothing() -> None:
    code = (
        "import sys, rocm_attn as ra\n"
        "for name in ('Drafts', 'BadTensor'):\n"
        "    try: getattr(ra, name)\n"
        "    except AttributeError as error: print(str(error).partition('; ')[2])\n"
        "print('torch' in sys.modules)\n"
    )
    assert run_python("-c", code).splitlines() == [
        "it is rocm_attn.drafts.Drafts",
        "it is rocm_attn.errors.BadTensor",
        "False",
    ]


@pytest.mark.nightly  # by day docs/your_own_runner.md runs where none of them is installed
def test_an_author_of_a_runner_needs_no_extra_and_no_triton() -> None:
    """Everything that does not serve whole models works without the libraries of rocm_serve."""
    code = (
        "import sys\n"
        "for missing in ('gguf', 'jinja2', 'safetensors', 'tokenizers', 'triton'): sys.modules[missing] = None\n"
        "import rocm_attn as ra\n"
        "from tests.amd.house.interface import groups\n"
        "names = [n for heading, names in groups().items() if 'rocm_serve' not in heading for n in names]\n"
        "from operator import attrgetter\n"
        "print(len([attrgetter(name)(ra) for name in names]) == len(names) > 50)\n"
    )
    assert run_python("-c", code) == "True"


def test_a_name_that_is_not_there_is_refused_as_python_does() -> None:
    with pytest.raises(AttributeError, match=r"module 'rocm_attn' has no attribute 'Zebra'; docs/names.md lists"):
        ra.Zebra  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError):
        from rocm_attn import Zebra  # type: ignore[attr-defined]  # noqa: F401
