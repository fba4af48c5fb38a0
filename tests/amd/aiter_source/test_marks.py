"""Marks of fixes are in the checkout's files from the release on in which the fault ended, and in none before."""

import pytest

from rocm_attn.machine.aiter_marks import MARKS, NO_MARK, marks_in
from rocm_attn.machine.target import IMAGE_RELEASES
from rocm_attn.providers.aiter.entries import ENTRIES
from rocm_attn.providers.contract import Fault
from tests.amd.aiter_source.checkout import Checkout, release_of

FAULTS = {fault: fault.what for row in ENTRIES for fault in row.faults if fault.mark != NO_MARK}
# The commit of the image (docker/Dockerfile).
IMAGE_COMMIT = "v0.1.20-46-ge4048607a5"


@pytest.mark.parametrize("fault", FAULTS, ids=FAULTS.values())
def test_a_mark_is_there_from_the_release_that_ended_the_fault_on(fault: Fault) -> None:
    checkout = Checkout.named()
    here = release_of(checkout.commit())
    if here.is_before:
        pytest.skip(f"the checkout is {here}: its number does not tell which fixes it has")
    assert (fault.mark in marks_in(checkout.root / "aiter")) == (here >= fault.aiter.before)


def test_the_image_has_every_mark() -> None:
    assert {fault.mark for fault in FAULTS} == set(MARKS) == IMAGE_RELEASES.marks
    checkout = Checkout.named()
    if checkout.commit() != IMAGE_COMMIT:
        pytest.skip(f"only the image's commit, {IMAGE_COMMIT}, has to have every mark")
    assert marks_in(checkout.root / "aiter") == IMAGE_RELEASES.marks
