"""The attention layers of a model, as values: the facts that the runner and `rocm-attn explain` use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from rocm_attn.errors import Unsupported
from rocm_attn.models.recurrent import RecurrentLayer
from rocm_attn.models.shards import Shard
from rocm_attn.problem import (
    ALL_KEYS,
    UNLIMITED_WINDOW,
    AllKeys,
    EarlierSelection,
    Indexer,
    Indexing,
    LastUnit,
    PoolKind,
    Problem,
    Row,
)
from rocm_attn.recurrence import Recurrence
from rocm_attn.selection.kv_formats import AS_COMPUTED, KVFormat

# CompressedRows.top of layers that attend to all rows.
EVERY_ROW = 0


@dataclass(frozen=True, slots=True)
class CompressedRows:
    """Rows that stand for several tokens each, and that a layer attends to with the softmax of its window.

    tokens, head_dim: tokens and elements of a row, which is K and V
    top: rows that an indexer of index_heads heads of index_dim elements chooses for a query
    own_rows, own_choice: whether the layer makes the rows, and chooses, or the nearest earlier layer that does
    overlaps, folds_index: as of Row: whether rows are folded from the tokens before theirs too, and whether index keys
                           are folded; if not, the model projects an index key from a row
    blocks, block_rows: blocks of rows that the layer which makes them leaves for later choices, and rows of each
    """

    tokens: int
    head_dim: int
    top: int = EVERY_ROW
    index_heads: int = 0
    index_dim: int = 0
    own_rows: bool = True
    own_choice: bool = True
    overlaps: bool = False
    folds_index: bool = False
    blocks: int = 0
    block_rows: int = 1

    def problem(self, window: Problem) -> Problem:
        """The rows as a layer of the attention runtime. window: the layer that attends to them. Raises BadProblem."""
        indexer: AllKeys | Indexer = ALL_KEYS
        if self.top != EVERY_ROW:
            indexing = Indexing(
                self.index_dim**-0.5,
                self.top,
                key_tokens=self.tokens,
                last_unit=LastUnit.LEFT_OUT,
                candidate_blocks=self.blocks,
                block_keys=self.block_rows,
            )
            indexer = Indexer(self.index_heads, self.index_dim, indexing)
        row = Row(self.tokens, self.overlaps, self.index_dim if self.folds_index else 0)
        return replace(window, window_left=UNLIMITED_WINDOW, has_sinks=False, indexer=indexer, row=row)

    def describe(self) -> str:
        """The rows and the choice in words."""
        span = f"{self.tokens} tokens" if self.tokens > 1 else "a token"
        rows = f"rows of {self.head_dim} elements for {span} each"
        rows = rows if self.own_rows else f"{rows}, made by an earlier layer"
        if self.top == EVERY_ROW:
            return f"all {rows}"
        by = f"its own indexer of {self.index_heads} x {self.index_dim}" if self.own_choice else "an earlier layer"
        blocks = f"{self.blocks:,} blocks of {self.block_rows} rows"
        if self.blocks and self.own_choice:
            by += f", which leaves {blocks}" if self.own_rows else f" among {blocks} that an earlier layer left"
        return f"{self.top} {rows}, chosen by {by}"


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One attention layer of a model. v rows are as long as q and k rows, except in latent attention.

    scale:       factor on q.k before the softmax
    window_left: previous keys that a query attends to in addition to its own; -1: all of them
    window_right: later keys that it attends to: 0 in causal attention; -1: all of its sequence
    chunk:       keys of a chunk, before whose first one a query in it attends to none; 0: no chunks
    sees_spans:  whether tokens of an image, or of a prompt's beginning, attend to each other, in both directions
    spans_pass_window: whether they do so past the window, too
    indexer:     selects the keys that are attended to; whole on every rank, except for selections per KV head
    latent_dim:  of latent attention: the first elements of a token's one row, which are V; 0: K and V of their own
    compressed:  what the layer attends to in addition, with the same softmax
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window_left: int = UNLIMITED_WINDOW
    window_right: int = 0
    logits_soft_cap: float = 0.0
    has_sinks: bool = False
    latent_dim: int = 0
    chunk: int = 0
    sees_spans: bool = False
    spans_pass_window: bool = False
    indexer: AllKeys | Indexer | EarlierSelection = ALL_KEYS
    compressed: tuple[CompressedRows, ...] = ()

    @property
    def rope_dim(self) -> int:
        """Elements of a q and a k row that turn: all, or in latent attention those after the latent ones."""
        return self.head_dim - self.latent_dim

    @property
    def is_local(self) -> bool:
        """True if a query may attend to fewer keys than come before it: the layer has a window, or chunks."""
        return self.window_left != UNLIMITED_WINDOW or self.chunk > 0

    def within(self, max_kv_len: int) -> AttentionLayer:
        """The same layer for sequences up to max_kv_len, without a window, or chunks, that none of them outgrows."""
        left = UNLIMITED_WINDOW if self.window_left >= max_kv_len - 1 else self.window_left
        right = UNLIMITED_WINDOW if self.window_right >= max(max_kv_len - 1, 1) else self.window_right
        chunk = 0 if self.chunk >= max_kv_len else self.chunk
        return replace(self, window_left=left, window_right=right, chunk=chunk)

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
            window_right=self.window_right,
            logits_soft_cap=self.logits_soft_cap,
            has_sinks=self.has_sinks,
            custom_mask=self.sees_spans,
            chunk=self.chunk,
            spans_pass_window=self.sees_spans and self.spans_pass_window and self.is_local,
            wants_lse=bool(self.compressed),
            indexer=self.indexer,
            pool=PoolKind.LATENT if self.latent_dim else PoolKind.SPLIT,
            kv_encoding=kv.encoding,
            kv_scales=kv.scales,
        )


@dataclass(frozen=True, slots=True)
class AttentionGeometry:
    """The attention layers of a model; they may all differ.

    layers: those with pages, in order
    reads: layer -> the layer whose K and V it reads: itself, or an earlier one if it is one of the last that keep none
    places: of the layers with pages among all layers of the model
    recurrent: place among all layers of the model -> recurrent layer, in pairs; a layer may have pages too
    """

    layers: tuple[AttentionLayer, ...]
    reads: tuple[int, ...]
    places: tuple[int, ...]
    recurrent: tuple[tuple[int, RecurrentLayer], ...] = ()

    @classmethod
    def of(cls, layers: Sequence[AttentionLayer]) -> AttentionGeometry:
        """Layers that all keep K and V, in a model without others."""
        numbers = tuple(range(len(layers)))
        return cls(tuple(layers), numbers, numbers)

    @property
    def num_storing(self) -> int:
        """Layers that keep K and V, the first ones. A runtime is built of them; the others attend by their numbers."""
        return sum(layer == read for layer, read in enumerate(self.reads))

    def keeps_kv(self, layer: int) -> bool:
        """True if a layer keeps K and V."""
        return self.reads[layer] == layer

    def on_one_of(self, num_ranks: int) -> AttentionGeometry:
        """The part of one tensor-parallel rank; see AttentionLayer."""
        recurrent = tuple((place, layer.on_one_of(num_ranks)) for place, layer in self.recurrent)
        return replace(self, layers=tuple(layer.on_one_of(num_ranks) for layer in self.layers), recurrent=recurrent)

    @property
    def least_page_size(self) -> int:
        """Tokens of the smallest page that every layer can have: rows and index keys of several are not cut."""
        indexers = [layer.indexer for layer in self.layers]
        of_rows = (rows.tokens for layer in self.layers for rows in layer.compressed)
        return math.lcm(*of_rows, *(each.indexing.key_tokens for each in indexers if not isinstance(each, AllKeys)))

    @property
    def making_rows(self) -> tuple[int, ...]:
        """Layers that make compressed rows, in order."""
        return tuple(n for n, layer in enumerate(self.layers) if any(rows.own_rows for rows in layer.compressed))

    def rows_of(self, layer: int) -> int:
        """The number, among problems(), of the compressed rows that a layer attends to. Raises Unsupported."""
        before = [place for place, maker in enumerate(self.making_rows) if maker <= layer]
        if not self.layers[layer].compressed or not before:
            raise Unsupported(f"layer {layer} attends to no compressed rows", [])
        return self.num_storing + before[-1]

    def recurrences(self, dtype: torch.dtype) -> tuple[Recurrence, ...]:
        """The recurrent layers in a model of dtype, in order. Raises BadProblem."""
        return tuple(layer.recurrence(dtype) for _, layer in self.recurrent)

    def without_idle_windows(self, max_kv_len: int) -> AttentionGeometry:
        """The same layers for sequences up to max_kv_len; see AttentionLayer.within."""
        return replace(self, layers=tuple(layer.within(max_kv_len) for layer in self.layers))

    def over_text(self) -> AttentionGeometry:
        """The same layers where no step has images, or a beginning whose tokens attend to each other."""
        return replace(self, layers=tuple(replace(layer, sees_spans=False) for layer in self.layers))

    def not_causal(self, more: int = 0) -> AttentionGeometry:
        """The same layers, in which tokens attend to later keys too: to all, or to as many as before them in a window.

        more: keys that each side of a window has besides window_left
        Raises Unsupported.
        """
        layers = []
        for number, layer in enumerate(self.layers):
            if layer.chunk or layer.latent_dim or not isinstance(layer.indexer, AllKeys) or self.recurrent:
                raise Unsupported(
                    f"layer {number} is not causal and has chunks, latent rows or an indexer, or is one of a model "
                    "with recurrent layers; only layers with K and V heads, with or without a window, may be not "
                    "causal here"
                )
            keys = layer.window_left + more if layer.is_local else UNLIMITED_WINDOW
            layers.append(replace(layer, window_left=keys, window_right=keys))
        return replace(self, layers=tuple(layers))

    def problems(self, *, dtype: torch.dtype, page_size: int, kv: KVFormat = AS_COMPUTED) -> tuple[Problem, ...]:
        """One Problem per layer that keeps K and V; a layer that reads them has that layer's.

        Then one for the compressed rows of each layer that makes some: a layer that attends to them attends by both
        numbers, its own and rows_of(), and merges the two.
        Raises BadProblem.
        """
        windows = [layer.problem(dtype=dtype, page_size=page_size, kv=kv) for layer in self.layers[: self.num_storing]]
        makers = ((windows[layer], self.layers[layer].compressed[0]) for layer in self.making_rows)
        return (*windows, *(rows.problem(window) for window, rows in makers))


def window_left(sliding_window: int) -> int:
    """window_left of Hugging Face's window, which counts a query's own key; here only the previous ones count."""
    return sliding_window - 1
