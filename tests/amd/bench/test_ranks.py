"""The benchmark of tensor-parallel ranks, on a CPU: requests run to their measured steps and leave nothing."""

from dataclasses import replace

import pytest
import torch

from rocm_lab.benchmarks import ranks
from rocm_lab.benchmarks.random_models import RandomOnDevice, model_of
from rocm_serve.models.loading import LoadedModel
from rocm_serve.models.weights import load_weights
from rocm_serve.parallel.ranked_engine import RankedEngine
from rocm_serve.ranks import Ranks

SMALL = model_of((4, 2, 16), 64, 32, 50, 2, 4096)


def load(*, device: torch.device, ranks: Ranks) -> LoadedModel:
    weights = load_weights(RandomOnDevice(SMALL, device), SMALL, dtype=torch.float32, device=device, shard=ranks.shard)
    return LoadedModel(SMALL.on_one_of(ranks.shard.num_ranks), weights, None, ranks)


@pytest.mark.usefixtures("torch_is_imported")
def test_a_step_is_measured_once_all_requests_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MODEL": SMALL, "PROMPT": 6, "LONG_PROMPT": 40, "WARM_STEPS": 2, "STEPS": 3}.items():
        monkeypatch.setattr(ranks, name, value)
    options = replace(ranks.OPTIONS, kv_bytes=1 << 24, max_kv_len=4096, max_batch_size=4)
    with RankedEngine(load, options, num_ranks=2) as engine:
        for num_seqs in (3, 1):
            row = ranks.decode(engine, num_seqs)
            assert (row["load"], row["requests"], row["us"] > 0) == ("decode", num_seqs, True)
            assert not engine.has_work
        assert ranks.prompts(engine)["us"] > 0
