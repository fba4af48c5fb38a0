"""The suite of random layers and steps, for which nothing was tuned: heads, head dims of K and of V, page sizes,
windows, lengths, eight-bit pages and latent ones.

A row whose share of the lower bound is far below those of its like, or that is slower than a peer, is a cliff.
"""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from rocm_attn.problem import UNLIMITED_WINDOW, KVEncoding, Problem, Scales
from rocm_lab.bench.batch_spec import BatchSpec
from rocm_lab.bench.choices import RANDOM
from rocm_lab.bench.layers import NAMED
from rocm_lab.bench.suites import SuiteCase
from rocm_lab.bench.work import work_of

COUNT = 100
_KV_HEADS = (1, 1, 2, 2, 3, 4, 4, 5, 6, 8, 8, 10, 12, 16)
_GQA_RATIOS = (1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 10, 12, 16, 20, 24, 32, 48, 64, 128)
_HEAD_DIMS = (16, 24, 32, 40, 48, 64, 64, 72, 80, 96, 112, 128, 128, 144, 160, 192, 224, 256, 320, 384, 512)
_PAGE_SIZES = (1, 2, 4, 8, 16, 16, 32, 64, 128)
_WINDOWS = (127, 511, 1023, 4095)
_MOST_Q_HEADS = 128
_LATENT_HEADS = (8, 16, 32, 64, 128)
# Shares of the layers whose V has other dims than K, of those with eight-bit pages, and of latent ones.
_OTHER_V, _CODED, _LATENT = 0.25, 0.15, 0.1
# Limits of one layer's K and V, and of its products: a case takes some milliseconds at most.
MOST_BYTES, MOST_FLOPS = 400 << 20, 4e11
# A mixed step keeps one decode and its two chunks.
_FEWEST_SEQS = 3

# New and stored tokens of each sequence.
Lengths = list[tuple[int, int]]


def random_cases(count: int, seed: int) -> list[SuiteCase]:
    """Returns the same cases for a seed: a larger count only adds cases."""
    return [_random_case(random.Random(f"{seed}/{number}")) for number in range(count)]


def _random_layer(chooser: random.Random) -> Problem:
    page_size = chooser.choice(_PAGE_SIZES)
    if chooser.random() < _LATENT:
        latent = NAMED["deepseek-v3-tp8"].problem(torch.bfloat16, page_size)
        return replace(latent, num_q_heads=chooser.choice(_LATENT_HEADS))
    num_kv_heads, head_dim = chooser.choice(_KV_HEADS), chooser.choice(_HEAD_DIMS)
    ratio = chooser.choice([ratio for ratio in _GQA_RATIOS if ratio * num_kv_heads <= _MOST_Q_HEADS])
    is_coded = chooser.random() < _CODED
    return Problem(
        ratio * num_kv_heads,
        num_kv_heads,
        head_dim,
        torch.bfloat16,
        page_size,
        v_head_dim=chooser.choice(_HEAD_DIMS) if chooser.random() < _OTHER_V else head_dim,
        scale=head_dim**-0.5,
        window_left=chooser.choice(_WINDOWS) if chooser.random() < 0.25 else UNLIMITED_WINDOW,
        kv_encoding=KVEncoding.E4M3FN if is_coded else KVEncoding.LIKE_Q,
        kv_scales=Scales.HEAD if is_coded else Scales.NONE,
    )


def _random_case(chooser: random.Random) -> SuiteCase:
    problem = _random_layer(chooser)
    kind = chooser.choices(list(_LENGTHS), weights=(7, 5, 3, 4, 2))[0]
    lengths = _LENGTHS[kind](chooser)
    while _is_too_large(problem, lengths):
        if len(lengths) > _FEWEST_SEQS:
            lengths = lengths[-max(_FEWEST_SEQS, len(lengths) // 2) :]  # chunks of a mixed step come last, and giants
        else:
            lengths = [(max(1, new // 2), stored // 2) for new, stored in lengths]
    new, kv = [each for each, _ in lengths], [sum(each) for each in lengths]
    step = f"{kind}, {len(lengths)} x {_span(new)} new of {_span(kv)}"
    return SuiteCase(problem, BatchSpec.of_lengths(lengths), RANDOM, step)


def _is_too_large(problem: Problem, lengths: Lengths) -> bool:
    pages = sum(-(-sum(each) // problem.page_size) for each in lengths)
    flops = work_of(problem, BatchSpec.of_lengths(lengths)).flops
    return pages * problem.page_format.page_bytes > MOST_BYTES or flops > MOST_FLOPS


def _decodes(chooser: random.Random) -> Lengths:
    num_seqs = _between(chooser, 1, 256)
    return [(1, kv_len - 1) for kv_len in _ragged(chooser, num_seqs, _between(chooser, 256, 32768))]


def _extends(chooser: random.Random) -> Lengths:
    num_seqs = chooser.randint(1, 8)
    new = _ragged(chooser, num_seqs, _between(chooser, 16, 2048))
    stored = _ragged(chooser, num_seqs, _between(chooser, 2, 16384)) if chooser.random() < 0.7 else [0] * num_seqs
    return list(zip(new, stored, strict=True))


def _verifies(chooser: random.Random) -> Lengths:
    new = chooser.randint(2, 8)
    return [(new, stored) for stored in _ragged(chooser, _between(chooser, 8, 128), _between(chooser, 256, 8192))]


def _mixed(chooser: random.Random) -> Lengths:
    decodes = _ragged(chooser, _between(chooser, 8, 96), _between(chooser, 256, 8192))
    chunks, stored = _ragged(chooser, 2, _between(chooser, 128, 1024)), chooser.choice((0, 512, 4096))
    return [*((1, kv_len - 1) for kv_len in decodes), *((new, stored) for new in chunks)]


def _giants(chooser: random.Random) -> Lengths:
    """Decodes of two long sequences among short ones."""
    short = _ragged(chooser, _between(chooser, 8, 128), _between(chooser, 16, 512))
    return [(1, kv_len - 1) for kv_len in (*short, *_ragged(chooser, 2, _between(chooser, 16384, 98304)))]


_LENGTHS: Mapping[str, Callable[[random.Random], Lengths]] = {
    "decode": _decodes,
    "extend": _extends,
    "verify": _verifies,
    "mixed": _mixed,
    "giants": _giants,
}


def _between(chooser: random.Random, low: int, high: int) -> int:
    """Draws a number with equal probability in each octave."""
    return round(math.exp(chooser.uniform(math.log(low), math.log(high))))


def _ragged(chooser: random.Random, count: int, mean: int) -> list[int]:
    """Returns lengths about a mean: alike, or up to ten times as short and twice as long."""
    spread = chooser.choice((0.0, 0.0, 0.5, 0.9))
    return [max(2, round(mean * (1 + spread * chooser.uniform(-1, 1)))) for _ in range(count)]


def _span(lengths: list[int]) -> str:
    return f"{min(lengths)}" if min(lengths) == max(lengths) else f"{min(lengths)}..{max(lengths)}"
