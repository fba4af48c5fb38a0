"""Report: an engine's kernels, device, memory and settings, with its metrics."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rocm_attn.step.metrics import Metrics

if TYPE_CHECKING:  # a server's front reads reports, and imports no torch
    from rocm_attn.runtime import AttentionRuntime
    from rocm_serve.models.loading import LoadedModel
    from rocm_serve.pool_size import MeasuredMemory
    from rocm_serve.step_sizes import StepSizes


@dataclass(frozen=True, slots=True)
class Report:
    """An engine's state at one moment.

    provider:        provider of the attention kernels
    kernels:         the kernel of each kind of step
    rejected:        every rejected kernel and why
    page_size:       tokens in a page
    pools:           how layers keep K and V, in words
    num_pages:       pages of the KV pool, the reserved one included
    swa_pages:       the same for the pool of sliding-window layers; 0: they share the other layers' pool
    weights_bytes:   size of the weights
    weights_seconds: time to load the weights
    step_bytes:      GPU memory of the largest steps, if the pool was sized by it; 0: not measured
    graph_bytes:     the same for captured graphs
    kv_bytes:        size of the KV pools
    state_bytes:     size of recurrent states, those in the prefix cache included
    checkpoints:     recurrent states that the prefix cache can keep
    max_kv_len:      tokens of the longest sequence
    steps:           the sizes of steps, and their expected times, in words
    graphs:          "on", "off", or "off: " and why they were switched off
    speculative_steps: whether the device prepares the next verify step itself, or why the host plans each; empty: no
                     speculative decoding
    deterministic:   whether a request's tokens are independent of other requests
    ranks:           number of tensor-parallel ranks; the other fields are those of rank 0
    cost_of_ranks:   what dividing the model over ranks costs, in sentences
    guards_off:      safeguards that are switched off, by id
    metrics:         counts and durations of the steps so far
    """

    provider: str
    kernels: tuple[str, ...]
    rejected: tuple[str, ...]
    device: str
    arch: str
    dtype: str
    page_size: int
    pools: tuple[str, ...]
    num_pages: int
    swa_pages: int
    weights_bytes: int
    weights_seconds: float
    step_bytes: int
    graph_bytes: int
    kv_bytes: int
    state_bytes: int
    checkpoints: int
    max_kv_len: int
    max_batch_size: int
    chunk: int
    steps: tuple[str, ...]
    graphs: str
    speculative_steps: str
    deterministic: bool
    ranks: int
    cost_of_ranks: tuple[str, ...]
    guards_off: tuple[str, ...]
    metrics: Metrics

    def memory_line(self) -> str:
        """How the memory is used, in words."""
        parts = {
            "weights": self.weights_bytes,
            "a step": self.step_bytes,
            "graphs": self.graph_bytes,
            "K and V": self.kv_bytes,
            "states": self.state_bytes,
        }
        taken = ", ".join(f"{what} {num_bytes / 2**30:.2f} GiB" for what, num_bytes in parts.items() if num_bytes)
        windows = f", and {self.swa_pages} for layers with a window" if self.swa_pages else ""
        return f"{taken}; {self.num_pages} pages{windows}, for sequences of up to {self.max_kv_len} tokens"

    def start_line(self) -> str:
        """The time of the start so far, in words. That of graphs includes the compiles of their kernels."""
        metrics = self.metrics
        return (
            f"started: weights {self.weights_seconds:.1f} s, graphs {metrics.capture_seconds:.1f} s, "
            f"kernels of Triton {metrics.compile_seconds:.1f} s"
        )

    def as_dict(self) -> dict[str, object]:
        """The report for JSON, with the metrics next to the other fields."""
        facts = {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.name != "metrics"}
        return {**facts, **self.metrics.as_dict()}


def report_of(
    runtime: AttentionRuntime,
    loaded: LoadedModel,
    sizes: StepSizes,
    measured: MeasuredMemory,
    speculative_steps: str,
    metrics: Metrics,
) -> Report:
    """The report of an engine over a runtime."""
    options = sizes.options
    return Report(
        provider=runtime.selections[0].provider,
        kernels=tuple(dict.fromkeys(line for each in runtime.selections for line in each.lines())),
        rejected=tuple(dict.fromkeys(line for each in runtime.selections for line in each.refusal_lines())),
        device=str(runtime.device),
        arch=runtime.target.arch,
        dtype=str(loaded.weights.dtype).removeprefix("torch."),
        page_size=runtime.pool.page_size,
        pools=tuple(dict.fromkeys(selection.problem.pool.value for selection in runtime.selections)),
        num_pages=runtime.pool.num_pages,
        swa_pages=runtime.options.swa_pages,
        weights_bytes=loaded.weights.num_bytes,
        weights_seconds=loaded.seconds,
        step_bytes=measured.step,
        graph_bytes=measured.graph,
        kv_bytes=runtime.pool.num_bytes,
        state_bytes=runtime.states.num_bytes,
        checkpoints=runtime.states.recurrent.checkpoints,
        max_kv_len=runtime.max_kv_len,
        max_batch_size=options.max_batch_size,
        chunk=options.chunk,
        steps=sizes.lines,
        graphs=f"off: {metrics.graphs_off}" if metrics.graphs_off else "on" if options.graphs else "off",
        speculative_steps=speculative_steps,
        deterministic=options.deterministic,
        ranks=loaded.ranks.shard.num_ranks,
        cost_of_ranks=loaded.cost,
        guards_off=runtime.guards.off,
        metrics=metrics,
    )
