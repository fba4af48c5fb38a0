"""The attention layers that a Hugging Face config.json describes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rocm_attn.errors import BadModel
from rocm_attn.models.fields import MAX_LAYERS, Fields, shown
from rocm_attn.models.geometry import AttentionGeometry, AttentionLayer, window_left
from rocm_attn.models.hf_rope import rope_fields, rope_type
from rocm_attn.problem import UNLIMITED_WINDOW


def no_window(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """[layers] window_left for a model without windows."""
    return (UNLIMITED_WINDOW,) * num_layers


def window_everywhere(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """[layers] window_left for a model whose layers all have the file's sliding_window, if it has one."""
    if not fields.has("sliding_window"):
        return no_window(fields, num_layers)
    return (window_left(fields.count("sliding_window")),) * num_layers


def window_everywhere_if_used(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """[layers] Like window_everywhere, if use_sliding_window is true."""
    used = fields.flag("use_sliding_window", False)
    return window_everywhere(fields, num_layers) if used else no_window(fields, num_layers)


def window_where(fields: Fields, num_layers: int, slides: Callable[[int], bool]) -> tuple[int, ...]:
    """A window on the layers that layer_types names, or without it on those for which `slides` holds."""
    if not fields.has("sliding_window"):
        return no_window(fields, num_layers)
    left = window_left(fields.count("sliding_window"))
    if not fields.has("layer_types"):
        return tuple(left if slides(layer) else UNLIMITED_WINDOW for layer in range(num_layers))
    meaning = {"sliding_attention": left, "full_attention": UNLIMITED_WINDOW}
    return tuple(meaning[layer_type] for layer_type in fields.layer_types(num_layers, meaning))


def qwen_windows(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """[layers] window_left: from layer max_window_layers on, if use_sliding_window is true."""
    if not fields.flag("use_sliding_window", False):
        return no_window(fields, num_layers)
    first = fields.whole("max_window_layers", 28)
    return window_where(fields, num_layers, lambda layer: layer >= first)


def qwen2_moe_windows(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """[layers] window_left: on even layers below max_window_layers, if use_sliding_window is true."""
    if not fields.flag("use_sliding_window", False):
        return no_window(fields, num_layers)
    end = fields.whole("max_window_layers", 28)
    return window_where(fields, num_layers, lambda layer: layer % 2 == 0 and layer < end)


def even_layers_slide(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """[layers] window_left: on even layers, unless layer_types says otherwise."""
    return window_where(fields, num_layers, lambda layer: layer % 2 == 0)


def all_but_one_in_a_pattern_slide(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """[layers] window_left: on all but each sliding_window_pattern-th layer, unless layer_types says otherwise."""
    period = fields.count("sliding_window_pattern")
    return window_where(fields, num_layers, lambda layer: (layer + 1) % period != 0)


def rotated_layers_have_chunks(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """[layers] attention_chunk_size in layers that layer_types names, or else in those that turn q and k; else 0.

    Those that turn are the ones in no_rope_layers, or all but each no_rope_layer_interval-th.
    """
    size = fields.count("attention_chunk_size") if fields.has("attention_chunk_size") else 0
    if fields.has("layer_types"):
        meaning = {"chunked_attention": size, "full_attention": 0}
        types = fields.layer_types(num_layers, meaning)
        if not size and "chunked_attention" in types:
            raise BadModel("config.json: layer_types has 'chunked_attention', and there is no attention_chunk_size")
        return tuple(meaning[each] for each in types)
    turns = fields.list("no_rope_layers") if fields.values.get("no_rope_layers") else []
    if not turns:
        interval = fields.count("no_rope_layer_interval")
        turns = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    if len(turns) < num_layers or any(each not in (0, 1) for each in turns):
        raise BadModel(
            f"config.json: no_rope_layers is {shown(turns)}; it must hold a 1 for each layer with rotary embedding and "
            f"a 0 for each other one of {num_layers}"
        )
    return tuple(size if each else 0 for each in turns[:num_layers])


def of_the_last_like_it(fields: Fields, windows: Sequence[int]) -> tuple[int, ...]:
    """The last num_kv_shared_layers read K and V of the last layer before them that has the same window."""
    num_shared = fields.whole("num_kv_shared_layers")
    num_storing = len(windows) - num_shared
    if not 0 < num_storing <= len(windows):
        raise BadModel(
            f"config.json: num_kv_shared_layers is {num_shared} and num_hidden_layers {len(windows)}; it must be 0 "
            "or more, and fewer than all layers"
        )
    last = {window: layer for layer, window in enumerate(windows[:num_storing])}
    for layer, window in enumerate(windows):
        if window not in last:
            raise BadModel(
                f"config.json: layer {layer} reads K and V of an earlier layer of its type, but none of the first "
                f"{num_storing} layers, which store K and V, has that type"
            )
    return (*range(num_storing), *(last[window] for window in windows[num_storing:]))


def by_query_scalar(fields: Fields, head_dim: int) -> float:
    """The scale of scores by query_pre_attn_scalar, which transformers reads for Gemma 2 and 3 alone."""
    scale: float = fields.positive("query_pre_attn_scalar", float(head_dim)) ** -0.5
    return scale


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """Layers with K and V heads.

    windows:   window_left of each layer
    chunks:    keys of a chunk in each layer; 0: no chunks
    reads:     AttentionGeometry.reads, from the windows; each layer reads what it stores, if nothing else is said
    scale:     of scores, by the elements of a head
    may_cap:   whether attn_logit_softcapping is read; transformers does not for Gemma 3, which has the field
    """

    windows: Callable[[Fields, int], tuple[int, ...]]
    has_sinks: bool = False
    reads: Callable[[Fields, Sequence[int]], tuple[int, ...]] = lambda fields, windows: tuple(range(len(windows)))
    scale: Callable[[Fields, int], float] = lambda fields, head_dim: head_dim**-0.5
    chunks: Callable[[Fields, int], tuple[int, ...]] = lambda fields, num_layers: (0,) * num_layers
    may_cap: bool = False

    def __call__(self, fields: Fields) -> AttentionGeometry:
        """The layers that the fields of a text model describe. Raises BadModel, Unsupported."""
        num_q_heads = fields.count("num_attention_heads")
        head_dim = _head_dim(fields, num_q_heads)
        is_capped = self.may_cap and fields.has("attn_logit_softcapping")
        layer = AttentionLayer(
            num_q_heads=num_q_heads,
            num_kv_heads=_num_kv_heads(fields, num_q_heads),
            head_dim=head_dim,
            scale=self.scale(fields, head_dim),
            logits_soft_cap=fields.positive("attn_logit_softcapping") if is_capped else 0.0,
            has_sinks=self.has_sinks,
        )
        num_layers = fields.count("num_hidden_layers", most=MAX_LAYERS)
        windows, chunks = self.windows(fields, num_layers), self.chunks(fields, num_layers)
        local = zip(windows, chunks, strict=True)
        every = AttentionGeometry.of([replace(layer, window_left=left, chunk=chunk) for left, chunk in local])
        return replace(every, reads=self.reads(fields, windows))


def latent_layers(fields: Fields) -> AttentionGeometry:
    """DeepSeek's layers, with the projections of K and V absorbed into those of q and output. Raises BadModel."""
    latent_dim, rope_dim = fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim", least=0)
    scaling = rope_fields(fields)
    # YaRN sharpens the softmax of a context that was stretched by `factor`.
    sharper = 1.0
    if rope_type(scaling) != "default" and scaling.has("mscale_all_dim") and scaling.values["mscale_all_dim"] != 0:
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
