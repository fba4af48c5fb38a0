"""Two ranks of one model, as processes of their own that meet over Gloo."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from rocm_attn.agreement import Agree, among

NUM_RANKS = 2
SECONDS = 300  # until the test gives up; a rank that is not told what it waits for waits for ever


def among_all() -> Agree:
    """All ranks agree."""
    group = torch.distributed.group.WORLD
    assert group is not None
    return among(group)


def on_every_rank(body: Callable[..., list[str]], folder: Path, *arguments: Any) -> list[list[str]]:
    """What body(rank, *arguments) gives on each rank; a rank that fails fails the test."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=_run, args=(body, rank, folder, arguments, answers)) for rank in range(NUM_RANKS)]
    for process in ranks:
        process.start()
    try:
        said = dict(answers.get(timeout=SECONDS) for _ in ranks)
    finally:
        for process in ranks:
            process.join(10)
            process.kill()
    return [said[rank] for rank in range(NUM_RANKS)]


def _run(body: Callable[..., list[str]], rank: int, folder: Path, arguments: tuple[Any, ...], answers: Any) -> None:
    os.environ["XDG_CACHE_HOME"] = str(folder / f"rank{rank}")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=NUM_RANKS
    )
    answers.put((rank, body(rank, *arguments)))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
