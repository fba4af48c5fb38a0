"""Runs of AITER's own kernels under the provider, each at one problem: prompts, decodes, chunks, padded steps.

The named kernel serves the kinds of step in its rows, torch the others. Pages start as NaN, q, k and v of padded tokens
are NaN, and every output is compared with the formula.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.machine.target import Target
from rocm_attn.problem import UNLIMITED_WINDOW, PoolKind, Problem, Scales
from rocm_attn.providers.aiter import library
from rocm_attn.providers.aiter.entries import ENTRIES
from rocm_attn.providers.contract import KernelEntry, PoolSize
from tests.amd.aiter.serving import in_eight_bits
from tests.amd.aiter_source.serving import SourceWorld, selection_of
from tests.amd.worlds.world import page_zero_is_zero

UNIFIED, UNIFIED_VECTORISED = "aiter.unified_attention", "aiter.unified_attention[vectorised]"
GLUON, GLUON_VERIFY = "aiter.pa_decode_gluon", "aiter.pa_decode_gluon[verify]"
MLA_DECODE, MLA_PREFILL = "aiter.mla_decode_fwd", "aiter.mla_prefill_fwd"
MLA_VERIFY = "aiter.mla_decode_fwd[verify]"

BF16, FP16 = torch.bfloat16, torch.float16
_CPU = torch.device("cpu")
_MAX_NUM_SEQS = 8
_LEAST_MAX_KV_LEN = 1024

# Windows below, at and above pages of 16 and parts of 256 keys, and none.
WINDOWS = (0, 1, 2, 15, 16, 127, 128, 255, 256, 511, UNLIMITED_WINDOW)


@dataclass(frozen=True, slots=True)
class SourceCase:
    """A kernel at one problem.

    kernel:     name of its rows
    steps:      new tokens of each sequence, step by step
    planted:    places of each sequence whose keys dominate; None: random keys
    kinds:      the kinds of step in which it is used, among those that its rows serve
    far_logit:  approximate logits of keys that are not planted
    eight_bits: the scales of K and V in the arch's 8-bit dtype; NONE: K and V have q's dtype
    """

    name: str
    kernel: str
    problem: Problem
    steps: tuple[tuple[int, ...], ...]
    planted: tuple[frozenset[int], ...] | None = None
    kinds: tuple[StepKind, ...] = tuple(StepKind)
    far_logit: float = 0.0
    eight_bits: Scales = Scales.NONE

    def __str__(self) -> str:
        return f"{self.kernel.removeprefix('aiter.')}-{self.name}"

    def outcome(self, target: Target) -> Outcome:
        """Runs the case. The target's AITER is imported from its checkout, and a driver for its arch is active."""
        if self.eight_bits is not Scales.NONE:
            problem = in_eight_bits(self.problem, self.eight_bits, target.arch)
            return replace(self, problem=problem, eight_bits=Scales.NONE).outcome(target)
        complaint = library.unavailable().get(self.kernel)
        if complaint:
            return Outcome(Verdict.REFUSED, complaint)
        rows = [row for row in ENTRIES if row.name == self.kernel and row.kind in self.kinds]
        limits = [refusal for row in rows for refusal in row.limits.refusals(self.problem, target, self._pool())]
        if limits or not rows:
            return Outcome(Verdict.REFUSED, "; ".join(limits) or f"no row is called {self.kernel}")
        faults = [refusal for row in rows for refusal in row.refusals(self.problem, target, self._pool())]
        try:
            error = self._largest_error(rows, target)
        except Exception as caught:  # any exception is the kernel's result; the other cases still run
            what = f"{type(caught).__name__}: {caught}"
            return Outcome(Verdict.RIGHTLY_REFUSED, f"{faults[0]}: {what}") if faults else Outcome(Verdict.WRONG, what)
        if faults:
            return Outcome(Verdict.WRONG, f"it is right, and refused: {faults[0]}")
        return Outcome(Verdict.RIGHT, "", error)

    def _pool(self) -> PoolSize:
        max_kv_len = max(_LEAST_MAX_KV_LEN, *(sum(q_lens) for q_lens in zip(*self.steps, strict=True)))
        num_pages = 2 + _MAX_NUM_SEQS * -(-max_kv_len // self.problem.page_size)
        return PoolSize(num_pages, max_kv_len, _MAX_NUM_SEQS)

    def _largest_error(self, rows: Sequence[KernelEntry], target: Target) -> float:
        world = SourceWorld.build(
            [self.problem],
            _CPU,
            "auto",
            num_pages=self._pool().num_pages,
            max_num_seqs=_MAX_NUM_SEQS,
            max_kv_len=self._pool().max_kv_len,
            target=target,
            selections=[selection_of(rows, self.problem, target, self._pool())],
        )
        world.set_scales()
        world.planted, world.far_logit = self.planted, self.far_logit
        requests = [world.admit() for _ in self.steps[0]]
        for q_len in self.steps:
            world.step(requests, q_len, pad_to=len(requests) + 1)
        assert world.attended, "no step was AITER's"
        assert page_zero_is_zero(world)
        return world.largest_error


class Verdict(enum.Enum):
    """The result of a case. In all but the last, the kernel and the provider do what they should."""

    RIGHT = "right"
    REFUSED = "refused: the checkout has no such function, or it lacks a parameter"
    RIGHTLY_REFUSED = "refused as a fault of the release, and wrong when it is run"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A case's verdict and its reason. error: the largest error of a case that is right"""

    verdict: Verdict
    what: str
    error: float = 0.0


def _problem(
    page_size: int = 16,
    *,
    heads: tuple[int, int] = (8, 2),
    dim: int = 64,
    dtype: torch.dtype = BF16,
    pool: PoolKind = PoolKind.SPLIT,
) -> Problem:
    return Problem(*heads, dim, dtype, page_size, pool=pool)


# An extend, a decode, a mixed and another decode step, across pages and tiles of 64 keys.
_ALL_KINDS = ((5, 70, 17), (1, 1, 1), (1, 9, 0), (3, 2, 4), (1, 1, 1))
# Sequences above 512 keys, which are split into up to 16 segments; torch attends in the prompts.
_LONG = ((260, 2, 600), (1, 1, 1), (1, 20, 1))
_SPLIT = (StepKind.DECODE, StepKind.MIXED)
_NONE: tuple[frozenset[int], ...] = (frozenset(),) * 3


def _unified_cases() -> list[SourceCase]:
    base = _problem()
    slopes = replace(base, has_alibi_slopes=True)
    window = replace(base, window_left=20)
    problems = {
        "plain": base,
        "dim128-page32": _problem(32, dim=128),
        "dim128-page128": _problem(128, dim=128),
        "dim256-page64": _problem(64, dim=256),
        "dim256-page128": _problem(128, dim=256),
        "dim512-page128": _problem(128, dim=512),
        "fp16": _problem(dtype=FP16),
        "heads64x1": _problem(heads=(64, 1)),
        "heads6x2": _problem(heads=(6, 2)),
        "sinks": replace(base, has_sinks=True),
        "soft_cap": replace(base, logits_soft_cap=2.0),
        "slopes": slopes,
        "soft_cap-slopes": replace(slopes, logits_soft_cap=2.0),
        "window-sinks-soft_cap": replace(window, has_sinks=True, logits_soft_cap=3.0),
        "window-slopes": replace(window, has_alibi_slopes=True),
    }
    vectorised = {
        "plain": base,
        "dim128-page64": _problem(64, dim=128),
        "dim256-page16": _problem(dim=256),
        "window-sinks": replace(window, has_sinks=True),
        "soft_cap-slopes": replace(slopes, logits_soft_cap=2.0),
    }
    long = {
        "long": base,
        "long-sinks-soft_cap": replace(base, has_sinks=True, logits_soft_cap=2.0),
        "long-slopes": slopes,
        "long-dim128-page64": _problem(64, dim=128),
        "long-window": replace(base, window_left=100),
    }
    return [
        *(SourceCase(name, UNIFIED, problem, _ALL_KINDS) for name, problem in problems.items()),
        *(SourceCase(name, UNIFIED, problem, _LONG, kinds=_SPLIT) for name, problem in long.items()),
        *(_unified_window(left) for left in WINDOWS if left != UNLIMITED_WINDOW),
        *(
            # A tile without visible keys for a query must not hide keys whose logits are all far below zero.
            SourceCase(
                f"{name}-far_below", UNIFIED, problem, ((5, 70, 17), (30, 9, 40), (1, 40, 1)), _NONE, far_logit=-150.0
            )
            for name, problem in (("window", window), ("plain", base))
        ),
        SourceCase("long-far_below", UNIFIED, base, _LONG, _NONE, kinds=_SPLIT, far_logit=-150.0),
        # Sequences with at least 256 new tokens use tiles of 128 rows.
        SourceCase("chunk", UNIFIED, base, ((300,),)),
        *(SourceCase(name, UNIFIED_VECTORISED, _vectorised(each), _ALL_KINDS) for name, each in vectorised.items()),
        SourceCase("long", UNIFIED_VECTORISED, _vectorised(base), _LONG, kinds=_SPLIT),
    ]


def _vectorised(problem: Problem) -> Problem:
    return replace(problem, pool=PoolKind.VECTORIZED)


def _unified_window(window: int) -> SourceCase:
    """Returns a case with one planted key per sequence.

    The first tokens of a chunk still see it, later ones do not, and it is the last key that decodes see.
    """
    prompts = (window + 2, window + 9, window + 9)
    # The first 3 of the chunk's 5 tokens see the key in the first two sequences. In the third sequence it is the last
    # key that the sequence's decode sees.
    planted = tuple(frozenset({place}) for place in (4, 11, 14))
    steps = (prompts, (5, 5, 5), (1, 1, 1), (1, 1, 1))
    kinds = (StepKind.DECODE, StepKind.EXTEND, StepKind.MIXED)
    return SourceCase(f"window{window}", UNIFIED, replace(_problem(), window_left=window), steps, planted, kinds)


# Head dims of pa_decode_gluon that AITER's own tests leave out.
_OTHER_DIMS = (64, 256)


def _gluon_cases() -> list[SourceCase]:
    base = _problem(heads=(16, 2), dim=128, pool=PoolKind.VECTORIZED)
    steps = ((255, 511, 63), (1, 1, 1), (1, 1, 1), (1, 1, 1))
    problems = {
        "plain": base,
        "fp16": replace(base, dtype=FP16),
        "page64": replace(base, page_size=64),
        "page1024": replace(base, page_size=1024),
        "heads8x1": replace(base, num_q_heads=8, num_kv_heads=1),
        "heads32x1": replace(base, num_q_heads=32, num_kv_heads=1),
        "heads48x1": replace(base, num_q_heads=48, num_kv_heads=1),
        "heads64x1": replace(base, num_q_heads=64, num_kv_heads=1),
        "heads6x2": replace(base, num_q_heads=6),
        "scale": replace(base, scale=0.11),
        "sinks": replace(base, has_sinks=True),
        "window_sinks": replace(base, window_left=100, has_sinks=True),
        "window_sinks-heads8x1": replace(base, num_q_heads=8, num_kv_heads=1, window_left=300, has_sinks=True),
    }
    for dim in _OTHER_DIMS:
        narrow = replace(base, head_dim=dim, v_head_dim=dim, scale=dim**-0.5)
        problems |= {
            f"dim{dim}": narrow,
            f"dim{dim}-page1024": replace(narrow, page_size=1024),
            f"dim{dim}-heads64x1": replace(narrow, num_q_heads=64, num_kv_heads=1, page_size=64),
            f"dim{dim}-window_sinks": replace(narrow, window_left=100, has_sinks=True),
            f"dim{dim}-window_sinks-heads64x1": replace(
                narrow, num_q_heads=64, num_kv_heads=1, window_left=300, has_sinks=True
            ),
        }
    cases = [_past_2048_keys(SourceCase(name, GLUON, problem, steps)) for name, problem in problems.items()]
    cases += [_gluon_window(window, base, "") for window in WINDOWS]
    # Layers with one KV head have a kernel of their own.
    one = replace(base, num_q_heads=8, num_kv_heads=1, page_size=64)
    cases += [_gluon_window(window, one, "-heads8x1-page64") for window in (0, 15, 127, 256, UNLIMITED_WINDOW)]
    return cases


def _past_2048_keys(case: SourceCase) -> SourceCase:
    """Returns the case; on pages of 1024 tokens with a sequence whose key past the 2048th dominates."""
    if case.problem.page_size != 1024:
        return case
    planted = tuple(frozenset({place}) for place in (2090, 300, 5))
    return replace(case, steps=((2100, 511, 63), (1, 1, 1)), planted=planted)


def _gluon_window(window: int, problem: Problem, name: str) -> SourceCase:
    """Returns decodes at several lengths, each twice: the window's last key dominates, then the first key past it."""
    lengths = (20, 270, 600)
    planted = []
    for length in lengths:
        last = 0 if window == UNLIMITED_WINDOW else max(0, length - 1 - window)
        planted += [frozenset({last}), frozenset({last - 1} & set(range(length)))]
    prompts = tuple(length - 1 for length in lengths for _ in range(2))
    # One more sequence begins here: its first token is its only key.
    return SourceCase(
        f"window{window if window != UNLIMITED_WINDOW else '_unlimited'}{name}",
        GLUON,
        replace(problem, window_left=window),
        ((*prompts, 0), (1,) * 7),
        (*planted, frozenset()),
    )


def _latent(num_heads: int) -> Problem:
    return Problem(num_heads, 1, 576, BF16, 1, v_head_dim=512, scale=0.05, pool=PoolKind.LATENT)


_LATENT_DECODES = [
    SourceCase(f"heads{heads}", MLA_DECODE, _latent(heads), ((5, 70, 200), (1, 1, 1), (1, 1, 1)))
    for heads in (8, 16, 24, 128)
] + [
    SourceCase(f"heads{heads}", MLA_VERIFY, _latent(heads), ((5, 70, 200), (4, 3, 2), (2, 2, 1), (0, 1, 4)))
    for heads in (8, 16)
]


def _eight_bit_cases() -> list[SourceCase]:
    """Returns cases for the differences from other pages: the loaded dtype, vectors of 16 elements, and scales."""
    base, wide = _problem(), _problem(32, dim=128)
    gluon = _problem(heads=(16, 2), dim=128, pool=PoolKind.VECTORIZED)
    decodes = ((255, 511, 63), (1, 1, 1), (1, 1, 1))
    gluons = {
        "plain": gluon,
        "fp16": replace(gluon, dtype=FP16),
        "page64": replace(gluon, page_size=64),
        "page1024": replace(gluon, page_size=1024),
        "heads8x1": replace(gluon, num_q_heads=8, num_kv_heads=1),
        "window_sinks": replace(gluon, window_left=100, has_sinks=True),
        "window_sinks-heads8x1": replace(gluon, num_q_heads=8, num_kv_heads=1, window_left=300, has_sinks=True),
    }
    cases = [
        *(SourceCase(name, UNIFIED, each, _ALL_KINDS) for name, each in (("plain", base), ("dim128-page32", wide))),
        SourceCase("window-sinks", UNIFIED, replace(base, window_left=20, has_sinks=True), _ALL_KINDS),
        SourceCase("fp16", UNIFIED, replace(base, dtype=FP16), _ALL_KINDS),
        # Sequences that are not split, and such that are, in tiles whose 2-byte elements do not fit gfx942's LDS.
        *(
            SourceCase(f"dim512-page{size}-{name}", UNIFIED, _problem(size, dim=512), steps, kinds=(StepKind.DECODE,))
            for size in (64, 128)
            for name, steps in (("short", ((70, 200, 17), (1, 1, 1))), ("long", ((260, 2, 600), (1, 1, 1))))
        ),
        SourceCase("long", UNIFIED, base, _LONG, kinds=_SPLIT),
        SourceCase("plain", UNIFIED_VECTORISED, _vectorised(base), _ALL_KINDS),
        SourceCase("dim128-page64", UNIFIED_VECTORISED, _vectorised(_problem(64, dim=128)), _ALL_KINDS),
        *(SourceCase(name, GLUON, problem, decodes) for name, problem in gluons.items()),
    ]
    for dim in _OTHER_DIMS:
        narrow = replace(gluon, head_dim=dim, v_head_dim=dim, scale=dim**-0.5)
        cases.append(SourceCase(f"dim{dim}", GLUON, narrow, decodes))
        cases.append(SourceCase(f"dim{dim}-page1024", GLUON, replace(narrow, page_size=1024), decodes))
        cases.append(SourceCase(f"dim{dim}-window", GLUON, replace(narrow, window_left=100), decodes))
    # Each of its kernels, with a scale of each head and of each token. float16 has the least room for them.
    own_kernels = ("fp16", "page64", "page1024", "window_sinks", "window_sinks-heads8x1")
    scaled = [
        SourceCase(f"{name}-{scales.name.lower()}", GLUON, gluons[name], decodes, eight_bits=scales)
        for name in own_kernels
        for scales in (Scales.HEAD, Scales.TOKEN)
    ]
    wide_gluon = replace(gluon, head_dim=256, v_head_dim=256, page_size=64, scale=256**-0.5)
    scaled.append(SourceCase("dim256-token", GLUON, wide_gluon, decodes, eight_bits=Scales.TOKEN))
    cases = [replace(case, eight_bits=Scales.LAYER) for case in cases] + scaled
    return [_past_2048_keys(replace(case, name=f"{case.name}-eight_bits")) for case in cases]


# Prompts, then verify steps: alike and uneven, with fewer keys than rows, and without new tokens.
_VERIFIES = ((255, 1022, 0), (4, 3, 2), (2, 2, 1), (0, 1, 4), (4, 4, 4))


def _verify_cases() -> list[SourceCase]:
    """Returns cases whose parts end at blocks of 256 keys, and such in which the keys at such an end dominate."""
    base = _problem(heads=(16, 2), dim=128, pool=PoolKind.VECTORIZED)
    problems = {
        "plain": base,
        "fp16": replace(base, dtype=FP16),
        "page64": replace(base, page_size=64),
        "heads8x1": replace(base, num_q_heads=8, num_kv_heads=1),
        "heads16x1": replace(base, num_q_heads=16, num_kv_heads=1),
        "heads6x2": replace(base, num_q_heads=6),
        "sinks": replace(base, has_sinks=True),
        "window_sinks": replace(base, window_left=100, has_sinks=True),
        "window_sinks-heads8x1": replace(base, num_q_heads=8, num_kv_heads=1, window_left=300, has_sinks=True),
        "dim64": replace(base, head_dim=64, v_head_dim=64),
        "dim256-page64": replace(base, head_dim=256, v_head_dim=256, page_size=64),
    }
    cases = [SourceCase(name, GLUON_VERIFY, problem, _VERIFIES) for name, problem in problems.items()]
    cases += [
        SourceCase(
            f"{name}-{scales.name.lower()}-eight_bits", GLUON_VERIFY, problems[name], _VERIFIES, eight_bits=scales
        )
        for name in ("plain", "page64", "window_sinks")
        for scales in (Scales.LAYER, Scales.HEAD, Scales.TOKEN)
    ]
    # A sequence of 1024 keys in four parts or eight. Its first query sees key 1020 last.
    ends = tuple(frozenset({place}) for place in (253, 254, 255, 256, 1020))
    prompts = ((1020,) * len(ends), (4,) * len(ends))
    cases.append(SourceCase("ends", GLUON_VERIFY, base, prompts, ends))
    cases.append(SourceCase("ends-heads8x1", GLUON_VERIFY, problems["heads8x1"], prompts, ends))
    return cases + [_verify_window(left) for left in WINDOWS if left != UNLIMITED_WINDOW]


def _verify_window(window: int) -> SourceCase:
    """Returns a verify step of which each query is the last one that sees the key of one sequence."""
    prompts = tuple(window + 5 + query for query in range(4))
    planted = tuple(frozenset({5 + 2 * query}) for query in range(4))
    return SourceCase(
        f"window{window}",
        GLUON_VERIFY,
        replace(_problem(heads=(16, 2), dim=128, pool=PoolKind.VECTORIZED), window_left=window),
        (prompts, (4,) * 4),
        planted,
    )


CASES = (*_unified_cases(), *_gluon_cases(), *_verify_cases(), *_LATENT_DECODES, *_eight_bit_cases())

# Only the wrapper of mla_prefill_fwd is Python. None of it runs on a device here.
WRAPPERS = tuple(SourceCase(f"heads{heads}", MLA_PREFILL, _latent(heads), _ALL_KINDS) for heads in (16, 24))

# Triton's interpreter supports no Gluon and computes bfloat16 wrongly.
INTERPRETED = tuple(
    replace(case, problem=replace(case.problem, dtype=FP16))
    for case in CASES
    if case.kernel in (UNIFIED, UNIFIED_VECTORISED) and case.problem.dtype == BF16 and case.eight_bits is Scales.NONE
)
