"""ModelConfig from GGUF metadata."""

from rocm_attn.errors import BadModel
from rocm_attn.models.config import AttentionConfig, HeadProjections, LayerConfig, ModelConfig
from rocm_attn.models.families import DECODERS
from rocm_attn.models.fields import MAX_LAYERS, Fields, shown
from rocm_attn.models.gates import SwiGLU
from rocm_attn.models.geometry import AttentionLayer, window_left
from rocm_attn.models.gguf_file import GGUFFile
from rocm_attn.models.mlp_config import DenseMlp
from rocm_attn.models.rope import (
    DivisorScaling,
    LinearScaling,
    NoScaling,
    Rope,
    Scaling,
    YarnScaling,
    stretched,
    yarn_attention_factor,
)
from rocm_attn.problem import UNLIMITED_WINDOW

_ARCHITECTURES = {decoder.gguf: name for name, decoder in DECODERS.items() if decoder.gguf}
_END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Tokens that end a turn wherever a vocabulary has them, as in llama.cpp: files of fine-tuned models may name their
# base's end token alone.
_ENDS_OF_TURNS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
# Fields of YaRN that are served with one value. Converters write HF's attention_factor as yarn_attn_factor, which
# llama.cpp multiplies by its own, so another value has two meanings.
_YARN_PLAIN = {
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """The ModelConfig of a GGUF file. Raises BadModel."""
    general = Fields(file.metadata, file.name)
    kind = general.text("general.architecture")
    if kind not in _ARCHITECTURES:
        raise BadModel(
            f"{file.name}: architecture {shown(kind)} is not served; the runner serves {', '.join(_ARCHITECTURES)}"
        )
    prefix = f"{kind}."
    fields = Fields(
        {name.removeprefix(prefix): value for name, value in file.metadata.items() if name.startswith(prefix)},
        f"{file.name}: {kind}",
    )
    if fields.has("expert_count"):
        raise BadModel(f"{file.name} is a mixture of experts, which the runner does not read from GGUF")
    if not fields.flag("attention.causal", True):
        raise BadModel(f"{fields.source} is not causal; the runner generates text, token after token")
    attention, shapes = _attention(fields), file.shapes()
    projections = HeadProjections(
        qkv_bias="model.layers.0.self_attn.q_proj.bias" in shapes,
        out_bias="model.layers.0.self_attn.o_proj.bias" in shapes,
        qk_norm="model.layers.0.self_attn.q_norm.weight" in shapes,
    )
    rope = _rope(fields, attention.head_dim, file.rope_divisors())
    mlp = DenseMlp(fields.count("feed_forward_length"), SwiGLU(), "model.layers.0.mlp.gate_proj.bias" in shapes)
    layer = LayerConfig((AttentionConfig(attention, rope, projections),), mlp)
    return ModelConfig(
        architecture=_ARCHITECTURES[kind],
        layers=(layer,) * fields.count("block_count", most=MAX_LAYERS),
        hidden_size=fields.count("embedding_length"),
        vocab_size=len(general.list("tokenizer.ggml.tokens")),
        context_len=stretched(fields.count("context_length"), [rope]),
        rms_norm_eps=fields.positive("attention.layer_norm_rms_epsilon"),
        tied_embeddings="lm_head.weight" not in shapes,
        eos_token_ids=_end_tokens(general),
    )


def _attention(fields: Fields) -> AttentionLayer:
    num_q_heads = fields.count("attention.head_count")
    num_kv_heads = fields.count("attention.head_count_kv", num_q_heads)
    hidden_size = fields.count("embedding_length")
    if num_q_heads % num_kv_heads or (not fields.has("attention.key_length") and hidden_size % num_q_heads):
        raise BadModel(
            f"{fields.source}: {num_q_heads} query heads, {num_kv_heads} KV heads and {hidden_size} hidden elements "
            "do not divide one another"
        )
    head_dim = fields.count("attention.key_length", hidden_size // num_q_heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if fields.count(name, head_dim) != head_dim:
            raise BadModel(f"{fields.source}: {name} is {fields.count(name)}; it must be equal to head_dim {head_dim}")
    window = (
        window_left(fields.count("attention.sliding_window"))
        if fields.has("attention.sliding_window")
        else UNLIMITED_WINDOW
    )
    return AttentionLayer(
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        window_left=window,
    )


def _rope(fields: Fields, head_dim: int, divisors: tuple[float, ...] | None) -> Rope:
    scaling = _scaling(fields)
    if divisors is not None:
        if scaling != NoScaling() or len(divisors) != head_dim // 2 or not all(value > 0 for value in divisors):
            raise BadModel(
                f"{fields.source}: rope_freqs.weight must be {head_dim // 2} positive numbers, without other scaling"
            )
        scaling = DivisorScaling(divisors)
    return Rope(fields.positive("rope.freq_base", 1e4), head_dim, scaling)


def _scaling(fields: Fields) -> Scaling:
    """Scaling by llama.cpp's rules: a factor without a type is linear, and files of 2023 have it by another name."""
    factors = [name for name in ("rope.scaling.factor", "rope.scale_linear") if fields.has(name)]
    kind = fields.text("rope.scaling.type", "linear" if factors else "none")
    if kind == "none":
        return NoScaling()
    factor = fields.positive(factors[0] if factors else "rope.scaling.factor")
    if kind == "linear":
        return LinearScaling(factor)
    if kind == "yarn":
        for name, plain in _YARN_PLAIN.items():
            if fields.has(name) and fields.values[name] != plain:
                raise BadModel(f"{fields.source}: {name} is {shown(fields.values[name])}; the runner serves {plain:g}")
        return YarnScaling(
            factor=factor,
            original_context_len=fields.count("rope.scaling.original_context_length", fields.count("context_length")),
            attention_factor=yarn_attention_factor(factor) * fields.positive("rope.scaling.attn_factor", 1.0),
            beta_fast=fields.positive("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=fields.positive("rope.scaling.yarn_beta_slow", 1.0),
        )
    raise BadModel(f"{fields.source}: rope.scaling.type {shown(kind)} is not known; it must be none, linear or yarn")


def _end_tokens(fields: Fields) -> tuple[int, ...]:
    tokens = [token for name in _END_TOKENS for token in fields.ids(f"tokenizer.ggml.{name}")]
    tokens += [token for token, text in enumerate(fields.list("tokenizer.ggml.tokens")) if text in _ENDS_OF_TURNS]
    return tuple(dict.fromkeys(tokens))
