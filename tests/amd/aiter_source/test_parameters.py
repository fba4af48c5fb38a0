"""The provider passes arguments that the checkout's functions take, including functions that do not run here.

The parameters are those of the checked-out commit, read by the ledger's script, without importing anything.
"""

from dataclasses import replace

import pytest

from rocm_attn.machine.releases import Release
from rocm_attn.providers.aiter.library import ENTRY_POINTS, AiterFunction, EntryPoint
from rocm_lab.ledger.checkout import SourceTree
from rocm_lab.ledger.sources import Declared, declared, functions, recorded
from tests.amd.aiter_source.checkout import Checkout, release_of

# Parameters that functions did not have from the start -> the first release with them. The rows that pass them wait.
ADDED = {"unified_attention takes no shuffled_kv_cache;": Release.of("0.1.15.post1")}

ENTRIES = {
    f"{row}-{entry.function.name}-{i}": entry for row, each in ENTRY_POINTS.items() for i, entry in enumerate(each)
}


def here(function: AiterFunction) -> Declared:
    """Returns how the checkout declares a function."""
    return declared(function, "", SourceTree(Checkout.named().root, "HEAD"))


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_a_function_takes_what_the_provider_passes(entry: EntryPoint) -> None:
    found, release = here(entry.function), release_of(Checkout.named().commit())
    assert found.file, f"the checkout has no {entry.function.name}"
    complaint = entry.disagreement(found.function())
    if any(lacks in complaint and release < added for lacks, added in ADDED.items()):
        pytest.skip(complaint)
    assert not complaint


@pytest.mark.parametrize("function", functions(), ids=lambda each: each.name)
def test_the_ledger_has_what_the_release_declares(function: AiterFunction) -> None:
    sources, release = recorded(), release_of(Checkout.named().commit())
    names = [name for name in sources.dates if Release.of(name) == release]
    if not names:
        pytest.skip(f"the ledger does not have {release}")
    assert replace(sources.at(function.name, names[0]), since="") == here(function)
