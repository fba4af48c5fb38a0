"""vLLM's terms of layers become problems or a refusal in one sentence; and the backend names that are ours."""

import logging
from dataclasses import replace
from enum import Enum
from typing import Any

import pytest
import torch

from rocm_attn.errors import BadSetting, BadTensor, DeviceFault, Unsupported
from rocm_attn.integrations.engine_settings import fault_policy, provider
from rocm_attn.integrations.plugins import VLLM
from rocm_attn.integrations.vllm import (
    GQA_BACKEND,
    MLA_BACKEND,
    MLA_NAME,
    SPARSE_MLA_BACKEND,
    SPARSE_MLA_NAME,
    register,
    whole_images,
)
from rocm_attn.integrations.vllm.kv_views import pages_of
from rocm_attn.integrations.vllm.layer_terms import CacheTerms, LayerTerms, MaskTerms
from rocm_attn.machine import settings as machine_settings
from rocm_attn.problem import UNLIMITED_WINDOW, KVEncoding, PoolKind, Scales
from tests.amd.integrations.modules import install

CACHE = CacheTerms(16, 64, torch.bfloat16, torch.float8_e4m3fn)
TERMS = LayerTerms(32, 64, 0.125, 8)


def test_terms_are_read_in_vllms_order_and_by_its_names() -> None:
    given = (32, 64, 0.125, 8, None, 128, "auto", 30.0, "decoder", None)
    sinks = torch.zeros(32)
    terms = LayerTerms.read(given, {"sinks": sinks, "chunk_lookback": -1, "use_alibi_sqrt": False})
    problem = terms.problem(CACHE)
    assert (problem.num_q_heads, problem.num_kv_heads, problem.head_dim, problem.page_size) == (32, 8, 64, 16)
    # vLLM counts the query itself among the keys of its window.
    assert problem.window_left == 127
    assert problem.logits_soft_cap == 30.0
    assert problem.has_sinks
    assert terms.stores
    assert terms.head_weights.sinks is not None


@pytest.mark.parametrize(
    ("named", "what"),
    [
        ({"use_alibi_sqrt": True}, "use_alibi_sqrt=True"),
        ({"chunk_lookback": 2}, "chunk_lookback=2"),
        ({"something_new": 1}, "something_new=1"),
        ({"attn_type": "two_towers"}, "attention type two_towers"),
        ({"kv_cache_dtype": "nvfp4"}, "dtype nvfp4"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "dtype int8_per_token_head"),
    ],
)
def test_terms_that_are_not_served_are_refused(named: dict[str, Any], what: str) -> None:
    with pytest.raises(Unsupported, match=what):
        LayerTerms.read((32, 64, 0.125, 8), named)


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"attn_type": "encoder_decoder", "sliding_window": 8}, "cross attention has a window of 8 keys"),
        *(
            ({"attn_type": kind, "alibi_slopes": [0.5] * 32}, f"{kind} attention has ALiBi slopes")
            for kind in ("encoder", "encoder_only", "encoder_decoder")
        ),
    ],
)
def test_features_without_a_meaning_outside_of_decoders_are_refused(changes: dict[str, Any], refusal: str) -> None:
    with pytest.raises(Unsupported, match=refusal):
        replace(TERMS, **changes).problem(CACHE)


@pytest.mark.parametrize("kind", ["encoder", "encoder_only"])
def test_a_window_of_an_encoder_has_two_sides(kind: str) -> None:
    """vLLM's FLASH_ATTN and TRITON_ATTN give their kernels (sliding_window - 1, sliding_window - 1)."""
    problem = replace(TERMS, attn_type=kind, sliding_window=8).problem(CACHE)
    assert (problem.window_left, problem.window_right) == (7, 7)
    causal = replace(TERMS, sliding_window=8).problem(CACHE)
    assert (causal.window_left, causal.window_right) == (7, 0)


@pytest.mark.parametrize("kind", ["encoder", "encoder_only", "encoder_decoder"])
def test_only_decoders_are_causal_and_latent(kind: str) -> None:
    terms = replace(TERMS, attn_type=kind)
    assert not terms.problem(CACHE).causal
    assert not terms.problem(CACHE, MaskTerms(spans=True)).custom_mask  # all keys are seen anyway
    assert TERMS.problem(CACHE).causal
    with pytest.raises(Unsupported, match=f"an MLA layer asks for attention type {kind}"):
        terms.latent_problem(CACHE, 64)


@pytest.mark.parametrize(
    ("dtype", "platform", "encoding"),
    [
        ("auto", torch.float8_e4m3fn, KVEncoding.LIKE_Q),
        ("bfloat16", torch.float8_e4m3fn, KVEncoding.LIKE_Q),
        ("fp8", torch.float8_e4m3fn, KVEncoding.E4M3FN),
        ("fp8_e4m3", torch.float8_e4m3fnuz, KVEncoding.E4M3FNUZ),
        ("fp8_e5m2", torch.float8_e4m3fnuz, KVEncoding.E5M2),
    ],
)
def test_the_platform_says_which_e4m3_an_fp8_cache_holds(
    dtype: str, platform: torch.dtype, encoding: KVEncoding
) -> None:
    problem = replace(TERMS, kv_cache_dtype=dtype).problem(replace(CACHE, fp8_dtype=platform))
    assert problem.kv_encoding is encoding
    assert (problem.kv_scales is Scales.LAYER) == (encoding is not KVEncoding.LIKE_Q)


@pytest.mark.parametrize("platform", [torch.float8_e4m3fn, torch.float8_e4m3fnuz], ids=str)
def test_a_cache_of_records_is_of_latent_layers_and_of_the_platforms_e4m3(platform: torch.dtype) -> None:
    cache, terms = replace(CACHE, fp8_dtype=platform), LayerTerms(16, 576, 0.1, 1, kv_cache_dtype="fp8_ds_mla")
    problem = terms.latent_problem(cache, 512)
    assert problem.kv_scales is Scales.GROUP
    assert problem.page_format.encoding.dtype == platform
    stored = torch.zeros(5, 16, 656, dtype=torch.uint8)
    for rows in (stored, stored[:, None]):
        k, v = pages_of(problem, rows)
        assert (k.shape, v.shape) == ((5, 16, 1, 656), (5, 16, 1, 512))
        assert k.data_ptr() == v.data_ptr() == stored.data_ptr()
    with pytest.raises(BadTensor, match=r"rocm_attn reads \[blocks, 16 tokens, 656 elements\]"):
        pages_of(problem, torch.zeros(5, 16, 584, dtype=torch.uint8))  # DeepSeek-V4's
    with pytest.raises(Unsupported, match="fp8_ds_mla, which holds rows of sparse MLA layers, and a layer has K and V"):
        replace(TERMS, kv_cache_dtype="fp8_ds_mla").problem(cache)


def test_a_cache_of_another_16_bit_dtype_than_the_models_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"the KV cache is torch.float16 and the model computes in torch.bfloat16"):
        replace(TERMS, kv_cache_dtype="float16").problem(CACHE)


def test_an_mla_layer_is_latent_with_the_heads_of_all_ranks_that_share_its_sequences() -> None:
    terms = LayerTerms(16, 576, 0.1, 1)
    alone, shared = (terms.latent_problem(replace(CACHE, shards=shards), 512) for shards in (1, 4))
    assert (alone.pool, alone.num_q_heads, alone.head_dim, alone.v_head_dim) == (PoolKind.LATENT, 16, 576, 512)
    assert not alone.wants_lse
    assert shared.num_q_heads == 64
    assert shared.wants_lse


@pytest.mark.parametrize(
    ("requested", "what"),
    [
        ({"sliding_window": 8}, "a sliding window"),
        ({"logits_soft_cap": 5.0}, "a soft cap"),
        ({"kv_sharing_target_layer_name": "layers.0"}, "KV of another layer"),
    ],
)
def test_what_mla_layers_have_no_kernels_for_is_refused(requested: dict[str, Any], what: str) -> None:
    with pytest.raises(Unsupported, match=f"an MLA layer asks for {what}"):
        replace(LayerTerms(16, 576, 0.1, 1), **requested).latent_problem(CACHE, 512)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)], ids=["HND", "NHD"])
def test_packed_caches_are_viewed_in_any_layout_and_never_copied(order: tuple[int, ...]) -> None:
    problem = TERMS.problem(CACHE)
    shape = [5, 8, 16, 128]
    stored = torch.zeros([shape[axis] for axis in order], dtype=torch.bfloat16)
    cache = stored.permute([order.index(axis) for axis in range(4)])
    k, v = pages_of(problem, cache)
    assert k.shape == v.shape == (5, 16, 8, 64)
    k[3, 2, 1] = 1
    v[3, 2, 1] = 2
    assert cache[3, 1, 2].tolist() == [1.0] * 64 + [2.0] * 64
    assert stored.float().sum() == 64 * 3


def test_caches_of_other_layouts_are_refused() -> None:
    with pytest.raises(BadTensor, match=r"rocm_attn reads \[blocks, 8 KV heads, 16 tokens, 128"):
        pages_of(TERMS.problem(CACHE), torch.zeros(2, 5, 16, 8, 64))
    latent = LayerTerms(16, 576, 0.1, 1).latent_problem(CACHE, 512)
    assert pages_of(latent, torch.zeros(5, 1, 16, 576))[0].shape == (5, 16, 1, 576)
    assert pages_of(latent, torch.zeros(5, 16, 576))[1].shape == (5, 16, 1, 512)
    with pytest.raises(BadTensor, match="an MLA layer's KV cache"):
        pages_of(latent, torch.zeros(5, 16, 656))


def test_the_environment_says_whose_kernels_serve_and_what_a_fault_does(caplog: pytest.LogCaptureFixture) -> None:
    assert provider({}) == "auto"
    assert provider({"ROCM_ATTN_PROVIDER": "triton"}) == "triton"
    with caplog.at_level(logging.ERROR, logger="vllm"):
        fault_policy({"ROCM_ATTN_ON_FAULT": "log"}, VLLM.log)(DeviceFault("step 3: gone"))
        # A request whose K is infinite ends no other one.
        fault_policy({}, VLLM.log)(DeviceFault("step 4: infinite", is_contained=True))
    said = [("vllm.rocm_attn", "step 3: gone"), ("vllm.rocm_attn", "step 4: infinite")]
    assert [(line.name, line.message) for line in caplog.records] == said
    with pytest.raises(DeviceFault, match="gone"):
        fault_policy({}, VLLM.log)(DeviceFault("gone"))
    with pytest.raises(BadSetting, match="ROCM_ATTN_ON_FAULT is 'ignore'; it must be raise or log"):
        fault_policy({"ROCM_ATTN_ON_FAULT": "ignore"}, VLLM.log)


class Registry:
    """vLLM's registry of backends, as in 0.26; with custom names from 0.32 on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, takes_names: bool) -> None:
        self.paths: dict[str, str] = {}
        members = {"CUSTOM": None, "CPU_ATTN": "a", "CPU_MLA": "b", "ROCM_AITER_MLA_SPARSE": "c"}
        self.enum: Any = Enum("AttentionBackendEnum", [(name, name) for name in members])  # type: ignore[misc]
        if takes_names:
            self.enum.register = None
        values = {"AttentionBackendEnum": self.enum, "register_backend": self.register_backend}
        install(monkeypatch, {"vllm.v1.attention.backends.registry": values})
        monkeypatch.setattr(whole_images, "keep_images_whole", lambda: None)

    def register_backend(self, backend: Any, class_path: str | None = None, is_mamba: bool = False) -> None:
        """Registers lazily: it keeps the path, and imports nothing."""
        assert class_path is not None
        self.paths[backend if isinstance(backend, str) else backend.name] = class_path


def settings_of(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    """Reads the process's settings again, with these values."""
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    machine_settings.settings.cache_clear()


@pytest.fixture(autouse=True)
def read_settings_again() -> Any:
    """Makes other tests read their own settings."""
    yield
    machine_settings.settings.cache_clear()


@pytest.mark.parametrize("takes_names", [False, True], ids=["0.26", "0.32"])
def test_custom_is_ours_and_mla_layers_have_a_name_where_vllm_takes_one(
    takes_names: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry(monkeypatch, takes_names)
    settings_of(monkeypatch)
    register()
    named = {MLA_NAME: MLA_BACKEND, SPARSE_MLA_NAME: SPARSE_MLA_BACKEND}
    assert registry.paths == {"CUSTOM": GQA_BACKEND} | (named if takes_names else {})


def test_the_places_of_vllms_own_backends_are_taken_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry(monkeypatch, takes_names=False)
    settings_of(monkeypatch, ROCM_ATTN_TAKE_BACKENDS="CPU_ATTN,CPU_MLA,ROCM_AITER_FA,ROCM_AITER_MLA_SPARSE")
    register()
    taken = {"CPU_ATTN": GQA_BACKEND, "CPU_MLA": MLA_BACKEND, "ROCM_AITER_MLA_SPARSE": SPARSE_MLA_BACKEND}
    assert registry.paths == {"CUSTOM": GQA_BACKEND} | taken


def test_a_layer_without_a_window_or_kv_heads_of_its_own_sees_all_keys_by_all_heads() -> None:
    problem = LayerTerms(4, 64, 1.0).problem(CACHE)
    assert problem.window_left == UNLIMITED_WINDOW
    assert problem.num_kv_heads == 4
