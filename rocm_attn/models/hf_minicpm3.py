"""The fields of MiniCPM3's config.json that other models over latent rows lack."""

from rocm_attn.models.config import Multipliers
from rocm_attn.models.fields import Fields
from rocm_attn.models.hf_projections import Projections, latent_rows


def minicpm3_rows(fields: Fields, num_layers: int) -> tuple[Projections, ...]:
    """[layers] Latent rows whose first half turns with the second. V's default size is hidden_size / heads."""
    v_dim = fields.count("v_head_dim", fields.count("hidden_size") // fields.count("num_attention_heads"))
    return latent_rows(Fields({**fields.values, "v_head_dim": v_dim}, fields.source), num_layers, interleaved=False)


def minicpm3_multipliers(fields: Fields) -> Multipliers:
    """scale_emb, scale_depth / sqrt(layers) and dim_model_base / hidden_size; null stands for 1 in the latter two."""
    depth, hidden_size = fields.count("num_hidden_layers") ** 0.5, fields.count("hidden_size")
    return Multipliers(
        embedding=fields.positive("scale_emb"),
        residual=fields.positive("scale_depth", depth) / depth,
        head=fields.positive("dim_model_base", hidden_size) / hidden_size,
    )
