"""Encoders such as BERT, from their config.json: every token attends to all of its sequence."""

from __future__ import annotations

from rocm_attn.errors import Unsupported
from rocm_attn.models.fields import Fields, shown
from rocm_attn.models.geometry import AttentionGeometry
from rocm_attn.models.hf_attention import GroupedAttention, no_window

# BertConfig of transformers 5.24, and those of the models after it.
ENCODER_DEFAULTS: dict[str, object] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
}


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
