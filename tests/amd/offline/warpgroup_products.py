"""Registers of Hopper's matrix products that are still running, in machine code: nothing else may touch them.

wgmma.mma_async returns before it has read its rows, if they are in registers, and before it has written its sums.
Triton waits (wgmma.wait_group) before it uses the sums. PTX does not state how long the registers of the rows are read:
ptxas keeps them. The ptxas of CUDA 12.9 may overwrite them too early, so that products of valid code are wrong, which
CUDA 13.3 fixes (github.com/triton-lang/triton/pull/11781). Triton 3.6 brings 12.8, and 3.9 has 12.9 for Hopper. So the
compiled code is checked.
"""

import re
from functools import partial
from operator import or_
from typing import NamedTuple

from tests.amd.offline.nvidia_code import OF_THREADS, PRODUCTS, Code, Step

_WAIT = re.compile(r"gsb0, (0x[0-9a-f]+)")
# No product may run where these lead.
_NOT_FOLLOWED = {"BRX", "BSYNC", "CALL", "RET"}
# Commits after a product are counted up to this number: a wait that leaves that many running is not supported.
_MOST_COMMITS = 8


class _Running(NamedTuple):
    """A product that no wait has ended: its place in the code, and commits since; -1: it is in no commit yet."""

    place: int
    commits: int


def touched_while_running(code: Code) -> list[str]:
    """Lists accesses to the sums of a running product and writes to its rows, a line each; empty if there are none.

    A product that adds to the very sums of another one may do so: matrix units process them in order.
    """
    running = code.before_each(frozenset[_Running](), partial(_after, code), or_)
    disturbed = {
        (each.place, place)
        for place, some in running.items()
        for each in some
        if _disturbs(code.steps[place], code.steps[each.place])
    }
    return [f"{code.steps[place]} while {code.steps[product]} runs" for product, place in sorted(disturbed)]


def _after(code: Code, place: int, follower: int, running: frozenset[_Running]) -> frozenset[_Running]:
    """Returns the products that run after an instruction."""
    this = code.steps[place]
    if this.name in PRODUCTS:
        running |= {_Running(place, -1)}
        if "gsb0" in this.operands:
            running = frozenset(each._replace(commits=min(each.commits + 1, _MOST_COMMITS)) for each in running)
    elif this.opcode.startswith("WARPGROUP.DEPBAR"):
        left = int(_WAIT.findall(this.operands)[0], 16)
        assert left < _MOST_COMMITS, f"{this} leaves more products running than are told apart"
        running = frozenset(each for each in running if each.commits < left)
    return running


def _disturbs(this: Step, product: Step) -> bool:
    """True if an instruction touches registers of a running product, or leads where none may run."""
    if this.name in _NOT_FOLLOWED:
        return True
    rows, sums = product.reads & ~product.writes & OF_THREADS, product.writes
    adds_on = this.name in PRODUCTS and this.writes == sums
    return bool(this.writes & rows or (not adds_on and (this.reads | this.writes) & sums))
