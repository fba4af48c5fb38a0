"""simulate(): runs one launch of a Triton or Gluon kernel as AMD machine code, on CPU tensors."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rocm_attn.errors import BadTensor
from rocm_lab.races.watch import RaceWatch
from rocm_lab.simulator.launcher import simulated, watched
from rocm_lab.simulator.report import KernelReport, reports_of

Grid = int | tuple[int, ...] | Callable[[dict[str, Any]], tuple[int, ...]]


def simulate(
    kernel: Any, grid: Grid, args: Sequence[Any] | Mapping[str, Any], arch: str = "gfx942", **keywords: Any
) -> KernelReport:
    """Compiles a kernel for an AMD GPU, executes it on the CPU, and returns a report; results are in the arrays.

    kernel:    a jitted function of Triton or Gluon; for an autotuned one, the first configuration is run
    grid:      programs along x, y and z, or a function of the constants, as in Triton
    args:      in order or by name: CPU tensors, writable NumPy arrays, and numbers
    arch:      "gfx942" or "gfx950"
    keywords:  constexpr arguments of the kernel, and options such as num_warps

    Raises BadSetting, BadTensor, SimulationFault for an access outside of the arrays or a race in LDS,
    UnknownInstruction, and the errors of Triton's compiler.
    """
    by_name = dict(args) if isinstance(args, Mapping) else {}
    in_order = [] if isinstance(args, Mapping) else [_tensor(arg) for arg in args]
    named = {name: _tensor(value) for name, value in {**by_name, **keywords}.items()}
    with watched(RaceWatch(seed=0)) as watch, simulated(arch) as simulation:
        kernel[(grid,) if isinstance(grid, int) else grid](*in_order, **named)
    (report,) = reports_of(simulation.launches, watch.races)
    return report


def _tensor(arg: Any) -> Any:
    """A tensor over a NumPy array's memory; anything else as it is."""
    if not isinstance(arg, np.ndarray):
        return arg
    if not arg.flags.writeable:
        raise BadTensor(f"an array of shape {arg.shape} is read-only; give a copy, which the kernel may write")
    try:
        tensor = torch.from_numpy(arg)
    except (TypeError, ValueError) as error:
        raise BadTensor(f"an array of {arg.dtype} cannot be a tensor ({error}); give a tensor of torch") from None
    if tensor.is_complex():
        raise BadTensor(f"an array of {arg.dtype} has no type of Triton's; give its real and imaginary parts")
    return tensor
