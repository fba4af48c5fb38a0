"""StepSizes: an engine's options, with step sizes filled in that depend on the model and the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from rocm_attn.capture.step_times import TOKENS_OF_EACH, StepBudget, StepTimes, fitting
from rocm_attn.machine.gpus import Rates, published_rates
from rocm_attn.paging.kv_pool import page_bytes
from rocm_attn.paging.state_pool import SLOTS_OF_ROW, RecurrentLayers, slot_bytes
from rocm_serve.engine_runtime import problems_of
from rocm_serve.measured_memory import free_of, memory_of
from rocm_serve.models.loading import LoadedModel
from rocm_serve.models.weight_bytes import matrices_of
from rocm_serve.options import EngineOptions

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
            chunk, expected = options.chunk or _CHUNK_ON_CPU, []
            budget = StepBudget(options.max_batch_size or _SEQS_ON_CPU, chunk, (chunk,))
        else:
            rates = rates_of(weights.device, weights.dtype)
            # Ranks may have measured different rates, and have to schedule the same steps.
            bytes_per_s, flops_per_s = ranks.least(int(rates.bytes_per_s)), ranks.least(int(rates.flops_per_s))
            rates = replace(rates, bytes_per_s=bytes_per_s, flops_per_s=flops_per_s)
            times = times_of(loaded, options, rates)
            states = slot_bytes(RecurrentLayers(times.recurrent, kept=options.rows_of_each))
            of_seq = TOKENS_OF_EACH * page_bytes(problems_of(loaded, options)) + SLOTS_OF_ROW * states
            most = options.max_batch_size or ranks.least(_fitting(loaded, options, of_seq))
            budget = StepBudget.chosen(times, most, options.chunk, options.latency)
            expected = times.lines(most)
        sizes = replace(options, max_batch_size=budget.max_batch_size, chunk=budget.chunk)
        return cls(sizes, budget, (*budget.lines(), *expected))


def times_of(loaded: LoadedModel, options: EngineOptions, rates: Rates) -> StepTimes:
    """The least times of a model's steps by these rates. Raises BadSetting, Unsupported."""
    config, dtype = loaded.config, loaded.weights.dtype
    stored, attention = problems_of(loaded, options), config.attention
    layers = [stored[read] for read in attention.reads]
    return StepTimes(
        matrices_of(config, dtype, loaded.ranks.shard.num_ranks), layers, rates, attention.recurrences(dtype)
    )


def _fitting(loaded: LoadedModel, options: EngineOptions, seq_bytes: int) -> int:
    """The sequences that K and V and states have room for. seq_bytes: of a sequence of TOKENS_OF_EACH tokens"""
    memory = memory_of(loaded.weights.device)
    if options.kv_bytes is not None:
        room = options.kv_bytes
    elif memory is None:
        return _SEQS_ON_CPU
    else:
        room = free_of(memory) - int((1 - options.gpu_memory_share) * memory.total())
    return fitting(room * TOKENS_OF_EACH // seq_bytes)


def rates_of(device: torch.device, dtype: torch.dtype) -> Rates:
    """The published rates of a device, or if there are none those of a product and a copy, measured now."""
    on_gpu = device.type == "cuda"
    if on_gpu and dtype.itemsize == 2 and (published := published_rates(torch.cuda.get_device_name(device))):
        return published
    size, num_bytes = (4096, 1 << 28) if on_gpu else (512, 1 << 24)
    a, source = torch.ones(size, size, dtype=dtype, device=device), torch.ones(num_bytes // 4, device=device)
    product, target = torch.empty_like(a), torch.empty_like(source)

    def seconds(work: Callable[[], object]) -> float:
        begin = time.perf_counter()
        work()
        if on_gpu:
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    of_copy = min(seconds(lambda: target.copy_(source)) for _ in range(3))  # the first one is slower
    of_product = min(seconds(lambda: torch.mm(a, a, out=product)) for _ in range(3))
    return Rates(2 * num_bytes / of_copy, 2 * size**3 / of_product, "measured")
