"""Two ranks of one model, as separate processes that meet over Gloo."""

import os
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from rocm_attn.machine.agreement import Agreement, among
from tests.amd import forked

NUM_RANKS = 2


def among_all() -> Agreement:
    group = torch.distributed.group.WORLD
    assert group is not None
    return among(group)


def on_every_rank(body: Callable[..., list[str]], folder: Path, *arguments: Any) -> list[list[str]]:
    """Returns the result of body(rank, *arguments) on each rank. Raises EOFError if a rank ends without an answer."""
    context = forked.context()
    ranks, pipes, said = [], dict[Connection, int](), dict[Connection, list[str]]()
    for rank in range(NUM_RANKS):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(body, rank, folder, arguments, sender))
        process.start()
        sender.close()  # so that the pipe ends when the process does
        ranks.append(process)
        pipes[receiver] = rank
    try:
        while len(said) < NUM_RANKS:
            for ready in wait(pipes.keys() - said.keys()):
                assert isinstance(ready, Connection)
                said[ready] = ready.recv()
    finally:  # all answers have arrived, or a rank has failed and the others wait for it
        for process in ranks:
            process.kill()
            process.join()
    return [said[receiver] for receiver in pipes]


def _run(
    body: Callable[..., list[str]], rank: int, folder: Path, arguments: tuple[Any, ...], answer: Connection
) -> None:
    os.environ["XDG_CACHE_HOME"] = str(folder / f"rank{rank}")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=NUM_RANKS
    )
    found = body(rank, *arguments)
    torch.distributed.barrier()
    answer.send(found)
