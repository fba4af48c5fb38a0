"""Report: what an engine ran on, and how it went."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from rocm_attn.step.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Report:
    """An engine's state at one moment.

    provider:        whose attention kernels run
    kernels:         the kernel of each kind of step, then every kernel that was passed over and why
    page_size:       tokens in a page
    pools:           how layers keep K and V, in words
    num_pages:       pages of the KV pool, the reserved one included
    swa_pages:       likewise, of the pool of layers with a window; 0: they share the other layers' pool
    max_kv_len:      tokens of the longest sequence
    graphs:          "on", "off", or "off: " and why they were switched off
    deterministic:   whether a request's tokens are independent of those beside it
    ranks:           that share the model by tensor parallelism; what the rest says is of rank 0
    cost_of_ranks:   what the cut over them costs, in sentences
    guards_off:      safeguards that are switched off, by id
    metrics:         what steps have come to
    """

    provider: str
    kernels: tuple[str, ...]
    device: str
    arch: str
    dtype: str
    page_size: int
    pools: tuple[str, ...]
    num_pages: int
    swa_pages: int
    max_kv_len: int
    max_batch_size: int
    chunk: int
    graphs: str
    deterministic: bool
    ranks: int
    cost_of_ranks: tuple[str, ...]
    guards_off: tuple[str, ...]
    metrics: Metrics

    def as_dict(self) -> dict[str, object]:
        """For JSON, with the metrics beside the facts."""
        facts = {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.name != "metrics"}
        return {**facts, **self.metrics.as_dict()}
