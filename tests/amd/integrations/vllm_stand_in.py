"""The imports of our backend classes from vLLM 0.33, without it, from its source: base classes, config and layers.

Base classes keep their arguments, and do nothing else. GQA layers and latent ones are made as vLLM makes them.
"""

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from tests.amd.integrations.modules import modules_of

T = TypeVar("T")
OURS = "rocm_attn.integrations.vllm"
CLASSES = ("backend", "mla", "sparse_mla")
HEADS, KV_HEADS, DIM, SCALE = 4, 1, 16, 0.3
LATENT, TOP, BLOCK, NUM_BLOCKS, SEQS = 32, 8, 16, 5, 4


class CGSupport(Enum):
    """vLLM's AttentionCGSupport."""

    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class GraphMode(Enum):
    """vLLM's CUDAGraphMode."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2


class QueryLens(Enum):
    """vLLM's QueryLenSupport."""

    UNIFORM = "uniform"
    VARLEN = "varlen"


class Names(Enum):
    """vLLM's AttentionBackendEnum, in which our names have been registered."""

    CUSTOM = "CUSTOM"
    ROCM_ATTN_RT_MLA = "ROCM_ATTN_RT_MLA"
    ROCM_ATTN_RT_MLA_SPARSE = "ROCM_ATTN_RT_MLA_SPARSE"


class EncoderSpec:
    """vLLM's EncoderOnlyAttentionSpec."""

    block_size, head_size = BLOCK, DIM


class Backend:
    """vLLM's AttentionBackend and MLACommonBackend."""

    @classmethod
    def is_sparse(cls) -> bool:
        return False


class Builder(Generic[T]):
    """vLLM's AttentionMetadataBuilder."""

    def __init__(self, kv_cache_spec: Any, layer_names: Sequence[str], vllm_config: Any, device: Any) -> None:
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device


class LatentBuilder(Builder[T]):
    """vLLM's MLACommonMetadataBuilder."""

    reorder_batch_threshold: int = 1


class Impl(Generic[T]):
    """vLLM's AttentionImpl."""


class LatentImpl(Generic[T]):
    """vLLM's MLACommonImpl and SparseMLACommonImpl."""

    def __init__(  # its parameters are vLLM's
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        kv_lora_rank: int,
        topk_indices_buffer: Tensor | None = None,
    ) -> None:
        self.kv_lora_rank, self.topk_indices_buffer = kv_lora_rank, topk_indices_buffer


@dataclass
class Decodes:
    """vLLM's MLACommonDecodeMetadata."""

    block_table: Tensor
    seq_lens: Tensor
    dcp_tot_seq_lens: Tensor | None


@dataclass
class Config:
    """vLLM's VllmConfig, and the layers of a model.

    ranks:      parallel_config, its names and sizes
    has_images: whether tokens of images see each other
    model:      more of the config of a model
    text:       more of the config of a model's text part
    """

    layers: dict[str, Any]
    ranks: dict[str, int] = field(default_factory=dict)
    has_images: bool = False
    model: dict[str, Any] = field(default_factory=dict)
    text: dict[str, Any] = field(default_factory=dict)
    diffusion_config: object = None

    @property
    def parallel_config(self) -> Any:
        """All sizes are 1 except the given ones."""
        ones = {f"{kind}_context_parallel_size": 1 for kind in ("decode", "prefill")}
        return SimpleNamespace(**{**ones, "cp_kv_cache_interleave_size": 1, **self.ranks})

    @property
    def model_config(self) -> Any:
        """The config of a small model whose indexer selects TOP keys."""
        chosen = SimpleNamespace(index_topk=TOP, index_n_heads=4, index_head_dim=DIM, **self.text)
        own = {"dtype": torch.float32, "max_model_len": 64, "is_mm_prefix_lm": self.has_images}
        return SimpleNamespace(hf_text_config=chosen, **own, **self.model)

    speculative_config: ClassVar[object] = None
    attention_config = SimpleNamespace(use_non_causal=False)
    scheduler_config = SimpleNamespace(
        max_num_seqs=SEQS,
        max_num_batched_tokens=16,
        max_num_encoder_input_tokens=96,
        is_multimodal_model=False,
        disable_chunked_mm_input=True,
        long_prefill_token_threshold=0,
    )
    compilation_config = SimpleNamespace(cudagraph_capture_sizes=[4], cudagraph_mode=GraphMode.NONE)


def layers_of(config: Config, layer_type: type, names: Iterable[str]) -> dict[str, Any]:
    """Does the same as `get_layers_from_vllm_config`."""
    return {name: config.layers[name] for name in names}


def spec() -> Any:
    return SimpleNamespace(block_size=BLOCK, head_size=DIM)


# Attributes of a layer that its implementation does not get.
_OF_LAYERS = ("attention_chunk_size", "use_mm_prefix", "mm_prefix_clamp_sliding_window", "_k_scale", "_v_scale")


def gqa_layer(impl: Callable[..., Any], kv_heads: int = KV_HEADS, **terms: Any) -> Any:
    """Returns an attention layer with a cache of its own, as vLLM packs it.

    terms: given to its implementation, apart from attributes of the layer
    """
    dtype = torch.uint8 if terms.get("kv_cache_dtype", "auto") == "fp8" else torch.float32
    cache = torch.zeros(NUM_BLOCKS, BLOCK, kv_heads, 2 * DIM, dtype=dtype).transpose(1, 2)
    own = {name: terms.pop(name) for name in _OF_LAYERS if name in terms}
    made = impl(HEADS, DIM, SCALE, kv_heads, **terms)
    one = torch.ones(())
    return SimpleNamespace(
        **{"layer_name": "layer", "impl": made, "kv_cache": cache, "_k_scale": one, "_v_scale": one, **own}
    )


def chunked_builder(underlying: Any) -> Any:
    """Returns the builder that vLLM derives for layers with chunks (layers/attention/chunked_local_attention.py)."""

    class ChunkedLocalAttentionBuilder(underlying):  # type: ignore[misc]
        @classmethod
        def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> CGSupport:
            return CGSupport.NEVER

        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            raise AssertionError("vLLM cuts the step into a sequence for each chunk")

        def update_block_table(self, metadata: Any, blk_table: Tensor, slot_mapping: Tensor) -> Any:
            raise AssertionError("vLLM makes a block table for each chunk")

    return ChunkedLocalAttentionBuilder


def fast_builder(underlying: Any) -> Any:
    """Returns the builder that vLLM derives for layers that read another's KV (v1/attention/backends/utils.py)."""

    class FastPrefillAttentionBuilder(underlying):  # type: ignore[misc]
        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            raise AssertionError("vLLM leaves out the tokens that have no logits")

    return FastPrefillAttentionBuilder


def cross_builder(underlying: Any) -> Any:
    """Returns the builder that vLLM derives for cross attention (layers/attention/cross_attention.py).

    A step's encoder_slots are those that vLLM derives from blocks and lengths.
    """

    class CrossAttentionBuilder(underlying):  # type: ignore[misc]
        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            common = SimpleNamespace(**vars(common_attn_metadata))
            common.causal, common.seq_lens = False, common.encoder_seq_lens
            common.max_seq_len = int(common.encoder_seq_lens.max())
            metadata = super().build(common_prefix_len, common, fast_build)
            metadata.slot_mapping = common.encoder_slots
            return metadata

    return CrossAttentionBuilder


def cross_impl(underlying: Any) -> Any:
    """Returns the implementation that vLLM derives for cross attention, which passes arguments on by their places."""

    class CrossAttentionImpl(underlying):  # type: ignore[misc]
        def forward(
            self,
            layer: Any,
            query: Tensor,
            key: Tensor | None,
            value: Tensor | None,
            kv_cache: Tensor,
            attn_metadata: Any,
            output: Tensor,
            output_scale: Tensor | None = None,
            output_block_scale: Tensor | None = None,
        ) -> Any:
            given = layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            return super().forward(*given)

    return CrossAttentionImpl


def latent_layer(impl: Callable[..., Any], kv_cache_dtype: str = "auto", chosen: Tensor | None = None) -> Any:
    """Returns an MLA layer. chosen: the buffer that an indexer writes"""
    cache = torch.zeros(NUM_BLOCKS, BLOCK, LATENT + DIM)
    terms = (HEADS, LATENT + DIM, SCALE, 1, None, None, kv_cache_dtype, None, "decoder", None)
    made = impl(*terms, kv_lora_rank=LATENT, topk_indices_buffer=chosen)
    one = torch.ones(())
    return SimpleNamespace(
        layer_name="layer", impl=made, kv_cache=cache, kv_cache_dtype=kv_cache_dtype, _k_scale=one, _v_scale=one
    )


def step(kv_len: int = 3) -> Any:
    """Returns the CommonAttentionMetadata of a decode of one sequence, whose tokens are in block 1."""
    return SimpleNamespace(
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=torch.tensor([kv_len], dtype=torch.int32),
        num_reqs=1,
        num_actual_tokens=1,
        max_query_len=1,
        max_seq_len=kv_len,
        block_table_tensor=torch.tensor([[1, 0, 0, 0]], dtype=torch.int32).expand(SEQS, -1).contiguous()[:1],
        slot_mapping=torch.tensor([BLOCK + kv_len - 1]),
        causal=True,
        mm_req_doc_ranges=None,
    )


def drafters(platform: Any) -> type:
    """Returns SpecDecodeBaseProposer, whose list on ROCm is that of vLLM's own classes of metadata."""

    class SpecDecodeBaseProposer:
        def __init__(self) -> None:
            self.allowed_attn_types = (Decodes,) if platform.is_rocm() else None

        def propose(self, metadata: Any) -> None:
            if self.allowed_attn_types is not None and not isinstance(metadata, self.allowed_attn_types):
                raise ValueError("Unsupported attention metadata type for speculative decoding")

    return SpecDecodeBaseProposer


@contextmanager
def installed(version: str = "0.33.0", ranks: int = 2) -> Iterator[dict[str, Any]]:
    """Yields our modules of CLASSES by name, imported next to a vLLM of a version.

    ranks: number of ranks that share contexts, if a config asks for it
    """
    stand_ins = modules_of(_modules(version, ranks))
    names = [*stand_ins, *(f"{OURS}.{name}" for name in CLASSES)]
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    package = importlib.import_module(OURS)
    had = {name: vars(package).pop(name) for name in CLASSES if name in vars(package)}
    try:
        sys.modules.update(stand_ins)
        yield {name: importlib.import_module(f"{OURS}.{name}") for name in CLASSES}
    finally:
        for name in names:
            sys.modules.pop(name, None)
        for name in CLASSES:
            vars(package).pop(name, None)
        sys.modules.update(before)
        vars(package).update(had)


def _modules(version: str, ranks: int) -> dict[str, dict[str, Any]]:
    """Returns the values of vLLM's modules by their names."""
    sharing = SimpleNamespace(world_size=ranks, rank_in_group=0)
    platform = SimpleNamespace(fp8_dtype=lambda: torch.float8_e4m3fn, is_rocm=lambda: False)
    return {
        "vllm": {"__version__": version},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.config": {
            "CUDAGraphMode": GraphMode,
            "VllmConfig": Config,
            "get_current_vllm_config": lambda: Config({}),
            "get_layers_from_vllm_config": layers_of,
        },
        "vllm.distributed.parallel_state": {
            "get_dcp_group": lambda: sharing,
            "get_tp_group": lambda: SimpleNamespace(world_size=1),
        },
        "vllm.model_executor.layers.attention_layer_base": {"AttentionLayerBase": SimpleNamespace},
        "vllm.model_executor.layers.attention.mla_attention": {
            "MLACommonBackend": Backend,
            "MLACommonDecodeMetadata": Decodes,
            "MLACommonImpl": LatentImpl,
            "MLACommonMetadata": SimpleNamespace,
            "MLACommonMetadataBuilder": LatentBuilder,
            "QueryLenSupport": QueryLens,
        },
        "vllm.model_executor.layers.attention.sparse_mla_attention": {"SparseMLACommonImpl": LatentImpl},
        "vllm.platforms": {"current_platform": platform},
        "vllm.v1.attention.backend": {
            "AttentionBackend": Backend,
            "AttentionCGSupport": CGSupport,
            "AttentionImpl": Impl,
            "AttentionMetadataBuilder": Builder,
            "MultipleOf": int,
        },
        "vllm.v1.attention.backends.registry": {"AttentionBackendEnum": Names},
        "vllm.v1.kv_cache_interface": {
            "EncoderOnlyAttentionSpec": EncoderSpec,
            "KVCacheLayout": SimpleNamespace(LBNHC=0, LBHNC=1),
        },
        "vllm.v1.spec_decode.llm_base_proposer": {"SpecDecodeBaseProposer": drafters(platform)},
    }
