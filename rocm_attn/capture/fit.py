"""Fit: predicts whether a model fits in a GPU's memory, and how many tokens of KV, before anything is loaded."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from rocm_attn.capture.forecast import CapturePlan

# The driver takes memory in steps, so its memory for one graph may not show. On an H200 it kept 4 MiB for each of 35
# graphs of 8 layers.
DRIVER_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Fit:
    """The memory of one GPU, and what will be in it. All in bytes.

    budget:  the memory that may be in use
    weights: of this rank
    kv:      of the pools that the plan has
    buffers: of requests and of captured steps
    graphs:  memory that the driver keeps for graphs
    page_size: tokens of a page
    tokens:  KV tokens that the pools of the plan hold
    room:    KV tokens that fit next to the rest; they grow with the budget alone
    """

    budget: int
    weights: int
    kv: int
    buffers: int
    graphs: int
    page_size: int
    tokens: int
    room: int

    @property
    def left(self) -> int:
        """Bytes for activations; negative if the plan does not fit."""
        return self.budget - self.weights - self.kv - self.buffers - self.graphs

    @property
    def fits(self) -> bool:
        return self.left >= 0


def fit_of(plan: CapturePlan, planned: Callable[[int], CapturePlan], *, budget: int, weight_bytes: int) -> Fit:
    """The plan on a GPU whose budget is that many bytes, next to weights of weight_bytes.

    planned: the same plan with another number of pages; kernels, and so buffers, may depend on it
    Pages of the pool for windows, if it is a pool of its own, stay as many as planned.
    """
    fit = _fit_of(plan, budget, weight_bytes)
    room = fit.room
    while room and not (other := _fit_of(planned(1 + room // fit.page_size), budget, weight_bytes)).fits:
        room = min(other.room, room - fit.page_size)
    return replace(fit, room=room)


def _fit_of(plan: CapturePlan, budget: int, weight_bytes: int) -> Fit:
    graphs = len(plan.buckets) * DRIVER_BYTES
    full = plan.pages.num_pages * plan.pages.page_bytes
    buffers = plan.num_bytes - plan.kv_bytes
    # The states that a prefix cache keeps grow with the pages.
    growing = full + plan.checkpoint_bytes
    for_growing = budget - weight_bytes - (buffers - plan.checkpoint_bytes) - graphs - (plan.kv_bytes - full)
    # Page 0 holds no tokens.
    pages = max(0, for_growing * plan.pages.num_pages // growing - 1) if full else plan.pages.num_pages - 1
    return Fit(
        budget=budget,
        weights=weight_bytes,
        kv=plan.kv_bytes,
        buffers=buffers,
        graphs=graphs,
        page_size=plan.pages.page_size,
        tokens=(plan.pages.num_pages - 1) * plan.pages.page_size,
        room=pages * plan.pages.page_size,
    )
