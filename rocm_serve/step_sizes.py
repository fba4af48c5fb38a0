"""StepSizes: an engine's options with the sizes of its steps, which follow from the model and the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from rocm_attn.capture.step_times import StepBudget, StepTimes, expected_lines
from rocm_attn.machine.gpus import Rates, published_rates
from rocm_attn.paging.kv_pool import page_bytes
from rocm_attn.problem import Problem
from rocm_serve.engine_runtime import problems_of
from rocm_serve.measured_memory import free_of, memory_of
from rocm_serve.models.loading import LoadedModel
from rocm_serve.models.weight_bytes import matrices_of_part
from rocm_serve.options import EngineOptions

# Sequences that run at a time: as many as have room with so many tokens each.
_FEWEST_SEQS, MOST_SEQS, _TOKENS_OF_EACH = 8, 256, 1024
_SEQS_ON_CPU, _CHUNK_ON_CPU = 64, 512


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The sizes of an engine's steps.

    options: those that were given, with max_batch_size and chunk
    budget:  of the scheduler
    lines:   the sizes and the expected times, in words
    """

    options: EngineOptions
    budget: StepBudget
    lines: tuple[str, ...]

    @classmethod
    def of(cls, loaded: LoadedModel, options: EngineOptions) -> StepSizes:
        """Chooses the sizes that the options leave open. Ranks that share a model call this at the same time.

        Raises BadSetting, Unsupported.
        """
        weights, ranks = loaded.weights, loaded.ranks
        if weights.device.type == "cpu" and not options.latency:
            chunk = options.chunk or _CHUNK_ON_CPU
            budget = StepBudget(options.max_batch_size or _SEQS_ON_CPU, chunk, chunk)
            return cls(_with(options, budget), budget, (budget.line(),))
        layers = _layers(loaded, options)
        matrices = matrices_of_part(loaded.config, weights.dtype, ranks.shard.num_ranks)
        times = StepTimes(matrices, layers, rates_of(weights.device, weights.dtype))
        most = options.max_batch_size or ranks.least(_fitting(loaded, options, page_bytes(layers)))
        budget = StepBudget.chosen(times, most, options.chunk, options.latency)
        # Ranks may have measured different rates, and have to schedule the same steps.
        shared = [ranks.least(each) for each in (budget.chunk, budget.beside, budget.doubles_after)]
        budget = replace(budget, chunk=shared[0], beside=shared[1], doubles_after=shared[2])
        return cls(_with(options, budget), budget, (budget.line(), *expected_lines(times, most)))


def _with(options: EngineOptions, budget: StepBudget) -> EngineOptions:
    return replace(options, max_batch_size=budget.max_batch_size, chunk=budget.chunk)


def _layers(loaded: LoadedModel, options: EngineOptions) -> Sequence[Problem]:
    """One problem for each layer that attends, over pages of one token."""
    stored = problems_of(loaded, options)
    return [stored[read] for read in loaded.config.attention.reads]


def _fitting(loaded: LoadedModel, options: EngineOptions, token_bytes: int) -> int:
    """The sequences that K and V have room for. token_bytes: of a token's K and V"""
    memory = memory_of(loaded.weights.device)
    if options.kv_bytes is not None:
        room = options.kv_bytes
    elif memory is None:
        return _SEQS_ON_CPU
    else:
        room = free_of(memory) - int((1 - options.gpu_memory_share) * memory.total())
    return min(MOST_SEQS, max(_FEWEST_SEQS, room // (token_bytes * _TOKENS_OF_EACH)))


def rates_of(device: torch.device, dtype: torch.dtype) -> Rates:
    """The published rates of a device, or if there are none those of a product and a copy, measured now."""
    if device.type == "cuda" and dtype.itemsize == 2:
        published = published_rates(torch.cuda.get_device_name(device))
        if published is not None:
            return published
    return _measured(device, dtype)


def _measured(device: torch.device, dtype: torch.dtype) -> Rates:
    size, num_bytes = (4096, 1 << 28) if device.type == "cuda" else (512, 1 << 24)
    a, source = (
        torch.ones(size, size, dtype=dtype, device=device),
        torch.ones(num_bytes, dtype=torch.int8, device=device),
    )
    product, target = torch.empty_like(a), torch.empty_like(source)

    def seconds(work: Callable[[], object]) -> float:
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    # The first of three is slower.
    of_product, of_copy = (
        min(seconds(work) for _ in range(3))
        for work in (lambda: torch.mm(a, a, out=product), lambda: target.copy_(source))
    )
    return Rates(2 * num_bytes / of_copy, 2 * size**3 / of_product, "measured")
