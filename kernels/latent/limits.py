"""The limits of the kernels over latent pages, as values that a capability table can cite."""

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
    """AttendArgs.check_kind() for latent pages, and for the limits above."""
    q, form = args.q, args.pages.format
    _, num_heads, head_dim = q.shape
    page_size, v_head_dim = form.page_size, form.v_head_dim
    reasons = []
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
    args.check_kind(PoolKind.LATENT, kernel, reasons)
    assert args.slopes is None, "no latent kernel has slopes"


def check_plain_latents(args: AttendArgs, scores: Scores, kernel: str) -> None:
    """Calls check_latent() for a kernel over the widest rows alone, and asserts that scores have nothing more."""
    check_latent(args, kernel)
    assert (args.q.shape[2], args.out.shape[2]) == (MAX_HEAD_DIM, MAX_V_HEAD_DIM), "the limits refuse other rows"
    assert not scores.visibility.windowed, "the limits refuse windows"
    assert not scores.soft_cap, "the limits refuse caps"
    assert args.sinks is None, "the limits refuse sinks"
    assert args.queries.first_page is None, "shared prefixes are for launch_latent_decode"
