"""Where the extend kernel for Hopper is chosen, and what its pages look like to TMA."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.cli.prewarm import target_and_device
from rocm_attn.kernels.hopper import extend
from rocm_attn.kernels.hopper.extend import launch_hopper_extend
from rocm_attn.machine.releases import UNKNOWN, Release, Releases, installed_releases, triton_version
from rocm_attn.machine.target import Target, known_target
from rocm_attn.problem import KVEncoding, Problem, Scales
from rocm_attn.providers.by_tokens import KernelByTokens
from rocm_attn.providers.contract import OWN_POOL, BoundKernel, PoolSize, PoolTerms
from rocm_attn.providers.select import Selection, select
from rocm_attn.providers.shared_prefix import SharedPrefixKernel
from rocm_attn.providers.triton_hopper import TRITONS, HopperExtend
from tests.amd.kernels.attention_cases import Case, build, extend_cut, garbage

LAYER = Problem(32, 8, 128, 128, torch.bfloat16, page_size=16, scale=128**-0.5)
KINDS = (StepKind.EXTEND, StepKind.MIXED, StepKind.SHARED)
HOPPER = {
    StepKind.EXTEND: "triton.hopper_extend",
    StepKind.MIXED: "triton.hopper_extend+decode",
    StepKind.SHARED: "triton.hopper_shared_prefix",
}
PLAIN = {
    StepKind.EXTEND: "triton.extend",
    StepKind.MIXED: "triton.extend+decode",
    StepKind.SHARED: "triton.shared_prefix",
}


def on(triton: Release, arch: str = "sm_90") -> Target:
    return replace(known_target(arch), releases=Releases(triton=triton))


def chosen(problem: Problem, target: Target, **more: Any) -> Selection:
    return select(problem, target, "triton", **more)


def hopper_of(kernel: BoundKernel) -> HopperExtend:
    """What serves steps whose sequences have many new tokens."""
    found = kernel.other if isinstance(kernel, KernelByTokens) else kernel
    assert isinstance(found, HopperExtend)
    return found


def names(selection: Selection) -> dict[StepKind, str]:
    return {kind: selection.kernel(kind).row.name for kind in KINDS}


@pytest.mark.parametrize("triton", TRITONS, ids=str)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"dtype": torch.float16},
        {"head_dim": 64, "v_head_dim": 64, "page_size": 8},
        {"page_size": 128, "has_sinks": True},
        {"num_q_heads": 128, "num_kv_heads": 1, "wants_lse": True},
    ],
    ids=str,
)
def test_it_serves_what_models_use_where_its_triton_is_known(triton: Release, more: dict[str, Any]) -> None:
    assert names(chosen(replace(LAYER, **more), on(triton))) == HOPPER


@pytest.mark.parametrize("triton", TRITONS, ids=str)
def test_long_windows_are_served_but_not_shared(triton: Release) -> None:
    selection = chosen(replace(LAYER, window_left=2047), on(triton))
    assert selection.kernel(StepKind.EXTEND).row.name == HOPPER[StepKind.EXTEND]
    assert StepKind.SHARED not in selection.kernels


@pytest.mark.parametrize("said", ["3.5.1", "3.6.1", "3.9.0", "3.6.0rc1", ""])
def test_with_another_triton_the_plain_kernel_serves_and_the_reason_is_said(said: str) -> None:
    selection = chosen(LAYER, on(Release.of(said)))
    assert names(selection) == PLAIN
    reason = f"it runs with Triton 3.6.0, and here it is {Release.of(said)}"
    assert {(r.kernel, r.reason) for r in selection.refusals if "hopper" in r.kernel} == {
        (name, reason) for name in HOPPER.values()
    }


@pytest.mark.parametrize(
    "more",
    [
        {"dtype": torch.float32},
        {"head_dim": 96, "v_head_dim": 96},
        {"head_dim": 192, "v_head_dim": 128},
        {"page_size": 4},
        {"page_size": 48},
        {"logits_soft_cap": 30.0},
        {"has_alibi_slopes": True},
        {"window_left": 2046},
        {"kv_encoding": KVEncoding.E4M3FN, "kv_scales": Scales.HEAD},
    ],
    ids=str,
)
def test_what_it_does_not_serve_the_plain_kernel_does(more: dict[str, Any]) -> None:
    selection = chosen(replace(LAYER, **more), on(TRITONS[0]))
    assert selection.kernel(StepKind.EXTEND).row.name == PLAIN[StepKind.EXTEND]
    assert [r for r in selection.refusals if r.kernel == HOPPER[StepKind.EXTEND]]


def test_pages_with_strides_masks_and_deterministic_steps_are_left_to_other_kernels() -> None:
    target = on(TRITONS[0])
    pool = PoolSize(64, 1024, 4, PoolTerms(page_strides=True))
    assert names(chosen(LAYER, target, pool=pool)) == PLAIN
    assert names(chosen(LAYER, target, pool=replace(pool, terms=OWN_POOL))) == HOPPER
    masked = chosen(replace(LAYER, custom_mask=True), target)
    assert masked.kernel(StepKind.MASKED).row.name == "triton.masked"
    assert chosen(LAYER, target, deterministic=True).kernel(StepKind.EXTEND).row.name == "triton.segment_extend"


@pytest.mark.parametrize("arch", ["sm_80", "gfx942", "gfx950"])
def test_other_archs_have_the_plain_kernel(arch: str) -> None:
    assert names(chosen(LAYER, on(TRITONS[0], arch))) == PLAIN


def test_prefixes_are_seen_whole() -> None:
    bound = chosen(LAYER, on(TRITONS[0])).kernel(StepKind.SHARED).bound
    assert isinstance(bound, SharedPrefixKernel)
    prefix = hopper_of(bound.prefix)
    assert not prefix.scores.causal
    assert not prefix.cut.sharing.causal


def test_the_release_of_the_installed_triton_is_known() -> None:
    assert installed_releases().triton == Release.of(triton_version()) != UNKNOWN


def test_what_is_compiled_ahead_for_an_absent_gpu_is_what_the_installed_triton_runs() -> None:
    target, _ = target_and_device("sm_90")
    assert target.releases.triton == Release.of(triton_version())


def test_tma_sees_pages_as_rows_of_slots_and_boxes_within_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a box must not do is end in another page, or in another KV head."""
    launched: list[tuple[Any, ...]] = []
    monkeypatch.setattr(extend, "launch", lambda kernel, grid, *args, **options: launched.append((grid, *args)))
    monkeypatch.setattr(extend, "launch_extend_merge", lambda *args: None)
    for page_size in (8, 16, 128):
        case = Case([300], [200], heads=(8, 2), dims=(128, 128), page_size=page_size, dtype=torch.bfloat16)
        tensors = build(case, torch.device("cpu"))
        selection = chosen(replace(LAYER, num_q_heads=8, num_kv_heads=2, page_size=page_size), on(TRITONS[0]))
        kernel = hopper_of(selection.kernel(StepKind.EXTEND).bound)
        cut = extend_cut(tensors, kernel.tiles.extend, kernel.cut.sharing)
        workspace = torch.empty(cut.partials_words(query_rows=kernel.tiles.extend.query_rows, v_head_dim=128))
        args = tensors.args(garbage(cut.words(200, 1), torch.device("cpu")), workspace)
        launch_hopper_extend(args, scores=tensors.scores, cut=cut, tiles=kernel.tiles)
        grid, _, k, v, *_ = launched[-1]
        slots = tensors.k_pages.shape[0] * page_size
        assert grid == (132,)  # programs that stay: rows are dealt out to them
        for described, pages in ((k, tensors.k_pages), (v, tensors.v_pages)):
            assert described.base is pages
            assert (described.shape, described.strides) == ([slots, 2 * 128], [2 * 128, 1])
            keys, columns = described.block_shape
            assert page_size % keys == 0 or keys % page_size == 0
            assert keys <= page_size
            assert columns == 64
