"""Steps as vLLM's runners make them, eager and in full graphs, against the reference, and their possible errors."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.errors import DeviceFault, Unsupported, WrongState
from rocm_attn.external import ExternalAttention, ExternalOptions
from rocm_attn.integrations.vllm.group import GroupLayer, GroupOptions, GroupSizes, KVGroup
from rocm_attn.integrations.vllm.layer_terms import PLAIN_MASK, LayerTerms, MaskTerms
from rocm_attn.integrations.vllm.steps import GQA_GRAPHS
from tests.amd.integrations.vllm_runner import HEADS, KV_HEADS, MAX_LEN, MAX_SEQS, MAX_TOKENS, TERMS, Runner

pytestmark = pytest.mark.usefixtures("inference_mode")

WINDOW = replace(TERMS, sliding_window=20)


@pytest.fixture
def runner(device: torch.device, provider: str) -> Runner:
    """Returns a runner of one layer with requests of 9, 40 and 17 tokens."""
    return started(Runner(device=device, provider=provider))


def started(runner: Runner) -> Runner:
    for _ in range(3):
        runner.admit()
    runner.step([9, 40, 15])
    runner.step([1, 1, 2])
    return runner


LAYERS = {
    "FP8": replace(TERMS, kv_cache_dtype="fp8"),
    "plain": TERMS,
    "window": WINDOW,
    "soft cap": replace(TERMS, logits_soft_cap=5.0),
    "sinks": replace(TERMS, sinks=torch.linspace(-1, 1, HEADS)),
    "ALiBi": replace(TERMS, alibi_slopes=[0.5, 0.25, 0.125, 0.0625]),
}


@pytest.mark.fast
@pytest.mark.parametrize("heads_first", [False, True], ids=["NHD", "HND"])
@pytest.mark.parametrize("name", LAYERS)
def test_decodes_prompts_chunks_and_mixed_steps_equal_the_oracle(
    name: str, heads_first: bool, device: torch.device, provider: str
) -> None:
    runner = started(Runner([LAYERS[name]], device=device, provider=provider, heads_first=heads_first))
    runner.step([1, 1, 1])
    runner.step([1, 1, 30])
    runner.admit()
    runner.step([1, 7, 1, 5])
    runner.groups[0].attention.check_device()


def test_sinks_that_are_loaded_anew_are_read_from_the_next_step_on_in_graphs_too(
    device: torch.device, provider: str
) -> None:
    with torch.inference_mode(False):
        sinks, others = (torch.nn.Parameter(torch.linspace(-1, most, HEADS, device=device), False) for most in (1, 2))
    layers = [replace(TERMS, sinks=sinks), LAYERS["ALiBi"], replace(TERMS, sinks=others)]
    runner = started(Runner(layers, groups=(0,) * 3, device=device, provider=provider))
    graph = runner.capture(4, 4, 1)
    graph.run([1, 1, 1])
    others.data.fill_(-2.0)
    sinks.data.fill_(3.0)  # vLLM's loaders write this way, and need not say so
    graph.run([1, 1, 1])
    sinks.copy_(torch.linspace(2, -2, HEADS))
    runner.step([1, 3, 1])
    graph.run([1, 1, 1])


def test_what_is_stored_before_the_first_step_leaves_steps_and_graphs_right(
    device: torch.device, provider: str
) -> None:
    runner = Runner(device=device, provider=provider)
    (layer,), rows = runner.layers, torch.ones(2, KV_HEADS, runner.dim, device=device)
    slots = torch.tensor([runner.block_size, -1], device=device)
    runner.groups[0].store_to(layer.name, layer.kv_cache, rows, rows, slots)
    assert layer.kv_cache[1, :, 0].eq(1).all()
    started(runner)
    runner.capture(4, 4, 1).run([1, 1, 1])
    runner.groups[0].attention.check_device()


def test_groups_of_a_model_with_windows_have_tables_of_their_own(device: torch.device, provider: str) -> None:
    runner = started(Runner([WINDOW, TERMS, WINDOW], (0, 1, 0), device=device, provider=provider))
    runner.evict(1, 0, 1)  # of 41 tokens, the first block has left the window
    for _ in range(3):
        runner.step([1, 1, 1])
    for group in runner.groups:
        group.attention.check_device()


IMAGES = MaskTerms(spans=True, spans_pass_window=True)


@pytest.mark.fast
@pytest.mark.parametrize("mask", [IMAGES, MaskTerms(spans=True)], ids=["passes", "kept"])
@pytest.mark.parametrize("terms", [replace(TERMS, sliding_window=7), TERMS], ids=["window", "plain"])
def test_tokens_of_an_image_see_each_other(
    terms: LayerTerms, mask: MaskTerms, kinds: list[StepKind], device: torch.device, provider: str
) -> None:
    """The model says if that overrides a window. Graphs of several tokens serve all steps."""
    runner = Runner([terms], device=device, provider=provider, mask=mask, wide=True)
    runner.images = {0: [(0, 3), (5, 17)], 2: [(30, 41)]}
    for _ in range(3):
        runner.admit()
    runner.step([20, 4, 29])
    runner.step([1, 1, 1])
    assert kinds == [StepKind.MASKED, StepKind.DECODE]
    runner.step([1, 1, 15])
    runner.step([2, 7, 2])
    assert kinds[2:] == [StepKind.MASKED, StepKind.MIXED]
    decode, any_steps = runner.capture(4, 4, 1), runner.capture(4, 32, 32)
    decode.run([1, 1, 1])
    runner.images[1] = [(12, 30)]
    any_steps.run([1, 24, 2])
    any_steps.run([2, 2, 2])
    runner.groups[0].attention.check_device()


def test_an_image_of_which_a_step_has_only_a_part_is_refused(device: torch.device, provider: str) -> None:
    runner = Runner(device=device, provider=provider, mask=IMAGES)
    runner.images = {0: [(3, 9)]}
    runner.admit()
    refusal = "an image has the tokens 3 to 9 of request 0, and the step ends with its token 7; the tokens of an image"
    with pytest.raises(Unsupported, match=refusal):
        runner.step([8])
    runner.step([10])
    runner.step([1])


@pytest.mark.parametrize("mask", [IMAGES, PLAIN_MASK], ids=["declared", "not declared"])
def test_a_chunk_of_one_token_within_an_image_is_refused(mask: MaskTerms, device: torch.device, provider: str) -> None:
    """The tokens after it have no K and V yet. The last one of an image sees all of it, and those before and after."""
    runner = Runner(device=device, provider=provider, mask=mask)
    for _ in range(2):
        runner.admit()
    runner.step([3, 3])
    runner.images = {0: [(4, 6)], 1: []}
    runner.step([1, 1])  # the token before the image
    refusal = r"the tokens 4 to 6 of request 0, and the step ends with its token {}; .*set --disable-chunked-mm-input"
    for token in (4, 5):
        with pytest.raises(Unsupported, match=refusal.format(token)):
            runner.step([1, 1])
        runner.images = {}
        runner.step([1, 1])
        runner.images = {0: [(4, 6)], 1: []}
    for _ in range(3):
        runner.step([1, 1])  # the last token of the image, and decodes


def test_images_in_layers_that_were_not_declared_to_see_them_are_refused(runner: Runner) -> None:
    """Other backends ignore them without a word (vllm#46754)."""
    runner.images = {0: [(1, 4)]}
    runner.step([2, 2, 2])  # the image has no new token
    runner.images = {0: [(12, 13)]}
    with pytest.raises(Unsupported, match="images whose tokens see each other to layers of which it has not said so"):
        runner.step([2, 2, 2])


def test_an_image_of_which_the_first_tokens_were_found_in_the_cache_is_seen_whole(
    device: torch.device, provider: str
) -> None:
    """Another request has stored them, after they had seen the rest."""
    runner = Runner([replace(TERMS, sliding_window=7)], device=device, provider=provider, mask=IMAGES)
    runner.admit()
    runner.step([13])
    runner.images = {0: [(7, 24)]}
    runner.step([20])
    runner.groups[0].attention.check_device()


@pytest.mark.parametrize("new", [20, 1])
def test_an_image_that_begins_before_a_window_that_it_overrides_is_refused(
    new: int, device: torch.device, provider: str
) -> None:
    """vLLM makes no such spans. It would have taken their blocks back, and a step of one token has no mask."""
    for mask in (IMAGES, MaskTerms(spans=True)):
        runner = Runner([replace(TERMS, sliding_window=7)], device=device, provider=provider, mask=mask)
        runner.admit()
        runner.step([13])
        runner.images = {0: [(2, 5), (6, 12 + new)]}
        if mask is IMAGES:
            with pytest.raises(
                Unsupported, match="an image begins with token 6 of request 0, and the step with token 13"
            ):
                runner.step([new])
        else:
            runner.step([new])


@pytest.mark.parametrize("terms", [replace(TERMS, sliding_window=9), TERMS], ids=["window", "plain"])
def test_tokens_of_a_step_that_is_not_causal_see_all_of_their_requests_kv(
    terms: LayerTerms, device: torch.device, provider: str
) -> None:
    """Eager and in graphs; in windows as far back as these let them."""
    runner = started(Runner([terms], device=device, provider=provider, mask=MaskTerms(spans=True)))
    verify = runner.capture(4, 16, 4)
    for runner.is_open in (True, False, True):
        runner.step([4, 9, 1])
        verify.run([4, 4, 4])
        verify.run([4, 4])
    runner.groups[0].attention.check_device()


def test_a_window_that_would_hide_later_tokens_is_refused(device: torch.device, provider: str) -> None:
    """vLLM's windows of layers that are not causal have two sides."""
    window = replace(TERMS, sliding_window=4)
    runner = started(Runner([window], device=device, provider=provider, mask=MaskTerms(spans=True)))
    runner.is_open = True
    runner.step([4, 4, 4])
    with pytest.raises(Unsupported, match="a request has up to 5 new tokens in layers with a window of 4"):
        runner.step([4, 5, 4])
    passed = started(Runner([window], device=device, provider=provider, mask=IMAGES))
    passed.is_open = True
    with pytest.raises(Unsupported, match="images override the windows of its layers"):
        passed.step([4, 4, 4])


def test_heads_may_have_scales_of_their_own(device: torch.device, provider: str) -> None:
    scales = ([0.5, 2.0], [0.25, 1.0])
    runner = started(Runner([LAYERS["FP8"]], device=device, provider=provider, scales=scales))
    runner.step([1, 1, 1])
    runner.capture(4, 4, 1).run([1, 1, 1])
    runner.groups[0].attention.check_device()


def test_a_layer_that_shares_kv_reads_what_its_target_has_stored(device: torch.device, provider: str) -> None:
    shares = replace(TERMS, kv_sharing_target_layer_name="layers.0")
    runner = Runner([TERMS, shares], (0, 0), device=device, provider=provider)
    first, second = runner.layers
    second.kv_cache = first.kv_cache
    runner.admit()
    given, outs = runner.step_unseen([20])
    second.stored = first.stored
    runner.compare([20], given, outs)


def test_layers_that_share_kv_may_run_for_the_tokens_with_logits_only(device: torch.device, provider: str) -> None:
    """With kv_sharing_fast_prefill vLLM gives them these tokens, and the slots of all tokens of the step."""
    runner = Runner(device=device, provider=provider)
    (layer,) = runner.layers
    shares = replace(TERMS, kv_sharing_target_layer_name=layer.name).problem(runner.cache, runner.mask)
    options = GroupOptions(ExternalOptions(provider=provider, page_strides=True))
    reading = KVGroup(
        {"reading": GroupLayer(layer, shares, stores=False)}, GroupSizes(MAX_SEQS, 64, 128), device, options
    )
    for _ in range(2):
        runner.admit()
    for new, last in (([9, 40], [8, 48]), ([5, 1], [4, 5])):
        given, outs = runner.step_unseen(new)
        runner.compare(new, given, outs)
        starts = torch.arange(3, dtype=torch.int32, device=device)
        common = replace(runner.common(0, 2, 2, 1), query_start_loc=starts, slot_mapping=runner.slots[0])
        out = runner.unwritten(2)
        reading.attend("reading", reading.begin(common), layer.kv_cache, given[0][0][last], out)
        assert torch.allclose(out, outs[0][last], atol=1e-5)
    reading.attention.check_device()


def test_captured_steps_are_filled_by_a_graph(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = runner.capture(4, 4, 1)
    monkeypatch.setattr(ExternalAttention, "fill", Mock(side_effect=AssertionError("fill() is not called")))
    graph.run([1, 1, 1])
    graph.run([1, 1])
    with pytest.raises(AssertionError, match="is not called"):
        runner.step([1, 2, 1])


def test_a_captured_step_whose_slots_lie_elsewhere_is_filled_from_there(runner: Runner) -> None:
    graph = runner.capture(4, 4, 1)
    runner.slots[0] = runner.slots[0].clone()
    graph.run([1, 1, 1])
    runner.groups[0].attention.check_device()  # its slots equal the table's: they were checked


def test_only_fills_of_captured_steps_are_recorded_and_replayed_for_their_shape(runner: Runner) -> None:
    attention, recorder = runner.groups[0].attention, recorder_for(runner.device)
    with pytest.raises(WrongState, match="only a captured step without a mask"):
        attention.record_fill(recorder)
    runner.capture(4, 4, 1)
    fill = attention.record_fill(recorder)
    runner.capture(2, 2, 1)
    with pytest.raises(WrongState, match="another shape"):
        attention.replay_fill(fill)


def test_a_graph_of_any_steps_of_its_size_is_none_of_verify_steps(
    kinds: list[StepKind], device: torch.device, provider: str
) -> None:
    runner = started(Runner(device=device, provider=provider, wide=True))
    runner.capture(4, 16, 4).run([4, 4, 4])
    assert kinds[-2:] == [StepKind.MIXED] * 2


@pytest.mark.parametrize("slot", [-1, 0])
def test_steps_that_vllm_runs_to_warm_up_are_pads_and_no_fault(slot: int, runner: Runner) -> None:
    """Elastic expert parallelism warms up with requests in block 0 (redirect_writes_to_null_block)."""
    for num_tokens, max_query_len in ((4, 1), (12, 3)):
        for table in runner.tables:
            table.zero_()
        runner.slots[0].fill_(slot)
        runner.seq_lens[:4] = max_query_len
        runner.query_start_loc[:5] = torch.arange(5) * max_query_len
        step = runner.groups[0].begin(runner.common(0, 4, num_tokens, max_query_len))
        given, out = runner.projected(num_tokens, num_tokens), torch.full((num_tokens, HEADS, 16), 7.0)
        out = out.to(runner.device)
        runner.forward([step], [given], [out])
        assert not out.any()
    runner.step([1, 1, 1])
    runner.groups[0].attention.check_device()


@pytest.mark.parametrize("new", [[1, 0, 1], [0, 1, 0], [2, 0, 1], [0, 0, 1]])
def test_a_request_without_a_new_token_changes_nothing_for_the_others(new: list[int], runner: Runner) -> None:
    for each in (new, [1, 1, 1], new):
        runner.step(each)
    runner.groups[0].attention.check_device()


@pytest.mark.parametrize("num_reqs", [1, 3])
def test_a_step_without_any_token_writes_nothing(num_reqs: int, runner: Runner) -> None:
    runner.prepare([0] * num_reqs, num_reqs, 0)
    step = runner.groups[0].begin(runner.common(0, num_reqs, 0, 0))
    given, out = runner.projected(0, 1), runner.unwritten(1)
    runner.forward([step], [given], [out])
    assert not out.any()
    runner.step([1, 1, 1])
    runner.groups[0].attention.check_device()


def assert_reported_two_steps_later(run: Callable[[Sequence[int]], object], what: str) -> None:
    """Checks that two steps run after the faulty one, and that the third is not begun."""
    run([1, 1, 1])
    run([1, 1, 1])
    with pytest.raises(DeviceFault, match=what):
        run([1, 1, 1])


def test_a_stale_pad_is_reported(runner: Runner) -> None:
    runner.pad = 3.0
    graph = runner.capture(4, 4, 1)

    def lie(runner: Runner) -> None:
        runner.seq_lens[3] = 33  # of a request in an earlier step; its line of the table is empty

    graph.run_unseen([1, 1, 1], lie)
    assert_reported_two_steps_later(graph.run_unseen, "a new token had no page of its own")


def test_a_wrong_slot_is_reported_and_harms_no_other_request(runner: Runner) -> None:
    def lie(runner: Runner) -> None:
        runner.slots[0][0] = runner.slots[0][1] - 1  # request 1 has a token there

    runner.step_unseen([1, 1, 1], lie)
    assert_reported_two_steps_later(runner.step_unseen, "a slot given for a new token differs")
    # The step's write to a slot of request 1 was dropped. Request 0 has a hole in the place of its token.
    given, outs = runner.step_unseen([1, 1, 1])
    runner.compare_request(1, [1, 1, 1], given, outs)
    runner.compare_request(2, [1, 1, 1], given, outs)
    with pytest.raises(AssertionError, match="request 0"):
        runner.compare_request(0, [1, 1, 1], given, outs)


@pytest.mark.parametrize("past", [4, 8])
def test_drafts_past_the_longest_sequence_are_not_stored_and_no_fault(
    device: torch.device, provider: str, past: int
) -> None:
    """DFlash in vLLM's runner V2: it cuts the length, not the number of drafts, whose slots go on in the last block."""
    runner = Runner(device=device, provider=provider, mask=MaskTerms(spans=True))
    runner.admit()
    runner.admit()
    for new in ([MAX_TOKENS - 8, 1], [MAX_TOKENS - 8, 1], [8, 9]):
        runner.step(new)
    runner.is_open = True
    stored = runner.layers[0].kv_cache[runner.requests[0].blocks[0][-1]].clone()

    def as_if_some_were_past_the_end(runner: Runner) -> None:
        block, places = runner.requests[0].blocks[0][-1], torch.arange(8) + MAX_LEN - 8 + past
        runner.slots[0][:8] = block * runner.block_size + places % runner.block_size

    given, outs = runner.step_unseen([8, 2], as_if_some_were_past_the_end)
    runner.groups[0].attention.check_device()
    runner.compare_request(1, [8, 2], given, outs)
    now = runner.layers[0].kv_cache[runner.requests[0].blocks[0][-1]]
    assert torch.equal(now.nan_to_num(), stored.nan_to_num())


@pytest.mark.parametrize(("place", "wrong"), [(0, -1), (0, 4), (1, 4)], ids=["another's", "later", "second"])
def test_a_wrong_slot_of_a_sequence_of_the_longest_length_is_reported(
    device: torch.device, provider: str, place: int, wrong: int
) -> None:
    """wrong: the slot of this one of the new tokens; -1: of a token of another request"""
    runner = Runner(device=device, provider=provider, mask=MaskTerms(spans=True))
    runner.admit()
    runner.admit()
    for new in ([MAX_TOKENS - 8, 1], [MAX_TOKENS - 8, 1]):
        runner.step(new)
    while (kv_len := runner.requests[0].kv_len) < MAX_LEN - 8:
        runner.step([min(MAX_TOKENS - 8, MAX_LEN - 8 - kv_len), 1])

    def lie(runner: Runner) -> None:
        other = runner.requests[1].blocks[0][0] * runner.block_size
        runner.slots[0][place] = other if wrong < 0 else runner.slots[0][wrong]

    runner.step_unseen([8, 1], lie)
    with pytest.raises(DeviceFault, match="a slot given for a new token differs"):
        runner.groups[0].attention.check_device()


def test_metadata_of_an_earlier_step_is_refused(runner: Runner) -> None:
    runner.prepare([1, 1, 1], 3, 3)
    common = runner.common(0, 3, 3, 1)
    first = runner.groups[0].begin(common)
    runner.groups[0].begin(common)
    given = runner.projected(3, 3)
    with pytest.raises(WrongState, match="runs one step at a time"):
        runner.forward([first], [given], [torch.empty_like(given[0])])


def test_a_step_that_is_not_causal_is_refused_in_layers_that_were_not_declared_so(runner: Runner) -> None:
    runner.is_open = True
    runner.step([1, 1, 1])  # the last token of its KV sees all of it anyway
    with pytest.raises(Unsupported, match="the step is not causal, and vLLM has not said so of its layers"):
        runner.step([1, 2, 1])


def test_two_graphs_of_one_size_that_a_step_cannot_tell_apart_are_refused(runner: Runner) -> None:
    runner.capture(4, 12, 3)
    with pytest.raises(Unsupported, match="vLLM captures two graphs for 4 sequences with 12 tokens"):
        runner.capture(4, 12, 12)


def of_one_token_each(runner: Runner) -> None:
    graph = runner.capture(4, 4, 1)
    graph.run([1, 1, 1])
    graph.run([1])


def of_as_many_tokens_each(runner: Runner) -> None:
    graph = runner.capture(4, 12, 3)
    for new in ([3, 3, 3], [3, 1, 2], [3]):
        graph.run(new)
    runner.step([12])  # as many tokens as the graph has, of one request: not the graph's kind


def of_any_tokens(runner: Runner) -> None:
    """vLLM 0.26 captures with the tokens spread evenly, so its number for the longest sequence means nothing."""
    graph = runner.capture(MAX_SEQS, 32, 4)
    for new in ([1, 29, 1], [1, 1, 1], [32]):
        graph.run(new)


# vLLM's levels, in order -> the steps that a graph may be captured and replayed for if its builder declares the level.
LEVELS: dict[str, Callable[[Runner], None]] = {
    "UNIFORM_SINGLE_TOKEN_DECODE": of_one_token_each,
    "UNIFORM_BATCH": of_as_many_tokens_each,
    "ALWAYS": of_any_tokens,
}


@pytest.mark.fast(3)
@pytest.mark.parametrize("layer", LAYERS)
def test_what_is_declared_of_graphs_is_what_they_serve(layer: str, device: torch.device, provider: str) -> None:
    assert list(LEVELS)[-1] == GQA_GRAPHS
    for level, replay in LEVELS.items():
        runner = started(Runner([LAYERS[layer]], device=device, provider=provider, wide=level == "ALWAYS"))
        replay(runner)
        runner.groups[0].attention.check_device()
