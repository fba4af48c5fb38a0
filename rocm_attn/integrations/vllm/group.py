"""KVGroup: the layers of one of vLLM's metadata builders, over the KV cache, tables, slots and graphs that vLLM owns.

vLLM calls a builder once per step, outside of graphs, and each layer inside them. So begin and fill both belong to the
builder, and a graph contains only store and attend. Fills of the steps that vLLM captures are graphs of our own.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from rocm_attn.capture.engine_kernels import StepsAhead, run_nothing
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.zero_inputs import ZeroInputs
from rocm_attn.errors import Unsupported, WrongState
from rocm_attn.external import Bounds, ExternalAttention, ExternalOptions, LayerSource, RecordedFill
from rocm_attn.integrations.encoder_rows import store_at_slots
from rocm_attn.integrations.vllm.kv_views import pages_of
from rocm_attn.integrations.vllm.spans import GroupSpans
from rocm_attn.integrations.vllm.steps import (
    CommonMetadata,
    ReplayShape,
    as_vllm_makes_it,
    external_step,
    slots_of_whole,
)
from rocm_attn.kernels.cache.layer_pages import has_even_slots
from rocm_attn.machine.agreement import Agree, alone
from rocm_attn.machine.target import detect_target
from rocm_attn.paging.adopted import TableSource
from rocm_attn.paging.adopted_pages import EnginePages
from rocm_attn.paging.index_spaces import num_pages
from rocm_attn.problem import Indexer, KVEncoding, PoolKind, Problem, Scales
from rocm_attn.providers.select import Selection
from rocm_attn.selection.kernels import choose_kernels
from rocm_attn.step.external_step import NO_CELLS, DeviceSpans, NoCells
from rocm_attn.step.head_weights import NO_HEAD_WEIGHTS, HeadWeights
from rocm_attn.step.protocols import LayerCalls
from rocm_attn.truth.adopted import try_nothing


class CachedLayer(Protocol):
    """The part that is read of vLLM's layers. kv_cache: bound by vLLM before the first step

    _k_scale, _v_scale: float32 [] or [kv_heads], of FP8 caches
    """

    kv_cache: Tensor
    _k_scale: Tensor
    _v_scale: Tensor


@dataclass(frozen=True, slots=True)
class GroupLayer:
    """A layer of a group.

    layer:   the one that has the cache and its scales: of KV that layers share, the one that stores it
    weights: its head weights. Their values are not there before the first step, and vLLM may change the sinks later
    stores:  whether it has KV of its own
    """

    layer: CachedLayer
    problem: Problem
    weights: HeadWeights = NO_HEAD_WEIGHTS
    stores: bool = True


class LoadedWeights:
    """Gives an attention the head weights of a group's layers: all at its first step, and sinks at each.

    Loaders of weights write to a parameter's data, which neither its version nor a call of vLLM's shows.
    """

    def __init__(self, layers: Iterable[GroupLayer]) -> None:
        self._weights = {index: each.weights for index, each in enumerate(layers) if each.weights != NO_HEAD_WEIGHTS}
        self._own: list[Tensor] | None = None
        self._loaded = [each.sinks for each in self._weights.values() if each.sinks is not None]

    @torch.no_grad()
    def give(self, attention: ExternalAttention) -> None:
        """Before each step. It makes one launch, if layers have sinks."""
        if self._own is None:
            for index, weights in self._weights.items():
                attention.set_head_weights(index, weights)
            own_of = next(iter(attention.cores.values())).head_weights.of
            self._own = [own for index in self._weights if (own := own_of(index).sinks) is not None]
        elif self._own:
            torch._foreach_copy_(self._own, self._loaded)


@dataclass(frozen=True, slots=True)
class GroupSizes:
    """The largest step. kv_len: tokens of the longest sequence"""

    num_seqs: int
    num_tokens: int
    kv_len: int


def say_nothing(selections: Sequence[Selection]) -> None:
    """Logs nothing about the kernels."""


Lend = Callable[[int], Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """Options of a group.

    agree:     how ranks agree on kernels
    has_slots: whether every new token has a slot on this rank, so that slots are checked. A step whose tokens have no
               slots, or slots in block 0, is one that vLLM runs to warm up or on an idle rank. Its tables name no
               pages, so all of its sequences count as padding. False if ranks share a sequence's KV
    is_wide:   called at a capture: whether vLLM's full graphs serve any step of their padded size, prompts too. The
               captured step's bound of new tokens per sequence then means nothing
    said:      called with the kernels that were chosen
    tried:     called before vLLM's first step with the attention, and with a function that binds new pages of zeros to
               its layers, as many as it is given
    ran_ahead: called before vLLM's first step with the attention over vLLM's own blocks, and with its steps
    is_cross:  whether the cache holds K and V of an encoder, which a step's tokens see whole. A sequence without a
               first block has none
    """

    external: ExternalOptions = field(default_factory=lambda: ExternalOptions(page_strides=True))
    agree: Agree = alone
    has_slots: bool = True
    is_wide: Callable[[], bool] = lambda: False
    said: Callable[[Sequence[Selection]], None] = say_nothing
    tried: Callable[[ExternalAttention, Lend], None] = try_nothing
    ran_ahead: Callable[[ExternalAttention, StepsAhead], None] = run_nothing
    is_cross: bool = False


@dataclass(frozen=True, slots=True)
class StepOfGroup:
    """A step that has begun and was filled.

    num_tokens: padding included
    slots:      the slots of its new tokens, from vLLM; None if they are not used
    """

    number: int
    num_tokens: int
    slots: Tensor | None


@dataclass(frozen=True, slots=True)
class _CapturedStep:
    """The shape of a step that vLLM has captured, and the graph of its fill, which reads slots at one address."""

    shape: ReplayShape
    slots_at: int
    fill: RecordedFill


class KVGroup:
    """Attention for the layers of one metadata builder.

    layers: vLLM's name -> layer; all have one block size
    Raises Unsupported if no kernel serves a layer; at the first step, the errors of ExternalAttention.
    """

    def __init__(
        self, layers: Mapping[str, GroupLayer], sizes: GroupSizes, device: torch.device, options: GroupOptions
    ) -> None:
        require_kernels([each.problem for each in layers.values()], sizes, device, options.external)
        self._layers = dict(layers)
        self._weights = LoadedWeights(layers.values())
        self._index = {name: index for index, name in enumerate(layers)}
        self._bound: dict[str, int] = {}
        self._sizes, self._device, self._options = sizes, device, options
        self._page_size = next(iter(layers.values())).problem.page_size
        # vLLM's steps of layers that share KV may have only the tokens with logits, next to the slots of all tokens
        # (kv_sharing_fast_prefill).
        self._checks_slots = any(each.stores for each in layers.values())
        self._spans = GroupSpans([each.problem for each in layers.values()], sizes.num_seqs, sizes.num_tokens, device)
        self._captured: dict[tuple[int, int], _CapturedStep] = {}
        self._recorder = recorder_for(device)
        self._attention: ExternalAttention | None = None
        self._table_at: tuple[int, tuple[int, ...]] = (0, ())

    @property
    def attention(self) -> ExternalAttention:
        """The attention that runs the steps. Raises WrongState before the first one."""
        if self._attention is None:
            raise WrongState("the group has no step yet")
        return self._attention

    @property
    def captured(self) -> Sequence[ReplayShape]:
        """The shapes of the steps that vLLM has captured."""
        return tuple(each.shape for each in self._captured.values())

    def begin(self, common: CommonMetadata) -> StepOfGroup:
        """Begins and fills a step, at the shape of a captured step if one serves it.

        Raises Unsupported for a mask that is not served (GroupSpans.of), and the errors of ExternalAttention.
        """
        own, mask = ReplayShape.of(common), NO_CELLS if self._options.is_cross else self._spans.of(common)
        known = self._captured.get(own.padded)
        is_captured = known is not None and known.shape.serves(own)
        shape, kv_len = known.shape if known is not None and is_captured else own, common.seq_lens
        slots = self._slots(common, shape)
        if slots is not None:
            kv_len = kv_len * (slots.amax() >= self._page_size)
        slots = slots if self._checks_slots else None
        if slots is not None and common.num_reqs and common.max_seq_len >= self._sizes.kv_len:
            slots = slots_of_whole(common, slots, self._page_size, self._sizes.kv_len)
        if self._options.is_cross:
            kv_len = kv_len[: common.num_reqs] * (common.block_table_tensor[: common.num_reqs, 0] > 0)
        if is_captured and isinstance(mask, NoCells):
            mask = self._captured_mask(shape)
        attention = self._renewed(common)
        # Without any token all are padding: a decode's shape would give a single sequence one.
        num_seqs = common.num_reqs if common.num_actual_tokens else 0
        attention.begin(external_step(common, shape, kv_len, num_seqs, is_captured, mask))
        if known is not None and is_captured and known.slots_at == _place(slots):
            attention.replay_fill(known.fill)
        else:
            attention.fill(slots)
        return StepOfGroup(attention.step_number, shape.num_tokens, slots)

    def begin_capture(self, common: CommonMetadata) -> StepOfGroup:
        """Begins and fills a step that vLLM captures. All sequences are padding: its tensors hold no values yet."""
        shape = ReplayShape.of(common)
        if self._options.is_wide():
            shape = shape.widest()
        known = self._captured.get(shape.padded)
        if known is not None and known.shape != shape:
            raise Unsupported(
                f"vLLM captures two graphs for {shape.num_seqs} sequences with {shape.num_tokens} tokens, of up to "
                f"{known.shape.max_q_len} and {shape.max_q_len} tokens each, and a step does not say which one it "
                "replays; set another cudagraph_mode"
            )
        attention, mask = self._renewed(common), self._captured_mask(shape)
        if not attention.gate.is_sealed:
            attention.seal()
        slots = self._slots(common, shape) if self._checks_slots else None
        attention.begin(external_step(common, shape, common.seq_lens, 0, True, mask))
        if known is None:
            fill = attention.record_fill(self._recorder, slots)
            self._captured[shape.padded] = _CapturedStep(shape, _place(slots), fill)
        else:
            attention.fill(slots)
        return StepOfGroup(attention.step_number, shape.num_tokens, slots)

    def attend(
        self, name: str, step: StepOfGroup, kv_cache: Tensor, q: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Computes attention of a step's new tokens.

        q, out: [num_tokens or more, q_heads, head_dim | v_head_dim]
        lse:    float32 [num_tokens or more, q_heads]
        """
        index, tokens = self._bind(name, step, kv_cache), slice(step.num_tokens)
        self.attention.layers.attend(index, q[tokens], out[tokens], None if lse is None else lse[tokens])

    def attend_chosen(
        self, name: str, step: StepOfGroup, kv_cache: Tensor, chosen: Tensor, q: Tensor, out: Tensor
    ) -> None:
        """Computes attention of a step's new tokens over keys selected for each. The layer's problem has an indexer.

        chosen: int32 [num_tokens or more, top of the indexing], positions in the token's sequence, in any order, once;
                negative entries are ignored
        The other arguments are those of attend().
        """
        index, tokens = self._bind(name, step, kv_cache), slice(step.num_tokens)
        is_pad = None if step.slots is None else step.slots < 0
        give_chosen(self.attention.layers, index, chosen[tokens], is_pad)
        self.attention.layers.attend_selected(index, q[tokens], out[tokens])

    def store(self, name: str, step: StepOfGroup, kv_cache: Tensor, k: Tensor, v: Tensor) -> None:
        """Writes K and V of a step's new tokens. k, v: [num_tokens or more, kv_heads, head_dim | v_head_dim]"""
        index = self._bind(name, step, kv_cache)
        self.attention.layers.store(index, k[: step.num_tokens], v[: step.num_tokens])

    def store_at(self, name: str, step: StepOfGroup, kv_cache: Tensor, k: Tensor, v: Tensor) -> None:
        """Like store(), but to the step's slots. They are not the table's: its sequences are parts of others."""
        self._require_running(name, step)
        assert step.slots is not None
        self.store_to(name, kv_cache, k[: step.num_tokens], v[: step.num_tokens], step.slots)

    def store_to(self, name: str, kv_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Writes K and V of any tokens to slots, which are compared with no table.

        k, v:  [n or more, kv_heads, head_dim | v_head_dim]
        slots: int32 or int64 [n]; -1, or one in block 0: this token is not stored
        """
        if self._attention is None:
            self._begin_nothing()
        store_at_slots(self.attention, self._bound_to(name, kv_cache), k, v, slots)

    def _begin_nothing(self) -> None:
        """Begins a step without a sequence, over a table of our own, for what is stored before vLLM's first step.

        vLLM's runner V2 stores a prompt's K and V for a head that drafts blocks before it builds the head's metadata.
        """
        width = num_pages(self._sizes.kv_len, self._page_size)
        with torch.inference_mode(False):
            table = torch.zeros(self._sizes.num_seqs, width, dtype=torch.int32, device=self._device)
            none = torch.zeros(2, dtype=torch.int32, device=self._device)
        self.begin(CommonMetadata(none, none[:1], 0, 0, 1, 1, table, none[:0], True))

    def _slots(self, common: CommonMetadata, shape: ReplayShape) -> Tensor | None:
        """Returns the slots of a step's new tokens, or None if slots are not used or the step has no token."""
        has_slots = self._options.has_slots and common.slot_mapping.shape[0] > 0
        return common.slot_mapping[: shape.num_tokens] if has_slots else None

    def _captured_mask(self, shape: ReplayShape) -> DeviceSpans | NoCells:
        """The mask of a captured step: a graph serves steps with spans and without, if its layers may see any."""
        return self._spans.none if self._spans.is_needed and shape.max_q_len > 1 else NO_CELLS

    def _renewed(self, common: CommonMetadata) -> ExternalAttention:
        """Returns the attention over a step's table, with the head weights that were loaded last."""
        attention = self._attention_over(common.block_table_tensor)
        self._weights.give(attention)
        return attention

    def _attention_over(self, block_table: Tensor) -> ExternalAttention:
        """Returns the attention over vLLM's table of this step. The first call makes it, because the table comes late.

        vLLM runs one step at a time, in any thread.
        """
        place = (block_table.data_ptr(), block_table.stride())
        if self._attention is None:
            self._attention, self._table_at = self._new_attention(block_table), place
        self._attention.take_over()
        if place != self._table_at:
            self._attention.tables.use(_all_rows(block_table, self._sizes.num_seqs))
        self._table_at = place
        return self._attention

    def _new_attention(self, block_table: Tensor) -> ExternalAttention:
        sizes = self._sizes
        caches = {name: each.layer.kv_cache for name, each in self._layers.items()}
        if unbound := sorted(name for name, cache in caches.items() if not cache.numel()):
            raise WrongState(f"vLLM begins a step before {', '.join(unbound)} have a KV cache")
        with torch.inference_mode(False):
            attention = ExternalAttention(
                [LayerSource(each.problem) for each in self._layers.values()],
                TableSource(_all_rows(block_table, sizes.num_seqs)),
                device=self._device,
                bounds=Bounds(
                    num_seqs=sizes.num_seqs,
                    num_tokens=sizes.num_tokens,
                    kv_len=sizes.kv_len,
                    num_pages=max(cache.shape[0] for cache in caches.values()),
                ),
                options=self._external(caches),
                agree=self._options.agree,
            )
            self._weights.give(attention)
            for name, each in self._layers.items():
                if (form := each.problem.index_format) is not None:
                    # vLLM's indexer selects, with keys of its own. These rows are never read, so all pages share one.
                    no_keys = torch.zeros(1, form.page_size, form.head_dim, dtype=each.problem.dtype)
                    pages = no_keys.to(self._device).expand(attention.bounds.num_pages, -1, -1)
                    attention.pages.bind_index(self._index[name], pages)

            def lend(count: int) -> Mapping[str, Tensor]:
                lent = {name: torch.zeros_like(cache[:count]) for name, cache in caches.items()}
                self._use_all(attention, lent)
                return lent

            self._options.tried(attention, lend)
            self._use_all(attention, caches)
            self._options.ran_ahead(attention, StepsAhead(as_vllm_makes_it))
            attention.tables.use(_all_rows(block_table, sizes.num_seqs))
        self._options.said(attention.kernels().selections)
        return attention

    def _external(self, caches: Mapping[str, Tensor]) -> ExternalOptions:
        """The options of the attention over caches: the more even their pages lie, the more kernels read them."""
        pages = [pages_of(self._layers[name].problem, cache) for name, cache in caches.items()]
        # V of a latent layer is a part of K.
        sides = [side for k, v in pages for side in ((k,) if v.data_ptr() == k.data_ptr() else (k, v))]
        return replace(
            self._options.external,
            mask_cells=False,
            page_strides=not all(side.is_contiguous() for side in sides),
            even_slots=all(has_even_slots(k, v) for k, v in pages),
        )

    def _bind(self, name: str, step: StepOfGroup, kv_cache: Tensor) -> int:
        """Returns a layer's index, with these pages bound. Raises WrongState if the step is over or pages moved."""
        self._require_running(name, step)
        return self._bound_to(name, kv_cache)

    def _require_running(self, name: str, step: StepOfGroup) -> None:
        if step.number != self.attention.step_number:
            raise WrongState(
                f"{name} asks for attention in step {step.number}, and step {self.attention.step_number} has "
                "begun; a builder of vLLM runs one step at a time"
            )

    def _bound_to(self, name: str, kv_cache: Tensor) -> int:
        """Returns a layer's index, with these pages bound."""
        if self._bound.get(name) != kv_cache.data_ptr():
            self._use_pages(self.attention, name, kv_cache)
        return self._index[name]

    def _use_all(self, attention: ExternalAttention, caches: Mapping[str, Tensor]) -> None:
        for name, cache in caches.items():
            self._use_pages(attention, name, cache)

    def _use_pages(self, attention: ExternalAttention, name: str, kv_cache: Tensor) -> None:
        each = self._layers[name]
        k, v = pages_of(each.problem, kv_cache)
        coded = None
        if each.problem.kv_encoding is not KVEncoding.LIKE_Q:
            coded = EnginePages(*_scales(each), each.problem.page_format)
        attention.pages.bind(self._index[name], k, v, coded)
        self._bound[name] = kv_cache.data_ptr()


def _scales(each: GroupLayer) -> tuple[Tensor | None, Tensor | None]:
    """Returns the scales of K and V that vLLM keeps outside of a layer's pages; records have their own."""
    if each.problem.kv_scales is Scales.GROUP:
        return None, None
    k_scale = each.layer._k_scale
    return k_scale, k_scale if each.problem.pool is PoolKind.LATENT else each.layer._v_scale


def forget_empty_parts(kv_len: Tensor, out: Tensor, lse: Tensor) -> None:
    """Clears the results of sequences of which this rank has no token, so that they get no weight. May be captured.

    Kernels that need a token of each sequence have read a token of another one.
    kv_len: [num_seqs], this rank's part of each; out: [num_seqs, heads, dim] becomes 0, lse: [num_seqs, heads] -inf
    """
    is_empty = kv_len == 0
    out.masked_fill_(is_empty[:, None, None], 0.0)
    lse.masked_fill_(is_empty[:, None], float("-inf"))


def give_chosen(layers: LayerCalls, number: int, chosen: Tensor, is_pad: Tensor | None = None) -> None:
    """Gives a layer its selected keys in the form of give_selection(): ascending units, and their number.

    May be captured.
    chosen: int32 [T, top], as in attend_chosen()
    is_pad: bool [T], whether it is a padding token, which gets no keys; not given: none is
    """
    places = chosen if is_pad is None else chosen.masked_fill(is_pad[:, None], -1)
    is_none = places < 0
    units = places.masked_fill(is_none, torch.iinfo(torch.int32).max).sort(dim=1).values
    layers.give_selection(number, units.unsqueeze(1), (~is_none).sum(dim=1, dtype=torch.int32).unsqueeze(1))


def give_none(layers: LayerCalls, layer: int, problem: Problem, inputs: ZeroInputs, num_tokens: int) -> None:
    """Gives a layer no key for each of a step's tokens, in the form of attend_chosen(): StepsAhead.choose."""
    assert isinstance(problem.indexer, Indexer)
    give_chosen(layers, layer, inputs.of_choice(problem.indexer, num_tokens) - 1)


def require_kernels(
    problems: Sequence[Problem], sizes: GroupSizes, device: torch.device, options: ExternalOptions
) -> None:
    """Raises Unsupported for layers that no kernel serves, before vLLM allocates memory for them."""
    few = options.pool_size(
        Bounds(num_seqs=sizes.num_seqs, num_tokens=sizes.num_tokens, kv_len=sizes.kv_len, num_pages=2)
    )
    for causality in options.causalities:
        choose_kernels(
            list(dict.fromkeys(options.problem(problem, causality) for problem in problems)),
            detect_target(device),
            options.provider,
            few,
            deterministic=options.deterministic,
            device=torch.device("meta"),  # no kernel is tried yet
        )


def _place(slots: Tensor | None) -> int:
    """Returns the address of slots, which vLLM keeps contiguous; 0 if there are none."""
    return 0 if slots is None else slots.data_ptr()


def _all_rows(block_table: Tensor, num_seqs: int) -> Tensor:
    """Returns the whole table. vLLM passes only the rows of a step's sequences, which are views of fixed memory.

    A table with fewer rows than its memory would differ from step to step.
    """
    stride = block_table.stride(0)
    elements = block_table.untyped_storage().nbytes() // block_table.element_size() - block_table.storage_offset()
    room = (elements - block_table.shape[1]) // max(1, stride) + 1
    rows = max(block_table.shape[0], min(num_seqs, room))
    return block_table.as_strided((rows, block_table.shape[1]), block_table.stride())
