"""Computes the number of pages of the KV pool."""

from collections.abc import Sequence
from dataclasses import dataclass

from rocm_attn.errors import NeverFits
from rocm_attn.paging.index_spaces import num_pages
from rocm_attn.paging.kv_pool import page_bytes
from rocm_attn.problem import UNLIMITED_WINDOW, PoolKind, Problem

CPU_BYTES = 1 << 30
# torch's allocator takes memory for a large tensor in multiples of this.
_ALLOCATION_BYTES = 2 << 20
# The code of kernels, which the driver loads when steps of other sizes first run.
_CODE_BYTES = 16 << 20
# A pool that takes at most this part of the free memory is not reduced, and nothing is measured.
_SMALL_PART = 4


@dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """The GPU memory that is needed in addition to K and V, in bytes.

    total: of the GPU
    free:  with the weights in place
    step:  the most that a step takes, including the runtime's memory for it and drawn drafts
    graph: expected memory of graphs of all sizes
    """

    total: int
    free: int
    step: int
    graph: int

    def kv_bytes(self, share: float, problems: Sequence[Problem], *, state_bytes: int = 0) -> int:
        """Memory for K and V that keeps at most `share` of the GPU's memory in use. Raises NeverFits.

        state_bytes: of the states of requests that run
        """
        num_tensors = sum(1 if problem.pool is PoolKind.LATENT else 2 for problem in problems)
        kept = self.total - int(share * self.total)
        left = self.free - kept - self.step - self.graph - state_bytes - num_tensors * _ALLOCATION_BYTES - _CODE_BYTES
        if left <= 0:
            raise NeverFits(
                f"no memory is left for K and V: of {_gib(self.total)} GiB {_gib(self.free)} are free, a step "
                f"takes {_gib(self.step)}, graphs take {_gib(self.graph)}, "
                + (f"states of recurrent layers {_gib(state_bytes)}, " if state_bytes else "")
                + f"and {_gib(kept)} must stay free; lower max_batch_size or chunk, raise gpu_memory_share, or use a "
                "smaller model"
            )
        return left


NOT_MEASURED = MeasuredMemory(0, 0, 0, 0)


def is_small(wanted_bytes: int, free_bytes: int) -> bool:
    """True if a pool of all pages that sequences can use is so small that steps and graphs surely fit next to it."""
    return wanted_bytes <= free_bytes // _SMALL_PART


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f}"


@dataclass(frozen=True, slots=True)
class PoolPages:
    """The page counts of the pools, reserved pages included.

    full: of the full space
    swa:  of the SWA space, for layers with a window; 0: all layers live in the full space
    """

    full: int
    swa: int


def most_kv_bytes(problems: Sequence[Problem], *, max_num_seqs: int, max_kv_len: int, chunk: int) -> int:
    """Memory of a pool with room for max_num_seqs sequences of max_kv_len tokens."""
    no_limit = (1 + max_num_seqs * num_pages(max_kv_len, problems[0].page_size)) * page_bytes(problems)
    pages = pool_pages(problems, max_num_seqs=max_num_seqs, max_kv_len=max_kv_len, chunk=chunk, kv_bytes=no_limit)
    windowed = page_bytes([problem for problem in problems if problem.window_left != UNLIMITED_WINDOW])
    return pages.full * (page_bytes(problems) - windowed) + (pages.swa or pages.full) * windowed


def pool_pages(
    problems: Sequence[Problem], *, max_num_seqs: int, max_kv_len: int, chunk: int, kv_bytes: int
) -> PoolPages:
    """Pages for max_num_seqs sequences of max_kv_len tokens, or as many as fit kv_bytes.

    chunk: new tokens of a step, which lie in the SWA space next to the windows before them
    If memory is short the SWA space has at most as many pages as the full one: no sequence needs more there.
    Raises NeverFits if not even one page for tokens fits.
    """
    windowed = [problem for problem in problems if problem.window_left != UNLIMITED_WINDOW]
    full_bytes, swa_bytes = page_bytes(problems) - page_bytes(windowed), page_bytes(windowed)
    wanted = 1 + max_num_seqs * num_pages(max_kv_len, problems[0].page_size)
    affordable = kv_bytes // (full_bytes + swa_bytes)
    if affordable < 2:
        raise NeverFits(
            f"{kv_bytes} bytes for K and V hold {affordable} pages of {full_bytes + swa_bytes} bytes, and at least "
            "2 are needed; raise kv_bytes or use smaller pages"
        )
    if not windowed:
        return PoolPages(min(wanted, affordable), 0)
    swa = min(wanted, affordable, swa_pages_for(windowed, max_num_seqs=max_num_seqs, chunk=chunk))
    return PoolPages(min(wanted, (kv_bytes - swa * swa_bytes) // full_bytes) if full_bytes else wanted, swa)


def swa_pages_for(problems: Sequence[Problem], *, max_num_seqs: int, chunk: int) -> int:
    """Upper bound of the pages for the windows of max_num_seqs sequences and the new tokens of a step."""
    page_size = problems[0].page_size
    window_left = max(problem.window_left for problem in problems)
    # A window and a new token begin and end within pages, and the chunk is divided over several sequences.
    return 1 + max_num_seqs * (num_pages(window_left + 1, page_size) + 2) + num_pages(chunk, page_size)
