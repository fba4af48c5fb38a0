"""Borrows free blocks of vLLM's pool for one step, for the needle check of the layers (rocm_attn/truth).

A scheduler with a KV connector lends none: the connector may still have to copy a block that its request has given
back, and vLLM tells it only of blocks that other requests take.

vLLM's scheduler takes them after it has scheduled a step, and the step's output carries their numbers to the workers,
which may be other processes. The scheduler gives them back once the step's results are there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from rocm_attn.integrations.hooked import hook_once
from rocm_attn.integrations.plugins import VLLM
from rocm_attn.machine.settings import NEEDLES_EVERY
from rocm_attn.truth.adopted import DueSteps
from rocm_attn.truth.row_needles import MOST_TOKENS


@dataclass(frozen=True, slots=True)
class IdleBlocks:
    """Blocks that no request has while a step runs.

    turn:    which lending it is, from 1 on; 0: none
    numbers: of the blocks, as vLLM's scheduler counts them
    pool:    blocks that vLLM has, its null block included
    """

    turn: int
    numbers: Sequence[int]
    pool: int


NO_BLOCKS = IdleBlocks(0, (), 1)
_CARRIED = "rocm_attn_idle_blocks"


class _Lending:
    """The blocks that a scheduler has lent. held: turn -> vLLM's blocks"""

    def __init__(self, every: int) -> None:
        self.steps, self.turns = DueSteps(every), 0
        self.held: dict[int, Any] = {}


_lendings: WeakKeyDictionary[Any, _Lending] = WeakKeyDictionary()


class _OfStep:
    """The blocks that are lent for the step that this process runs."""

    def __init__(self) -> None:
        self.blocks = NO_BLOCKS


_of_step = _OfStep()


def no_blocks() -> IdleBlocks:
    """Lends nothing."""
    return NO_BLOCKS


def lent_blocks() -> IdleBlocks:
    """Returns the blocks that are lent for the step that runs; NO_BLOCKS if none are."""
    return _of_step.blocks


def lend_blocks(every: int) -> None:
    """Makes vLLM's schedulers lend blocks at intervals of this many steps, and its workers take them."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    hook_once(Scheduler, "schedule", partial(_lending, every))
    hook_once(Scheduler, "update_from_output", _giving_back)
    hook_once(WorkerWrapperBase, "execute_model", _taking)


def _lending(every: int, schedule: Callable[..., Any]) -> Any:
    def scheduled(scheduler: Any, *given: Any, **named: Any) -> Any:
        output = schedule(scheduler, *given, **named)
        if scheduler not in _lendings:
            _lendings[scheduler] = _Lending(every)
            if scheduler.connector is not None:
                VLLM.log.warning(
                    "%s is ignored: needles could overwrite blocks that a KV connector has yet to copy", NEEDLES_EVERY
                )
        lending = _lendings[scheduler]
        if scheduler.connector is None and output.total_num_scheduled_tokens and lending.steps.is_due():
            _lend(scheduler, lending, output)
        return output

    return scheduled


def _lend(scheduler: Any, lending: _Lending, output: Any) -> None:
    """Takes blocks for the longest row of needles, if as many and some for each running request are left."""
    manager = scheduler.kv_cache_manager
    pool, groups = manager.block_pool, manager.kv_cache_config.kv_cache_groups
    if not groups:
        return
    count = -(-MOST_TOKENS // min(group.kv_cache_spec.block_size for group in groups))
    if pool.get_num_free_blocks() < 2 * count + len(groups) * len(scheduler.running):
        return
    blocks = pool.get_new_blocks(count)
    lending.steps.done()
    lending.turns += 1
    lending.held[lending.turns] = blocks
    numbers = [block.block_id for block in blocks]
    random.Random(lending.turns).shuffle(numbers)  # rows of requests are in no order either
    setattr(output, _CARRIED, IdleBlocks(lending.turns, numbers, pool.num_gpu_blocks))


def _giving_back(update: Callable[..., Any]) -> Any:
    def updated(scheduler: Any, output: Any, *given: Any, **named: Any) -> Any:
        try:
            return update(scheduler, output, *given, **named)
        finally:
            if (lent := getattr(output, _CARRIED, NO_BLOCKS)).turn:
                scheduler.kv_cache_manager.block_pool.free_blocks(_lendings[scheduler].held.pop(lent.turn))

    return updated


def _taking(execute: Callable[..., Any]) -> Any:
    def executed(worker: Any, output: Any, *given: Any, **named: Any) -> Any:
        _of_step.blocks = getattr(output, _CARRIED, NO_BLOCKS)
        try:
            return execute(worker, output, *given, **named)
        finally:
            _of_step.blocks = NO_BLOCKS

    return executed
