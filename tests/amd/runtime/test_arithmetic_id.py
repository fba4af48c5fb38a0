"""The id of deterministic attention's arithmetic: equal ids mean equal bits, and what changes bits changes the id."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rocm_attn.errors import Unsupported
from rocm_attn.guards.registry import Guards
from rocm_attn.kernels.attention import segments
from rocm_attn.kernels.refs import segments as refs
from rocm_attn.machine.releases import Release
from rocm_attn.machine.target import Target, known_target
from rocm_attn.problem import Problem
from rocm_attn.providers import triton_segments
from rocm_attn.providers.contract import PoolSize
from rocm_attn.providers.select import Selection, select
from rocm_attn.selection import arithmetic
from rocm_attn.selection.arithmetic import arithmetic_id

PROBLEM = Problem(8, 2, 128, torch.bfloat16, 16)
LARGE = PoolSize(num_pages=4096, max_kv_len=65536, max_num_seqs=64)


def kernels_for(problem: Problem, arch: str = "gfx942", pool: PoolSize = LARGE, **target: Any) -> Selection:
    found: Target = replace(known_target(arch), **target)
    return select(problem, found, "triton", pool=pool, deterministic=True)


def id_of(*problems: Problem, **given: Any) -> str:
    return arithmetic_id([kernels_for(problem, **given) for problem in problems], Guards())


SAME: Mapping[str, Problem] = {
    "pages": replace(PROBLEM, page_size=64),
    "a mask": replace(PROBLEM, custom_mask=True),
    "the log-sum-exp": replace(PROBLEM, wants_lse=True),
}
OTHER: Mapping[str, Problem] = {
    "dtype": replace(PROBLEM, dtype=torch.float16),
    "scale": replace(PROBLEM, scale=0.25),
    "window": replace(PROBLEM, window_left=127),
    "cap": replace(PROBLEM, logits_soft_cap=30.0),
    "sinks": replace(PROBLEM, has_sinks=True),
    "head dim": Problem(8, 2, 64, torch.bfloat16, 16),
}


@pytest.mark.parametrize("name", ["gfx942", "gfx950"])
@pytest.mark.parametrize("same", SAME)
def test_pages_pools_and_what_a_step_may_bring_change_no_id(same: str, name: str) -> None:
    whole = arithmetic_id([without_masks(kernels_for(PROBLEM, name))], Guards())
    changed = arithmetic_id([without_masks(kernels_for(SAME[same], name))], Guards())
    assert changed == whole
    assert id_of(PROBLEM, arch=name, pool=replace(LARGE, max_kv_len=4096, num_pages=300)) == id_of(PROBLEM, arch=name)


def without_masks(selection: Selection) -> Selection:
    """Leaves out the kernels of steps with masks, which a layer without masks does not have."""
    kernels = {kind: kernel for kind, kernel in selection.kernels.items() if kind.value != "masked"}
    return replace(selection, kernels=kernels)


@pytest.mark.parametrize("other", OTHER)
def test_another_problem_has_another_id(other: str) -> None:
    assert id_of(OTHER[other]) != id_of(PROBLEM)


def test_another_arch_compiler_source_and_order_of_layers_has_another_id(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = {id_of(PROBLEM), id_of(PROBLEM, arch="gfx950"), id_of(PROBLEM, OTHER["window"])}
    ids.add(id_of(OTHER["window"], PROBLEM))
    releases = known_target("gfx942").releases
    ids.add(id_of(PROBLEM, releases=replace(releases, triton=Release.of("9.9.9"))))
    monkeypatch.setattr(arithmetic, "code_digest", lambda: "other sources")
    ids.add(id_of(PROBLEM))
    assert len(ids) == 6


def test_a_digest_of_sources_covers_the_kernels() -> None:
    found = {file.resolve() for file in arithmetic.sources()}
    for module in (segments, triton_segments, refs):
        assert Path(str(module.__file__)).resolve() in found
    assert any(file.name == "segment.json" for file in found)


def test_what_may_depend_on_the_batch_has_no_id() -> None:
    plain = select(PROBLEM, known_target("gfx942"), "triton", pool=LARGE, deterministic=False)
    with pytest.raises(Unsupported, match="build with deterministic=True"):
        arithmetic_id([plain], Guards())
    with pytest.raises(Unsupported, match="a safeguard is switched off"):
        arithmetic_id([kernels_for(PROBLEM)], replace(Guards(), host=replace(Guards().host, is_wanted=torch.eq)))
