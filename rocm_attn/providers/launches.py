"""The launches around attention, by name and parameter. rocm_attn.kernels says what each reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.moved_rows import AlikePages, MovedTokens
from rocm_attn.kernels.cache.row_work import Projected, QkvWork, RopeTable, TokenPlaces
from rocm_attn.kernels.metadata.engine_tensors import EngineLengths, GatherSource, LengthBounds, PublishedLengths
from rocm_attn.kernels.metadata.given_inputs import GivenInputs
from rocm_attn.kernels.metadata.page_watch import PageWatch
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.kernels.sparse.arguments import SelectedKeys
from rocm_attn.kernels.sparse.arguments import SparseTokens as SelectingTokens
from rocm_attn.kernels.speculative.arguments import Accepted, Probabilities, SpeculativeStep, Verified
from rocm_attn.kernels.speculative.paths import AcceptedPaths


class Publish(Protocol):
    """launch_publish, or its twin."""

    def __call__(self, slot: Tensor, counts_before: Tensor, to: StepTensors) -> None: ...


class TakeInputs(Protocol):
    """launch_take_inputs, or its twin."""

    def __call__(self, slots: Tensor, runs: Tensor, to: StepTensors) -> None: ...


class PlaceDeviceInputs(Protocol):
    """launch_device_inputs, or its twin."""

    def __call__(self, slot: Tensor, given: GivenInputs, to: StepTensors) -> None: ...


class PlaceMask(Protocol):
    """launch_place_mask, or its twin."""

    def __call__(
        self, bits: Tensor, positions: Tensor, keys_before: int, window_left: int, to: StepTensors
    ) -> None: ...


class PlaceTrees(Protocol):
    """launch_place_trees, or its twin."""

    def __call__(
        self, parents: Tensor, nodes_before: int, branches: int, window_left: int, to: StepTensors
    ) -> None: ...


class DeriveDraftSteps(Protocol):
    """launch_draft_steps, or its twin."""

    def __call__(self, steps: Sequence[StepTensors], parents: Tensor, branches: int) -> None: ...


class AcceptDrawn(Protocol):
    """launch_accept_drawn, or its twin."""

    def __call__(self, drawn: Tensor, given: Verified, to: Accepted) -> None: ...


class AcceptSampled(Protocol):
    """launch_accept_sampled, or its twin."""

    def __call__(self, probabilities: Probabilities, given: Verified, to: Accepted) -> None: ...


class MakeNextStep(Protocol):
    """launch_next_step, or its twin."""

    def __call__(self, picked: Tensor, given: SpeculativeStep, width: int) -> None: ...


class MovePaths(Protocol):
    """launch_move_paths, or its twin."""

    def __call__(self, pages: AlikePages, paths: AcceptedPaths) -> None: ...


class UpdateTable(Protocol):
    """launch_table_update, or its twin."""

    def __call__(self, updates: Tensor, table: Tensor, *, num_updates: int) -> None: ...


class Fill(Protocol):
    """launch_fill, or its twin."""

    def __call__(self, step: StepTensors, *, page_size: int, window_left: int) -> None: ...


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


class RopeQueries(Protocol):
    """launch_rope_queries, or its twin."""

    def __call__(self, q: Tensor, q_out: Tensor, positions: Tensor, work: QkvWork) -> None: ...


class Finish(Protocol):
    """launch_finish, or its twin."""

    def __call__(
        self, out: Tensor, gate: Tensor | None, rope: RopeTable | None, positions: Tensor, counts: Tensor
    ) -> None: ...


class FoldRows(Protocol):
    """launch_fold_rows, or its twin."""

    def __call__(
        self,
        pages: LayerPages,
        table: Tensor,
        row_of_token: Tensor,
        position_of_token: Tensor,
        counts: Tensor,
        rows: Tensor,
        *,
        tokens: int,
        overlaps: bool,
    ) -> None: ...


class ZeroTails(Protocol):
    """launch_zero_tails, or its twin."""

    def __call__(
        self, table: Tensor, row_of_seq: Tensor, kv_len: Tensor, q_len: Tensor, pages: LayerPages, *, null_page: bool
    ) -> None: ...


class MoveRows(Protocol):
    """launch_export_rows or launch_import_rows, or its twin."""

    def __call__(self, pages: AlikePages, moved: MovedTokens) -> None: ...


class ClearPads(Protocol):
    """launch_clear_pads, or its twin."""

    def __call__(self, counts: Tensor, out: Tensor, lse: Tensor | None) -> None: ...


class MergeStates(Protocol):
    """launch_merge_states, or its twin."""

    def __call__(
        self, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor
    ) -> None: ...


class PublishEngine(Protocol):
    """launch_publish_engine, or its twin."""

    def __call__(
        self, slot: Tensor, counts_before: Tensor, given: EngineLengths, bounds: LengthBounds, to: PublishedLengths
    ) -> None: ...


class GatherTable(Protocol):
    """launch_gather_table, or its twin."""

    def __call__(
        self, source: GatherSource, engine_row: Tensor, kv_len: Tensor, table: Tensor, *, page_size: int
    ) -> None: ...


class CheckPages(Protocol):
    """launch_check_pages, or its twin."""

    def __call__(self, step: StepTensors, num_pages: Tensor, *, page_size: int, window_left: int) -> None: ...


class TakeSlots(Protocol):
    """launch_take_slots, or its twin."""

    def __call__(
        self,
        given: Tensor,
        slot_map: Tensor | None,
        counts: Tensor,
        slot_of_token: Tensor,
        *,
        page_size: int,
        null_page: bool,
    ) -> None: ...


class WatchPages(Protocol):
    """launch_watch_pages, or its twin."""

    def __call__(self, step: StepTensors, engine_row: Tensor, watch: PageWatch, *, page_size: int) -> None: ...


class PackMask(Protocol):
    """launch_pack_mask, or its twin."""

    def __call__(self, cells: Tensor, positions: Tensor, window_left: int, to: StepTensors) -> None: ...


class PickRows(Protocol):
    """launch_pick_rows, or its twin."""

    def __call__(self, logits: Tensor, terms: Tensor, tokens: Tensor, found: Tensor, *, num_drawing: int) -> None: ...


class ShapeRows(Protocol):
    """launch_shape_rows, or its twin."""

    def __call__(self, logits: Tensor, parameters: Tensor, counts: Tensor, masks: Tensor, shaped: Tensor) -> None: ...


class CutRows(Protocol):
    """launch_cut_rows, or its twin."""

    def __call__(self, parameters: Tensor, shaped: Tensor) -> None: ...


class Likeliest(Protocol):
    """launch_likeliest, or its twin."""

    def __call__(self, logits: Tensor, parameters: Tensor, tokens: Tensor, likeliest: Tensor) -> None: ...


class PickOps(Protocol):
    """The operations of StepOps that picking tokens needs."""

    @property
    def pick_rows(self) -> PickRows: ...
    @property
    def shape_rows(self) -> ShapeRows: ...
    @property
    def cut_rows(self) -> CutRows: ...
    @property
    def likeliest(self) -> Likeliest: ...


class CheckSelection(Protocol):
    """launch_check_selection, or its twin."""

    def __call__(self, selection: SelectedKeys, tokens: SelectingTokens, faults: Tensor) -> None: ...
