"""SGLang's whole engine with recurrent layers: our attention gives its own tokens, and faults of states are found."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rocm_attn.integrations.plugins import SGLANG as SGLANG_PLUGIN
from tests.amd.engines.models import VOCABULARY
from tests.amd.engines.serving import MOST_STEPS_LATER, assert_equal_tokens, prompts
from tests.amd.engines.sglang_models import drafted_model, drafting_model, hybrid_model
from tests.amd.engines.sglang_runs import SglangVenv
from tests.amd.engines.sglang_state_faults import (
    LOST_DRAFTS,
    LOST_TOKEN,
    SHARED,
    STALE_HIT,
    SWAPPED,
    SWAPPED_COUNTS,
    UNCLEARED,
)
from tests.amd.engines.sglang_text import Answer, Run

_WRONG_STATE = "a slot that the engine names for a sequence's recurrent state does not hold"
# Mamba2 reads no slot where a sequence begins, so a slot that was not cleared changes nothing there.
_FAULTS = {
    "mamba": (SWAPPED, SHARED, LOST_TOKEN, STALE_HIT),
    "delta_net": (UNCLEARED, SWAPPED, SHARED, LOST_TOKEN, STALE_HIT),
}
# How the radix cache keeps states: from within steps, after whole chunks, which is the default on GPUs; or those of
# requests that end or are cut, with what SGLang asks for then, which is its only way on a CPU without our operations.
_OF_STRATEGY: Mapping[str, Mapping[str, Any]] = {
    "extra_buffer": {"page_size": 16, "mamba_track_interval": 64},
    "no_buffer": {"page_size": 1, "disable_overlap_schedule": True},
}
each_model = pytest.mark.parametrize("name", [*_FAULTS])
# graphed: whether steps that decode or verify drafts are replayed
each_way = pytest.mark.parametrize(
    ("strategy", "graphed"),
    [
        ("extra_buffer", False),
        *(pytest.param(*way, marks=pytest.mark.nightly) for way in (("extra_buffer", True), ("no_buffer", False))),
    ],
)


@pytest.fixture(scope="module")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> SglangVenv:
    return SglangVenv(tmp_path_factory.mktemp("plugin"))


def fresh(seed: int) -> list[list[int]]:
    """Three prompts that no round before has had."""
    draw = random.Random(seed)
    return [[draw.randrange(3, VOCABULARY) for _ in range(count)] for count in (20, 33, 61)]


def run(sglang: SglangVenv, name: str, strategy: str, *, faults: bool = False) -> Run:
    """Returns a run of prompts in chunks, then the last ones again, which are cached, and a round for each fault.

    In the last of these rounds prompts are cached, from rounds without faults; the others have prompts of their own.
    """
    planted = _FAULTS[name]
    served = prompts((1, 5, 31, 64, 65, 100, 130), num_shared=150)
    arguments = {
        "model_path": str(hybrid_model(name, sglang.folder)),
        "dtype": "float32",
        "chunked_prefill_size": 96,
        "max_total_tokens": 4096,
        "max_running_requests": 16,
        "max_mamba_cache_size": 64,
        "context_length": 256,
        "mem_fraction_static": 0.5,
        "log_level": "info",
        "mamba_radix_cache_strategy": strategy,
        **_OF_STRATEGY[strategy],
    }
    rounds = [served, served[-3:], *map(fresh, range(len(planted) - 1)), served[-3:]]
    return Run(arguments, rounds, 12, state_faults=[*planted] * faults)


def assert_planted(faults: Sequence[str], answer: Answer) -> dict[str, int]:
    """Checks that each fault was planted. Returns the numbers of their steps."""
    planted = {line["planted"]: line["step"] for line in answer.faults if "planted" in line}
    assert [*planted] == [*faults]
    return planted


def assert_unseen(faults: Sequence[str], faulty: Answer, stock: Answer) -> None:
    """Checks that each of the last rounds has a fault and wrong text, and that nothing was reported."""
    assert faulty.tokens[: -len(faults)] == stock.tokens[: -len(faults)]
    assert_planted(faults, faulty)
    assert not [line for line in faulty.faults if "reported" in line]
    for fault, ours, own in zip(reversed(faults), reversed(faulty.tokens), reversed(stock.tokens), strict=False):
        assert ours != own, fault


def assert_reported(faults: Sequence[str], answer: Answer) -> None:
    """Checks that each fault was reported before more than two further steps had begun, and no step before it was."""
    for fault, step in assert_planted(faults, answer).items():
        reports = [line for line in answer.faults if f"step {step}: {_WRONG_STATE}" in line.get("reported", "")]
        assert reports, f"{fault} in step {step} was not reported: {answer.faults}"
        assert reports[0]["begun"] - step <= MOST_STEPS_LATER, fault
        if fault in (SWAPPED, SHARED, LOST_TOKEN, SWAPPED_COUNTS, LOST_DRAFTS):  # in the middle of their rounds
            assert not [line for line in answer.faults if f"step {step - 1}: " in line.get("reported", "")], fault
    assert "planted" in answer.faults[0], answer.faults[0]


@pytest.mark.nightly
@each_way
def test_drafts_change_no_token_of_a_model_with_recurrent_layers_and_their_faults_are_reported(
    strategy: str, graphed: bool, sglang: SglangVenv, tmp_path: Path
) -> None:
    """A small Llama drafts for gated delta nets, and states go back to the last draft that was accepted."""
    plain = run(sglang, "delta_net", strategy)
    faults = [SWAPPED_COUNTS, LOST_DRAFTS]
    plain.engine["model_path"] = str(drafted_model(sglang.folder))
    plain.rounds, plain.new_tokens = [*plain.rounds[:2], [*fresh(20), *fresh(21), *fresh(22)], fresh(23)], 24
    (stock,) = sglang.stock([plain], tmp_path)
    drafts: dict[str, Any] = {
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": str(drafting_model(sglang.folder)),
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
    }
    drafting = replace(plain, engine={**plain.engine, **drafts})
    faulty = replace(drafting, state_faults=faults)
    ours, found = sglang.ours([drafting, faulty], tmp_path, watches_states=True, graphed=graphed)
    (unseen,) = sglang.ours([faulty], tmp_path, graphed=graphed)
    assert_equal_tokens([ours.tokens], stock.tokens)
    assert ("TARGET_VERIFY_GRAPH" if graphed else "TARGET_VERIFY") in ours.modes
    steps = sum(map(sum, ours.verified))
    tokens = sum(len(each) for of_round in ours.tokens for each in of_round)
    assert tokens / 3.5 < steps < tokens / 1.2, "some drafts were to be accepted, and not all"
    assert_reported(faults, found)
    assert_unseen(faults, unseen, stock)


@each_model
@each_way
def test_hybrid_models_give_sglangs_own_tokens_and_faults_of_states_are_reported(
    strategy: str, graphed: bool, name: str, sglang: SglangVenv, tmp_path: Path
) -> None:
    (stock,) = sglang.stock([run(sglang, name, strategy)], tmp_path)
    requested = [run(sglang, name, strategy), run(sglang, name, strategy, faults=True)]
    ours, faulty = sglang.ours(requested, tmp_path, watches_states=True, graphed=graphed)
    assert_equal_tokens([ours.tokens], stock.tokens)
    assert ours.modes == sorted(["DECODE_GRAPH" if graphed else "DECODE", "EXTEND"])
    assert ours.cached == stock.cached
    assert all(cached > 0 for cached in ours.cached[1])
    assert_reported(_FAULTS[name], faulty)


@pytest.mark.nightly
@each_model
@each_way
def test_faults_of_states_go_unseen_without_the_check_and_text_is_wrong(
    strategy: str, graphed: bool, name: str, sglang: SglangVenv, tmp_path: Path
) -> None:
    (stock,) = sglang.stock([run(sglang, name, strategy)], tmp_path)
    (faulty,) = sglang.ours([run(sglang, name, strategy, faults=True)], tmp_path, graphed=graphed)
    assert_unseen(_FAULTS[name], faulty, stock)


@pytest.mark.nightly
def test_the_oldest_release_that_is_served_gives_the_newest_ones_tokens_and_reports_the_same(
    sglang: SglangVenv, tmp_path: Path
) -> None:
    """It pins memory for states from within steps, which torch refuses without a GPU."""
    (stock,) = sglang.stock([run(sglang, "delta_net", "no_buffer")], tmp_path)
    oldest = SGLANG_PLUGIN.checked[0].version
    requested = [run(sglang, "delta_net", "no_buffer"), run(sglang, "delta_net", "no_buffer", faults=True)]
    ours, faulty = sglang.ours(requested, tmp_path, watches_states=True, release=oldest)
    assert_equal_tokens([ours.tokens], stock.tokens)
    assert_reported(_FAULTS["delta_net"], faulty)
