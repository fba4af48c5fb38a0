"""Images in prompts whose tokens see each other, as SGLang's batches know them. It imports no SGLang.

SGLang gives each request the places of its images in the prompt. Which models have such images, and in which layers,
is their own choice; masks of transformers 5.24 are the reference (rocm_attn/models/hf_spans.py).
"""

from functools import cache

import torch

from rocm_attn.errors import BadBatch
from rocm_attn.integrations.plugins import SGLANG
from rocm_attn.integrations.sglang.seen import ForwardBatchView, RadixAttentionView, Runner, on_host
from rocm_attn.step.external_step import NO_CELLS, DeviceSpans, NoCells
from rocm_attn.step.host_ring import HostRing

_EVERY_LAYER, _WINDOWED_LAYERS = "Gemma3ForConditionalGeneration", "Gemma4ForConditionalGeneration"


def sees_images(layer: RadixAttentionView, runner: Runner) -> bool:
    """True if tokens of an image see each other in a layer. A window hides what lies before it all the same."""
    name = type(runner.model).__name__
    if name == _WINDOWED_LAYERS:
        text = getattr(getattr(runner.model, "config", None), "text_config", None)
        return getattr(text, "use_bidirectional_attention", None) == "vision" and layer.sliding_window_size >= 0
    return name == _EVERY_LAYER


class CausalImages:
    """Prompts of a model whose images have no spans: each token sees itself and what comes before."""

    def of(self, batch: ForwardBatchView) -> DeviceSpans | NoCells:
        """Returns NO_CELLS."""
        return NO_CELLS


class ImageSpans(CausalImages):
    """Makes the spans of prompts' images. Prompts are never captured, so each step may have memory of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ring = HostRing(device)

    def of(self, batch: ForwardBatchView) -> DeviceSpans | NoCells:
        """Returns the spans of a batch of prompts; NO_CELLS without images. Raises BadBatch.

        An image whose last token comes in a later step stays causal, as in SGLang's own backends, and the log says so.
        New tokens see all of an image that began in an earlier step: tokens before them have seen it whole, or were cut
        off.
        """
        inputs = batch.mm_inputs
        if not inputs:
            return NO_CELLS
        before, new = on_host(batch.extend_prefix_lens_cpu), on_host(batch.extend_seq_lens_cpu)
        if before is None or new is None:
            raise BadBatch("a batch with images has no lengths on the host; they say which images are in it")
        words: list[int] = []
        for seq, (of_request, start, count) in enumerate(zip(inputs, before, new, strict=False)):
            items = () if of_request is None else of_request.mm_items
            for first, last in (place for item in items if item.is_image() for place in item.offsets or ()):
                if last < start or first >= start + count:
                    continue
                if last >= start + count:
                    _warn_of_cut_images()
                else:
                    words += (seq, first, last + 1)
        if not words:
            return NO_CELLS
        spans = torch.empty(len(words) // 3, 3, dtype=torch.int32, device=self._device)
        self._ring.send(words, spans)
        return DeviceSpans(spans)


@cache
def _warn_of_cut_images() -> None:
    """Says once in the log that an image was cut."""
    SGLANG.log.warning(
        "an image came in parts, so its first tokens do not see its last ones; use --chunked-prefill-size -1"
    )
