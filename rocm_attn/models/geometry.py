"""The attention layers of a model, as values: the facts that the runner and `rocm-attn explain` use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from rocm_attn.models.shards import Shard
from rocm_attn.problem import (
    ALL_KEYS,
    UNLIMITED_WINDOW,
    AllKeys,
    EarlierSelection,
    Indexer,
    PoolKind,
    Problem,
)
from rocm_attn.selection.kv_formats import AS_COMPUTED, KVFormat


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One attention layer of a model. v rows are as long as q and k rows, except in latent attention.

    scale:       factor on q.k before the softmax
    window_left: previous keys that a query attends to in addition to its own; -1: all of them
    indexer:     selects the keys that are attended to; whole on every rank, except for selections per KV head
    latent_dim:  of latent attention: the first elements of a token's one row, which are V; 0: K and V of their own
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window_left: int = UNLIMITED_WINDOW
    logits_soft_cap: float = 0.0
    has_sinks: bool = False
    latent_dim: int = 0
    indexer: AllKeys | Indexer | EarlierSelection = ALL_KEYS

    @property
    def rope_dim(self) -> int:
        """Elements of a q and a k row that turn: all, or in latent attention those after the latent ones."""
        return self.head_dim - self.latent_dim

    def on_one_of(self, num_ranks: int) -> AttentionLayer:
        """The part of one tensor-parallel rank, as Shard.heads cuts it. Every rank holds the one latent row."""
        heads, indexer = Shard(0, num_ranks).heads(self.num_q_heads, self.num_kv_heads), self.indexer
        if isinstance(indexer, Indexer) and indexer.indexing.sets > 1:
            of_set = indexer.num_heads // indexer.indexing.sets
            indexing = replace(indexer.indexing, sets=heads.kv.size)
            indexer = replace(indexer, num_heads=of_set * heads.kv.size, indexing=indexing)
        return replace(self, num_q_heads=heads.q.size, num_kv_heads=heads.kv.size, indexer=indexer)

    def problem(self, *, dtype: torch.dtype, page_size: int, kv: KVFormat = AS_COMPUTED) -> Problem:
        """The layer as the attention runtime takes it. Raises BadProblem."""
        return Problem(
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.latent_dim or self.head_dim,
            dtype=dtype,
            page_size=page_size,
            scale=self.scale,
            window_left=self.window_left,
            logits_soft_cap=self.logits_soft_cap,
            has_sinks=self.has_sinks,
            indexer=self.indexer,
            pool=PoolKind.LATENT if self.latent_dim else PoolKind.SPLIT,
            kv_encoding=kv.encoding,
            kv_scales=kv.scales,
        )


@dataclass(frozen=True, slots=True)
class AttentionGeometry:
    """The attention layers of a model; they may all differ.

    reads: layer -> the layer whose K and V it reads: itself, or an earlier one if it is one of the last that keep none
    """

    layers: tuple[AttentionLayer, ...]
    reads: tuple[int, ...]

    @classmethod
    def of(cls, layers: Sequence[AttentionLayer]) -> AttentionGeometry:
        """Layers that all keep K and V."""
        return cls(tuple(layers), tuple(range(len(layers))))

    @property
    def num_storing(self) -> int:
        """Layers that keep K and V, the first ones. A runtime is built of them; the others attend by their numbers."""
        return sum(layer == read for layer, read in enumerate(self.reads))

    def keeps_kv(self, layer: int) -> bool:
        """True if a layer keeps K and V."""
        return self.reads[layer] == layer

    def on_one_of(self, num_ranks: int) -> AttentionGeometry:
        """The part of one tensor-parallel rank; see AttentionLayer."""
        return replace(self, layers=tuple(layer.on_one_of(num_ranks) for layer in self.layers))

    def without_idle_windows(self, max_kv_len: int) -> AttentionGeometry:
        """The same layers for sequences up to max_kv_len: a window that none of them outgrows is dropped."""
        layers = tuple(
            replace(layer, window_left=UNLIMITED_WINDOW) if layer.window_left >= max_kv_len - 1 else layer
            for layer in self.layers
        )
        return replace(self, layers=layers)

    def problems(self, *, dtype: torch.dtype, page_size: int, kv: KVFormat = AS_COMPUTED) -> tuple[Problem, ...]:
        """One Problem per layer that keeps K and V; a layer that reads them has that layer's. Raises BadProblem."""
        storing = self.layers[: self.num_storing]
        return tuple(layer.problem(dtype=dtype, page_size=page_size, kv=kv) for layer in storing)


def window_left(sliding_window: int) -> int:
    """window_left of Hugging Face's window, which counts a query's own key; here only the previous ones count."""
    return sliding_window - 1
