"""Registers our names in SGLang's lists."""

import os
import sys
from collections.abc import Callable
from typing import Any

from sglang.srt.arg_groups import choices
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from rocm_attn.integrations.sglang.names import NAME, ours
from rocm_attn.machine.settings import read_settings

_FACTORY = "sglang.srt.speculative.draft_utils.DraftBackendFactory"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_UPDATES = (
    "update_weights_from_disk",
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "end_weight_update",
)
_HOOKS = "rocm_attn.integrations.sglang.hooks"


def register_names() -> None:
    """Puts our backend into SGLang's lists, under its own name and those that it takes. May be called again."""
    adders: tuple[tuple[list[str], Callable[[list[str]], None]], ...] = (
        (choices.ATTENTION_BACKEND_CHOICES, choices.add_attention_backend_choices),
        (choices.DRAFT_ATTENTION_BACKEND_CHOICES, choices.add_draft_attention_backend_choices),
        (choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES, choices.add_deterministic_attention_backend_choices),
        (
            choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
            choices.add_radix_supported_deterministic_attention_backend_choices,
        ),
    )
    for names, add in adders:
        if NAME not in names:
            add([NAME])
    for name in ours():
        register_attention_backend(name)(_create)
    HookRegistry.register(f"{_FACTORY}.create_decode_backend", _draft_decode, HookType.AROUND)
    HookRegistry.register(f"{_FACTORY}.create_draft_extend_backend", _draft_extend, HookType.AROUND)
    for update in _UPDATES:
        HookRegistry.register(f"{_UPDATER}.{update}", _renew_weights, HookType.AFTER)


def _create(runner: Any) -> Any:
    # Imports are inside functions, so that a process that serves with another backend imports nothing of ours.
    from rocm_attn.integrations.sglang.backend import create
    from rocm_attn.integrations.sglang.latent import attend_over_latent_rows, choose_by_our_kernels

    if runner.use_mla_backend:
        attend_over_latent_rows(ours())
        choose_by_our_kernels()
    if read_settings(os.environ).watch_states and hasattr(runner.req_to_token_pool, "mamba_pool"):
        from rocm_attn.integrations.sglang.state_hooks import watch

        watch()
    return create(runner)


def _draft_decode(original: Callable[[Any], Any], factory: Any) -> Any:
    """Returns the backend of a draft model's steps, or None if it runs none."""
    name = _draft_name(factory, "decode")
    if name not in ours() or factory.speculative_num_steps <= 1:
        return original(factory)
    from rocm_attn.integrations.sglang.drafts import create_draft_steps

    backend = create_draft_steps(factory.draft_model_runner, factory.topk, factory.speculative_num_steps)
    stamped: list[Any] = [backend, *backend.attn_backends]
    for each in stamped:
        each.prefill_attention_backend_str = each.decode_attention_backend_str = name
    return backend


def _draft_extend(original: Callable[[Any], Any], factory: Any) -> Any:
    """Returns the backend of a draft model that processes the accepted tokens."""
    from sglang.srt.runtime_context import get_spec

    name = _draft_name(factory, "decode" if get_spec().speculative_attention_mode == "decode" else "prefill")
    if name not in ours():
        return original(factory)
    backend = _create(factory.draft_model_runner)
    backend.prefill_attention_backend_str = backend.decode_attention_backend_str = name
    return backend


def _renew_weights(result: Any, updater: Any, *_: Any, **__: Any) -> None:
    """Reads a model's weights again after an update."""
    if _HOOKS in sys.modules:  # a backend of ours was made
        sys.modules[_HOOKS].renew_weights(updater.get_model_runner())


def _draft_name(factory: Any, phase: str) -> str:
    """Returns the name of a draft model's backend, found the way SGLang finds it."""
    from sglang.srt.runtime_context import attention_backends

    prefill, decode = attention_backends()
    name: str = factory.draft_attn_backend or (decode if phase == "decode" else prefill)
    return name
