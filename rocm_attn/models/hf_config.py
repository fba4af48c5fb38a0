"""ModelConfig from a Hugging Face config.json."""

from collections.abc import Iterable, Mapping

from rocm_attn.errors import BadModel
from rocm_attn.models.config import AttentionConfig, LayerConfig, MixerConfig, ModelConfig, RecurrentConfig
from rocm_attn.models.families import DECODERS, Decoder, architecture_of, attention_geometry, text_fields
from rocm_attn.models.fields import MAX_LAYERS, Fields, shown
from rocm_attn.models.geometry import AttentionGeometry
from rocm_attn.models.rope import Rope, stretched

UNQUANTISED = "use the unquantised model or a GGUF file"


def config_from_json(config: Mapping[str, object]) -> ModelConfig:
    """The ModelConfig of a Hugging Face config.json. Raises BadModel, or Unsupported for attention of another kind."""
    architecture = architecture_of(config)
    if architecture not in DECODERS:
        raise BadModel(
            f"the engine does not serve {architecture}; try vLLM or SGLang with the plug-in, or choose one of "
            f"{', '.join(DECODERS)}"
        )
    decoder, whole, fields = DECODERS[architecture], Fields(config, "config.json"), text_fields(config)
    for place in (whole, fields):
        _refuse_quantised(place)
    attention = attention_geometry(config).over_text()
    is_capped = decoder.may_cap and fields.has("final_logit_softcapping")
    if not all(layer.window_right == 0 for layer in attention.layers):
        raise BadModel(f"config.json: {architecture} is not causal here; the runner generates text, token after token")
    ropes = decoder.ropes(fields, attention)
    return ModelConfig(
        architecture=architecture,
        layers=_layers(decoder, fields, attention, ropes),
        hidden_size=fields.count("hidden_size"),
        vocab_size=fields.count("vocab_size"),
        context_len=context_len(fields, ropes),
        rms_norm_eps=fields.positive("rms_norm_eps"),
        # a file with text_config has these two next to it
        tied_embeddings=whole.flag("tie_word_embeddings", fields.flag("tie_word_embeddings", False))
        and decoder.may_tie,
        eos_token_ids=whole.ids("eos_token_id") or fields.ids("eos_token_id"),
        num_extra_layers=fields.whole("num_nextn_predict_layers", 0),
        unread=decoder.unread,
        reads=attention.reads,
        out_norms=decoder.out_norms,
        norm_offset=decoder.norm_offset,
        own_inputs=decoder.own_inputs(fields),
        has_layer_factors=decoder.has_layer_factors,
        multipliers=decoder.multipliers(fields),
        factors=decoder.factors(fields),
        logits_soft_cap=fields.positive("final_logit_softcapping") if is_capped else 0.0,
    )


def context_len(fields: Fields, ropes: Iterable[Rope]) -> int:
    """Tokens of a model's context: max_position_embeddings, stretched by YaRN, or where dual chunk attention, which
    nothing here computes, begins to differ. Raises BadModel.
    """
    longest, dual = fields.count("max_position_embeddings"), fields.inner("dual_chunk_attention_config")
    plain = (dual.count(name, longest) for name in ("chunk_size", "original_max_position_embeddings"))
    return stretched(min(longest, *plain), ropes)


def _layers(
    decoder: Decoder, fields: Fields, attention: AttentionGeometry, ropes: tuple[Rope, ...]
) -> tuple[LayerConfig, ...]:
    num_layers = fields.count("num_hidden_layers", most=MAX_LAYERS)
    mlps, projections = decoder.mlps(fields, num_layers), decoder.projections(fields, num_layers)
    attending = zip(attention.places, attention.layers, ropes, strict=True)
    of_recurrent, mixers = decoder.recurrent_projections(fields), [list[MixerConfig]() for _ in range(num_layers)]
    for place, state in attention.recurrent:
        mixers[place].append(RecurrentConfig(state, of_recurrent))
    for place, layer, rope in attending:
        mixers[place].append(AttentionConfig(layer, rope, projections[place]))
    return tuple(LayerConfig(tuple(of_layer), mlp) for of_layer, mlp in zip(mixers, mlps, strict=True))


def _refuse_quantised(fields: Fields) -> None:
    if not fields.has("quantization_config"):
        return
    method = fields.inner("quantization_config").text("quant_method", "unknown")
    remedy = UNQUANTISED
    if method == "mxfp4":
        remedy = "let transformers load it with Mxfp4Config(dequantize=True) and save it in bfloat16"
    raise BadModel(f"config.json: weights quantised with {shown(method)} are not supported; {remedy}")
