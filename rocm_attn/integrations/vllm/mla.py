"""The backend of MLA layers: decode in absorbed form by our kernels, over vLLM's latent pages.

vLLM splits a step. The decodes come first and run here; prompts run on its own prefill backends. These cut a prompt's
context by the number of prompts in the step, so if a request is to have the same bits in any batch, all tokens count as
decodes. vLLM stores the latent rows itself, before it asks for attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport

from rocm_attn.capture.prewarm import MOST_TOKENS
from rocm_attn.errors import Unsupported
from rocm_attn.integrations.plugins import VLLM
from rocm_attn.integrations.vllm import MLA_NAME
from rocm_attn.integrations.vllm.backend import (
    Answers,
    has_name,
    is_batch_invariant,
    layers_of,
    new_group,
    require_whole_steps,
)
from rocm_attn.integrations.vllm.group import GroupLayer, KVGroup, StepOfGroup, forget_empty_parts
from rocm_attn.integrations.vllm.latent_probe import LatentProbe
from rocm_attn.integrations.vllm.layer_terms import KV_CACHE_DTYPES, PLAIN_DTYPES, CacheTerms, LayerTerms
from rocm_attn.integrations.vllm.steps import MLA_GRAPHS, CommonMetadata
from rocm_attn.truth.choosers import BY_INDEXERS, Choosers


class RocmAttnMLABackend(Answers, MLACommonBackend):
    """MLA layers."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = list(KV_CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        return MLA_NAME if has_name(MLA_NAME) else "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[RocmAttnMLAImpl]:
        VLLM.require_served()
        return RocmAttnMLAImpl

    @staticmethod
    def get_builder_cls() -> type[RocmAttnMLABuilder]:
        return RocmAttnInvariantMLABuilder if is_batch_invariant() else RocmAttnMLABuilder

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """True if steps are not split by lengths on the host, which vLLM 0.33 leaves as they are where the device trims
        drafts (enable_adaptive_verification)."""
        return cls.is_sparse() or is_batch_invariant()

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Returns [], which allows any size: kernels are chosen when the layers are known."""
        return []


@dataclass
class RocmAttnDecodes(MLACommonDecodeMetadata):
    """The decodes of a step."""

    group: KVGroup
    step: StepOfGroup


class RocmAttnMLABuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """The metadata builder. There is one per attention group and micro-batch of vLLM's."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport[MLA_GRAPHS]
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.UNIFORM

    def __init__(self, kv_cache_spec: Any, layer_names: Sequence[str], vllm_config: VllmConfig, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        VLLM.require_served()
        most_new = min(self.reorder_batch_threshold, MOST_TOKENS)
        self.group = latent_group(kv_cache_spec, layer_names, vllm_config, device, most_new)
        self._captures = False

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> MLACommonMetadata:
        self._captures = True
        try:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        finally:
            self._captures = False

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> MLACommonMetadata:
        self._common = common_attn_metadata
        return super().build(common_prefix_len, common_attn_metadata, fast_build)

    def _build_decode(self, **given: Any) -> RocmAttnDecodes:
        """Begins a step of the decodes. given: MLACommonMetadataBuilder's arguments; 0.26 has no max_query_len."""
        common = self._common
        decodes = CommonMetadata(
            query_start_loc=given["query_start_loc_device"],
            seq_lens=given["seq_lens_device"],
            num_reqs=given["seq_lens_device"].shape[0],
            num_actual_tokens=given["num_decode_tokens"],
            max_query_len=min(common.max_query_len, self.reorder_batch_threshold),
            max_seq_len=given["max_seq_len"],
            block_table_tensor=given["block_table_tensor"],
            slot_mapping=common.slot_mapping,
            causal=common.causal,
        )
        begin = self.group.begin_capture if self._captures else self.group.begin
        return RocmAttnDecodes(
            given["block_table_tensor"],
            given["seq_lens_device"],
            given["dcp_tot_seq_lens_device"],
            self.group,
            begin(decodes),
        )


class RocmAttnInvariantMLABuilder(RocmAttnMLABuilder):
    """The builder if a request is to have the same bits in any batch: its prompts run here, too."""

    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN
    # Tokens of the longest request that vLLM counts as a decode: of any.
    reorder_batch_threshold: int = 1 << 30

    def __init__(self, kv_cache_spec: Any, layer_names: Sequence[str], vllm_config: VllmConfig, device: Any) -> None:
        if vllm_config.parallel_config.decode_context_parallel_size > 1:
            raise Unsupported(
                "VLLM_BATCH_INVARIANT is not served for MLA layers whose ranks share sequences, because vLLM merges "
                "the parts of prompts itself; set decode_context_parallel_size to 1"
            )
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)


def latent_group(
    kv_cache_spec: Any,
    layer_names: Sequence[str],
    vllm_config: VllmConfig,
    device: Any,
    most_new: int,
    choosers: Choosers = BY_INDEXERS,
    **of_problem: Any,
) -> KVGroup:
    """Returns the group of a builder's MLA layers.

    most_new:   new tokens of a sequence in steps of the group, at most
    choosers:   of the layers with an indexer
    of_problem: fields of each layer's problem
    Raises Unsupported.
    """
    require_whole_steps(vllm_config)
    shards = vllm_config.parallel_config.decode_context_parallel_size
    dtypes = vllm_config.model_config.dtype, current_platform.fp8_dtype()
    cache = CacheTerms(kv_cache_spec.block_size, 0, *dtypes, shards)
    layers = layers_of(vllm_config, layer_names)
    on_cpu = torch.device(device).type == "cpu"
    # vLLM has no kernel for CPUs that stores latent rows as codes.
    if on_cpu and any(layer.impl.terms.kv_cache_dtype not in PLAIN_DTYPES for layer in layers.values()):
        raise Unsupported("latent rows are not stored in FP8 on a CPU; leave --kv-cache-dtype at auto there")
    for name, layer in layers.items():
        _require_whole_queries(name, layer)
    of_group = {
        name: GroupLayer(layer, replace(layer.impl.terms.latent_problem(cache, layer.impl.kv_lora_rank), **of_problem))
        for name, layer in layers.items()
    }
    probe = LatentProbe([*layers.values()], VLLM.log, most_new, choosers)
    return new_group(of_group, vllm_config, device, shards, probe, probe.ahead)


def _require_whole_queries(name: str, layer: Any) -> None:
    """Raises Unsupported for a layer that divides a part of its queries by their scale, and leaves the rotated one."""
    divides = getattr(layer, "is_aiter_triton_fp4_bmm_enabled", False)
    if divides and layer.impl.terms.kv_cache_dtype not in PLAIN_DTYPES and float(layer._q_scale) != 1.0:
        raise Unsupported(
            f"{name} has queries of scale {float(layer._q_scale)}, by which AITER's product in FP4 divides a part of "
            "them; leave VLLM_ROCM_USE_AITER_FP4BMM out"
        )


_OF_LAYERS = 10  # the number of leading arguments that all implementations share


def terms_of(impl: type, given: Sequence[Any], named: Mapping[str, Any]) -> LayerTerms:
    """Returns the terms of a constructor with its own class's parameters. Raises Unsupported."""
    names = list(inspect.signature(impl).parameters)
    terms = dict(zip(names, given, strict=False)) | dict(named)
    return LayerTerms.read([terms[name] for name in names[:_OF_LAYERS]], {})


class StoresLatentRows:
    """Stores latent rows like vLLM, also on CPUs, where vLLM has no kernel for it."""

    def do_kv_cache_update(
        self, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, *encoding: Any
    ) -> None:
        """Stores latent rows, by vLLM's kernel if it has one. encoding: dtype of the cache, and its scale"""
        if kv_cache.device.type != "cpu" or not kv_cache.numel():
            super().do_kv_cache_update(  # type: ignore[misc]  # of vLLM's class among the bases
                kv_c_normed, k_pe, kv_cache, slot_mapping, *encoding
            )
            return
        is_stored = slot_mapping >= 0
        rows = torch.cat([kv_c_normed, k_pe.flatten(1)], dim=1)[: len(slot_mapping)]
        kv_cache.view(-1, kv_cache.shape[-1])[slot_mapping[is_stored]] = rows[is_stored].to(kv_cache.dtype)


class RocmAttnMLAImpl(StoresLatentRows, MLACommonImpl[MLACommonMetadata]):
    """The attention of one layer. Raises Unsupported for terms that are not served."""

    can_return_lse_for_decode: bool = True
    supports_dcp: bool = True
    supports_pcp: bool = False

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.terms = terms_of(MLACommonImpl, given, named)
        self.supports_quant_query_input = False
        self._dtype = torch.get_default_dtype()  # the model's, while vLLM makes its layers

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the decodes' attention over latent rows; if ranks share sequences, also its LSE, natural log."""
        decodes: RocmAttnDecodes = attn_metadata.decode
        queries = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        if queries.itemsize == 1:  # Kimi K3's model quantises them on ROCm, whatever the backend says
            queries = queries.to(self._dtype) * layer._q_scale
        tokens, heads = queries.shape[:2]
        out = queries.new_empty(tokens, heads, self.kv_lora_rank)
        lse = queries.new_empty(tokens, heads, dtype=torch.float32) if self.need_to_return_lse_for_decode else None
        decodes.group.attend(layer.layer_name, decodes.step, kv_c_and_k_pe_cache, queries, out, lse)
        if lse is not None:
            forget_empty_parts(decodes.seq_lens, out, lse)
        return out, lse
