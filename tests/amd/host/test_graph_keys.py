"""Graphs are keyed by their kernels as values: equal launches give equal keys, possibly different ones do not."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain

import pytest
import torch

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.errors import BadProblem
from rocm_attn.machine.releases import Releases
from rocm_attn.machine.target import Target, known_target
from rocm_attn.problem import KVEncoding, PoolKind, Problem, Row, Scales
from rocm_attn.providers import triton_cdna, triton_hopper
from rocm_attn.providers.contract import BoundKernel, KernelEntry, LayerKernel, PoolSize
from rocm_attn.providers.select import ENTRIES
from rocm_attn.step.plan import make_plan

POOL = PoolSize(num_pages=100, max_kv_len=640, max_num_seqs=4)
BOUND = [row for rows in ENTRIES.values() for row in rows if not row.not_bound]
TARGETS = [
    *(known_target(arch) for arch in ("gfx942", "sm_90", "cpu")),
    replace(known_target("sm_90"), releases=Releases(triton=triton_hopper.TRITONS[0])),
    *(replace(known_target(arch), releases=Releases(triton=triton_cdna.TRITONS[0])) for arch in ("gfx942", "gfx950")),
]
each_row = pytest.mark.parametrize("row", BOUND, ids=lambda row: f"{row.name}-{row.kind.value}")


def problems() -> Iterator[Problem]:
    """Yields problems such that every row serves one of them."""
    for pool in (PoolKind.SPLIT, PoolKind.VECTORIZED):
        for page_size in (16, 32, 64, 128, 1024, 1):
            for head_dim in (128, 64, 256):
                problem = Problem(16, 2, head_dim, torch.bfloat16, 16, v_head_dim=head_dim, scale=head_dim**-0.5)
                try:
                    yield replace(problem, page_size=page_size, pool=pool)
                except ValueError:  # such a pool cannot have these pages
                    continue
    yield Problem(16, 2, 128, torch.bfloat16, 16, v_head_dim=128, scale=128**-0.5, chunk=4096)
    yield Problem(128, 1, 128, torch.bfloat16, 16, v_head_dim=128, scale=128**-0.5)
    for heads in (16, 128):
        latent = Problem(heads, 1, 576, torch.bfloat16, 1, v_head_dim=512, scale=0.05, pool=PoolKind.LATENT)
        yield from (latent, replace(latent, chunk=64))
    rows = Problem(64, 1, 512, torch.bfloat16, 128, v_head_dim=512, scale=0.05, pool=PoolKind.LATENT)
    yield replace(rows, row=Row(128, overlaps=False))


def eight_bit_problems() -> Iterator[Problem]:
    """Yields the same problems over 8-bit pages."""
    for problem in problems():
        for encoding, scales in (
            (KVEncoding.E4M3FNUZ, Scales.LAYER),
            (KVEncoding.E4M3FNUZ, Scales.GROUP),
            (KVEncoding.E4M3FN, Scales.GROUP),
        ):
            with suppress(BadProblem):  # not every layer has records
                yield replace(problem, kv_encoding=encoding, kv_scales=scales)


def served_by(row: KernelEntry) -> tuple[Problem, Target]:
    for problem in chain(problems(), eight_bit_problems()):
        for target in TARGETS:
            if not row.refusals(problem, target, POOL):
                return problem, target
    raise AssertionError(f"{row.name} serves none of the problems")


def key(row: KernelEntry, bound: BoundKernel) -> object:
    shape = PaddedShape(row.kind, 4, 4 if row.kind.decodes else 8)
    return make_plan(shape, [LayerKernel(row, bound)], max_q_len=8, max_kv_len=64, may_capture=True).key


@each_row
def test_a_kernel_that_is_bound_twice_alike_has_one_graph(row: KernelEntry) -> None:
    problem, target = served_by(row)
    one, other = row.bind(problem, target, POOL), row.bind(problem, target, POOL)
    assert one is not other
    assert (one, hash(one)) == (other, hash(other))
    assert len({key(row, one): 1, key(row, other): 2}) == 1


@each_row
def test_a_kernel_of_another_problem_has_another_graph(row: KernelEntry) -> None:
    problem, target = served_by(row)
    bound = row.bind(problem, target, POOL)
    halved, doubled = replace(problem, scale=problem.scale / 2), replace(problem, num_q_heads=2 * problem.num_q_heads)
    others = []
    for changed in (halved, doubled):
        with suppress(LookupError):  # some kernels lack variants for both
            others += [] if row.refusals(changed, target, POOL) else [row.bind(changed, target, POOL)]
    assert others
    assert all(key(row, other) != key(row, bound) for other in others)


def test_kernels_that_read_alike_when_printed_may_have_graphs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = (row for row in BOUND if row.name == "aiter.paged_attention_ragged" and row.kind.decodes)
    problem, target = served_by(row)
    short, long = (row.bind(problem, target, replace(POOL, max_kv_len=length)) for length in (640, 1280))
    monkeypatch.setattr(type(short), "describe", lambda kernel: "alike")
    assert short.describe() == long.describe()
    assert key(row, short) != key(row, long)


@pytest.mark.parametrize("safe", [(True, True), (True, False), (False, True)])
def test_a_step_is_replayed_if_each_of_its_kernels_may_be_captured(safe: tuple[bool, bool]) -> None:
    problem, target = served_by(BOUND[0])
    bound = BOUND[0].bind(problem, target, POOL)
    kernels = [LayerKernel(replace(BOUND[0], graph_safe=each), bound) for each in safe]
    plan = make_plan(PaddedShape(BOUND[0].kind, 4, 4), kernels, max_q_len=1, max_kv_len=64, may_capture=True)
    assert plan.replayable == all(safe)
