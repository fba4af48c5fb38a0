"""The runner of FlashInfer's own tests distinguishes tests that pass from those that are refused, skipped or fail."""

from pathlib import Path

import pytest

from tests.amd.integrations.flashinfer_suite import line, outcomes

# Two processes that import torch, so it belongs to the nightly stage.
pytestmark = pytest.mark.nightly

WRITTEN = """
import pytest
import torch
import flashinfer
from flashinfer.utils import has_flashinfer_jit_cache


@pytest.mark.parametrize("kv_len", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
def test_passes(kv_len):
    assert has_flashinfer_jit_cache()
    q, k = torch.ones(1, 2, 8, device="cuda:0").half(), torch.ones(kv_len, 2, 8).to("cuda:0").half()
    assert (flashinfer.single_prefill_with_kv_cache(q, k, k) == 1).all()


def test_is_refused():
    flashinfer.single_prefill_with_kv_cache(*torch.ones(3, 1, 2, 8), pos_encoding_mode="ROPE_LLAMA")


def test_asks_for_what_is_not_here():
    flashinfer.xqa(torch.ones(8))


def test_is_skipped():
    pytest.skip("for reasons")


def test_fails():
    assert flashinfer.get_seq_lens(torch.tensor([0, 1]), torch.tensor([1]), 4).item() == 2
"""


def test_each_outcome_is_reported_from_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tests" / "attention"
    folder.mkdir(parents=True)
    (folder / "test_made_up.py").write_text(WRITTEN)
    (folder / "test_broken.py").write_text("import nowhere_to_be_found")
    monkeypatch.setenv("FLASHINFER_CASES", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = line("attention/test_made_up", outcomes(tmp_path, "attention/test_made_up"))
    assert found.startswith("| `test_made_up` | 14 | 7 | 3 | 2 | 1 | 1 | ")
    for reason in ("pos_encoding_mode ROPE_LLAMA is not served (1)", "xqa is not offered (1)", "for reasons (1)"):
        assert reason in found
    broken = line("attention/test_broken", outcomes(tmp_path, "attention/test_broken"))
    assert "| 0 | 0 | 0 | 1 | the file does not load: ModuleNotFoundError: No module named" in broken
