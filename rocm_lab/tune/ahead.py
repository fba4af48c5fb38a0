"""Compiles candidates ahead of their turn, on all cores, in processes that touch no GPU.

A candidate's kernels are compiled into Triton's cache over empty tensors of the sizes that will be timed. The process
that times them finds them there, and nothing else runs on the GPU meanwhile. If a compiler ends its process, only that
process ends: its candidate gets no time, and a sentence that says why.
"""

import functools
import multiprocessing
import re
import signal
import subprocess
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch

from rocm_attn.kernels.tuning.hopper_tiles import HopperTiles
from rocm_attn.kernels.tuning.latent_tiles import HopperLatentTiles
from rocm_attn.kernels.tuning.measured import Tiles
from rocm_attn.machine.target import Target
from rocm_lab.tune.bench import JobSteps, StepSizes, kernel_of
from rocm_lab.tune.jobs import TuneJob
from rocm_lab.tune.search import Bench, Judged, Task, Times

# Instructions by which a warp group waits for its products, in PTX and in machine code.
_JUDGED_BY_CODE = HopperTiles, HopperLatentTiles
_WAIT_IN_PTX, _WAIT = re.compile(r"wgmma\.wait_group"), re.compile(r"WARPGROUP\.DEPBAR\.LE")


class _Compile(NamedTuple):
    """A candidate whose kernels are compiled: those of timed kinds of steps, or of the others."""

    job: TuneJob
    tiles: Tiles
    others: bool = False


@dataclass
class _Worker:
    """A process that compiles. task: its present task; None while it waits"""

    process: BaseProcess
    ours: Connection
    task: _Compile | None = None


class CompiledAhead:
    """A bench whose candidates are compiled before it judges them.

    bench:   the bench that judges and times them
    workers: processes that compile; at least 1
    steps:   the steps of a job that the bench makes
    """

    def __init__(self, bench: Bench, target: Target, workers: int, steps: JobSteps) -> None:
        self._bench, self._target, self._steps = bench, target, steps
        self._context = multiprocessing.get_context("spawn")
        self._workers = [self._start() for _ in range(workers)]
        self._queue: deque[_Compile] = deque()
        # Finished ones, each with the reason why it failed, or "".
        self._done: dict[_Compile, str] = {}

    def expect(self, tasks: Sequence[Task]) -> None:
        """See `Bench.expect`. These replace candidates that were expected before and are not begun."""
        at = {worker.task for worker in self._workers}
        every = dict.fromkeys(_Compile(*task) for task in tasks)
        self._queue = deque(task for task in every if task not in self._done and task not in at)
        self._hand_out()

    def judge(self, job: TuneJob, tiles: Tiles) -> Judged:
        """See `Bench.judge`."""
        return self._compiled(_Compile(job, tiles)) or self._bench.judge(job, tiles)

    def judge_others(self, job: TuneJob, tiles: Tiles) -> Judged:
        """See `Bench.judge_others`."""
        return self._compiled(_Compile(job, tiles, others=True)) or self._bench.judge_others(job, tiles)

    def _compiled(self, task: _Compile) -> Judged | None:
        """Compiles at once what is not compiled. Returns the verdict if it is not to be run."""
        if task not in self._done and task not in {worker.task for worker in self._workers}:
            if task in self._queue:
                self._queue.remove(task)
            self._queue.appendleft(task)
        while task not in self._done:
            self._turn()
        return Judged(self._done[task]) if self._done[task] else None

    def times(self, job: TuneJob, both: tuple[Tiles, Tiles], rounds: int) -> tuple[Times, Times]:
        """See `Bench.times`."""
        return self._bench.times(job, both, rounds)

    def close(self) -> None:
        """Ends the processes."""
        for worker in self._workers:
            worker.process.kill()
            worker.process.join()
            worker.ours.close()
        self._workers.clear()

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_compile_all, args=(theirs, self._target, self._steps), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, ours)

    def _hand_out(self) -> None:
        for number, worker in enumerate(self._workers):
            if worker.task is None and self._queue:
                worker.task = self._queue.popleft()
                try:
                    worker.ours.send(worker.task)
                except OSError:
                    self._ended(number)

    def _turn(self) -> None:
        """Waits until a worker is done or has ended, and hands out the next tasks."""
        self._hand_out()
        waiting = {id(worker.ours): number for number, worker in enumerate(self._workers) if worker.task is not None}
        for connection in wait([self._workers[number].ours for number in waiting.values()]):
            number = waiting[id(connection)]
            worker = self._workers[number]
            assert worker.task is not None
            try:
                wrong = worker.ours.recv()
            except (EOFError, OSError):
                self._ended(number)
            else:
                self._done[worker.task] = wrong
                worker.task = None
        self._hand_out()

    def _ended(self, number: int) -> None:
        """Replaces a worker whose process has ended during a task."""
        worker = self._workers[number]
        assert worker.task is not None
        worker.process.join()
        self._done[worker.task] = f"its compiler ended the process (exit code {worker.process.exitcode})"
        worker.ours.close()
        self._workers[number] = self._start()


def _compile_all(connection: Connection, target: Target, steps: JobSteps) -> None:
    """The loop of a process: compiles tasks until the other end is closed."""
    # Imported here, because it imports Triton.
    from rocm_attn.kernels.compile_only import compile_only
    from rocm_attn.kernels.launch import observe_launches
    from rocm_attn.machine.absent_gpu import absent_gpu

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles the signal
    torch.set_num_threads(1)
    kernels: list[Any] = []
    with compile_only(absent_gpu(target)), observe_launches(lambda launch: kernels.append(launch())):
        while True:
            try:
                task: _Compile = connection.recv()
            except EOFError:
                return
            wanted = [step for step in steps.of(task.job) if step.other == task.others]
            connection.send(compile_tiles(task.job, task.tiles, target, wanted, kernels))


def compile_tiles(job: TuneJob, tiles: Tiles, target: Target, steps: Sequence[StepSizes], kernels: list[Any]) -> str:
    """Launches a candidate's kernels on empty tensors of the CPU, with the launches that the GPU will run.

    Returns why it will not be timed, by its compiled code: then not all of its steps are compiled. A candidate that
    fails here also fails on the GPU, where its error is reported.

    kernels: to which launches are appended
    """
    for step in steps:
        kernels.clear()
        data = step.empty(job.problem)
        kernel = kernel_of(job, tiles, data, target)
        try:
            data.layer(kernel)()
        except Exception:
            return ""
        if type(tiles) in _JUDGED_BY_CODE:
            wrong = next(filter(None, map(wrong_in_code, kernels)), "")
            if wrong:
                return wrong
    return ""


@functools.cache
def wrong_in_code(compiled: Any) -> str:
    """Returns why compiled code is too slow to be timed; empty if nothing shows it.

    If registers do not hold running products of warp groups, ptxas waits for each product, where PTX waits once.
    """
    asked = len(_WAIT_IN_PTX.findall(compiled.asm["ptx"]))
    if not asked:
        return ""
    # Imported here, because it imports Triton.
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [knobs.nvidia.cuobjdump.path, "-sass", cubin.name]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    waits = len(_WAIT.findall(code))
    return f"pruned: ptxas waits for products {waits} times, and the kernel {asked} times" if waits > asked else ""
