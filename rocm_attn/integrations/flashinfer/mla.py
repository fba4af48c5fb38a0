"""Attention over latent pages (MLA, absorbed). Names and arguments are FlashInfer's.

A row of a latent cache has a compressed part and a rotated part, ckv and kpe; V is the first. Kernels here read rows
with both parts. If the parts are in two tensors that are not views of one, run() first copies the plan's pages to one.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from rocm_attn.errors import BadBatch, BadTensor, Unsupported, WrongState
from rocm_attn.integrations.flashinfer.batch import PlannedBatch
from rocm_attn.integrations.flashinfer.calls import Result, RunArguments, attend
from rocm_attn.integrations.flashinfer.latent_batch import MLAPlanMetadata, batch_of, given
from rocm_attn.integrations.flashinfer.planned import PlannedAttention
from rocm_attn.integrations.flashinfer.requests import Geometry, as_dtype, check_rows, refuse
from rocm_attn.integrations.flashinfer.wrapped import PlannedWrapper
from rocm_attn.problem import PoolKind

__all__ = ["BatchMLAPagedAttentionWrapper", "MLAPlanMetadata"]

# A tensor whose last dimension is both parts, or the two parts.
Parts = Tensor | tuple[Tensor, Tensor]
LseMode = Literal["none", "base2", "basee"]
ScaleMode = Literal["default", "kv-per-tensor", "bmm-scalar", "bmm-tensor"]


class BatchMLAPagedAttentionWrapper(PlannedWrapper):
    """Attention over latent pages.

    use_cuda_graph: whether run() is captured. Batches then have as many sequences as kv_len_arr has entries, and no
                    more new tokens than the first batch. If each sequence of the first batch has one new token, so must
                    those of all batches. The buffers keep the arguments of plan()
    Raises BadTensor.
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        buffers = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_indices": kv_indices, "kv_len_arr": kv_len_arr}
        super().__init__(float_workspace_buffer, "NHD", backend, buffers, use_cuda_graph=use_cuda_graph)
        # For caches in two tensors, whose pages are copied to one.
        self._over_copies: PlannedAttention | None = None
        self._batch: PlannedBatch | None = None

    def plan(
        self,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        num_heads: int | None = None,
        head_dim_ckv: int | None = None,
        head_dim_kpe: int | None = None,
        page_size: int | None = None,
        causal: bool | None = None,
        sm_scale: float | None = None,
        q_data_type: torch.dtype | None = None,
        kv_data_type: torch.dtype | None = None,
        use_profiler: bool = False,
        *,
        metadata: MLAPlanMetadata | None = None,
        cum_seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        max_q_len: int | None = None,
        query_layout: Literal["packed", "split"] | None = None,
        kv_cache_layout: Literal["packed", "split"] | None = None,
        lse_mode: LseMode = "none",
        output_dtype: torch.dtype | None = None,
        output_scale: Literal["none", "per-tensor"] = "none",
        scale_mode: ScaleMode = "default",
        skip_softmax: bool = False,
        enable_pdl: bool | None = None,
        use_sinks: bool = False,
    ) -> None:
        """Plans a batch for later calls of run(), given by metadata or by its tensors alone.

        Arguments about layouts are ignored: run() takes either. Raises Unsupported, BadBatch, BadTensor, NeverFits.
        """
        refuse(
            skip_softmax=skip_softmax,
            output_scale=output_scale != "none",
            scale_mode=scale_mode.startswith("bmm"),
        )
        flat = qo_indptr, kv_indptr, kv_indices, kv_len_arr, cum_seq_lens_q, block_tables, seq_lens, max_q_len
        if metadata is not None and any(each is not None for each in flat):
            raise BadBatch("plan() was given both metadata and tensors; give one of them")
        geometry = _geometry(
            num_heads=num_heads,
            head_dim_ckv=head_dim_ckv,
            head_dim_kpe=head_dim_kpe,
            page_size=page_size,
            causal=causal,
            sm_scale=sm_scale,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
        )
        metadata = metadata or MLAPlanMetadata(*flat)
        self._batch = None
        batch = batch_of(metadata, geometry.page_size)
        if self._buffers and metadata.kv_indptr is None:
            raise Unsupported("tables of pages are not served if run() is captured; give lists of pages")
        out_dtype = as_dtype(output_dtype or geometry.dtype)
        self._plan(batch, geometry, out_dtype, each_one=bool((batch.lengths.q_len == 1).all()))
        if self._over_copies is not None:
            self._over_copies.plan(self._of_copies(batch), geometry)
        if self._buffers:
            lists = metadata.qo_indptr, metadata.kv_indptr, metadata.kv_indices, metadata.kv_len_arr
            q_indptr, starts, indices, lens = map(given, lists)
            self._keep([q_indptr, starts[: batch.lengths.num_seqs + 1], indices[: batch.num_entries], lens])
        self._batch = batch

    def _of_copies(self, batch: PlannedBatch) -> PlannedBatch:
        """Returns the batch over copies of the pages that it names, in their order."""
        pages = torch.arange(max(batch.num_entries, 1), dtype=torch.int32, device=self.device)
        return PlannedBatch(batch.lengths, pages, batch.num_entries, (0, batch.num_entries - 1))

    def run(
        self,
        q_nope: Tensor | None = None,
        q_pe: Tensor | None = None,
        ckv_cache: Tensor | None = None,
        kpe_cache: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: Tensor | None = None,
        kv_len: Tensor | None = None,
        page_table: Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        query: Any = None,
        kv_cache: Any = None,
        ckv_scale: float | None = None,
        ckv_scale_arr: Tensor | None = None,
        kpe_scale: float | None = None,
        sinks: Tensor | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        bmm1_scale: float | Tensor | None = None,
        bmm2_scale: float | Tensor | None = None,
    ) -> Result:
        """Returns the planned batch's attention over a layer's latent pages: [tokens, heads, head_dim_ckv], and LSE.

        query:    [tokens, heads, head_dim_ckv + head_dim_kpe], or its two parts; also as q_nope and q_pe
        kv_cache: [pages, page_size, head_dim_ckv + head_dim_kpe], or its two parts; also as ckv_cache and kpe_cache
        kv_len, page_table: for batches that were not planned; refused
        Raises Unsupported, BadTensor, WrongState.
        """
        refuse(
            profiler_buffer=profiler_buffer,
            o_scale=o_scale,
            ckv_scale=ckv_scale,
            ckv_scale_arr=ckv_scale_arr,
            kpe_scale=kpe_scale,
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
            bmm1_scale=bmm1_scale,
            bmm2_scale=bmm2_scale,
        )
        planned, geometry = self._ready()
        if self._batch is None:
            raise WrongState("nothing is planned; call plan() before run()")
        call = RunArguments(out, lse, return_lse, "ln" if return_lse_base_on_e else "log2", sinks=sinks)
        query = _one_of("query", query, (q_nope, q_pe))
        q = query if isinstance(query, Tensor) else torch.cat(query, -1)
        parts = _one_of("kv_cache", kv_cache, (ckv_cache, kpe_cache))
        rows = _whole(parts, geometry)
        if rows is None:
            assert isinstance(parts, tuple)
            if self._over_copies is None:
                each_one = bool((self._batch.lengths.q_len == 1).all())
                planned = self._new_planned(self._batch, each_one=each_one)
                planned.plan(self._of_copies(self._batch), geometry)
                self._over_copies = planned
            planned, rows = self._over_copies, self._copied(parts, self._batch)
        rows = rows.unsqueeze(2)
        return attend(planned, geometry, self._out_dtype, q, (rows, rows[..., : geometry.v_head_dim]), call)

    def _copied(self, parts: tuple[Tensor, Tensor], batch: PlannedBatch) -> Tensor:
        """Returns the pages that a batch names, one after the other, with both parts in a row."""
        low, high = batch.page_ids
        if low < 0 or high >= min(len(part) for part in parts):
            raise BadTensor(f"the plan names pages {low} to {high}; the caches have {[len(part) for part in parts]}")
        pages = batch.pages[: batch.num_entries].to(self.device)
        if self._buffers:
            # All entries of the buffer: a graph copies those of later plans too. Entries that no plan wrote are page 0.
            pages = self._buffers["kv_indices"].clamp(0, len(parts[0]) - 1)
        if not len(parts[0]):
            return torch.cat(parts, -1)
        return torch.cat([part.index_select(0, pages) for part in parts], -1)


def _geometry(**given: Any) -> Geometry:
    """Returns the geometry of plan()'s arguments. Raises BadBatch for those that are None, and Unsupported."""
    if missing := [name for name, value in given.items() if value is None]:
        raise BadBatch(f"plan() needs {', '.join(missing)}")
    q_dtype, kv_dtype = as_dtype(given["q_data_type"]), as_dtype(given["kv_data_type"])
    if kv_dtype != q_dtype:
        raise Unsupported(f"latent pages in {kv_dtype} with queries in {q_dtype} are not served; give both one dtype")
    v_head_dim = given["head_dim_ckv"]
    sizes = given["num_heads"], 1, v_head_dim + given["head_dim_kpe"], v_head_dim, given["page_size"]
    return Geometry(*sizes, q_dtype, kv_dtype, scale=given["sm_scale"], causal=given["causal"], pool=PoolKind.LATENT)


def _one_of(name: str, whole: Any, parts: tuple[Tensor | None, Tensor | None]) -> Parts:
    """Returns one argument, or the two that can be given instead. Raises BadTensor unless exactly one form is given."""
    first, second = parts
    if whole is None and first is not None and second is not None:
        return first, second
    if first is not None or second is not None or whole is None:
        raise BadTensor(f"{name} was given together with its parts; give one of them")
    found: Parts = whole if isinstance(whole, Tensor) else (whole[0], whole[1])
    return found


def _whole(parts: Parts, geometry: Geometry) -> Tensor | None:
    """Returns [pages, page_size, both parts] if both parts are in one row, else None. Raises BadTensor."""
    dims = geometry.v_head_dim, geometry.head_dim - geometry.v_head_dim
    sides = [parts] if isinstance(parts, Tensor) else list(parts)
    for side, dim in zip(sides, [geometry.head_dim] if len(sides) == 1 else dims, strict=True):
        if side.dim() != 3:
            raise BadTensor(f"a latent cache is {list(side.shape)}; it must be [pages, page_size, dim]")
        check_rows("a latent cache", side, (side.shape[0], geometry.page_size, dim), geometry.kv_dtype, sides[0].device)
    if isinstance(parts, Tensor):
        return parts
    ckv, kpe = parts
    if dims[1] == 0:
        return ckv
    follows = kpe.data_ptr() == ckv.data_ptr() + dims[0] * ckv.element_size()
    if not follows or ckv.stride() != kpe.stride() or ckv.stride(2) != 1 or ckv.shape[0] != kpe.shape[0]:
        return None
    return ckv.as_strided((*ckv.shape[:2], geometry.head_dim), ckv.stride())
