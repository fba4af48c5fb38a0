"""FlashInfer's paged attention by its own names: arguments, layouts, defaults and base-2 log-sum-exps of release 0.7.

A program that was written for FlashInfer runs after `import rocm_attn.integrations.flashinfer as flashinfer`. Arguments
that are not served raise Unsupported with a reason. docs/flashinfer.md lists the differences.
"""

from rocm_attn.integrations.flashinfer import cascade, decode, mla, page, prefill
from rocm_attn.integrations.flashinfer.cascade import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    MultiLevelCascadeAttentionWrapper,
    merge_state,
    merge_state_in_place,
    merge_states,
)
from rocm_attn.integrations.flashinfer.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    single_decode_with_kv_cache,
)
from rocm_attn.integrations.flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata
from rocm_attn.integrations.flashinfer.page import (
    append_paged_kv_cache,
    append_paged_mla_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
)
from rocm_attn.integrations.flashinfer.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)
from rocm_attn.integrations.flashinfer.requests import use_provider

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "MLAPlanMetadata",
    "MultiLevelCascadeAttentionWrapper",
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "cascade",
    "decode",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "mla",
    "page",
    "prefill",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "use_provider",
]
