"""200 requests, 128 at a time, on a small Gemma 3 whose layers differ in window: each comes out as if it ran alone.

In every run a twentieth of them is served alone too, which takes most of the time; at night all are.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rocm_attn.problem import UNLIMITED_WINDOW
from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel, load_model
from rocm_serve.options import EngineOptions
from rocm_serve.request import Request
from tests.amd.runner.families import family_model
from tests.amd.runner.hf_models import SMALL, save

NUM_REQUESTS, CONCURRENCY = 200, 128
WINDOW = 7

AT_ONCE = EngineOptions(
    provider="torch", page_size=4, max_batch_size=CONCURRENCY, chunk=1024, max_kv_len=80, capture_after=0
)
ALONE = replace(AT_ONCE, max_batch_size=1, graphs=False)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Two layers with a window and one without."""
    model = family_model(
        "gemma3",
        sliding_window=WINDOW + 1,
        hidden_size=32,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    directory: Path = save(model, tmp_path_factory.mktemp("gemma3"))
    return load_model(directory, dtype=torch.float32, device=torch.device("cpu"))


def many_requests() -> list[Request]:
    chooser = random.Random(5)
    return [
        Request(
            tuple(chooser.randrange(SMALL["vocab_size"]) for _ in range(chooser.randrange(1, 49))),
            max_new_tokens=chooser.randrange(12, 21),
        )
        for _ in range(NUM_REQUESTS)
    ]


@pytest.mark.nightly
def test_200_requests_at_once_come_out_as_each_alone(loaded: LoadedModel) -> None:
    requests, engine, most_at_once = many_requests(), Engine(loaded, AT_ONCE), 0
    numbers = [engine.submit(request) for request in requests]
    while engine.has_work:
        most_at_once = max(most_at_once, len(engine.step()))
    assert most_at_once == CONCURRENCY
    assert engine.report().metrics.replays > 0
    windows = [selection.problem.window_left for selection in engine.runtime.selections]
    assert windows == [WINDOW, UNLIMITED_WINDOW], "one kind of layer with a window, one without"
    alone = Engine(loaded, ALONE)
    together = [engine.completion(number) for number in numbers]
    assert [alone.generate([request])[0] for request in requests] == together
    outgrown = sum(len(c.prompt_token_ids) + len(c.token_ids) > 2 * WINDOW for c in together)
    assert outgrown > NUM_REQUESTS // 2
