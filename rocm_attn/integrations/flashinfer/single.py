"""One sequence whose K and V are two tensors: pages of one token each, in order."""

import functools
from threading import get_ident
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rocm_attn.errors import BadTensor
from rocm_attn.integrations.flashinfer.batch import token_batch
from rocm_attn.integrations.flashinfer.calls import Result, RunArguments, attend
from rocm_attn.integrations.flashinfer.cells import NO_MASKS, Masks
from rocm_attn.integrations.flashinfer.lengths import BatchLengths
from rocm_attn.integrations.flashinfer.planned import PlannedAttention
from rocm_attn.integrations.flashinfer.requests import Geometry, ScoreRules, as_out_dtype, check_layout, provider_of
from rocm_attn.machine.devices import require_tensor, with_index


@functools.lru_cache(maxsize=8)
def _planned_alone(device: torch.device, provider: str, thread: int) -> PlannedAttention:
    """Returns the cached PlannedAttention of a thread: these functions may be called in several threads at a time."""
    return PlannedAttention(device, provider)


def as_nhd(k: Tensor, v: Tensor, kv_layout: str) -> tuple[Tensor, Tensor]:
    """Returns K and V of a sequence as [kv_len, kv_heads, dim]; HND is [kv_heads, kv_len, dim].

    Raises BadSetting, BadTensor.
    """
    require_tensor("k", k)
    require_tensor("v", v)
    return (k, v) if check_layout(kv_layout) == "NHD" else (k.transpose(0, 1), v.transpose(0, 1))


def attend_alone(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    scores: ScoreRules,
    call: RunArguments,
    *,
    causal: bool,
    masks: Masks = NO_MASKS,
    out_dtype: torch.dtype | Literal["as q"] = "as q",
    backend: str = "auto",
) -> Result:
    """Returns the attention of a sequence's last tokens. Raises BadTensor, Unsupported, WrongState in a capture.

    q: [tokens, q_heads, head_dim]; kv: K and V, [kv_len, kv_heads, dim]
    """
    k, v = kv
    require_tensor("q", q)
    if q.dim() != 3 or k.dim() != 3 or v.dim() != 3 or k.shape[:2] != v.shape[:2]:
        raise BadTensor(
            f"q is {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} as NHD; each must have 3 dimensions, and "
            "k and v the same tokens and heads"
        )
    of_out = q.dtype if out_dtype == "as q" else as_out_dtype(out_dtype)
    device = with_index(q.device)
    sizes = q.shape[1], k.shape[1], q.shape[2], v.shape[2], 1, q.dtype, k.dtype
    geometry = scores.over(Geometry(*sizes, causal=causal))
    kv_indptr = np.array([0, len(k)], np.int64)
    lengths = BatchLengths(np.array([0, len(q)], np.int64), kv_indptr[:1], kv_indptr[1:])
    planned = _planned_alone(device, provider_of(backend), get_ident())
    planned.plan(token_batch(lengths, kv_indptr, masks, device), geometry)
    pages = k.unsqueeze(1), v.unsqueeze(1)
    return attend(planned, geometry, of_out, q, pages, call)
