"""The values that pages keep of K and V, computed again for tests: by torch's casts, with scales by definition."""

import torch
from torch import Tensor

from rocm_attn.problem import KVEncoding, Problem, Scales


def group_scales(groups: Tensor, largest: float, least: float = 1e-4) -> Tensor:
    """Returns scales of groups, [..., 1]: vLLM's 2 ** ceil(log2(max(largest element / largest, least)))."""
    wanted = (groups.abs().amax(-1, keepdim=True).double() / largest).clamp(min=least)
    return (2.0 ** wanted.log2().ceil()).to(groups)


def kept(rows: Tensor, problem: Problem, scale: Tensor | None) -> Tensor:
    """Returns rows [tokens, kv_heads, dim] as a reader of the problem's pages gets them, in float32 if they are codes.

    scale: of the layer or its heads; scales of tokens are computed here
    """
    if problem.kv_encoding is KVEncoding.LIKE_Q:
        return rows
    dtype = getattr(torch, problem.kv_encoding.value)
    largest = torch.finfo(dtype).max
    rows = rows.float().nan_to_num(0.0, 0.0, 0.0)
    if problem.kv_scales in (Scales.GROUP, Scales.FOOTER):
        # DeepSeek-V4's records: the last 64 elements of V are no codes, and 1e-4 is the largest element's least value.
        of_v4 = problem.kv_scales is Scales.FOOTER
        coded, group, least = (problem.v_head_dim - 64, 64, 1e-4 / 448) if of_v4 else (problem.v_head_dim, 128, 1e-4)
        groups = rows[..., :coded].reshape(*rows.shape[:-1], -1, group)
        scale_value = group_scales(groups, 224.0 if problem.kv_encoding is KVEncoding.E4M3FNUZ else 448.0, least)
        latent = ((groups / scale_value).to(dtype).float() * scale_value).flatten(-2)
        return torch.cat((latent, rows[..., coded:].bfloat16().float()), -1)
    if problem.kv_scales is Scales.TOKEN:
        scale_value = torch.maximum(rows.abs().amax(-1, keepdim=True) * (1 / largest), torch.tensor(2.0**-100))
    else:
        assert scale is not None
        scale_value = scale.expand(rows.shape[1])[:, None]
    return (rows * scale_value.reciprocal()).clamp(-largest, largest).to(dtype).float() * scale_value
