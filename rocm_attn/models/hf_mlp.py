"""The MLPs that a Hugging Face config.json describes."""

from rocm_attn.errors import BadModel
from rocm_attn.models.fields import Fields, shown
from rocm_attn.models.gates import ClampedSwiGLU, GeGLU, SwiGLU
from rocm_attn.models.mlp_config import DenseMlp, ExpertMlp, ExpertTensors, Mlp
from rocm_attn.models.routing import ExpertScores, Routing


def activation(fields: Fields, name: str, known: str) -> None:
    """Raises BadModel if the file names another activation than the known one."""
    if fields.text(name, known) != known:
        raise BadModel(f"config.json: {name} is {shown(fields.text(name))}; it must be {known!r}")


def swiglu(fields: Fields, num_layers: int) -> tuple[Mlp, ...]:
    """[layers] Dense MLPs with SiLU gates and no bias."""
    activation(fields, "hidden_act", "silu")
    return (DenseMlp(fields.count("intermediate_size"), SwiGLU()),) * num_layers


def swiglu_with_bias(fields: Fields, num_layers: int) -> tuple[Mlp, ...]:
    """[layers] Dense MLPs with SiLU gates, and with biases if mlp_bias is true."""
    activation(fields, "hidden_act", "silu")
    return (DenseMlp(fields.count("intermediate_size"), SwiGLU(), fields.flag("mlp_bias", False)),) * num_layers


def geglu(fields: Fields, num_layers: int) -> tuple[Mlp, ...]:
    """[layers] Dense MLPs with GELU gates."""
    activation(fields, "hidden_activation", "gelu_pytorch_tanh")
    return (DenseMlp(fields.count("intermediate_size"), GeGLU()),) * num_layers


def qwen_experts(fields: Fields, num_layers: int) -> tuple[Mlp, ...]:
    """Experts in every decoder_sparse_step-th layer that mlp_only_layers does not name."""
    experts = _qwen_experts(fields, normalised=fields.flag("norm_topk_prob", False))
    period = fields.count("decoder_sparse_step", 1)
    named = set(fields.ids("mlp_only_layers"))
    is_dense = [layer in named or (layer + 1) % period > 0 for layer in range(num_layers)]
    dense = swiglu(fields, num_layers) if any(is_dense) else ()
    return tuple(dense[layer] if is_dense[layer] else experts for layer in range(num_layers))


def qwen3_5_experts(fields: Fields, num_layers: int) -> tuple[Mlp, ...]:
    """[layers] The same experts in every layer. Their shares sum to 1: transformers reads no norm_topk_prob here."""
    return (_qwen_experts(fields, normalised=True),) * num_layers


def _qwen_experts(fields: Fields, *, normalised: bool) -> ExpertMlp:
    activation(fields, "hidden_act", "silu")
    routing = Routing(
        # transformers 5 writes the second name
        num_experts=fields.count("num_experts" if fields.has("num_experts") else "num_local_experts"),
        num_chosen=fields.count("num_experts_per_tok"),
        normalised=normalised,
    )
    shared = "shared_expert_intermediate_size"
    return ExpertMlp(
        routing,
        fields.count("moe_intermediate_size"),
        SwiGLU(),
        ExpertTensors.EACH,
        shared_size=fields.count(shared) if fields.has(shared) else 0,
        has_shared_share=fields.has(shared),
    )


def gpt_oss_experts(fields: Fields, num_layers: int) -> tuple[Mlp, ...]:
    """[layers] Experts with clamped gates in every layer."""
    activation(fields, "hidden_act", "silu")
    routing = Routing(fields.count("num_local_experts"), fields.count("num_experts_per_tok"), normalised=True)
    gate = ClampedSwiGLU(limit=fields.positive("swiglu_limit"), alpha=fields.positive("swiglu_alpha"))
    experts = ExpertMlp(routing, fields.count("intermediate_size"), gate, ExpertTensors.STACKED, has_bias=True)
    return (experts,) * num_layers


def deepseek_v2_experts(fields: Fields, num_layers: int) -> tuple[Mlp, ...]:
    """[layers] Experts with a shared dense MLP in every layer after the first first_k_dense_replace."""
    if fields.flag("norm_topk_prob", False):
        raise BadModel("config.json: norm_topk_prob is true; in DeepSeek-V2 the weights of experts are not normalised")
    method = fields.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise BadModel(f"config.json: topk_method is {shown(method)}; it must be 'greedy' or 'group_limited_greedy'")
    is_grouped = method == "group_limited_greedy"
    routing = Routing(
        num_experts=fields.count("n_routed_experts"),
        num_chosen=fields.count("num_experts_per_tok"),
        normalised=False,
        num_groups=fields.count("n_group") if is_grouped else 1,
        num_groups_chosen=fields.count("topk_group") if is_grouped else 1,
        scale=fields.positive("routed_scaling_factor", 1.0),
        in_float32=True,
    )
    return _after_dense(fields, num_layers, routing)


def deepseek_v3_experts(fields: Fields, num_layers: int) -> tuple[Mlp, ...]:
    """Like deepseek_v2_experts, but experts are chosen by sigmoid scores with a correction."""
    return _after_dense(fields, num_layers, sigmoid_routing(fields))


def sigmoid_routing(fields: Fields) -> Routing:
    """The routing of DeepSeek-V3: by sigmoid scores with a correction. Raises BadModel."""
    return Routing(
        num_experts=fields.count("n_routed_experts"),
        num_chosen=fields.count("num_experts_per_tok"),
        normalised=fields.flag("norm_topk_prob", True),
        scores=ExpertScores.SIGMOID,
        num_groups=fields.count("n_group"),
        num_groups_chosen=fields.count("topk_group"),
        best_of_group=2,
        scale=fields.positive("routed_scaling_factor"),
        has_correction=True,
        in_float32=True,
    )


def kimi_experts(fields: Fields, num_layers: int) -> tuple[Mlp, ...]:
    """Like deepseek_v3_experts, in every layer after the first ones."""
    scores, period = fields.text("moe_router_activation_func", "sigmoid"), fields.count("moe_layer_freq", 1)
    if scores != "sigmoid" or period != 1:
        raise BadModel(
            f"config.json: moe_router_activation_func is {shown(scores)} and moe_layer_freq {period}; they must be "
            "'sigmoid' and 1"
        )
    return deepseek_v3_experts(fields, num_layers)


def _after_dense(fields: Fields, num_layers: int, routing: Routing) -> tuple[Mlp, ...]:
    """[layers] first_k_dense_replace dense MLPs, then experts with shared ones, or as mlp_layer_types says."""
    activation(fields, "hidden_act", "silu")
    inner = fields.count("moe_intermediate_size")
    shared_size = inner * fields.count("n_shared_experts") if fields.has("n_shared_experts") else 0
    experts = ExpertMlp(routing, inner, SwiGLU(), ExpertTensors.EACH, shared_size=shared_size)
    (dense,) = swiglu_with_bias(fields, 1)
    if not fields.has("mlp_layer_types"):
        num_dense = fields.whole("first_k_dense_replace", 0)
        return tuple(dense if layer < num_dense else experts for layer in range(num_layers))
    return mlps_by_type(fields, dense, experts, num_layers)


def mlps_by_type(fields: Fields, dense: Mlp, experts: Mlp, num_layers: int) -> tuple[Mlp, ...]:
    """[layers] MLPs in the order of mlp_layer_types. Raises BadModel."""
    kinds, types = {"dense": dense, "sparse": experts}, fields.list("mlp_layer_types")
    if len(types) != num_layers or any(each not in list(kinds) for each in types):
        raise BadModel(
            f"config.json: mlp_layer_types is {shown(types)}; it must hold 'dense' or 'sparse' for each of "
            f"{num_layers} layers"
        )
    return tuple(kinds[str(kind)] for kind in types)
