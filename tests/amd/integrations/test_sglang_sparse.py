"""DSA in SGLang: indexers, index pages and layers that share a selection, over stand-ins from its source."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rocm_attn.errors import BadTensor, Unsupported, WrongState
from rocm_attn.integrations.sglang import indexers
from rocm_attn.integrations.sglang.hooks import AttentionHooks
from rocm_attn.integrations.sglang.indexers import project
from rocm_attn.kernels.cache.page_format import Encoding
from tests.amd.integrations.oracle import Array
from tests.amd.integrations.sglang_stand_in import Engine, Graph, LatentPool, Mode, Request, Step
from tests.amd.kernels.record_cases import POISON, RecordPages

HIDDEN, LORA, HEADS, INDEX_DIM, TURNED, TOP = 12, 10, 2, 16, 4, 5


class Linear(nn.Linear):
    """ReplicatedLinear: its output comes with a bias that was left out."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


class Rotary(nn.Module):
    """Rotates the first two pairs of elements by an angle that grows with the position; pairs span the two halves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.tensor([0.7, 0.1]))
        self.frequencies: Tensor

    def forward(self, positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        angle = positions[:, None].to(q.device).float() * self.frequencies
        cos, sin = (each[:, None].repeat(1, 1, 2) for each in (angle.cos(), angle.sin()))

        def turned(x: Tensor) -> Tensor:
            half = TURNED // 2
            return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin

        return turned(q), turned(k)


class Indexer(nn.Module):
    """An indexer of DSA. is_fused: true if one projection makes keys and gates; dim: of its keys; top: selected ones"""

    num_init_tokens = num_local_tokens = 0

    def __init__(self, *, is_fused: bool = False, dim: int = INDEX_DIM, top: int = TOP) -> None:
        super().__init__()
        self.n_heads, self.head_dim, self.rope_head_dim, self.index_topk = HEADS, dim, TURNED, top
        self.wq_b = Linear(LORA, HEADS * dim, bias=False)
        if is_fused:
            self.wk_weights_proj = Linear(HIDDEN, dim + HEADS, bias=False)
        else:
            self.wk = Linear(HIDDEN, dim, bias=False)
            self.weights_proj = Linear(HIDDEN, HEADS, bias=False).bfloat16()
        self.k_norm = nn.LayerNorm(dim)
        self.rotary_emb = Rotary()
        torch.manual_seed(0)
        for parameter in self.parameters():
            parameter.data.normal_()
        self.requires_grad_(False)

    @property
    def keys_and_gates(self) -> tuple[Tensor, Tensor]:
        if hasattr(self, "wk_weights_proj"):
            rows = self.wk_weights_proj.weight
            return rows[: self.head_dim], rows[self.head_dim :]
        return self.wk.weight, self.weights_proj.weight


class SparsePool(LatentPool):
    """DSATokenToKVPool: latent rows, and index pages with the codes of all keys and then all their scales."""

    def __init__(
        self, layers: Sequence[int], num_slots: int, page_size: int, device: torch.device, index_dim: int
    ) -> None:
        super().__init__(layers, num_slots, torch.float32, device)
        self.index_page_size = page_size
        width = page_size * (index_dim + 4)
        self.index = {
            layer: torch.full((num_slots // page_size, width), 0x7F, dtype=torch.uint8, device=device)
            for layer in layers
        }

    def get_index_k_with_scale_buffer(self, layer_id: int) -> Tensor:
        return self.index[layer_id]


class RecordPool(SparsePool):
    """DSATokenToKVPool in FP8, with SGLang's 656 bytes per token. Bytes that no token has stored are poison."""

    kv_lora_rank, qk_rope_head_dim, dsa_kv_cache_store_fp8 = 512, 64, True

    def __init__(
        self, layers: Sequence[int], num_slots: int, page_size: int, device: torch.device, index_dim: int
    ) -> None:
        super().__init__(layers, num_slots, page_size, device, index_dim)
        rows = torch.full((num_slots, 1, 656), POISON, dtype=torch.uint8)
        rows[:page_size] = 0
        self.k = {layer: rows.to(device, copy=True).view(torch.float8_e4m3fn) for layer in layers}


class SparseEngine(Engine):
    """An engine in which layer 0 has an indexer, and layer 1 attends to its selection."""

    pool_type: type[SparsePool] = SparsePool

    def __init__(
        self, provider: str, device: torch.device, *, page_size: int = 4, indexer: Indexer | None = None, **fields: Any
    ) -> None:
        super().__init__(provider, device, page_size=page_size, windows=(-1, -1), is_latent=True, serve=False, **fields)
        self.indexer = (Indexer() if indexer is None else indexer).to(device)
        blocks: list[Any] = [self.model.get_submodule(f"block{layer}") for layer in range(2)]
        for block in blocks:
            block.use_dsa = True
        blocks[0].indexer = self.indexer
        pool = self.pool_type(range(2), self.num_slots, page_size, device, self.indexer.head_dim)
        self.pool = self.runner.token_to_kv_pool = pool
        self.index_keys: dict[int, Array] = {}
        self.hooks = AttentionHooks(self.runner, self.serving)

    def inputs(self, padded: int) -> tuple[Tensor, Tensor]:
        """Returns the indexer's inputs: a layer's input and the queries before their projection."""
        return self.random_rows(padded, HIDDEN), self.random_rows(padded, LORA)

    def forward_sparse(self, step: Step, x: Tensor, q_lora: Tensor, positions: Tensor) -> None:
        chosen = self.hooks.choose(0, project(self.indexer, x, q_lora, positions))
        self.forward(step, topk_indices=chosen)

    def seen(self, requests: Sequence[Request], step: Step, x: Tensor, q_lora: Tensor) -> Callable[[int], Array]:
        """Returns the keys that each new token attends to, computed in float64: TOP of the earlier keys and its own."""
        wk, wg = (each.double().cpu() for each in self.indexer.keys_and_gates)
        norm, found, first = self.indexer.k_norm, [], 0
        scale_value = self.scale_value()
        for request, count in zip(requests, step.new, strict=True):
            here = slice(first, first + count)
            positions = torch.arange(request.kv_len - count, request.kv_len)
            k = nn.functional.layer_norm(
                x[here].double().cpu() @ wk.T, (INDEX_DIM,), norm.weight.double().cpu(), norm.bias.double().cpu()
            )
            q = (q_lora[here].double().cpu() @ self.indexer.wq_b.weight.double().cpu().T).view(-1, HEADS, INDEX_DIM)
            turned = Rotary()(positions, q[..., :TURNED], k[:, None, :TURNED])
            q = torch.cat((turned[0], q[..., TURNED:]), -1)
            k = torch.cat((turned[1][:, 0], k[:, TURNED:]), -1)
            coded = (k / scale_value).float().to(torch.float8_e4m3fn).double() * scale_value
            before = self.index_keys.get(request.row, np.zeros((0, INDEX_DIM)))[: request.kv_len - count]
            keys = self.index_keys[request.row] = np.concatenate([before, coded.numpy()])
            gates = (x[here].double().cpu() @ wg.T).numpy() * HEADS**-0.5
            scores = np.maximum(np.einsum("thd,kd->thk", q.numpy(), keys) * INDEX_DIM**-0.5, 0)
            scores = np.einsum("th,thk->tk", gates, scores)
            shown = np.zeros_like(scores)
            for token, position in enumerate(positions.tolist()):
                best = np.argsort(-scores[token, : position + 1], kind="stable")[:TOP]
                shown[token, best] = 1
            found.append(shown)
            first += count
        return found.__getitem__

    def scale_value(self) -> float:
        """Returns the smallest power of two with which the largest code covers the norm's range after rotation."""
        norm = self.indexer.k_norm
        largest = float(norm.weight.abs().max()) * math.sqrt(INDEX_DIM) + float(norm.bias.abs().max())
        return float(2 ** math.ceil(math.log2(largest * math.sqrt(2) / 448)))

    def run_sparse(self, mode: Mode, requests: Sequence[Request], new: Sequence[int], padded: int | None = None) -> Any:
        batch = self.batch(mode, requests, new)
        step = self.step_of(batch, new, padded=padded)
        x, q_lora = self.inputs(len(step.q[0]))
        positions = torch.zeros(len(x), dtype=torch.int64, device=self.device)
        positions[: sum(new)] = batch.positions
        self.hooks.init_forward_metadata(batch)
        self.forward_sparse(step, x, q_lora, positions)
        self.keep(requests, step)
        self.compare(requests, step, self.seen(requests, step, x, q_lora))
        return step


class RecordEngine(SparseEngine):
    """An engine whose pool keeps latent rows as records, read back by their format alone."""

    pool_type = RecordPool

    def __init__(self, provider: str, device: torch.device) -> None:
        super().__init__(provider, device, qk_head_dim=576, v_head_dim=512, scaling=0.04)

    def decoded(self, values: Tensor, scale: float | None) -> Array:
        one = RecordPages((values.shape[-1], 512), Encoding.E4M3FN, 1)
        found = [one.value(one.of_row(row), 0) for row in values[:, 0].cpu()]
        return torch.stack(found)[:, None].numpy() if found else np.zeros((0, 1, values.shape[-1]))


@pytest.mark.fast
@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
def test_prompts_in_chunks_decode_and_drafts_attend_to_what_the_indexer_chooses(
    page_size: int, is_fused: bool, provider: str, device: torch.device
) -> None:
    engine = SparseEngine(provider, device, page_size=page_size, indexer=Indexer(is_fused=is_fused))
    one, two, three = (engine.admit() for _ in range(3))
    engine.run_sparse(Mode.EXTEND, [one, two], [9, 3])
    engine.run_sparse(Mode.MIXED, [one, three, two], [6, 7, 1], padded=20)
    engine.run_sparse(Mode.DECODE, [three, one], [1, 1], padded=4)
    engine.run_sparse(Mode.TARGET_VERIFY, [two, one], [3, 3])
    engine.run_sparse(Mode.DRAFT_EXTEND_V2, [two, one], [2, 2])
    engine.hooks.attention.check_device()


def graph_of(engine: SparseEngine, x: Tensor, q_lora: Tensor) -> Graph:
    """Returns a graph of decodes of 4 sequences, whose indexer reads x and q_lora."""

    def forward(step: Step, hooks: object = None, **more: object) -> None:
        chosen = engine.hooks.choose(0, project(engine.indexer, x, q_lora, step.batch.positions))
        Engine.forward(engine, step, topk_indices=chosen)

    engine.forward = forward  # type: ignore[method-assign]  # for this graph
    return Graph(engine, 4)


def test_latent_rows_of_656_bytes_are_stored_and_read_as_records_in_graphs_too(
    provider: str, device: torch.device
) -> None:
    engine = RecordEngine(provider, device)
    one, two = engine.admit(), engine.admit()
    engine.run_sparse(Mode.EXTEND, [one, two], [7, 3])
    engine.run_sparse(Mode.MIXED, [one, two], [3, 1], padded=6)
    engine.hooks.init_cuda_graph_state(4, 4)
    x, q_lora = engine.inputs(4)
    graph = graph_of(engine, x, q_lora)
    done = graph.replay([one, two], compares=False)
    engine.compare([one, two], done, engine.seen([one, two], done, x, q_lora))
    engine.hooks.attention.check_device()


def test_records_hold_the_bytes_that_sglangs_readers_expect(provider: str, device: torch.device) -> None:
    """512 codes, 4 float32 scales of 128 codes each, and 64 elements of bfloat16."""
    engine = RecordEngine(provider, device)
    one = engine.admit()
    step = engine.run_sparse(Mode.EXTEND, [one], [5])
    slots = engine.table[one.row, :5].long()
    for layer in range(2):
        found = engine.pool.k[layer].view(torch.uint8)[slots, 0].cpu().tolist()
        rows = step.k[layer][:, 0].cpu()
        assert found == [RecordPages((576, 512), Encoding.E4M3FN, 1).of_row(row).tolist() for row in rows]


def test_records_that_others_would_have_stored_are_refused(provider: str, device: torch.device) -> None:
    """SGLang stores rows by AITER's fused rotation on gfx95, which makes no records."""
    engine = RecordEngine(provider, device)
    step = engine.step_of(engine.batch(Mode.EXTEND, [engine.admit()], [6]), [6])
    positions = torch.arange(6, device=device)
    engine.hooks.init_forward_metadata(step.batch)
    chosen = engine.hooks.choose(0, project(engine.indexer, *engine.inputs(6), positions))
    with pytest.raises(Unsupported, match="the rows of layer 0 were stored before attention, and the pool's rows are"):
        engine.forward(step, topk_indices=chosen, save_kv_cache=False)


def test_records_of_a_model_in_float16_are_refused(provider: str, device: torch.device) -> None:
    engine = RecordEngine(provider, device)
    engine.runner.dtype = torch.float16
    with pytest.raises(Unsupported, match="rotated parts in bfloat16, and the model is in float16; use --dtype bfloat"):
        AttentionHooks(engine.runner, engine.serving)


def test_new_weights_of_the_norm_change_what_index_keys_are_worth(provider: str, device: torch.device) -> None:
    engine = SparseEngine(provider, device)
    engine.indexer.k_norm.weight.mul_(64)
    before = engine.pool.index[0].clone()
    engine.hooks.renew_weights()
    assert engine.pool.index[0].equal(before), "the pool may have no memory until weights are new"
    engine.run_sparse(Mode.EXTEND, [engine.admit()], [9])


def test_index_pages_that_move_are_followed_until_graphs_read_them(provider: str, device: torch.device) -> None:
    engine = SparseEngine(provider, device)
    one = engine.admit()
    engine.run_sparse(Mode.EXTEND, [one], [6])
    engine.pool.index[0] = engine.pool.index[0].clone()
    engine.run_sparse(Mode.DECODE, [one], [1])
    engine.hooks.init_cuda_graph_state(4, 4)
    graph_of(engine, *engine.inputs(4))
    engine.pool.index[0] = engine.pool.index[0].clone()
    step = engine.step_of(engine.batch(Mode.DECODE, [one], [1]), [1])
    engine.hooks.init_forward_metadata(step.batch)
    with pytest.raises(WrongState, match="graphs"):
        engine.hooks.choose(0, project(engine.indexer, *engine.inputs(1), torch.arange(1, device=device)))


def test_what_was_chosen_in_another_step_or_not_at_all_is_refused(provider: str, device: torch.device) -> None:
    engine = SparseEngine(provider, device)
    one = engine.admit()
    engine.run_sparse(Mode.EXTEND, [one], [6])
    earlier = engine.hooks.choose(
        0,
        project(engine.indexer, *engine.inputs(6), torch.arange(6, device=device)),
    )
    step = engine.step_of(engine.batch(Mode.DECODE, [one], [1]), [1])
    engine.hooks.init_forward_metadata(step.batch)
    with pytest.raises(WrongState, match="layer 0 attends to selected keys, and was called without a selection"):
        engine.forward(step)
    with pytest.raises(WrongState, match="with a selection of another step"):
        engine.forward(step, topk_indices=earlier)


def test_the_rows_of_a_selection_may_be_fewer_than_those_of_its_layer(provider: str, device: torch.device) -> None:
    """SGLang calls attention with the real rows of a prompt that DP attention has padded, and pads its result."""
    engine = SparseEngine(provider, device)
    step = engine.step_of(engine.batch(Mode.EXTEND, [engine.admit()], [6]), [6])
    engine.hooks.init_forward_metadata(step.batch)
    chosen = engine.hooks.choose(0, project(engine.indexer, *engine.inputs(8), torch.arange(8, device=device)))
    engine.forward(step, topk_indices=chosen[:6])
    with pytest.raises(WrongState, match="with a selection of another step"):
        engine.forward(step, topk_indices=torch.empty_like(chosen))


def test_an_indexer_of_another_batch_or_layer_is_refused(provider: str, device: torch.device) -> None:
    engine = SparseEngine(provider, device)
    step = engine.step_of(engine.batch(Mode.EXTEND, [engine.admit()], [6]), [6])
    engine.hooks.init_forward_metadata(step.batch)
    module: Any = engine.indexer
    of_two = project(module, *engine.inputs(2), torch.arange(2, device=device))
    with pytest.raises(BadTensor, match="indexer of layer 0 was called with 2 tokens in a step of 6"):
        engine.hooks.choose(0, of_two)
    with pytest.raises(WrongState, match="layer 1 had no indexer when its backend was made"):
        engine.hooks.choose(1, of_two)
    with pytest.raises(Unsupported, match="only in eight bits"):
        project(module, (of_two.q, of_two.q), of_two.q, torch.arange(2, device=device))


REFUSED: list[Any] = [
    pytest.param({"index_kpool": 4}, "stand for several tokens each", id="pooled"),
    pytest.param({"index_page_size": 64}, "index pages have", id="pages"),
    pytest.param({"shard_spec": SimpleNamespace()}, "that ranks share out", id="sharded"),
    pytest.param({"get_broadcastable_index_k_with_scale_buffer": print}, "leave --enable-dsa-cache-layer", id="split"),
]


@pytest.mark.parametrize(("fields", "said"), REFUSED)
def test_index_pages_that_no_kernel_reads_are_refused(
    fields: dict[str, Any], said: str, provider: str, device: torch.device
) -> None:
    engine = SparseEngine(provider, device)
    for name, value in fields.items():
        setattr(engine.pool, name, value)
    with pytest.raises(Unsupported, match=said):
        AttentionHooks(engine.runner, engine.serving)


def test_models_whose_keys_no_kernel_here_chooses_are_refused(provider: str, device: torch.device) -> None:
    engine = SparseEngine(provider, device)
    with pytest.raises(Unsupported, match="trees of drafts are not served by models that select keys"):
        AttentionHooks(engine.runner, replace(engine.serving, with_trees=True))
    del engine.indexer.wq_b
    with pytest.raises(Unsupported, match="only indexers with the projections of DeepSeek"):
        AttentionHooks(engine.runner, engine.serving)


def test_a_pool_without_index_pages_is_refused(provider: str, device: torch.device) -> None:
    engine = SparseEngine(provider, device)
    engine.runner.token_to_kv_pool = LatentPool(range(2), engine.num_slots, torch.float32, device)
    with pytest.raises(Unsupported, match="the pool LatentPool has no index pages"):
        AttentionHooks(engine.runner, engine.serving)


def test_a_choice_that_no_layer_makes_is_refused(provider: str, device: torch.device) -> None:
    engine = SparseEngine(provider, device)
    block: Any = engine.model.get_submodule("block0")
    del block.indexer
    with pytest.raises(Unsupported, match="attends to keys that an earlier layer"):
        AttentionHooks(engine.runner, engine.serving)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_are_in_the_dtype_of_the_layers_input(dtype: torch.dtype) -> None:
    """SGLang keeps their weights in bfloat16."""
    project_gates, x = Linear(HIDDEN, HEADS, bias=False).bfloat16(), torch.ones(3, HIDDEN, dtype=dtype)
    assert torch.equal(indexers._gates(project_gates, x), nn.functional.linear(x, project_gates.weight.to(dtype)))
