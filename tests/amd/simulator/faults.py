"""What stops a simulation."""

from __future__ import annotations


class SimulationFault(Exception):
    """The program did something that it must not do: a stray address, a race, a read of what was never written."""


class UnknownInstruction(Exception):
    """The simulator does not know an instruction, or one of its operands or modifiers."""
