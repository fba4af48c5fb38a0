"""AttentionHooks: the hooks of SGLang's AttentionBackend over ExternalAttention.

    eager     init_forward_metadata                begin, fill
    capture   init_forward_metadata_out_graph      begin, with padding only; then in the graph: fill, and each layer
    replay    init_forward_metadata_out_graph      begin; then the graph

Nothing here imports SGLang. backend.py combines these hooks with SGLang's class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import is_not
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import Tensor

from rocm_attn.capture.engine_kernels import StepsAhead, run_nothing
from rocm_attn.errors import BadTensor, NeverFits, Unsupported, WrongState
from rocm_attn.external import Bounds, ExternalAttention, ExternalOptions, FaultPolicy, raise_fault
from rocm_attn.guards.registry import Guards
from rocm_attn.integrations.plugins import SGLANG, log_kernels
from rocm_attn.integrations.sglang.geometry import ModelLayer, ModelLayers, layers_with_pages
from rocm_attn.integrations.sglang.images import CausalImages, ImageSpans
from rocm_attn.integrations.sglang.indexers import IndexerInputs, index_format
from rocm_attn.integrations.sglang.seen import (
    PAD_KV_LEN,
    ForwardBatchView,
    KVPoolView,
    RadixAttentionView,
    ReqToTokenView,
    Runner,
    has_own_scales,
    slot_map,
)
from rocm_attn.integrations.sglang.steps import StepMaker, as_sglang_makes_it, has_tree
from rocm_attn.machine.agreement import Agree, alone
from rocm_attn.paging.adopted import Source, TableSource, TableUnit
from rocm_attn.paging.index_spaces import Space
from rocm_attn.problem import KVEncoding
from rocm_attn.step.external_step import NO_CELLS, BoolCells, ExternalStep, NoCells
from rocm_attn.step.head_weights import HeadWeights
from rocm_attn.truth.adopted import try_nothing


@dataclass(frozen=True, slots=True)
class Serving:
    """Settings for serving a runner.

    layer_type:    SGLang's class of attention layers
    provider:      of kernels
    deterministic: whether a request's text must not depend on its batch
    with_trees:    whether verified drafts are trees
    whole_prompts: whether a prompt's tokens are all new in one step: none are cached, and no prompt comes in parts
    draft_tokens:  verified per sequence and step, the sequence's last token included; 0: drafts are not verified
    index_encoding: of index keys in SGLang's pages
    agree:         how tensor-parallel ranks agree on kernels
    on_fault:      called with a fault of the device in an earlier step
    guards:        the safeguards; None: all except those that the environment switches off
    tried:         called before SGLang's first step with the attention, and with a function that binds new pages of
                   zeros to its layers, as many as it is given
    ran_ahead:     called before SGLang's first step with the attention over SGLang's own pages, and with its steps
    """

    layer_type: type
    provider: str = "auto"
    deterministic: bool = False
    with_trees: bool = False
    whole_prompts: bool = False
    draft_tokens: int = 0
    index_encoding: KVEncoding = KVEncoding.E4M3FN
    agree: Agree = alone
    on_fault: FaultPolicy = raise_fault
    guards: Guards | None = None
    tried: Callable[[ExternalAttention, Callable[[int], None]], None] = try_nothing
    ran_ahead: Callable[[ExternalAttention, StepsAhead], None] = run_nothing


class AttentionHooks:
    """The methods that SGLang calls on an attention backend. One object per runner, and per overlapped half of a batch.

    table:     int32 [rows, width], slots; None: those of the runner's requests
    page_size: that pages are read at; None: the runner's

    Raises Unsupported with every reason if a layer of the model, or its pool, is not served.
    """

    needs_cpu_seq_lens = False
    # A warmup step of SGLang's own has at most as many sequences as its pool has rows.
    extend_dummy_seqs_capped_by_req_pool = True
    # True if sequences may have fewer tokens in their KV than new ones.
    SHORT_KV: ClassVar[bool] = False

    def __init__(
        self, runner: Runner, serving: Serving, *, table: Tensor | None = None, page_size: int | None = None
    ) -> None:
        super().__init__()
        self.runner = runner
        self.forward_metadata = None
        # SGLang reads both here, and replaces the pool for some drafts.
        self.req_to_token_pool: ReqToTokenView = runner.req_to_token_pool
        self.token_to_kv_pool: KVPoolView = runner.token_to_kv_pool
        self.on_fault = serving.on_fault
        self._serving, self._own_table = serving, table
        self._device = torch.device(runner.device)
        if has_own_scales(self.token_to_kv_pool):
            raise Unsupported(
                f"the pool {type(self.token_to_kv_pool).__name__} keeps K and V in four bits or in MXFP8, with scales "
                "of a few elements each, which no kernel here reads; set --kv-cache-dtype bfloat16"
            )
        self._layers = ModelLayers(
            runner,
            self._served(runner),
            page_size=runner.page_size if page_size is None else page_size,
            with_masks=serving.with_trees,
            whole_prompts=serving.whole_prompts,
            index_encoding=serving.index_encoding,
        )
        # The mask of verified drafts that graphs read in place: bool [n].
        self.mask_cells: Tensor | None = None
        self._chosen: Tensor | None = None
        self.attention = self._build(self._table().shape[0])
        log_kernels(SGLANG, self.attention.kernels().selections)
        _MADE.add(self)

    @property
    def verifies_trees(self) -> bool:
        """True if drafts that are verified are trees, and no chains."""
        return self._serving.with_trees

    def _served(self, runner: Runner) -> list[ModelLayer]:
        """Returns the layers of a model that this backend serves. Raises Unsupported."""
        found = layers_with_pages(runner, self._serving.layer_type)
        if crossed := [each.layer.layer_id for each in found if each.layer.is_cross_attention]:
            raise Unsupported(
                f"layer {crossed[0]}: cross attention in a model that SGLang does not call an encoder and a decoder is "
                "not served; choose another attention backend"
            )
        return found

    def _table(self) -> Tensor:
        return self._own_table if self._own_table is not None else self.req_to_token_pool.req_to_token

    def _sources(self) -> dict[Space, Source]:
        slots = TableSource(self._table(), TableUnit.SLOT)
        spaces = dict.fromkeys(source.space for source in self._layers.sources)
        mapped = slot_map(self.token_to_kv_pool)
        if Space.SWA in spaces and mapped is None:
            raise Unsupported("the pool of layers with a window has no map from slots when backends are made")
        with_map = TableSource(self._table(), TableUnit.SLOT, mapped)
        return {space: with_map if space == Space.SWA else slots for space in spaces}

    def _build(self, num_seqs: int) -> ExternalAttention:
        """Makes kernels, tables and pages for steps of up to num_seqs sequences."""
        serving, table = self._serving, self._table()
        attention = ExternalAttention(
            self._layers.sources,
            self._sources(),
            device=self._device,
            bounds=Bounds(num_seqs=num_seqs, kv_len=table.shape[1], num_pages=self._layers.num_pages),
            options=ExternalOptions(
                provider=serving.provider,
                deterministic=serving.deterministic,
                page_strides=self._layers.has_strides,
                mask_cells=serving.with_trees,
                short_kv=self.SHORT_KV,
                on_fault=self._report,
            ),
            guards=serving.guards,
            agree=serving.agree,
        )
        self._sealed_tokens = 0
        self._tables_seen = table, slot_map(self.token_to_kv_pool)
        images = ImageSpans(self._device) if self._layers.see_images else CausalImages()
        self._steps = StepMaker(num_seqs, attention.tables.max_kv_len, self._device, images)
        serving.tried(attention, lambda count: self._bind(attention, self._layers.lent(self.token_to_kv_pool, count)))
        self._pool_seen = self.token_to_kv_pool
        self._bind(attention, self._pool_seen)
        trees = serving.draft_tokens if serving.with_trees else 0
        serving.ran_ahead(attention, StepsAhead(as_sglang_makes_it, tree_tokens=trees))
        for space, source in self._sources().items():
            attention.tables.use(source, space)
        return attention

    def _report(self, fault: Any) -> None:
        self.on_fault(fault)

    def _bind(self, attention: ExternalAttention, pool: KVPoolView) -> None:
        addresses: list[tuple[int, int]] = []
        for place in range(len(self._layers.layers)):
            pages = self._layers.pages(place, pool)
            attention.pages.bind(place, pages.k, pages.v, pages.coded)
            addresses.append(self._layers.addresses(place, pool))
        self._addresses = addresses
        self._index_keys: dict[int, int] = {}
        self._scale_values: dict[int, Tensor] = {}
        for place in self._layers.index_pages:
            self._bind_index(attention, place, pool)

    def _bind_index(self, attention: ExternalAttention, place: int, pool: KVPoolView) -> None:
        """Binds a layer's index keys at their present address."""
        pages = self._layers.index_pages[place]
        address = pages.rows(pool).data_ptr()  # SGLang waits here, as for K and V
        if self._index_keys.get(place) != address:
            scale_value, keys = pages.scale(), pages.keys(pool)[: self._layers.num_pages]
            attention.pages.bind_index(place, keys, scale_value, index_format(keys))
            self._index_keys[place], self._scale_values[place] = address, scale_value

    def _follow(self) -> None:
        """Adopts the present thread, pool and tables. SGLang may change each of them, but runs one step at a time.

        Raises WrongState if graphs read the old ones, as long as they do.
        """
        self.attention.take_over()
        if self.token_to_kv_pool is not self._pool_seen:
            self._bind(self.attention, self.token_to_kv_pool)
            self._pool_seen = self.token_to_kv_pool
        seen = self._table(), slot_map(self.token_to_kv_pool)
        if any(map(is_not, seen, self._tables_seen)):
            for space, source in self._sources().items():
                self.attention.tables.use(source, space)
            self._tables_seen = seen

    # Hooks of a step.

    def init_forward_metadata(self, forward_batch: ForwardBatchView) -> None:
        """Begins an eager step. Raises the errors of ExternalAttention.begin and fill."""
        step = self._steps.eager(forward_batch)
        if step is not None:
            self.begin(step, forward_batch.out_cache_loc)

    def begin(self, step: ExternalStep, slots: Tensor | None) -> None:
        """Begins and fills an eager step. slots: of its new tokens; None: the table's"""
        self.begin_graphed(step)
        self.fill(slots)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, *_: object, **__: object) -> None:
        """Fixes the memory that graphs read, with room for this many sequences and tokens. Raises NeverFits."""
        if self.attention.gate.is_sealed:
            bounds = self.attention.bounds
            if max_bs > bounds.num_seqs or max_num_tokens > self._sealed_tokens:
                raise NeverFits(
                    f"graphs of {max_bs} sequences and {max_num_tokens} tokens are to be captured after graphs of "
                    f"{bounds.num_seqs} and {self._sealed_tokens}; capture the largest first"
                )
            return
        if max_bs > self.attention.bounds.num_seqs:
            self.attention = self._build(max_bs)
        bounds = self.attention.bounds
        tokens = max(max_bs, max_num_tokens)
        if self._serving.with_trees:
            self.mask_cells = self._mask_of(max(max_bs, 1), tokens)
        self.attention.seal(replace(bounds, num_seqs=max(max_bs, 1), num_tokens=tokens))
        self._sealed_tokens = tokens

    def _mask_of(self, num_seqs: int, num_tokens: int) -> Tensor:
        """Makes room for the mask of this many sequences' drafts, sized as in SGLang: for the context plus the drafts.

        SGLang writes it in place (verify_mask), and graphs read it there.
        """
        drafts = self._serving.draft_tokens
        rows = max(num_tokens, num_seqs * drafts)
        with torch.inference_mode(False):
            return torch.zeros(rows * (self.max_context_len + drafts), dtype=torch.bool, device=self._device)

    @property
    def max_context_len(self) -> int:
        """Tokens of the longest sequence. SGLang uses it as the size of a mask if we have no room for one."""
        return self.attention.tables.max_kv_len

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Returns the number of tokens of a padding sequence."""
        return PAD_KV_LEN

    get_cpu_graph_seq_len_fill_value = get_cuda_graph_seq_len_fill_value

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatchView, in_capture: bool = False) -> None:
        """Begins a step outside of its graph, before its capture and each replay."""
        cells = self._graph_cells(forward_batch, in_capture=in_capture)
        self.begin_graphed(self._steps.graphed(forward_batch, cells, in_capture=in_capture))

    def branch_step(self, batch: ForwardBatchView, number: int, branches: int, *, captured: bool) -> ExternalStep:
        """Returns the number-th step of drafts after a batch's tokens, with this many branches per sequence."""
        return self._steps.branches(batch, number, branches, captured=captured)

    def use_own_table(self, table: Tensor) -> None:
        """Sets the table to read from now on. Call it before the first capture."""
        self._own_table = table

    def begin_graphed(self, step: ExternalStep) -> None:
        """Begins a step before a capture or a replay."""
        self._follow()
        self.attention.begin(step)
        self._tokens, self._chosen = step.shape.num_tokens, None

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatchView) -> None:
        """Fills a step; captured in its graph before its layers."""
        self.fill(forward_batch.out_cache_loc)

    def fill(self, slots: Tensor | None) -> None:
        """Fills the step. May be captured. slots: of new tokens; None: the table's"""
        self.attention.fill(slots)

    def _graph_cells(self, batch: ForwardBatchView, *, in_capture: bool) -> BoolCells | NoCells:
        """Returns the mask of a captured step of drafts, at a fixed address. Raises WrongState, NeverFits."""
        if not batch.forward_mode.is_target_verify():
            return NO_CELLS
        mask = self.mask_cells
        if mask is None:
            if not in_capture and has_tree(batch):
                raise WrongState("a tree of drafts is to be verified, and graphs were captured without masks")
            return NO_CELLS
        if not in_capture:
            if not has_tree(batch):
                raise WrongState("draft tokens came without their tree, and the graph that verifies them reads one")
            cells = batch.spec_info.custom_mask
            if cells.data_ptr() != mask.data_ptr():  # n-grams, and halves of a batch, have masks of their own
                if cells.numel() > mask.numel():
                    raise NeverFits(f"a tree's mask has {cells.numel()} cells, and graphs have {mask.numel()}")
                mask[: cells.numel()].copy_(cells)
        return BoolCells(mask, batch.positions)

    # Hooks of a layer.

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttentionView,
        forward_batch: ForwardBatchView,
        save_kv_cache: bool = True,
        **more: Any,
    ) -> Tensor:
        """Returns a layer's attention in a step of any kind: [T, q_heads * v_head_dim]."""
        return self._run(q, k, v, layer, forward_batch, save_kv_cache, more)

    forward_decode = forward_extend

    def get_indexer_metadata(self, layer_id: int, forward_batch: ForwardBatchView) -> AttentionHooks:
        """Returns the backend that selects a layer's keys. SGLang's wrappers of backends forward to the batch's."""
        return self

    def choose(self, layer_id: int, projected: IndexerInputs) -> Tensor:
        """Stores a step's index keys of a layer, and selects the keys for its tokens in this layer and later ones.

        Returns the tensor that attention must be called with as topk_indices. The selection itself is in our memory.
        """
        place = self._layers.place_of_indexer(layer_id)
        self._bind_index(self.attention, place, self.token_to_kv_pool)
        tokens = self._tokens
        if projected.q.shape[0] < tokens:
            raise BadTensor(
                f"the indexer of layer {layer_id} was called with {projected.q.shape[0]} tokens in a step of "
                f"{tokens}; its metadata belongs to another batch"
            )
        self.attention.layers.store_index(place, projected.k[:tokens])
        self.attention.layers.select(place, projected.q[:tokens], projected.gates[:tokens])
        self._chosen = projected.q.new_empty((projected.q.shape[0], 0), dtype=torch.int32)
        return self._chosen

    def _run(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttentionView,
        batch: ForwardBatchView,
        saves: bool,
        more: dict[str, Any],
    ) -> Tensor:
        """Stores a layer's K and V if `saves`, and returns its attention. more: other arguments of forward_extend"""
        place = self._place(layer)
        q, k, v = _joined(q, k, v, layer, more)
        self._check_sinks(place, more.pop("sinks", None))
        is_sparse = self._layers.is_sparse(place)
        self._check_choice(layer, more.pop("topk_indices", None), is_sparse=is_sparse)
        if unknown := sorted(name for name, value in more.items() if value is not None and value is not False):
            raise Unsupported(f"layer {layer.layer_id} was called with {', '.join(unknown)}, which is not served")
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        tokens = self._tokens
        if q.shape[0] < tokens:
            raise BadTensor(
                f"layer {layer.layer_id} was called with {q.shape[0]} tokens in a step of {tokens}; its metadata "
                "belongs to another batch"
            )
        out = q.new_empty(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        if q.shape[0] > tokens:  # rows of a rank that keeps up with others
            out[tokens:].zero_()
        if self._layers.has_records(place) and not saves:
            # On gfx95 SGLang may store rows by AITER's fused_qk_rope_cat_and_cache_mla, as codes without scales.
            raise Unsupported(
                f"the rows of layer {layer.layer_id} were stored before attention, and the pool's rows are records, "
                "which only our store makes here; use --kv-cache-dtype bfloat16, or set SGLANG_USE_AITER=0"
            )
        # A layer that reads another one's rows passes no K.
        if not saves and (k is not None or self._layers.is_latent) and self._layers.ignores_scales(place):
            raise Unsupported(
                f"the rows of layer {layer.layer_id} were stored before attention, and the kernels that do it on ROCm "
                "divide them by the layer's scales, which are not read from this pool; use --kv-cache-dtype fp8_e4m3, "
                "or --attention-backend rocm_attn if the rows are latent"
            )
        if saves and k is not None and v is not None:
            k = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
            if self._layers.is_latent:
                v = k[..., : layer.v_head_dim]
            else:
                v = v.view(-1, layer.tp_k_head_num, layer.v_head_dim)
            self.attention.layers.store(place, k[:tokens], v[:tokens])
        attend = self.attention.layers.attend_selected if is_sparse else self.attention.layers.attend
        attend(place, q[:tokens], out[:tokens])
        return out.view(out.shape[0], -1)

    def _place(self, layer: RadixAttentionView) -> int:
        """Returns a layer's place among those of the model, after binding its pages if they have moved."""
        place = self._layers.place(layer)
        addresses = self._layers.addresses(place, self.token_to_kv_pool)
        if addresses != self._addresses[place]:
            pages = self._layers.pages(place, self.token_to_kv_pool)
            self.attention.pages.bind(place, pages.k, pages.v, pages.coded)
            self._addresses[place] = addresses
        return place

    def _check_sinks(self, place: int, sinks: Tensor | None) -> None:
        """Raises Unsupported unless a call has sinks exactly if the layer had some when its kernels were chosen."""
        source = self._layers.sources[place]
        if (sinks is not None) is not source.problem.has_sinks:
            layer_id = self._layers.layers[place].layer_id
            found = "had" if source.problem.has_sinks else "had none"
            raise Unsupported(
                f"layer {layer_id} was called {'with' if sinks is not None else 'without'} sinks, and {found} when "
                "its kernels were chosen; choose another attention backend for this model"
            )

    def _check_choice(self, layer: RadixAttentionView, chosen: Tensor | None, *, is_sparse: bool) -> None:
        """Raises WrongState or Unsupported unless exactly the sparse layers are called with this step's selection."""
        if is_sparse:
            of_step = self._chosen
            # SGLang may pass its first rows alone. Views without elements tell whether the memory is the same.
            if chosen is None or of_step is None or not chosen[:0].is_set_to(of_step[:0]):
                raise WrongState(
                    f"layer {layer.layer_id} attends to selected keys, and was called "
                    + ("without a selection" if chosen is None else "with a selection of another step")
                    + "; its indexer, or an earlier layer's, selects in each step"
                )
        elif chosen is not None:
            raise Unsupported(
                f"layer {layer.layer_id} was called with topk_indices, and had no indexer when its kernels were chosen"
            )

    def renew_weights(self) -> None:
        """Reads the model's sinks, and the scales of K, V and index keys, again, after its weights have changed."""
        self.attention.take_over()
        for place, sinks in enumerate(self._layers.sinks()):
            if sinks is not None:
                self.attention.set_head_weights(place, HeadWeights(sinks=sinks))
        for place in range(len(self._layers.layers)):
            bound, coded = self.attention.pages.layer(place), self._layers.pages(place, self.token_to_kv_pool).coded
            if coded is not None:
                for own, now in ((bound.k_scale, coded.k_scale), (bound.v_scale, coded.v_scale)):
                    if own is not None and now is not None:
                        own.copy_(now)
        for place, pages in self._layers.index_pages.items():
            self._scale_values[place].copy_(pages.scale())


_MADE: WeakSet[AttentionHooks] = WeakSet()


def renew_weights(runner: Runner) -> None:
    """Lets each backend of a runner read the model's weights again. SGLang keeps several, and uses some of them later:
    one for each number of drafts, or for each half of a batch."""
    for hooks in [each for each in _MADE if each.runner is runner]:
        hooks.renew_weights()


def _joined(
    q: Tensor, k: Tensor | None, v: Tensor | None, layer: RadixAttentionView, more: dict[str, Any]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Joins q, k and v of a latent layer to one tensor each, if the rotated parts are passed separately."""
    q_rope, k_rope = more.pop("q_rope", None), more.pop("k_rope", None)
    latent, rotated = layer.v_head_dim, layer.qk_head_dim - layer.v_head_dim
    if q_rope is not None:
        parts = q.view(-1, layer.tp_q_head_num, latent), q_rope.view(-1, layer.tp_q_head_num, rotated)
        q = torch.cat(parts, -1)
    if k_rope is not None and k is not None:
        k = torch.cat((k.view(-1, 1, latent), k_rope.view(-1, 1, rotated)), -1)
        v = k[..., :latent]
    return q, k, v
