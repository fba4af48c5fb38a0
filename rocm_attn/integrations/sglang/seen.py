"""What is read of SGLang's objects: of a runner, its pools, a model's layers and a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

# What SGLang hands to a pad: a sequence of so many tokens, in row 0 of its table.
PAD_KV_LEN = 1
PAD_ROW = 0


class Layer(Protocol):
    """RadixAttention.

    sliding_window_size: previous keys that a query sees besides its own; -1: all
    v_head_dim:          of latent attention, kv_lora_rank
    k_scale_float:       what a code of eight bits is worth; None: 1
    """

    layer_id: int
    tp_q_head_num: int
    tp_k_head_num: int
    qk_head_dim: int
    v_head_dim: int
    scaling: float
    logit_cap: float
    logit_capping_method: str
    sliding_window_size: int
    is_cross_attention: bool
    use_irope: bool
    pos_encoding_mode: str
    xai_temperature_len: float
    attn_type: Any
    k_scale_float: float | None
    v_scale_float: float | None


class IndexerModule(Protocol):
    """Indexer of DSA, less what its own kernels need.

    wq_b, k_norm, rotary_emb: makes index queries; scales index keys; rotates both. A module has wk and weights_proj, or
                              wk_weights_proj in place of them, for keys and for gates
    num_init_tokens, num_local_tokens: keys that are chosen whatever they score
    """

    n_heads: int
    head_dim: int
    rope_head_dim: int
    index_topk: int
    num_init_tokens: int
    num_local_tokens: int
    wq_b: Any
    wk: Any
    weights_proj: Any
    wk_weights_proj: Any
    k_norm: Any
    rotary_emb: Any


class Rows(Protocol):
    """ReqToTokenPool. req_to_token: int32 [rows, width], a request's row -> the slot of each of its tokens"""

    req_to_token: Tensor


class Pool(Protocol):
    """A KV pool: of keys and values, latent, or two of them for layers with a window and without."""

    def get_key_buffer(self, layer_id: int) -> Tensor:
        """[slots, heads, dim], or [pages, heads, page_size, dim]. May wait for a layer that is being loaded."""
        ...

    def get_value_buffer(self, layer_id: int) -> Tensor:
        """As get_key_buffer."""
        ...


class Runner(Protocol):
    """ModelRunner, as it is when attention backends are made."""

    device: str
    dtype: torch.dtype
    page_size: int
    model: torch.nn.Module
    use_mla_backend: bool
    req_to_token_pool: Rows
    token_to_kv_pool: Pool
    attention_chunk_size: int | None


class Mode(Protocol):
    """ForwardMode."""

    def is_idle(self) -> bool: ...

    def is_decode(self) -> bool: ...

    def is_target_verify(self) -> bool: ...

    def is_draft_extend_v2(self) -> bool: ...


class Batch(Protocol):
    """ForwardBatch, or a view of one that a graph runner makes.

    batch_size:       sequences, pads included
    req_pool_indices: int64 [batch_size], rows
    seq_lens:         int64 [batch_size], tokens; with the new ones but for verified drafts
    seq_lens_cpu:     the same on the host, where it is known
    out_cache_loc:    int64 [T], slots of new tokens
    extend_seq_lens:  int32 [batch_size], new tokens; extend_seq_lens_cpu on the host
    spec_info:        of drafts
    """

    forward_mode: Mode
    batch_size: int
    req_pool_indices: Tensor
    seq_lens: Tensor
    seq_lens_cpu: Tensor | None
    out_cache_loc: Tensor | None
    extend_seq_lens: Tensor
    extend_seq_lens_cpu: Sequence[int] | Tensor | None
    positions: Tensor
    spec_info: Any


def slot_map(pool: Pool) -> Tensor | None:
    """int64 [slots], slot of the full pool -> slot of the pool of layers with a window; None: there is one pool."""
    found: Tensor | None = getattr(pool, "full_to_swa_index_mapping", None) if _has_windows(pool) else None
    return found


def windowed_layers(pool: Pool) -> frozenset[int]:
    """Ids of the layers whose KV lies in the pool of layers with a window."""
    if not _has_windows(pool):
        return frozenset()
    mapping: dict[int, tuple[int, bool]] = pool.layers_mapping  # type: ignore[attr-defined]  # of such pools
    return frozenset(layer_id for layer_id, (_, is_windowed) in mapping.items() if is_windowed)


def real_sequences(batch: Batch) -> int | None:
    """Sequences that are no pads, where a graph runner says so, or a rank that keeps up with others; else None."""
    padding: int | None = getattr(batch, "num_padding", None)
    if padding is not None:
        return batch.batch_size - padding
    before: int | None = getattr(batch, "_original_batch_size", None)
    return None if before is None else min(before, batch.batch_size)


def on_host(lengths: Sequence[int] | Tensor | None) -> list[int] | None:
    """Lengths as a list; None where the host does not know them."""
    if lengths is None:
        return None
    return lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)


def _has_windows(pool: Pool) -> bool:
    return getattr(pool, "swa_layer_nums", 0) > 0
