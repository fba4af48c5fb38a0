"""The provider passes arguments that the checkout's functions take, including functions that do not run here."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest

from rocm_attn.machine.releases import Release
from rocm_attn.providers.aiter.library import ENTRY_POINTS, AiterFunction, EntryPoint
from rocm_lab.ledger import sources as ledger
from rocm_lab.ledger.checkout import SourceTree
from rocm_lab.ledger.sources import functions, recorded
from tests.amd.aiter.signatures import RELEASES
from tests.amd.aiter_source.checkout import Checkout, release_of
from tests.amd.aiter_source.parameters import NAMES, declared

# The first release whose unified_attention reads vectorised pages.
READS_VECTORISED = Release.of("0.1.16")

ENTRIES = {
    f"{row}-{entry.function.name}-{i}": entry for row, each in ENTRY_POINTS.items() for i, entry in enumerate(each)
}


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_a_function_takes_what_the_provider_passes(entry: EntryPoint) -> None:
    checkout = Checkout.named()
    complaint = entry.disagreement(declared(checkout, entry.function.name))
    if release_of(checkout.commit()) < READS_VECTORISED and "takes no shuffled_kv_cache" in complaint:
        pytest.skip(complaint)
    assert not complaint


@pytest.mark.parametrize("name", NAMES)
def test_the_stand_ins_signatures_are_those_of_the_release(name: str) -> None:
    checkout = Checkout.named()
    here = release_of(checkout.commit())
    recorded = [release for release in RELEASES if Release.of(release.version) == here and name in release.parameters]
    if not recorded:
        pytest.skip(f"no signatures are recorded for {here}")
    for release in recorded:
        want = [(each.name, each.default is each.empty) for each in release.signature(name).parameters.values()]
        found = inspect.signature(declared(checkout, name)).parameters.values()
        assert [(each.name, each.default is each.empty) for each in found] == want


@pytest.mark.parametrize("function", functions(), ids=lambda each: each.name)
def test_the_ledger_has_what_the_release_declares(function: AiterFunction) -> None:
    checkout, sources = Checkout.named(), recorded()
    here = release_of(checkout.commit())
    names = [name for name in sources.dates if Release.of(name) == here]
    if not names:
        pytest.skip(f"the ledger does not have {here}")
    found = ledger.declared(function, names[0], SourceTree(checkout.root, "HEAD"))
    assert replace(sources.at(function.name, names[0]), since=names[0]) == found
