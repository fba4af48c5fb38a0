"""The server's arguments and their requirements on our backend in SGLang, over stand-ins for SGLang's modules."""

import enum
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rocm_attn.errors import Unsupported
from rocm_attn.external import LogAndCount
from rocm_attn.integrations.plugins import SGLANG
from rocm_attn.integrations.sglang.encoded import EncodedHooks
from tests.amd.integrations.modules import install
from tests.amd.integrations.sglang_stand_in import Engine, Mode, RadixAttention, Request

BACKEND = "rocm_attn.integrations.sglang.backend"


class SharedReadEnds(enum.Enum):
    PRE_REPLAY = 1
    IN_REPLAY = 2
    POST_REPLAY = 3
    UNKNOWN = 4


class AttentionBackend:
    """Like SGLang's class, with the members that our backend reads."""

    kv_index_translator = None

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        raise NotImplementedError


class TreeMaskMode(enum.Enum):
    FULL_MASK = 1
    QLEN_ONLY = 2


@dataclass(frozen=True)
class VerifyMask:
    buffer: torch.Tensor
    mode: TreeMaskMode
    max_bs: int
    is_read: bool = True


class Server:
    def __init__(self) -> None:
        self.parallel = SimpleNamespace(attn_dcp_size=1, attn_tp_size=1, enable_prefill_cp=False)
        self.is_deterministic = False
        self.topk: int | None = None
        self.drafts: int | None = None
        self.backends = "rocm_attn", "rocm_attn"
        self.of_drafts: str | None = None
        self.disaggregation = "null"
        self.is_hisparse = False
        self.returns_selections = False
        self.dllm: str | None = None
        self.has_glue = False
        self.chunk, self.has_radix_cache = 8192, True
        self.captures_prompts = False

    def modules(self) -> dict[str, dict[str, Any]]:
        """Returns the values of SGLang's modules by their names."""
        return {
            "sglang": {"__version__": "0.5.23"},
            "sglang.srt.environ": {
                "envs": SimpleNamespace(SGLANG_ENABLE_METADATA_GLUE_GRAPH=SimpleNamespace(get=lambda: self.has_glue))
            },
            "sglang.srt.layers.attention.base_attn_backend": {
                "AttentionBackend": AttentionBackend,
                "SharedReadEnds": SharedReadEnds,
            },
            "sglang.kernels.ops.quantization.fp8_kernel": {"is_fp8_fnuz": lambda: False},
            "sglang.srt.models.deepseek_common.utils": {"_use_aiter_gfx95": False},
            "sglang.srt.layers.attention.verify_mask": {"VerifyMask": VerifyMask},
            "sglang.srt.layers.radix_attention": {"RadixAttention": RadixAttention},
            "sglang.srt.mem_cache.common": {"evict_from_tree_cache": lambda tree, num_tokens: None},
            "sglang.srt.speculative.eagle_utils": {"TreeMaskMode": TreeMaskMode},
            "sglang.srt.runtime_context": {
                "get_exec": lambda: SimpleNamespace(
                    deterministic=SimpleNamespace(enable_deterministic_inference=self.is_deterministic),
                    dllm=SimpleNamespace(dllm_algorithm=self.dllm),
                    features=SimpleNamespace(enable_return_indexer_topk=self.returns_selections),
                ),
                "get_flags": lambda: SimpleNamespace(dp=SimpleNamespace(capturing_prefill_graph=self.captures_prompts)),
                "get_schedule": lambda: SimpleNamespace(chunked_prefill_size=self.chunk),
                "get_parallel": lambda: self.parallel,
                "get_spec": lambda: SimpleNamespace(
                    speculative_eagle_topk=self.topk,
                    speculative_num_draft_tokens=self.drafts,
                    speculative_draft_attention_backend=self.of_drafts,
                ),
                "get_memory": lambda: SimpleNamespace(
                    enable_hisparse=self.is_hisparse, disable_radix_cache=not self.has_radix_cache
                ),
                "get_disagg": lambda: SimpleNamespace(disaggregation_mode=self.disaggregation),
                "attention_backends": lambda: self.backends,
            },
        }


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    stand = Server()
    install(monkeypatch, stand.modules())
    monkeypatch.setenv("ROCM_ATTN_PROVIDER", "torch")
    return stand


@pytest.fixture
def backend(server: Server) -> Iterator[Any]:
    """Yields our module over SGLang's, hidden from other tests."""
    yield importlib.import_module(BACKEND)
    del sys.modules[BACKEND]


@pytest.fixture
def runner() -> Any:
    return runner_of(Engine("torch", torch.device("cpu"), serve=False))


def algorithm(*, is_ngram: bool = False, is_frozen_kv_mtp: bool = False) -> Any:
    """Returns SGLang's SpeculativeAlgorithm."""
    return SimpleNamespace(is_ngram=lambda: is_ngram, is_frozen_kv_mtp=lambda: is_frozen_kv_mtp)


def runner_of(engine: Engine) -> Any:
    """Returns an engine's runner, with the fields that a backend is made by."""
    made = engine.runner
    made.kv_index_translator = SimpleNamespace(is_translating=False)
    made.spec_algorithm = algorithm()
    made.is_draft_worker = False
    made.model_config = SimpleNamespace(hf_config=SimpleNamespace(), is_encoder_decoder=False)
    return made


def test_a_backend_is_one_of_sglangs_and_says_until_when_it_reads_its_table(backend: Any, runner: Any) -> None:
    made: Any = backend.create(runner)
    assert AttentionBackend in type(made).__mro__
    assert made.shared_read_ends(Mode.DECODE) is SharedReadEnds.POST_REPLAY
    assert made.shared_read_ends(Mode.TARGET_VERIFY) is SharedReadEnds.POST_REPLAY
    assert made.shared_read_ends(Mode.EXTEND) is SharedReadEnds.UNKNOWN


def test_drafts_need_no_second_look_where_steps_are_planned_on_a_stream_of_their_own(backend: Any, runner: Any) -> None:
    """SGLang asks for it with SGLANG_ENABLE_OVERLAP_PLAN_STREAM, and the plan's stream has waited for the drafts."""
    made = backend.create(runner)
    for batch_size in (4, None):
        made.update_verify_buffers_to_fill_after_draft(SimpleNamespace(), batch_size)


def test_prompts_from_which_sglang_captures_graphs_of_all_but_attention_are_padding(
    server: Server, backend: Any
) -> None:
    """Their requests are in no row of the table: all of their tokens have the slot 0 (prefill_cuda_graph_runner.py)."""
    engine = Engine("torch", torch.device("cpu"), serve=False)
    made: Any = backend.create(runner_of(engine))
    dummy = engine.batch(Mode.EXTEND, [Request(0, [])], [8])
    engine.table[0], dummy.out_cache_loc[:] = 0, 0
    server.captures_prompts = True
    made.init_forward_metadata(dummy)
    step = engine.step_of(dummy, [8])
    engine.forward(step, made)
    assert all(not out.any() for out in step.outs)
    made.attention.check_device()
    server.captures_prompts = False
    engine.hooks = made
    one = engine.admit()
    engine.run(Mode.EXTEND, [one], [8])
    engine.run(Mode.DECODE, [one], [1])
    made.attention.check_device()


def test_a_model_with_an_encoder_has_a_backend_that_crosses(server: Server, backend: Any) -> None:
    with_encoder = Engine("torch", torch.device("cpu"), page_size=1, windows=(-1, -1), serve=False)
    with_encoder.layers[1].is_cross_attention = True
    of_text = runner_of(with_encoder)
    of_text.model_config.is_encoder_decoder = True
    made: Any = backend.create(of_text)
    assert isinstance(made, EncodedHooks)
    assert AttentionBackend in type(made).__mro__
    assert not isinstance(backend.create(runner_of(Engine("torch", torch.device("cpu"), serve=False))), EncodedHooks)


def test_arguments_of_the_server_choose_kernels_and_masks(
    server: Server, backend: Any, runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested = backend.serving_of(runner)
    assert (requested.provider, requested.deterministic, requested.with_trees) == ("torch", False, False)
    server.is_deterministic, server.topk = True, 4
    monkeypatch.setenv("ROCM_ATTN_ON_FAULT", "log")
    requested = backend.serving_of(runner)
    assert (requested.deterministic, requested.with_trees) == (True, True)
    assert isinstance(requested.on_fault, LogAndCount)
    server.topk = None
    runner.spec_algorithm = algorithm(is_ngram=True)
    assert backend.serving_of(runner).with_trees


def test_prompts_are_whole_without_chunks_and_a_radix_cache_and_in_a_draft_model(
    server: Server, backend: Any, runner: Any
) -> None:
    assert not backend.serving_of(runner).whole_prompts
    server.chunk = -1
    assert not backend.serving_of(runner).whole_prompts
    server.has_radix_cache = False
    assert backend.serving_of(runner).whole_prompts
    server.chunk, runner.is_draft_worker = 8192, True
    assert backend.serving_of(runner).whole_prompts


def test_what_a_server_may_ask_for_and_no_kernel_serves_is_refused(server: Server, backend: Any, runner: Any) -> None:
    runner.kv_index_translator.is_translating = True
    with pytest.raises(Unsupported, match="a unified KV pool is not served"):
        backend.create(runner)
    server.dllm = "LowConfidence"
    runner.kv_index_translator.is_translating = False
    with pytest.raises(Unsupported, match="diffusion models, which rewrite a block of tokens, are not served"):
        backend.create(runner)
    server.has_glue = True
    with pytest.raises(Unsupported, match="SGLANG_ENABLE_METADATA_GLUE_GRAPH is set"):
        backend.create(runner)
    server.parallel.enable_prefill_cp = True
    with pytest.raises(Unsupported, match="leave --enable-prefill-cp out"):
        backend.create(runner)
    server.parallel.attn_dcp_size = 2
    with pytest.raises(Unsupported, match="use --dcp-size 1"):
        backend.create(runner)


def test_a_draft_model_without_kv_of_its_own_is_refused_and_its_target_is_served(backend: Any, runner: Any) -> None:
    """Its layers have the ids of the target's layers, and its runner has a pool of 64 tokens for its own layers."""
    runner.spec_algorithm = algorithm(is_frozen_kv_mtp=True)
    assert backend.create(runner).attention
    runner.is_draft_worker = True
    with pytest.raises(Unsupported, match=r"FROZEN_KV_MTP.*use --speculative-draft-attention-backend triton"):
        backend.create(runner)


def test_a_release_that_was_not_tested_is_refused(backend: Any, runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["sglang"], "__version__", "0.6.0")
    with pytest.raises(Unsupported, match="does not serve SGLang 0.6.0: it was tested with " + SGLANG.served):
        backend.create(runner)


def test_a_trees_mask_lies_where_graphs_read_it_once_their_largest_is_known(
    server: Server, backend: Any, runner: Any
) -> None:
    server.topk, server.drafts = 2, 4
    made: Any = backend.create(runner)
    assert made.verify_mask is None
    made.init_cuda_graph_state(2, 8)
    mask: Any = made.verify_mask
    assert (mask.mode, mask.is_read, mask.max_bs) == (TreeMaskMode.FULL_MASK, True, 2)
    assert mask.buffer is made.mask_cells
    assert mask.buffer.numel() >= 2 * 4 * (made.max_context_len + 4)  # SGLang's tree_mask_numel
    made.init_cuda_graph_state(1, 4)
    assert made.verify_mask is mask


def test_latent_rows_that_a_model_stores_in_eight_bits_itself_are_refused(
    server: Server, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On gfx95 it does so if the backend is named aiter, whose name ours may take."""
    runner = runner_of(Engine("torch", torch.device("cpu"), is_latent=True, serve=False))
    runner.kv_cache_dtype = torch.float8_e4m3fn
    server.backends = "aiter", "aiter"
    assert backend.serving_of(runner)
    monkeypatch.setattr(sys.modules["sglang.srt.models.deepseek_common.utils"], "_use_aiter_gfx95", True)
    refusal = "for a backend named aiter, .*; use --attention-backend rocm_attn, or set SGLANG_USE_AITER=0"
    with pytest.raises(Unsupported, match=refusal):
        backend.serving_of(runner)
    server.backends = "rocm_attn", "rocm_attn"
    assert backend.serving_of(runner)
    server.of_drafts = "aiter"
    with pytest.raises(Unsupported, match=refusal):
        backend.serving_of(runner)
    runner.kv_cache_dtype = torch.bfloat16
    assert backend.serving_of(runner)
    server.backends, server.of_drafts = ("triton", "rocm_attn"), None
    assert backend.serving_of(runner)
    runner.model.block0.attn.k_scale_float = 0.5
    with pytest.raises(Unsupported, match="which only SGLang's own divide by; use one --attention-backend"):
        backend.serving_of(runner)
    server.backends = "rocm_attn", "rocm_attn"
    assert backend.serving_of(runner)
    server.disaggregation = "decode"
    with pytest.raises(Unsupported, match="serve it without --disaggregation-mode"):
        backend.serving_of(runner)


def test_index_keys_that_others_write_or_keep_are_refused(server: Server, backend: Any, runner: Any) -> None:
    runner.token_to_kv_pool.get_index_k_with_scale_buffer = None
    server.backends = "dsa", "rocm_attn"
    with pytest.raises(Unsupported, match=r"the backends for prompts and decode.*use one --attention-backend"):
        backend.serving_of(runner)
    server.backends, server.is_hisparse = ("rocm_attn", "rocm_attn"), True
    with pytest.raises(Unsupported, match="leave --enable-hisparse out"):
        backend.serving_of(runner)
    server.is_hisparse, server.returns_selections = False, True
    with pytest.raises(Unsupported, match="leave --enable-return-indexer-topk out"):
        backend.serving_of(runner)
    server.returns_selections, server.disaggregation = False, "decode"
    with pytest.raises(Unsupported, match="index keys of another server may be scaled differently"):
        backend.serving_of(runner)
    server.disaggregation, runner.is_draft_worker = "null", True
    runner.model_config.hf_config.index_share_for_mtp_iteration = True
    with pytest.raises(Unsupported, match="set index_share_for_mtp_iteration to false"):
        backend.serving_of(runner)
    runner.is_draft_worker = False
    assert backend.serving_of(runner).draft_tokens == 0


def test_a_chain_has_a_small_mask_from_the_start_that_is_not_read(server: Server, backend: Any, runner: Any) -> None:
    assert backend.create(runner).verify_mask is None
    server.topk, server.drafts = 1, 4
    made: Any = backend.create(runner)
    mask = made.verify_mask
    assert (mask.mode, mask.is_read, mask.max_bs) == (TreeMaskMode.QLEN_ONLY, False, made.attention.bounds.num_seqs)
    assert mask.buffer.numel() == mask.max_bs * 4 * 4
    made.init_cuda_graph_state(2, 8)
    assert made.verify_mask is mask
    runner.is_draft_worker = True
    assert backend.create(runner).verify_mask is None
