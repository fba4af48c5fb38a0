"""The text part of Gemma 4, from its config.json.

Layers without a window have a head size and KV heads of their own. v may be k as it was projected. The last layers may
read K and V of earlier ones, and then have wider MLPs. Each dense MLP may have experts next to it.
"""

from collections.abc import Mapping
from dataclasses import replace

from rocm_attn.errors import BadModel, Unsupported
from rocm_attn.models.config import HeadProjections, OwnInputs
from rocm_attn.models.family_values import ROPES
from rocm_attn.models.fields import MAX_LAYERS, Fields
from rocm_attn.models.gates import GeGLU
from rocm_attn.models.geometry import AttentionGeometry, AttentionLayer
from rocm_attn.models.hf_attention import all_but_one_in_a_pattern_slide, of_the_last_like_it
from rocm_attn.models.hf_mlp import geglu
from rocm_attn.models.hf_projections import Projections
from rocm_attn.models.mlp_config import DenseAndExperts, DenseMlp, ExpertMlp, ExpertTensors, Mlp
from rocm_attn.models.routing import Routing
from rocm_attn.problem import UNLIMITED_WINDOW


def gemma4_layers(fields: Fields) -> AttentionGeometry:
    """Layers with a window, and larger ones without. Raises BadModel, Unsupported."""
    if fields.has("use_bidirectional_attention") and fields.text("use_bidirectional_attention") == "all":
        raise Unsupported("use_bidirectional_attention is 'all': only causal attention over text is served")
    windows = gemma4_windows(fields)
    num_q_heads = fields.count("num_attention_heads")
    own = fields.inner("per_layer_config")
    layers = []
    for number, left in enumerate(windows):
        heads = _own_heads(fields, own, number, is_full=left == UNLIMITED_WINDOW)
        if num_q_heads % heads[0]:
            raise BadModel(
                f"config.json: num_attention_heads {num_q_heads} is not a multiple of the {heads[0]} KV heads of "
                f"layer {number}"
            )
        layers.append(AttentionLayer(num_q_heads, *heads, scale=1.0, window_left=left))
    reads = of_the_last_like_it(fields, windows)
    for number, read in enumerate(reads):
        if layers[number] != layers[read]:
            raise BadModel(
                f"config.json: layer {number} reads K and V of layer {read}, and the two have "
                f"{layers[number].num_kv_heads} and {layers[read].num_kv_heads} KV heads of {layers[number].head_dim} "
                f"and {layers[read].head_dim} elements; per_layer_config must give both the same"
            )
    return replace(AttentionGeometry.of(layers), reads=reads)


def gemma4_windows(fields: Fields) -> tuple[int, ...]:
    """[layers] window_left; the last layer never has a window."""
    num_layers = fields.count("num_hidden_layers", most=MAX_LAYERS)
    return (*all_but_one_in_a_pattern_slide(fields, num_layers)[:-1], UNLIMITED_WINDOW)


def _own_heads(fields: Fields, own: Fields, number: int, *, is_full: bool) -> tuple[int, int]:
    """KV heads and head size of a layer. own: the file's settings of single layers, as transformers 5 writes them"""
    kv_heads, head_dim = fields.count("num_key_value_heads"), fields.count("head_dim")
    if "per_layer_config" in fields.values:  # an empty one, or null: no layer has settings of its own
        # transformers writes the numbers with as many digits as the largest has
        name = next((name for name in own.values if name.isdecimal() and int(name) == number), str(number))
        layer = own.inner(name)
        return layer.count("num_key_value_heads", kv_heads), layer.count("head_dim", head_dim)
    if not is_full:
        return kv_heads, head_dim
    if fields.flag("attention_k_eq_v", False) and fields.has("num_global_key_value_heads"):
        kv_heads = fields.count("num_global_key_value_heads")
    return kv_heads, fields.count("global_head_dim", 512)


def gemma4_heads(fields: Fields, num_layers: int) -> tuple[Projections, ...]:
    """[layers] Norms on q, k and v; without a window, v may be k."""
    has_bias, v_is_k = fields.flag("attention_bias", False), fields.flag("attention_k_eq_v", False)
    heads = HeadProjections(qkv_bias=has_bias, out_bias=has_bias, qk_norm=True, v_norm=True)
    return tuple(replace(heads, v_is_k=v_is_k and left == UNLIMITED_WINDOW) for left in gemma4_windows(fields))


def gemma4_mlps(fields: Fields, num_layers: int) -> tuple[Mlp, ...]:
    """[layers] Dense MLPs, wider if the layer reads K and V of another, and experts next to them if there are any."""
    num_own = num_layers - fields.whole("num_kv_shared_layers", 0)
    dense = geglu(fields, 1)[0]
    assert isinstance(dense, DenseMlp), "geglu gives dense MLPs"
    factor = 2 if fields.flag("use_double_wide_mlp", False) else 1
    wide = replace(dense, intermediate_size=factor * dense.intermediate_size)
    mlps = [dense if layer < num_own else wide for layer in range(num_layers)]
    if not fields.flag("enable_moe_block", False):
        return tuple(mlps)
    routing = Routing(fields.count("num_experts"), fields.count("top_k_experts"), normalised=True)
    experts = ExpertMlp(routing, fields.count("moe_intermediate_size"), GeGLU(), ExpertTensors.JOINED)
    return tuple(DenseAndExperts(mlp, experts) for mlp in mlps)


def own_inputs(fields: Fields) -> OwnInputs:
    """The inputs that each layer gets for a token in addition to the residual. Raises BadModel."""
    size = fields.whole("hidden_size_per_layer_input")
    if size == 0:
        return OwnInputs()
    given, vocab_size = fields.count("vocab_size_per_layer_input"), fields.count("vocab_size")
    if given < vocab_size:
        raise BadModel(
            f"config.json: vocab_size_per_layer_input is {given} and vocab_size {vocab_size}; both must be equal"
        )
    return OwnInputs(fields.count("hidden_size_per_layer_input"), given)


def gemma4_rope(fields: Fields) -> Mapping[str, object]:
    """The rotary embeddings, if the file leaves them out or says null."""
    return {} if fields.has("rope_parameters") else {"rope_parameters": ROPES["gemma4"]}
