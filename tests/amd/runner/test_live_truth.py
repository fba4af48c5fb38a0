"""The truth probe of an engine: it finds what is wrong while requests are served, and changes nothing of theirs."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from rocm_attn.errors import DeviceFault
from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.problem import KVEncoding
from rocm_attn.providers.torch_ref import TorchDecode, TorchExtend
from rocm_attn.step.kv_scales import KVScales
from rocm_attn.truth.verdict import TruthVerdict
from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel
from rocm_serve.options import EngineOptions
from rocm_serve.parallel.ranked_engine import RankedEngine
from rocm_serve.request import Request
from tests.amd.planted import (
    Plant,
    attending_to_a_wrong_page,
    choosing_by_a_wrong_page,
    losing_a_selected_key,
    reading,
    reading_a_wrong_page,
)
from tests.amd.runner.families import family_model
from tests.amd.runner.hf_models import load, save
from tests.amd.runner.serving import all_pages_are_free, some_requests, until_done
from tests.amd.runner.tiny_model import LAYOUTS, RECURRENCE, Layout, tiny_model
from tests.amd.runner.wide_model import CONTEXT, HEAD, load_wide, wide_model

OPTIONS = EngineOptions(
    provider="torch", page_size=4, max_batch_size=4, chunk=256, graphs=False, max_kv_len=400, num_pages=500
)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return wide_model()


def engine(loaded: LoadedModel, **changes: Any) -> Engine:
    return Engine(loaded, replace(OPTIONS, **changes))


def with_a_wrong_last_page(args: AttendArgs) -> AttendArgs:
    """Makes kernels take the page before the last one of each row for the last one."""
    table = args.table.clone()
    for row in table:
        held = row.nonzero().flatten()
        if len(held) > 1:
            row[held[-1]] = row[held[-2]]
    return args._replace(table=table)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.nightly),
        pytest.param({"chunk": 32, "steps_ahead": 1}, marks=pytest.mark.nightly),
        pytest.param({"speculative": "ngram", "draft_tokens": 3}, marks=pytest.mark.nightly),
        {"speculative": "ngram", "draft_tokens": 3, "graphs": True, "capture_after": 0},
        pytest.param({"prefix_caching": False}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_it_runs_between_any_two_steps_and_the_texts_stay_the_same(
    changes: dict[str, Any], loaded: LoadedModel
) -> None:
    requests = some_requests(4, 8)
    expected = engine(loaded, **changes).generate(requests)
    served = engine(loaded, **changes)
    numbers = [served.submit(request) for request in requests]
    seed = 0
    while served.has_work:
        served.step()
        verdict = served.probe_truth(seed)
        assert (verdict.word, verdict.sentence) == ("right", "")
        seed += 1
        for _ in range(seed % 3):  # so that steps follow each other too
            if served.has_work:
                served.step()
    assert [served.completion(number) for number in numbers] == expected
    assert seed > 3
    assert all_pages_are_free(served)


@pytest.mark.parametrize("layout", LAYOUTS, ids=["before", "next to attention", "alone"])
def test_it_runs_in_a_model_with_recurrences_which_no_needle_passes(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = layout(wide_model().config, RECURRENCE)
    served = engine(tiny_model(base=base, context_len=CONTEXT), chunk=64)
    requests = some_requests(3, 8)
    expected = served.generate(requests)
    numbers = [served.submit(request) for request in requests]
    while served.has_work:
        served.step()
        assert served.probe_truth(0).word == "right"
    assert [served.completion(number) for number in numbers] == expected
    reading_a_wrong_page(1)(monkeypatch)
    assert list(served.probe_truth(1).wrong) == [1]  # of the layers with attention


def latent_model(family: str, folder: Path) -> LoadedModel:
    """A model of DeepSeek's with latent rows of 64 elements, and index rows of 64 where it has an indexer."""
    indexed = {"index_n_heads": 4, "index_head_dim": 64, "index_topk": 64} if family == "deepseek_v32" else {}
    return load(save(family_model(family, kv_lora_rank=56, **indexed), folder))


LATENT: Any = [
    ("deepseek_v3", reading_a_wrong_page(1), [1]),
    ("deepseek_v32", attending_to_a_wrong_page(1), [1]),
    ("deepseek_v32", losing_a_selected_key, [0, 1, 2]),
    ("deepseek_v32", choosing_by_a_wrong_page, [0, 1, 2]),
]


@pytest.mark.parametrize(("family", "plant", "wrong"), LATENT)
def test_latent_rows_and_selected_keys_are_checked_while_they_serve(
    family: str, plant: Plant, wrong: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = engine(latent_model(family, tmp_path), page_size=16, num_pages=100, max_kv_len=128)
    served.submit(Request((5, 6, 8), 12))
    served.step()
    verdict = served.probe_truth(0)
    assert (verdict.word, verdict.sentence, verdict.not_checked) == ("right", "", {})
    plant(monkeypatch)
    assert sorted(served.probe_truth(1).wrong) == wrong
    until_done(served)
    assert all_pages_are_free(served)


def test_it_runs_beside_as_many_requests_as_there_may_be(loaded: LoadedModel) -> None:
    served = engine(loaded)
    for _ in range(6):
        served.submit(Request((5, 6, 8), 60, ignore_eos=True))
    for _ in range(3):
        served.step()
    assert served.report().metrics.running == 4
    assert served.probe_truth(0).word == "right"


@pytest.mark.parametrize(("kernel", "kind"), [(TorchDecode, "decode"), (TorchExtend, "prompt")])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_layer_that_reads_a_wrong_page_is_named_and_the_other_is_right(
    layer: int, kernel: type, kind: str, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = engine(loaded)
    reading_a_wrong_page(layer, [kernel])(monkeypatch)
    verdict = served.probe_truth(0)
    assert (verdict.word, list(verdict.wrong)) == ("wrong", [layer])
    assert f"in a {kind} step" in verdict.wrong[layer]
    assert f"1 of 2 layers wrong; layer {layer}: key " in verdict.sentence
    words = [each["verdict"] for each in verdict.as_dict()["layers"]]  # type: ignore[attr-defined]
    assert words == ["wrong" if place == layer else "right" for place in range(2)]
    assert all_pages_are_free(served)


def test_a_model_with_windows_is_checked_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    # Its pool has room for the window and a step, and not for all of the probe's tokens.
    served = engine(wide_model(replace(HEAD, window_left=20)), chunk=64, swa_pages=30)
    verdict = served.probe_truth(0)
    assert verdict.word == "right", verdict.sentence
    reading(1, with_a_wrong_last_page, [TorchDecode])(monkeypatch)
    assert list(served.probe_truth(1).wrong) == [1]
    assert all_pages_are_free(served)


def test_sinks_of_a_usual_size_hide_no_needle_and_large_ones_leave_a_layer_unchecked() -> None:
    served = engine(wide_model(replace(HEAD, has_sinks=True)))
    weights = served.runtime.head_weights
    for value, word in ((5.0, "right"), (40.0, "not checked")):
        for layer in range(2):
            weights.set(layer, replace(weights.of(layer), sinks=torch.full((4,), value)))
        verdict = served.probe_truth(0)
        assert (verdict.word, "sinks" in verdict.sentence) == (word, word == "not checked")


@pytest.mark.parametrize(("scales", "size"), [("layer", 1.0), ("head", 1e-3), ("layer", 40.0)])
def test_pages_of_eight_bits_are_checked_at_the_models_own_scales(
    scales: str, size: float, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = engine(loaded, kv_dtype="fp8_e4m3fn", kv_scales=scales)
    for layer in range(2):
        shape = served.runtime.pool.layer(layer).format.scale_shape
        own = KVScales(torch.full(shape, size), torch.full(shape, size / 3), made_for=KVEncoding.E4M3FN)
        served.runtime.set_kv_scales(layer, own)
    verdict = served.probe_truth(0)
    assert verdict.word == "right", verdict.sentence
    reading_a_wrong_page(1)(monkeypatch)
    assert list(served.probe_truth(1).wrong) == [1]


def test_heads_that_are_too_small_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Engine(tiny_model(), replace(OPTIONS, max_kv_len=64))
    verdict = served.probe_truth(0)
    assert (verdict.word, verdict.num_keys) == ("not checked", 0)
    assert "rows of 8 elements do not tell" in verdict.sentence


def test_pages_of_the_prefix_cache_are_given_back_for_it_and_those_of_requests_are_not(loaded: LoadedModel) -> None:
    served = engine(loaded, num_pages=101)
    served.generate([Request(tuple(range(8, 48)) * 9, 4)])
    assert served.runtime.table.fewest_free_pages < 20
    assert served.probe_truth(0).word == "right"
    served.submit(Request(tuple(range(8, 48)) * 9, 30))
    for _ in range(14):
        served.step()
    verdict = served.probe_truth(0)
    assert (verdict.word, "pages are free" in verdict.sentence) == ("not checked", True)
    assert served.report().metrics.preemptions == 0


def test_a_fault_of_the_device_in_it_is_its_verdict_and_no_request_fails(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = engine(loaded)
    expected = engine(loaded).generate([Request((5, 6, 8), 12)])
    number = served.submit(Request((5, 6, 8), 12))
    served.step()

    with monkeypatch.context() as patch:
        reading(0, Mock(side_effect=DeviceFault("step 2: a page was not there", 2)))(patch)
        verdict = served.probe_truth(0)
    assert (verdict.word, verdict.is_fault) == ("wrong", True)
    assert "a page was not there" in verdict.sentence
    until_done(served)
    assert [served.completion(number)] == expected
    assert all_pages_are_free(served)


def test_a_fault_of_an_earlier_step_fails_its_requests_before_the_probe_runs(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = engine(loaded)
    number = served.submit(Request((5, 6, 8), 12))
    served.step()
    check, step = served.runtime.check_device, served.runtime.faults.step_number

    def once() -> None:
        monkeypatch.setattr(served.runtime, "check_device", check)
        raise DeviceFault("step 1: a page was not there", step)

    monkeypatch.setattr(served.runtime, "check_device", once)
    assert served.probe_truth(0).word == "right"
    until_done(served)
    done = served.completion(number)
    assert (done.finish_reason, "a page was not there" in done.error) == ("error", True)
    assert all_pages_are_free(served)


@pytest.mark.nightly
def test_ranks_find_it_together() -> None:
    with RankedEngine(load_wide, OPTIONS, num_ranks=2) as served:
        expected = served.generate([Request((5, 6, 8), 6)])
        verdict = served.probe_truth(0)
        assert (verdict.word, verdict.num_layers) == ("right", 2)
        assert served.generate([Request((5, 6, 8), 6)]) == expected


def test_a_layer_that_another_rank_found_wrong_is_wrong() -> None:
    verdict = TruthVerdict({1: "a key was not found"}, {0: "its slopes take the weight"}, "", False, 3, 9)
    assert verdict.word == "wrong"
    assert [each["verdict"] for each in verdict.as_dict()["layers"]] == ["not checked", "wrong", "right"]  # type: ignore[attr-defined]
    only = TruthVerdict({}, {0: "its slopes take the weight"}, "", False, 1, 0)
    assert (only.word, only.sentence) == ("not checked", "its slopes take the weight")
