"""Prefill: any number of new tokens per sequence, over pages. Names and arguments are FlashInfer's."""

import functools

from torch import Tensor

from rocm_attn.integrations.flashinfer.batch import PagedKVLists
from rocm_attn.integrations.flashinfer.calls import Result, RunArguments, pages_of
from rocm_attn.integrations.flashinfer.cells import Masks
from rocm_attn.integrations.flashinfer.ragged import BatchPrefillWithRaggedKVCacheWrapper
from rocm_attn.integrations.flashinfer.requests import ScoreRules, as_dtype, geometry_of
from rocm_attn.integrations.flashinfer.signatures import Given, as_in_flashinfer
from rocm_attn.integrations.flashinfer.single import as_nhd, attend_alone
from rocm_attn.integrations.flashinfer.wrapped import PlannedWrapper, as_plan, deprecated

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]


@as_in_flashinfer
def single_prefill_with_kv_cache(q: Tensor, given: Given) -> Result:
    """Returns the attention of a sequence's last tokens: [tokens, q_heads, v_head_dim]; LSE [tokens, q_heads], base 2.

    q: [tokens, q_heads, head_dim]; k, v: [kv_len, kv_heads, dim] in NHD, [kv_heads, kv_len, dim] in HND
    custom_mask: [tokens, kv_len], not 0 where a key is seen; in place of causality
    Raises Unsupported, BadTensor.
    """
    return attend_alone(
        q,
        as_nhd(given.k, given.v, given.kv_layout),
        ScoreRules.of(given),
        RunArguments.of(given),
        causal=given.causal,
        masks=Masks(given.custom_mask, given.packed_custom_mask),
        out_dtype=given.o_dtype or "as q",
        backend=given.backend,
    )


single_prefill_with_kv_cache_return_lse = functools.partial(single_prefill_with_kv_cache, return_lse=True)


class BatchPrefillWithPagedKVCacheWrapper(PlannedWrapper):
    """Prefill over lists of pages.

    use_cuda_graph: whether run() is captured. Batches then have as many sequences as paged_kv_last_page_len_buf has
                    entries, and no more new tokens than the first batch, or than max_total_num_rows; the buffers keep
                    the arguments of plan()
    Raises Unsupported, BadSetting, BadTensor.
    """

    BUFFERS = "qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf"

    @as_in_flashinfer
    def __init__(self, given: Given) -> None:
        super().__init__(given)

    @as_plan
    def plan(self, given: Given) -> None:
        """Plans a batch for later calls of run().

        qo_indptr:   int [S + 1], the first new token of each sequence; new tokens are its last ones
        custom_mask: [cells], not 0 where a key is seen, in place of causality; packed_custom_mask: eight cells per byte
        fixed_split_size, disable_split_kv: results are the same in any batch
        Raises Unsupported, BadBatch, BadTensor, NeverFits. Then nothing is planned.
        """
        geometry = geometry_of(given)
        given_lists = given.paged_kv_indptr, given.paged_kv_indices, given.paged_kv_last_page_len
        masks = Masks(given.custom_mask, given.packed_custom_mask)
        batch = PagedKVLists(*given_lists, given.seq_lens).batch(given.qo_indptr, given.page_size, masks)
        self._plan(batch, geometry, as_dtype(given.o_data_type or geometry.dtype))
        indptr, indices, last_page_len = given_lists
        self._keep([given.qo_indptr, indptr, indices[: batch.num_entries], last_page_len])

    begin_forward = plan

    @as_in_flashinfer
    def run(self, given: Given) -> Result:
        """Returns the attention of the planned batch over a layer's pages: [tokens, q_heads, v_head_dim], and LSE.

        paged_kv_cache: as in BatchDecodeWithPagedKVCacheWrapper.run
        lse_base: log2 or ln; lse_layout: NH, [tokens, q_heads], or HN
        Raises Unsupported, BadTensor, BadSetting, WrongState.
        """
        self._check_window(given.window_left)
        return self._attend(given.q, pages_of(given.paged_kv_cache, self._kv_layout), RunArguments.of(given))

    run_return_lse = functools.partialmethod(run, return_lse=True)

    forward = deprecated("BatchPrefillWithPagedKVCacheWrapper.forward")
    forward_return_lse = deprecated("BatchPrefillWithPagedKVCacheWrapper.forward_return_lse")
