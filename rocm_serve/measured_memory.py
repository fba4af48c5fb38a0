"""Measures the GPU memory of a model's largest steps (profile run), which run over a small KV pool first.

The real pool then gets the rest of the GPU's memory, however much experts, a large vocabulary or a library's workspace
take. A peak is the memory that torch's allocator has reserved from the device, not that of the tensors in it.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rocm_attn.capture.fit import DRIVER_BYTES
from rocm_attn.capture.graphs import capture_shapes
from rocm_attn.capture.probe_requests import ProbeRequests
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.errors import NeverFits
from rocm_attn.machine.devices import on_device
from rocm_attn.paging.index_spaces import num_pages
from rocm_attn.runtime import AttentionRuntime
from rocm_serve.pool_size import MeasuredMemory
from rocm_serve.sampling.sampling import draw_all

# Graphs share one pool of memory, in which each keeps its outputs; the rest of it is reused by other graphs.
# Made in any order, they took up to twice the rest of the largest, because the sizes of a ladder double.
_GRAPHS_OF_ANY_ORDER = 2


class DeviceMemory:
    """The memory of a GPU and torch's allocator of it, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        """All that the device has."""
        return torch.cuda.mem_get_info(self._device)[1]

    def free(self) -> int:
        """Memory that no process on the device holds."""
        return torch.cuda.mem_get_info(self._device)[0]

    def held(self) -> int:
        """Memory of the device that this process's allocator holds."""
        return torch.cuda.memory_reserved(self._device)

    def most_held(self) -> int:
        """The most that the allocator has held since start_peak()."""
        return torch.cuda.max_memory_reserved(self._device)

    def start_peak(self) -> None:
        """Restarts the peak of most_held()."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def give_back(self) -> None:
        """Waits for the device, and returns to it all allocator memory that no tensor needs."""
        torch.cuda.synchronize(self._device)
        with on_device(self._device):
            torch.cuda.empty_cache()

    def of_a_graph(self) -> int:
        """A lower bound of the memory that the driver keeps for each graph."""
        return DRIVER_BYTES


def memory_of(device: torch.device) -> DeviceMemory | None:
    """The memory of a GPU; None for a CPU, whose free memory does not limit a process."""
    return DeviceMemory(device) if device.type == "cuda" else None


def free_of(memory: DeviceMemory) -> int:
    """Free memory after giving back all that is unused: engines that are gone hold theirs in reference cycles."""
    gc.collect()
    memory.give_back()
    return memory.free()


@dataclass(frozen=True, slots=True)
class LargestSteps:
    """The steps of a model that take the most memory.

    num_seqs:   most sequences of a step
    num_tokens: most new tokens of a step; at least those of num_seqs sequences that are captured
    longest:    tokens of the longest sequence
    total:      tokens of all sequences in the future pool, approximately
    captured:   most new tokens of each sequence in captured steps: more than 1 to verify drafts
    """

    num_seqs: int
    num_tokens: int
    longest: int
    total: int
    captured: int = 1

    def lengths(self) -> Iterator[tuple[list[int], list[int]]]:
        """kv_len and q_len of each: a prompt with sequences that decode, one prompt, many prompts, all captured."""
        usual = min(self.longest, self.total // self.num_seqs)
        most = min(self.num_tokens, self.num_seqs * self.longest)
        for num_seqs in (self.num_seqs, 1):
            q_len = _one_after_the_other(most, num_seqs, self.longest)
            yield [self.longest, *(max(usual, new) for new in q_len[1:])], q_len
        num_prompts = max(-(-most // self.longest), min(self.num_seqs, max(1, most // 2)))
        prompts = [len(part) for part in np.array_split(np.arange(most), num_prompts)]
        yield prompts, prompts
        new = min(self.captured, self.longest)
        yield [self.longest, *[max(usual, new)] * (self.num_seqs - 1)], [new] * self.num_seqs

    def pages(self, page_size: int) -> int:
        """Pages for the sequences of any of these steps, which share all pages except those of their new tokens."""
        return 1 + num_pages(self.longest, page_size) + num_pages(self.num_tokens, page_size) + 2 * self.num_seqs


def _one_after_the_other(num_tokens: int, num_seqs: int, most: int) -> list[int]:
    """Divides num_tokens over num_seqs: the first get as many as they can take, and the others one."""
    q_len: list[int] = []
    for left in range(num_seqs - 1, -1, -1):
        q_len.append(max(1, min(most, num_tokens - sum(q_len) - left)))
    return q_len


@dataclass(frozen=True, slots=True)
class GraphMemory:
    """Memory of the graphs of a model, known from its largest ones, in bytes.

    pool:    of the memory that graphs share, with the largest ones made
    kept:    of the outputs of those
    outputs: of the outputs of each graph that will be made
    """

    pool: int
    kept: int
    outputs: Sequence[int]

    def num_bytes(self, of_each: int) -> int:
        """Memory of all graphs. of_each: the driver's, for each graph"""
        shared = max(0, self.pool - self.kept)
        return _GRAPHS_OF_ANY_ORDER * shared + sum(self.outputs) + len(self.outputs) * of_each


NO_GRAPHS = GraphMemory(0, 0, ())


def measure(
    memory: DeviceMemory,
    build: Callable[[], tuple[AttentionRuntime, StepRunner]],
    largest: LargestSteps,
    beside: Callable[[AttentionRuntime], GraphMemory],
    *,
    vocabulary: int,
) -> MeasuredMemory:
    """Measures the largest steps and the graphs. Everything built for it is freed afterwards.

    build:      a runtime with room for these steps, and a runner of the model over it, which makes a graph of a step at
                its first run or makes none
    beside:     makes the largest graphs of a model that drafts, over the same runtime
    vocabulary: of the model
    Raises NeverFits if a step does not fit next to the weights.
    """
    free_of(memory)  # before anything is counted
    held = memory.held()
    try:
        step_bytes, graph_bytes = _run(memory, held, build, largest, beside, vocabulary)
    except torch.OutOfMemoryError as full:
        raise NeverFits(
            f"a step of {largest.num_tokens} tokens in {largest.num_seqs} sequences does not fit in memory next to "
            "the weights; lower max_batch_size or chunk, or use a smaller model"
        ) from full
    return MeasuredMemory(memory.total(), free_of(memory), step_bytes, graph_bytes)


def _run(
    memory: DeviceMemory,
    held: int,
    build: Callable[[], tuple[AttentionRuntime, StepRunner]],
    largest: LargestSteps,
    beside: Callable[[AttentionRuntime], GraphMemory],
    vocabulary: int,
) -> tuple[int, int]:
    """Bytes of a step, including those the runtime keeps for it, and of all graphs. held: by the allocator before."""
    runtime, runner = build()
    held += runtime.pool.num_bytes + runtime.states.num_bytes
    step_bytes = 0
    with ProbeRequests(runtime, vocabulary=vocabulary, seed=0) as probes:
        for kv_len, q_len in largest.lengths():
            batch = probes.admit(kv_len, q_len)
            memory.give_back()  # memory used to draw random K and V
            memory.start_peak()
            draw_all(runner.run_eagerly(batch).flatten(0, -2), runtime.core.ops.pick_rows)
            step_bytes = max(step_bytes, memory.most_held() - held)
            runtime.faults.forget()  # random K and V may overflow
        memory.give_back()
        free, held_before = memory.free(), memory.held()
        memory.start_peak()
        rows = runner.run(batch)  # the last one is captured, and the graph is compared with the eager run
        num_each = rows.shape[1] if rows.dim() == 3 else 1  # rows of logits of each sequence
        row_bytes = rows.nbytes // len(rows)
        runtime.faults.forget()
        buckets = runner.capture_report().buckets
        of_largest = sum(bucket.num_bytes for bucket in buckets)
        step_bytes = max(step_bytes, memory.most_held() - held - of_largest)
        memory.give_back()
        # the driver's memory for a graph is not the allocator's
        of_each = max(memory.of_a_graph(), free - memory.free() - (memory.held() - held_before))
    if not buckets:
        return step_bytes, 0
    # a graph of a decode step has logits of one token of each sequence
    outputs = [
        row_bytes * shape.num_seqs // (num_each if shape.kind.decodes else 1)
        for shape in capture_shapes(runtime.padding)
    ]
    of_drafts = beside(runtime)
    return step_bytes, GraphMemory(of_largest, max(outputs), outputs).num_bytes(of_each) + of_drafts.num_bytes(of_each)
