"""vLLM's attention backend for MHA and GQA layers: the classes that vLLM looks for, implemented by KVGroup.

It supports both of vLLM's ways to ask for a KV cache: get_kv_cache_shape and get_kv_cache_stride_order up to 0.28, and
supported_kv_cache_layouts from 0.29 on. vLLM packs K and V into one row, so pages have strides, and kernels that need
contiguous pages are not chosen.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
import vllm.envs
from torch import Tensor
from vllm.config import CUDAGraphMode, VllmConfig, get_current_vllm_config, get_layers_from_vllm_config
from vllm.distributed.parallel_state import get_dcp_group, get_tp_group
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    MultipleOf,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec

from rocm_attn.capture.engine_kernels import StepsAhead, log_run_ahead
from rocm_attn.errors import Unsupported, WrongState
from rocm_attn.external import ExternalAttention, ExternalOptions
from rocm_attn.integrations.engine_settings import fault_policy, provider
from rocm_attn.integrations.plugins import VLLM, log_kernels
from rocm_attn.integrations.vllm.drafters import DraftMetadata, let_drafters_take_ours
from rocm_attn.integrations.vllm.group import GroupLayer, GroupOptions, GroupSizes, KVGroup, Lend, StepOfGroup
from rocm_attn.integrations.vllm.layer_terms import (
    ATTENTION_TYPES,
    CROSS,
    ENCODERS,
    KV_CACHE_DTYPES,
    CacheTerms,
    LayerTerms,
    MaskTerms,
)
from rocm_attn.integrations.vllm.own_tokens import OwnTokens
from rocm_attn.integrations.vllm.shared_context import ContextSharing, SharedContextGroup
from rocm_attn.integrations.vllm.steps import GQA_GRAPHS, CommonMetadata
from rocm_attn.integrations.vllm.whole_images import require_room_for_images
from rocm_attn.machine.agreement import alone, among
from rocm_attn.machine.settings import read_settings
from rocm_attn.problem import Problem, Scales
from rocm_attn.truth.adopted import log_truth

try:
    from vllm.v1.kv_cache_interface import KVCacheLayout
except ImportError:  # before 0.29
    KVCacheLayout = None


LOG_TRUTH = partial(log_truth, VLLM.log)
LOG_RUN_AHEAD = partial(log_run_ahead, VLLM.log)
# The builder that vLLM derives from a backend's for layers with local chunks (layers/attention/
# chunked_local_attention.py), and attributes of layers: the keys of a chunk, whether they may see images, and whether a
# window hides a part of an image.
_CHUNKED_BUILDER, _CHUNK, _HAS_IMAGES = "ChunkedLocalAttentionBuilder", "attention_chunk_size", "use_mm_prefix"
# The one for layers that read another's KV (v1/attention/backends/utils.py, kv_sharing_fast_prefill): in a step with
# several new tokens of a sequence it leaves the tokens without logits out.
_FAST_BUILDER = "FastPrefillAttentionBuilder"
_KEEPS_WINDOW = "mm_prefix_clamp_sliding_window"


class Answers(AttentionBackend):
    """The answers to vLLM's questions before it builds a model that are the same for layers of any kind."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[int | MultipleOf]:
        return [16, 32, 64, 128]

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True


class RocmAttnBackend(Answers):
    """GQA layers."""

    forward_includes_kv_cache_update: bool = True
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(KV_CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[RocmAttnImpl]:
        VLLM.require_served()
        return RocmAttnImpl

    @staticmethod
    def get_builder_cls() -> type[RocmAttnBuilder]:
        return RocmAttnBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        return KVCacheLayout.LBNHC, KVCacheLayout.LBHNC

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Returns the order that puts tokens before heads."""
        return (1, 0, 3, 2, 4) if include_num_layers_dimension else (0, 2, 1, 3)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return str(getattr(attn_type, "value", attn_type)) in ATTENTION_TYPES

    supports_mm_prefix = supports_non_causal = supports_per_head_quant_scales = supports_sink = supports_sliding_window


Group = KVGroup | SharedContextGroup | OwnTokens


@dataclass
class RocmAttnMetadata(DraftMetadata):
    """The data of a step that vLLM passes to each layer.

    causal:       as vLLM has it; its proposer of block drafts reads it
    slot_mapping: of the tokens of encoders, in cross attention; set by vLLM
    """

    group: Group
    step: StepOfGroup
    causal: bool | Tensor
    slot_mapping: Tensor | None = None


class RocmAttnBuilder(AttentionMetadataBuilder[RocmAttnMetadata]):
    """The metadata builder. There is one per attention group and micro-batch of vLLM's."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport[GQA_GRAPHS]

    def __init_subclass__(cls, **named: Any) -> None:
        """Takes back what vLLM adds for local chunks: it cuts a step on the host, into a sequence for each chunk.

        Our kernels know chunks, so a step stays whole, and its graphs serve any lengths.
        """
        super().__init_subclass__(**named)
        if cls.__name__ == _CHUNKED_BUILDER:
            for name in ("build", "get_cudagraph_support", "update_block_table"):
                delattr(cls, name)

    def __init__(self, kv_cache_spec: Any, layer_names: Sequence[str], vllm_config: VllmConfig, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        VLLM.require_served()
        require_parallel(vllm_config, PROMPTS_SHARED)
        require_whole_steps(vllm_config)
        let_drafters_take_ours(vllm_config)
        if getattr(vllm_config, "diffusion_config", None) is not None:
            raise Unsupported(
                "the model denoises blocks (diffusion_config), next to prompts that are causal in the same step; "
                "choose another attention backend for this model"
            )
        if getattr(vllm_config.model_config, "rswa_window", None) is not None:  # 0.26 does not ask a backend for it
            raise Unsupported(
                "the model has reference sliding windows (rswa_window), outside of which a new token sees the prompt "
                "alone, and no kernel here has them; choose another attention backend for this model"
            )
        if sinks := getattr(kv_cache_spec, "sink_len", None):
            raise Unsupported(
                f"the model has {sinks} static sinks before each sequence, and vLLM writes their K and V in another "
                "layout of the cache (static_sink_attention.py); choose another attention backend for this model"
            )
        cache = CacheTerms(
            kv_cache_spec.block_size,
            getattr(kv_cache_spec, "head_size_v", None) or kv_cache_spec.head_size,
            vllm_config.model_config.dtype,
            current_platform.fp8_dtype(),
        )
        layers = layers_of(vllm_config, layer_names)
        # Causality is said of all layers of a builder.
        is_open = getattr(kv_cache_spec, "non_causal", False) or any(each.impl.is_open for each in layers.values())
        # A model of several parts makes its layers of text with a config of its own, which may not know of images.
        has_images = not is_open and bool(vllm_config.model_config.is_mm_prefix_lm)
        has_images |= any(getattr(each, _HAS_IMAGES, False) for each in layers.values())
        if has_images:
            require_room_for_images(vllm_config.scheduler_config)
        seeing = [name for name, layer in layers.items() if has_images and sees_images(layer, vllm_config.model_config)]
        self._hides_images = has_images and not seeing
        of_group = {}
        for name, layer in layers.items():
            writer = _writer_of(layer, vllm_config)
            problem = _problem_of(layer, writer, cache, is_open=is_open, has_images=name in seeing)
            terms = layer.impl.terms
            of_group[name] = GroupLayer(writer, problem, terms.head_weights, terms.stores)
        self.group: Group
        kinds = {layer.impl.terms.kind for layer in layers.values()}
        if not kinds.isdisjoint(ENCODERS):
            self.group = OwnTokens(of_group, _sizes(vllm_config), device, _options(vllm_config, 1))
        elif CROSS in kinds:
            require_parallel(vllm_config, DECODES_SHARED)
            self.group = _new_cross_group(of_group, vllm_config, device)
        elif shares_context(vllm_config, kv_cache_spec):
            for name, layer in layers.items():
                _require_own_kv(name, layer.impl.terms)
            self.group = _new_shared_group(of_group, vllm_config, device)
        else:
            self.group = new_group(of_group, vllm_config, device)
        for layer in layers.values():
            layer.impl.group = self.group
        if read_settings(os.environ).watch_states:
            from rocm_attn.integrations.vllm import state_hooks

            state_hooks.watch(vllm_config)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> AttentionCGSupport:
        """Returns NEVER if ranks share contexts, because their exchange was never captured, and for encoders.

        With kv_sharing_fast_prefill, steps of one token per sequence: vLLM's runner V1 replays graphs of whole steps
        and describes others, whose tokens are fewer.
        """
        if shares_context(vllm_config, kv_cache_spec) or isinstance(kv_cache_spec, EncoderOnlyAttentionSpec):
            return AttentionCGSupport.NEVER
        is_fast = cls.__name__ == _FAST_BUILDER
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE if is_fast else cls._cudagraph_support

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonMetadata, fast_build: bool = False
    ) -> RocmAttnMetadata:
        """Begins a step.

        fast_build:        whether it is one of a draft model
        common_prefix_len: not read. vLLM 0.26 counts tokens that all requests share, for builders with cascades. Block
                           tables and lengths are those of whole requests, so what tokens see is the same
        """
        # A draft is no token of an image, even if the prompt has one in its place.
        is_draft = fast_build and common_attn_metadata.max_query_len <= 1
        is_without = is_draft or self._hides_images
        common = _without_images(common_attn_metadata) if is_without else common_attn_metadata
        return RocmAttnMetadata(self.group, self.group.begin(common), common.causal)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonMetadata) -> RocmAttnMetadata:
        if not isinstance(self.group, KVGroup):
            whose = "encoders" if isinstance(self.group, OwnTokens) else "ranks that share contexts"
            raise WrongState(f"vLLM captures steps of {whose}, which the backend does not declare")
        step = self.group.begin_capture(common_attn_metadata)
        return RocmAttnMetadata(self.group, step, common_attn_metadata.causal)


class RocmAttnImpl(AttentionImpl[RocmAttnMetadata]):
    """The attention of one layer. Raises Unsupported for terms that are not served."""

    can_return_lse_for_decode: bool = True
    supports_dcp: bool = True

    def __init__(self, *given: Any, **named: Any) -> None:
        self.terms = terms = LayerTerms.read(given, named)
        # Attributes that vLLM reads.
        self.num_heads, self.head_size, self.scale = terms.num_heads, terms.head_size, terms.scale
        self.num_kv_heads = terms.num_kv_heads or terms.num_heads
        self.sliding_window, self.alibi_slopes = terms.sliding_window, terms.alibi_slopes
        self.kv_cache_dtype, self.attn_type = terms.kv_cache_dtype, terms.attn_type
        self.kv_sharing_target_layer_name = terms.kv_sharing_target_layer_name
        self.sinks = terms.sinks
        # True if steps may be not causal: vLLM says so of a model while it makes its layers.
        self.is_open = bool(get_current_vllm_config().attention_config.use_non_causal)
        self.group: Group | None = None

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
        """Stores K and V of tokens that are in no step: vLLM's proposer of block drafts makes them of hidden states."""
        if isinstance(self.group, SharedContextGroup):
            raise Unsupported(
                f"{layer.layer_name} drafts blocks, whose K and V vLLM stores apart from steps, which is not served if "
                f"ranks share contexts; set {DECODES_SHARED} to 1"
            )
        if not isinstance(self.group, KVGroup):
            raise WrongState(f"vLLM stores K and V of {layer.layer_name} before it has a builder of its own")
        self.group.store_to(layer.layer_name, kv_cache, key, value, slots)

    def forward(  # its parameters are vLLM's
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: RocmAttnMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Stores the step's K and V, and writes its attention to output. Without metadata, vLLM is measuring memory."""
        if attn_metadata is None:
            return output.fill_(0)
        if output_scale is not None or output_block_scale is not None:
            raise Unsupported(
                "vLLM asks for quantised output, which rocm_attn does not write; set fuse_attn_quant to false in the "
                "pass config"
            )
        group, step, name = attn_metadata.group, attn_metadata.step, layer.layer_name
        if self.terms.stores and key is not None and value is not None:
            slots = attn_metadata.slot_mapping
            if self.terms.kind != CROSS:
                group.store(name, step, kv_cache, key, value)
            elif slots is not None and len(slots):  # encoders have new tokens
                self.do_kv_cache_update(layer, key, value, kv_cache, slots)
        group.attend(name, step, kv_cache, query, output)
        return output


def layers_of(vllm_config: VllmConfig, layer_names: Sequence[str]) -> Mapping[str, Any]:
    """Returns vLLM's layers by name, in the order of names."""
    found = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, list(layer_names))
    return {name: found[name] for name in layer_names}


def _writer_of(layer: Any, vllm_config: VllmConfig) -> Any:
    """Returns the layer that stores the KV which a layer reads: another one, or itself."""
    name = getattr(layer, "kv_sharing_target_layer_name", None)
    return layer if name is None else layers_of(vllm_config, [name])[name]


def _problem_of(layer: Any, writer: Any, cache: CacheTerms, *, is_open: bool, has_images: bool) -> Problem:
    """Returns the problem of a layer whose heads have their own K and V. Raises Unsupported, BadProblem.

    writer:     the layer that stores its KV
    is_open:    whether its steps may be not causal
    has_images: whether they may have images
    """
    mask = MaskTerms(
        chunk=getattr(layer, _CHUNK, 0),
        spans=has_images or is_open,
        # Models for which vLLM sets it keep their windows, the others do not.
        spans_pass_window=has_images and not getattr(layer, _KEEPS_WINDOW, False),
    )
    if writer._k_scale.numel() > 1:
        cache = replace(cache, fp8_scales=Scales.HEAD)
    problem: Problem = layer.impl.terms.problem(cache, mask)
    return problem


def sees_images(layer: Any, model_config: Any) -> bool:
    """True if tokens of an image see each other in a layer of a model with such images (is_mm_prefix_lm).

    In Gemma 4 they do in layers with a window alone: vLLM's model takes the images from what its own backends have made
    of a step for the others (gemma4_mm.py, _clear_mm_prefix_for_full_attn_layers).
    """
    is_gemma4 = getattr(model_config.hf_text_config, "use_bidirectional_attention", None) == "vision"
    return not is_gemma4 or bool(getattr(layer, _KEEPS_WINDOW, False))


def _without_images(common: CommonMetadata) -> CommonMetadata:
    """Returns a step's metadata without the images of its prompts."""
    shown = copy(common)
    shown.mm_req_doc_ranges = None  # type: ignore[misc]  # vLLM's own class may be written to
    return shown


def require_whole_steps(vllm_config: VllmConfig) -> None:
    """Raises Unsupported for micro-batches."""
    if getattr(vllm_config.parallel_config, "use_ubatching", False):
        raise Unsupported(
            "vLLM runs micro-batches in threads of their own, and a step is run by the thread that has begun it here; "
            "leave out --enable-dbo and --ubatch-size"
        )


def has_name(name: str) -> bool:
    """True if this vLLM has a backend of this name."""
    return name in AttentionBackendEnum.__members__


def new_group(
    layers: Mapping[str, GroupLayer],
    vllm_config: VllmConfig,
    device: torch.device,
    shards: int = 1,
    tried: Callable[[ExternalAttention, Lend], None] = LOG_TRUTH,
    ran_ahead: Callable[[ExternalAttention, StepsAhead], None] = LOG_RUN_AHEAD,
) -> KVGroup:
    """Makes the group of a builder's layers, with options from the environment.

    shards: ranks that share sequences
    tried, ran_ahead: see GroupOptions; not called if ranks share sequences, because needles need whole ones, and steps
            have other lengths on each rank
    """
    options = _options(vllm_config, shards)
    if shards == 1:
        options = replace(options, tried=tried, ran_ahead=ran_ahead)
    return KVGroup(layers, _sizes(vllm_config), device, options)


def shares_context(vllm_config: VllmConfig, kv_cache_spec: Any) -> bool:
    """True if ranks share the contexts of a KV cache group. In later releases they do not for windows."""
    is_requested = vllm_config.parallel_config.decode_context_parallel_size > 1
    return is_requested and bool(getattr(kv_cache_spec, "dcp_sharded", True))


def _new_shared_group(
    layers: Mapping[str, GroupLayer], vllm_config: VllmConfig, device: torch.device
) -> SharedContextGroup:
    """Like new_group, but for layers whose contexts ranks share."""
    if is_batch_invariant():
        raise Unsupported(
            "VLLM_BATCH_INVARIANT is not served if ranks share contexts, because a prompt's tokens and their context "
            f"are summed apart, and the batch decides where a prompt is cut; set {DECODES_SHARED} to 1"
        )
    sharing = ContextSharing(get_dcp_group(), vllm_config.parallel_config.cp_kv_cache_interleave_size)
    return SharedContextGroup(layers, _sizes(vllm_config), device, _options(vllm_config, 1), sharing)


def _new_cross_group(layers: Mapping[str, GroupLayer], vllm_config: VllmConfig, device: torch.device) -> KVGroup:
    """Like new_group, but for layers of cross attention. A prompt may have more tokens than its encoder's."""
    sizes, options = _sizes(vllm_config), _options(vllm_config, 1)
    encoded = vllm_config.scheduler_config.max_num_encoder_input_tokens
    external = replace(options.external, short_kv=True)
    options = replace(options, external=external, has_slots=False, is_cross=True)
    return KVGroup(layers, replace(sizes, kv_len=max(sizes.kv_len, encoded)), device, options)


def _sizes(vllm_config: VllmConfig) -> GroupSizes:
    scheduler, compilation = vllm_config.scheduler_config, vllm_config.compilation_config
    largest = max(compilation.cudagraph_capture_sizes or (), default=0)
    return GroupSizes(
        num_seqs=scheduler.max_num_seqs,
        num_tokens=max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs, largest),
        kv_len=vllm_config.model_config.max_model_len,
    )


def _options(vllm_config: VllmConfig, shards: int) -> GroupOptions:
    has_slots = shards == 1
    external = ExternalOptions(
        provider=provider(os.environ),
        deterministic=is_batch_invariant(),
        page_strides=VLLM.packs_rows,
        short_kv=not has_slots,  # a rank may have no token of a sequence that has a new one
        on_fault=fault_policy(os.environ, VLLM.log),
    )
    ranks = get_tp_group()
    agree = among(ranks.cpu_group) if ranks.world_size > 1 else alone
    is_wide = partial(_captures_prompts, vllm_config.compilation_config)
    return GroupOptions(external, agree, has_slots, is_wide, partial(log_kernels, VLLM))


def is_batch_invariant() -> bool:
    """True if vLLM is to give a request the same bits in any batch."""
    return bool(getattr(vllm.envs, "VLLM_BATCH_INVARIANT", False))


def _require_own_kv(name: str, terms: LayerTerms) -> None:
    """Raises Unsupported for a layer that reads another's KV, also of new tokens."""
    if not terms.stores:
        raise Unsupported(
            f"{name} reads the KV of {terms.kv_sharing_target_layer_name}, which is not served if ranks share "
            f"contexts; set {DECODES_SHARED} to 1"
        )


def _captures_prompts(compilation: Any) -> bool:
    """True if full graphs serve prompts too. Ask at a capture: vLLM settles its mode after it has made builders."""
    mode = compilation.cudagraph_mode
    return mode is not None and not mode.separate_routine() and mode.mixed_mode() == CUDAGraphMode.FULL


DECODES_SHARED, PROMPTS_SHARED = "decode_context_parallel_size", "prefill_context_parallel_size"


def require_parallel(vllm_config: VllmConfig, *names: str) -> None:
    """Raises Unsupported if vLLM uses one of the named kinds of context parallelism, which layers do not serve."""
    parallel = vllm_config.parallel_config
    for name in names:
        if (size := getattr(parallel, name, 1)) > 1:
            raise Unsupported(f"{name} is {size}; rocm_attn serves 1 in vLLM, so leave it out")
