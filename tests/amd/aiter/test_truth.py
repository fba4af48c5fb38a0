"""AITER's kernels find every needle of the truth test, whatever their pages hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from rocm_attn.guards.registry import Guards
from rocm_attn.problem import Problem, Scales
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.layer_kinds import LayerKinds
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.truth.check import NeedleCheck, TruthPlan
from tests.amd.aiter.serving import (
    CPU,
    in_eight_bits,
    latent_problem,
    partly_torch,
    plain_problem,
    vectorised_problem,
)
from tests.amd.aiter.stand_in import StandIn

BF16 = torch.bfloat16
PLAN = TruthPlan(lengths=(30, 100), first_chunk=40, chunk=60, decode_steps=1)
PLAIN = plain_problem(16, dims=(128, 128), dtype=BF16)
# Kind of layer -> the layer, and the AITER function that decodes it.
LAYERS = {
    "a window": (replace(PLAIN, window_left=30), "unified_attention"),
    "eight bits": (in_eight_bits(PLAIN), "unified_attention"),
    "vectorised": (in_eight_bits(vectorised_problem(16, dtype=BF16)), "pa_decode_gluon"),
    "large pages": (
        in_eight_bits(vectorised_problem(1024, heads=(8, 2), dtype=BF16), Scales.TOKEN),
        "pa_decode_gluon",
    ),
    "latents": (latent_problem(16), "mla_decode_fwd"),
    "latents in eight bits": (in_eight_bits(latent_problem(16)), "mla_decode_fwd"),
}


@pytest.mark.fast(3)
@pytest.mark.parametrize("kind", LAYERS)
def test_every_needle_is_found(kind: str, aiter: StandIn) -> None:
    """Needles are found in replayed chunks over a prefix and decode steps. Torch serves steps that AITER does not."""
    layer, decodes = LAYERS[kind]

    def build(layers: Sequence[Problem], options: RuntimeOptions) -> AttentionRuntime:
        kinds = LayerKinds.of(layers, options.spaces(layers), [partly_torch(layer)])
        return AttentionRuntime(kinds, options, device=CPU, guards=Guards())

    report = NeedleCheck([layer], PLAN, build).run()
    assert report.passed, "\n".join(map(str, report.misses))
    assert report.replays == report.steps
    assert decodes in aiter.calls
