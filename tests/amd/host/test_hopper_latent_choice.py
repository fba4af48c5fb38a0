"""The choice of decode over latent pages for Hopper, and the part of a step that it serves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.kernels.latent.limits import ANY_TOKENS
from rocm_attn.machine.releases import Releases
from rocm_attn.machine.target import Target, known_target
from rocm_attn.problem import UNLIMITED_WINDOW, PoolKind, Problem
from rocm_attn.providers.contract import OWN_POOL, SMALLEST_POOL, PoolTerms
from rocm_attn.providers.mixed import TritonMixed
from rocm_attn.providers.select import select
from rocm_attn.providers.triton_hopper import TRITONS
from rocm_attn.providers.triton_hopper_latent import HopperLatentDecode
from rocm_attn.providers.triton_latent import LatentDecode

# DeepSeek-V3's layer.
LAYER = Problem(128, 1, 576, torch.bfloat16, v_head_dim=512, page_size=64, scale=192**-0.5, pool=PoolKind.LATENT)
HOPPER = replace(known_target("sm_90"), releases=Releases(triton=TRITONS[0]))
KINDS = (StepKind.DECODE, StepKind.EXTEND, StepKind.MIXED)


def names(problem: Problem, target: Target = HOPPER, terms: PoolTerms = OWN_POOL) -> tuple[str, ...]:
    """Returns names of the kernels of each kind, without their provider."""
    selection = select(problem, target, "triton", pool=replace(SMALLEST_POOL, terms=terms))
    return tuple(selection.kernel(kind).entry.name.removeprefix("triton.") for kind in KINDS)


OF_HOPPER = ("hopper_latent_decode", "hopper_latent_extend", "hopper_latent_extend+decode")
PLAIN = ("latent_decode", "latent_extend", "latent_extend+decode")


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"num_q_heads": 17},
        {"page_size": 1, "dtype": torch.float16},
        {"wants_lse": True},
        {"window_right": UNLIMITED_WINDOW},
    ],
    ids=str,
)
def test_it_serves_rows_of_512_and_64_elements(more: dict[str, Any]) -> None:
    assert names(replace(LAYER, **more)) == OF_HOPPER


def test_an_engines_views_are_the_plain_kernels() -> None:
    assert names(LAYER, terms=PoolTerms(page_strides=True)) == PLAIN
    assert names(LAYER, terms=PoolTerms(unaligned_rows=True)) == PLAIN


def test_one_token_of_few_heads_is_the_plain_kernels_and_several_are_its() -> None:
    """A program has 64 rows: one token of 16 heads would leave most of them empty."""
    layer = replace(LAYER, num_q_heads=16)
    assert names(layer) == ("latent_decode", *OF_HOPPER[1:])
    mixed = select(layer, HOPPER, "triton").kernel(StepKind.MIXED).bound
    assert isinstance(mixed, TritonMixed)
    assert isinstance(mixed.decode, LatentDecode)
    assert isinstance(mixed.extend, HopperLatentDecode)
    # Together they serve every number of new tokens once.
    tokens = mixed.extend.cut.tokens
    assert (mixed.decode.cut.tokens.MOST, tokens.FEWEST, tokens.MOST, tokens.OF_ROW) == (1, 2, ANY_TOKENS, 4)


def test_one_launch_serves_all_tokens_of_many_heads() -> None:
    selection = select(LAYER, HOPPER, "triton")
    for kind in (StepKind.EXTEND, StepKind.MIXED):
        bound = selection.kernel(kind).bound
        assert isinstance(bound, HopperLatentDecode)
        assert (bound.cut.tokens.FEWEST, bound.cut.tokens.MOST) == (1, ANY_TOKENS)
