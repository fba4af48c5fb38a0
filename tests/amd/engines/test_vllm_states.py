"""vLLM's whole engine with recurrent layers: our attention gives its own tokens, and faults of its states are found."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.amd.engines.serving import MOST_STEPS_LATER, Rounds, assert_equal_tokens, prompts
from tests.amd.engines.vllm_models import vllm_model
from tests.amd.engines.vllm_runs import VllmVenv
from tests.amd.engines.vllm_state_faults import FAULTS_OF_SLOTS, LOST_COPY, SWAPPED_COUNTS, WRONG_HIT, ZEROED_PAGES
from tests.amd.engines.vllm_text import Answer, Run

# vLLM makes blocks of as many tokens as take the bytes of a state: 64, 544 and 64.
_MODELS = ("mamba", "delta_net", "parallel_mamba")
_WRONG_STATE = "a slot that the engine names for a sequence's recurrent state does not hold"


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> VllmVenv:
    return VllmVenv(tmp_path_factory.mktemp("plugin"))


def run(vllm: VllmVenv, name: str, rounds: Rounds, fault: str = "", new_tokens: int = 16, **args: Any) -> Run:
    settings = {
        "model": str(vllm_model(name, vllm.folder)),
        "block_size": 32,
        "max_model_len": 832 if name.startswith("delta_net") else 256,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 584 if name.startswith("delta_net") else 104,
        "enable_chunked_prefill": True,
        **args,
    }
    return Run(settings, rounds, new_tokens, fault)


def two_rounds(name: str) -> Rounds:
    """Prompts in chunks, some of which share two blocks or one; then the last ones again, which are cached."""
    if "mamba" in name:
        served = prompts((1, 5, 31, 32, 63, 64, 65, 100, 128, 130, 170), num_shared=150)
    else:
        served = prompts((1, 31, 100, 543, 545), num_shared=560)
    return [served, served[-3:]]


def of_fault(vllm: VllmVenv, fault: str) -> Run:
    """Returns a run of decodes in the fifth step; at a block's end or after a round of others if the fault needs it."""
    if fault == WRONG_HIT:
        return run(vllm, "mamba", [prompts((70, 80, 140))[:3], prompts((150,))[:1], prompts((150,))[:1]], fault)
    if fault == LOST_COPY:
        return run(vllm, "mamba", [prompts((60, 9))[:2]], fault)
    if fault == ZEROED_PAGES:
        return run(vllm, "delta_net", two_rounds("delta_net"), fault)
    return run(vllm, "mamba", [prompts()[2:4], prompts()[4:6]], fault)


_FAULTS = (*FAULTS_OF_SLOTS, LOST_COPY, WRONG_HIT, ZEROED_PAGES)


def assert_reported(fault: str, answer: Answer) -> None:
    """Checks the report. Zeroes harm a state between two steps."""
    if fault == ZEROED_PAGES:
        assert answer.said.startswith("DeviceFault: step ")
        assert _WRONG_STATE in answer.said
        return
    assert answer.said.startswith(f"DeviceFault: step {answer.faulty_step}: {_WRONG_STATE}"), (fault, answer.said)
    assert 0 <= answer.steps_later <= MOST_STEPS_LATER, fault


def assert_equal(ours: Sequence[Answer], stock: Sequence[Answer]) -> None:
    for answer, own in zip(ours, stock, strict=True):
        assert_equal_tokens([answer.tokens], own.tokens)
        assert answer.cached == own.cached
        assert all(answer.cached[1])


def test_hybrid_models_give_vllms_own_tokens_and_faults_of_states_are_reported(vllm: VllmVenv, tmp_path: Path) -> None:
    """Mamba2, delta nets, and Mamba2 next to attention in one layer; all runs share one vLLM process."""
    requested = [run(vllm, name, two_rounds(name)) for name in _MODELS]
    stock = vllm.stock(requested, tmp_path)
    faults = [of_fault(vllm, fault) for fault in _FAULTS]
    answers = vllm.ours([*requested, *faults], tmp_path, watches_states=True)
    assert_equal(answers[: len(_MODELS)], stock)
    for fault, answer in zip(_FAULTS, answers[len(_MODELS) :], strict=True):
        assert_reported(fault, answer)


@pytest.mark.nightly
def test_faults_of_states_go_unseen_without_the_check_and_text_is_wrong(vllm: VllmVenv, tmp_path: Path) -> None:
    requested = [run(vllm, name, two_rounds(name)) for name in _MODELS]
    faults = [of_fault(vllm, fault) for fault in _FAULTS]
    right: list[Run] = []
    for each in faults:
        if (run_without := Run(each.args, each.rounds, each.new_tokens)) not in right:
            right.append(run_without)
    answers = vllm.ours([*requested, *faults, *right], tmp_path)
    assert_equal(answers[: len(_MODELS)], vllm.stock(requested, tmp_path))
    answers = answers[len(_MODELS) :]
    for fault, each, answer in zip(_FAULTS, faults, answers, strict=False):
        own = answers[len(faults) + right.index(Run(each.args, each.rounds, each.new_tokens))]
        assert answer.faulty_step > 0 or fault == ZEROED_PAGES, fault
        assert not answer.said, fault
        assert answer.tokens != own.tokens, fault


@pytest.mark.nightly
def test_preempted_requests_give_vllms_own_tokens(vllm: VllmVenv, tmp_path: Path) -> None:
    requested = [run(vllm, "mamba", two_rounds("mamba"), new_tokens=40, num_gpu_blocks_override=40)]
    (stock,) = vllm.stock(requested, tmp_path)
    (preempted,) = vllm.ours(requested, tmp_path, watches_states=True)
    assert preempted.preemptions
    assert preempted.tokens == stock.tokens


@pytest.mark.nightly
def test_verified_drafts_give_vllms_own_tokens_and_mixed_up_counts_are_reported(vllm: VllmVenv, tmp_path: Path) -> None:
    """On a CPU vLLM has no kernel that keeps states of drafts in the prefix cache, so these runs do without it.

    It makes no further engine in a process that has looked drafts up.
    """
    rounds: Rounds = [[(prompt[:6] * 12)[:length] for prompt in prompts()[3:6] for length in (30, 41, 52)][:4]]
    settings: dict[str, Any] = {"new_tokens": 24, "enable_prefix_caching": False}
    ngrams = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    drafting = run(vllm, "delta_net_repeats", rounds, **settings, speculative_config=ngrams)
    (single,) = vllm.stock([run(vllm, "delta_net_repeats", rounds, **settings)], tmp_path)
    (verified,) = vllm.ours([drafting], tmp_path, watches_states=True)
    assert verified.tokens == single.tokens
    assert verified.steps < single.steps
    (reported,) = vllm.ours([Run(drafting.args, rounds, 24, SWAPPED_COUNTS)], tmp_path, watches_states=True)
    assert_reported(SWAPPED_COUNTS, reported)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("release", "name"), [("0.26.0", "delta_net"), ("0.26.0", "parallel_mamba"), ("0.33.0", "delta_net")]
)
def test_other_releases_give_the_same_tokens_and_a_prompt_of_one_token_that_reads_a_state_is_reported(
    release: str, name: str, vllm: VllmVenv, tmp_path: Path
) -> None:
    """Gated delta nets of 0.26: unless a longer one is before it, it counts as a decode (vllm#51562).

    Its slot is read as it was.
    """
    is_faulty = (release, name) == ("0.26.0", "delta_net")
    align: dict[str, Any] = {"enable_prefix_caching": True, "mamba_cache_mode": "align"}  # it would keep all states
    rounds = [[prompt for prompt in each if len(prompt) > 1] for each in two_rounds(name)]
    requested = run(vllm, name, rounds, **align)
    swapped = run(vllm, name, [prompts()[2:4], prompts()[4:6]], "swapped_states", **align)
    # The second round has one request, and this fault needs two, so that none is planted.
    of_one = run(vllm, name, [prompts()[2:8], [[7]]], "freed_state", **align)
    faulty = [swapped, of_one] if is_faulty else [swapped]
    right = vllm.stock([requested, *(replace(each, fault="") for each in (swapped, of_one))], tmp_path)
    ours, reported, single = vllm.ours([requested, swapped, of_one], tmp_path, release=release, watches_states=True)
    assert_equal([ours], right[:1])
    assert_reported("swapped_states", reported)
    assert single.faulty_step == -1
    assert (_WRONG_STATE in single.said) is is_faulty
    assert single.said or single.tokens == right[2].tokens
    for answer, own in zip(vllm.ours(faulty, tmp_path, release=release), right[1:], strict=False):
        assert not answer.said
        assert answer.tokens != own.tokens
