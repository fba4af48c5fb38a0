"""Images without pixels: spans of tokens that see each other, in models of text; a plug-in for vLLM's processes.

A model whose config has IMAGE_SPANS counts as one with images (is_mm_prefix_lm). Each prompt that is long enough has
an image in each of these places, as vLLM's runner knows images: it derives their ranges itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from types import SimpleNamespace
from typing import Any

# Fields of a model's config: first places and lengths of images; whether images keep to the windows of layers.
IMAGE_SPANS, KEEPS_WINDOWS = "image_spans", "mm_prefix_clamp_sliding_window"
_HAS_IMAGES, _UPDATE, _INIT = "is_mm_prefix_lm", "_update_states", "__init__"


def register() -> None:
    """Replaces what vLLM knows of images, for models with IMAGE_SPANS."""
    from vllm.config import ModelConfig
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    # vLLM keeps the first answer, also in copies of a config for a part of the model.
    cached = cached_property(_has_images)
    cached.__set_name__(ModelConfig, _HAS_IMAGES)
    setattr(ModelConfig, _HAS_IMAGES, cached)
    setattr(GPUModelRunner, _UPDATE, _with_images(getattr(GPUModelRunner, _UPDATE)))
    setattr(Attention, _INIT, _with_choice(getattr(Attention, _INIT)))


def _has_images(config: Any) -> bool:
    return hasattr(config.hf_config, IMAGE_SPANS) or bool(config.model_arch_config.is_mm_prefix_lm)


def _with_images(update: Callable[..., Any]) -> Callable[..., Any]:
    """Gives the images to requests that are new in a step."""

    def updated(runner: Any, *given: Any, **named: Any) -> Any:
        from vllm.multimodal.inputs import PlaceholderRange

        found = update(runner, *given, **named)
        if hasattr(runner.model_config.hf_config, IMAGE_SPANS):
            for request in runner.requests.values():
                request.mm_features = [
                    SimpleNamespace(modality="image", mm_position=PlaceholderRange(first, length))
                    for first, length in getattr(runner.model_config.hf_config, IMAGE_SPANS)
                    if first + length <= request.num_prompt_tokens
                ]
        return found

    return updated


def _with_choice(init: Callable[..., None]) -> Callable[..., None]:
    """Gives a layer the model's choice, which vLLM's models give themselves."""

    def made(layer: Any, *given: Any, **named: Any) -> None:
        from vllm.config import get_current_vllm_config

        config = get_current_vllm_config().model_config.hf_config
        if hasattr(config, KEEPS_WINDOWS):
            named[KEEPS_WINDOWS] = getattr(config, KEEPS_WINDOWS)
        init(layer, *given, **named)

    return made
