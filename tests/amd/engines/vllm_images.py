"""Images without pixels: spans of tokens that see each other, in models of text; a plug-in for vLLM's processes.

A model whose config has IMAGE_SPANS counts as one with images (is_mm_prefix_lm). Each prompt that is long enough has
an image in each of these places, as vLLM's scheduler knows images: its runner derives their ranges itself.
"""

from collections.abc import Callable
from functools import cached_property
from types import SimpleNamespace
from typing import Any

# Fields of a model's config: first places and lengths of images; whether images keep to the windows of layers.
IMAGE_SPANS, KEEPS_WINDOWS = "image_spans", "mm_prefix_clamp_sliding_window"
_HAS_IMAGES, _ADD, _INIT = "is_mm_prefix_lm", "add_request", "__init__"


def register() -> None:
    """Replaces what vLLM knows of images, for models with IMAGE_SPANS."""
    from vllm.config import ModelConfig
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    # vLLM keeps the first answer, also in copies of a config for a part of the model.
    cached = cached_property(_has_images)
    cached.__set_name__(ModelConfig, _HAS_IMAGES)
    setattr(ModelConfig, _HAS_IMAGES, cached)
    setattr(Scheduler, _ADD, _with_images(getattr(Scheduler, _ADD)))
    EncoderCacheManager.check_and_update_cache = _is_encoded
    setattr(Attention, _INIT, _with_choice(getattr(Attention, _INIT)))


def _has_images(config: Any) -> bool:
    return hasattr(config.hf_config, IMAGE_SPANS) or bool(config.model_arch_config.is_mm_prefix_lm)


def _with_images(add: Callable[..., Any]) -> Callable[..., Any]:
    """Gives the images to a request that is new in the scheduler."""

    def added(scheduler: Any, request: Any) -> Any:
        from vllm.multimodal.inputs import PlaceholderRange

        spans = getattr(scheduler.vllm_config.model_config.hf_config, IMAGE_SPANS, ())
        request.mm_features = [
            SimpleNamespace(
                modality="image", identifier=str(first), data=None, mm_position=PlaceholderRange(first, length)
            )
            for first, length in spans
            if first + length <= request.num_prompt_tokens
        ]
        return add(scheduler, request)

    return added


def _is_encoded(cache: Any, request: Any, number: int) -> bool:
    """An image without pixels needs no encoder."""
    return True


def _with_choice(init: Callable[..., None]) -> Callable[..., None]:
    """Gives a layer the model's choice, which vLLM's models give themselves."""

    def made(layer: Any, *given: Any, **named: Any) -> None:
        from vllm.config import get_current_vllm_config

        config = get_current_vllm_config().model_config.hf_config
        if hasattr(config, KEEPS_WINDOWS):
            named[KEEPS_WINDOWS] = getattr(config, KEEPS_WINDOWS)
        init(layer, *given, **named)

    return made
