"""vLLM's indexer on a CPU, in torch: there vLLM refuses sparse layers, and has no kernel that chooses their keys.

Each part is named and called as vLLM does (model_executor/layers/sparse_attn_indexer.py), and written from its purpose.
Index keys are kept unrounded, at the slots of vLLM's own cache of them, which would keep them in 8 bits.
"""

from typing import Any

import torch
from torch import Tensor

_GET_BACKEND, _FORWARD, _BUILDER, _BLOCKS, _ROUND, _STREAM, _EVENT = (
    "get_attn_backend_cls",
    "forward",
    "get_builder_cls",
    "get_supported_kernel_block_sizes",
    "per_token_group_quant_fp8",
    "_create_side_stream",
    "_create_event",
)


def give_indexer() -> None:
    """Makes vLLM's platform accept sparse layers for the requested backend, and chooses keys in torch."""
    from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
    from vllm.model_executor.models import deepseek_v2
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.mla import index_group
    from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend

    backend_of = CpuPlatform.get_attn_backend_cls

    def get_attn_backend_cls(cls: Any, /, selected_backend: Any, attn_selector_config: Any, **more: Any) -> str:
        if attn_selector_config.use_sparse:
            return str(selected_backend.get_path())
        return str(backend_of(selected_backend, attn_selector_config, **more))

    setattr(CpuPlatform, _GET_BACKEND, classmethod(get_attn_backend_cls))
    setattr(SparseAttnIndexer, _FORWARD, choose)
    setattr(DeepseekV32IndexerBackend, _BUILDER, staticmethod(_builder))
    setattr(DeepseekV32IndexerBackend, _BLOCKS, staticmethod(lambda kv_cache_spec=None: [16]))
    setattr(deepseek_v2, _ROUND, _as_they_are)
    for name in (_STREAM, _EVENT):  # for kernels that run next to others
        setattr(index_group, name, lambda *_: None)


def _as_they_are(q: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """Returns queries that are not rounded to 8 bits, and their scales."""
    return q, q.new_ones(q.shape[0], 1)


def _builder() -> type:
    from vllm.v1.attention.backend import AttentionMetadataBuilder

    class Builder(AttentionMetadataBuilder):  # type: ignore[misc]
        """Passes on the runner's description of a step."""

        def __init__(self, *given: Any) -> None:
            super().__init__(*given)

        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            return common_attn_metadata

    return Builder


def choose(self: Any, hidden_states: Tensor, q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """Keeps a step's index keys, and writes the places of the best keys for each token, best first, then -1."""
    from vllm.forward_context import get_forward_context

    metadata = get_forward_context().attn_metadata
    chosen: Tensor = self.topk_indices_buffer
    if not isinstance(metadata, dict):  # vLLM measures memory
        return chosen
    common, cache = metadata[self.k_cache.prefix], self.k_cache
    keys = vars(cache).setdefault("kept_keys", torch.zeros(cache.kv_cache.shape[0], 16, self.head_dim))
    slots = common.slot_mapping
    is_stored = slots >= 0
    keys.view(-1, self.head_dim)[slots[is_stored]] = k[: len(slots)][is_stored].float()
    chosen[: hidden_states.shape[0]] = -1
    starts = common.query_start_loc.tolist()
    for seq in range(common.num_reqs):
        first, end, length = starts[seq], starts[seq + 1], int(common.seq_lens[seq])
        blocks = common.block_table_tensor[seq, : -(-length // 16)].long()
        mine = keys[blocks].view(-1, self.head_dim)[:length]
        for token in range(first, end):
            sees = length - (end - 1 - token)
            scores = weights[token].float() @ (q[token].float() @ mine[:sees].T).relu()
            best = scores.topk(min(self.topk_tokens, sees)).indices
            chosen[token, : len(best)] = best.int()
    return chosen
