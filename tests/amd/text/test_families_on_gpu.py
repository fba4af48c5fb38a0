"""Each family in small on a GPU, by Triton's kernels and from graphs, against transformers in float32 on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rocm_serve.models.loading import load_model
from tests.amd.runner.families import FAMILIES, family_model
from tests.amd.runner.hf_models import hf_logits, random_tokens, save
from tests.amd.runner.served_logits import served_logits

pytestmark = pytest.mark.gpu

LENGTHS = (60, 31, 17)
# |logits - reference| as a share of |reference|, at the median token (see WITHIN): if two experts are nearly equal, a
# router may choose otherwise. On a CPU the torch provider stays below half of these.
BOUNDS = {torch.float32: 1e-5, torch.float16: 0.02, torch.bfloat16: 0.16}
# The share of tokens within the bound: of scores that are nearly equal an indexer may choose others, at most tokens of
# this model in 16 bits.
WITHIN = {"deepseek_v32": 0.25}


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_served_logits_stay_near_those_of_float32(
    family: str, dtype: torch.dtype, graphs: bool, tmp_path: Path, device: torch.device
) -> None:
    reference = family_model(family)
    loaded = load_model(save(reference, tmp_path), dtype=dtype, device=device)
    texts = [random_tokens(length) for length in LENGTHS]
    logits, replays = served_logits(
        loaded,
        texts,
        [20] * len(texts),
        chunk=7,
        page_size=16,
        graphs=graphs,
        provider="triton" if device.type == "cuda" else "torch",
    )
    assert (replays > 20) == graphs
    errors = [
        (row - expected[place]).norm() / expected[place].norm()
        for rows, expected in zip(logits, [hf_logits(reference, text) for text in texts], strict=True)
        for place, row in rows.items()
    ]
    assert float(torch.stack(errors).quantile(WITHIN.get(family, 0.5))) < BOUNDS[dtype]
