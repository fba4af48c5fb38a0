"""Which kernels real models get on MI300X and MI355X, held by golden files."""

from __future__ import annotations

import pytest

from rocm_attn.kernel_table import markdown
from tests.amd.aiter.explained import ARCHS, GOLDEN, MODELS, explained, place
from tests.amd.house.source_tree import ROOT


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("model", MODELS)
def test_a_model_is_explained_as_in_its_golden_file(model: str, arch: str) -> None:
    assert explained(model, arch) == place(model, arch).read_text(), (
        "python -m tests.amd.aiter.explained writes it anew"
    )


def test_no_golden_file_is_left_over() -> None:
    assert set(GOLDEN.iterdir()) == {place(model, arch) for model in MODELS for arch in ARCHS}


@pytest.mark.parametrize("arch", ARCHS)
def test_aiter_serves_decode_and_extend_of_the_plain_models(arch: str) -> None:
    for model in ("llama-3-8b", "llama-3-70b", "qwen3-30b-a3b"):
        text = explained(model, arch)
        assert "  decode: aiter.paged_attention_ragged\n" in text
        assert "  extend: aiter.mha_batch_prefill_func\n" in text
        assert "  mixed: aiter.unified_attention\n" in text
        assert "  prefill: aiter.flash_attn_varlen_func\n" in text


@pytest.mark.parametrize("arch", ARCHS)
def test_layers_that_keep_no_k_and_v_say_whose_they_read(arch: str) -> None:
    lines = explained("gemma-3n-e4b", arch).splitlines()
    assert "  K and V of layer 18 are read by 12 layers (20, 21, 22, 23, 25, 26, 27, 28, 30, 31, 32, 33) too" in lines
    assert "  K and V of layer 19 are read by 3 layers (24, 29, 34) too" in lines


@pytest.mark.parametrize("arch", ARCHS)
def test_aiter_serves_every_step_of_the_models_with_windows_sinks_and_latent_rows(arch: str) -> None:
    for model in ("gpt-oss-120b", "gemma-3-27b", "deepseek-v3"):
        lines = explained(model, arch).splitlines()
        chosen = [line for line in lines if line.startswith("  ") and " not " not in line and "pages of" not in line]
        shared = [line for line in chosen if line.startswith("  shared: ")]
        # Of the layers without windows: AITER has no kernel that shares prefixes.
        assert shared == (["  shared: triton.shared_prefix"] if model != "deepseek-v3" else [])
        assert len(chosen) - len(shared) in (3, 8)
        assert all(": aiter." in line for line in chosen if line not in shared)


def test_the_page_of_kernels_is_current() -> None:
    page = (ROOT / "docs" / "kernels.md").read_text()
    assert page == markdown(), "rocm-attn kernels > docs/kernels.md"
