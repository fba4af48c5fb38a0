"""Converts the constructor arguments of a vLLM attention layer to a Problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from rocm_attn.errors import Unsupported
from rocm_attn.problem import UNLIMITED_WINDOW, KVEncoding, PoolKind, Problem, Scales
from rocm_attn.step.head_weights import HeadWeights

# vLLM's names of KV cache dtypes -> the dtype; None: auto.
PLAIN_DTYPES = {
    "auto": None,
    "float16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float": torch.float32,
}
# Dtypes that keep eight bits with one scale per layer. None: the platform's own e4m3.
FP8_DTYPES = {"fp8": None, "fp8_e4m3": None, "fp8_e5m2": torch.float8_e5m2}
KV_CACHE_DTYPES = ("auto", "float16", "bfloat16", "float32", *FP8_DTYPES)
# Records of latents with their scales, in the platform's own e4m3.
RECORDS = "fp8_ds_mla"
LATENT_CACHE_DTYPES = (*KV_CACHE_DTYPES, RECORDS)

_DECODER, CROSS = "decoder", "encoder_decoder"
ENCODERS = ("encoder", "encoder_only")
ATTENTION_TYPES = (_DECODER, CROSS, *ENCODERS)
# Arguments of later releases -> the values with which they have no effect.
_SAY_NOTHING: Mapping[str, Sequence[object]] = {"chunk_lookback": (-1, None), "use_alibi_sqrt": (False, None)}


@dataclass(frozen=True, slots=True)
class MaskTerms:
    """The part of a layer's mask that its implementation's arguments do not have.

    chunk: keys of a chunk of local attention; 0: there are none
    spans: whether steps may have tokens that see each other: of an image, or of a block of drafts
    spans_pass_window: whether such tokens see all of their span, even what lies before a window
    """

    chunk: int = 0
    spans: bool = False
    spans_pass_window: bool = False


PLAIN_MASK = MaskTerms()


@dataclass(frozen=True, slots=True)
class LayerTerms:
    """The arguments of vLLM's AttentionImpl, in its order and with its names.

    alibi_slopes:   one per query head
    sliding_window: keys that a query sees, its own included
    kv_cache_dtype: vLLM's name of it
    kv_sharing_target_layer_name: the layer whose KV this one reads; it then stores none of its own
    sinks:          [num_heads], a logit per head
    Raises Unsupported.
    """

    num_heads: int
    head_size: int
    scale: float
    num_kv_heads: int | None = None
    alibi_slopes: Sequence[float] | None = None
    sliding_window: int | None = None
    kv_cache_dtype: str = "auto"
    logits_soft_cap: float | None = None
    attn_type: str = _DECODER
    kv_sharing_target_layer_name: str | None = None
    sinks: Tensor | None = None

    @classmethod
    def read(cls, given: Sequence[Any], named: Mapping[str, Any]) -> LayerTerms:
        """Reads the arguments of an implementation's constructor. Raises Unsupported for any that is not known here."""
        names = {field.name for field in fields(cls)}
        unknown = [
            f"{name}={value!r}"
            for name, value in named.items()
            if name not in names and value not in _SAY_NOTHING.get(name, ())
        ]
        if unknown or len(given) > len(names):
            raise Unsupported(
                f"a layer asks for {', '.join(unknown) or f'{len(given)} arguments'}, which rocm_attn does not serve; "
                "choose another attention backend for this model"
            )
        return cls(*given, **{name: value for name, value in named.items() if name in names})

    def __post_init__(self) -> None:
        if self.kind not in ATTENTION_TYPES:
            raise Unsupported(
                f"a layer is of attention type {self.kind}; rocm_attn serves {', '.join(ATTENTION_TYPES)} in vLLM, so "
                "choose another attention backend for this model"
            )
        if self.kv_cache_dtype not in (*PLAIN_DTYPES, *FP8_DTYPES, RECORDS):
            raise Unsupported(
                f"the KV cache is of dtype {self.kv_cache_dtype}; rocm_attn serves {', '.join(LATENT_CACHE_DTYPES)}, "
                "so set --kv-cache-dtype to one of these"
            )

    @property
    def kind(self) -> str:
        """The attention type in vLLM's words."""
        return str(getattr(self.attn_type, "value", self.attn_type))

    @property
    def stores(self) -> bool:
        """True if the layer has KV of its own."""
        return self.kv_sharing_target_layer_name is None

    def problem(self, cache: CacheTerms, mask: MaskTerms = PLAIN_MASK) -> Problem:
        """Returns the layer's problem over its pages. Raises Unsupported, BadProblem."""
        if self.kv_cache_dtype == RECORDS:
            raise Unsupported(
                f"the KV cache is of dtype {RECORDS}, which holds rows of sparse MLA layers, and a layer has K and V "
                f"of its own; set --kv-cache-dtype to one of {', '.join(KV_CACHE_DTYPES)}"
            )
        causal = self.kind == _DECODER
        if self.sliding_window is not None and self.kind == CROSS:
            raise Unsupported(
                f"a layer of cross attention has a window of {self.sliding_window} keys, and its tokens have no "
                "distance from their keys; choose another attention backend for this model"
            )
        if self.alibi_slopes is not None and not causal:  # FlashAttention takes the slope off for each token in between
            raise Unsupported(
                f"a layer of {self.kind} attention has ALiBi slopes, and keys after a token gain by them here; choose "
                "another attention backend for this model"
            )
        encoding = _encoding(self.kv_cache_dtype, cache)
        window = UNLIMITED_WINDOW if self.sliding_window is None else self.sliding_window - 1
        return Problem(
            num_q_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads or self.num_heads,
            head_dim=self.head_size,
            v_head_dim=cache.v_head_size,
            dtype=cache.dtype,
            page_size=cache.block_size,
            scale=float(self.scale),
            window_left=window,
            window_right=0 if causal else window,
            chunk=mask.chunk,
            custom_mask=mask.spans and causal,
            spans_pass_window=mask.spans_pass_window and window != UNLIMITED_WINDOW,
            logits_soft_cap=self.logits_soft_cap or 0.0,
            has_sinks=self.sinks is not None,
            has_alibi_slopes=self.alibi_slopes is not None,
            kv_encoding=encoding,
            kv_scales=Scales.NONE if encoding is KVEncoding.LIKE_Q else cache.fp8_scales,
        )

    def latent_problem(self, cache: CacheTerms, v_head_dim: int) -> Problem:
        """Returns the problem of an MLA layer's absorbed form over its latent pages. Raises Unsupported, BadProblem."""
        requested = {
            "ALiBi slopes": self.alibi_slopes is not None,
            "a sliding window": self.sliding_window is not None,
            "a soft cap": bool(self.logits_soft_cap),
            "sinks": self.sinks is not None,
            "KV of another layer": not self.stores,
            f"attention type {self.kind}": self.kind != _DECODER,
        }
        if any(requested.values()):
            named = " and ".join(name for name, is_requested in requested.items() if is_requested)
            raise Unsupported(f"an MLA layer asks for {named}, which rocm_attn does not serve in vLLM's MLA layers")
        encoding = _encoding(self.kv_cache_dtype, cache)
        return Problem(
            num_q_heads=self.num_heads * cache.shards,
            num_kv_heads=1,
            head_dim=self.head_size,
            v_head_dim=v_head_dim,
            dtype=cache.dtype,
            page_size=cache.block_size,
            scale=float(self.scale),
            pool=PoolKind.LATENT,
            wants_lse=cache.shards > 1,
            kv_encoding=encoding,
            kv_scales=_scales_of_latents(self.kv_cache_dtype, encoding),
        )

    @property
    def head_weights(self) -> HeadWeights:
        """Its sinks, in vLLM's own memory, and slopes."""
        slopes = None if self.alibi_slopes is None else torch.as_tensor(self.alibi_slopes, dtype=torch.float32)
        return HeadWeights(self.sinks, slopes)


@dataclass(frozen=True, slots=True)
class CacheTerms:
    """The common terms of the layers of a KV cache group.

    block_size: tokens of a block, as kernels see it
    dtype:      of q, k, v and the output
    fp8_dtype:  the platform's e4m3
    shards:     ranks that share the KV of an MLA layer's sequences, and gather their query heads for it
    fp8_scales: what shares a scale of K and V per head in eight bits
    """

    block_size: int
    v_head_size: int
    dtype: torch.dtype
    fp8_dtype: torch.dtype
    shards: int = 1
    fp8_scales: Scales = Scales.LAYER


def _scales_of_latents(kv_cache_dtype: str, encoding: KVEncoding) -> Scales:
    if kv_cache_dtype == RECORDS:
        return Scales.GROUP
    return Scales.NONE if encoding is KVEncoding.LIKE_Q else Scales.LAYER


def _encoding(kv_cache_dtype: str, cache: CacheTerms) -> KVEncoding:
    if kv_cache_dtype in (*FP8_DTYPES, RECORDS):
        dtype = FP8_DTYPES.get(kv_cache_dtype) or cache.fp8_dtype
        return KVEncoding(str(dtype).removeprefix("torch."))
    named = PLAIN_DTYPES[kv_cache_dtype]
    if named is not None and named != cache.dtype:
        raise Unsupported(
            f"the KV cache is {named} and the model computes in {cache.dtype}; rocm_attn keeps KV in the model's dtype "
            "or in FP8, so leave --kv-cache-dtype at auto"
        )
    return KVEncoding.LIKE_Q
