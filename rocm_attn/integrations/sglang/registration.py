"""Registers our names in SGLang's lists."""

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
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
    HookRegistry.register(f"{_FACTORY}._create_backend", _of_drafts, HookType.AROUND)
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


def _of_drafts(
    original: Callable[..., Any],
    factory: Any,
    backend_name: str,
    backend_map: Mapping[str, Callable[[], tuple[str, Any]]],
    error_template: str,
    stamps_children: bool = False,
) -> Any:
    """Adds ours to the backends from which SGLang's factory takes that of a draft model.

    stamps_children: True for the steps of a draft model, False for the backend that processes the accepted tokens
    """
    runner = factory.draft_model_runner

    def make(name: str) -> tuple[str, Any]:
        if not stamps_children:
            return name, _create(runner)
        from rocm_attn.integrations.sglang.drafts import create_draft_steps

        return name, create_draft_steps(runner, factory.topk, factory.speculative_num_steps)

    added = {name: partial(make, name) for name in ours()}
    return original(factory, backend_name, {**backend_map, **added}, error_template, stamps_children)


def _renew_weights(result: Any, updater: Any, *_: Any, **__: Any) -> None:
    """Reads a model's weights again after an update."""
    if _HOOKS in sys.modules:  # a backend of ours was made
        sys.modules[_HOOKS].renew_weights(updater.get_model_runner())
