"""The backend of MLA layers that attend to keys selected by an indexer (DeepSeek-V3.2, GLM-5).

vLLM's indexer selects. It keeps its keys in a cache of its own, and writes positions of keys into a buffer that layers
share. Our part is the attention over them, for decodes and prompts, in absorbed form over vLLM's latent pages, which
may be records (fp8_ds_mla).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention.sparse_mla_attention import SparseMLACommonImpl
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder

from rocm_attn.capture.prewarm import MOST_TOKENS
from rocm_attn.errors import Unsupported
from rocm_attn.integrations.plugins import VLLM
from rocm_attn.integrations.vllm import SPARSE_MLA_NAME
from rocm_attn.integrations.vllm.backend import DECODES_SHARED, PROMPTS_SHARED, has_name, require_parallel
from rocm_attn.integrations.vllm.drafters import DraftMetadata, let_drafters_take_ours
from rocm_attn.integrations.vllm.group import KVGroup, StepOfGroup, give_chosen
from rocm_attn.integrations.vllm.layer_terms import LATENT_CACHE_DTYPES, RECORDS
from rocm_attn.integrations.vllm.mla import RocmAttnMLABackend, StoresLatentRows, latent_group, terms_of
from rocm_attn.integrations.vllm.steps import MLA_GRAPHS, CommonMetadata
from rocm_attn.kernels.sparse.arguments import Indexing
from rocm_attn.problem import Indexer
from rocm_attn.truth.choosers import ByEngines

# The only records that vLLM stores: 512 codes, 4 float32 scales, 64 bfloat16.
_RECORD_BYTES = 656


class RocmAttnSparseMLABackend(RocmAttnMLABackend):
    """Sparse MLA layers."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = list(LATENT_CACHE_DTYPES)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """False: vLLM's indexer chooses keys, and its scores may depend on the batch."""
        return False

    @staticmethod
    def get_name() -> str:
        return SPARSE_MLA_NAME if has_name(SPARSE_MLA_NAME) else "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[RocmAttnSparseMLAImpl]:
        VLLM.require_served()
        return RocmAttnSparseMLAImpl

    @staticmethod
    def get_builder_cls() -> type[RocmAttnSparseMLABuilder]:
        return RocmAttnSparseMLABuilder

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Returns rows of head_size elements, or of the bytes of a record, which vLLM's writer makes of 512 + 64."""
        return num_blocks, block_size, _RECORD_BYTES if cache_dtype_str == RECORDS else head_size


@dataclass
class RocmAttnSparseMetadata(DraftMetadata):
    """The data of a step that vLLM passes to each layer. All tokens count as decodes: prompts have no attention apart.

    All names except the first two are vLLM's.
    """

    group: KVGroup
    step: StepOfGroup
    num_reqs: int
    num_actual_tokens: int
    num_decodes: int
    num_decode_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    topk_tokens: int
    num_prefills: int = 0
    prefill_max_seq_len: int = 0
    prefill: None = None
    decode: None = None


class RocmAttnSparseMLABuilder(AttentionMetadataBuilder[RocmAttnSparseMetadata]):
    """The metadata builder. There is one per attention group and micro-batch of vLLM's."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport[MLA_GRAPHS]

    def __init__(self, kv_cache_spec: Any, layer_names: Sequence[str], vllm_config: VllmConfig, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        VLLM.require_served()
        require_parallel(vllm_config, DECODES_SHARED, PROMPTS_SHARED)
        let_drafters_take_ours(vllm_config)
        if getattr(vllm_config.attention_config, "hisparse_config", None) is not None:
            raise Unsupported(
                "vLLM keeps latent rows on the host and a few of them on the device (HiSparse), and rocm_attn reads "
                "those of the block table; leave hisparse_config and HiSparseConnector out"
            )
        config = vllm_config.model_config.hf_text_config
        self.topk = int(config.index_topk)
        # The heads and the scale are those of vLLM's indexer, which selects before our attention is called.
        indexer = Indexer(int(config.index_n_heads), int(config.index_head_dim), Indexing(scale=1.0, top=self.topk))
        chosen = ByEngines(give_chosen)
        self.group = latent_group(kv_cache_spec, layer_names, vllm_config, device, MOST_TOKENS, chosen, indexer=indexer)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonMetadata, fast_build: bool = False
    ) -> RocmAttnSparseMetadata:
        return self._metadata(common_attn_metadata, self.group.begin(common_attn_metadata))

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonMetadata) -> RocmAttnSparseMetadata:
        return self._metadata(common_attn_metadata, self.group.begin_capture(common_attn_metadata))

    def _metadata(self, common: CommonMetadata, step: StepOfGroup) -> RocmAttnSparseMetadata:
        return RocmAttnSparseMetadata(
            self.group,
            step,
            num_reqs=common.num_reqs,
            num_actual_tokens=common.num_actual_tokens,
            num_decodes=common.num_reqs,
            num_decode_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            slot_mapping=common.slot_mapping,
            block_table=common.block_table_tensor,
            topk_tokens=self.topk,
        )


class RocmAttnSparseMLAImpl(StoresLatentRows, SparseMLACommonImpl[Any]):
    """The attention of one layer. Raises Unsupported for terms that are not served."""

    can_return_lse_for_decode: bool = False
    supports_dense_mha_prefill: bool = False
    supports_dcp: bool = False
    supports_pcp: bool = False

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.terms = terms_of(SparseMLACommonImpl, given, named)
        self.supports_quant_query_input = False

    def record_logical_topk_ready(self) -> None:
        """Does nothing: the selection is read on the stream that wrote it."""

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[Tensor, None]:
        """Returns the attention of the step's tokens over the latent rows that vLLM's indexer has selected for each."""
        chosen = self.topk_indices_buffer
        if chosen is None or chosen.shape[-1] != attn_metadata.topk_tokens:
            found = "no buffer of selected keys" if chosen is None else f"{chosen.shape[-1]} keys selected per token"
            raise Unsupported(
                f"{layer.layer_name} has {found}; rocm_attn attends to index_topk of them, "
                f"{attn_metadata.topk_tokens}, so choose another attention backend for this model"
            )
        queries = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        out = queries.new_empty(*queries.shape[:2], self.kv_lora_rank)
        attn_metadata.group.attend_chosen(
            layer.layer_name, attn_metadata.step, kv_c_and_k_pe_cache, chosen, queries, out
        )
        return out, None
