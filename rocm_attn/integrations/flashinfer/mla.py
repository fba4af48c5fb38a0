"""Attention over latent pages (MLA, absorbed). Names and arguments are FlashInfer's.

A row of a latent cache has a compressed part and a rotated part, ckv and kpe; V is the first. Kernels here read rows
with both parts. If the parts are in two tensors that are not views of one, run() first copies the plan's pages to one.
"""

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from rocm_attn.errors import BadBatch, BadTensor, Unsupported, WrongState
from rocm_attn.integrations.flashinfer.batch import PlannedBatch
from rocm_attn.integrations.flashinfer.calls import Result, RunArguments, attend
from rocm_attn.integrations.flashinfer.latent_batch import MLAPlanMetadata, batch_of, needed
from rocm_attn.integrations.flashinfer.planned import PlannedAttention
from rocm_attn.integrations.flashinfer.requests import Geometry, as_dtype, check_rows
from rocm_attn.integrations.flashinfer.signatures import Given, as_in_flashinfer, refuse
from rocm_attn.integrations.flashinfer.wrapped import PlannedWrapper, as_plan
from rocm_attn.problem import PoolKind

__all__ = ["BatchMLAPagedAttentionWrapper", "MLAPlanMetadata"]

# A tensor whose last dimension is both parts, or the two parts.
Parts = Tensor | tuple[Tensor, Tensor]
_SIZES = "num_heads", "head_dim_ckv", "head_dim_kpe", "page_size"
_NEEDED = (*_SIZES, "causal", "sm_scale", "q_data_type", "kv_data_type")


class BatchMLAPagedAttentionWrapper(PlannedWrapper):
    """Attention over latent pages.

    use_cuda_graph: whether run() is captured. Batches then have as many sequences as kv_len_arr has entries, and no
                    more new tokens than the first batch. If each sequence of the first batch has one new token, so must
                    those of all batches. The buffers keep the arguments of plan()
    Raises BadTensor.
    """

    BUFFERS = "qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"

    @as_in_flashinfer
    def __init__(self, given: Given) -> None:
        super().__init__(given)
        # For caches in two tensors, whose pages are copied to one.
        self._over_copies: PlannedAttention | None = None
        self._batch: PlannedBatch | None = None

    @as_plan
    def plan(self, given: Given) -> None:
        """Plans a batch for later calls of run(), given by metadata or by its tensors alone.

        Arguments about layouts are ignored: run() takes either. Raises Unsupported, BadBatch, BadTensor, NeverFits.
        """
        refuse(scale_mode=given.scale_mode.startswith("bmm"))
        tensors = {field.name: getattr(given, field.name) for field in fields(MLAPlanMetadata)}
        if given.metadata is not None and any(each is not None for each in tensors.values()):
            raise BadBatch("plan() was given both metadata and tensors; give one of them")
        metadata = given.metadata or MLAPlanMetadata(**tensors)
        geometry = _geometry(given)
        self._batch = None
        batch = batch_of(metadata, geometry.page_size)
        if self._buffers and metadata.kv_indptr is None:
            raise Unsupported("tables of pages are not served if run() is captured; give lists of pages")
        out_dtype = as_dtype(given.output_dtype or geometry.dtype)
        self._plan(batch, geometry, out_dtype, each_one=bool((batch.lengths.q_len == 1).all()))
        if self._over_copies is not None:
            self._over_copies.plan(self._of_copies(batch), geometry)
        if self._buffers:
            q_indptr, starts, indices, lens = (needed(getattr(metadata, name)) for name in self.BUFFERS)
            self._keep([q_indptr, starts[: batch.lengths.num_seqs + 1], indices[: batch.num_entries], lens])
        self._batch = batch

    def _of_copies(self, batch: PlannedBatch) -> PlannedBatch:
        """Returns the batch over copies of the pages that it names, in their order."""
        pages = torch.arange(max(batch.num_entries, 1), dtype=torch.int32, device=self.device)
        return PlannedBatch(batch.lengths, pages, batch.num_entries, (0, batch.num_entries - 1))

    @as_in_flashinfer
    def run(self, given: Given) -> Result:
        """Returns the planned batch's attention over a layer's latent pages: [tokens, heads, head_dim_ckv], and LSE.

        query:    [tokens, heads, head_dim_ckv + head_dim_kpe], or its two parts; also as q_nope and q_pe
        kv_cache: [pages, page_size, head_dim_ckv + head_dim_kpe], or its two parts; also as ckv_cache and kpe_cache
        Raises Unsupported, BadTensor, WrongState.
        """
        refuse(o_scale=given.o_scale)
        planned, geometry = self._ready()
        if self._batch is None:
            raise WrongState("nothing is planned; call plan() before run()")
        call = RunArguments.of(given, lse_base="ln" if given.return_lse_base_on_e else "log2")
        query = _one_of("query", given.query, (given.q_nope, given.q_pe))
        q = query if isinstance(query, Tensor) else torch.cat(query, -1)
        parts = _one_of("kv_cache", given.kv_cache, (given.ckv_cache, given.kpe_cache))
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


def _geometry(given: Given) -> Geometry:
    """Returns the geometry of plan()'s arguments. Raises BadBatch for those that are None, and Unsupported."""
    if missing := [name for name in _NEEDED if getattr(given, name) is None]:
        raise BadBatch(f"plan() needs {', '.join(missing)}")
    q_dtype, kv_dtype = as_dtype(given.q_data_type), as_dtype(given.kv_data_type)
    if kv_dtype != q_dtype:
        raise Unsupported(f"latent pages in {kv_dtype} with queries in {q_dtype} are not served; give both one dtype")
    sizes = given.num_heads, 1, given.head_dim_ckv + given.head_dim_kpe, given.head_dim_ckv, given.page_size
    return Geometry(*sizes, q_dtype, kv_dtype, scale=given.sm_scale, causal=given.causal, pool=PoolKind.LATENT)


def _one_of(name: str, whole: Any, parts: tuple[Tensor | None, Tensor | None]) -> Parts:
    """Returns one argument, or the two that can be given instead. Raises BadTensor unless exactly one form is given."""
    first, second = parts
    if whole is None and first is not None and second is not None:
        return first, second
    if first is not None or second is not None or whole is None:
        raise BadTensor(f"{name} is not given once: give it whole, or else both of its parts")
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
