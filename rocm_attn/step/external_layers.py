"""ExternalLayers: what an engine's model calls in each layer of the step that it has begun and filled."""

from __future__ import annotations

from torch import Tensor

from rocm_attn.kernels.cache.row_work import Projected, QkvWork, RopeTable
from rocm_attn.paging.adopted_pages import require_layer
from rocm_attn.step.external_gate import ExternalGate
from rocm_attn.step.protocols import LayerCalls
from rocm_attn.step.selections import StepSelections


class ExternalLayers(LayerCalls):
    """LayerCalls of the step that runs: ExternalAttention.layers. May be captured.

    Each raises BadTensor, and WrongState without a step that the current thread has begun and filled.
    """

    __slots__ = ("_gate", "_selections")

    def __init__(self, gate: ExternalGate, selections: StepSelections) -> None:
        self._gate, self._selections = gate, selections

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write the step's new keys and values of a layer to their slots.

        k, v: [T, kv_heads, head_dim | v_head_dim], any strides but the last
        """
        run = self._gate.running()
        run.core.layers.store(run.step, run.plan, layer, k, v)

    def attend(self, layer: int, q: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        """Attention of the step's new tokens over their sequences' KV.

        q, out: [T, q_heads, head_dim | v_head_dim], any strides but the last; padded tokens of out receive zeros
        lse:    float32 [T, q_heads]; when given, receives the natural log of the softmax denominator, -inf for pads
        """
        run = self._gate.running()
        run.core.layers.attend(run.step, run.plan, layer, q, out, lse)

    def rope_and_store(self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_out: Tensor, work: QkvWork) -> None:
        """As LayerCalls.rope_and_store. Positions are places in the KV, or came with the step's mask."""
        run = self._gate.running()
        run.core.layers.rope_and_store(run.step, run.plan, layer, Projected(q, k, v, q_out), work)

    def rope_queries(self, layer: int, q: Tensor, q_out: Tensor, work: QkvWork) -> None:
        """As LayerCalls.rope_queries."""
        run = self._gate.running()
        run.core.layers.rope_queries(run.step, layer, q, q_out, work)

    def finish(self, layer: int, out: Tensor, *, gate: Tensor | None = None, undo: RopeTable | None = None) -> None:
        """As LayerCalls.finish."""
        run = self._gate.running()
        run.core.layers.finish(run.step, layer, out, gate, undo)

    def store_index(self, layer: int, k: Tensor) -> None:
        """Write the step's new index keys of a layer that has an Indexer. As LayerCalls.store_index."""
        run = self._gate.running()
        run.core.layers.store_index(run.step, layer, k)

    def select(self, layer: int, q: Tensor, weights: Tensor | None = None) -> None:
        """Choose the keys that the step's new tokens attend to, by a layer's Indexer. As LayerCalls.select."""
        run = self._gate.running()
        run.core.layers.select(run.step, layer, q, weights)
        self._selections.after_select(0, layer)

    def give_selection(self, layer: int, units: Tensor, counts: Tensor) -> None:
        """In place of select(): what the caller has chosen. As LayerCalls.give_selection."""
        run = self._gate.running()
        run.core.layers.give_selection(run.step, layer, units, counts)
        self._selections.after_select(0, layer)

    def attend_selected(self, layer: int, q: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        """As attend, over the keys that were chosen since begin(). As LayerCalls.attend_selected."""
        run = self._gate.running()
        require_layer(layer, len(run.core.layers))
        self._selections.before_attend(0, layer)
        run.core.layers.attend_selected(run.step, layer, q, out, lse)
