"""Hooks for models with latent attention: they always attend over latent rows, and our kernels select among them."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from rocm_attn.integrations.sglang.hooks import AttentionHooks
from rocm_attn.integrations.sglang.indexers import project

_INDEXER = "sglang.srt.layers.attention.dsa.dsa_indexer.Indexer.forward"


def attend_over_latent_rows(names: Sequence[str]) -> None:
    """Makes models ask backends of these names for attention over latent rows, in every step."""
    for name in names:
        AttentionBackendRegistry.register(name, lambda attention, batch: AttnForwardMethod.MLA)


@cache
def choose_by_our_kernels() -> None:
    """Makes indexers ask the backend of a step to select keys, if it is ours. Call it once per process."""
    HookRegistry.register(_INDEXER, _choose, HookType.AROUND)
    HookRegistry.apply_hooks()


def _choose(
    original: Callable[..., Any],
    module: Any,
    x: Any,
    q_lora: Any,
    positions: Any,
    forward_batch: Any,
    layer_id: int,
    **named: Any,
) -> Any:
    backend = get_attn_backend().get_indexer_metadata(layer_id, forward_batch)
    if not isinstance(backend, AttentionHooks):
        return original(module, x, q_lora, positions, forward_batch, layer_id, **named)
    if forward_batch.forward_mode.is_idle():  # attention is not asked then
        return None
    return backend.choose(layer_id, project(module, x, q_lora, positions))
