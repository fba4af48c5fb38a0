"""Every bound AITER kernel at every dtype, page size and head_dim that its row names, and with every score.

On a machine with AITER these are the claims of the capability table; on the stand-in they show that the checks work.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.errors import BadProblem, Unsupported
from rocm_attn.kernels.cache.page_format import Scales
from rocm_attn.machine.target import Target
from rocm_attn.problem import UNLIMITED_WINDOW, KVEncoding, PoolKind, Problem
from rocm_attn.providers.aiter.entries import ENTRIES
from rocm_attn.providers.contract import KernelEntry, LayerKernel, Limits, PoolSize
from rocm_attn.providers.select import Selection, select
from tests.amd.aiter.eight_bit_world import EightBitWorld, eight_bit_kinds
from tests.amd.aiter.one_layer import STEPS, OneLayer
from tests.amd.graphs.small_models import same, serve
from tests.amd.worlds.world import page_zero_is_zero

MAX_KV_LEN = 640
# New tokens of three sequences per kind of step. They cover tiles, pages, partitions of 256 keys, no tokens and pads.
STEPS_OF_KIND = {
    StepKind.PREFILL: ([70, 2, 257],),
    StepKind.DECODE: ([255, 511, 63], [1, 1, 1], [1, 1, 1], [1, 1, 1]),
    StepKind.EXTEND: ([5, 129, 17], [2, 3, 4], [16, 255, 2]),
    StepKind.MIXED: ([5, 300, 17], [1, 9, 1], [64, 1, 0], [1, 0, 5]),
    # Among them are sequences with fewer keys than rows, with one new token, and with none.
    StepKind.VERIFY: ([255, 511, 0], [4, 3, 2], [2, 2, 1], [0, 1, 4], [4, 4, 4]),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel at one problem."""

    entry: KernelEntry
    problem: Problem
    what: str

    def __str__(self) -> str:
        dtype = str(self.problem.dtype).removeprefix("torch.")
        return f"{self.entry.name}-{self.entry.kind.value}-{dtype}-{self.what}"


def cases(target: Target) -> Iterator[Case]:
    """Yields every case that the table says is served on the target."""
    for entry in (entry for entry in ENTRIES if not entry.not_bound):
        for dtype in entry.limits.dtypes:
            for problem, what in _encoded(entry.limits, dtype, target.arch):
                if not entry.refusals(problem, target) and _binds(entry, problem, target):
                    yield Case(entry, problem, what)


def _encoded(limits: Limits, dtype: torch.dtype, arch: str) -> Iterator[tuple[Problem, str]]:
    """Yields problems in every encoding and kind of scale: dims, page sizes, heads; scores with the first kind only."""
    kinds, scale_values = (
        eight_bit_kinds(limits.encodings, arch),
        [each for each in limits.scales if each is not Scales.NONE],
    )
    for problem, what in _problems(limits, dtype):
        if KVEncoding.LIKE_Q in limits.encodings:
            yield problem, what
        is_plain = any(word in what for word in ("pages of", "heads"))
        for encoding in kinds if is_plain else kinds[:1]:
            for scales in scale_values if is_plain else scale_values[:1]:
                with suppress(BadProblem):  # pages that are too small for vectors of 16
                    coded = replace(problem, kv_encoding=encoding, kv_scales=scales)
                    yield coded, f"{what}-{encoding.name} {scales.name}"


def _problems(limits: Limits, dtype: torch.dtype) -> Iterator[tuple[Problem, str]]:
    if PoolKind.LATENT in limits.pools:
        for heads in (8, 16, 24, 128):
            yield Problem(heads, 1, 576, dtype, 1, v_head_dim=512, scale=0.05, pool=PoolKind.LATENT), f"{heads} heads"
        return
    for pool in limits.pools:
        layout = "" if pool is PoolKind.SPLIT else "-vectorised"
        for problem, what in _problems_over_pages(limits, dtype):
            yield replace(problem, pool=pool), f"{what}{layout}"


def _problems_over_pages(limits: Limits, dtype: torch.dtype) -> Iterator[tuple[Problem, str]]:
    """Yields problems over a linear pool, each with its name."""
    for head_dim, v_head_dim in limits.exact_dims:
        for page_size in limits.page_sizes or (16,):
            problem = Problem(8, 2, head_dim, dtype, page_size, v_head_dim=v_head_dim, scale=0.11)
            yield problem, f"{head_dim}x{v_head_dim}-pages of {page_size}"
    head_dim = limits.exact_dims[0][0]
    page_size = 16 if 16 in (limits.page_sizes or (16,)) else limits.page_sizes[0]
    base = Problem(8, 2, head_dim, dtype, page_size, v_head_dim=head_dim, scale=0.11)
    yield replace(base, window_left=100), "window"
    yield replace(base, window_left=20, has_sinks=True), "window and sinks"
    yield replace(base, has_sinks=True), "sinks"
    yield replace(base, logits_soft_cap=2.0), "soft cap"
    yield replace(base, has_alibi_slopes=True), "slopes"
    yield replace(base, window_right=UNLIMITED_WINDOW), "not causal"
    yield replace(base, num_q_heads=2), "as many KV heads"
    yield replace(base, num_q_heads=16, num_kv_heads=1), "16 heads on one"


def _binds(entry: KernelEntry, problem: Problem, target: Target) -> bool:
    try:
        entry.bind(problem, target, PoolSize(100, MAX_KV_LEN, 4))
    except LookupError:
        return False
    return True


def selection_of(case: Case, target: Target, others: str) -> Selection:
    """Returns the case's kernel for its kind of step, and AITER's first kernels or torch's (`others`) for the rest."""
    kernel = LayerKernel(case.entry, case.entry.bind(case.problem, target, PoolSize(100, MAX_KV_LEN, 8)))
    kernels = dict.fromkeys(StepKind, kernel)
    for provider in ("torch", "aiter", others):
        with suppress(Unsupported):
            kernels.update(select(case.problem, target, provider).kernels)
    kernels[case.entry.kind] = kernel
    if case.entry.kind is not StepKind.PREFILL:
        kernels.pop(StepKind.PREFILL, None)
    return Selection(case.problem, target, kernels, ())


def largest_error(case: Case, device: torch.device, selection: Selection) -> float:
    """Returns the largest error of eager steps against the reference.

    Raises AssertionError if the error is above the bound or a pad is not zero.
    """
    serving = EightBitWorld.build(
        [case.problem],
        device,
        "auto",
        num_pages=2 + 4 * -(-MAX_KV_LEN // case.problem.page_size),
        max_kv_len=MAX_KV_LEN,
        target=selection.target,
        selections=[selection],
    )
    serving.set_scales()
    serving.served(*STEPS_OF_KIND[case.entry.kind], pad_to=4)
    assert page_zero_is_zero(serving)
    return serving.largest_error


def graphs_equal_eager(case: Case, device: torch.device, selection: Selection) -> Sequence[str]:
    """Serves the steps with graphs and eagerly, and returns the captures.

    Raises AssertionError if the results differ or a graph is refused.
    """
    graphed, eager = (OneLayer.build(case.problem, device, selection.target, [selection]) for _ in range(2))
    runner = StepRunner(graphed.runtime, graphed.forward, recorder_for(device))
    replayed = serve(runner, graphed.runtime, STEPS)
    assert runner.counters.graphs_off == ""
    assert runner.counters.replays == len(STEPS)
    assert same(replayed, serve(StepRunner(eager.runtime, eager.forward, None), eager.runtime, STEPS))
    return runner.capture_report().lines()
