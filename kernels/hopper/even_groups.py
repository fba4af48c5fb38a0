"""Warp groups that have as many registers as each other.

Triton 3.6 asks for a number of registers for each worker, and leaves fewer to those that wait for work. In such a
kernel ptxas finds too few registers for a pipeline of wgmma, and waits after each one (C7511, C7512). Later releases
take None in place of the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from triton.experimental.gluon.language._core import builtin


class _Even:
    """An operation for which no numbers of registers are asked."""

    def __init__(self, operation: Any) -> None:
        self._operation = operation

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operation, name)

    def set_requested_registers(self, counts: Sequence[int]) -> None:
        """Ask for none."""


class _EvenBuilder:
    """A builder whose warp groups are even."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._builder, name)

    def create_warp_specialize(self, *args: Any) -> _Even:
        """As the builder does."""
        return _Even(self._builder.create_warp_specialize(*args))


@builtin
def even_warp_specialize(functions: Any, worker_num_warps: Any, _semantic: Any = None, _generator: Any = None) -> Any:
    """gl.warp_specialize without numbers of registers. functions: of the default group, then of each worker"""
    warps = [int(number) for number in worker_num_warps]
    even = type(_semantic)(_EvenBuilder(_semantic.builder))
    return even.warp_specialize(functions, warps, [0] * len(warps), _generator)
