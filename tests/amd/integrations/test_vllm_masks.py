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
