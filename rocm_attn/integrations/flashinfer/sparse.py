"""Attention to chosen blocks of keys. Names and arguments are FlashInfer's.

A row of blocks is a sequence whose pages are the blocks that it chooses, so no key of another block is read.
"""

import math

import numpy as np
import torch

from rocm_attn.errors import BadBatch, BadTensor, Unsupported
from rocm_attn.integrations.flashinfer.batch import listed_batch
from rocm_attn.integrations.flashinfer.calls import Result, RunArguments
from rocm_attn.integrations.flashinfer.cells import Masks
from rocm_attn.integrations.flashinfer.lengths import BatchLengths, on_host
from rocm_attn.integrations.flashinfer.requests import as_dtype, geometry_of
from rocm_attn.integrations.flashinfer.signatures import Given, as_in_flashinfer, refuse
from rocm_attn.integrations.flashinfer.wrapped import PlannedWrapper, as_plan, deprecated

__all__ = ["BlockSparseAttentionWrapper", "VariableBlockSparseAttentionWrapper"]

_MOST_PER_PAGE = 64  # tokens of a page that stands for a block, or for a part of one


def _refuse_causal(causal: bool) -> None:
    if causal:
        raise Unsupported(
            "causal is not served over chosen blocks: FlashInfer's kernels count either all keys or the chosen ones; "
            "give the cells as mask to BlockSparseAttentionWrapper"
        )


class BlockSparseAttentionWrapper(PlannedWrapper):
    """Blocks of one size, chosen for all heads alike by a block-sparse matrix in rows (BSR)."""

    @as_in_flashinfer
    def __init__(self, given: Given) -> None:
        super().__init__(given)
        self._num_keys = 0

    @as_plan
    def plan(self, given: Given) -> None:
        """Plans M queries in rows of R and N keys in columns of C for later calls of run(). The last row may be short.

        indptr, indices: int [rows + 1] and [nnz], the columns that each row sees
        mask:            [nnz, R, C], not 0 where a key is seen; packed_mask: each row's [R, keys] as bits, see Masks
        Raises Unsupported, BadBatch, BadTensor. Then nothing is planned.
        """
        refuse(q_scale=given.q_scale, k_scale=given.k_scale, v_scale=given.v_scale)
        _refuse_causal(given.causal)
        M, N, R, C = given.M, given.N, given.R, given.C
        indices = given.indices
        if min(M, R, C) < 1 or N % C:
            raise BadBatch(f"{M} queries and {N} keys in blocks of {R} x {C}; sizes must be at least 1 and C divide N")
        (blocks,) = on_host(given.indptr)
        num_rows = -(-M // R)
        if len(blocks) != num_rows + 1 or blocks[0] != 0 or (np.diff(blocks) < 0).any() or blocks[-1] > len(indices):
            raise BadBatch(
                f"indptr is {blocks[:9].tolist()}...; it must begin at 0, never fall, have {num_rows + 1} entries, and "
                f"end within the {len(indices)} indices"
            )
        page_size = math.gcd(C, _MOST_PER_PAGE)
        per_block = C // page_size
        part = torch.arange(per_block, device=indices.device)
        # Outside of the matrix one index is as wrong as another; a large one must not overflow to one inside.
        chosen = indices[: blocks[-1], None].clamp(-1, N // C).long()
        pages = (chosen * per_block + part).flatten()
        lengths = BatchLengths(np.minimum(np.arange(num_rows + 1) * R, M), blocks[:-1] * per_block, np.diff(blocks) * C)
        masks, mask = Masks(packed=given.packed_mask), given.mask
        if given.packed_mask is None and mask is not None:
            if mask.shape != (blocks[-1], R, C):
                raise BadTensor(f"mask is {list(mask.shape)}; it must be {[int(blocks[-1]), R, C]}")
            of_rows = torch.split(mask, np.diff(blocks).tolist())
            cells = [
                row.transpose(0, 1)[:q_len].flatten()
                for row, q_len in zip(of_rows, lengths.q_len.tolist(), strict=True)
            ]
            masks = Masks(torch.cat(cells))
        batch = listed_batch(lengths, pages, blocks * per_block, masks)
        if batch.num_entries and not 0 <= batch.page_ids[0] <= batch.page_ids[1] < N // page_size:
            raise BadBatch(f"indices name blocks outside of 0 to {N // C - 1}")
        geometry = geometry_of(given, page_size=page_size)
        self._plan(batch, geometry, as_dtype(given.o_data_type or geometry.dtype))
        self._num_keys = N

    begin_forward = plan

    @as_in_flashinfer
    def run(self, given: Given) -> Result:
        """Returns the attention of q [M, q_heads, head_dim] to k and v [N, kv_heads, head_dim], and LSE, base 2.

        Raises Unsupported, BadTensor, WrongState.
        """
        page_size = self._ready()[1].page_size
        for name, x in {"k": given.k, "v": given.v}.items():
            if x.dim() != 3 or len(x) != self._num_keys:
                raise BadTensor(f"{name} is {list(x.shape)}; it must be [{self._num_keys}, kv_heads, head_dim]")
        pages = torch.unflatten(given.k, 0, (-1, page_size)), torch.unflatten(given.v, 0, (-1, page_size))
        return self._attend(given.q, pages, RunArguments.of(given))

    forward = deprecated("BlockSparseAttentionWrapper.forward")


class VariableBlockSparseAttentionWrapper(PlannedWrapper):
    """Blocks of any sizes, chosen for each KV head."""

    @as_in_flashinfer
    def __init__(self, given: Given) -> None:
        super().__init__(given)
        self._num_kv_heads = 0

    @as_plan
    def plan(self, given: Given) -> None:
        """Plans blocks for later calls of run().

        block_mask_map: [kv_heads, rows, columns], not 0 where a row of blocks sees a column
        block_row_sz, block_col_sz: int [kv_heads, rows] and [kv_heads, columns], their queries and keys; the sums of
                                    all heads are equal
        Raises Unsupported, BadBatch, BadTensor. Then nothing is planned.
        """
        refuse(q_scale=given.q_scale, k_scale=given.k_scale, v_scale=given.v_scale)
        _refuse_causal(given.causal)
        num_qo_heads, num_kv_heads = given.num_qo_heads, given.num_kv_heads
        block_mask_map, block_row_sz, block_col_sz = given.block_mask_map, given.block_row_sz, given.block_col_sz
        shape = num_kv_heads, block_row_sz.shape[-1], block_col_sz.shape[-1]
        if block_mask_map.shape != shape or block_row_sz.shape != shape[:2] or block_col_sz.shape != shape[::2]:
            raise BadTensor(
                f"block_mask_map is {list(block_mask_map.shape)}, block_row_sz {list(block_row_sz.shape)} and "
                f"block_col_sz {list(block_col_sz.shape)}; they must be [{num_kv_heads}, rows, columns], "
                f"[{num_kv_heads}, rows] and [{num_kv_heads}, columns]"
            )
        if num_kv_heads < 1 or num_qo_heads % num_kv_heads:
            raise BadBatch(f"num_qo_heads is {num_qo_heads}; it must be a multiple of num_kv_heads, {num_kv_heads}")
        columns = block_col_sz.long()
        chosen = (block_mask_map != 0).to(columns.device)
        on_device = (block_row_sz.flatten(), columns.flatten(), (chosen * columns[:, None]).sum(2).flatten())
        q_len, col_len, kv_len = on_host(*on_device)
        for name, sizes in {"block_row_sz": q_len, "block_col_sz": col_len}.items():
            sums = sizes.reshape(num_kv_heads, -1).sum(1)
            if (sizes < 0).any() or (sums != sums[0]).any():
                raise BadBatch(
                    f"{name} has sums {sums.tolist()} of the heads; they must be equal, and no size negative"
                )
        head, _, column = chosen.nonzero(as_tuple=True)
        # Token t of head h is page h * keys + t.
        size = columns[head, column]
        first = (columns.flatten().cumsum(0) - columns.flatten()).view_as(columns)[head, column]
        moved = first - (size.cumsum(0) - size)
        pages = torch.arange(int(kv_len.sum()), device=columns.device) + moved.repeat_interleave(size)
        ends = np.concatenate([[0], kv_len.cumsum()])
        lengths = BatchLengths(np.concatenate([[0], q_len.cumsum()]), ends[:-1], kv_len)
        batch = listed_batch(lengths, pages.to(torch.int32), ends)
        geometry = geometry_of(given, num_q_heads=num_qo_heads // num_kv_heads, num_kv_heads=1)
        self._plan(batch, geometry, geometry.dtype)
        self._num_kv_heads = num_kv_heads

    begin_forward = plan

    @as_in_flashinfer
    def run(self, given: Given) -> Result:
        """Returns the attention of q [q_heads, queries, head_dim] to k and v [kv_heads, keys, head_dim]; LSE, base 2.

        out, lse: memory of [kv_heads * queries, q_heads / kv_heads(, head_dim)], as FlashInfer's kernel writes it; the
                  results are [q_heads, queries(, head_dim)]
        Raises Unsupported, BadTensor, WrongState.
        """
        heads, geometry = self._num_kv_heads, self._ready()[1]
        q, k, v = given.q, given.k, given.v
        for name, x, count in (("q", q, heads * geometry.num_q_heads), ("k", k, heads), ("v", v, heads)):
            if x.dim() != 3 or len(x) != count:
                raise BadTensor(f"{name} is {list(x.shape)}; it must be [{count}, tokens, head_dim]")
        rows = torch.unflatten(q, 0, (heads, -1)).transpose(1, 2).flatten(0, 1)
        pages = k.flatten(0, 1)[:, None, None], v.flatten(0, 1)[:, None, None]
        found = self._attend(rows, pages, RunArguments.of(given))
        by_head = [
            torch.unflatten(rows, 0, (heads, -1)).transpose(1, 2).flatten(0, 1)
            for rows in (found if isinstance(found, tuple) else [found])
        ]
        return (by_head[0], by_head[1]) if given.return_lse else by_head[0]

    forward = deprecated("VariableBlockSparseAttentionWrapper.forward")
