"""Extend takes tiles of few rows if a step's shape shows that its sequences have few new tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.kernels.sparse.arguments import Indexing
from rocm_attn.kernels.tuning.extend_tiles import EXTEND_CHOICES, extend_choices
from rocm_attn.kernels.tuning.tiles import ANY_ROWS, ExtendTileChoice
from rocm_attn.machine.target import known_target
from rocm_attn.problem import EarlierSelection, Indexer, KVEncoding, PoolKind, Problem, Scales
from rocm_attn.providers.by_tokens import KernelByTokens, likely_q_len
from rocm_attn.providers.contract import PoolSize
from rocm_attn.providers.select import Selection, select
from tests.amd.graphs.small_models import Requests, Tiny
from tests.amd.worlds.problems import small_problem
from tests.amd.worlds.world import World

BF16 = torch.bfloat16
# Three sequences, one with many more new tokens than the mean, by which the tiles are chosen.
ONE_LONG = [2, 11, 2]


def by_tokens(selection: Selection, kind: StepKind) -> KernelByTokens:
    bound = selection.kernel(kind).bound
    assert isinstance(bound, KernelByTokens)
    return bound


def layers() -> list[Problem]:
    plain = small_problem(dtype=torch.float16)
    scored = replace(plain, has_sinks=True, has_alibi_slopes=True, logits_soft_cap=2.0)
    return [scored, replace(plain, window_left=7), replace(plain, custom_mask=True)]


@pytest.mark.parametrize("is_masked", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_sequence_with_more_tokens_than_its_steps_shape_says_is_served_right(
    is_masked: bool, kernel_device: torch.device
) -> None:
    world = World.build(layers()[: 2 + is_masked], kernel_device, "triton", num_pages=128)
    requests = [world.admit() for _ in ONE_LONG]
    world.step(requests, [5, 4, 3])
    visible = None
    if is_masked:
        sizes = [(new, request.kv_len + new) for request, new in zip(requests, ONE_LONG, strict=True)]
        visible = [torch.rand(size, generator=world.generator) < 0.5 for size in sizes]
    world.step(requests, ONE_LONG, visible=visible)
    shape = PaddedShape(StepKind.MASKED if is_masked else StepKind.EXTEND, 3, sum(ONE_LONG))
    for selection in world.runtime.selections[2 * is_masked :]:
        kernel = by_tokens(selection, shape.kind)
        assert kernel.of_shape(shape) is not kernel.other, "the step was to be one of few tokens a sequence"


@pytest.mark.nightly
def test_a_graph_of_short_sequences_serves_a_long_one(kernel_device: torch.device) -> None:
    """A replay has the tiles of its shape, for any lengths: it is bitwise the eager run, and from one graph."""
    tiny = Tiny.build(kernel_device, "triton", (4,), (16,))
    runner = StepRunner(tiny.runtime, tiny.forward, recorder_for(kernel_device))
    requests = Requests(tiny.runtime)
    requests.admit(4)
    runner.run(requests.batch([3, 20, 7, 5]))
    for q_len in ([4, 4, 4, 4], [2, 9, 2, 2], [2, 0, 12, 2], [4, 4, 4, 4]):
        batch = requests.batch(q_len)
        rows = runner.run(batch).clone()
        assert torch.equal(rows, runner.run_eagerly(batch))
    assert runner.counters.replays == 4, runner.counters


@pytest.mark.parametrize(
    ("shape", "q_len"),
    [
        (PaddedShape(StepKind.EXTEND, 64, 320), 5),
        (PaddedShape(StepKind.EXTEND, 64, 321), 6),
        (PaddedShape(StepKind.PREFILL, 2, 7), 4),
        (PaddedShape(StepKind.MASKED, 3, 9), 3),
        (PaddedShape(StepKind.MIXED, 64, 320), 320),
        (PaddedShape(StepKind.SHARED, 64, 64), 64),
    ],
)
def test_a_shape_tells_how_many_new_tokens_a_sequence_is_likely_to_have(shape: PaddedShape, q_len: int) -> None:
    assert likely_q_len(shape) == q_len


@pytest.mark.fast
@pytest.mark.parametrize("arch", sorted({row.arch for row in EXTEND_CHOICES if row.max_rows < ANY_ROWS}))
@pytest.mark.parametrize("kind", [StepKind.EXTEND, StepKind.MASKED])
def test_memory_for_the_largest_shape_holds_every_smaller_one(arch: str, kind: StepKind) -> None:
    """Buffers are made for the largest shapes, which have other tiles than smaller ones."""
    target = known_target(arch)
    dtype = torch.float16 if target.is_interpreted else BF16
    for heads in ((12, 4), (32, 32), (16, 1), (40, 4)):
        problem = Problem(*heads, 128, dtype, 16, scale=1.0, custom_mask=True)
        kernel = select(problem, target, "triton").kernel(kind).bound
        largest = PaddedShape(kind, 64, 4096)
        for num_tokens in (2, 64, 128, 192, 320, 512, 1000, 4096):
            shape = PaddedShape(kind, min(64, num_tokens), num_tokens)
            assert kernel.workspace_words(shape) <= kernel.workspace_words(largest)
            assert kernel.schedule.words(shape) <= kernel.schedule.words(largest)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "sm_90"])
@pytest.mark.parametrize("of_records", [False, True])
@pytest.mark.parametrize("heads", [16, 128])
def test_memory_for_the_largest_sparse_step_holds_every_smaller_one(heads: int, of_records: bool, arch: str) -> None:
    """Few tokens are cut into more parts each. Engines name the largest step of their graphs alone."""
    indexing = Indexing(scale=1.0, top=2048)
    chooses = Problem(heads, 1, 576, BF16, 64, v_head_dim=512, scale=1.0, pool=PoolKind.LATENT)
    kinds = Indexer(64, 128, indexing), EarlierSelection(indexing)
    if of_records:
        encoding = KVEncoding.E4M3FNUZ if arch == "gfx942" else KVEncoding.E4M3FN
        chooses = replace(chooses, kv_encoding=encoding, kv_scales=Scales.GROUP)
    for problem in (replace(chooses, indexer=each) for each in kinds):
        pool = PoolSize(num_pages=100, max_kv_len=4096, max_num_seqs=256)
        for deterministic in {False, not of_records}:
            found = select(problem, known_target(arch), "triton", pool=pool, deterministic=deterministic)
            words = [
                found.kernel(StepKind.DECODE).bound.workspace_words(PaddedShape(StepKind.DECODE, tokens, tokens))
                for tokens in range(1, 257)
            ]
            assert words == sorted(words)


def rows_of(arch: str, gqa_ratio: int, dim: int) -> Sequence[ExtendTileChoice]:
    return extend_choices(arch, gqa_ratio=gqa_ratio, num_kv_heads=1, head_dim=dim, v_head_dim=dim, dtype=BF16)


@pytest.mark.parametrize("arch", ["sm_90", "sm_80", "gfx942", "gfx950", "interpreter"])
def test_rows_of_a_problem_rise_to_one_that_serves_any(arch: str) -> None:
    for dim, gqa_ratio in itertools.product((16, 64, 80, 96, 128, 192, 256, 512), (1, 3, 4, 6, 8, 10, 16, 71)):
        *short, last = rows_of(arch, gqa_ratio, dim)
        assert last.max_rows == ANY_ROWS
        bounds = [row.max_rows for row in short]
        assert bounds == sorted(set(bounds))
        assert all(bound >= gqa_ratio for bound in bounds), "a bound that holds not even one token"
