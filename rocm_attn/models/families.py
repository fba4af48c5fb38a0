"""The model families: one table entry each.

An entry says how the attention of a model's config.json is read and, if the runner runs the model, the rest. Its
numbers and names are in families.json. The attention runtime serves the attention layers of every family here, whatever
the other layers are.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from rocm_attn.errors import BadModel, Unsupported
from rocm_attn.models.config import Multipliers, OwnInputs, RecurrentProjections, RowFactors
from rocm_attn.models.family_values import DEFAULTS, FIELD_NAMES, ROPES, TENSOR_NAMES
from rocm_attn.models.fields import Fields, shown
from rocm_attn.models.geometry import AttentionGeometry
from rocm_attn.models.hf_attention import (
    GroupedAttention,
    all_but_one_in_a_pattern_slide,
    by_query_scalar,
    even_layers_slide,
    latent_layers,
    no_window,
    of_the_last_like_it,
    qwen2_moe_windows,
    qwen_windows,
    rotated_layers_have_chunks,
    window_everywhere,
    window_everywhere_if_used,
)
from rocm_attn.models.hf_compressed import compressed_layers
from rocm_attn.models.hf_encoders import (
    encoder_layers,
    half_if_bidirectional,
    half_of_local_attention,
    modern_bert_layers,
)
from rocm_attn.models.hf_falcon_h1 import (
    attention_and_state_everywhere,
    falcon_h1_factors,
    falcon_h1_mamba,
    falcon_h1_multipliers,
)
from rocm_attn.models.hf_gemma4 import gemma4_heads, gemma4_layers, gemma4_mlps, gemma4_rope, own_inputs
from rocm_attn.models.hf_indexer import indexed_latent_layers, indexed_layers
from rocm_attn.models.hf_minicpm3 import minicpm3_multipliers, minicpm3_rows
from rocm_attn.models.hf_minimax_m3 import block_indexed_layers, minimax_m3_heads, minimax_m3_mlp_types, minimax_m3_mlps
from rocm_attn.models.hf_mlp import (
    deepseek_v2_experts,
    deepseek_v3_experts,
    geglu,
    gpt_oss_experts,
    kimi_experts,
    qwen3_5_experts,
    qwen_experts,
    swiglu,
    swiglu_with_bias,
)
from rocm_attn.models.hf_nemotron_h import kinds_of_layers, nemotron_h_mlps, nemotron_h_places, nemotron_h_state
from rocm_attn.models.hf_projections import (
    Projections,
    bias_everywhere_if_said,
    bias_on_qkv,
    gated_heads,
    latent_rows,
    no_bias,
    normed_heads,
    rows_as_said,
    rows_with_indexers,
)
from rocm_attn.models.hf_recurrent import (
    HybridAttention,
    by_key_head,
    gated_delta,
    kimi_delta,
    mamba,
    of_mamba,
)
from rocm_attn.models.hf_rope import no_rope, one_rope, rope_of_each_kind, rope_of_first_elements
from rocm_attn.models.hf_spans import WithSpans, gemma4_image_layers, paligemma_layers
from rocm_attn.models.mlp_config import Mlp
from rocm_attn.models.rope import Rope


def embeddings_by_width(fields: Fields) -> Multipliers:
    """Multiplies embeddings by hidden_size ** 0.5 (Gemma)."""
    return Multipliers(embedding=fields.count("hidden_size") ** 0.5, rounds_embedding=True)


def gpt_oss_rope(fields: Fields) -> Mapping[str, object]:
    """The rotary embedding of gpt-oss, if the file leaves it out."""
    said = fields.values.get("rope_scaling") or fields.has("rope_parameters")  # an empty scaling says nothing
    return {} if said else {"rope_parameters": ROPES["gpt_oss"]}


@dataclass(frozen=True, slots=True)
class Decoder:
    """The parts of a model other than attention, for families that the runner runs.

    mlps:     the MLP of each layer
    projections: q, k and v projections of each layer
    ropes:    the rotary embedding of each layer
    out_norms: whether the output of attention and MLP is normalised before it is added
    multipliers: on embeddings, on terms of the residual, on the input of the output matrix
    may_cap:  whether final_logit_softcapping is read
    norm_offset: added to the weights of norms: 1 if a file holds their difference from 1
    own_inputs: the inputs that each layer gets for a token in addition to the residual
    has_layer_factors: whether each layer's sum has a learned factor
    may_tie:   whether the embedding is the output matrix too if a file says tie_word_embeddings; transformers ties
               nothing in models without _tied_weights_keys
    gguf:     the name of the architecture in GGUF files; empty if the runner reads none
    recurrent_projections: of recurrent layers, if there are any; the plain ones are Qwen3.5's and Kimi's
    renamed:  parts of tensors' names in files -> the parts in their place in the files of most models
    factors:  on rows of a file's matrices
    unread:   beginnings of names of tensors for speculation, which are not read
    """

    mlps: Callable[[Fields, int], tuple[Mlp, ...]]
    projections: Callable[[Fields, int], tuple[Projections, ...]] = bias_everywhere_if_said
    ropes: Callable[[Fields, AttentionGeometry], tuple[Rope, ...]] = one_rope
    out_norms: bool = False
    multipliers: Callable[[Fields], Multipliers] = lambda fields: Multipliers()
    may_cap: bool = False
    norm_offset: float = 0.0
    own_inputs: Callable[[Fields], OwnInputs] = lambda fields: OwnInputs()
    has_layer_factors: bool = False
    may_tie: bool = True
    gguf: str = ""
    recurrent_projections: Callable[[Fields], RecurrentProjections] = lambda fields: RecurrentProjections()
    renamed: Mapping[str, str] = field(default_factory=dict)
    factors: Callable[[Fields], RowFactors] = lambda fields: {}
    unread: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture.

    defaults: values that a published file may leave out because the model's class has them; a null overrides one
    decoder:  None if the runner does not run the model; its attention is served all the same
    names:    names of fields -> those in this family's files, which the usual ones may stand for too
    derived:  fields that follow from others of the file
    """

    attention: Callable[[Fields], AttentionGeometry]
    defaults: Mapping[str, object] = field(default_factory=dict)
    decoder: Decoder | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    derived: Callable[[Fields], Mapping[str, object]] = lambda fields: {}


def attention_geometry(config: Mapping[str, object]) -> AttentionGeometry:
    """The attention layers of the model that a config.json describes.

    Raises Unsupported for attention of another kind, BadModel for an incomplete config.
    """
    architecture = architecture_of(config)
    fields = text_fields(config)
    geometry = FAMILIES[architecture].attention(fields)
    # transformers 5 serves any class whose masks are causal as an encoder, if the file says so. A window of n keys then
    # reaches n keys to each side, and in causal masks n - 1 (masking_utils.py).
    if not fields.flag("is_causal", True):
        return geometry.not_causal(more=1)
    if fields.values.get("use_bidirectional_attention") is not True or architecture in _WITH_A_PREFIX:
        return geometry
    if FAMILIES[architecture].derived is not half_if_bidirectional and any(layer.is_local for layer in geometry.layers):
        raise Unsupported(
            f"use_bidirectional_attention is true, and layers of {architecture} have windows or chunks; how far they "
            "then reach is known of Gemma 3 alone"
        )
    return geometry.not_causal()


# The default of most classes; a null overrides it.
_DEFAULTS = {"rms_norm_eps": 1e-6}
# Models whose use_bidirectional_attention means the prompt's beginning alone.
_WITH_A_PREFIX = ("PaliGemmaForConditionalGeneration",)


def text_fields(config: Mapping[str, object]) -> Fields:
    """The text model's fields of a config.json; the defaults of the model's class fill the gaps.

    Raises Unsupported for an architecture whose attention is not known, and what Family.derived raises.
    """
    architecture = architecture_of(config)
    if architecture not in FAMILIES:
        raise Unsupported(
            f"the attention of {architecture} is not known; config.json must name one of {', '.join(FAMILIES)}"
        )
    text = config.get("text_config")
    given, family = text if isinstance(text, Mapping) else config, FAMILIES[architecture]
    named = {name: given[theirs] for name, theirs in family.names.items() if theirs in given}
    fields = Fields({**_DEFAULTS, **family.defaults, **given, **named}, "config.json")
    return Fields({**fields.values, **family.derived(fields)}, fields.source)


def architecture_of(config: Mapping[str, object]) -> str:
    """The class name in a config.json. Raises BadModel."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str) or len(names[0]) > _LONGEST_NAME:
        raise BadModel(f"config.json: architectures is {shown(names)}; it must be a list that names the model's class")
    return names[0]


# Characters of an architecture's name; messages quote it.
_LONGEST_NAME = 100

_WINDOW_4096: dict[str, object] = {"sliding_window": 4096}

# transformers leaves these out for the families that name them (_keys_to_ignore_on_load_unexpected).
_MTP = ("mtp.",)

_GEMMA3_DECODER = Decoder(
    geglu,
    normed_heads,
    rope_of_each_kind,
    out_norms=True,
    multipliers=embeddings_by_width,
    may_cap=True,
    norm_offset=1.0,
)
_GEMMA3_FAMILY = Family(
    GroupedAttention(all_but_one_in_a_pattern_slide, scale=by_query_scalar),
    DEFAULTS["gemma3"],
    _GEMMA3_DECODER,
    derived=half_if_bidirectional,
)
# transformers caps the logits of the text model alone.
_GEMMA3_IMAGE_FAMILY = replace(
    _GEMMA3_FAMILY, attention=WithSpans(_GEMMA3_FAMILY.attention), decoder=replace(_GEMMA3_DECODER, may_cap=False)
)
_GEMMA4_FAMILY = Family(
    gemma4_layers,
    DEFAULTS["gemma4"],
    Decoder(
        gemma4_mlps,
        gemma4_heads,
        rope_of_each_kind,
        out_norms=True,
        multipliers=embeddings_by_width,
        may_cap=True,
        own_inputs=own_inputs,
        has_layer_factors=True,
    ),
    derived=gemma4_rope,
)
_GEMMA4_IMAGE_FAMILY = replace(_GEMMA4_FAMILY, attention=gemma4_image_layers)
_LLAMA4_FAMILY = Family(GroupedAttention(no_window, chunks=rotated_layers_have_chunks), DEFAULTS["llama4"])
_ENCODER_FAMILY = Family(encoder_layers, DEFAULTS["encoder"])
_MODERN_BERT_FAMILY = Family(modern_bert_layers, DEFAULTS["modern_bert"], derived=half_of_local_attention)
_MINIMAX_M3_FAMILY = Family(
    block_indexed_layers,
    DEFAULTS["minimax_m3"],
    Decoder(
        minimax_m3_mlps,
        minimax_m3_heads,
        rope_of_first_elements,
        norm_offset=1.0,
        renamed=TENSOR_NAMES["minimax_m3"],
        unread=(*_MTP, "model.mtp."),
    ),
    derived=minimax_m3_mlp_types,
)
_GEMMA3N_FAMILY = Family(
    GroupedAttention(all_but_one_in_a_pattern_slide, reads=of_the_last_like_it, scale=lambda fields, head_dim: 1.0),
    DEFAULTS["gemma3n"],
)
_QWEN_LAYERS = HybridAttention(GroupedAttention(no_window), gated_delta)
_QWEN3_NEXT_FAMILY = Family(
    _QWEN_LAYERS,
    DEFAULTS["qwen3_next"],
    Decoder(
        qwen_experts,
        gated_heads,
        rope_of_first_elements,
        norm_offset=1.0,
        recurrent_projections=by_key_head,
        unread=_MTP,
    ),
)
_QWEN3_5_FAMILY = Family(
    _QWEN_LAYERS,
    DEFAULTS["qwen3_5"],
    Decoder(swiglu, gated_heads, rope_of_first_elements, norm_offset=1.0, unread=_MTP),
)
_QWEN3_5_EXPERTS_FAMILY = Family(
    _QWEN_LAYERS,
    DEFAULTS["qwen3_5_moe"],
    Decoder(qwen3_5_experts, gated_heads, rope_of_first_elements, norm_offset=1.0, unread=_MTP),
)
_FALCON_H1_FAMILY = Family(
    HybridAttention(GroupedAttention(no_window), mamba, attention_and_state_everywhere),
    DEFAULTS["falcon_h1"],
    Decoder(
        swiglu_with_bias,
        multipliers=falcon_h1_multipliers,
        recurrent_projections=falcon_h1_mamba,
        renamed=TENSOR_NAMES["feed_forward"],
        factors=falcon_h1_factors,
    ),
)
_BAMBA_FAMILY = Family(
    HybridAttention(GroupedAttention(no_window), mamba),
    DEFAULTS["bamba"],
    Decoder(
        swiglu_with_bias,
        ropes=rope_of_first_elements,
        recurrent_projections=of_mamba,
        renamed=TENSOR_NAMES["feed_forward"],
    ),
    # transformers reads the share in rope_parameters alone.
    derived=lambda fields: {"partial_rotary_factor": 0.5},
)
_NEMOTRON_H_FAMILY = Family(
    HybridAttention(GroupedAttention(no_window), nemotron_h_state, nemotron_h_places),
    DEFAULTS["nemotron_h"],
    Decoder(
        nemotron_h_mlps,
        no_bias,
        no_rope,
        recurrent_projections=of_mamba,
        renamed=TENSOR_NAMES["nemotron_h"],
        unread=_MTP,
        may_tie=False,
    ),
    FIELD_NAMES["nemotron_h"],
    kinds_of_layers,
)
_QWEN_SPARSE_HYBRID = Family(HybridAttention(indexed_layers, gated_delta), DEFAULTS["qwen4_exp"])
_KIMI_LINEAR_FAMILY = Family(
    HybridAttention(latent_layers, kimi_delta),
    DEFAULTS["kimi_linear"],
    Decoder(
        kimi_experts,
        partial(latent_rows, interleaved=False),
        no_rope,
        renamed=TENSOR_NAMES["mixtral"],
        may_tie=False,
    ),
    FIELD_NAMES["kimi_linear"],
    # Rows that do not turn have no context that YaRN stretches.
    derived=lambda fields: {"rope_parameters": None, "rope_scaling": None},
)
_KIMI_HYBRID = Family(HybridAttention(latent_layers, kimi_delta))
_GLM_HYBRID = Family(HybridAttention(indexed_latent_layers, kimi_delta), DEFAULTS["glm5_next"])

FAMILIES: Mapping[str, Family] = {
    # Mistral's GGUF files say "llama" too.
    "LlamaForCausalLM": Family(GroupedAttention(no_window), decoder=Decoder(swiglu_with_bias, gguf="llama")),
    "MistralForCausalLM": Family(GroupedAttention(window_everywhere), DEFAULTS["mistral"], Decoder(swiglu, no_bias)),
    "MixtralForCausalLM": Family(GroupedAttention(window_everywhere), {"num_key_value_heads": 8}),
    "Phi3ForCausalLM": Family(GroupedAttention(window_everywhere)),
    "Qwen2ForCausalLM": Family(
        GroupedAttention(qwen_windows), _WINDOW_4096, Decoder(swiglu, bias_on_qkv, gguf="qwen2")
    ),
    "Qwen3ForCausalLM": Family(
        GroupedAttention(qwen_windows), {**_WINDOW_4096, "head_dim": 128}, Decoder(swiglu, normed_heads, gguf="qwen3")
    ),
    "Qwen2MoeForCausalLM": Family(GroupedAttention(qwen2_moe_windows), _WINDOW_4096),
    "Qwen3MoeForCausalLM": Family(
        GroupedAttention(window_everywhere_if_used), DEFAULTS["qwen3_moe"], Decoder(qwen_experts, normed_heads)
    ),
    "BambaForCausalLM": _BAMBA_FAMILY,
    "FalconH1ForCausalLM": _FALCON_H1_FAMILY,
    "Gemma2ForCausalLM": Family(
        GroupedAttention(even_layers_slide, scale=by_query_scalar, may_cap=True),
        DEFAULTS["gemma2"],
        Decoder(geglu, out_norms=True, multipliers=embeddings_by_width, may_cap=True, norm_offset=1.0),
    ),
    "Gemma3ForCausalLM": _GEMMA3_FAMILY,
    "Gemma3TextModel": replace(_GEMMA3_FAMILY, decoder=None),
    "Gemma3ForConditionalGeneration": _GEMMA3_IMAGE_FAMILY,
    "Gemma3nForCausalLM": _GEMMA3N_FAMILY,
    "Gemma3nForConditionalGeneration": _GEMMA3N_FAMILY,
    "Gemma4ForCausalLM": _GEMMA4_FAMILY,
    "Gemma4ForConditionalGeneration": _GEMMA4_IMAGE_FAMILY,
    "PaliGemmaForConditionalGeneration": Family(paligemma_layers, {"max_position_embeddings": 8192}),
    "Llama4ForCausalLM": _LLAMA4_FAMILY,
    "Llama4ForConditionalGeneration": _LLAMA4_FAMILY,
    "BertModel": _ENCODER_FAMILY,
    "BertForSequenceClassification": _ENCODER_FAMILY,
    "ModernBertModel": _MODERN_BERT_FAMILY,
    "ModernBertForMaskedLM": _MODERN_BERT_FAMILY,
    "ModernBertForSequenceClassification": _MODERN_BERT_FAMILY,
    "RobertaModel": _ENCODER_FAMILY,
    "RobertaForSequenceClassification": _ENCODER_FAMILY,
    "XLMRobertaModel": _ENCODER_FAMILY,
    "XLMRobertaForSequenceClassification": _ENCODER_FAMILY,
    "MiniCPM3ForCausalLM": Family(
        latent_layers, DEFAULTS["minicpm3"], Decoder(swiglu_with_bias, minicpm3_rows, multipliers=minicpm3_multipliers)
    ),
    "MiniMaxM3VLForCausalLM": _MINIMAX_M3_FAMILY,
    "MiniMaxM3SparseForConditionalGeneration": _MINIMAX_M3_FAMILY,
    "GptOssForCausalLM": Family(
        GroupedAttention(even_layers_slide, has_sinks=True),
        DEFAULTS["gpt_oss"],
        Decoder(gpt_oss_experts),
        derived=gpt_oss_rope,
    ),
    "DeepseekV2ForCausalLM": Family(latent_layers, decoder=Decoder(deepseek_v2_experts, latent_rows)),
    "DeepseekV32ForCausalLM": Family(
        indexed_latent_layers,
        DEFAULTS["deepseek_v32"],
        Decoder(deepseek_v3_experts, rows_with_indexers(index_interleaved=False)),
    ),
    "GlmMoeDsaForCausalLM": Family(
        indexed_latent_layers,
        DEFAULTS["glm_moe_dsa"],
        Decoder(deepseek_v3_experts, rows_with_indexers(index_interleaved=True)),
    ),
    "DeepseekV3ForCausalLM": Family(latent_layers, DEFAULTS["deepseek_v3"], Decoder(deepseek_v3_experts, rows_as_said)),
    "DeepseekV4ForCausalLM": Family(compressed_layers),
    "DeepseekV41ForCausalLM": Family(compressed_layers),
    "Glm5NextForConditionalGeneration": _GLM_HYBRID,
    "KimiLinearForCausalLM": _KIMI_LINEAR_FAMILY,
    "KimiK3ForConditionalGeneration": _KIMI_HYBRID,
    "NemotronHForCausalLM": _NEMOTRON_H_FAMILY,
    "MiniMaxM2ForCausalLM": Family(GroupedAttention(no_window), DEFAULTS["minimax_m2"]),
    "Qwen3NextForCausalLM": _QWEN3_NEXT_FAMILY,
    "Qwen3_5ForCausalLM": _QWEN3_5_FAMILY,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5_FAMILY,
    "Qwen3_5MoeForCausalLM": _QWEN3_5_EXPERTS_FAMILY,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5_EXPERTS_FAMILY,
    "Qwen4ExpForCausalLM": _QWEN_SPARSE_HYBRID,
    "Qwen4ExpForConditionalGeneration": _QWEN_SPARSE_HYBRID,
}
# The decoders of the models that the runner runs.
DECODERS: Mapping[str, Decoder] = {
    name: family.decoder for name, family in FAMILIES.items() if family.decoder is not None
}
