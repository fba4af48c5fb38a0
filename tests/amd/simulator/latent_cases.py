"""Runs of the kernels over latent pages on a simulated arch."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from rocm_attn.kernels.cache.page_format import Scales
from rocm_attn.kernels.tuning.latent_tiles import latent_decode_tiles, latent_extend_tiles, latent_segment_tiles
from tests.amd.kernels.attention_cases import Case, assert_served, build
from tests.amd.kernels.latent_cases import (
    run_latent_decode,
    run_latent_extend,
    run_latent_segment_decode,
    run_latent_segment_extend,
)
from tests.amd.kernels.segment_cases import assert_same_bits, last_tokens
from tests.amd.simulator.case import KernelCase, own_encoding
from tests.amd.simulator.large_steps import build_step

BF16, FP16 = torch.bfloat16, torch.float16
# A decode that programs share, an empty one, drafts, a chunk over a prefix, no new tokens, a padded tail.
STEP = Case(
    kv_len=[50, 0, 35, 20, 9],
    q_len=[1, 1, 3, 11, 0],
    heads=(20, 1),
    dims=(80, 64),
    page_size=8,
    dtype=BF16,
    tail=2,
    latent=True,
)


def run_latent_step(arch: str, case: Case, *, is_large: bool = False) -> None:
    """Runs a mixed step: decode of one new token, of two to eight, and extend of more."""
    tensors = build_step(case, is_large=is_large)
    heads = case.heads[0]
    shape: dict[str, Any] = {"dims": case.dims, "dtype": case.dtype, "is_coded": case.kv is not None}
    decode, few = (latent_decode_tiles(arch, num_rows=heads * n, **shape) for n in (1, 8))
    run_latent_extend(tensors, min_q_len=9, tiles=latent_extend_tiles(arch, **shape))
    run_latent_decode(tensors, fewest=2, most=8, tiles=few, compute_units=3)
    run_latent_decode(tensors, tiles=decode, compute_units=3)
    assert_served(tensors)


def run_latent_masked(arch: str, case: Case) -> None:
    """Runs a masked step, also of sequences with one new token."""
    tensors = build(replace(case, masked=True), torch.device("cpu"))
    tiles = latent_extend_tiles(arch, dims=case.dims, dtype=case.dtype, is_coded=case.kv is not None).of_masked_steps()
    run_latent_extend(tensors, tiles=tiles)
    assert_served(tensors)


def run_latent_segments(arch: str, case: Case) -> None:
    """Runs deterministic extend over all new tokens, then decode of the last ones."""
    extended = build(case, torch.device("cpu"))
    decoded = last_tokens(extended)
    tiles = replace(latent_segment_tiles(arch, dims=case.dims, dtype=case.dtype), segment_len=32)
    run_latent_segment_extend(extended, tiles=tiles)
    run_latent_segment_decode(decoded, tiles=tiles, compute_units=3)
    assert_served(extended)
    assert_served(decoded)
    assert_same_bits(decoded, extended)


def latent_cases(arch: str) -> list[KernelCase]:
    """Every latent kernel: above 4 GiB, and deterministic."""
    small = replace(STEP, kv_len=[20, 0, 9, 14, 3])
    segments = replace(STEP, kv_len=[70, 33], q_len=[3, 9])
    return [
        KernelCase("latent-above", arch, partial(run_latent_step, arch, small, is_large=True)),
        KernelCase("latent-segments", arch, partial(run_latent_segments, arch, segments)),
    ]


def more_latent_cases(arch: str) -> list[KernelCase]:
    """Both dtypes, windows, sinks, caps and gaps between rows, scales of layers and of tokens, masks."""
    scored = replace(STEP, dims=(40, 40), dtype=FP16, window_left=9, sinks=True, soft_cap=2.0, page_size=5, spread=True)
    coded = replace(STEP, kv=own_encoding(arch), scales=Scales.LAYER)
    by_token = replace(STEP, kv=own_encoding(arch), scales=Scales.TOKEN, heads=(6, 1))
    return [
        KernelCase("latent-below", arch, partial(run_latent_step, arch, STEP)),
        KernelCase("latent-scored", arch, partial(run_latent_step, arch, scored)),
        KernelCase("latent-codes", arch, partial(run_latent_step, arch, coded)),
        KernelCase("latent-codes_by_token", arch, partial(run_latent_step, arch, by_token)),
        KernelCase("latent-masked", arch, partial(run_latent_masked, arch, replace(STEP, window_left=9))),
    ]
