# The served names. Type checkers read this file, and so does __init__.py. Those that are not served are in names.py.
# isort: off
# fmt: off

__all__: list[str]

from rocm_attn.integrations.flashinfer import (
    attention as attention, cascade as cascade, decode as decode, mla as mla, page as page, pod as pod,
    prefill as prefill, quantization as quantization, rope as rope, sampling as sampling, sparse as sparse,
)
from rocm_attn.integrations.flashinfer.attention import (
    BatchAttention as BatchAttention, BatchAttentionWithAttentionSinkWrapper as BatchAttentionWithAttentionSinkWrapper,
    BatchDecodeWithAttentionSinkWrapper as BatchDecodeWithAttentionSinkWrapper,
    BatchPrefillWithCausalBidirectionalRangesWrapper as BatchPrefillWithCausalBidirectionalRangesWrapper,
)
from rocm_attn.integrations.flashinfer.cascade import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper as BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper as BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    MultiLevelCascadeAttentionWrapper as MultiLevelCascadeAttentionWrapper, merge_state as merge_state,
    merge_state_in_place as merge_state_in_place, merge_states as merge_states,
)
from rocm_attn.integrations.flashinfer.decode import (
    BatchDecodeWithPagedKVCacheWrapper as BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper as CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan as fast_decode_plan, single_decode_with_kv_cache as single_decode_with_kv_cache,
)
from rocm_attn.integrations.flashinfer.mla import (
    BatchMLAPagedAttentionWrapper as BatchMLAPagedAttentionWrapper, MLAPlanMetadata as MLAPlanMetadata,
)
from rocm_attn.integrations.flashinfer.page import (
    append_paged_kv_cache as append_paged_kv_cache, append_paged_mla_kv_cache as append_paged_mla_kv_cache,
    get_batch_indices_positions as get_batch_indices_positions, get_seq_lens as get_seq_lens,
)
from rocm_attn.integrations.flashinfer.pod import (
    BatchPODWithPagedKVCacheWrapper as BatchPODWithPagedKVCacheWrapper,
    PODWithPagedKVCacheWrapper as PODWithPagedKVCacheWrapper,
)
from rocm_attn.integrations.flashinfer.prefill import (
    BatchPrefillWithPagedKVCacheWrapper as BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper as BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache as single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse as single_prefill_with_kv_cache_return_lse,
)
from rocm_attn.integrations.flashinfer.quantization import packbits as packbits, segment_packbits as segment_packbits
from rocm_attn.integrations.flashinfer.requests import use_provider as use_provider
from rocm_attn.integrations.flashinfer.rope import (
    apply_llama31_rope as apply_llama31_rope, apply_llama31_rope_inplace as apply_llama31_rope_inplace,
    apply_llama31_rope_pos_ids as apply_llama31_rope_pos_ids,
    apply_llama31_rope_pos_ids_inplace as apply_llama31_rope_pos_ids_inplace, apply_rope as apply_rope,
    apply_rope_inplace as apply_rope_inplace, apply_rope_pos_ids as apply_rope_pos_ids,
    apply_rope_pos_ids_inplace as apply_rope_pos_ids_inplace,
    apply_rope_with_cos_sin_cache as apply_rope_with_cos_sin_cache,
    apply_rope_with_cos_sin_cache_inplace as apply_rope_with_cos_sin_cache_inplace,
)
from rocm_attn.integrations.flashinfer.sampling import (
    chain_speculative_sampling as chain_speculative_sampling, min_p_sampling_from_probs as min_p_sampling_from_probs,
    sampling_from_logits as sampling_from_logits, sampling_from_probs as sampling_from_probs, softmax as softmax,
    top_k_mask_logits as top_k_mask_logits, top_k_renorm_probs as top_k_renorm_probs,
    top_k_sampling_from_probs as top_k_sampling_from_probs,
    top_k_top_p_sampling_from_logits as top_k_top_p_sampling_from_logits,
    top_k_top_p_sampling_from_probs as top_k_top_p_sampling_from_probs, top_p_renorm_probs as top_p_renorm_probs,
    top_p_sampling_from_probs as top_p_sampling_from_probs,
)
from rocm_attn.integrations.flashinfer.sparse import (
    BlockSparseAttentionWrapper as BlockSparseAttentionWrapper,
    VariableBlockSparseAttentionWrapper as VariableBlockSparseAttentionWrapper,
)
