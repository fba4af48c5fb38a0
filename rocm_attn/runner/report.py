"""Report: what an engine ran on, and how it went."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


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
    guards_off:      safeguards that are switched off, by id
    steps, replays, captures: all steps, those that ran as a graph, graphs made
    padded_share:    padded sequences among all sequences of all steps
    preemptions:     sequences that gave their pages back and were computed again
    prompt_tokens:   of all requests that were taken
    new_tokens:      generated
    seconds:         spent in steps, capture_seconds included
    tokens_per_s:    new tokens in a second of steps, making graphs not counted
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
    guards_off: tuple[str, ...]
    steps: int
    replays: int
    captures: int
    capture_seconds: float
    padded_share: float
    preemptions: int
    prompt_tokens: int
    new_tokens: int
    seconds: float
    tokens_per_s: float

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return dataclasses.asdict(self)
