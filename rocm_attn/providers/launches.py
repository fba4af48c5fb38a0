"""The kernel launches around attention (fill, store, copies, ...), as an interface with one method for each.

The modules of rocm_attn.kernels describe what each reads and writes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.moved_rows import AlikePages, MovedTokens
from rocm_attn.kernels.cache.row_work import Projected, QkvWork, RopeTable, TokenPlaces
from rocm_attn.kernels.metadata.engine_tensors import EngineLengths, GatherSource, LengthBounds, PublishedLengths
from rocm_attn.kernels.metadata.given_inputs import GivenInputs
from rocm_attn.kernels.metadata.page_watch import PageWatch
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.kernels.sparse.arguments import SelectedKeys, SparseTokens
from rocm_attn.kernels.speculative.arguments import Accepted, Probabilities, SpeculativeStep, Verified
from rocm_attn.kernels.speculative.paths import AcceptedPaths
from rocm_attn.kernels.states.arguments import (
    ConvolutionSlots,
    ConvolutionWeights,
    RecurArgs,
    StatePlaces,
)

# launch_next_step, or its twin: picked, given, width.
MakeNextStep = Callable[[Tensor, SpeculativeStep, int], None]
# launch_export_rows or launch_import_rows, or its twin: pages, moved.
MoveRows = Callable[[AlikePages, MovedTokens], None]


class UpdateTable(Protocol):
    """launch_table_update, or its twin."""

    def __call__(self, updates: Tensor, table: Tensor, *, num_updates: int) -> None: ...


class Fill(Protocol):
    """launch_fill, or its twin."""

    def __call__(self, step: StepTensors, *, page_size: int, window_left: int, chunk: int) -> None: ...


class StoreKV(Protocol):
    """launch_store_kv, or its twin."""

    def __call__(
        self, k: Tensor, v: Tensor, slot_of_token: Tensor, counts: Tensor, pages: LayerPages, *, null_page: bool
    ) -> None: ...


class RopeStore(Protocol):
    """launch_rope_store, or its twin."""

    def __call__(
        self, given: Projected, tokens: TokenPlaces, work: QkvWork, pages: LayerPages, *, null_page: bool
    ) -> None: ...


class FoldRows(Protocol):
    """launch_fold_rows, or its twin."""

    def __call__(self, pages: LayerPages, step: StepTensors, rows: Tensor, *, tokens: int, overlaps: bool) -> None: ...


class Convolve(Protocol):
    """launch_convolve, or its twin."""

    def __call__(
        self, x: Tensor, out: Tensor, convolution: ConvolutionWeights, slots: ConvolutionSlots, places: StatePlaces
    ) -> None: ...


class Recur(Protocol):
    """launch_recur, or its twin."""

    def __call__(self, args: RecurArgs, *, deterministic: bool) -> None: ...


class StatePlacing(Protocol):
    """launch_state_places, or its twin."""

    def __call__(self, step: StepTensors, tags: Tensor, headers: Tensor, places: StatePlaces, *, kept: int) -> None: ...


class GatherTable(Protocol):
    """launch_gather_table, or its twin."""

    def __call__(
        self, source: GatherSource, engine_row: Tensor, kv_len: Tensor, table: Tensor, *, page_size: int
    ) -> None: ...


class CheckPages(Protocol):
    """launch_check_pages, or its twin."""

    def __call__(
        self, step: StepTensors, num_pages: Tensor, *, page_size: int, window_left: int, spans_pass: bool, chunk: int
    ) -> None: ...


class TakeSlots(Protocol):
    """launch_take_slots, or its twin."""

    def __call__(self, given: Tensor, slot_map: Tensor | None, to: StepTensors, *, page_size: int) -> None: ...


class WatchPages(Protocol):
    """launch_watch_pages, or its twin."""

    def __call__(self, step: StepTensors, engine_row: Tensor, watch: PageWatch, *, page_size: int) -> None: ...


class PickRows(Protocol):
    """launch_pick_rows, or its twin."""

    def __call__(self, logits: Tensor, terms: Tensor, tokens: Tensor, found: Tensor, *, num_drawing: int) -> None: ...


@dataclass(frozen=True, slots=True)
class StepOps:
    """The launches around attention: Triton's, or their twins in torch. Comments name their parameters, in order."""

    publish: Callable[[Tensor, Tensor, StepTensors], None]  # slot, counts_before, to
    take_inputs: Callable[[Tensor, Tensor, StepTensors], None]  # slots, runs, to
    device_inputs: Callable[[Tensor, GivenInputs, StepTensors], None]  # slot, given, to
    place_mask: Callable[[Tensor, Tensor, int, int, StepTensors], None]  # bits, positions, keys_before, window_left, to
    draft_steps: Callable[[Sequence[StepTensors], Tensor, int], None]  # steps, parents, branches
    # parents, nodes_before, branches, window_left, to
    place_trees: Callable[[Tensor, int, int, int, StepTensors], None]
    place_spans: Callable[[Tensor, StepTensors], None]  # spans, to
    table_update: UpdateTable
    fill: Fill
    store_kv: StoreKV
    rope_store: RopeStore
    rope_queries: Callable[[Tensor, Tensor, Tensor, QkvWork], None]  # q, q_out, positions, work
    # out, gate, rope, positions, counts
    finish: Callable[[Tensor, Tensor | None, RopeTable | None, Tensor, Tensor], None]
    zero_tails: Callable[[StepTensors, LayerPages], None]
    fold_rows: FoldRows
    state_places: StatePlacing
    convolve: Convolve
    recur: Recur
    clear_pads: Callable[[Tensor, Tensor, Tensor | None, Tensor | None], None]  # counts, out, lse, row_of_token
    # out_a, lse_a, out_b, lse_b, out, lse
    merge_states: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
    # For steps whose lengths, tables, slots and masks an engine owns.
    # slot, counts_before, given, bounds, to
    publish_engine: Callable[[Tensor, Tensor, EngineLengths, LengthBounds, PublishedLengths], None]
    gather_table: GatherTable
    check_pages: CheckPages
    take_slots: TakeSlots
    pack_mask: Callable[[Tensor, Tensor, int, StepTensors], None]  # cells, positions, window_left, to
    watch_pages: WatchPages
    # Copies between pages and the buffers that engines exchange.
    export_rows: MoveRows
    import_rows: MoveRows
    # For drafts.
    accept_drawn: Callable[[Tensor, Verified, Accepted], None]  # drawn, given, to
    accept_sampled: Callable[[Probabilities, Verified, Accepted], None]  # probabilities, given, to
    move_paths: Callable[[AlikePages, AcceptedPaths], None]  # pages, paths
    next_step: MakeNextStep
    # Checks selections that a caller makes, and all of them in debug runs.
    check_selection: Callable[[SelectedKeys, SparseTokens, Tensor], None]  # selection, tokens, faults
    # From logits to tokens.
    pick_rows: PickRows
    shape_rows: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]  # logits, parameters, counts, masks, shaped
    cut_rows: Callable[[Tensor, Tensor], None]  # parameters, shaped
    likeliest: Callable[[Tensor, Tensor, Tensor, Tensor], None]  # logits, parameters, tokens, likeliest
