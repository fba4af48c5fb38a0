"""Recurrent layers, pools of index keys and compressed rows, compared with caches of small models of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rocm_attn.errors import BadModel, RocmAttnError, Unsupported
from rocm_attn.kernels.sparse.arguments import LastUnit
from rocm_attn.models.families import attention_geometry
from rocm_attn.models.geometry import AttentionGeometry
from rocm_attn.models.hf_recurrent import GATED_DELTA, KIMI_DELTA
from rocm_attn.models.recurrent import Rule
from rocm_attn.problem import ALL_KEYS, AllKeys, EarlierSelection, Indexer, Indexing, Row

CONFIGS = Path(__file__).parents[1] / "aiter" / "configs"

_SMALL: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 40,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_EXPERTS = {"n_routed_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
}
_GDN = {
    "num_hidden_layers": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "shared_expert_intermediate_size": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}
_KDA = {"linear_num_heads": 3, "linear_head_dim": 16, "linear_conv_kernel_dim": 3}
_QSA = {
    "indexer_n_heads": 3,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "hc_lowrank": 8,
}
_DSA = {"index_n_heads": 3, "index_head_dim": 16, "index_topk": 8, "index_kpool": 4}

# Model of transformers -> its config class, settings, and the rule of its recurrent layers
HYBRIDS: dict[str, tuple[str, dict[str, Any], Rule]] = {
    "Qwen3NextForCausalLM": ("Qwen3NextConfig", _GDN, GATED_DELTA),
    "Qwen3_5ForCausalLM": ("Qwen3_5TextConfig", _GDN, GATED_DELTA),
    "Qwen3_5MoeForCausalLM": ("Qwen3_5MoeTextConfig", _GDN, GATED_DELTA),
    "Qwen4ExpForCausalLM": ("Qwen4ExpTextConfig", {**_GDN, **_QSA}, GATED_DELTA),
    "KimiLinearForCausalLM": (
        "KimiLinearConfig",
        {**_LATENT, **_KDA, "qk_rope_head_dim": 8, "num_hidden_layers": 6},
        KIMI_DELTA,
    ),
    "Glm5NextForConditionalGeneration": (
        "Glm5NextTextConfig",
        {**_LATENT, **_KDA, **_DSA, "num_hidden_layers": 8},
        KIMI_DELTA,
    ),
}


def geometry_and_cache(name: str, *, tokens: int = 10) -> tuple[AttentionGeometry, Any, Any]:
    """Returns what is read from the config that transformers writes, a small model, and its cache after some tokens."""
    config_class, settings, _ = HYBRIDS[name]
    config: Any = getattr(transformers, config_class)(**{**_SMALL, **_EXPERTS, **settings})
    torch.manual_seed(0)
    if name.startswith("Glm5Next"):
        model = transformers.models.glm5_next.modeling_glm5_next.Glm5NextTextModel(config)
    else:
        model = getattr(transformers, name)(config)
    model = model.float().eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        cache = model(torch.arange(1, tokens + 1)[None], use_cache=True).past_key_values
    return attention_geometry({**config.to_dict(), "architectures": [name]}), model, cache


@pytest.mark.parametrize("name", HYBRIDS)
def test_states_have_the_shapes_that_transformers_gives_them(name: str) -> None:
    geometry, _, cache = geometry_and_cache(name)
    states = {place: layer for place, layer in enumerate(cache.layers) if hasattr(layer, "recurrent_states")}
    assert [place for place, _ in geometry.recurrent] == list(states)
    assert len(states) + len(geometry.layers) == len(cache.layers)
    for place, layer in geometry.recurrent:
        matrices, inputs = states[place].recurrent_states[0], states[place].conv_states[0]
        assert layer.rule is HYBRIDS[name][2]
        assert matrices.shape == (1, layer.num_value_heads, layer.key_dim, layer.value_dim)
        assert matrices.dtype == torch.float32
        # transformers keeps the newest input too, which the next token does not need
        assert inputs.shape == (1, layer.conv_channels, layer.conv_width)
        assert layer.num_bytes(torch.float32) == matrices.nbytes + inputs[..., 1:].nbytes


@pytest.mark.parametrize("name", HYBRIDS)
def test_layers_with_pages_keep_what_transformers_keeps(name: str) -> None:
    geometry, _, cache = geometry_and_cache(name)
    for place, layer in zip(geometry.places, geometry.layers, strict=True):
        k, v = cache.layers[place].keys, cache.layers[place].values
        if layer.latent_dim:
            assert (k.shape[1], k.shape[3]) == (1, layer.latent_dim)
            assert v.shape[3] == layer.rope_dim
        else:
            assert (k.shape[1], k.shape[3]) == (v.shape[1], v.shape[3]) == (layer.num_kv_heads, layer.head_dim)


def test_pools_of_index_keys_are_those_of_transformers_indexers() -> None:
    for name, kind in (("Glm5NextForConditionalGeneration", "Indexer"), ("Qwen4ExpForCausalLM", "QSAIndexer")):
        geometry, model, _ = geometry_and_cache(name)
        modules = [module for module in model.modules() if type(module).__name__.endswith(kind)]
        indexers = [layer.indexer for layer in geometry.layers]
        assert len(modules) == len(indexers)
        for module, indexer in zip(modules, indexers, strict=True):
            assert isinstance(indexer, Indexer)
            if kind == "Indexer":
                sizes = (module.n_heads, module.head_dim, module.index_topk // module.index_kpool, module.index_kpool)
                assert indexer.indexing.scale == module.softmax_scale
            else:
                sizes = (module.index_n_heads, module.index_head_dim, module.block_topk, module.compress_ratio)
                assert indexer.indexing.scale == module.index_head_dim**-0.5
            indexing = indexer.indexing
            assert (indexer.num_heads, indexer.head_dim, indexing.top, indexing.key_tokens) == sizes
            assert (indexing.last_unit, indexing.rectified, indexing.sets) == (LastUnit.ADDED, True, 1)
        assert geometry.least_page_size == 4


def test_compressed_rows_are_those_that_transformers_makes() -> None:
    types = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    config: Any = transformers.DeepseekV4Config(
        **{**_SMALL, **_EXPERTS},
        num_hidden_layers=3,
        layer_types=types,
        compress_rates=dict(zip(types[1:], (4, 8), strict=True)),
        head_dim=16,
        q_lora_rank=24,
        o_groups=2,
        o_lora_rank=8,
        sliding_window=6,
        index_n_heads=3,
        index_head_dim=12,
        index_topk=2,
        partial_rotary_factor=0.5,
    )
    torch.manual_seed(0)
    model = transformers.DeepseekV4ForCausalLM(config).float().eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        cache = model(torch.arange(1, 18)[None], use_cache=True).past_key_values
    geometry = attention_geometry({**config.to_dict(), "architectures": ["DeepseekV4ForCausalLM"]})
    for layer, kept, block in zip(geometry.layers, cache.layers, model.model.layers, strict=True):
        # both leave out the newest token's own key
        assert kept.keys.shape == (1, 1, layer.window_left, layer.head_dim)
        assert layer.latent_dim == layer.head_dim
        assert (layer.scale, layer.num_q_heads) == (block.self_attn.scaling, block.self_attn.sinks.numel())
        assert bool(layer.compressed) == hasattr(kept, "compressed_kv")
        for rows in layer.compressed:
            assert kept.compressed_kv["compressor"].shape == (1, 17 // rows.tokens, rows.head_dim)
            indexer = getattr(block.self_attn.compressor, "indexer", None)
            assert (rows.top, rows.index_heads) == ((indexer.index_topk, indexer.num_heads) if indexer else (0, 0))
            if indexer:
                assert kept.compressed_kv["indexer"].shape[2] == rows.index_dim
            maker = block.self_attn.compressor
            assert (rows.overlaps, rows.folds_index) == ((maker.kv_proj.out_features == 32), indexer is not None)
            if indexer:
                assert indexer.kv_proj.out_features == 2 * rows.index_dim
    *windows, chosen, every = geometry.problems(dtype=torch.bfloat16, page_size=16)
    assert [each.wants_lse for each in windows] == [False, True, True]
    assert (geometry.rows_of(1), geometry.rows_of(2)) == (3, 4)
    assert (chosen.row, every.row) == (Row(4, overlaps=True, also=12), Row(8))
    assert isinstance(chosen.indexer, Indexer)
    assert chosen.indexer.indexing == Indexing(12**-0.5, 2, key_tokens=4, last_unit=LastUnit.LEFT_OUT)
    assert every.indexer == ALL_KEYS
    with pytest.raises(Unsupported, match="layer 0 attends to no compressed rows"):
        geometry.rows_of(0)


@pytest.mark.parametrize(
    "change",
    [
        {"candidate_source_layer_id": 14},
        {"candidate_source_layer_id": 24},
        {"index_source_layer_ids": [2, 8, 14, 24]},
        {"compress_ratios": [0, 0, *[2] * 38]},
    ],
)
def test_candidates_that_no_public_source_describes_are_refused(change: dict[str, Any]) -> None:
    published = json.loads((CONFIGS / "deepseek-v4.1-flash.json").read_text())
    with pytest.raises(Unsupported, match=r"candidate_source_layer_id \d+ is not served: it must be the last of kv_so"):
        attention_geometry({**published, "text_config": {**published["text_config"], **change}})


def test_gemma_4_gives_single_layers_the_sizes_that_transformers_gives_them() -> None:
    config: Any = transformers.Gemma4TextConfig(num_hidden_layers=12, num_kv_shared_layers=0)
    written = json.loads(config.to_json_string())
    assert "05" in written["per_layer_config"], "the numbers have as many digits as the largest"
    geometry = attention_geometry({**written, "architectures": ["Gemma4ForCausalLM"]})
    assert [layer.head_dim for layer in geometry.layers] == [each.head_dim for each in config.per_layer_config]


@pytest.mark.parametrize("settings", [None, {}])
def test_no_layer_of_gemma_4_has_sizes_of_its_own_if_the_settings_are_empty(settings: dict[str, Any] | None) -> None:
    fields = {"per_layer_config": settings, "num_hidden_layers": 6, "num_kv_shared_layers": 0}
    config: Any = transformers.Gemma4TextConfig(**fields)
    geometry = attention_geometry({**fields, "architectures": ["Gemma4ForCausalLM"]})
    assert [layer.head_dim for layer in geometry.layers] == [each.head_dim for each in config.per_layer_config]


def said_by_class(source: str) -> tuple[dict[str, Any], str]:
    """Returns the defaults of the class that a config names as its source, and the rest of the source."""
    name, _, rest = source.removeprefix("transformers ").partition(" ")[2].partition(";")
    return json.loads(getattr(transformers, name)().to_json_string()), rest


OF_CLASSES = [
    place
    for place in sorted(CONFIGS.glob("*.json"))
    if json.loads(place.read_text()).get("source", "")[:12] == "transformers"
]


@pytest.mark.parametrize("place", OF_CLASSES, ids=lambda place: place.stem)
def test_a_config_says_what_the_class_says_that_it_names_as_its_source(place: Path) -> None:
    config = json.loads(place.read_text())
    said, rest = said_by_class(config["source"])
    for key, value in {**config, **config.get("text_config", {})}.items():
        if key not in ("source", "architectures", "text_config") and f" {key} of " not in rest:
            assert said[key] == value, key


_MAMBA: dict[str, Any] = {
    "architectures": ["BambaForCausalLM"],
    "hidden_size": 96,
    "attn_layer_indices": [3],
    "mamba_n_heads": 6,
    "mamba_n_groups": 3,
    "mamba_d_state": 12,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
SMALL_HYBRID = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "hidden_size": 32,
    "num_attention_heads": 2,
    **{key: value for key, value in _GDN.items() if key != "rope_parameters"},
    "full_attention_interval": 4,
}


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"linear_num_value_heads": 5}, BadModel, "linear_num_value_heads is 5, linear_num_key_heads 2"),
        ({"mamba_ssm_dtype": "bfloat16"}, BadModel, "mamba_ssm_dtype 'bfloat16'"),
        ({"full_attention_interval": None}, BadModel, "does not say full_attention_interval"),
        ({"full_attention_interval": 9}, BadModel, "the first layer with pages is missing"),
        ({"layer_types": ["mamba"] * 8}, Unsupported, "layer type 'mamba' is not served; layer_types may hold"),
        ({"layer_types": [["linear_attention"]] * 8}, Unsupported, "layer type .'linear_attention'. is not served"),
        (
            {"architectures": ["DeepseekV4ForCausalLM"], "layer_types": [["sliding_attention"]] * 8},
            Unsupported,
            "layer type .'sliding_attention'. is not served",
        ),
        ({**_MAMBA, "mamba_n_groups": 4}, BadModel, "mamba_n_heads is 6, mamba_d_head 32 and mamba_n_groups 4; .* 192"),
        ({"linear_conv_kernel_dim": 1}, BadModel, "linear_conv_kernel_dim is 1; it must be at least 2"),
        ({**_MAMBA, "mamba_d_conv": 1}, BadModel, "mamba_d_conv is 1; it must be at least 2"),
        ({**_MAMBA, "mamba_d_head": 16}, BadModel, "mamba_n_heads is 6, mamba_d_head 16 and mamba_n_groups 3"),
        ({**_MAMBA, "time_step_limit": [0.0, 0.1]}, BadModel, r"time_step_limit is \[0.0, 0.1\]; it must be 0 and inf"),
        ({"layer_types": ["linear_attention"] * 3}, BadModel, "3 layer_types for num_hidden_layers 8"),
        (
            {"architectures": ["Qwen4ExpForCausalLM"], **_QSA, "indexer_budget": 10},
            BadModel,
            "an indexer chooses 10 tokens in pools of 4",
        ),
        (
            {"architectures": ["DeepseekV4ForCausalLM"], "layer_types": ["full_attention"] * 8},
            Unsupported,
            "layer type 'full_attention' is not served; layer_types may hold sliding_attention, compressed_sparse",
        ),
        (
            {"architectures": ["DeepseekV4ForCausalLM"], "compress_ratios": [0, 4, 8, 128, 4, 4, 4, 4]},
            Unsupported,
            "are not served; they may be 0, 4 and 128",
        ),
        ({"architectures": ["DeepseekV4ForCausalLM"], "compress_ratios": [0, 4]}, BadModel, "kinds of 2 layers"),
        (
            {
                "architectures": ["DeepseekV41ForCausalLM"],
                "compress_ratios": [2] * 8,
                "kv_source_layer_ids": [0],
                "index_source_layer_ids": [1],
            },
            BadModel,
            "layer 0 has compressed rows, and the first of kv_source_layer_ids or",
        ),
    ],
)
def test_layers_that_say_too_little_are_refused(
    changes: dict[str, Any], error: type[RocmAttnError], sentence: str
) -> None:
    indexed = {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 4, "sliding_window": 4}
    with pytest.raises(error, match=sentence):
        attention_geometry({**SMALL_HYBRID, **indexed, **changes})


def test_a_convolution_that_keeps_no_input_is_refused_by_its_field() -> None:
    config = json.loads((CONFIGS / "kimi-k3.json").read_text())
    config["text_config"]["linear_attn_config"]["short_conv_kernel_size"] = 1
    with pytest.raises(BadModel, match="short_conv_kernel_size is 1; it must be at least 2"):
        attention_geometry(config)


def test_an_indexer_that_is_shared_needs_an_earlier_layer_with_pages() -> None:
    config = json.loads((CONFIGS / "glm-5.3-flash.json").read_text())
    types = ["full"] * 45
    for shared, is_served in ((7, True), (3, False)):
        given = {**config["text_config"], "indexer_types": [*types[:shared], "shared", *types[shared + 1 :]]}
        if is_served:
            layers = attention_geometry({**config, "text_config": given}).layers
            assert [type(layer.indexer) for layer in layers[:3]] == [Indexer, EarlierSelection, Indexer]
        else:
            with pytest.raises(BadModel, match="has no earlier indexer to share"):
                attention_geometry({**config, "text_config": given})


def test_ranks_share_the_value_heads_of_a_state_and_the_key_heads_that_they_read() -> None:
    geometry = attention_geometry(json.loads((CONFIGS / "qwen3.8-27b.json").read_text()))
    for ranks, heads in ((1, (48, 16)), (8, (6, 2)), (32, (2, 1))):
        cut = geometry.on_one_of(ranks)
        assert {(layer.num_value_heads, layer.num_key_heads) for _, layer in cut.recurrent} == {heads}
        assert cut.places == geometry.places == tuple(range(3, 64, 4))
    assert all(isinstance(layer.indexer, AllKeys) for layer in geometry.layers)


def test_groups_of_mamba_are_not_cut() -> None:
    geometry = attention_geometry({**SMALL_HYBRID, **_MAMBA})
    assert [place for place, _ in geometry.recurrent] == [0, 1, 2, 4, 5, 6, 7]
    assert {layer.num_key_heads for _, layer in geometry.on_one_of(3).recurrent} == {1}
    with pytest.raises(Unsupported, match=r"Mamba2's 3 groups, .* are not divided over 2 ranks; use a number of ranks"):
        geometry.on_one_of(2)
    one_group = attention_geometry({**SMALL_HYBRID, **_MAMBA, "mamba_n_groups": 1})
    assert {layer.num_value_heads for _, layer in one_group.on_one_of(2).recurrent} == {3}
