"""aiter.paged_attention_ragged: decode through a CSR page list, split at every 256 keys of a sequence."""

from dataclasses import dataclass

import torch

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.machine.target import Target
from rocm_attn.problem import Problem
from rocm_attn.providers.aiter import library
from rocm_attn.providers.aiter.eight_bits import ScaleOfOne
from rocm_attn.providers.aiter.kernel import AiterKernel
from rocm_attn.providers.contract import PoolSize, StepBounds
from rocm_attn.providers.scratch import ScratchTensor, cut, keep_rows, room_for, whole_rows

# Fixed in its source. Keys after max_num_partitions partitions are silently ignored.
_PARTITION_KEYS = 256

# Its workspace grows with sequences times length, for any pool; above this another kernel is used.
WORKSPACE_BUDGET_BYTES = 1 << 30


@dataclass(frozen=True)
class RaggedDecode(AiterKernel):
    """One new token in each sequence.

    max_kv_len: whole pages of the longest sequence, in tokens
    """

    max_kv_len: int
    name = "paged_attention_ragged"

    @property
    def schedule(self) -> ScaleOfOne:
        """The function requires scales of K and V even if there are none."""
        return ScaleOfOne()

    def room(self, shape: PaddedShape) -> tuple[ScratchTensor, ...]:
        return self._parts(shape, self.max_kv_len)

    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        problem = self.problem
        partials, q_rows, out_rows = cut(args.workspace, self._parts(bounds.shape, bounds.max_kv_len))
        out = room_for(args.out, out_rows)
        one = args.schedule[:1].view(torch.float32)
        library.paged_attention_ragged()(
            out=out,
            workspace_buffer=partials,
            query=whole_rows(args.q, q_rows),
            key_cache=args.pages.k,
            value_cache=args.pages.v,
            scale=problem.scale,
            kv_indptr=step.page_indptr,
            kv_page_indices=step.page_list,
            kv_last_page_lens=step.last_page_len,
            block_size=problem.page_size,
            max_num_partitions=_num_partitions(bounds.max_kv_len),
            alibi_slopes=args.slopes,
            kv_cache_dtype="auto",
            kv_cache_layout="NHD",
            logits_soft_cap=problem.logits_soft_cap,
            k_scale=one,
            v_scale=one,
            fp8_out_scale=None,
            partition_size=_PARTITION_KEYS,
            mtp=1,
        )
        keep_rows(args.out, out)

    def _parts(self, shape: PaddedShape, max_kv_len: int) -> tuple[ScratchTensor, ScratchTensor, ScratchTensor]:
        """The function's workspace, then room for q and out if their rows are not contiguous.

        For each row, head and partition: an exp sum and a maximum in float32, and a partial output.
        """
        problem = self.problem
        rows = (shape.num_tokens, problem.num_q_heads, problem.head_dim)
        partial_bytes = 8 + problem.head_dim * problem.dtype.itemsize
        num_bytes = rows[0] * rows[1] * _num_partitions(max_kv_len) * partial_bytes
        return (
            ScratchTensor((num_bytes,), torch.uint8),
            ScratchTensor(rows, problem.dtype),
            ScratchTensor(rows, problem.dtype),
        )


def _num_partitions(max_kv_len: int) -> int:
    return -(-max_kv_len // _PARTITION_KEYS)


def bind_ragged(problem: Problem, target: Target, pool: PoolSize) -> RaggedDecode:
    """Binds the kernel, with workspace for sequences up to pool.max_kv_len. Raises LookupError if that is too much."""
    kernel = RaggedDecode(problem, -(-pool.max_kv_len // problem.page_size) * problem.page_size)
    num_seqs = pool.max_num_seqs
    num_bytes = kernel.workspace_words(PaddedShape(StepKind.DECODE, num_seqs, num_seqs)) * torch.float32.itemsize
    if num_bytes > WORKSPACE_BUDGET_BYTES:
        raise LookupError(
            f"its workspace for {num_seqs} sequences of {pool.max_kv_len} tokens takes {num_bytes} bytes, more "
            f"than the limit of {WORKSPACE_BUDGET_BYTES}"
        )
    return kernel
