"""The times of decodes in a report, each with the work of the kernel that ran, as the cost model counts it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rocm_attn.errors import BadSetting
from rocm_attn.machine.tuning_file import plain_value
from rocm_attn.providers.tiles import layer_of
from rocm_lab.bench.batch_spec import Group
from rocm_lab.cost.cost import DecodeWork, work_of
from rocm_lab.first_run.report import PASSED, GpuReport, problem_in, shape_in


@dataclass(frozen=True, slots=True)
class TimedLayer:
    """One layer. seconds: measured, replayed as a graph"""

    name: str
    shape: Group
    work: DecodeWork
    seconds: float


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """The decodes of a report that the model has figures for, and a sentence for each other time."""

    decodes: Sequence[TimedLayer]
    left_out: Sequence[str]


def layer_times(report: GpuReport) -> LayerTimes:
    """Reads the times of a report. Raises BadSetting for one that is damaged."""
    decodes: list[TimedLayer] = []
    left_out = []
    for test, given in report.measured("us"):
        if test.outcome != PASSED or "layer" not in test.measured:
            continue
        try:
            problem, shape = problem_in(test.measured["layer"]), shape_in(test.measured["shape"])
            seconds, kernel = plain_value(float, given, "us") / 1e6, plain_value(str, test.measured["kernel"], "kernel")
        except (ValueError, KeyError) as error:
            raise BadSetting(f"the time of {test.name} is damaged ({type(error).__name__}: {error})") from error
        if seconds <= 0:
            raise BadSetting(f"the time of {test.name} is {given} us; it must be positive")
        name, work = f"{layer_of(problem)}, at {shape}", work_of(problem, report.target, shape)
        if work is None:
            left_out.append(f"{name}: the model has no figures of its kernel")
        elif not kernel.startswith(f"{work.kernel}:") or str(work.tiles) not in kernel:
            left_out.append(f"{name}: {kernel} ran, and the model has figures of {work.kernel} with {work.tiles}")
        else:
            decodes.append(TimedLayer(name, shape, work, seconds))
    return LayerTimes(decodes, left_out)
