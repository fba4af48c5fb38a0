"""Our backend classes' refusals of vLLM, and their demands on kernels, with stand-ins for vLLM's classes and config."""

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rocm_attn.errors import Unsupported, WrongState
from rocm_attn.external import ExternalOptions
from rocm_attn.integrations.vllm.group import GroupLayer, GroupOptions, GroupSizes, KVGroup
from rocm_attn.integrations.vllm.layer_terms import CacheTerms, LayerTerms
from rocm_attn.integrations.vllm.steps import CommonMetadata
from tests.amd.integrations.vllm_stand_in import (
    BLOCK,
    CLASSES,
    DIM,
    HEADS,
    LATENT,
    TOP,
    Config,
    fast_builder,
    gqa_layer,
    installed,
    latent_layer,
    spec,
    step,
)

CPU = torch.device("cpu")
DECODES_SHARED = {"decode_context_parallel_size": 2}
PROMPTS_SHARED = {"prefill_context_parallel_size": 2}


@pytest.fixture
def ours() -> Iterator[dict[str, Any]]:
    """Yields our modules next to a supported release of vLLM."""
    with installed() as found:
        yield found


def backend_of(ours: dict[str, Any], kind: str) -> Any:
    names = {"backend": "RocmAttnBackend", "mla": "RocmAttnMLABackend", "sparse_mla": "RocmAttnSparseMLABackend"}
    return getattr(ours[kind], names[kind])


def builder(ours: dict[str, Any], kind: str, layer: Any = None, **ranks: int) -> Any:
    """Returns vLLM's builder for a layer, or for a plain one of the kind. ranks: sizes that a model asks for"""
    cls = backend_of(ours, kind)
    if layer is None:
        layer = (gqa_layer if kind == "backend" else latent_layer)(cls.get_impl_cls())
    return cls.get_builder_cls()(spec(), ["layer"], Config({"layer": layer}, ranks), CPU)


@pytest.mark.parametrize("kind", CLASSES)
def test_a_release_that_was_not_run_is_refused_where_our_classes_are_asked_for(kind: str) -> None:
    refusal = "rocm_attn does not serve vLLM 0.34.0: it was tested with 0.26.0 and later, before 0.34"
    with installed() as ours:
        impl = backend_of(ours, kind).get_impl_cls()
        assert builder(ours, kind).group
        layer = (gqa_layer if kind == "backend" else latent_layer)(impl)
    with installed("0.34.0") as ours:
        with pytest.raises(Unsupported, match=refusal):
            backend_of(ours, kind).get_impl_cls()
        with pytest.raises(Unsupported, match=refusal):
            builder(ours, kind, layer)


@pytest.mark.parametrize(
    ("kind", "ranks"), [("backend", PROMPTS_SHARED), ("sparse_mla", PROMPTS_SHARED), ("sparse_mla", DECODES_SHARED)]
)
def test_context_parallelism_that_layers_do_not_serve_is_refused(
    kind: str, ranks: dict[str, int], ours: dict[str, Any]
) -> None:
    (name,) = ranks
    with pytest.raises(Unsupported, match=f"{name} is 2; rocm_attn serves 1 in vLLM, so leave it out"):
        builder(ours, kind, **ranks)


@pytest.mark.parametrize("kind", CLASSES)
def test_micro_batches_are_refused_because_vllm_runs_each_in_a_thread_of_its_own(
    kind: str, ours: dict[str, Any]
) -> None:
    """An error in one of these threads would leave the others waiting for it."""
    with pytest.raises(Unsupported, match=r"in threads of their own, .*; leave out --enable-dbo and --ubatch-size"):
        builder(ours, kind, use_ubatching=1)


def test_latent_rows_on_the_host_are_refused(ours: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM writes a step's rows to slots of its own, and our kernels would read those of the block table."""
    monkeypatch.setattr(Config.attention_config, "hisparse_config", object(), raising=False)
    with pytest.raises(Unsupported, match="leave hisparse_config and HiSparseConnector out"):
        builder(ours, "sparse_mla")
    assert builder(ours, "mla").group


def test_static_sinks_are_refused_because_vllm_writes_them_in_another_layout(ours: dict[str, Any]) -> None:
    """Such a model's writer takes the second dimension of a cache for the tokens of a block: here it is the heads."""
    layer = gqa_layer(ours["backend"].RocmAttnImpl)
    for sinks, raised in ((None, nullcontext()), (128, pytest.raises(Unsupported, match="has 128 static sinks"))):
        cache = SimpleNamespace(**vars(spec()), sink_len=sinks)
        with raised:
            ours["backend"].RocmAttnBuilder(cache, ["layer"], Config({"layer": layer}), CPU)


def test_a_layer_that_reads_anothers_kv_is_refused_where_ranks_share_contexts(ours: dict[str, Any]) -> None:
    impl = ours["backend"].RocmAttnImpl
    reader = gqa_layer(impl, kv_sharing_target_layer_name="layers.0")
    assert builder(ours, "backend", reader).group
    refusal = "layer reads the KV of layers.0, which is not served if ranks share contexts; set decode_context_para"
    with pytest.raises(Unsupported, match=refusal):
        builder(ours, "backend", reader, **DECODES_SHARED)


def test_what_is_stored_apart_from_steps_is_refused_where_ranks_share_contexts(ours: dict[str, Any]) -> None:
    layer = gqa_layer(ours["backend"].RocmAttnImpl)
    builder(ours, "backend", layer, **DECODES_SHARED)
    refusal = "layer drafts blocks, whose K and V vLLM stores .* if ranks share contexts; set decode_context_parallel_s"
    with pytest.raises(Unsupported, match=refusal):
        layer.impl.do_kv_cache_update(layer, torch.zeros(1), torch.zeros(1), layer.kv_cache, torch.zeros(1))


def test_steps_of_ranks_that_share_contexts_are_not_captured(ours: dict[str, Any]) -> None:
    shared = builder(ours, "backend", **DECODES_SHARED)
    support = ours["backend"].AttentionCGSupport
    assert shared.get_cudagraph_support(shared.vllm_config, spec()) == support.NEVER
    with pytest.raises(WrongState, match="vLLM captures steps of ranks that share contexts, which the backend does"):
        shared.build_for_cudagraph_capture(step())
    alone = builder(ours, "backend")
    assert alone.get_cudagraph_support(alone.vllm_config, spec()) == support.ALWAYS


def test_graphs_of_layers_with_fast_prefill_serve_steps_of_one_token_per_sequence_alone(ours: dict[str, Any]) -> None:
    """vLLM's runner V1 describes a step without the tokens that have no logits, and replays a graph that has them."""
    made = fast_builder(ours["backend"].RocmAttnBuilder)
    wanted = ours["backend"].AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert made.get_cudagraph_support(Config({}), spec()) == wanted


@pytest.mark.parametrize("is_requested", [False, True])
def test_batch_invariance_asks_for_deterministic_kernels(
    is_requested: bool, ours: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["vllm.envs"], "VLLM_BATCH_INVARIANT", is_requested)
    made = builder(ours, "backend")
    made.build(0, step())
    assert made.group.attention.options.deterministic is is_requested
    assert backend_of(ours, "backend").supports_batch_invariance()
    refusal = "VLLM_BATCH_INVARIANT is not served if ranks share contexts"
    with pytest.raises(Unsupported, match=refusal) if is_requested else nullcontext():
        builder(ours, "backend", **DECODES_SHARED)


def test_in_batch_invariant_mode_prompts_of_latent_layers_count_as_decodes(
    ours: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM cuts a step at reorder_batch_threshold; it leaves the rest to backends that cut a prompt's context."""
    lengths = ours["mla"].QueryLenSupport
    plain = builder(ours, "mla")
    assert plain.query_len_support is lengths.UNIFORM
    assert plain.reorder_batch_threshold == 1  # vLLM's own, which it raises to the drafts of a request
    monkeypatch.setattr(sys.modules["vllm.envs"], "VLLM_BATCH_INVARIANT", True)
    invariant = builder(ours, "mla")
    assert invariant.query_len_support is lengths.VARLEN
    assert invariant.reorder_batch_threshold > 2**20
    assert [backend_of(ours, kind).supports_batch_invariance() for kind in CLASSES] == [True, True, False]
    with pytest.raises(Unsupported, match="VLLM_BATCH_INVARIANT is not served for MLA layers whose ranks share"):
        builder(ours, "mla", **DECODES_SHARED)


@pytest.mark.parametrize("is_rocm", [False, True])
@pytest.mark.parametrize("kind", ["backend", "sparse_mla"])
def test_vllms_drafters_take_our_metadata_on_rocm_too(
    kind: str, is_rocm: bool, ours: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its runner V1 has a list of classes there, and makes the drafter of the target before any builder."""
    monkeypatch.setattr(sys.modules["vllm.platforms"].current_platform, "is_rocm", lambda: is_rocm)
    monkeypatch.setattr(Config, "speculative_config", object())
    make = sys.modules["vllm.v1.spec_decode.llm_base_proposer"].SpecDecodeBaseProposer
    earlier, metadata = make(), [builder(ours, kind).build(0, step()) for _ in range(2)]
    for drafter in (earlier, make()):
        for each in metadata:
            drafter.propose(each)
        if is_rocm:
            with pytest.raises(ValueError, match="Unsupported attention metadata type"):
                drafter.propose(object())


@pytest.mark.parametrize("invariant", [False, True])
def test_drafts_that_the_device_trims_are_refused_where_vllm_splits_steps_by_lengths_on_the_host(
    invariant: bool, ours: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.33 asks this for enable_adaptive_verification. Its split of MLA steps asks for uniform lengths."""
    monkeypatch.setattr(sys.modules["vllm.envs"], "VLLM_BATCH_INVARIANT", invariant)
    assert backend_of(ours, "mla").supports_device_cpu_query_lens_mismatch() is invariant
    assert backend_of(ours, "sparse_mla").supports_device_cpu_query_lens_mismatch()


@pytest.mark.parametrize("scale", ["output_scale", "output_block_scale"])
def test_quantised_output_is_refused(scale: str, ours: dict[str, Any]) -> None:
    layer = gqa_layer(ours["backend"].RocmAttnImpl)
    metadata = builder(ours, "backend", layer).build(0, step())
    q, kv, out = torch.ones(1, HEADS, DIM), torch.ones(1, 1, DIM), torch.full((1, HEADS, DIM), 7.0)
    with pytest.raises(Unsupported, match="vLLM asks for quantised output, which rocm_attn does not write; set fuse"):
        layer.impl.forward(layer, q, kv, kv, layer.kv_cache, metadata, out, **{scale: torch.ones(1)})
    assert (out == 7).all()
    assert not layer.kv_cache.any()
    layer.impl.forward(layer, q, kv, kv, layer.kv_cache, metadata, out, **{scale: None})
    assert (out != 7).all()


@pytest.mark.parametrize(("kind", "dtype"), [("mla", "fp8"), ("sparse_mla", "fp8"), ("sparse_mla", "fp8_ds_mla")])
def test_latent_rows_in_eight_bits_are_refused_on_a_cpu(kind: str, dtype: str, ours: dict[str, Any]) -> None:
    impl = backend_of(ours, kind).get_impl_cls()
    with pytest.raises(Unsupported, match="latent rows are not stored in FP8 on a CPU; leave --kv-cache-dtype at auto"):
        builder(ours, kind, latent_layer(impl, dtype))


def test_sparse_layers_alone_take_a_cache_of_records(ours: dict[str, Any]) -> None:
    sparse = backend_of(ours, "sparse_mla")
    assert "fp8_ds_mla" in sparse.supported_kv_cache_dtypes
    assert sparse.get_kv_cache_shape(7, 64, 1, 576, "fp8_ds_mla") == (7, 64, 656)
    assert sparse.get_kv_cache_shape(7, 64, 1, 576, "fp8") == sparse.get_kv_cache_shape(7, 64, 1, 576) == (7, 64, 576)
    for kind in ("backend", "mla"):
        assert "fp8_ds_mla" not in backend_of(ours, kind).supported_kv_cache_dtypes


@pytest.mark.parametrize(
    ("width", "found"), [(None, "no buffer of selected keys"), (TOP + 8, f"{TOP + 8} keys selected per token")]
)
def test_choices_of_another_width_than_the_models_are_refused(
    width: int | None, found: str, ours: dict[str, Any]
) -> None:
    chosen = None if width is None else torch.zeros(1, width, dtype=torch.int32)
    layer = latent_layer(ours["sparse_mla"].RocmAttnSparseMLAImpl, chosen=chosen)
    metadata = builder(ours, "sparse_mla", layer).build(0, step())
    q = torch.ones(1, HEADS, LATENT + DIM)
    refusal = f"layer has {found}; rocm_attn attends to index_topk of them, {TOP}, so choose another attention backend"
    with pytest.raises(Unsupported, match=refusal):
        layer.impl.forward_mqa(q, layer.kv_cache, metadata, layer)
    layer.impl.topk_indices_buffer = torch.tensor([[0, 1, 2, *[-1] * (TOP - 3)]], dtype=torch.int32)
    out, lse = layer.impl.forward_mqa(q, layer.kv_cache, metadata, layer)
    assert lse is None
    assert out.shape == (1, HEADS, LATENT)


def decodes_of(made: Any, common: Any) -> Any:
    """Begins a step of a builder of MLA layers as vLLM does, and returns its metadata."""
    made._common = common
    decodes = made._build_decode(
        query_start_loc_device=common.query_start_loc,
        seq_lens_device=common.seq_lens,
        num_decode_tokens=common.num_actual_tokens,
        max_seq_len=common.max_seq_len,
        block_table_tensor=common.block_table_tensor,
        dcp_tot_seq_lens_device=None,
    )
    return SimpleNamespace(decode=decodes)


def test_queries_that_a_model_has_quantised_are_scaled_back(ours: dict[str, Any]) -> None:
    """Kimi K3's model does so on ROCm with AITER and a cache in FP8, whatever supports_quant_query_input says."""
    layer, common = latent_layer(ours["mla"].RocmAttnMLAImpl), step()
    layer.impl.need_to_return_lse_for_decode, layer._q_scale = False, torch.tensor(0.5)
    layer.kv_cache.copy_(torch.arange(layer.kv_cache.numel()).reshape(layer.kv_cache.shape) % 7 - 3)
    made = builder(ours, "mla", layer)
    codes = (torch.arange(HEADS * (LATENT + DIM)).reshape(1, HEADS, -1) % 5 - 2.0).to(torch.float8_e4m3fn)
    out, _ = layer.impl.forward_mqa(codes, layer.kv_cache, decodes_of(made, common), layer)
    wanted, _ = layer.impl.forward_mqa(codes.float() / 2, layer.kv_cache, decodes_of(made, common), layer)
    assert out.dtype == torch.float32
    assert torch.equal(out, wanted)
    assert out.any()


def test_queries_of_which_a_part_is_divided_by_their_scale_are_refused(ours: dict[str, Any]) -> None:
    """AITER's product of queries in FP4 divides, if the cache is in FP8, and rotated parts stay as they are."""
    layer = latent_layer(ours["mla"].RocmAttnMLAImpl)
    layer.is_aiter_triton_fp4_bmm_enabled, layer._q_scale = True, torch.tensor(0.5)
    assert builder(ours, "mla", layer).group
    layer.impl.terms = replace(layer.impl.terms, kv_cache_dtype="fp8")
    with pytest.raises(Unsupported, match=r"layer has queries of scale 0\.5, .*; leave VLLM_ROCM_USE_AITER_FP4BMM out"):
        ours["mla"].RocmAttnMLABuilder(spec(), ["layer"], Config({"layer": layer}), torch.device("meta"))


@pytest.mark.parametrize("shares", [False, True])
def test_latent_decodes_give_their_lse_if_ranks_share_sequences(shares: bool, ours: dict[str, Any]) -> None:
    layer, common = latent_layer(ours["mla"].RocmAttnMLAImpl), step()
    layer.impl.need_to_return_lse_for_decode = shares
    made = builder(ours, "mla", layer)
    q = torch.ones(1, HEADS, LATENT + DIM)
    out, lse = layer.impl.forward_mqa(q, layer.kv_cache, decodes_of(made, common), layer)
    assert not out.any()
    assert layer.impl.can_return_lse_for_decode
    assert not made.group.attention.options.page_strides, "V is a part of K, and K has no gaps"
    assert lse is None if not shares else torch.allclose(lse, torch.tensor(3.0).log())  # of three scores of 0


def test_a_group_has_no_attention_before_its_first_step_and_no_step_before_its_caches() -> None:
    problem = LayerTerms(HEADS, DIM, 0.3, 1).problem(CacheTerms(BLOCK, DIM, torch.float32, torch.float8_e4m3fn))
    layer = SimpleNamespace(kv_cache=torch.empty(0), _k_scale=torch.ones(()), _v_scale=torch.ones(()))
    options = GroupOptions(ExternalOptions(page_strides=True))
    group = KVGroup({"layers.3": GroupLayer(layer, problem)}, GroupSizes(4, 16, 64), CPU, options)
    with pytest.raises(WrongState, match="the group has no step yet"):
        group.attention.check_device()
    with pytest.raises(WrongState, match=r"vLLM begins a step before layers\.3 have a KV cache"):
        group.begin(CommonMetadata(**vars(step())))
