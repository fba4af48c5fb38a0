"""Compiles candidates ahead of their turn, on all cores, in processes that touch no GPU.

A candidate's kernels are compiled into Triton's cache over empty tensors of the sizes that will be timed. The process
that times them finds them there, and nothing else runs on the GPU meanwhile. If a compiler ends its process, only that
process ends: its candidate gets no time, and a sentence that says why.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch

from rocm_attn.kernels.tuning.measured import Tiles
from rocm_attn.machine.target import Target
from rocm_lab.tune.bench import JobSteps, kernel_of
from rocm_lab.tune.jobs import TuneJob
from rocm_lab.tune.search import Bench, Judged, Times

CompileTask = tuple[TuneJob, Tiles]


@dataclass
class _Worker:
    """A process that compiles. task: its present task; None while it waits"""

    process: BaseProcess
    ours: Connection
    task: CompileTask | None = None


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
        self._queue: deque[CompileTask] = deque()
        # Finished tasks, each with the reason why it failed, or "".
        self._done: dict[CompileTask, str] = {}

    def expect(self, job: TuneJob, tiles: Sequence[Tiles]) -> None:
        """See `Bench.expect`. These replace candidates that were expected before and are not begun."""
        at = {worker.task for worker in self._workers}
        self._queue = deque((job, each) for each in tiles if (job, each) not in self._done and (job, each) not in at)
        self._hand_out()

    def judge(self, job: TuneJob, tiles: Tiles) -> Judged:
        """See `Bench.judge`."""
        task = job, tiles
        if task not in self._done and task not in {worker.task for worker in self._workers}:
            if task in self._queue:
                self._queue.remove(task)
            self._queue.appendleft(task)
        while task not in self._done:
            self._turn()
        return Judged(self._done[task]) if self._done[task] else self._bench.judge(job, tiles)

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
                worker.ours.recv()
            except (EOFError, OSError):
                self._ended(number)
            else:
                self._done[worker.task] = ""
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
    with compile_only(absent_gpu(target)), observe_launches(_launch):
        while True:
            try:
                job, tiles = connection.recv()
            except EOFError:
                return
            compile_tiles(job, tiles, target, steps)
            connection.send(None)


def _launch(launch: Callable[[], object]) -> None:
    launch()


def compile_tiles(job: TuneJob, tiles: Tiles, target: Target, steps: JobSteps) -> None:
    """Launches a candidate's kernels on empty tensors of the CPU, with the launches that the GPU will run.

    A candidate that fails here also fails on the GPU, where its error is reported.
    """
    for step in steps.of(job):
        data = step.empty(job.problem)
        kernel = kernel_of(job, tiles, data, target)
        try:
            data.runs(kernel)[0].attend()
        except Exception:
            return
