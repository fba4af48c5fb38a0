"""The masks of layers and steps, as our backend classes read them from vLLM's, with stand-ins for these."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rocm_attn.errors import Unsupported, WrongState
from rocm_attn.integrations.vllm import whole_images
from rocm_attn.integrations.vllm.whole_images import keep_images_whole
from rocm_attn.problem import Scales
from tests.amd.integrations.modules import install
from tests.amd.integrations.vllm_stand_in import (
    BLOCK,
    DIM,
    HEADS,
    Config,
    EncoderSpec,
    chunked_builder,
    cross_builder,
    cross_impl,
    gqa_layer,
    installed,
    spec,
    step,
)

CPU = torch.device("cpu")


@pytest.fixture
def ours() -> Iterator[Any]:
    """Yields our module of backend classes next to a supported release of vLLM."""
    with installed() as found:
        yield found["backend"]


def problem_of(ours: Any, layer: Any, **more: Any) -> Any:
    made = ours.RocmAttnBuilder(spec(), ["layer"], Config({"layer": layer}, **more), CPU)
    made.build(0, step())
    (problem,) = made.group.attention.kernels().problems
    return problem


def test_a_step_of_layers_with_chunks_stays_whole_and_may_be_captured(ours: Any) -> None:
    layer = gqa_layer(ours.RocmAttnImpl, attention_chunk_size=16)
    builder = chunked_builder(ours.RocmAttnBuilder)
    made = builder(spec(), ["layer"], Config({"layer": layer}), CPU)
    metadata = made.build(0, step())
    (problem,) = made.group.attention.kernels().problems
    assert problem.chunk == 16
    assert metadata.step.num_tokens == 1
    assert builder.get_cudagraph_support(made.vllm_config, spec()) == ours.AttentionCGSupport.ALWAYS


@pytest.mark.parametrize(("keeps_window", "window"), [(False, 8), (True, 8), (False, None)])
def test_a_layer_with_images_is_served_and_says_whether_they_override_its_window(
    keeps_window: bool, window: int | None, ours: Any
) -> None:
    """vLLM's own backends do the same: (causal and in the window) or in the image; in Gemma 4 in the window alone."""
    assert ours.RocmAttnBackend.supports_mm_prefix()
    terms: dict[str, Any] = {
        "use_mm_prefix": True,
        "mm_prefix_clamp_sliding_window": keeps_window,
        "sliding_window": window,
    }
    problem = problem_of(ours, gqa_layer(ours.RocmAttnImpl, **terms))
    assert problem.custom_mask
    assert problem.spans_pass_window is (window is not None and not keeps_window)
    assert not problem_of(ours, gqa_layer(ours.RocmAttnImpl, use_mm_prefix=False)).custom_mask


def test_a_model_of_several_parts_says_of_images_what_its_layers_of_text_do_not(ours: Any) -> None:
    """A part's layers are made with a config of that part alone. Heads that draft blocks see no images."""
    for is_open in (False, True):
        layer = gqa_layer(ours.RocmAttnImpl, use_mm_prefix=False, sliding_window=8)
        layer.impl.is_open = is_open
        problem = problem_of(ours, layer, has_images=True)
        assert problem.custom_mask
        assert problem.spans_pass_window is not is_open


@pytest.mark.parametrize("window", [None, 8])
def test_images_of_gemma_4_are_seen_in_layers_with_a_window_alone(window: int | None, ours: Any) -> None:
    """vLLM's model says so of its own backends' metadata, after these have begun a step."""
    terms: dict[str, Any] = {"use_mm_prefix": True, "mm_prefix_clamp_sliding_window": window is not None}
    layer = gqa_layer(ours.RocmAttnImpl, sliding_window=window, **terms)
    config = Config({"layer": layer}, has_images=True, text={"use_bidirectional_attention": "vision"})
    made, common = ours.RocmAttnBuilder(spec(), ["layer"], config, CPU), step()
    common.query_start_loc, common.num_actual_tokens, common.max_query_len = torch.tensor([0, 3]), 3, 3
    common.query_start_loc_cpu, common.seq_lens_cpu_upper_bound = common.query_start_loc, common.seq_lens
    common.slot_mapping, common.mm_req_doc_ranges = torch.arange(BLOCK, BLOCK + 3), {0: [(0, 2)]}
    q, out = torch.zeros(3, HEADS, DIM), torch.zeros(3, HEADS, DIM)
    kv = torch.tensor([1.0, 3.0, 8.0]).view(3, 1, 1).repeat(1, 1, DIM)
    layer.impl.forward(layer, q, kv, kv, layer.kv_cache, made.build(0, common), out)
    assert out[:, 0, 0].tolist() == pytest.approx([1.0, 2.0, 4.0] if window is None else [4.0] * 3)


def test_cross_attention_is_refused_where_ranks_share_contexts(ours: Any) -> None:
    layer = gqa_layer(ours.RocmAttnImpl, attn_type="encoder_decoder")
    with pytest.raises(Unsupported, match="decode_context_parallel_size is 2; rocm_attn serves 1 in vLLM"):
        ours.RocmAttnBuilder(spec(), ["layer"], Config({"layer": layer}, {"decode_context_parallel_size": 2}), CPU)


def test_drafts_in_the_places_of_an_image_that_is_yet_to_come_are_served(ours: Any) -> None:
    """vLLM drafts after each chunk of a prompt, and the next chunk overwrites what these drafts have stored."""
    layer = gqa_layer(ours.RocmAttnImpl, use_mm_prefix=True)
    made = ours.RocmAttnBuilder(spec(), ["layer"], Config({"layer": layer}, has_images=True), CPU)
    common = step(6)
    common.query_start_loc_cpu, common.seq_lens_cpu_upper_bound = common.query_start_loc, common.seq_lens
    common.mm_req_doc_ranges = {0: [(5, 9)]}
    assert made.build(0, common, fast_build=True).step.num_tokens == 1
    assert common.mm_req_doc_ranges == {0: [(5, 9)]}
    with pytest.raises(Unsupported, match="set --disable-chunked-mm-input"):
        made.build(0, common)


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"disable_chunked_mm_input": False}, "set --disable-chunked-mm-input"),
        ({"long_prefill_token_threshold": 40}, "lets a prompt have 40 tokens in a step, .* exceed; leave it out"),
        (
            {"long_prefill_token_threshold": 40, "max_num_partial_prefills": 2},
            "leave it and max_num_partial_prefills, which sets it, out",
        ),
    ],
)
def test_settings_that_may_cut_images_are_refused_at_the_start(
    setting: dict[str, Any], sentence: str, ours: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"is_multimodal_model": True, **setting}.items():
        monkeypatch.setattr(Config.scheduler_config, name, value, raising=False)
    assert problem_of(ours, gqa_layer(ours.RocmAttnImpl))
    with pytest.raises(Unsupported, match=sentence):
        problem_of(ours, gqa_layer(ours.RocmAttnImpl, use_mm_prefix=True))


@pytest.mark.parametrize(
    ("first", "count", "scheduled"),
    [(0, 4, 4), (0, 5, 4), (0, 14, 14), (0, 22, 20), (4, 9, 0), (8, 2, 0), (8, 6, 6), (14, 9, 6), (20, 4, 0)],
)
def test_vllms_scheduler_ends_no_step_within_an_image(
    first: int, count: int, scheduled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefix hit may begin a step within one. Images have the tokens 4 to 13 and 20 to 29."""

    class Scheduler:
        def _try_schedule_encoder_inputs(self, request: Any, first: int, count: int, *rest: int, shift: int) -> Any:
            return count, *rest, shift

    install(monkeypatch, {"vllm.v1.core.sched.scheduler": {"Scheduler": Scheduler}})
    keep_images_whole()
    engine: Any = Scheduler()
    places = [SimpleNamespace(mm_position=SimpleNamespace(offset=at, length=10)) for at in (4, 20)]
    ours, another = (SimpleNamespace(name=name) for name in ("CUSTOM", "TRITON_ATTN"))
    cases: tuple[tuple[dict[str, Any], bool, bool], ...] = (
        ({"backend": ours}, True, True),
        ({"backend": ours}, False, False),
        ({"backend": another}, True, False),
        ({"backend": another, "backend_per_kind": {"sliding_window": ours}}, True, True),
    )
    for chosen, is_seen, is_ours in cases:
        engine.vllm_config = SimpleNamespace(
            attention_config=SimpleNamespace(**chosen),
            model_config=SimpleNamespace(is_mm_prefix_lm=is_seen),
        )
        found = engine._try_schedule_encoder_inputs(SimpleNamespace(mm_features=places), first, count, 3, shift=1)
        assert found == (scheduled if is_ours else count, 3, 1)


def test_settings_are_read_once_however_many_prompts_have_images(monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[str]()

    def taken() -> list[str]:
        read.append("settings")
        return ["CPU_ATTN"]

    class Scheduler:
        vllm_config = SimpleNamespace(
            attention_config=SimpleNamespace(backend=None), model_config=SimpleNamespace(is_mm_prefix_lm=True)
        )

        def _try_schedule_encoder_inputs(self, request: Any, first: int, count: int) -> int:
            return count

    monkeypatch.setattr(whole_images, "VLLM", SimpleNamespace(taken=taken))
    install(monkeypatch, {"vllm.v1.core.sched.scheduler": {"Scheduler": Scheduler}})
    keep_images_whole()
    image = SimpleNamespace(mm_position=SimpleNamespace(offset=4, length=10))
    for _ in range(3):
        assert Scheduler()._try_schedule_encoder_inputs(SimpleNamespace(mm_features=[image]), 0, 9) == 4
    assert len(read) == 1


@pytest.mark.parametrize("declared", ["by the model", "by the cache"])
def test_layers_whose_steps_may_be_not_causal_are_served(
    declared: str, ours: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that drafts blocks, and a prefix-LM. vLLM's proposer of blocks asks for metadata that says so."""
    assert ours.RocmAttnBackend.supports_non_causal()
    of_cache = spec()
    if declared == "by the model":
        monkeypatch.setattr(Config, "attention_config", SimpleNamespace(use_non_causal=True))
        monkeypatch.setattr(ours, "get_current_vllm_config", lambda: Config({}))
    else:
        of_cache.non_causal = True
    layer = gqa_layer(ours.RocmAttnImpl)
    made = ours.RocmAttnBuilder(of_cache, ["layer"], Config({"layer": layer}), CPU)
    common = step()
    common.causal = False
    assert made.build(0, common).causal is False
    (problem,) = made.group.attention.kernels().problems
    assert problem.custom_mask
    assert not problem.spans_pass_window


def test_a_model_of_whose_requests_only_some_are_causal_in_a_step_is_refused_at_the_start(ours: Any) -> None:
    """DiffusionGemma: a step of its prompts may be longer than windows, which hide no later tokens of a block."""
    config = Config({"layer": gqa_layer(ours.RocmAttnImpl)}, diffusion_config=object())
    with pytest.raises(Unsupported, match="the model denoises blocks"):
        ours.RocmAttnBuilder(spec(), ["layer"], config, CPU)


def test_reference_sliding_windows_are_refused_at_the_start(ours: Any) -> None:
    """Unlimited OCR: vLLM takes blocks back between a prompt and a window. Its release 0.26 asks no backend for it."""
    config = Config({"layer": gqa_layer(ours.RocmAttnImpl)}, model={"rswa_window": 8})
    with pytest.raises(Unsupported, match="the model has reference sliding windows"):
        ours.RocmAttnBuilder(spec(), ["layer"], config, CPU)


def test_anothers_kv_in_eight_bits_is_read_with_the_scales_by_which_that_layer_stores(ours: Any) -> None:
    """A checkpoint has none for a layer without K and V of its own (Gemma 3n, Gemma 4)."""
    codes: dict[str, Any] = {"kv_cache_dtype": "fp8", "_k_scale": torch.tensor(0.5), "_v_scale": torch.tensor(0.25)}
    writer, reader = gqa_layer(ours.RocmAttnImpl, **codes), gqa_layer(ours.RocmAttnImpl, kv_cache_dtype="fp8")
    reader.layer_name, reader.kv_sharing_target_layer_name, reader.kv_cache = "reader", "layer", writer.kv_cache
    config = Config({"layer": writer, "reader": reader})
    made, out = ours.RocmAttnBuilder(spec(), ["layer", "reader"], config, CPU), torch.zeros(2, 1, HEADS, DIM)
    q, kv, common = torch.ones(1, HEADS, DIM), torch.ones(1, 1, DIM), step(1)
    metadata = made.build(0, common)
    writer.impl.forward(writer, q, kv, kv, writer.kv_cache, metadata, out[0])
    reader.impl.forward(reader, q, None, None, reader.kv_cache, metadata, out[1])
    assert (out == 1).all()


@pytest.mark.parametrize(("scale", "shared"), [([0.5, 2.0], Scales.HEAD), (1.0, Scales.LAYER)])
def test_heads_have_scales_of_their_own_if_vllm_has_loaded_such(scale: Any, shared: Scales, ours: Any) -> None:
    assert ours.RocmAttnBackend.supports_per_head_quant_scales()
    terms: dict[str, Any] = {"kv_cache_dtype": "fp8", "_k_scale": torch.tensor(scale), "_v_scale": torch.tensor(scale)}
    assert problem_of(ours, gqa_layer(ours.RocmAttnImpl, 2, **terms)).kv_scales is shared


@pytest.mark.parametrize("has_step", [True, False])
def test_k_and_v_of_tokens_outside_of_steps_are_stored_in_their_slots(has_step: bool, ours: Any) -> None:
    """A head that drafts blocks makes them of the model's hidden states; a slot of -1 is of a rejected token.

    vLLM's runner V2 does so before the head's first step, which has a table of another address.
    """
    layer = gqa_layer(ours.RocmAttnImpl)
    k, v, slots = torch.full((3, 1, DIM), 2.0), torch.full((3, 1, DIM), 3.0), torch.tensor([BLOCK + 1, -1, 2 * BLOCK])
    given = (layer, k, v, layer.kv_cache, slots)
    with pytest.raises(WrongState, match="vLLM stores K and V of layer before it has a builder of its own"):
        layer.impl.do_kv_cache_update(*given)
    made = ours.RocmAttnBuilder(spec(), ["layer"], Config({"layer": layer}), CPU)
    if has_step:
        made.build(0, step())
    layer.impl.do_kv_cache_update(*given)
    rows = layer.kv_cache[:, 0]
    for block, at in ((1, 1), (2, 0)):
        assert rows[block, at].tolist() == [2.0] * DIM + [3.0] * DIM
        rows[block, at] = 0
    assert not rows.any()
    made.build(0, step())
    made.group.attention.check_device()


def test_encoders_are_served_without_a_cache_and_not_captured(ours: Any) -> None:
    assert ours.RocmAttnBackend.supports_attn_type("encoder_only")
    layer = gqa_layer(ours.RocmAttnImpl, attn_type="encoder_only")
    layer.kv_cache = torch.empty(0)
    made = ours.RocmAttnBuilder(EncoderSpec(), ["layer"], Config({"layer": layer}), CPU)
    assert made.get_cudagraph_support(made.vllm_config, EncoderSpec()) == ours.AttentionCGSupport.NEVER
    with pytest.raises(WrongState, match="vLLM captures steps of encoders, which the backend does not declare"):
        made.build_for_cudagraph_capture(step())
    common = step()
    common.query_start_loc, common.num_actual_tokens, common.max_query_len = torch.tensor([0, 2]), 2, 2
    metadata = made.build(0, common)
    q, kv, out = (
        torch.zeros(2, HEADS, DIM),
        torch.tensor([[[1.0]], [[3.0]]]).expand(2, 1, DIM),
        torch.zeros(2, HEADS, DIM),
    )
    layer.impl.forward(layer, q, kv, kv, layer.kv_cache, metadata, out)
    assert (out == 2).all()  # both tokens weigh both values alike


def test_cross_attention_stores_an_encoders_rows_once_and_sees_all_of_them(ours: Any) -> None:
    """vLLM derives a builder and an implementation, which put an encoder's lengths and slots in place of a step's."""
    assert ours.RocmAttnBackend.supports_attn_type("encoder_decoder")
    layer = gqa_layer(cross_impl(ours.RocmAttnImpl), attn_type="encoder_decoder")
    made = cross_builder(ours.RocmAttnBuilder)(spec(), ["layer"], Config({"layer": layer}), CPU)
    encoded = torch.arange(1.0, 21.0).view(20, 1, 1).expand(20, 1, DIM)
    q, out = torch.zeros(1, HEADS, DIM), torch.zeros(1, HEADS, DIM)
    for rows in (encoded, None):
        common = step()
        common.block_table_tensor[0, 1] = 4
        common.encoder_seq_lens, is_new = torch.tensor([20], dtype=torch.int32), rows is not None
        common.encoder_slots = torch.tensor([*range(BLOCK, 2 * BLOCK), *range(4 * BLOCK, 4 * BLOCK + 4)][: 20 * is_new])
        metadata = made.build(0, common)
        layer.impl.forward(layer, q, rows, rows, layer.kv_cache, metadata, out)
        assert torch.allclose(out, torch.tensor(10.5))
        out.zero_()
