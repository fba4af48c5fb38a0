"""Finds where the chunk of each sequence's last token begins, for decode in layers with chunks (attention/scores.py).

    start of i    = p - p % chunk for p = kv_len[i] - 1, the place of its last token; 0 without one
    kv_len_i      = kv_len[i] - start        its keys from there on
    first_page_i  = start // page_size       page_no in its row where they begin

It is part of the layer's schedule, like visible_ranges.py. Chunks are whole pages.
"""

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.any_alignment import at_any_alignment
from rocm_attn.kernels.launch import launch

_SEQS = 128


@at_any_alignment
@triton.jit(do_not_specialize=["num_seqs", "chunk", "page_size"])
def _chunk_starts_kernel(kv_len, in_chunk, first_page, num_seqs, chunk, page_size, SEQS: tl.constexpr):
    seq = tl.program_id(0) * SEQS + tl.arange(0, SEQS)
    inside = seq < num_seqs
    length = tl.load(kv_len + seq, mask=inside, other=0)
    start = tl.maximum(length - 1, 0) // chunk * chunk
    tl.store(in_chunk + seq, length - start, mask=inside)
    tl.store(first_page + seq, start // page_size, mask=inside)


def launch_chunk_starts(kv_len: Tensor, *, chunk: int, page_size: int, in_chunk: Tensor, first_page: Tensor) -> None:
    """Writes the keys of each sequence in its last chunk, and their first page.

    kv_len:               int32 [S], tokens
    chunk:                keys of a chunk, a multiple of page_size
    in_chunk, first_page: int32 [S], written
    """
    (num_seqs,) = kv_len.shape
    assert chunk % page_size == 0
    assert in_chunk.shape == first_page.shape == kv_len.shape
    launch(
        _chunk_starts_kernel,
        (triton.cdiv(num_seqs, _SEQS),),
        kv_len,
        in_chunk,
        first_page,
        num_seqs,
        chunk,
        page_size,
        _SEQS,
        num_warps=4,
    )
