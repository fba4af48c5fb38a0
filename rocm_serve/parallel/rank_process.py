"""The process of a rank: an engine over its part of the model, which runs one command after another.

The front process sends all ranks the same commands. Rank 0 answers with results, the others with booleans or None. A
rank ends when it gets CLOSE, when its pipe ends, or when the front process is gone, whatever collective it is in then.
"""

import faulthandler
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from rocm_attn.errors import RocmAttnError
from rocm_attn.machine.agreement import OnWait
from rocm_attn.watch.flight_recorder import FlightRecorder, dump_on_signal
from rocm_serve.engine import Engine
from rocm_serve.limits import RequestLimits
from rocm_serve.options import EngineOptions
from rocm_serve.parallel.child_process import end_with_parent, ready_to_serve
from rocm_serve.parallel.messages import Command, Done, Progressed, Raised, RankSetup, RankWaits, sendable, unsendable
from rocm_serve.ranks import RanksOfGroup

CLOSE = Command("close")

# The front process replaces torch's own watch of NCCL, and is faster. Values that are set already are kept.
_ENVIRONMENT = {
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # it ends a process that compiles kernels for long
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


def run_rank(setup: RankSetup, commands: Connection, words: Connection) -> None:
    """Serves commands until there are no more; does not return. words: takes the process's stdout and stderr"""
    threading.Thread(target=end_with_parent, args=(Path(setup.store).parent,), daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM):  # they may go to all processes; the front ends us
        signal.signal(number, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(words.fileno(), stream.fileno())
        assert hasattr(stream, "reconfigure")
        stream.reconfigure(line_buffering=True)
    words.close()
    faulthandler.enable()
    engine: list[Engine] = []

    def build() -> RequestLimits:
        engine.append(_engine(setup, lambda reason: commands.send(RankWaits(reason))))
        return engine[0].limits

    with suppress(EOFError, OSError):  # the front has closed the pipe
        _answer(commands, setup.rank, build, engine)
        while True:
            message = commands.recv_bytes()
            try:
                command = pickle.loads(message)
            except Exception as error:  # this process may lack a class of the other one's
                commands.send(Raised(unsendable(error), _has_work(engine)))
                continue
            if command == CLOSE:
                break
            given = list(command.arguments)
            if command.method in ("capture_all", "compile_all"):
                given.append(_progress(commands, setup.rank))
            _answer(commands, setup.rank, partial(getattr(engine[0], command.method), *given), engine)
            if command.method == "compile_all":  # the last call before requests
                ready_to_serve()
    sys.stderr.flush()
    os._exit(0)  # graphs that hold collectives, and groups, need no order in which they are taken down


def _answer(commands: Connection, rank: int, method: Callable[[], Any], engine: list[Engine]) -> None:
    """Calls a method and sends its result or error."""
    try:
        value = method()
    except BaseException as error:  # the front decides what it means
        if not isinstance(error, RocmAttnError):
            traceback.print_exc()
        commands.send(Raised(sendable(error), _has_work(engine)))
    else:
        commands.send(Done(value if rank == 0 or isinstance(value, bool) else None, _has_work(engine)))


def _has_work(engine: list[Engine]) -> bool:
    return bool(engine) and engine[0].has_work


def _progress(commands: Connection, rank: int) -> Callable[..., None]:
    def tell(*arguments: Any) -> None:
        if rank == 0:
            commands.send(Progressed(arguments))

    return tell


def _engine(setup: RankSetup, on_wait: OnWait) -> Engine:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the ranks of one host; its name need not be known to DNS
    device, backend = torch.device("cpu"), "gloo"
    if setup.device_type == "cuda":
        device, backend = torch.device("cuda", setup.rank), "nccl"
        torch.cuda.set_device(device)
    torch.set_num_threads(setup.num_threads)
    dist.init_process_group(
        backend, store=FileStore(setup.store, setup.num_ranks), rank=setup.rank, world_size=setup.num_ranks
    )
    assert dist.group.WORLD is not None
    ranks = RanksOfGroup(dist.group.WORLD, on_wait)
    engine = Engine(setup.load(device=device, ranks=ranks), options_of_rank(setup.options, setup.rank))
    if isinstance(engine.flight, FlightRecorder):
        dump_on_signal(engine.flight)
    return engine


def options_of_rank(options: EngineOptions, rank: int) -> EngineOptions:
    """The options, with a flight record file and an evidence file of its own for each rank."""
    return replace(
        options, flight_record=_of_rank(options.flight_record, rank), evidence=_of_rank(options.evidence, rank)
    )


def _of_rank(path: Path | None, rank: int) -> Path | None:
    return None if path is None else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
