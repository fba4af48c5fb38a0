"""The arguments of AttentionHooks in SGLang 0.5.23, without it: layers, pools, a runner and batches, from its source.

The engine here allocates pages, writes its table, and compares every layer's output with a reference that shares no
code with the project.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rocm_attn.external import raise_fault
from rocm_attn.integrations.sglang.hooks import AttentionHooks, Serving
from rocm_attn.machine.agreement import alone
from tests.amd.integrations.oracle import Array, Scores, attention

Q_HEADS, KV_HEADS, DIM, LATENT, ROTATED = 4, 2, 16, 16, 8
ROOM, NUM_ROWS = 96, 9
NAN = float("nan")
# Slots of page 0, whatever the page size.
_MOST_TOKENS_OF_A_PAGE = 4
TOLERANCE = 2e-5
# Tokens of a chunk, in layers that have chunks.
CHUNK = 6


class Mode(enum.Enum):
    """SGLang's ForwardMode."""

    EXTEND = 1
    DECODE = 2
    MIXED = 3
    IDLE = 4
    TARGET_VERIFY = 5
    DRAFT_EXTEND_V2 = 6

    def is_idle(self) -> bool:
        return self is Mode.IDLE

    def is_decode(self) -> bool:
        return self is Mode.DECODE

    def is_target_verify(self) -> bool:
        return self is Mode.TARGET_VERIFY

    def is_draft_extend_v2(self) -> bool:
        return self is Mode.DRAFT_EXTEND_V2


class RadixAttention(nn.Module):
    def __init__(self, layer_id: int, **fields: Any) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.tp_q_head_num, self.tp_k_head_num = Q_HEADS, KV_HEADS
        self.qk_head_dim = self.v_head_dim = DIM
        self.scaling, self.logit_cap, self.sliding_window_size = 0.3, 0.0, -1
        self.logit_capping_method, self.pos_encoding_mode = "tanh", "NONE"
        self.is_cross_attention = self.use_irope = False
        self.attn_type = SimpleNamespace(value="decoder")
        self.k_scale: float | None = None
        self.v_scale: float | None = None
        self.k_scale_float: float | None = None
        self.v_scale_float: float | None = None
        self.xai_temperature_len = -1.0
        for name, value in fields.items():
            setattr(self, name, value)


def unwritten(num_slots: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns unwritten rows: NaN, except for slots that pads may read."""
    rows = torch.full((num_slots, heads, dim), NAN)
    rows[:_MOST_TOKENS_OF_A_PAGE] = 0
    return rows.to(device, dtype)


class SplitPool:
    """MHATokenToKVPool: [slots, heads, dim] for each layer; slots of page 0 belong to no request."""

    def __init__(
        self, layers: Sequence[int], num_slots: int, dtype: torch.dtype, device: torch.device, dim: int = DIM
    ) -> None:
        def rows() -> Tensor:
            return unwritten(num_slots, KV_HEADS, dim, dtype, device)

        self.k, self.v = ({layer: rows() for layer in layers} for _ in range(2))

    def get_key_buffer(self, layer_id: int) -> Tensor:
        return self.k[layer_id]

    def get_value_buffer(self, layer_id: int) -> Tensor:
        return self.v[layer_id]

    def by_heads(self, page_size: int) -> None:
        """Gives rows the layout of SGLANG_USE_HND_KVCACHE: [pages, heads, page_size, dim]."""
        for rows in (self.k, self.v):
            for layer, of_slots in rows.items():
                paged = of_slots.view(-1, page_size, *of_slots.shape[1:])
                rows[layer] = paged.transpose(1, 2).contiguous()


class LatentPool(SplitPool):
    """MLATokenToKVPool: one row per token."""

    kv_lora_rank, qk_rope_head_dim = LATENT, ROTATED

    def __init__(
        self, layers: Sequence[int], num_slots: int, dtype: torch.dtype, device: torch.device, dim: int = DIM
    ) -> None:
        self.k = {layer: unwritten(num_slots, 1, LATENT + ROTATED, dtype, device) for layer in layers}

    def get_value_buffer(self, layer_id: int) -> Tensor:
        return self.k[layer_id][..., : self.kv_lora_rank]


class WindowPool:
    """SWAKVPool: a pool for layers with a window, another one for all others, and a map between their slots."""

    swa_layer_nums = 1

    def __init__(
        self, windows: Sequence[int], num_slots: int, dtype: torch.dtype, device: torch.device, dim: int
    ) -> None:
        self.pool = SplitPool(range(len(windows)), num_slots, dtype, device, dim)
        self.layers_mapping = {layer: (layer, window >= 0) for layer, window in enumerate(windows)}
        # An index of -1 reads the last entry.
        self.full_to_swa_index_mapping = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self.full_to_swa_index_mapping[-1] = -1

    def get_key_buffer(self, layer_id: int) -> Tensor:
        return self.pool.k[layer_id]

    def get_value_buffer(self, layer_id: int) -> Tensor:
        return self.pool.v[layer_id]


@dataclass
class Request:
    row: int
    pages: list[int]
    kv_len: int = 0


@dataclass
class Step:
    batch: Any
    new: list[int]
    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    outs: list[Tensor] = field(default_factory=list)


class Engine:
    """A model of some layers and its pool, served by AttentionHooks.

    windows: of each layer, -1 for none
    is_encoder: True if tokens see all of their sequence, as in an encoder, or in a draft model of blocks
    model_name: of the model's class
    chunked: layers that attend within chunks of CHUNK tokens
    dim:     elements of a head, unless rows are latent
    by_heads: whether pages have the tokens of each head together
    """

    def __init__(
        self,
        provider: str,
        device: torch.device,
        *,
        page_size: int = 4,
        dim: int = DIM,
        windows: Sequence[int] = (-1,),
        chunked: Sequence[int] = (),
        is_encoder: bool = False,
        model_name: str = "Model",
        with_window_pool: bool = False,
        by_heads: bool = False,
        is_latent: bool = False,
        kv_dtype: torch.dtype = torch.float32,
        with_trees: bool = False,
        draft_tokens: int = 0,
        with_sinks: bool = False,
        deterministic: bool = False,
        serve: bool = True,
        **given: Any,
    ) -> None:
        self.page_size, self.windows, self.is_latent, self.device = page_size, tuple(windows), is_latent, device
        self.chunked, self.causal = frozenset(chunked), not is_encoder
        if is_encoder:
            given.setdefault("attn_type", SimpleNamespace(value="encoder_only"))
        self.random = np.random.default_rng(0)
        num_pages = 1 + (NUM_ROWS - 1) * -(-ROOM // page_size)
        num_slots = num_pages * page_size
        self.free = self.random.permutation(np.arange(1, num_pages)).tolist()
        self.table = torch.zeros(NUM_ROWS, ROOM, dtype=torch.int32, device=device)
        pool_type = LatentPool if is_latent else SplitPool
        self.pool: Any = (
            WindowPool(
                [0 if layer in self.chunked else window for layer, window in enumerate(windows)],
                num_slots,
                kv_dtype,
                device,
                dim,
            )
            if with_window_pool
            else pool_type(range(len(windows)), num_slots, kv_dtype, device, dim)
        )
        if by_heads:
            assert isinstance(self.pool, SplitPool)
            self.pool.by_heads(page_size)
        self.num_slots = num_slots
        fields = {"qk_head_dim": dim, "v_head_dim": dim, **given}
        if is_latent:
            fields = {"tp_k_head_num": 1, "qk_head_dim": LATENT + ROTATED, "v_head_dim": LATENT, **given}
        self.model = type(model_name, (nn.Module,), {})()
        self.layers = []
        for layer_id, window in enumerate(windows):
            block = nn.Module()
            block.attn = RadixAttention(
                layer_id, sliding_window_size=window, use_irope=layer_id in self.chunked, **fields
            )
            if with_sinks:
                block.sinks = nn.Parameter(self.random_rows(Q_HEADS))
            self.layers.append(block.attn)
            self.model.add_module(f"block{layer_id}", block)
        self.runner: Any = SimpleNamespace(
            device=str(device),
            dtype=torch.float32,
            page_size=page_size,
            model=self.model,
            use_mla_backend=is_latent,
            req_to_token_pool=SimpleNamespace(req_to_token=self.table),
            token_to_kv_pool=self.pool,
            attention_chunk_size=CHUNK if chunked else None,
            is_generation=not is_encoder,
        )
        self.serving = Serving(
            RadixAttention,
            provider=provider,
            deterministic=deterministic,
            with_trees=with_trees,
            whole_prompts=is_encoder,
            draft_tokens=draft_tokens,
            agree=alone,
            on_fault=raise_fault,
        )
        self.stored: dict[tuple[int, int], tuple[Array, Array]] = {}
        self.rows = list(range(1, NUM_ROWS))
        if serve:
            self.hooks = AttentionHooks(self.runner, self.serving)

    def admit(self) -> Request:
        return Request(self.rows.pop(0), [])

    def reserve(self, request: Request, kv_len: int) -> None:
        """Allocates pages for kv_len tokens, in the table and in the map."""
        size = self.page_size
        while len(request.pages) * size < kv_len:
            page, page_no = self.free.pop(), len(request.pages)
            request.pages.append(page)
            here = slice(page_no * size, min((page_no + 1) * size, ROOM))
            self.table[request.row, here] = torch.arange(page * size, page * size + here.stop - here.start)
            if isinstance(self.pool, WindowPool):
                mapped = self.num_slots // size - page  # another page of its own pool
                self.pool.full_to_swa_index_mapping[page * size : (page + 1) * size] = torch.arange(
                    mapped * size, (mapped + 1) * size
                )

    def random_rows(self, *shape: int) -> Tensor:
        return torch.from_numpy(self.random.standard_normal(shape)).float().to(self.device)

    def ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self.device)

    def batch(self, mode: Mode, requests: Sequence[Request], new: Sequence[int], **more: Any) -> Any:
        """Returns a ForwardBatch, with pages for its new tokens. Lengths exclude drafts that are verified."""
        for request, count in zip(requests, new, strict=True):
            self.reserve(request, request.kv_len + count)
        verifies = mode is Mode.TARGET_VERIFY
        lens = [r.kv_len + (0 if verifies else count) for r, count in zip(requests, new, strict=True)]
        slots = [
            slot
            for request, count in zip(requests, new, strict=True)
            for slot in self.table[request.row, request.kv_len : request.kv_len + count].tolist()
        ]
        positions = [r.kv_len + i for r, count in zip(requests, new, strict=True) for i in range(count)]
        return SimpleNamespace(
            forward_mode=mode,
            batch_size=len(requests),
            req_pool_indices=self.ints([r.row for r in requests]),
            seq_lens=self.ints(lens),
            seq_lens_cpu=torch.tensor(lens),
            out_cache_loc=self.ints(slots),
            extend_seq_lens=self.ints(new).int(),
            extend_seq_lens_cpu=list(new),
            extend_prefix_lens_cpu=[request.kv_len for request in requests],
            positions=self.ints(positions),
            spec_info=SimpleNamespace(draft_token_num=max(new), num_tokens_per_req=max(new), topk=1, custom_mask=None),
            **{"mm_inputs": None, **more},
        )

    def step_of(self, batch: Any, new: Sequence[int], padded: int | None = None) -> Step:
        """Returns new q, k and v of each layer; NaN in padded rows."""
        total = sum(new)
        padded = total if padded is None else padded

        def rows(heads: int, dim: int) -> list[Tensor]:
            made = [self.random_rows(padded, heads, dim) for _ in self.layers]
            for each in made:
                each[total:] = NAN
            return made

        layer = self.layers[0]
        k = rows(layer.tp_k_head_num, layer.qk_head_dim)
        v = (
            [each[..., : layer.v_head_dim] for each in k]
            if self.is_latent
            else rows(layer.tp_k_head_num, layer.v_head_dim)
        )
        return Step(batch, list(new), rows(Q_HEADS, layer.qk_head_dim), k, v)

    def forward(self, step: Step, hooks: AttentionHooks | None = None, **more: Any) -> None:
        hooks = self.hooks if hooks is None else hooks
        call: Any = hooks.forward_decode if step.batch.forward_mode is Mode.DECODE else hooks.forward_extend
        step.outs = []
        for layer, q, k, v in zip(self.layers, step.q, step.k, step.v, strict=True):
            block: Any = self.model.get_submodule(f"block{layer.layer_id}")
            sinks = {"sinks": block.sinks} if hasattr(block, "sinks") else {}
            step.outs.append(call(q, k, v, layer, step.batch, **sinks, **more))

    def run(self, mode: Mode, requests: Sequence[Request], new: Sequence[int], **more: Any) -> Step:
        step = self.begun(mode, requests, new, **more)
        self.finish(requests, step)
        return step

    def begun(
        self, mode: Mode, requests: Sequence[Request], new: Sequence[int], padded: int | None = None, **more: Any
    ) -> Step:
        step = self.step_of(self.batch(mode, requests, new, **more), new, padded)
        self.hooks.init_forward_metadata(step.batch)
        return step

    def finish(
        self, requests: Sequence[Request], step: Step, shown: Callable[[int], Array] | None = None, **more: Any
    ) -> None:
        """Runs the layers in a step that has begun, and compares them with the reference. more: of forward()"""
        self.forward(step, **more)
        self.keep(requests, step)
        self.compare(requests, step, shown)

    def decoded(self, values: Tensor, scale: float | None) -> Array:
        """Returns rows as the pool gives them back after they were stored."""
        dtype = self.pool.get_key_buffer(0).dtype
        scale_value = 1.0 if scale is None else scale
        rows: Array = ((values.float() / scale_value).to(dtype).double() * scale_value).cpu().numpy()
        return rows

    def keep(self, requests: Sequence[Request], step: Step) -> None:
        for place, layer in enumerate(self.layers):
            first = 0
            for request, count in zip(requests, step.new, strict=True):
                here = slice(first, first + count)
                k = self.decoded(step.k[place][here], layer.k_scale_float or layer.k_scale)
                v = self.decoded(step.v[place][here], layer.v_scale_float or layer.v_scale)
                before = self.stored.get((place, request.row), (k[:0], v[:0]))
                self.stored[place, request.row] = tuple(  # type: ignore[assignment]  # two of them
                    np.concatenate([old[: request.kv_len], fresh]) for old, fresh in zip(before, (k, v), strict=True)
                )
                first += count
        for request, count in zip(requests, step.new, strict=True):
            request.kv_len += count

    def compare(self, requests: Sequence[Request], step: Step, shown: Callable[[int], Array] | None = None) -> None:
        """Checks that every row equals the reference. shown: place of a request in the batch -> its visible keys"""
        for place, window in enumerate(self.windows):
            first, layer = 0, self.layers[place]
            out = step.outs[place].view(-1, Q_HEADS, layer.v_head_dim)
            for number, (request, count) in enumerate(zip(requests, step.new, strict=True)):
                q = step.q[place][first : first + count].double().cpu().numpy()
                block: Any = self.model.get_submodule(f"block{layer.layer_id}")
                scores = Scores(
                    layer.scaling,
                    self.causal,
                    window,
                    window,
                    sinks=block.sinks.detach().double().cpu().numpy() if hasattr(block, "sinks") else None,
                    shown=None if shown is None else shown(number),
                    chunk=CHUNK if place in self.chunked else 0,
                )
                want, _ = attention(q, *self.stored[place, request.row], scores)
                found = out[first : first + count].double().cpu().numpy()
                assert np.allclose(found, want, atol=TOLERANCE, rtol=TOLERANCE), f"layer {place}, row {request.row}"
                first += count
            assert (out[first:] == 0).all(), f"padded rows of layer {place} are not 0"


class Graph:
    """A decode graph runner: static tensors at a bucket, captured by hooks and replayed.

    width: new tokens of each sequence; mode: DECODE, or a mode of drafts
    backend: the hooks, or what forwards to them; more: fields of the batch
    """

    def __init__(
        self,
        engine: Engine,
        bucket: int,
        *,
        width: int = 1,
        mode: Mode = Mode.DECODE,
        topk: int = 1,
        backend: Any = None,
        **more: Any,
    ) -> None:
        from rocm_attn.capture.graphs import recorder_for

        self.backend = engine.hooks if backend is None else backend
        self.engine, self.bucket, self.width, self.topk = engine, bucket, width, topk
        tokens = bucket * width
        fill = engine.hooks.get_cuda_graph_seq_len_fill_value()
        self.batch: Any = SimpleNamespace(
            forward_mode=mode,
            batch_size=bucket,
            req_pool_indices=engine.ints([0] * bucket),
            seq_lens=engine.ints([fill] * bucket),
            seq_lens_cpu=None,
            out_cache_loc=engine.ints([0] * tokens),
            positions=engine.ints([0] * tokens),
            spec_info=SimpleNamespace(draft_token_num=width, num_tokens_per_req=width, topk=topk, custom_mask=None),
            **more,
        )
        self.fill = fill
        self.step = engine.step_of(self.batch, [0] * bucket, padded=tokens)
        self.backend.init_forward_metadata_out_graph(self.batch, in_capture=True)

        def body() -> None:
            self.backend.init_forward_metadata_in_graph(self.batch)
            engine.forward(self.step)

        self.recording, _ = recorder_for(engine.device).record(body)

    def replay(
        self,
        requests: Sequence[Request],
        *,
        says_padding: bool = True,
        mask: Callable[[int], Array] | None = None,
        into: Tensor | None = None,
        corrupt: Callable[[Any], None] = lambda static: None,
        compares: bool = True,
    ) -> Step:
        """Runs requests as SGLang does: it fills static tensors, and passes a view of the batch to the hooks.

        mask:    place of a request -> the keys that its drafts see, as SGLang's tree mask
        into:    memory of the hooks that SGLang has written the mask to, in place of its own
        corrupt: given the static tensors, after they were filled
        """
        engine, static = self.engine, self.batch
        new = [self.width] * len(requests)
        raw = engine.batch(static.forward_mode, requests, new)
        count, tokens = len(requests), len(requests) * self.width
        for name, pad in (("req_pool_indices", 0), ("seq_lens", self.fill)):
            getattr(static, name)[:count] = getattr(raw, name)
            getattr(static, name)[count:] = pad
        for name in ("out_cache_loc", "positions"):
            getattr(static, name)[:tokens] = getattr(raw, name)
            getattr(static, name)[tokens:] = 0
        corrupt(static)
        fresh = engine.step_of(raw, new, padded=self.bucket * self.width)
        for mine, theirs in ((self.step.q, fresh.q), (self.step.k, fresh.k), (self.step.v, fresh.v)):
            for to, values in zip(mine, theirs, strict=True):
                to.copy_(values)
        spec = raw.spec_info
        spec.topk = self.topk
        if mask is not None:
            cells = [torch.from_numpy(mask(number) != 0).flatten() for number in range(count)]
            spec.custom_mask = torch.cat(cells).to(engine.device)
            if into is not None:
                into[: len(spec.custom_mask)] = spec.custom_mask
                spec.custom_mask = into
        view = SimpleNamespace(**{**vars(static), "out_cache_loc": raw.out_cache_loc, "spec_info": spec})
        if says_padding:
            view.num_padding = self.bucket - count
        self.view = view
        self.backend.init_forward_metadata_out_graph(view)
        self.recording.replay()
        done = replace(fresh, outs=list(self.step.outs))
        engine.keep(requests, done)
        if compares:
            engine.compare(requests, done, mask)
        return done
