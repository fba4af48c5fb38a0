"""The masks of layers and steps, as our backend classes read them from vLLM's, with stand-ins for these."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.amd.integrations.vllm_stand_in import Config, chunked_builder, gqa_layer, installed, spec, step

CPU = torch.device("cpu")


@pytest.fixture
def ours() -> Iterator[Any]:
    """Yields our module of backend classes next to a supported release of vLLM."""
    with installed() as found:
        yield found["backend"]


def test_a_step_of_layers_with_chunks_stays_whole_and_may_be_captured(ours: Any) -> None:
    layer = gqa_layer(ours.RocmAttnImpl, attention_chunk_size=16)
    builder = chunked_builder(ours.RocmAttnBuilder)
    made = builder(spec(), ["layer"], Config({"layer": layer}), CPU)
    metadata = made.build(0, step())
    (problem,) = made.group.attention.kernels().problems
    assert problem.chunk == 16
    assert metadata.step.num_tokens == 1
    assert builder.get_cudagraph_support(made.vllm_config, spec()) == ours.AttentionCGSupport.ALWAYS


@pytest.mark.parametrize(("keeps_window", "window"), [(False, 8), (True, 8), (False, None)])
def test_a_layer_with_images_is_served_and_says_whether_they_override_its_window(
    keeps_window: bool, window: int | None, ours: Any
) -> None:
    """As vLLM's own backends do it: (causal and in the window) or in the image; in Gemma 4 in the window alone."""
    assert ours.RocmAttnBackend.supports_mm_prefix()
    terms = {"use_mm_prefix": True, "mm_prefix_clamp_sliding_window": keeps_window, "sliding_window": window}
    problem = problem_of(ours, gqa_layer(ours.RocmAttnImpl, **terms))
    assert problem.custom_mask
    assert problem.spans_pass_window is (window is not None and not keeps_window)
    assert not problem_of(ours, gqa_layer(ours.RocmAttnImpl, use_mm_prefix=False)).custom_mask


def problem_of(ours: Any, layer: Any) -> Any:
    """Returns the problem of a layer that is alone in its group."""
    made = ours.RocmAttnBuilder(spec(), ["layer"], Config({"layer": layer}), CPU)
    made.build(0, step())
    (problem,) = made.group.attention.kernels().problems
    return problem
