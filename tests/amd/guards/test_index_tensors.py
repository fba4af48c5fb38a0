"""Index tensors of a step: only the needed ones, built once for all kinds of layer, with an error word that reports."""

from dataclasses import replace

import pytest
import torch

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.guards.registry import Guards
from rocm_attn.kernels.metadata.error_word import ERROR_WORD, TOKEN_WITHOUT_PAGE
from rocm_attn.kernels.metadata.step_tensors import Need
from rocm_attn.machine.target import known_target
from rocm_attn.problem import Problem
from rocm_attn.providers import select
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.plan import make_plan
from tests.amd.guards.csr_kernels import CsrSchedule, csr_provider
from tests.amd.guards.ways import PROVIDERS, both_ways
from tests.amd.noted import noted
from tests.amd.worlds.problems import small_problem
from tests.amd.worlds.world import World

BUFFERS_OF_NEED = {
    Need.PAGE_LIST: {"page_indptr", "page_list", "last_page_len"},
    Need.BLOCK_TABLE: {"block_table"},
    Need.KV_LEN_INT64: {"kv_len_int64"},
    Need.MASK: {"mask_start", "mask_words", "mask_positions", "mask_indptr"},
    Need.PREFIXES: {"prefix_len", "group_end", "group_indptr", "suffix_kv_len", "suffix_page"},
}


@pytest.mark.parametrize("need", Need)
def test_a_need_brings_its_own_buffers_and_no_others(need: Need, monkeypatch: pytest.MonkeyPatch) -> None:
    csr = csr_provider("needy", 0)
    needy = replace(csr, entries=tuple(replace(row, needs=frozenset({need})) for row in csr.entries))
    monkeypatch.setattr(select, "PROVIDERS", ("needy",))
    monkeypatch.setattr(select, "ENTRIES", {"needy": needy.entries})
    runtime = build_runtime(
        [small_problem()],
        RuntimeOptions(num_pages=8, max_num_seqs=2, max_kv_len=16, provider="needy"),
        device=torch.device("cpu"),
    )
    held = set(runtime.seals.tensors())
    assert {name for names in BUFFERS_OF_NEED.values() for name in names} & held == BUFFERS_OF_NEED[need]


def test_kinds_of_layer_with_equal_schedules_share_one_build(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = noted(monkeypatch, CsrSchedule, "build")
    problem = small_problem()
    other_scale, other_heads = replace(problem, scale=0.7), replace(problem, num_q_heads=2)
    world = World.build([problem, other_scale, problem, other_heads], device, "csr")
    requests = world.begun(5, 4, 9)
    world.step(requests, [1, 1, 1])
    assert [schedule for schedule, *_ in built] == [CsrSchedule(problem.page_size)] * 2


@pytest.mark.parametrize("kind", [StepKind.DECODE, StepKind.EXTEND, StepKind.MIXED])
def test_schedules_are_shared_only_where_they_are_equal(kind: StepKind) -> None:
    problem = Problem(32, 8, 128, torch.bfloat16, 16, v_head_dim=128, scale=128**-0.5)
    problems = [
        problem,
        replace(problem, scale=0.5),
        replace(problem, num_q_heads=16, num_kv_heads=4),  # other rows to decode, and to share out in an extend
        replace(problem, num_q_heads=8),  # the same rows to decode, other tiles to extend
    ]
    target = known_target("sm_90")
    kernels = [select.select(each, target, "triton").kernels[kind] for each in problems]
    plan = make_plan(PaddedShape(kind, 8, 8), kernels, max_q_len=1, max_kv_len=64, may_capture=True)
    expected = {
        StepKind.DECODE: (0, 0, 2, 0),
        StepKind.EXTEND: (0, 0, 2, 3),
        StepKind.MIXED: (0, 0, 2, 3),
    }
    assert plan.schedule_of_kind == expected[kind]


@both_ways
@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_token_without_a_page_sets_the_error_word_of_its_step_alone(
    provider: str, graphs: bool, device: torch.device
) -> None:
    serving = World.one_layer(device, Guards().without("batch_check"), graphs=graphs, provider=provider)

    def error_word() -> int:
        return int(serving.runtime.seals.tensors()["counts"][ERROR_WORD])

    requests = serving.begun(3, 3)
    serving.step(requests, [1, 1])
    assert error_word() == 0
    serving.run(requests, [1, 1], reserve=False)
    assert error_word() == TOKEN_WITHOUT_PAGE
    serving.free(*requests)
    requests = serving.begun(2, 3)
    serving.step(requests, [1, 1])
    assert error_word() == 0
