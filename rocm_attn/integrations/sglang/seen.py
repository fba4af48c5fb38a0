"""Protocols for the attributes of SGLang's objects that we read: of a runner, its pools, a model's layers, a batch."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

# The values of a padding sequence in SGLang: PAD_KV_LEN tokens, in row PAD_ROW of its table.
PAD_KV_LEN = 1
PAD_ROW = 0


class RadixAttentionView(Protocol):
    """RadixAttention.

    sliding_window_size: previous keys that a query sees in addition to its own; -1: all
    v_head_dim:          kv_lora_rank for latent attention
    k_scale_float:       the scale of eight-bit codes; None: k_scale, from the file of --quantization-param-path, or 1
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
    k_scale: Any
    v_scale: Any


class IndexerModule(Protocol):
    """Indexer of DSA, without the members that only its own kernels need.

    wq_b, k_norm, rotary_emb: makes index queries; scales index keys; rotates both. A module has wk and weights_proj, or
                              wk_weights_proj in place of them, for keys and for gates
    num_init_tokens, num_local_tokens: keys that are selected whatever their score
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


class ReqToTokenView(Protocol):
    """ReqToTokenPool. req_to_token: int32 [rows, width], a request's row -> the slot of each of its tokens"""

    req_to_token: Tensor


class KVPoolView(Protocol):
    """A KV pool: of keys and values, of latent rows, or two pools for layers with and without a window."""

    def get_key_buffer(self, layer_id: int) -> Tensor:
        """Returns [slots, heads, dim], or [pages, heads, page_size, dim]. May wait for a layer that is being loaded."""

    def get_value_buffer(self, layer_id: int) -> Tensor:
        """Like get_key_buffer, but for V."""


class Runner(Protocol):
    """ModelRunner, in its state when attention backends are made."""

    device: str
    dtype: torch.dtype
    page_size: int
    model: torch.nn.Module
    use_mla_backend: bool
    req_to_token_pool: ReqToTokenView
    token_to_kv_pool: KVPoolView
    attention_chunk_size: int | None
    is_generation: bool


class Mode(Protocol):
    """ForwardMode."""

    def is_idle(self) -> bool: ...

    def is_decode(self) -> bool: ...

    def is_target_verify(self) -> bool: ...

    def is_draft_extend_v2(self) -> bool: ...


class ForwardBatchView(Protocol):
    """ForwardBatch, or a view of one that a graph runner makes.

    batch_size:       sequences, padding included
    req_pool_indices: int64 [batch_size], rows
    seq_lens:         int64 [batch_size], tokens; new ones included, except verified drafts
    seq_lens_cpu:     the same on the host, if known there
    out_cache_loc:    int64 [T], slots of new tokens
    extend_seq_lens:  int32 [batch_size], new tokens; extend_seq_lens_cpu on the host
    extend_prefix_lens_cpu: tokens before them, on the host
    spec_info:        of drafts
    mm_inputs:        of each sequence that has images: mm_items, with offsets (first token, last token) in the prompt
    encoder_lens:     int64 [batch_size], tokens of each sequence's encoder; None without. encoder_lens_cpu: on the host
                      Their slots are in the sequence's row before those of seq_lens
    encoder_out_cache_loc: int64 [n], slots of the encoders' new tokens
    """

    forward_mode: Mode
    batch_size: int
    req_pool_indices: Tensor
    seq_lens: Tensor
    seq_lens_cpu: Tensor | None
    out_cache_loc: Tensor | None
    extend_seq_lens: Tensor
    extend_seq_lens_cpu: Sequence[int] | Tensor | None
    extend_prefix_lens_cpu: Sequence[int] | Tensor | None
    positions: Tensor
    spec_info: Any
    mm_inputs: Sequence[Any] | None
    encoder_lens: Tensor | None
    encoder_lens_cpu: Sequence[int] | None
    encoder_out_cache_loc: Tensor | None


class LentPool:
    """New memory of zeros in the form of a pool, for a few pages. Everything else is the pool's.

    page_size: of the tables; the pool's own index pages have as many keys
    """

    def __init__(self, pool: KVPoolView, num_pages: int, page_size: int) -> None:
        self._pool, self._num_pages, self._page_size = pool, num_pages, page_size
        self._made: dict[tuple[str, int], Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def get_key_buffer(self, layer_id: int) -> Tensor:
        return self._like("k", layer_id, self._pool.get_key_buffer(layer_id))

    def get_value_buffer(self, layer_id: int) -> Tensor:
        return self._like("v", layer_id, self._pool.get_value_buffer(layer_id))

    def get_index_k_with_scale_buffer(self, layer_id: int) -> Tensor:
        rows: Tensor = self._pool.get_index_k_with_scale_buffer(layer_id)  # type: ignore[attr-defined]  # see IndexPages
        return self._zeros("index", layer_id, rows, self._num_pages)

    def _like(self, name: str, layer_id: int, rows: Tensor) -> Tensor:
        is_paged = rows.dim() == 4
        return self._zeros(name, layer_id, rows, self._num_pages * (1 if is_paged else self._page_size))

    def _zeros(self, name: str, layer_id: int, rows: Tensor, count: int) -> Tensor:
        made = self._made.get((name, layer_id))
        if made is None:
            made = self._made[name, layer_id] = torch.zeros_like(rows[:count])
        return made


def has_records(pool: KVPoolView) -> bool:
    """True for a pool of DSA whose rows are records (kernels/cache/records.py).

    SGLang's quantize_k_cache_separate writes 512 codes, 4 float32 scales and 64 bfloat16: 656 bytes.
    """
    return bool(getattr(pool, "dsa_kv_cache_store_fp8", False))


def has_own_scales(pool: KVPoolView) -> bool:
    """True for a pool with memory for scales, or with such a part: of layers with a window, or next to states."""
    parts = (pool, *(getattr(pool, name, None) for name in ("full_kv_pool", "swa_kv_pool")))
    names = "k_scale_buffer", "kv_scale_buffer"
    return any(getattr(part, name, None) is not None for part in parts for name in names)


def slot_map(pool: KVPoolView) -> Tensor | None:
    """Returns int64 [slots]: slot of the full pool -> slot of the pool of windowed layers; None for a single pool."""
    found: Tensor | None = getattr(pool, "full_to_swa_index_mapping", None) if _has_windows(pool) else None
    return found


def windowed_layers(pool: KVPoolView) -> frozenset[int]:
    """Returns the ids of the layers whose KV is in the pool of windowed layers."""
    if not _has_windows(pool):
        return frozenset()
    mapping: dict[int, tuple[int, bool]] = pool.layers_mapping  # type: ignore[attr-defined]  # of such pools
    return frozenset(layer_id for layer_id, (_, is_windowed) in mapping.items() if is_windowed)


def real_sequences(batch: ForwardBatchView) -> int | None:
    """Returns the number of sequences without padding, if a graph runner or a rank that keeps up says it; else None."""
    padding: int | None = getattr(batch, "num_padding", None)
    if padding is not None:
        return batch.batch_size - padding
    before: int | None = getattr(batch, "_original_batch_size", None)
    return None if before is None else min(before, batch.batch_size)


def on_host(lengths: Sequence[int] | Tensor | None) -> list[int] | None:
    """Returns lengths as a list, or None if the host does not know them."""
    if lengths is None:
        return None
    return lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)


def _has_windows(pool: KVPoolView) -> bool:
    return getattr(pool, "swa_layer_nums", 0) > 0
