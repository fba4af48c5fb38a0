"""Named layers and steps, as models have them, to measure changes of the kernels on."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from rocm_attn.errors import BadSetting
from rocm_attn.problem import KVEncoding, Problem, Scales
from rocm_lab.bench.batch_spec import BatchSpec
from rocm_lab.bench.choices import ALL_SUITES, SUITES
from rocm_lab.bench.layers import NAMED, LayerSizes, name_of

_PAGE_SIZE, _DTYPE = 16, torch.bfloat16
_CAP = 50.0


@dataclass(frozen=True, slots=True)
class SuiteCase:
    """A layer and a step of it.

    suite: its suite; empty if it was asked for by itself
    step:  the step in words; empty: as the batch is written
    """

    problem: Problem
    batch: BatchSpec
    suite: str = ""
    step: str = ""

    @property
    def name(self) -> str:
        """The names of layer and step."""
        return f"{name_of(self.problem)}: {self.step or self.batch}"


def suite(name: str) -> list[SuiteCase]:
    """Returns the cases of a suite, or of all. Raises BadSetting."""
    if name == ALL_SUITES:
        return [case for each in SUITES for case in suite(each)]
    if name not in _MAKERS:
        raise BadSetting(f"suite {name!r} is not known; choose {ALL_SUITES} or one of {', '.join(SUITES)}")
    return [replace(case, suite=name) for case in _MAKERS[name]()]


_FEW_TILES = ((12, 4, 64), (24, 4, 128), (40, 4, 128), (16, 1, 128))
_ODD_DIMS = ((32, 32, 96), (32, 8, 80), (64, 8, 192))


def ragged_chunks() -> BatchSpec:
    """Returns twelve chunks of 17 to 600 tokens over 100 to 6,000 stored ones."""
    chooser = random.Random(5)
    new = [chooser.choice((17, 64, 130, 300, 600)) for _ in range(12)]
    return BatchSpec.of_lengths((q_len, chooser.randrange(100, 6000)) for q_len in new)


def _chunks_of(layouts: Sequence[tuple[int, int, int]]) -> Iterator[SuiteCase]:
    for heads in layouts:
        yield _case(LayerSizes.plain(*heads), "1x777+5001")
        yield SuiteCase(LayerSizes.plain(*heads).problem(_DTYPE, _PAGE_SIZE), ragged_chunks(), step="12 ragged chunks")


def _verify() -> Iterator[SuiteCase]:
    for heads in (*_FEW_TILES, *_ODD_DIMS):
        yield _case(LayerSizes.plain(*heads), "64x5+2500")


def _mixed() -> Iterator[SuiteCase]:
    for heads in (*_FEW_TILES, *_ODD_DIMS):
        yield _case(LayerSizes.plain(*heads), "31d4k+2x700+2300")


def _chunks() -> Iterator[SuiteCase]:
    for batch in ("1x2k", "1x2k+6144", "8x512+4k", "1x2k+30720"):
        yield _case(NAMED["llama-8b"], batch)
    yield _case(NAMED["llama-70b"], "1x2k+30720")
    for batch in ("1x4k", "1x2k+6144"):
        yield _case(LayerSizes(128, 128, 192, 128), batch)


def _soft_cap() -> Iterator[SuiteCase]:
    for name in ("llama-8b", "gemma-256"):
        plain = _case(NAMED[name], "1x2k+6144")
        yield plain
        yield _with(plain, logits_soft_cap=_CAP)


def _ranges() -> Iterator[SuiteCase]:
    """Layers whose tokens see a range of keys: chunks (Llama 4), windows and images (Gemma 3)."""
    for batch in ("1x16k", "1x2k+14k", "31d8k+1x2k+7k"):
        yield _with(_case(LayerSizes.plain(40, 8, 128), batch), chunk=8192)
    for sizes in (LayerSizes.plain(32, 16, 128), NAMED["gemma-256"]):
        for batch in ("1x4k", "4x1k", "1x512+3500"):
            yield _with(_case(sizes, batch), window_left=1023)
        yield _with(_case(sizes, "1x4k"), window_left=1023, custom_mask=True)
    for name in ("llama-8b", "gemma-256"):
        for batch in ("1x4k", "1x2k+6144"):
            plain = _case(NAMED[name], batch)
            yield from (plain, _with(plain, custom_mask=True))


def _short() -> Iterator[SuiteCase]:
    """Steps of few keys, whose time is that of launches, merges and the first loads."""
    for name in ("llama-8b", "llama-70b-tp8", "gpt-oss", "gemma-256"):
        for batch in ("1d100", "8d500", "1x5+200", "16x5+500", "1x100", "4x32+500", "31d500+1x200+300"):
            yield _case(NAMED[name], batch)


def _eight_bits() -> Iterator[SuiteCase]:
    """K and V in q's dtype, and in eight bits with a scale for the layer or for each token."""
    kinds = ((KVEncoding.LIKE_Q, Scales.NONE), (KVEncoding.E4M3FN, Scales.LAYER), (KVEncoding.E4M3FN, Scales.TOKEN))
    for heads in ((32, 8, 128), (64, 8, 64)):
        for batch in ("64d4k", "1x2k+6144", "64x5+2500"):
            for encoding, scales in kinds:
                yield _with(_case(LayerSizes.plain(*heads), batch), kv_encoding=encoding, kv_scales=scales)


def _with(case: SuiteCase, **fields: Any) -> SuiteCase:
    return replace(case, problem=replace(case.problem, **fields))


def _decode() -> Iterator[SuiteCase]:
    for batch in ("1d8k", "1d128k", "16d4k", "64d4k", "256d2k", "128d8k"):
        yield _case(NAMED["llama-8b"], batch)
    for name, batches in (
        ("llama-70b", ("16d4k", "64d4k")),
        ("llama-70b-tp8", ("64d4k", "256d2k")),
        ("gpt-oss", ("64d4k",)),
        ("gemma-256", ("64d4k",)),
        ("deepseek-v3-tp8", ("32d4k", "128d4k")),
    ):
        for batch in batches:
            yield _case(NAMED[name], batch, page_size=64 if name.startswith("deepseek") else _PAGE_SIZE)


def _decode_192() -> Iterator[SuiteCase]:
    for batch in ("16d4k", "64d4k"):
        yield _case(LayerSizes.plain(64, 8, 192), batch)


def _page_sizes() -> Iterator[SuiteCase]:
    for name in ("llama-70b", "llama-70b-tp8"):
        for batch in ("16d4k", "64d4k"):
            for page_size in (8, 16, 32):
                yield _case(NAMED[name], batch, page_size=page_size)


def _case(sizes: LayerSizes, batch: str, *, page_size: int = _PAGE_SIZE) -> SuiteCase:
    return SuiteCase(sizes.problem(_DTYPE, page_size), BatchSpec.parse(batch))


_MAKERS: Mapping[str, Callable[[], Iterator[SuiteCase]]] = {
    "few-tiles": partial(_chunks_of, _FEW_TILES),
    "odd-dims": partial(_chunks_of, _ODD_DIMS),
    "verify": _verify,
    "mixed": _mixed,
    "chunks": _chunks,
    "soft-cap": _soft_cap,
    "ranges": _ranges,
    "short": _short,
    "eight-bits": _eight_bits,
    "decode": _decode,
    "decode-192": _decode_192,
    "page-sizes": _page_sizes,
}
