"""One call of a wrapper's run(): its outputs, scales and log-sum-exp, around PlannedAttention."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rocm_attn.errors import BadProblem, BadSetting, BadTensor
from rocm_attn.integrations.flashinfer.planned import LOG2_E, Inputs, PlannedAttention
from rocm_attn.integrations.flashinfer.requests import Geometry, check_rows
from rocm_attn.integrations.flashinfer.signatures import Given
from rocm_attn.machine.devices import require_tensor
from rocm_attn.machine.settings import real_number
from rocm_attn.problem import LARGEST_SCALE, SMALLEST_SCALE

Scale = float | Tensor | None
# K and V in one tensor, or in two.
PagedKV = Tensor | tuple[Tensor, Tensor]
# An output, or a pair of it and its log-sum-exp.
Result = Tensor | tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class RunArguments:
    """Arguments of run() in addition to q, k and v, by FlashInfer's names."""

    out: Tensor | None = None
    lse: Tensor | None = None
    return_lse: bool = False
    lse_base: str = "log2"
    lse_layout: str = "NH"
    q_scale: Scale = None
    k_scale: Scale = None
    v_scale: Scale = None
    sinks: Tensor | None = None

    @classmethod
    def of(cls, given: Given, **also: Any) -> RunArguments:
        """Returns those of a call's arguments. also: those that the call has no arguments for"""
        values = vars(given)
        return cls(**{name: values[name] for name in cls.__slots__ if name in values}, **also)

    def __post_init__(self) -> None:
        if self.lse_base not in ("log2", "ln"):
            raise BadSetting(f"lse_base is {self.lse_base!r}; it must be log2 or ln")
        if self.lse_layout not in ("NH", "HN"):
            raise BadSetting(f"lse_layout is {self.lse_layout!r}; it must be NH or HN")


def pages_of(paged_kv_cache: PagedKV, kv_layout: str) -> tuple[Tensor, Tensor]:
    """Returns K and V as [pages, page_size, kv_heads, dim]: views, for any layout of FlashInfer's. Raises BadTensor.

    A single tensor has K and V in its second dimension. Without a dimension of page size, pages have 1 token.
    """
    if isinstance(paged_kv_cache, Tensor):
        if paged_kv_cache.dim() not in (4, 5) or paged_kv_cache.shape[1] != 2:
            raise BadTensor(
                f"the KV cache is {list(paged_kv_cache.shape)}; it must be [pages, 2, ...] or a tuple of K and V, "
                "each [pages, page_size, kv_heads, head_dim] in NHD and [pages, kv_heads, page_size, head_dim] in "
                "HND"
            )
        k, v = paged_kv_cache.unbind(1)
    elif isinstance(paged_kv_cache, (tuple, list)) and len(paged_kv_cache) == 2:
        k, v = paged_kv_cache
    else:
        raise BadTensor(f"the KV cache is a {type(paged_kv_cache).__name__}; give one tensor, or a tuple of K and V")
    return _as_nhd(k, kv_layout), _as_nhd(v, kv_layout)


def _as_nhd(side: Tensor, kv_layout: str) -> Tensor:
    require_tensor("a side of the KV cache", side)
    if side.dim() == 3:
        return side.unsqueeze(1)
    if side.dim() != 4:
        raise BadTensor(
            f"a side of the KV cache is {list(side.shape)}; it must have 4 dimensions, or 3 with pages of 1 token"
        )
    return side if kv_layout == "NHD" else side.transpose(1, 2)


def attend(
    planned: PlannedAttention,
    geometry: Geometry,
    out_dtype: torch.dtype,
    q: Tensor,
    pages: tuple[Tensor, Tensor],
    call: RunArguments,
) -> Result:
    """Returns the output of one call, and its log-sum-exp if asked for. Raises BadTensor, WrongState, Unsupported.

    q:     [tokens, q_heads, head_dim]
    pages: K and V, [pages, page_size, kv_heads, head_dim | v_head_dim]
    """
    num_tokens = planned.batch.lengths.num_tokens
    check_rows("q", q, (num_tokens, geometry.num_q_heads, geometry.head_dim), geometry.dtype, planned.device)
    shape = num_tokens, geometry.num_q_heads, geometry.v_head_dim
    out = call.out
    if out is None:
        out = torch.empty(shape, dtype=out_dtype, device=planned.device)
    check_rows("out", out, shape, out_dtype, planned.device)
    is_whole = out.dtype == geometry.dtype and out.stride(-1) == 1
    computed = out if is_whole else torch.empty(shape, dtype=geometry.dtype, device=planned.device)
    of_caller, lse = _lse_rows(call, (num_tokens, geometry.num_q_heads), planned.device)
    k_scale = v_scale = None
    _check_one(call.v_scale)
    scale_value = _number(call.q_scale)
    if geometry.is_coded:
        k_scale, v_scale = _factor(call.k_scale, planned.device), _factor(call.v_scale, planned.device)
    else:
        scale_value *= _number(call.k_scale)
    if call.sinks is not None:
        require_tensor("sinks", call.sinks)
    q = q if q.stride(-1) == 1 else q.contiguous()
    planned.run(geometry, Inputs(q, *pages, computed, lse, call.sinks, k_scale, v_scale), scale_value=scale_value)
    if computed is not out:
        out.copy_(computed)
    if call.v_scale is not None and v_scale is None:
        out.mul_(call.v_scale.reshape(()) if isinstance(call.v_scale, Tensor) else call.v_scale)
    if lse is None:
        return out
    if call.lse_base == "log2":
        lse.mul_(LOG2_E)
    if of_caller is not None and of_caller is not lse:
        of_caller.copy_(lse)
    if not call.return_lse:
        return out
    if call.lse is not None:
        return out, call.lse
    return out, lse if call.lse_layout == "NH" else lse.t().contiguous()


def _lse_rows(call: RunArguments, shape: tuple[int, int], device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Returns the caller's memory, and that into which kernels write: both float32 [tokens, heads], or None.

    They are one tensor if the caller's has its heads one after the other.
    """
    if call.lse is None:
        return None, torch.empty(shape, dtype=torch.float32, device=device) if call.return_lse else None
    check_rows("lse", call.lse, shape if call.lse_layout == "NH" else shape[::-1], torch.float32, device)
    of_caller = call.lse if call.lse_layout == "NH" else call.lse.t()
    is_whole = of_caller.stride(-1) == 1
    return of_caller, of_caller if is_whole else torch.empty(shape, dtype=torch.float32, device=device)


def _number(scale: Scale) -> float:
    """Returns a scale as a float on the host; waits for a tensor. Raises as _check_one() does."""
    _check_one(scale)
    return 1.0 if scale is None else float(scale)


def _factor(scale: Scale, device: torch.device) -> Tensor:
    """Returns a scale as float32 [1] on the device. Raises BadTensor, BadProblem."""
    _check_one(scale)
    if isinstance(scale, Tensor):
        return scale.to(device, torch.float32).reshape(1)
    if scale is not None and not SMALLEST_SCALE <= scale <= LARGEST_SCALE:
        raise BadTensor(f"a scale of K or V is {scale}; it must be a positive number from 2**-100 to 2**100")
    return torch.full((1,), 1.0 if scale is None else scale, dtype=torch.float32, device=device)


def _check_one(scale: Scale) -> None:
    """Raises BadTensor for a scale of several elements, and BadProblem for one that is not a finite float."""
    if isinstance(scale, Tensor):
        if scale.numel() != 1:
            raise BadTensor(f"a scale of shape {list(scale.shape)} is not served; q, K and V have one scale each")
    elif scale is not None and math.isinf(real_number("a scale of q, K or V", scale, BadProblem)):
        raise BadProblem("a scale of q, K or V is infinite; give a finite number")
