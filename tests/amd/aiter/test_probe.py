"""The startup probe: a kernel that is wrong on the model's own shape is switched off before it serves."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.errors import Unsupported
from rocm_attn.machine import releases
from rocm_attn.providers.select import Selection
from rocm_attn.selection import arithmetic
from rocm_attn.selection.probe import wrong_kernels
from tests.amd.aiter.serving import CPU, partly_torch, plain_problem, vectorised_problem, world
from tests.amd.aiter.stand_in import Body, StandIn

PROBLEM = plain_problem(16, dims=(128, 128))


def ignores_the_scale(right: Body) -> Body:
    """Uses 1/sqrt(D), whatever scale is asked for."""
    return lambda call: right({**call, "softmax_scale" if "softmax_scale" in call else "scale": 128**-0.5})


def forgets_the_second_sequence(right: Body) -> Body:
    """Computes only a batch of one correctly."""

    def wrong(call: Mapping[str, Any]) -> Any:
        result = right(call)
        call["out"][1:].zero_()
        return result

    return wrong


def was_not_built(right: Body) -> Body:
    return Mock(side_effect=RuntimeError("no matching kernel found\nsecond line"))


def turns_to_nan_on_long_sequences(right: Body) -> Body:
    def wrong(call: Mapping[str, Any]) -> Any:
        result = right(call)
        if call["max_num_partitions"] > 1:
            call["out"][-2:] = float("nan")
        return result

    return wrong


WRONG: Mapping[str, tuple[str, Callable[[Body], Body], StepKind]] = {
    "scale": ("mha_batch_prefill_func", ignores_the_scale, StepKind.EXTEND),
    "second sequence": ("paged_attention_ragged", forgets_the_second_sequence, StepKind.DECODE),
    "long sequences": ("paged_attention_ragged", turns_to_nan_on_long_sequences, StepKind.DECODE),
}


@pytest.mark.fast(1)
@pytest.mark.parametrize(("function", "damage", "kind"), WRONG.values(), ids=WRONG)
def test_a_wrong_kernel_is_switched_off_with_a_reason_and_the_next_serves(
    function: str, damage: Callable[[Body], Body], kind: StepKind, aiter: StandIn
) -> None:
    aiter.bodies[function] = damage(aiter.bodies[function])
    serving = world(PROBLEM)
    selection = serving.runtime.selections[0]
    assert selection.kernels[kind].entry.name == "aiter.unified_attention"
    (reason,) = (r.reason for r in selection.refusals if r.kernel == f"aiter.{function}" and r.kind is kind)
    assert reason.startswith("switched off by its probe: ")
    serving.served([5, 40], [1, 1], [2, 3])


def test_a_function_that_is_wrong_over_vectorised_pages_still_serves_linear_ones(aiter: StandIn) -> None:
    right = aiter.bodies["mha_batch_prefill_func"]
    wrong = ignores_the_scale(right)
    aiter.bodies["mha_batch_prefill_func"] = lambda call: (wrong if call["k"].dim() == 5 else right)(call)
    off = replace(vectorised_problem(), scale=0.2)
    assert names(world(off).runtime.selections[0])[StepKind.EXTEND] == "aiter.unified_attention[vectorised]"
    assert names(world(PROBLEM).runtime.selections[0])[StepKind.EXTEND] == "aiter.mha_batch_prefill_func"


def names(selection: Selection) -> dict[StepKind, str]:
    return {kind: kernel.entry.name for kind, kernel in selection.kernels.items()}


def test_a_wrong_prefill_kernel_leaves_prompts_to_the_extend_kernel(aiter: StandIn) -> None:
    aiter.bodies["flash_attn_varlen_func"] = ignores_the_scale(aiter.bodies["flash_attn_varlen_func"])
    serving = world(PROBLEM)
    assert StepKind.PREFILL not in serving.runtime.selections[0].kernels
    serving.step([serving.admit(), serving.admit()], [5, 40])


@pytest.mark.fast(1)
@pytest.mark.usefixtures("whole_probe")
@pytest.mark.parametrize("window_left", [300, 1023])
def test_a_window_is_probed_beyond_its_length(window_left: int, aiter: StandIn) -> None:
    """Random rows do not show it: the probe of a runtime has the rows of test_probe_edges.py too."""
    for name in ("unified_attention", "mha_batch_prefill_func"):
        aiter.change(name, lambda call: {"window_size": (-1, -1)})  # right if the sequence fits in the window
    with pytest.raises(Unsupported) as caught:
        world(replace(PROBLEM, window_left=window_left))
    assert any("aiter.unified_attention: switched off by its probe" in reason for reason in caught.value.reasons)


@pytest.mark.fast(1)
@pytest.mark.parametrize("score", [{"has_sinks": True}, {"has_alibi_slopes": True}, {"logits_soft_cap": 3.0}])
def test_what_a_model_has_learned_for_its_heads_is_probed(score: Mapping[str, Any], aiter: StandIn) -> None:
    NOTHING = {"sinks": None, "sink_ptr": None, "alibi_slopes": None, "softcap": 0.0, "logits_soft_cap": 0.0}
    world(replace(PROBLEM, **score))
    for name in ("unified_attention", "mha_batch_prefill_func", "paged_attention_ragged", "flash_attn_varlen_func"):
        aiter.change(name, lambda call: {score: none for score, none in NOTHING.items() if score in call})
    with pytest.raises(Unsupported) as caught:
        world(replace(PROBLEM, page_size=32, **score))
    assert any("switched off by its probe" in reason for reason in caught.value.reasons)


def test_the_prefill_kernel_is_probed_with_a_sequence_of_no_length(aiter: StandIn) -> None:
    calls = aiter.noted("flash_attn_varlen_func")
    world(PROBLEM)
    assert any(0 in call["cu_seqlens_q"].diff() for call in calls)


def test_when_every_kernel_is_wrong_the_request_for_aiter_is_refused(aiter: StandIn) -> None:
    for name in ("paged_attention_ragged", "unified_attention"):
        aiter.bodies[name] = forgets_the_second_sequence(aiter.bodies[name])
    with pytest.raises(Unsupported) as caught:
        world(PROBLEM)
    assert sum("switched off by its probe" in reason for reason in caught.value.reasons) >= 2


def test_a_right_kernel_is_probed_once_for_its_version(aiter: StandIn, own_cache: Path) -> None:
    world(PROBLEM)
    assert set(aiter.calls) == {
        "flash_attn_varlen_func",
        "mha_batch_prefill_func",
        "paged_attention_ragged",
        "unified_attention",
    }
    aiter.calls.clear()
    world(PROBLEM)
    assert aiter.calls == []
    (verdict,) = own_cache.iterdir()
    assert json.loads(verdict.read_text()) == {}


def test_another_version_is_probed_again(aiter: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    world(PROBLEM)
    aiter.calls.clear()
    monkeypatch.setattr(releases, "aiter_version", lambda: "later")
    world(PROBLEM)
    assert aiter.calls


def test_other_code_of_this_project_is_probed_again(
    aiter: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images of many commits have one version, and share a cache."""
    monkeypatch.setattr(arithmetic, "sources", lambda: sorted(tmp_path.rglob("*.py")))
    for name, content in (("kernels/cdna/a.py", "one"), ("kernels/cdna/a.py", "two"), ("providers/b.py", "one")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
        arithmetic.code_digest.cache_clear()
        assert wrong_kernels([partly_torch(PROBLEM)], CPU) == {}
        assert aiter.calls, "the verdict is of other code"
        aiter.calls.clear()
        assert wrong_kernels([partly_torch(PROBLEM)], CPU) == {}
        assert aiter.calls == []
    arithmetic.code_digest.cache_clear()


def test_other_switches_of_aiters_are_probed_again(aiter: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """They select other kernels, for which a verdict on disk says nothing."""
    plain = partly_torch(PROBLEM)
    here = plain.target
    assert wrong_kernels([plain], CPU) == {}
    aiter.calls.clear()
    assert wrong_kernels([plain], CPU) == {}
    assert aiter.calls == []
    switched = replace(here, releases=replace(here.releases, switches=("QKV_VERSION=EXPERIMENTAL",)))
    assert wrong_kernels([replace(plain, target=switched)], CPU) == {}
    assert aiter.calls


def test_a_wrong_verdict_on_disk_holds(aiter: StandIn) -> None:
    right = aiter.bodies["paged_attention_ragged"]
    aiter.bodies["paged_attention_ragged"] = forgets_the_second_sequence(right)
    world(PROBLEM)
    aiter.bodies["paged_attention_ragged"] = right
    chosen = world(PROBLEM).runtime.selections[0].kernels[StepKind.DECODE]
    assert chosen.entry.name == "aiter.unified_attention"


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"a": 1}', b"\xff", b"[" * 100_000],
    ids=["", "{", "[]", "number", "no text", "deep"],
)
def test_a_damaged_verdict_on_disk_is_found_again(content: bytes, aiter: StandIn, own_cache: Path) -> None:
    world(PROBLEM)
    (verdict,) = own_cache.iterdir()
    verdict.write_bytes(content)
    aiter.calls.clear()
    world(PROBLEM)
    assert aiter.calls
    assert json.loads(verdict.read_text()) == {}


def test_a_cache_that_this_user_may_not_read_does_not_stop_a_runtime(
    aiter: StandIn, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test may run as root, who may read everything."""

    def refusing(method: Callable[..., Any]) -> Callable[..., Any]:
        def called(path: Path, *given: Any, **named: Any) -> Any:
            if own_cache in path.parents:
                raise PermissionError(13, "Permission denied", str(path))
            return method(path, *given, **named)

        return called

    for name in ("read_text", "stat"):
        monkeypatch.setattr(Path, name, refusing(getattr(Path, name)))
    assert wrong_kernels([partly_torch(PROBLEM)], CPU) == {}
    assert aiter.calls


def test_a_cache_that_cannot_be_written_does_not_stop_a_runtime(
    aiter: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert world(PROBLEM).runtime.selections[0].provider == "aiter"
