"""The limits of the kernels over latent pages, as values that a capability table can cite."""

from __future__ import annotations

import torch

from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.attention.scores import Scores
from rocm_attn.kernels.cache.page_format import PoolKind

MAX_V_HEAD_DIM = 512
MAX_REST_DIM = 64  # elements of a row after its V
MAX_HEAD_DIM = MAX_V_HEAD_DIM + MAX_REST_DIM
MAX_HEADS = 128
MAX_PAGE_SIZE = 128
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# New tokens of a sequence whose keys are still split over programs; longer ones have a program per query block, except
# on Hopper.
MOST_SPLIT_TOKENS, ANY_TOKENS = 8, 2**30


def check_latent(args: AttendArgs, kernel: str) -> None:
    """Checks only what would corrupt memory silently. Cheap, on the host.

    Raises ValueError for a problem that no kernel serves. The runtime checked the rest, which is asserted here.
    """
    q, k, out, form = args.q, args.pages.k, args.out, args.pages.format
    num_tokens, num_heads, head_dim = q.shape
    page_size, v_head_dim = form.page_size, form.v_head_dim
    reasons = []
    if form.kind is not PoolKind.LATENT or not (form.encoding.is_fp8 or form.encoding.dtype == q.dtype):
        reasons.append(
            f"with q in {q.dtype} it reads {PoolKind.LATENT.value} in that dtype or in eight bits, not {form}"
        )
    if num_heads > MAX_HEADS:
        reasons.append(f"{num_heads} query heads are too many; at most {MAX_HEADS} are allowed")
    if not 1 <= v_head_dim <= MAX_V_HEAD_DIM:
        reasons.append(f"v_head_dim is {v_head_dim}; it must be from 1 to {MAX_V_HEAD_DIM}")
    if not 0 <= head_dim - v_head_dim <= MAX_REST_DIM:
        reasons.append(f"head_dim is {head_dim}; it must be from v_head_dim to v_head_dim + {MAX_REST_DIM}")
    if not 1 <= page_size <= MAX_PAGE_SIZE:
        reasons.append(f"page_size is {page_size}; it must be from 1 to {MAX_PAGE_SIZE}")
    if q.dtype not in DTYPES:
        reasons.append(f"dtype is {q.dtype}; it must be one of {', '.join(map(str, DTYPES))}")
    if reasons:
        raise ValueError(f"{kernel} does not serve this: {'; '.join(reasons)}")
    args.queries.check()
    assert args.queries.num_tokens == num_tokens, "q and the queries disagree"
    assert form.head_dim == head_dim, "q and the pages disagree"
    assert out.shape == (num_tokens, num_heads, v_head_dim), "out disagrees with q and the pages"
    assert args.slopes is None, "no latent kernel has slopes"
    assert q.dtype == out.dtype
    assert q.stride(2) == k.stride(3) == out.stride(2) == 1, "the last stride must be 1"
    assert args.table.dtype == torch.int32
    assert args.table.stride(1) == 1
    assert args.table.shape[1] >= 1
    assert args.lse is None or (args.lse.dtype == torch.float32 and args.lse.shape == (num_tokens, num_heads))
    sinks = args.sinks
    assert sinks is None or (sinks.dtype == torch.float32 and sinks.shape == (num_heads,) and sinks.stride(0) == 1)


def check_plain_latents(args: AttendArgs, scores: Scores, kernel: str) -> None:
    """Calls check_latent() for a kernel over the widest rows alone, and asserts that scores have nothing more."""
    check_latent(args, kernel)
    assert (args.q.shape[2], args.out.shape[2]) == (MAX_HEAD_DIM, MAX_V_HEAD_DIM), "the limits refuse other rows"
    assert not scores.visibility.windowed, "the limits refuse windows"
    assert not scores.soft_cap, "the limits refuse caps"
    assert args.sinks is None, "the limits refuse sinks"
    assert args.queries.first_page is None, "shared prefixes are for launch_latent_decode"
