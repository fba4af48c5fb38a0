"""The exceptions that stop a simulation."""


class SimulationFault(Exception):
    """The program did something forbidden: a stray address, a race, a read of memory that was never written."""


class NeverWritten(SimulationFault):
    """LDS is read that was not written yet."""


class UnknownInstruction(Exception):
    """The simulator does not know an instruction, or one of its operands or modifiers."""
