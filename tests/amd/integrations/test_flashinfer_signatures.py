"""Our functions have FlashInfer's names, its parameters in its order, and its defaults."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rocm_attn.integrations import flashinfer
from tests.amd.integrations.signatures import LEFT_OUT, NAMES, Signatures, of_flashinfer, recorded, signatures

pytestmark = pytest.mark.fast(interpreted=0)

OURS = Path(flashinfer.__file__).parent
# An unpacked wheel of FlashInfer; without one, the recorded signatures are used.
FOLDER = os.environ.get("FLASHINFER_PACKAGE", "")


def ours() -> Signatures:
    return signatures({module: sorted(OURS.glob("*.py")) for module in NAMES})


def theirs() -> Signatures:
    return of_flashinfer(Path(FOLDER)) if FOLDER else recorded()


def test_every_parameter_is_where_flashinfer_has_it() -> None:
    found, wanted = ours(), theirs()
    left_out = {name for name in wanted if name.rpartition(".")[2] in LEFT_OUT}
    assert found.keys() == wanted.keys() - left_out
    for name, parameters in found.items():
        assert parameters == wanted[name], name


def test_what_is_left_out_is_there_in_flashinfer() -> None:
    assert {name.rpartition(".")[2] for name in theirs()} >= LEFT_OUT


def test_each_name_is_in_the_module_of_flashinfers_and_in_the_package() -> None:
    for module, names in NAMES.items():
        of_module = getattr(flashinfer, module)
        for name in names:
            assert getattr(flashinfer, name) is getattr(of_module, name)
            assert name in flashinfer.__all__


def test_the_record_is_of_the_package_that_is_named() -> None:
    assert recorded() == theirs()


def test_a_moved_parameter_is_noticed(tmp_path: Path) -> None:
    for module in NAMES:
        text = (OURS / f"{module}.py").read_text()
        (tmp_path / f"{module}.py").write_text(
            text.replace("head_dim: int,\n        page_size: int,", "page_size: int,")
        )
    changed = of_flashinfer(tmp_path)
    name = "BatchDecodeWithPagedKVCacheWrapper.plan"
    assert changed[name] != recorded()[name]
