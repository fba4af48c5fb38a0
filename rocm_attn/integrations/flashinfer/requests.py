"""Requests of FlashInfer's callers: layouts, dtypes, a geometry."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from rocm_attn.batch.step_batch import INT32_MAX
from rocm_attn.errors import BadProblem, BadSetting, BadTensor, Unsupported
from rocm_attn.integrations.flashinfer.signatures import ALWAYS_REFUSED, Given
from rocm_attn.machine.choices import PROVIDERS
from rocm_attn.machine.devices import require_tensor
from rocm_attn.machine.settings import real_number, whole_number
from rocm_attn.problem import UNLIMITED_WINDOW, KVEncoding, PoolKind, Problem, Scales

LAYOUTS = ("NHD", "HND")
NO_POSITIONS, ROPE, ALIBI = "NONE", "ROPE_LLAMA", "ALIBI"
# The values of arguments that a plan of FlashInfer's does not have.
_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("head_dim_vo", "logits_soft_cap", "sm_scale", "kv_data_type", "data_type", "fixed_split_size")),
    **dict.fromkeys(("causal", "disable_split_kv"), False),
    "page_size": 1,
    "pos_encoding_mode": NO_POSITIONS,
    "window_left": UNLIMITED_WINDOW,
}
_EIGHT_BITS = {torch.float8_e4m3fn: KVEncoding.E4M3FN, torch.float8_e5m2: KVEncoding.E5M2}


def is_deterministic(fixed_split_size: int | None, disable_split_kv: bool) -> bool:
    """True if results must be the same in any batch. A fixed_split_size of -1 asks for nothing: vLLM passes it."""
    return fixed_split_size not in (None, -1) or disable_split_kv


def check_layout(kv_layout: str) -> str:
    """Returns the layout. Raises BadSetting for one that FlashInfer does not know."""
    if kv_layout not in LAYOUTS:
        raise BadSetting(f"kv_layout is {kv_layout!r}; it must be NHD or HND")
    return kv_layout


def check_positions(pos_encoding_mode: str) -> bool:
    """True if scores get ALiBi's bias. Raises Unsupported, BadSetting."""
    if pos_encoding_mode == ROPE:
        raise Unsupported(
            "pos_encoding_mode ROPE_LLAMA is not served: kernels here read keys without rotating them; rotate "
            "queries and keys before the store, and give NONE"
        )
    if pos_encoding_mode not in (NO_POSITIONS, ALIBI):
        raise BadSetting(f"pos_encoding_mode is {pos_encoding_mode!r}; it must be NONE, ROPE_LLAMA or ALIBI")
    return pos_encoding_mode == ALIBI


def as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Returns a dtype given as such or by its name. Raises BadSetting."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise BadSetting(f"{dtype!r} is no dtype of torch")
    return found


def as_out_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Returns the dtype of an output, given as such or by its name. Raises BadSetting, Unsupported."""
    found = as_dtype(dtype)
    if not found.is_floating_point:
        raise BadSetting(f"the output's dtype is {found}; it must be one of floats")
    if found.itemsize == 1:
        raise Unsupported(f"outputs in {found} are not served; take them in 16 bits, and scale and convert them")
    return found


# FlashInfer's own backends.
_BACKENDS = (
    *("cake", "cudnn", "cute-dsl", "cutile", "cutlass", "fa2", "fa3", "prims-ts", "prims_ts"),
    *("trtllm-gen", "trtllm-native", "xqa"),
)
_chosen = ["auto"]


def use_provider(provider: str) -> None:
    """Sets the provider for later calls that name no kernels: "auto", "torch", "triton" or "aiter"."""
    if provider not in PROVIDERS:
        raise BadSetting(f"provider is {provider!r}; it must be one of {', '.join(PROVIDERS)}")
    _chosen[0] = provider


def provider_of(backend: str = "auto") -> str:
    """Returns the provider whose kernels serve a call. Raises BadSetting for a backend of another name.

    backend: a provider of ours, or a name of FlashInfer's, which means "auto": its kernels do not run here
    """
    if backend not in (*PROVIDERS, *_BACKENDS):
        raise BadSetting(f"backend is {backend!r}; it must be one of {', '.join((*PROVIDERS, *_BACKENDS))}")
    return backend if backend in PROVIDERS and backend != "auto" else _chosen[0]


@dataclass(frozen=True, slots=True)
class Geometry:
    """The settings that a plan fixes.

    dtype:         of q; kv_dtype: of K and V, the same or eight bits
    window_left:   previous keys that a query sees in addition to its own; -1: all of them
    window_right:  later keys that it sees if it is not causal; -1: all of them
    alibi:         whether scores get ALiBi's bias
    sinks:         whether softmax denominators have a sink
    deterministic: whether a sequence's results must be the same in any batch
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    page_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    scale: float = 1.0
    window_left: int = UNLIMITED_WINDOW
    window_right: int = UNLIMITED_WINDOW
    soft_cap: float = 0.0
    alibi: bool = False
    causal: bool = False
    sinks: bool = False
    pool: PoolKind = PoolKind.SPLIT
    deterministic: bool = False

    def __post_init__(self) -> None:
        sizes = "num_q_heads", "num_kv_heads", "head_dim", "v_head_dim", "page_size"
        for name in (*sizes, "window_left", "window_right"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), BadProblem))
        for name in ("scale", "soft_cap"):
            object.__setattr__(self, name, real_number(name, getattr(self, name), BadProblem))
        if self.dtype.itemsize == 1:
            raise Unsupported(f"queries in {self.dtype} are not served; pass them in 16 bits")
        if self.kv_dtype == torch.uint8:
            raise Unsupported(f"K and V in torch.uint8 are not served: {ALWAYS_REFUSED['kv_cache_sf']}")
        if self.kv_dtype != self.dtype and self.kv_dtype not in _EIGHT_BITS:
            raise Unsupported(
                f"K and V in {self.kv_dtype} with queries in {self.dtype} are not served; give both one dtype, or K "
                "and V torch.float8_e4m3fn or torch.float8_e5m2"
            )
        if self.alibi and self.soft_cap:
            raise Unsupported("ALIBI with a logits_soft_cap is not served: the bias is added after the cap here")
        if self.alibi and self.sinks:
            raise Unsupported(
                "ALIBI with sinks is not served: FlashInfer's bias of a key is larger than the one here, by which its "
                "sinks would weigh less"
            )
        if self.scale == 0:
            raise BadProblem("the scale of logits is 0; it must be a positive number, or None for head_dim ** -0.5")
        if (largest := max(getattr(self, name) for name in sizes)) > INT32_MAX:
            raise BadProblem(f"a size is {largest}; use at most {INT32_MAX}")
        if min(self.head_dim, self.v_head_dim, self.page_size) < 1:
            raise BadProblem(
                f"head dims are {self.head_dim} and {self.v_head_dim}, with pages of {self.page_size} tokens; each "
                "must be at least 1"
            )
        if not 1 <= self.num_kv_heads <= self.num_q_heads:
            raise BadProblem(
                f"{self.num_q_heads} query heads over {self.num_kv_heads} KV heads; each must be at least 1"
            )

    @property
    def is_coded(self) -> bool:
        """True if K and V are in eight bits."""
        return self.kv_dtype in _EIGHT_BITS

    def scaled(self, scale_value: float) -> Geometry:
        """Returns the same geometry with its scale multiplied by scale_value."""
        return self if scale_value == 1.0 else replace(self, scale=self.scale * scale_value)

    def problem(self, *, causal: bool, masked: bool) -> Problem:
        """Returns the problem that kernels are chosen for. masked: steps bring a mask of cells in place of the rest"""
        return _problem_of(self, causal, masked)


@lru_cache(maxsize=256)  # each run() asks for it, and the checks of a new one take as long as a launch
def _problem_of(geometry: Geometry, causal: bool, masked: bool) -> Problem:
    return Problem(
        geometry.num_q_heads,
        geometry.num_kv_heads,
        geometry.head_dim,
        geometry.dtype,
        geometry.page_size,
        v_head_dim=geometry.v_head_dim,
        scale=geometry.scale,
        window_left=UNLIMITED_WINDOW if masked else geometry.window_left,
        window_right=0 if causal else UNLIMITED_WINDOW if masked else geometry.window_right,
        logits_soft_cap=geometry.soft_cap,
        has_sinks=geometry.sinks,
        has_alibi_slopes=geometry.alibi,
        custom_mask=masked,
        pool=geometry.pool,
        kv_encoding=_EIGHT_BITS.get(geometry.kv_dtype, KVEncoding.LIKE_Q),
        kv_scales=Scales.LAYER if geometry.is_coded else Scales.NONE,
        wants_lse=True,
    )


@dataclass(frozen=True, slots=True)
class ScoreRules:
    """The rules that turn scores into weights, as FlashInfer's arguments give them; None is their default."""

    pos_encoding_mode: str
    window_left: int
    logits_soft_cap: float | None
    sm_scale: float | None

    @classmethod
    def of(cls, given: Given) -> ScoreRules:
        """Returns those of a call's arguments."""
        values: dict[str, Any] = _DEFAULTS | vars(given)
        return cls(*(values[name] for name in cls.__slots__))

    def over(self, geometry: Geometry) -> Geometry:
        """Returns the geometry with these scores."""
        return replace(
            geometry,
            alibi=check_positions(self.pos_encoding_mode),
            window_left=max(whole_number("window_left", self.window_left, BadProblem), UNLIMITED_WINDOW),
            soft_cap=self.logits_soft_cap or 0.0,
            scale=self.sm_scale if self.sm_scale is not None else 1.0 / math.sqrt(geometry.head_dim),
        )


def geometry_of(given: Given, **fields: Any) -> Geometry:
    """Returns the geometry of a plan's arguments. fields: of Geometry, in place of those. Raises BadSetting too.

    fixed_split_size and disable_split_kv ask for results that are the same in any batch.
    """
    values: dict[str, Any] = _DEFAULTS | vars(given)
    head_dim = values["head_dim"] if "head_dim" in values else values["head_dim_qk"]
    q_dtype = as_dtype(values["q_data_type"] or values["data_type"] or "float16")
    geometry = Geometry(
        values["num_qo_heads"],
        values["num_kv_heads"],
        head_dim,
        values["head_dim_vo"] or head_dim,
        values["page_size"],
        q_dtype,
        as_dtype(values["kv_data_type"] or values["data_type"] or q_dtype),
        causal=values["causal"],
        deterministic=is_deterministic(values["fixed_split_size"], values["disable_split_kv"]),
    )
    return ScoreRules.of(given).over(replace(geometry, **fields))


def alibi_slopes(num_heads: int) -> Tensor:
    """Returns a slope per head: 2^(-8 i / n), i from 1 on, n the largest power of two of heads; then those between.

    Source: Press, Smith and Lewis, "Train Short, Test Long", and its published code for other numbers of heads.
    """
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    slopes += [2.0 ** (-4.0 * i / power) for i in range(1, 2 * (num_heads - power), 2)]
    return torch.tensor(slopes, dtype=torch.float32)


def check_rows(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Raises BadTensor if a tensor has another shape, dtype or device than it must have, or if it is none."""
    require_tensor(name, tensor)
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device != device:
        raise BadTensor(
            f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; it must be {dtype} "
            f"{list(shape)} on {device}"
        )
