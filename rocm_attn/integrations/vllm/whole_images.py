"""Makes vLLM's scheduler end no step within an image whose tokens see each other.

vLLM's own rule (disable_chunked_mm_input) leaves out images of which the prefix cache has the first tokens, before 0.33
those that a step begins with, and in 0.26 those that its encoder has seen before. We end a step before the image, or
let the request wait for one that has room for the rest. A step could only refuse a part, and lose all its requests.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from rocm_attn.errors import Unsupported
from rocm_attn.integrations.hooked import hook_once
from rocm_attn.integrations.plugins import VLLM


def keep_images_whole() -> None:
    """Hooks vLLM's scheduler."""
    from vllm.v1.core.sched.scheduler import Scheduler

    hook_once(Scheduler, "_try_schedule_encoder_inputs", _whole)


def require_room_for_images(scheduler_config: Any) -> None:
    """Raises Unsupported for settings with which an image may never be in one step."""
    if scheduler_config.is_multimodal_model and not scheduler_config.disable_chunked_mm_input:
        raise Unsupported(
            "the tokens of this model's images see each other, and vLLM may cut an image at the end of a step; set "
            "--disable-chunked-mm-input"
        )
    if threshold := scheduler_config.long_prefill_token_threshold:
        # vLLM may have chosen the threshold itself: 0.26 takes 4% of the context.
        partial_prefills = getattr(scheduler_config, "max_num_partial_prefills", 1)
        others = " and max_num_partial_prefills, which sets it," if partial_prefills > 1 else ""
        raise Unsupported(
            f"the tokens of this model's images see each other, and long_prefill_token_threshold lets a prompt have "
            f"{threshold} tokens in a step, which an image may exceed; leave it{others} out"
        )


def _whole(schedule: Callable[..., Any]) -> Any:
    takes_others = lru_cache(1)(lambda: bool(VLLM.taken()))

    def scheduled(scheduler: Any, request: Any, first: int, count: int, *given: Any, **named: Any) -> Any:
        if _is_ours(scheduler, takes_others):
            for place in (each.mm_position for each in request.mm_features):
                if place.offset < first + count < place.offset + place.length:
                    count = max(0, place.offset - first)
        return schedule(scheduler, request, first, count, *given, **named)

    return scheduled


def _is_ours(scheduler: Any, takes_others: Callable[[], bool]) -> bool:
    """True if tokens of images see each other in a model that our backend may serve.

    takes_others: whether ours replaces one of vLLM's own
    """
    config = scheduler.vllm_config
    attention = config.attention_config
    # Later releases may have another backend for each kind of layer.
    backends = attention.backend, *getattr(attention, "backend_per_kind", {}).values()
    is_named = any(getattr(each, "name", None) == "CUSTOM" for each in backends)
    return bool(config.model_config.is_mm_prefix_lm) and (is_named or takes_others())
