"""Layers in which tokens of a span attend to each other, also to later ones, as a config.json describes them.

The files do not say it: it follows from the model's class. transformers 5.24 makes these masks.

    Gemma 3      an image, in every layer; a window hides what lies before it (create_masks_for_vision_model)
    Gemma 4      an image, in layers with a window, if use_bidirectional_attention is "vision"; the window hides as well
    PaliGemma    the prompt's beginning, images and text, in every layer; in PaliGemma 2 past the window, too
                 (block_sequence_ids of create_sliding_window_causal_mask)
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from rocm_attn.errors import Unsupported
from rocm_attn.models.family_values import DEFAULTS
from rocm_attn.models.fields import Fields, shown
from rocm_attn.models.geometry import AttentionGeometry
from rocm_attn.models.hf_attention import GroupedAttention, by_query_scalar, even_layers_slide, no_window
from rocm_attn.models.hf_gemma4 import gemma4_layers


@dataclass(frozen=True, slots=True)
class WithSpans:
    """Layers of a model whose images, or beginning, are spans in every layer.

    attention:   the layers without spans
    pass_window: AttentionLayer.spans_pass_window
    """

    attention: Callable[[Fields], AttentionGeometry]
    pass_window: bool = False

    def __call__(self, fields: Fields) -> AttentionGeometry:
        """The layers that the fields of a text model describe. Raises BadModel, Unsupported."""
        geometry = self.attention(fields)
        layers = [replace(each, sees_spans=True, spans_pass_window=self.pass_window) for each in geometry.layers]
        return replace(geometry, layers=tuple(layers))


def gemma4_image_layers(fields: Fields) -> AttentionGeometry:
    """Gemma 4's layers in a model that takes images. Raises BadModel, Unsupported."""
    geometry = gemma4_layers(fields)
    if not fields.has("use_bidirectional_attention") or fields.text("use_bidirectional_attention") != "vision":
        return geometry
    return replace(geometry, layers=tuple(replace(each, sees_spans=each.is_local) for each in geometry.layers))


_GEMMA = GroupedAttention(no_window)
_GEMMA2 = GroupedAttention(even_layers_slide, scale=by_query_scalar, may_cap=True)


def paligemma_layers(fields: Fields) -> AttentionGeometry:
    """PaliGemma's layers: those of Gemma or Gemma 2, by the text model's type. Raises BadModel, Unsupported."""
    kind = fields.text("model_type", "gemma")
    if kind not in ("gemma", "gemma2"):
        raise Unsupported(f"PaliGemma over a text model of type {shown(kind)} is not served; it may be gemma or gemma2")
    attention, model = (_GEMMA, "paligemma_text") if kind == "gemma" else (_GEMMA2, "paligemma2_text")
    filled = Fields({**DEFAULTS[model], **fields.values}, fields.source)
    return WithSpans(attention, pass_window=True)(filled)
