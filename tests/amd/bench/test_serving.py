"""The measurement of a server as it starts by itself: the gap that a long prompt makes, and the result file."""

import json
import sys
from pathlib import Path

import pytest
import torch

from rocm_lab.bench.load import RequestRecord
from rocm_lab.benchmarks import serving
from rocm_serve.models.loading import load_model
from tests.amd.bench.openai_stand_in import StandIn
from tests.amd.bench.test_load import in_a_thread


def test_the_worst_gap_is_of_the_time_in_which_the_prompt_came_in() -> None:
    early = RequestRecord(0.0, pieces=[0.0, 0.9, 1.0, 1.01, 1.02, 1.03, 1.2, 1.21, 1.9])
    second = RequestRecord(0.0, pieces=[1.0, 1.01, 1.05, 1.12])
    found = serving.gap_of([early, second], RequestRecord(1.04, pieces=[1.205], failure="odd"), 32768)
    assert (found.streams, found.prompt, found.failures) == (2, 32768, ("odd",))
    # Before the second stream had a piece, and after the prompt had its token, gaps do not count.
    assert (found.usual_ms, found.worst_ms) == pytest.approx((10.0, 170.0))
    assert found.worst_of_usual == pytest.approx(17.0)
    assert found.first_token_ms == pytest.approx(165.0)


def test_a_model_of_random_weights_is_written_once_and_can_be_served(tmp_path: Path) -> None:
    small = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    serving.write_llama(tmp_path, **small, num_key_value_heads=2, head_dim=16, vocab_size=50)
    loaded = load_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    assert (loaded.config.num_layers, loaded.config.vocab_size) == (1, 50)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.encode("w7 w49") == [7, 49]
    written = (tmp_path / "model.safetensors").stat().st_mtime_ns
    serving.write_llama(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_mtime_ns == written


def test_a_row_is_written_for_each_load_and_each_number_of_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "serving.json"
    with in_a_thread(StandIn()) as url:
        sizes = ["--prompt", "9", "--new", "3", "--long", "40", "--long-new", "400", "--pieces-before", "5"]
        loads = ["--at-once", "1", "4", "--turns", "2", "--streams", "1", "--long-turns", "2", "--processes", "1"]
        monkeypatch.setattr(sys, "argv", ["serving", "--url", url, *sizes, *loads, "--out", str(out)])
        serving.main()
    found = json.loads(out.read_text())
    assert found["model"] == "stand-in"
    assert [(row["load"], row.get("turn")) for row in found["rows"]] == [
        *[(1, 0), (4, 0), (1, 1), (4, 1)],
        ("long prompt", 0),
        ("long prompt", 1),
    ]
    assert [row["output_tokens"] for row in found["rows"][:4]] == [3, 12, 3, 12]
    assert {"device", "commit", "torch"} <= found["machine"].keys()
