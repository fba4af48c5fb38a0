"""What a model's config.json says about its attention layers: for the runner, and for `rocm-attn explain`.

The table at the end knows more models than the runner can run: the attention runtime serves a model's layers whatever
the rest of the model is made of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from rocm_attn.errors import BadModel, BadSetting, Unsupported
from rocm_attn.problem import UNLIMITED_WINDOW, PoolKind, Problem
from rocm_attn.runner.fields import MAX_LAYERS, Fields, shown


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One attention layer of a model; v rows are as long as q and k rows, but for latent attention.

    scale:       factor on q.k before the softmax
    window_left: previous keys a query sees besides its own; -1: all of them
    latent_dim:  of latent attention, elements of a token's one row that are V, its first ones; 0: K and V of their own
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window_left: int = UNLIMITED_WINDOW
    logits_soft_cap: float = 0.0
    has_sinks: bool = False
    latent_dim: int = 0

    def on_one_of(self, num_ranks: int) -> AttentionLayer:
        """The part of one tensor-parallel rank. KV heads that are fewer than the ranks are held by several.

        Raises BadSetting where the heads do not divide evenly.
        """
        kv_heads = max(self.num_kv_heads, num_ranks)  # one latent row is held by every rank too
        if self.num_q_heads % num_ranks or kv_heads % num_ranks or kv_heads % self.num_kv_heads:
            raise BadSetting(
                f"{self.num_q_heads} query heads over {self.num_kv_heads} KV heads do not divide over {num_ranks} "
                "ranks; choose another --tp"
            )
        return replace(self, num_q_heads=self.num_q_heads // num_ranks, num_kv_heads=kv_heads // num_ranks)

    def problem(self, *, dtype: torch.dtype, page_size: int) -> Problem:
        """The layer as the attention runtime takes it. Raises BadProblem."""
        return Problem(
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.latent_dim or self.head_dim,
            dtype=dtype,
            page_size=page_size,
            scale=self.scale,
            window_left=self.window_left,
            logits_soft_cap=self.logits_soft_cap,
            has_sinks=self.has_sinks,
            pool=PoolKind.LATENT if self.latent_dim else PoolKind.SPLIT,
        )


@dataclass(frozen=True, slots=True)
class AttentionGeometry:
    """The attention layers of a model; no two need be alike.

    reads: layer -> the layer whose K and V it reads: itself, or of the last layers, which keep none, an earlier one
    """

    layers: tuple[AttentionLayer, ...]
    reads: tuple[int, ...]

    @classmethod
    def of(cls, layers: Sequence[AttentionLayer]) -> AttentionGeometry:
        """Layers that all keep K and V."""
        return cls(tuple(layers), tuple(range(len(layers))))

    @property
    def num_storing(self) -> int:
        """Layers that keep K and V, the first ones. A runtime is built of them; the others attend by their numbers."""
        return sum(layer == read for layer, read in enumerate(self.reads))

    def on_one_of(self, num_ranks: int) -> AttentionGeometry:
        """The part of one tensor-parallel rank; see AttentionLayer. Raises BadSetting."""
        return replace(self, layers=tuple(layer.on_one_of(num_ranks) for layer in self.layers))

    def without_idle_windows(self, max_kv_len: int) -> AttentionGeometry:
        """The same layers for sequences up to max_kv_len: a window that none of them outgrows is no window."""
        layers = tuple(
            replace(layer, window_left=UNLIMITED_WINDOW) if layer.window_left >= max_kv_len - 1 else layer
            for layer in self.layers
        )
        return replace(self, layers=layers)

    def problems(self, *, dtype: torch.dtype, page_size: int) -> tuple[Problem, ...]:
        """One Problem per layer that keeps K and V; one that reads them has that layer's. Raises BadProblem."""
        return tuple(layer.problem(dtype=dtype, page_size=page_size) for layer in self.layers[: self.num_storing])


def attention_geometry(config: Mapping[str, object]) -> AttentionGeometry:
    """The attention layers of the model that a config.json describes.

    Raises Unsupported for attention of another kind, BadModel for a config that is not complete.
    """
    architecture = architecture_of(config)
    if architecture in _LATENT_FAMILIES:
        return _latent_geometry(Fields(config, "config.json"))
    refuse_latent_attention(config)
    fields = text_fields(config)
    if fields.has("use_bidirectional_attention") and fields.flag("use_bidirectional_attention"):
        raise Unsupported(f"{architecture} with use_bidirectional_attention: only causal attention is served")
    num_q_heads = fields.count("num_attention_heads")
    head_dim = _head_dim(fields, num_q_heads)
    family = _FAMILIES[architecture]
    layer = AttentionLayer(
        num_q_heads=num_q_heads,
        num_kv_heads=_num_kv_heads(fields, num_q_heads),
        head_dim=head_dim,
        scale=fields.positive("query_pre_attn_scalar", float(head_dim)) ** -0.5 if family.has_scale else 1.0,
        logits_soft_cap=fields.positive("attn_logit_softcapping") if fields.has("attn_logit_softcapping") else 0.0,
        has_sinks=family.has_sinks,
    )
    windows = family.windows(fields, fields.count("num_hidden_layers", most=MAX_LAYERS))
    return AttentionGeometry(tuple(replace(layer, window_left=left) for left in windows), family.reads(fields, windows))


def text_fields(config: Mapping[str, object]) -> Fields:
    """What a config.json says of its text model, with what the model's class knows where the file is silent.

    Raises Unsupported for an architecture whose attention is not known.
    """
    architecture = architecture_of(config)
    if architecture not in _FAMILIES:
        raise Unsupported(
            f"the attention of {architecture} is not known; config.json must name one of "
            f"{', '.join((*_FAMILIES, *_LATENT_FAMILIES))}"
        )
    text = config.get("text_config")
    given = text if isinstance(text, Mapping) else config
    return Fields({**_FAMILIES[architecture].defaults, **given}, "config.json")


def architecture_of(config: Mapping[str, object]) -> str:
    """The class name that a config.json carries. Raises BadModel."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str) or len(names[0]) > _LONGEST_NAME:
        raise BadModel(f"config.json: architectures is {shown(names)}; it must name the model's class in a list")
    return names[0]


def refuse_latent_attention(config: Mapping[str, object]) -> None:
    """Raise Unsupported for a model whose tokens are kept as one latent row."""
    text = config.get("text_config")
    for fields in (config, text if isinstance(text, Mapping) else {}):
        if fields.get("kv_lora_rank") is not None:
            raise Unsupported(
                f"{architecture_of(config)} uses multi-head latent attention (kv_lora_rank "
                f"{shown(fields['kv_lora_rank'])}), which is not served; use a model with K and V heads"
            )


def _latent_geometry(fields: Fields) -> AttentionGeometry:
    """DeepSeek's attention with the projections of K and V absorbed into those of q and of the output."""
    latent_dim, rope_dim = fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim")
    # transformers 5 writes the second name
    scaling = fields.inner("rope_scaling" if fields.has("rope_scaling") else "rope_parameters")
    # YaRN sharpens the softmax of a context that was stretched by factor.
    sharper = 1.0
    if scaling.has("mscale_all_dim") and scaling.values["mscale_all_dim"] != 0:
        sharper = 0.1 * scaling.positive("mscale_all_dim") * math.log(max(1.0, scaling.positive("factor"))) + 1
    scale = (fields.count("qk_nope_head_dim") + rope_dim) ** -0.5 * sharper * sharper
    if not math.isfinite(scale):
        raise BadModel(f"{scaling.source}: mscale_all_dim {scaling.positive('mscale_all_dim')} is too large")
    layer = AttentionLayer(
        num_q_heads=fields.count("num_attention_heads"),
        num_kv_heads=1,
        head_dim=latent_dim + rope_dim,
        scale=scale,
        latent_dim=latent_dim,
    )
    return AttentionGeometry.of((layer,) * fields.count("num_hidden_layers", most=MAX_LAYERS))


def window_left(sliding_window: int) -> int:
    """Hugging Face counts a query's own key in its window; here only the previous ones are counted."""
    return sliding_window - 1


def _head_dim(fields: Fields, num_q_heads: int) -> int:
    if fields.has("head_dim"):
        return fields.count("head_dim")
    hidden_size = fields.count("hidden_size")
    if hidden_size % num_q_heads:
        raise BadModel(
            f"config.json: hidden_size {hidden_size} is not a multiple of num_attention_heads {num_q_heads}, "
            "and there is no head_dim"
        )
    return hidden_size // num_q_heads


def _num_kv_heads(fields: Fields, num_q_heads: int) -> int:
    num_kv_heads = fields.count("num_key_value_heads", num_q_heads)
    if num_q_heads % num_kv_heads:
        raise BadModel(
            f"config.json: num_attention_heads {num_q_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    return num_kv_heads


def _no_window(fields: Fields, num_layers: int) -> tuple[int, ...]:
    return (UNLIMITED_WINDOW,) * num_layers


def _window_everywhere(fields: Fields, num_layers: int) -> tuple[int, ...]:
    if not fields.has("sliding_window"):
        return _no_window(fields, num_layers)
    return (window_left(fields.count("sliding_window")),) * num_layers


def _window_everywhere_if_used(fields: Fields, num_layers: int) -> tuple[int, ...]:
    used = fields.flag("use_sliding_window", False)
    return _window_everywhere(fields, num_layers) if used else _no_window(fields, num_layers)


def _window_where(fields: Fields, num_layers: int, slides: Callable[[int], bool]) -> tuple[int, ...]:
    """A window on the layers that layer_types names, or else on those for which `slides` holds."""
    if not fields.has("sliding_window"):
        return _no_window(fields, num_layers)
    left = window_left(fields.count("sliding_window"))
    if not fields.has("layer_types"):
        return tuple(left if slides(layer) else UNLIMITED_WINDOW for layer in range(num_layers))
    types = fields.list("layer_types")
    if len(types) != num_layers:
        raise BadModel(f"config.json: {len(types)} layer_types for num_hidden_layers {num_layers}")
    meaning = {"sliding_attention": left, "full_attention": UNLIMITED_WINDOW}
    for layer_type in types:
        if layer_type not in meaning:
            raise Unsupported(
                f"a layer of type {shown(layer_type)} is not served; layer_types may hold {', '.join(meaning)}"
            )
    return tuple(meaning[str(layer_type)] for layer_type in types)


def _qwen_windows(fields: Fields, num_layers: int) -> tuple[int, ...]:
    if not fields.flag("use_sliding_window", False):
        return _no_window(fields, num_layers)
    first = fields.whole("max_window_layers", 28)
    return _window_where(fields, num_layers, lambda layer: layer >= first)


def _qwen2_moe_windows(fields: Fields, num_layers: int) -> tuple[int, ...]:
    if not fields.flag("use_sliding_window", False):
        return _no_window(fields, num_layers)
    end = fields.whole("max_window_layers", 28)
    return _window_where(fields, num_layers, lambda layer: layer % 2 == 0 and layer < end)


def _even_layers_slide(fields: Fields, num_layers: int) -> tuple[int, ...]:
    return _window_where(fields, num_layers, lambda layer: layer % 2 == 0)


def _all_but_one_in_a_pattern_slide(fields: Fields, num_layers: int) -> tuple[int, ...]:
    period = fields.count("sliding_window_pattern")
    return _window_where(fields, num_layers, lambda layer: (layer + 1) % period != 0)


def _its_own(fields: Fields, windows: Sequence[int]) -> tuple[int, ...]:
    return tuple(range(len(windows)))


def _of_the_last_like_it(fields: Fields, windows: Sequence[int]) -> tuple[int, ...]:
    """The last num_kv_shared_layers read K and V of the last layer before them that has the same window."""
    num_shared = fields.whole("num_kv_shared_layers")
    num_storing = len(windows) - num_shared
    if not 0 < num_storing <= len(windows):
        raise BadModel(
            f"config.json: num_kv_shared_layers is {num_shared} of num_hidden_layers {len(windows)}; "
            "it must be 0 or more, and fewer than all"
        )
    last = {window: layer for layer, window in enumerate(windows[:num_storing])}
    for layer, window in enumerate(windows):
        if window not in last:
            raise BadModel(
                f"config.json: layer {layer} reads K and V of an earlier layer of its type, but none of the first "
                f"{num_storing} layers, which keep K and V, is of that type"
            )
    return (*range(num_storing), *(last[window] for window in windows[num_storing:]))


@dataclass(frozen=True, slots=True)
class _Family:
    """How one architecture's config.json is to be read.

    windows:  window_left of each layer
    defaults: what a published file may leave out because the model's class knows it; null in the file overrules it
    reads:    AttentionGeometry.reads, from the windows
    has_scale: whether scores are scaled at all
    """

    windows: Callable[[Fields, int], tuple[int, ...]]
    defaults: Mapping[str, object] = field(default_factory=dict)
    has_sinks: bool = False
    reads: Callable[[Fields, Sequence[int]], tuple[int, ...]] = _its_own
    has_scale: bool = True


# Of an architecture; messages quote it.
_LONGEST_NAME = 100
_LATENT_FAMILIES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")

_WINDOW_4096: dict[str, object] = {"sliding_window": 4096}
_MISTRAL: dict[str, object] = {"num_key_value_heads": 8, "sliding_window": 4096}
_GPT_OSS: dict[str, object] = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "attention_bias": True,
    "rms_norm_eps": 1e-5,
}
_GEMMA: dict[str, object] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
_GEMMA2: dict[str, object] = {
    **_GEMMA,
    "vocab_size": 256_000,
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3: dict[str, object] = {
    **_GEMMA,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "sliding_window_pattern": 6,
}
_GEMMA3N: dict[str, object] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "sliding_window": 512,
    "sliding_window_pattern": 5,
    "num_kv_shared_layers": 15,
}
_GEMMA3N_FAMILY = _Family(_all_but_one_in_a_pattern_slide, _GEMMA3N, reads=_of_the_last_like_it, has_scale=False)

_FAMILIES: dict[str, _Family] = {
    "LlamaForCausalLM": _Family(_no_window),
    "MistralForCausalLM": _Family(_window_everywhere, _MISTRAL),
    "MixtralForCausalLM": _Family(_window_everywhere, {"num_key_value_heads": 8}),
    "Phi3ForCausalLM": _Family(_window_everywhere),
    "Qwen2ForCausalLM": _Family(_qwen_windows, _WINDOW_4096),
    "Qwen3ForCausalLM": _Family(_qwen_windows, {**_WINDOW_4096, "head_dim": 128}),
    "Qwen2MoeForCausalLM": _Family(_qwen2_moe_windows, _WINDOW_4096),
    "Qwen3MoeForCausalLM": _Family(_window_everywhere_if_used, _WINDOW_4096),
    "Gemma2ForCausalLM": _Family(_even_layers_slide, _GEMMA2),
    "Gemma3ForCausalLM": _Family(_all_but_one_in_a_pattern_slide, _GEMMA3),
    "Gemma3ForConditionalGeneration": _Family(_all_but_one_in_a_pattern_slide, _GEMMA3),
    "Gemma3nForCausalLM": _GEMMA3N_FAMILY,
    "Gemma3nForConditionalGeneration": _GEMMA3N_FAMILY,
    "GptOssForCausalLM": _Family(_even_layers_slide, _GPT_OSS, has_sinks=True),
}
