"""The hooks of SGLang's attention backend, over its pools and batches: eagerly, in graphs, of drafts, and refusals."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rocm_attn.capture.graphs import recorder_for
from rocm_attn.errors import BadTensor, DeviceFault, NeverFits, Unsupported, WrongState
from rocm_attn.external import ExternalOptions
from rocm_attn.integrations.plugins import SGLANG
from rocm_attn.integrations.sglang.drafts import BranchTable, DraftSteps
from rocm_attn.integrations.sglang.hooks import AttentionHooks, renew_weights
from tests.amd.integrations.oracle import Array, Scores, attention
from tests.amd.integrations.sglang_stand_in import (
    DIM,
    LATENT,
    Q_HEADS,
    TOLERANCE,
    Engine,
    Graph,
    Mode,
    RadixAttention,
    Request,
    SplitPool,
    Step,
    WindowPool,
)

POOLS: list[Any] = [
    pytest.param({}, id="one pool"),
    pytest.param({"page_size": 1}, id="page size 1"),
    pytest.param({"by_heads": True}, id="pages by heads"),
    pytest.param({"windows": (-1, 5)}, id="a window in one pool"),
    pytest.param({"windows": (-1, 5), "with_window_pool": True}, id="a window in its own pool"),
    pytest.param({"windows": (-1, -1), "chunked": (0,)}, id="chunks in one pool"),
    pytest.param({"windows": (-1, -1), "chunked": (1,), "with_window_pool": True}, id="chunks in their own pool"),
    pytest.param({"is_latent": True}, id="latent rows"),
    pytest.param({"with_sinks": True}, id="sinks"),
]


def prompted(provider: str, device: torch.device, **fields: Any) -> tuple[Engine, Request]:
    engine = Engine(provider, device, **fields)
    one = engine.admit()
    engine.run(Mode.EXTEND, [one], [3])
    return engine, one


@pytest.mark.parametrize("kind", POOLS)
def test_prompts_in_chunks_decode_mixed_and_idle_steps_give_what_an_oracle_gives(
    kind: dict[str, Any], provider: str, device: torch.device
) -> None:
    engine = Engine(provider, device, **kind)
    one, two, three = (engine.admit() for _ in range(3))
    engine.run(Mode.EXTEND, [one, two], [7, 3])
    engine.run(Mode.EXTEND, [one, three], [6, 2])
    engine.run(Mode.MIXED, [one, two, three], [1, 5, 1])
    for _ in range(3):
        engine.run(Mode.DECODE, [three, one, two], [1, 1, 1])
    engine.hooks.init_forward_metadata(SimpleNamespace(forward_mode=Mode.IDLE, batch_size=0))
    engine.run(Mode.TARGET_VERIFY, [two, one], [3, 3])
    engine.run(Mode.DRAFT_EXTEND_V2, [two, one], [2, 2])
    engine.hooks.attention.check_device()


@pytest.mark.parametrize("mode", [Mode.EXTEND, Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND_V2])
def test_one_new_token_in_each_sequence_is_served_by_the_kernels_of_decode(
    mode: Mode, provider: str, device: torch.device
) -> None:
    engine, one = prompted(provider, device)
    engine.run(mode, [one, engine.admit()], [1, 1])
    assert engine.hooks.attention.gate.begun().plan.shape.kind.decodes


@pytest.mark.fast(4)
@pytest.mark.parametrize("kind", POOLS)
@pytest.mark.parametrize("says_padding", [True, False])
def test_a_captured_step_serves_any_batch_up_to_its_bucket(
    kind: dict[str, Any], says_padding: bool, provider: str, device: torch.device
) -> None:
    engine = Engine(provider, device, **kind)
    requests = [engine.admit() for _ in range(4)]
    engine.run(Mode.EXTEND, requests, [9, 2, 5, 1])
    engine.hooks.init_cuda_graph_state(4, 12)
    decode = Graph(engine, 4)
    verify = Graph(engine, 4, width=3, mode=Mode.TARGET_VERIFY)
    for batch in (requests, requests[:1], requests[1:], requests[2:3]):
        if not says_padding and decode.bucket > len(batch):
            continue  # a decode runner always gives it
        decode.replay(batch)
    for batch in (requests[:2], requests, requests[3:]):
        verify.replay(batch, says_padding=says_padding)
    engine.run(Mode.EXTEND, requests[:2], [8, 8])
    decode.replay(requests[:3])
    engine.hooks.attention.check_device()


@pytest.mark.fast
@pytest.mark.parametrize("spec", [{"topk": 2}, {"tree_topk": -1}, {}], ids=["two branches", "irregular", "unknown"])
@pytest.mark.parametrize("captured", [False, True])
def test_a_tree_is_refused_where_no_kernel_looks_at_masks(
    spec: dict[str, int], captured: bool, provider: str, device: torch.device
) -> None:
    engine, one = prompted(provider, device)
    engine.hooks.init_cuda_graph_state(1, 3)
    batch = engine.batch(Mode.TARGET_VERIFY, [one], [3], num_padding=0)
    mask = torch.ones(3 * 6, dtype=torch.bool, device=device)
    batch.spec_info = SimpleNamespace(draft_token_num=3, custom_mask=mask, **spec)
    begin = engine.hooks.init_forward_metadata_out_graph if captured else engine.hooks.init_forward_metadata
    with pytest.raises(WrongState, match="mask"):
        begin(batch)


@pytest.mark.fast
@pytest.mark.parametrize(("topk", "page_size"), [(1, 4), (2, 1), (2, 4), (3, 4)])
@pytest.mark.parametrize("captured", [False, True])
def test_draft_steps_see_their_request_and_their_own_branch(
    topk: int, page_size: int, captured: bool, provider: str, device: torch.device
) -> None:
    engine = Engine(provider, device, page_size=page_size)
    requests = [engine.admit() for _ in range(3)]
    engine.run(Mode.EXTEND, requests, [9, 4, 5])
    drafts = Drafts(engine, topk=topk, num_steps=3)
    if not captured:
        drafts.run(requests)
        return
    drafts.capture(4)
    drafts.replay(requests)
    engine.run(Mode.EXTEND, requests[:2], [3, 1])
    drafts.replay([requests[2], requests[0]])
    drafts.replay(requests[1:2])


class Drafts:
    """Rounds of drafts: each step stores a token of each branch, which sees its request and its branch."""

    def __init__(self, engine: Engine, *, topk: int, num_steps: int) -> None:
        self.engine, self.topk, self.num_steps = engine, topk, num_steps
        self.steps = DraftSteps(engine.runner, topk, num_steps, engine.serving, AttentionHooks)

    def branch_columns(self, kv_len: int, branch: int) -> list[int]:
        """Returns the columns of a branch's drafts in their request's row, as SGLang lays them out."""
        size, steps = self.engine.page_size, self.num_steps
        if self.topk == 1 or size == 1:
            return [kv_len + branch * steps + step for step in range(steps)]
        last = kv_len % size
        pages = -(-(last + steps) // size)
        return [kv_len // size * size + branch * pages * size + last + step for step in range(steps)]

    def batch(self, requests: Sequence[Request], bucket: int) -> Any:
        """Returns a batch as SGLang makes it, with pads up to the bucket."""
        for request in requests:
            self.engine.reserve(request, 1 + max(self.branch_columns(request.kv_len, self.topk - 1)))
        pads = bucket - len(requests)
        return SimpleNamespace(
            forward_mode=Mode.DECODE,
            batch_size=bucket,
            req_pool_indices=self.engine.ints([r.row for r in requests] + [0] * pads),
            seq_lens=self.engine.ints([r.kv_len for r in requests] + [1] * pads),
            seq_lens_cpu=None,
            out_cache_loc=None,
        )

    def new_steps(self, batch: Any, count: int) -> list[Step]:
        """Returns new q, k and v of each step; pads are NaN."""
        rows = batch.batch_size * self.topk
        return [self.engine.step_of(batch, [1] * (count * self.topk), padded=rows) for _ in self.steps.attn_backends]

    def forward(self, steps: Sequence[Step]) -> None:
        for step, hooks in zip(steps, self.steps.attn_backends, strict=True):
            self.engine.forward(step, hooks)

    def run(self, requests: Sequence[Request]) -> None:
        batch = self.batch(requests, len(requests))
        self.steps.init_forward_metadata(batch)
        steps = self.new_steps(batch, len(requests))
        self.forward(steps)
        self.compare(requests, steps)

    def capture(self, bucket: int) -> None:
        """Captures one graph of all steps, while its batch is empty."""
        self.steps.init_cuda_graph_state(bucket, bucket * self.topk)
        self.static = self.batch([], bucket)
        self.captured = self.new_steps(self.static, 0)
        self.steps.init_forward_metadata_out_graph(self.static, in_capture=True)

        def body() -> None:
            self.steps.init_forward_metadata_in_graph(self.static)
            self.forward(self.captured)

        self.recording, _ = recorder_for(self.engine.device).record(body)

    def replay(self, requests: Sequence[Request]) -> None:
        """Replays the graph with other requests in the static tensors."""
        batch = self.batch(requests, self.static.batch_size)
        for name in ("req_pool_indices", "seq_lens"):
            getattr(self.static, name).copy_(getattr(batch, name))
        for step, fresh in zip(self.captured, self.new_steps(batch, len(requests)), strict=True):
            for of_graph, new in zip((step.q, step.k, step.v), (fresh.q, fresh.k, fresh.v), strict=True):
                of_graph[0].copy_(new[0])
        self.steps.init_forward_metadata_out_graph(self.static)
        self.recording.replay()
        self.compare(requests, self.captured)

    def compare(self, requests: Sequence[Request], steps: Sequence[Step]) -> None:
        seen: dict[tuple[int, int], tuple[Array, Array]] = {}
        for step, hooks in zip(steps, self.steps.attn_backends, strict=True):
            self._compare(requests, step, seen)
            hooks.attention.check_device()

    def _compare(
        self, requests: Sequence[Request], step: Step, seen: dict[tuple[int, int], tuple[Array, Array]]
    ) -> None:
        out = step.outs[0].view(-1, Q_HEADS, DIM)
        for number, request in enumerate(requests):
            for branch in range(self.topk):
                at = number * self.topk + branch
                before = seen.get((number, branch), self.engine.stored[0, request.row])
                k, v = (
                    np.concatenate([old, fresh[0][at : at + 1].double().cpu().numpy()])
                    for old, fresh in zip(before, (step.k, step.v), strict=True)
                )
                seen[number, branch] = k, v
                want, _ = attention(step.q[0][at : at + 1].double().cpu().numpy(), k, v, Scores(0.3))
                assert np.allclose(out[at : at + 1].double().cpu().numpy(), want, atol=TOLERANCE, rtol=TOLERANCE), (at,)


def test_a_table_of_branches_refuses_more_than_it_has_room_for() -> None:
    table = BranchTable(torch.zeros(3, 8, dtype=torch.int32), topk=2, num_steps=2, page_size=1)
    with pytest.raises(NeverFits, match="8 branches of drafts do not fit a table of 6"):
        table.write(torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.int64))


@pytest.mark.fast
@pytest.mark.parametrize(
    "more",
    [{}, {"is_latent": True}, {"k_scale_float": 0.3, "v_scale_float": 0.7}, {"k_scale": 0.3, "v_scale": 0.3}],
    ids=["none", "latent", "of the weights", "of a file"],
)
def test_eight_bit_pages_are_read_with_the_layers_scales(
    more: dict[str, Any], provider: str, device: torch.device
) -> None:
    engine = Engine(provider, device, kv_dtype=torch.float8_e4m3fn, **more)
    one, two = engine.admit(), engine.admit()
    engine.run(Mode.EXTEND, [one, two], [7, 3])
    engine.run(Mode.DECODE, [one, two], [1, 1])


def test_layers_of_one_id_have_the_scales_of_the_one_that_stores(provider: str, device: torch.device) -> None:
    """Gemma 3n and Gemma 4: last layers read K and V of an earlier one, and a checkpoint has no scales for them."""
    engine = Engine(provider, device, kv_dtype=torch.float8_e4m3fn, k_scale_float=0.3, v_scale_float=0.7)
    block: Any = torch.nn.Module()
    block.attn = RadixAttention(0)
    engine.model.add_module("reader", block)
    engine.hooks = AttentionHooks(engine.runner, engine.serving)
    step = engine.run(Mode.EXTEND, [engine.admit()], [5])
    out = engine.hooks.forward_extend(step.q[0], None, None, block.attn, step.batch, save_kv_cache=False)
    assert torch.equal(out, step.outs[0])


def test_the_two_halves_of_an_overlapped_batch_have_backends_of_their_own(provider: str, device: torch.device) -> None:
    engine = Engine(provider, device)
    other = AttentionHooks(engine.runner, engine.serving)
    one, two = engine.admit(), engine.admit()
    engine.run(Mode.EXTEND, [one, two], [7, 3])
    halves = [engine.step_of(engine.batch(Mode.DECODE, [request], [1]), [1]) for request in (one, two)]
    both = [(engine.hooks, halves[0], one), (other, halves[1], two)]
    for hooks, step, _ in both:  # both are begun before either attends
        hooks.init_forward_metadata(step.batch)
    for hooks, step, request in both:
        engine.finish([request], step, hooks=hooks)


Corrupt = Callable[[Engine, Any], None]


def stale_pad(engine: Engine, static: Any) -> None:
    """Gives a pad the row of a request, and a length beyond its pages."""
    static.req_pool_indices[-1], static.seq_lens[-1] = static.req_pool_indices[0], static.seq_lens[0] + 50


def wrong_slot(engine: Engine, static: Any) -> None:
    """Sends a new token to a slot that its table does not give."""
    static.out_cache_loc[0] += 4


def evicted_window(engine: Engine, static: Any) -> None:
    """Frees pages that a layer's window still sees."""
    first_page = engine.table[static.req_pool_indices[0], : engine.page_size].long()
    engine.pool.full_to_swa_index_mapping[first_page] = 0


FAULTS: list[Any] = [
    pytest.param(stale_pad, "its row led to page 0", id="a stale pad"),
    pytest.param(wrong_slot, "a slot given for a new token", id="a wrong slot"),
    pytest.param(evicted_window, "was in a page that its row no longer holds", id="an evicted window"),
]


@pytest.mark.fast(3)
@pytest.mark.parametrize(("corrupt", "said"), FAULTS)
@pytest.mark.parametrize("captured", [False, True])
def test_a_fault_in_a_step_of_the_engine_is_reported_within_two_steps(
    corrupt: Corrupt, said: str, captured: bool, provider: str, device: torch.device
) -> None:
    engine = Engine(provider, device, windows=(-1, 5), with_window_pool=True)
    requests = [engine.admit(), engine.admit()]
    engine.run(Mode.EXTEND, requests, [3, 9])
    engine.hooks.init_cuda_graph_state(2, 2)
    graph = Graph(engine, 2)

    def step(corrupt: Corrupt) -> None:
        if captured:
            graph.replay(requests, corrupt=lambda static: corrupt(engine, static), compares=False)
            return
        batch = engine.batch(Mode.DECODE, requests, [1, 1])
        corrupt(engine, batch)
        engine.hooks.init_forward_metadata(batch)
        done = engine.step_of(batch, [1, 1])
        engine.forward(done)
        engine.keep(requests, done)

    step(lambda *_: None)
    step(corrupt)
    for _ in range(2):
        step(lambda *_: None)
    with pytest.raises(DeviceFault, match=said):
        step(lambda *_: None)


@pytest.mark.parametrize("side", ["k", "v"])
def test_a_pool_that_moves_is_followed_until_graphs_read_it(side: str, provider: str, device: torch.device) -> None:
    engine, one = prompted(provider, device)
    rows = getattr(engine.pool, side)
    before, rows[0] = rows[0], rows[0].clone()
    before.fill_(float("nan"))
    engine.run(Mode.DECODE, [one], [1])
    engine.hooks.init_cuda_graph_state(2, 2)
    rows[0] = rows[0].clone()
    with pytest.raises(WrongState, match="pages of layer 0 have moved"):
        engine.run(Mode.DECODE, [one], [1])


@pytest.mark.parametrize("moved", ["map", "pool"])
def test_steps_are_refused_for_as_long_as_graphs_read_an_old_pool(
    moved: str, provider: str, device: torch.device
) -> None:
    """Only the first one was: the second read the old map without a word."""
    engine = Engine(provider, device, windows=(-1, 5), with_window_pool=True)
    one = engine.admit()
    engine.run(Mode.EXTEND, [one], [3])
    engine.hooks.init_cuda_graph_state(2, 2)
    graph = Graph(engine, 1)
    graph.replay([one])
    pool, mapped = engine.pool, engine.pool.full_to_swa_index_mapping
    if moved == "map":
        pool.full_to_swa_index_mapping = mapped.clone()
    else:
        other = WindowPool((-1, 5), engine.num_slots, torch.float32, device, DIM)
        other.full_to_swa_index_mapping = mapped
        engine.hooks.token_to_kv_pool = other
    for _ in range(2):
        with pytest.raises(WrongState, match="and graphs read the old one"):
            engine.hooks.init_forward_metadata(engine.batch(Mode.DECODE, [one], [0]))
    engine.hooks.token_to_kv_pool, pool.full_to_swa_index_mapping = pool, mapped
    graph.replay([one])


def test_a_pool_that_is_swapped_for_drafts_is_read(provider: str, device: torch.device) -> None:
    engine, one = prompted(provider, device)
    other = SplitPool([0], engine.num_slots, torch.float32, device)
    other.k[0].copy_(engine.pool.k[0])
    other.v[0].copy_(engine.pool.v[0])
    engine.pool.k[0].fill_(float("nan"))
    engine.hooks.token_to_kv_pool = other
    engine.run(Mode.DECODE, [one], [1])


REFUSED: list[Any] = [
    pytest.param({"is_cross_attention": True}, "cross attention", id="cross attention"),
    pytest.param({"attn_type": SimpleNamespace(value="decoder_bidirectional")}, "text after prompts", id="a prefix"),
    pytest.param({"pos_encoding_mode": "ALIBI"}, "positions encoded in the kernel", id="positions"),
    pytest.param({"logit_cap": 30.0, "logit_capping_method": "sigmoid"}, "a soft cap by sigmoid", id="a cap"),
    pytest.param({"xai_temperature_len": 1024}, "a temperature that grows", id="a temperature"),
]


@pytest.mark.parametrize(("fields", "said"), REFUSED)
def test_a_layer_that_is_not_served_is_refused_before_serving(
    fields: dict[str, Any], said: str, provider: str, device: torch.device
) -> None:
    with pytest.raises(Unsupported, match=f"layer 0: .*{said}.* is not served"):
        Engine(provider, device, **fields)


def test_of_latent_attention_the_layer_over_keys_and_values_has_no_pages(provider: str, device: torch.device) -> None:
    """If a rank has one head, both of a model's layers have one KV head."""
    engine = Engine(provider, device, serve=False, is_latent=True)
    block = engine.model.get_submodule("block0")
    block.attn_mha = RadixAttention(0, tp_q_head_num=1, tp_k_head_num=1, qk_head_dim=DIM, v_head_dim=DIM // 2)
    engine.hooks = AttentionHooks(engine.runner, engine.serving)
    engine.run(Mode.EXTEND, [engine.admit()], [3])


@pytest.mark.parametrize("deterministic", [False, True])
def test_kernels_are_those_that_explain_chooses_and_deterministic_ones_if_they_are_asked_for(
    deterministic: bool, provider: str, device: torch.device
) -> None:
    options = Engine(provider, device, deterministic=deterministic).hooks.attention.options
    assert options.deterministic is deterministic
    assert (options.page_strides, options.zero_tails) == (SGLANG.packs_rows, ExternalOptions().zero_tails)


@pytest.mark.parametrize(
    ("of_model", "changed", "said"),
    [({}, {"sliding_window_size": 7}, ", window 7"), ({"chunked": (0,)}, {"use_irope": False}, "")],
    ids=["a window", "no chunks"],
)
def test_a_layer_that_the_model_did_not_have_is_refused(
    of_model: dict[str, Any], changed: dict[str, Any], said: str, provider: str, device: torch.device
) -> None:
    engine, one = prompted(provider, device, **of_model)
    engine.layers = [RadixAttention(0, **changed)]
    with pytest.raises(WrongState, match=rf"layer 0 differs from every layer that the model had .*{said}"):
        engine.run(Mode.DECODE, [one], [1])


def test_what_a_call_asks_for_beyond_that_is_refused_by_name(provider: str, device: torch.device) -> None:
    engine, one = Engine(provider, device), Request(1, [])
    step = engine.begun(Mode.EXTEND, [one], [3])
    engine.forward(step, return_lse=False, topk_indices=None)  # reports nothing
    with pytest.raises(Unsupported, match="layer 0 was called with topk_indices, and had no indexer"):
        engine.forward(step, topk_indices=torch.zeros(3, 8))
    with pytest.raises(Unsupported, match="called with sinks, and had none when its kernels were chosen"):
        engine.forward(step, sinks=torch.zeros(Q_HEADS))


def test_metadata_of_another_batch_is_refused(provider: str, device: torch.device) -> None:
    engine, one = Engine(provider, device), Request(1, [])
    step = engine.begun(Mode.EXTEND, [one], [3])
    step.q[0] = step.q[0][:2]
    with pytest.raises(BadTensor, match="called with 2 tokens in a step of 3"):
        engine.forward(step)


def test_a_graph_may_have_more_sequences_than_the_pool_has_rows(provider: str, device: torch.device) -> None:
    engine, one = prompted(provider, device)
    engine.hooks.init_cuda_graph_state(16, 16)
    Graph(engine, 16).replay([one])


def test_new_weights_of_sinks_are_read_when_asked(provider: str, device: torch.device) -> None:
    engine, one = prompted(provider, device, with_sinks=True)
    with torch.no_grad():
        engine.model.get_parameter("block0.sinks").add_(2.0)
    engine.hooks.renew_weights()
    engine.run(Mode.DECODE, [one], [1])


def test_new_weights_reach_all_backends_of_a_runner_and_of_no_other(provider: str, device: torch.device) -> None:
    """SGLang makes a backend for each number of drafts that it may change to (adaptive_runtime_state.py)."""
    engine, other = (Engine(provider, device, with_sinks=True) for _ in range(2))
    backends = [engine.hooks, AttentionHooks(engine.runner, engine.serving), other.hooks]
    with torch.no_grad():
        for each in (engine, other):
            each.model.get_parameter("block0.sinks").fill_(9.0)
    renew_weights(engine.runner)
    sinks = [next(iter(each.attention.cores.values())).head_weights.of(0).sinks for each in backends]
    assert [each is not None and bool(each.eq(9.0).all()) for each in sinks] == [True, True, False]


def test_new_scales_of_k_and_v_are_read_when_asked(provider: str, device: torch.device) -> None:
    scales = {"k_scale_float": 0.5, "v_scale_float": 0.5}
    engine, _ = prompted(provider, device, kv_dtype=torch.float8_e4m3fn, **scales)
    for layer in engine.layers:
        layer.k_scale_float = layer.v_scale_float = 64.0
    engine.hooks.renew_weights()
    engine.run(Mode.EXTEND, [engine.admit()], [7])


@pytest.mark.parametrize("of_engine", [{}, {"is_latent": True}, {"kv_dtype": torch.float8_e4m3fn}])
def test_rows_that_others_have_divided_by_scales_are_refused_where_none_are_read(
    of_engine: dict[str, Any], provider: str, device: torch.device
) -> None:
    """On ROCm models rotate and store in one kernel, which divides rows of any dtype by scales of the checkpoint."""
    engine = Engine(provider, device, k_scale_float=0.5, v_scale_float=0.5, **of_engine)
    step = engine.begun(Mode.EXTEND, [engine.admit()], [5])
    if "kv_dtype" not in of_engine:
        with pytest.raises(Unsupported, match=r"the rows of layer 0 were stored before attention, .* by the layer's"):
            engine.forward(step, save_kv_cache=False)
        for layer in engine.layers:
            layer.k_scale_float = layer.v_scale_float = 1.0
    engine.forward(step, save_kv_cache=False)


def test_the_rotated_part_of_latent_rows_may_come_beside_them(provider: str, device: torch.device) -> None:
    engine = Engine(provider, device, is_latent=True)
    one = engine.admit()
    step = engine.begun(Mode.EXTEND, [one], [5])
    (q,), (k,), (layer,) = step.q, step.k, engine.layers
    latent: Any = layer
    out = engine.hooks.forward_extend(
        q[..., :LATENT],
        k[..., :LATENT],
        k[..., :LATENT],
        latent,
        step.batch,
        q_rope=q[..., LATENT:],
        k_rope=k[..., LATENT:],
    )
    step.outs = [out]
    engine.keep([one], step)
    engine.compare([one], step)


def test_what_the_engine_stored_itself_is_not_stored_again(provider: str, device: torch.device) -> None:
    engine, one = Engine(provider, device), Request(1, [])
    step = engine.begun(Mode.EXTEND, [one], [3])
    engine.pool.k[0][step.batch.out_cache_loc] = step.k[0]
    engine.pool.v[0][step.batch.out_cache_loc] = step.v[0]
    engine.keep([one], step)
    step.k[0], step.v[0] = step.k[0] + 1, step.v[0] + 1
    engine.forward(step, save_kv_cache=False)
    engine.compare([one], step)


def test_what_an_idle_rank_makes_up_to_keep_up_is_not_computed(provider: str, device: torch.device) -> None:
    engine = Engine(provider, device)
    one = engine.admit()
    batch = engine.batch(Mode.EXTEND, [one], [4])
    batch.req_pool_indices, batch.out_cache_loc = engine.ints([0]), engine.ints([0] * 4)
    batch._original_batch_size = 0
    step = engine.step_of(batch, [], padded=4)
    engine.hooks.init_forward_metadata(batch)
    engine.finish([], step)
    engine.hooks.attention.check_device()


def test_trees_of_drafts_in_layers_with_chunks_are_refused(provider: str, device: torch.device) -> None:
    """In a tree positions are depths, and chunks count places."""
    with pytest.raises(Unsupported, match=r"layer 0: a tree of drafts in a layer with chunks.* is not served"):
        Engine(provider, device, chunked=(0,), with_trees=True)


def test_drafts_of_a_block_see_each_other_eagerly_and_in_a_graph(provider: str, device: torch.device) -> None:
    """DFlash: SGLang runs a draft model's block as a step that verifies drafts, in layers of the encoder's kind."""
    engine = Engine(provider, device, is_encoder=True, windows=(-1, 2))
    requests = [engine.admit() for _ in range(3)]
    engine.run(Mode.EXTEND, requests, [9, 2, 5])
    engine.run(Mode.TARGET_VERIFY, requests[:2], [4, 4])
    engine.hooks.init_cuda_graph_state(3, 12)
    graph = Graph(engine, 3, width=4, mode=Mode.TARGET_VERIFY)
    for batch in (requests, requests[:1], requests[1:]):
        graph.replay(batch)
    engine.causal = True
    with pytest.raises(AssertionError, match="layer 0"):
        graph.replay(requests)
    engine.hooks.attention.check_device()


def four_bits(engine: Engine) -> None:
    engine.pool.k_scale_buffer = [torch.ones(1)]


def four_bits_of_latent_rows(engine: Engine) -> None:
    engine.pool.kv_scale_buffer = [torch.ones(1)]


def four_bits_in_a_part(engine: Engine) -> None:
    """The pool of a hybrid model and that of windows have pools of layers, and say nothing of scales themselves."""
    engine.pool.full_kv_pool = SimpleNamespace(k_scale_buffer=[torch.ones(1)])


def pages_of_another_size(engine: Engine) -> None:
    """The table of drafts' branches has pages of one token."""
    engine.pool.by_heads(engine.page_size)
    engine.runner.page_size = 1


def layout_of_aiter(engine: Engine) -> None:
    """SGLANG_AITER_KV_CACHE_LAYOUT=vectorized_5d: K is [pages, heads, dim / x, tokens, x]."""
    engine.pool.by_heads(engine.page_size)
    for layer, paged in engine.pool.k.items():
        engine.pool.k[layer] = paged.unflatten(3, (-1, 4)).transpose(2, 3)


def prompts_in_parts(engine: Engine) -> None:
    engine.serving = replace(engine.serving, whole_prompts=False)


def text_after_a_prefix(engine: Engine) -> None:
    engine.layers[0].attn_type = SimpleNamespace(value="decoder_bidirectional")
    engine.runner.is_generation = True


def heads_of_all_ranks(engine: Engine) -> None:
    """SGLang's Gemma 3 divides its heads by all ranks, where DP attention gives each rank all heads."""
    engine.layers[0].tp_k_head_num = 1


def no_layers(engine: Engine) -> None:
    engine.runner.model = torch.nn.Module()


@pytest.mark.parametrize(
    ("fields", "change", "said"),
    [
        ({}, four_bits, "keeps K and V in four bits or in MXFP8.*; set --kv-cache-dtype bfloat16"),
        ({}, four_bits_of_latent_rows, "keeps K and V in four bits"),
        ({}, four_bits_in_a_part, "keeps K and V in four bits"),
        ({}, layout_of_aiter, "which AITER's own backend alone reads; leave SGLANG_AITER_KV_CACHE_LAYOUT out"),
        ({}, pages_of_another_size, "keeps each head's 4 tokens of a page together.*leave SGLANG_USE_HND_KVCACHE out"),
        ({"is_encoder": True}, prompts_in_parts, "a prompt may come in parts; use --chunked-prefill-size -1 and"),
        ({"is_encoder": True}, text_after_a_prefix, "layer 0: text after prompts that are not causal is not served"),
        (
            {},
            heads_of_all_ranks,
            "layer 0 has 1 KV heads on a rank, and its pool has .*so leave it out or choose another",
        ),
        ({}, no_layers, "no attention layer that can be found before it serves"),
    ],
)
def test_a_model_or_a_pool_that_no_kernel_serves_is_refused(
    fields: dict[str, Any], change: Callable[[Engine], None], said: str, provider: str, device: torch.device
) -> None:
    engine = Engine(provider, device, serve=False, **fields)
    change(engine)
    with pytest.raises(Unsupported, match=said):
        AttentionHooks(engine.runner, engine.serving)


def test_graphs_larger_than_those_that_were_prepared_are_refused(provider: str, device: torch.device) -> None:
    engine = Engine(provider, device)
    engine.hooks.init_cuda_graph_state(2, 2)
    engine.hooks.init_cuda_graph_state(1, 1)
    with pytest.raises(NeverFits, match="capture the largest first"):
        engine.hooks.init_cuda_graph_state(4, 4)
