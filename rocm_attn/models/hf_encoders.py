"""Encoders, from their config.json: tokens attend to all of their sequence, or to those on both sides in a window.

The numbers and masks are those of transformers 5.24.
"""

from collections.abc import Mapping

from rocm_attn.errors import Unsupported
from rocm_attn.models.fields import Fields, shown
from rocm_attn.models.geometry import AttentionGeometry
from rocm_attn.models.hf_attention import GroupedAttention, no_window, window_where


def encoder_layers(fields: Fields) -> AttentionGeometry:
    """The layers of an encoder, or causal ones if the file says is_decoder. Raises BadModel, Unsupported."""
    positions = fields.text("position_embedding_type", "absolute")
    if positions != "absolute":
        raise Unsupported(
            f"position_embedding_type is {shown(positions)}, which adds distances to scores in a way that no kernel "
            "here has; only 'absolute' is served"
        )
    geometry = GroupedAttention(no_window)(fields)
    return geometry if fields.flag("is_decoder", False) else geometry.not_causal()


def modern_bert_layers(fields: Fields) -> AttentionGeometry:
    """The layers of ModernBERT; all but each n-th have a window. Raises BadModel, Unsupported."""
    return GroupedAttention(_all_but_each_nth_slide)(fields).not_causal()


def _all_but_each_nth_slide(fields: Fields, num_layers: int) -> tuple[int, ...]:
    period = fields.count("global_attn_every_n_layers")
    return window_where(fields, num_layers, lambda layer: layer % period != 0)


def half_of_local_attention(fields: Fields) -> Mapping[str, object]:
    """ModernBERT's window, as sliding_window counts it: local_attention is that of both sides together."""
    return {"sliding_window": fields.count("local_attention") // 2 + 1}


def half_if_bidirectional(fields: Fields) -> Mapping[str, object]:
    """EmbeddingGemma's window: with use_bidirectional_attention Gemma 3's sliding_window is that of both sides."""
    if fields.values.get("use_bidirectional_attention") is not True or not fields.has("sliding_window"):
        return {}
    return {"sliding_window": fields.count("sliding_window") // 2 + 1}
