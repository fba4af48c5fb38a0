"""Reads a model's attention layers from SGLang before it serves: their Problems, sinks and pages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from rocm_attn.errors import Unsupported, WrongState
from rocm_attn.external import LayerSource
from rocm_attn.integrations.sglang import indexers
from rocm_attn.integrations.sglang.images import sees_images
from rocm_attn.integrations.sglang.indexers import IndexPages
from rocm_attn.integrations.sglang.seen import (
    IndexerModule,
    KVPoolView,
    LentPool,
    RadixAttentionView,
    Runner,
    has_records,
    windowed_layers,
)
from rocm_attn.kernels.cache.page_format import Encoding, PoolKind, Scales
from rocm_attn.kernels.sparse.arguments import Indexing
from rocm_attn.paging.adopted_pages import EnginePages
from rocm_attn.paging.index_spaces import Space
from rocm_attn.problem import ALL_KEYS, UNLIMITED_WINDOW, AllKeys, EarlierSelection, Indexer, KVEncoding, Problem
from rocm_attn.step.head_weights import NO_HEAD_WEIGHTS, HeadWeights

_DECODER, _ENCODER = "decoder", "encoder_only"
# Models whose prompts are not causal and whose text is. One that writes no text, as EmbeddingGemma, is an encoder.
_BIDIRECTIONAL = "decoder_bidirectional"
# Names in models of SGLang for the logits that their heads add to the softmax denominator.
_SINK_NAMES = ("sinks", "attention_sink_bias")


@dataclass(frozen=True, slots=True)
class ModelLayer:
    """A layer of a model.

    sinks:      float [q_heads], or None if it has none
    is_sparse:  whether it attends to selected keys
    indexer:    the module that selects them; None if the layer has none of its own
    """

    layer: RadixAttentionView
    sinks: Tensor | None
    is_sparse: bool
    indexer: IndexerModule | None


@dataclass(frozen=True, slots=True)
class EngineLayerPages:
    """A layer's pages, in the form that ExternalAttention.pages.bind takes."""

    k: Tensor
    v: Tensor
    coded: EnginePages | None


class ModelLayers:
    """The attention layers of a runner's model that one backend serves, in order, and the kernels they need.

    found:      those layers
    page_size:  for tables and pages: the pool's, or 1, which works for every pool of tokens
    with_masks: whether steps may bring a tree of drafts
    whole_prompts: whether a prompt's tokens are all new in one step
    index_encoding: of index keys in SGLang's pages

    Raises Unsupported with every reason if a layer is not served.
    """

    def __init__(
        self,
        runner: Runner,
        found: Sequence[ModelLayer],
        *,
        page_size: int,
        with_masks: bool,
        whole_prompts: bool,
        index_encoding: KVEncoding,
    ) -> None:
        self._runner, self._page_size, self._with_masks = runner, page_size, with_masks
        self._index_encoding = index_encoding
        pool = runner.token_to_kv_pool
        if not found:
            raise Unsupported(
                f"{type(runner.model).__name__} has no attention layer that can be found before it serves, so its "
                "geometry is not known; choose another attention backend"
            )
        refused = [
            f"layer {each.layer.layer_id}: {why}"
            for each in found
            for why in _refusals(each.layer, runner, with_masks=with_masks)
        ]
        for layer in (each.layer for each in found):
            rows = pool.get_key_buffer(layer.layer_id)
            if (unread := _unread_layout(rows, page_size)) is not None:
                refused.append(unread)
                break
            if (heads := rows.shape[1]) != layer.tp_k_head_num:
                refused.append(
                    f"layer {layer.layer_id} has {layer.tp_k_head_num} KV heads on a rank, and its pool has {heads}; "
                    "with --enable-dp-attention a model must know of it, so leave it out or choose another backend"
                )
        if not whole_prompts and any(_sees_later_tokens(each.layer) for each in found):
            refused.append(
                "tokens of an encoder see later ones, and a prompt may come in parts; use --chunked-prefill-size -1 "
                "and --disable-radix-cache"
            )
        modules = [each.indexer for each in found if each.indexer is not None]
        if modules:
            refused += indexers.refusals(pool, modules, page_size, with_masks=with_masks)
        if has_records(pool) and runner.dtype == torch.float16:
            refused.append(
                "the pool keeps rotated parts in bfloat16, and the model is in float16; use --dtype bfloat16"
            )
        if refused:
            raise Unsupported("; ".join(refused))
        self.layers: Sequence[RadixAttentionView] = [each.layer for each in found]
        # The first one of an id stores; others of it read, and a checkpoint has no scales for them.
        self._places = {_signature(each.layer): place for place, each in reversed([*enumerate(found)])}
        # Holds each layer that was looked up, so that no other object gets its id.
        self._looked_up: dict[int, tuple[RadixAttentionView, int]] = {}
        self._sinks = [each.sinks for each in found]
        windowed = windowed_layers(pool)
        # Those of layers that have an indexer, by their places.
        self.index_pages = {
            place: IndexPages(each.layer.layer_id, each.indexer, page_size, index_encoding)
            for place, each in enumerate(found)
            if each.indexer is not None
        }
        self._problems = [
            self._problem(each, chosen, pool) for each, chosen in zip(found, self._choices(found), strict=True)
        ]
        self.sources = [
            LayerSource(
                problem,
                Space.SWA if each.layer.layer_id in windowed else Space.FULL,
                NO_HEAD_WEIGHTS if each.sinks is None else HeadWeights(sinks=_values(each.sinks)),
            )
            for each, problem in zip(found, self._problems, strict=True)
        ]

    def place(self, layer: RadixAttentionView) -> int:
        """Returns a layer's place among those of the model. Raises WrongState for a layer that matches none of them."""
        kept = self._looked_up.get(id(layer))
        if kept is None:
            place = self._places.get(_signature(layer))
            if place is None:
                raise WrongState(
                    f"layer {layer.layer_id} differs from every layer that the model had when its backend was "
                    f"made, so no kernel was chosen for it: {layer.tp_q_head_num} query heads over "
                    f"{layer.tp_k_head_num} KV heads, head_dim {layer.qk_head_dim}, v_head_dim {layer.v_head_dim}, "
                    f"window {layer.sliding_window_size}"
                )
            kept = self._looked_up[id(layer)] = layer, place
        return kept[1]

    def sinks(self) -> list[Tensor | None]:
        """Returns the sinks of each layer, with the model's present values."""
        return [None if each is None else _values(each) for each in self._sinks]

    def place_of_indexer(self, layer_id: int) -> int:
        """Returns the place of the layer that has an indexer and this id. Raises WrongState."""
        for place, pages in self.index_pages.items():
            if pages.layer_id == layer_id:
                return place
        raise WrongState(f"layer {layer_id} had no indexer when its backend was made, so no kernel was chosen for it")

    def is_sparse(self, place: int) -> bool:
        """True if a layer attends to selected keys."""
        return not isinstance(self._problems[place].indexer, AllKeys)

    @property
    def has_strides(self) -> bool:
        """True if a layer's pages have gaps."""
        pages = (self.pages(place, self._runner.token_to_kv_pool) for place in range(len(self.layers)))
        return not all(each.k.is_contiguous() and (each.v.is_contiguous() or self.is_latent) for each in pages)

    @property
    def num_pages(self) -> int:
        """The number of pages of the largest pool."""
        pool = self._runner.token_to_kv_pool
        return max(self.pages(place, pool).k.shape[0] for place in range(len(self.layers)))

    def pages(self, place: int, pool: KVPoolView) -> EngineLayerPages:
        """Returns a layer's pages in a pool."""
        layer, problem = self.layers[place], self._problems[place]
        owner = pool.get_key_buffer(layer.layer_id)
        k = self._paged(owner)
        v = k[..., : layer.v_head_dim] if self.is_latent else self._paged(pool.get_value_buffer(layer.layer_id))
        coded = None
        if problem.kv_scales is Scales.GROUP:
            coded = EnginePages(None, None, problem.page_format)
        elif problem.kv_encoding is not KVEncoding.LIKE_Q:
            scales = (1.0, 1.0) if self.is_latent else _scales(layer)
            k_scale, v_scale = (torch.tensor([scale], dtype=torch.float32, device=owner.device) for scale in scales)
            coded = EnginePages(k_scale, v_scale, problem.page_format)
        return EngineLayerPages(k, v, coded)

    def lent(self, pool: KVPoolView, num_pages: int) -> KVPoolView:
        """Returns new memory of zeros in the form of a pool, with this many pages for each layer."""
        return LentPool(pool, num_pages, self._page_size)

    def addresses(self, place: int, pool: KVPoolView) -> tuple[int, int]:
        """Returns the addresses of a layer's K and V in a pool. SGLang waits here if the layer's KV is being loaded."""
        layer_id = self.layers[place].layer_id
        k = pool.get_key_buffer(layer_id).data_ptr()
        return k, k if self.is_latent else pool.get_value_buffer(layer_id).data_ptr()

    @property
    def is_latent(self) -> bool:
        """True if a token has one row, whose first part is its V."""
        return self._runner.use_mla_backend

    @property
    def see_images(self) -> bool:
        """True if tokens of an image see each other in a layer."""
        return any(sees_images(layer, self._runner) for layer in self.layers)

    def has_records(self, place: int) -> bool:
        """True if a layer's rows are records: codes, their scales, and the rotated part in bfloat16."""
        return self._problems[place].kv_scales is Scales.GROUP

    def ignores_scales(self, place: int) -> bool:
        """True if a layer has scales of K or V other than 1, and its pages are read without."""
        is_plain = self.is_latent or self._problems[place].kv_encoding is KVEncoding.LIKE_Q
        return is_plain and _scales(self.layers[place]) != (1.0, 1.0)

    def _paged(self, rows: Tensor) -> Tensor:
        """Returns rows as [pages, page_size, heads, dim]. Rows at the end of a pool that fill no page are left out."""
        if rows.dim() == 4:
            return rows.permute(0, 2, 1, 3)
        pages = rows.shape[0] // self._page_size
        return rows[: pages * self._page_size].view(pages, self._page_size, *rows.shape[1:])

    def _choices(self, found: Sequence[ModelLayer]) -> list[AllKeys | Indexer | EarlierSelection]:
        """Returns the keys that each layer attends to, in order. Raises Unsupported for a selection never made."""
        choices: list[AllKeys | Indexer | EarlierSelection] = []
        earlier: Indexing | None = None
        for each in found:
            if each.indexer is not None:
                own = indexers.indexer_of(each.indexer, self._index_encoding)
                earlier = own.indexing
                choices.append(own)
            elif not each.is_sparse:
                choices.append(ALL_KEYS)
            elif earlier is None:
                raise Unsupported(
                    f"layer {each.layer.layer_id} attends to keys that an earlier layer selects, and this rank has "
                    "no such layer; use --pp-size 1"
                )
            else:
                choices.append(EarlierSelection(earlier))
        return choices

    def _problem(self, found: ModelLayer, indexer: AllKeys | Indexer | EarlierSelection, pool: KVPoolView) -> Problem:
        layer, encoding = found.layer, Encoding.of(pool.get_key_buffer(found.layer.layer_id).dtype)
        is_coded = encoding.is_fp8
        of_rows = Scales.LAYER if is_coded else Scales.NONE
        window = max(layer.sliding_window_size, UNLIMITED_WINDOW)
        return Problem(
            num_q_heads=layer.tp_q_head_num,
            num_kv_heads=layer.tp_k_head_num,
            head_dim=layer.qk_head_dim,
            v_head_dim=layer.v_head_dim,
            dtype=self._runner.dtype,
            page_size=self._page_size,
            scale=layer.scaling,
            window_left=window,
            window_right=window if layer.is_cross_attention or _sees_later_tokens(layer) else 0,
            chunk=_chunk(layer, self._runner),
            logits_soft_cap=layer.logit_cap or 0.0,
            has_sinks=found.sinks is not None,
            custom_mask=self._with_masks or sees_images(layer, self._runner),
            pool=PoolKind.LATENT if self.is_latent else PoolKind.SPLIT,
            kv_encoding=KVEncoding(encoding.value) if is_coded else KVEncoding.LIKE_Q,
            kv_scales=Scales.GROUP if has_records(pool) else of_rows,
            indexer=indexer,
        )


def layers_with_pages(runner: Runner, layer_type: type) -> list[ModelLayer]:
    """Returns the layers of a runner's model that read its pool, by id.

    Each has the sinks of the module that it is a part of.
    """
    found: dict[int, ModelLayer] = {}
    for module in runner.model.modules():
        for child in module.children():
            if isinstance(child, layer_type):
                of_names = (getattr(module, name, None) for name in _SINK_NAMES)
                sinks = next((each for each in of_names if isinstance(each, Tensor)), None)
                is_sparse = bool(getattr(module, "use_dsa", False))
                indexer = getattr(module, "indexer", None) if is_sparse else None
                found.setdefault(id(child), ModelLayer(cast("RadixAttentionView", child), sinks, is_sparse, indexer))
    by_id = sorted(found.values(), key=lambda each: each.layer.layer_id)
    return [each for each in by_id if _has_pages(each.layer, runner)]


def of_text(layer: RadixAttentionView) -> bool:
    """True for a layer of a decoder that attends to the decoder's own tokens."""
    return not layer.is_cross_attention and not _sees_later_tokens(layer)


def _signature(layer: RadixAttentionView) -> tuple[object, ...]:
    """Returns the properties that kernels are chosen by."""
    heads = layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim
    return (
        layer.layer_id,
        *heads,
        layer.scaling,
        layer.sliding_window_size,
        layer.logit_cap,
        layer.use_irope,
        _kind(layer),
    )


def _has_pages(layer: RadixAttentionView, runner: Runner) -> bool:
    """True if a layer reads the pool. A model with latent attention also has the same layer over keys and values. Only
    the layer with one head over latent rows reads the pool. On a rank the other one may have one head too."""
    if not runner.use_mla_backend:
        return True
    latent = getattr(runner.token_to_kv_pool, "kv_lora_rank", layer.v_head_dim)
    return layer.tp_k_head_num == 1 and bool(layer.v_head_dim == latent)


def _scales(layer: RadixAttentionView) -> tuple[float, float]:
    """Returns a layer's scales of K and V."""
    of_k, of_v = layer.k_scale_float or layer.k_scale, layer.v_scale_float or layer.v_scale
    return float(of_k or 1.0), float(of_v or 1.0)


def _kind(layer: RadixAttentionView) -> str:
    """Returns the value of AttentionType."""
    return str(getattr(layer.attn_type, "value", layer.attn_type))


def _sees_later_tokens(layer: RadixAttentionView) -> bool:
    """True if tokens of a step see later ones: in an encoder, and in a draft model of blocks."""
    return _kind(layer) != _DECODER


def _chunk(layer: RadixAttentionView, runner: Runner) -> int:
    """Returns the keys of a chunk: a query sees none before its own. 0 if the layer has no chunks."""
    return runner.attention_chunk_size or 0 if layer.use_irope else 0


def _refusals(layer: RadixAttentionView, runner: Runner, *, with_masks: bool) -> list[str]:
    """Returns the reasons why a layer is not served."""
    kind = _kind(layer)
    requested = (
        (
            layer.is_cross_attention and layer.sliding_window_size >= 0,
            f"cross attention with a window of {layer.sliding_window_size} keys, where tokens have no distances,",
        ),
        (kind not in (_DECODER, _ENCODER, _BIDIRECTIONAL), f"attention of the kind {kind!r}"),
        (kind == _BIDIRECTIONAL and runner.is_generation, "text after prompts that are not causal"),
        (layer.pos_encoding_mode != "NONE", f"positions encoded in the kernel ({layer.pos_encoding_mode})"),
        (layer.logit_cap and layer.logit_capping_method != "tanh", f"a soft cap by {layer.logit_capping_method}"),
        (layer.xai_temperature_len > 0, "a temperature that grows with the length"),
        (
            with_masks and _chunk(layer, runner),
            "a tree of drafts in a layer with chunks, which count places of tokens,",
        ),
    )
    return [f"{why} is not served" for is_requested, why in requested if is_requested]


def _unread_layout(rows: Tensor, page_size: int) -> str | None:
    """Returns why a layer's K is not read, or None: with SGLANG_USE_HND_KVCACHE it is [pages, heads, tokens, dim]."""
    if rows.dim() > 4:
        return (
            f"the pool keeps K as {list(rows.shape)}, which AITER's own backend alone reads; leave "
            "SGLANG_AITER_KV_CACHE_LAYOUT out"
        )
    if rows.dim() == 4 and rows.shape[2] != page_size:
        return (
            f"the pool keeps each head's {rows.shape[2]} tokens of a page together, and the branches of drafts read "
            "single tokens; leave SGLANG_USE_HND_KVCACHE out, or use --speculative-eagle-topk 1"
        )
    return None


def _values(sinks: Tensor) -> Tensor:
    return sinks.detach().float()
