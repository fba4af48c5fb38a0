"""The projections around attention that a Hugging Face config.json describes."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from rocm_attn.errors import BadModel
from rocm_attn.models.config import HeadProjections, LatentProjections
from rocm_attn.models.fields import Fields
from rocm_attn.models.hf_indexer import own_indexers

Projections = HeadProjections | LatentProjections


def bias_everywhere_if_said(fields: Fields, num_layers: int, **more: bool) -> tuple[Projections, ...]:
    """[layers] q, k and v, and the output of attention, add a bias if attention_bias is true. more: HeadProjections'"""
    has_bias = fields.flag("attention_bias", False)
    return (HeadProjections(qkv_bias=has_bias, out_bias=has_bias, **more),) * num_layers


# The same with norms on q and k, and then also with a gate on the output of each head.
normed_heads = partial(bias_everywhere_if_said, qk_norm=True)
gated_heads = partial(normed_heads, gate=True)


def bias_on_qkv(fields: Fields, num_layers: int) -> tuple[Projections, ...]:
    """[layers] Like bias_everywhere_if_said, but only q, k and v add a bias, always."""
    return (HeadProjections(qkv_bias=True),) * num_layers


def no_bias(fields: Fields, num_layers: int) -> tuple[Projections, ...]:
    """[layers] Like bias_everywhere_if_said, but without any bias."""
    return (HeadProjections(),) * num_layers


def rows_with_indexers(index_interleaved: bool) -> Callable[[Fields, int], tuple[Projections, ...]]:
    """[layers] Like latent_rows, with an indexer in each layer that selects its own keys."""

    def projections(fields: Fields, num_layers: int) -> tuple[Projections, ...]:
        (rows,) = set(latent_rows(fields, num_layers))
        assert isinstance(rows, LatentProjections), "latent rows"
        if not rows.q_rank:
            raise BadModel("config.json has no q_lora_rank, and an indexer's queries need it")
        own = replace(rows, indexer=True, index_interleaved=index_interleaved)
        return tuple(own if is_own else rows for is_own in own_indexers(fields, num_layers))

    return projections


def latent_rows(fields: Fields, num_layers: int, *, interleaved: bool = True) -> tuple[Projections, ...]:
    """[layers] Latent rows. interleaved: whether elements that turn together are adjacent"""
    projections = LatentProjections(
        q_rank=fields.count("q_lora_rank") if fields.has("q_lora_rank") else 0,
        nope_dim=fields.count("qk_nope_head_dim"),
        v_dim=fields.count("v_head_dim"),
        interleaved=interleaved,
        has_bias=fields.flag("attention_bias", False),
    )
    return (projections,) * num_layers


def rows_as_said(fields: Fields, num_layers: int) -> tuple[Projections, ...]:
    """[layers] Latent rows, interleaved as rope_interleave says, which transformers reads for DeepSeek-V3 alone."""
    return latent_rows(fields, num_layers, interleaved=fields.flag("rope_interleave", True))
