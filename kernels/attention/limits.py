"""The limits of the paged decode and extend kernels, as values that a capability table can cite."""

import torch

MAX_HEAD_DIM = 512  # of q and k rows, and of v rows; dims that are no power of two are padded inside the kernels
MAX_GQA_RATIO = 128  # query heads that share a KV head
MAX_PAGE_SIZE = 128
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def refusals(
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    page_size: int,
    dtype: torch.dtype,
) -> list[str]:
    """Returns one sentence for each reason why the kernels do not serve these layers; empty if they do."""
    reasons = []
    if num_kv_heads < 1 or num_q_heads < 1 or num_q_heads % num_kv_heads:
        reasons.append(f"{num_q_heads} query heads are not a positive multiple of {num_kv_heads} KV heads")
    elif num_q_heads // num_kv_heads > MAX_GQA_RATIO:
        reasons.append(f"{num_q_heads // num_kv_heads} query heads share a KV head; at most {MAX_GQA_RATIO} may")
    for name, dim in (("head_dim", head_dim), ("v_head_dim", v_head_dim)):
        if not 1 <= dim <= MAX_HEAD_DIM:
            reasons.append(f"{name} is {dim}; it must be from 1 to {MAX_HEAD_DIM}")
    if not 1 <= page_size <= MAX_PAGE_SIZE:
        reasons.append(f"page_size is {page_size}; it must be from 1 to {MAX_PAGE_SIZE}")
    if dtype not in DTYPES:
        reasons.append(f"dtype is {dtype}; it must be one of {', '.join(map(str, DTYPES))}")
    return reasons
