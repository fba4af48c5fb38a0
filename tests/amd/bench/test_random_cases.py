"""Random layers and steps: the same for a seed, of every kind, served on each arch and no larger than they may be."""

from dataclasses import replace

import pytest
import torch

from rocm_attn.cli import DONE, main
from rocm_attn.machine.releases import Releases
from rocm_attn.machine.target import known_target
from rocm_attn.problem import KVEncoding, PoolKind, Problem
from rocm_attn.providers.select import select
from rocm_attn.providers.triton_hopper import TRITONS
from rocm_lab.bench import random_cases as cases
from rocm_lab.bench.batch_spec import BatchSpec
from rocm_lab.bench.work import work_of
from rocm_lab.cli import bench_kernels

CASES = cases.random_cases(300, 14)


def test_a_seed_gives_the_same_cases_and_another_seed_others() -> None:
    assert cases.random_cases(20, 14) == CASES[:20]
    assert cases.random_cases(20, 15) != CASES[:20]
    assert {case.step.partition(",")[0] for case in CASES} == {"decode", "giants", "extend", "verify", "mixed"}


def test_layers_of_every_kind_are_among_the_cases() -> None:
    problems = [case.problem for case in CASES]
    assert any(problem.head_dim < problem.v_head_dim for problem in problems)
    assert {problem.pool for problem in problems} == {PoolKind.SPLIT, PoolKind.LATENT}
    assert {problem.kv_encoding for problem in problems} == {KVEncoding.LIKE_Q, KVEncoding.E4M3FN}


def test_a_step_is_of_the_kind_that_its_name_says() -> None:
    for case in CASES:
        new = case.batch.q_len
        kind = case.step.partition(",")[0]
        assert (max(new) == 1) == (kind in ("decode", "giants")), case
        assert (min(new) == 1 < max(new)) == (kind == "mixed"), case


def test_no_case_is_larger_than_it_may_be() -> None:
    for case in CASES:
        pages = sum(-(-kv_len // case.problem.page_size) for kv_len in case.batch.kv_len)
        assert pages * case.problem.page_format.page_bytes <= cases.MOST_BYTES, case
        assert work_of(case.problem, case.batch).flops <= cases.MOST_FLOPS, case


@pytest.mark.parametrize("arch", ["sm_90", "gfx942", "gfx950"])
def test_every_case_is_served_by_our_kernels(arch: str) -> None:
    for problem in dict.fromkeys(case.problem for case in CASES):
        select(problem, known_target(arch), "triton")


def test_the_command_measures_the_cases_of_its_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_kernels, "COUNT", 1)
    monkeypatch.setattr(cases, "MOST_FLOPS", 1e6)
    command = ["bench", "kernels", "--suite", "random", "--device", "cpu", "--rounds", "1", "--round-us", "1"]
    assert main([*command, "--providers", "torch", "--seed", "3"]) == DONE
    (case,) = cases.random_cases(1, 3)
    assert capsys.readouterr().out.startswith(f"{case.name} (lower bound")


@pytest.mark.parametrize(
    ("batch", "name"),
    [
        ("1x9+1x5", "triton.hopper_prefill"),
        ("1x9+1x5+1", "triton.hopper_extend"),
        ("1x9+1d1", "triton.hopper_extend+decode"),
        ("2d1", "triton.decode"),
    ],
)
def test_a_step_of_a_benchmark_has_the_kernel_that_an_eager_step_has(batch: str, name: str) -> None:
    target = replace(known_target("sm_90"), releases=Releases(triton=TRITONS[0]))
    layer = Problem(8, 2, 64, torch.bfloat16, v_head_dim=64, page_size=16, scale=0.125)
    assert select(layer, target, "triton").kernel(BatchSpec.parse(batch).kind).entry.name == name
    elsewhere = select(layer, known_target("sm_80"), "triton").kernel(BatchSpec.parse(batch).kind)
    assert elsewhere.entry.name == name.replace("hopper_prefill", "extend").replace("hopper_", "")
