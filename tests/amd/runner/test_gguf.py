"""Models from GGUF files: written here from transformers' weights, so that a wrong row order shows in the logits."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from rocm_attn.errors import BadModel
from rocm_attn.models.gguf_file import GGUFFile
from rocm_attn.models.rope import LinearScaling, YarnScaling
from rocm_serve.models.loading import LoadedModel, load_tokenizer
from rocm_serve.models.places import find_model
from rocm_serve.text.chat_template import ChatTemplate
from tests.amd.runner.dense_attention import dense_logits
from tests.amd.runner.hf_models import LLAMA3, hf_logits, load, random_tokens, small_hf_model, write_gguf
from tests.amd.tolerances import assert_layers_close


def assert_same_logits(loaded: LoadedModel, reference: Any) -> None:
    token_ids = random_tokens(50)
    assert_layers_close(dense_logits(loaded, token_ids), hf_logits(reference, token_ids))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
        ("Llama", {"attention_bias": True, "mlp_bias": True}),
        ("Mistral", {"sliding_window": None}),
        ("Qwen2", {"tie_word_embeddings": True}),
        ("Qwen3", {"head_dim": 24}),
    ],
)
def test_logits_equal_those_of_the_model_it_was_made_from(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    reference = small_hf_model(family, **changes)
    assert_same_logits(load(write_gguf(reference, tmp_path / "m.gguf")), reference)


def test_a_window_in_the_file_is_used(tmp_path: Path) -> None:
    reference = small_hf_model("Mistral", sliding_window=5)
    loaded = load(write_gguf(reference, tmp_path / "m.gguf", metadata={"llama.attention.sliding_window": 5}))
    assert_same_logits(loaded, reference)


def test_llama3_scaling_comes_as_a_tensor_of_divisors(tmp_path: Path) -> None:
    reference = small_hf_model("Llama", rope_parameters=LLAMA3)
    plain = small_hf_model("Llama").model.rotary_emb.inv_freq
    divisors = plain / reference.model.rotary_emb.inv_freq
    assert_same_logits(
        load(write_gguf(reference, tmp_path / "m.gguf", tensors={"rope_freqs.weight": divisors})), reference
    )


@pytest.mark.parametrize(
    ("parameters", "metadata", "kind"),
    [
        (
            {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 3.0},
            LinearScaling,
        ),
        (
            {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32},
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
            },
            YarnScaling,
        ),
        (
            {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 3.0,
                "beta_slow": 0.5,
            },
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
                "llama.rope.scaling.yarn_beta_fast": 3.0,
                "llama.rope.scaling.yarn_beta_slow": 0.5,
                "llama.rope.scaling.yarn_ext_factor": 1.0,
            },
            YarnScaling,
        ),
        *(
            ({"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}, {f"llama.rope.{name}": 3.0}, LinearScaling)
            for name in ("scaling.factor", "scale_linear")  # without a type, as llama.cpp reads them
        ),
    ],
)
def test_scaling_in_the_metadata_is_used(
    parameters: dict[str, Any], metadata: dict[str, Any], kind: type, tmp_path: Path
) -> None:
    reference = small_hf_model("Llama", rope_parameters=parameters)
    loaded = load(write_gguf(reference, tmp_path / "m.gguf", metadata=metadata))
    assert isinstance(loaded.config.attending[0].rope.scaling, kind)
    assert_same_logits(loaded, reference)


def test_yarn_makes_the_context_longer(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
    named = {f"llama.rope.scaling.{name}": value for name, value in yarn.items()}
    assert load(write_gguf(small_hf_model("Llama"), tmp_path / "m.gguf", metadata=named)).config.context_len == 256


@pytest.mark.parametrize("name", ["yarn_ext_factor", "yarn_attn_factor", "yarn_log_multiplier"])
def test_yarn_with_factors_of_several_meanings_is_refused(name: str, tmp_path: Path) -> None:
    named = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0, f"llama.rope.scaling.{name}": 0.5}
    with pytest.raises(BadModel, match=rf"{name} is 0.5; the runner serves"):
        load(write_gguf(small_hf_model("Llama"), tmp_path / "m.gguf", metadata=named))


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F16])
def test_quantised_matrices_are_dequantised(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    reference = small_hf_model("Llama", **sizes)
    path = write_gguf(reference, tmp_path / "m.gguf", quantization=kind)
    # the reference gets the same rounding
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(parameter.numpy(), kind), kind)))
    assert_same_logits(load(path), reference)


def test_shapes_and_end_tokens_come_from_the_file(tmp_path: Path) -> None:
    tokens = ["t", "1", *(f"t{token}" for token in range(1, 98)), "<|im_end|>"]
    named = {"tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.tokens": [*tokens, "last"]}
    config = load(write_gguf(small_hf_model("Llama"), tmp_path / "m.gguf", metadata=named)).config
    assert (config.vocab_size, config.context_len, config.num_layers) == (101, 128, 3)
    assert config.eos_token_ids == (2, 9, 99)  # the last one ends turns, as in llama.cpp


@pytest.mark.parametrize(
    ("named", "begins"),
    [
        ({"tokenizer.ggml.pre": "llama-bpe"}, True),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, False),
        ({"tokenizer.ggml.pre": "qwen2"}, False),
    ],
)
def test_prompts_of_llama_3_begin_with_its_first_token_unless_the_file_says_no(
    named: dict[str, Any], begins: bool, tmp_path: Path
) -> None:
    named["tokenizer.ggml.bos_token_id"] = 1
    tokenizer = load_tokenizer(write_gguf(small_hf_model("Llama"), tmp_path / "m.gguf", metadata=named))
    assert tokenizer is not None
    assert (tokenizer.bos_token_id == 1) is begins


def test_a_template_for_tools_comes_from_the_file(tmp_path: Path) -> None:
    named = {"tokenizer.chat_template": "for all", "tokenizer.chat_template.tool_use": "for tools"}
    tokenizer = load_tokenizer(write_gguf(small_hf_model("Llama"), tmp_path / "m.gguf", metadata=named))
    assert tokenizer is not None
    assert tokenizer.chat_template == ChatTemplate("for all", {"bos_token": "", "eos_token": "t1"}, "for tools")


@pytest.fixture(scope="module")
def good_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A whole GGUF file, small enough to be damaged many times."""
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    return write_gguf(small_hf_model("Llama", num_hidden_layers=1), path).read_bytes()


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.03, 0.1, 0.5, 0.9, 0.999])
def test_a_file_cut_short_is_refused(share: float, good_file: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(good_file[: int(len(good_file) * share)])
    with pytest.raises(BadModel, match="is not a whole GGUF file"):
        load(path)


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(1000))
    with pytest.raises(BadModel, match=r"is not a whole GGUF file .*magic"):
        load(path)


def test_a_damaged_head_never_raises_anything_but_a_bad_model(good_file: bytes, tmp_path: Path) -> None:
    """Bytes of the head set to 0xFF, one after the other: a clear refusal, or a field that happens not to matter."""
    path, refused = tmp_path / "m.gguf", 0
    end_of_head = len(good_file) - sum(t.n_bytes for t in _reader(good_file, path).tensors)
    for position in range(4, end_of_head, 23):
        damaged = bytearray(good_file)
        damaged[position] ^= 0xFF
        path.write_bytes(damaged)
        try:
            load(path)
        except BadModel:
            refused += 1
    assert refused > 20


def _reader(data: bytes, path: Path) -> gguf.GGUFReader:
    path.write_bytes(data)
    return gguf.GGUFReader(path)


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        (
            {"general.architecture": "gemma3"},
            "architecture 'gemma3' is not served; the runner serves llama, qwen2, qwen3",
        ),
        ({"llama.block_count": 4}, "lacks model.layers.3"),
        ({"llama.block_count": 2**31}, "block_count is 2147483648; it must be at most 2147483647"),
        ({"llama.context_length": 2**63}, "context_length is 9223372036854775808; it must be at most 2147483647"),
        ({"llama.rope.freq_base": float("inf")}, "rope.freq_base is inf; it must be a positive number"),
        ({"llama.block_count": 2}, "has model.layers.2.* which LlamaForCausalLM does not use"),
        ({"llama.attention.head_count": 5}, "do not divide one another"),
        ({"llama.attention.head_count_kv": 4}, "k_proj.weight has shape"),
        ({"llama.embedding_length": 64}, "has shape"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count is 8"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "'longrope' is not known"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.attention.causal": False}, "is not causal"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model 't5' is not known"),
        ({"tokenizer.ggml.pre": "tekken"}, "tokenizer.ggml.pre 'tekken' is not known"),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre 'default' is not known; .*tokenizer.json"),
        ({"tokenizer.ggml.merges": ["t1"]}, "'t1' in tokenizer.ggml.merges is not two tokens"),
        ({"tokenizer.ggml.merges": ["t 999"]}, "is not in the vocabulary"),
        (
            {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 2**40},
            "bos_token_id is 1099511627776; it must be at most",
        ),
        (
            {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 101},
            "bos_token_id is 101; the vocabulary has tokens 0 to 100",
        ),
        (
            {"tokenizer.chat_template": "{{ bos_token }}", "tokenizer.ggml.bos_token_id": 2**40},
            "bos_token_id is 1099511627776; it must be at most",
        ),
        ({"tokenizer.ggml.eos_token_id": 2**40}, "eos_token_id is 1099511627776; it must be an id or a list of them"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": ["best"] * 101}, "scores must hold numbers"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "2 tokenizer.ggml.token_type for 101 tokens"),
        ({"tokenizer.ggml.tokens": ["a"] * 101, "tokenizer.ggml.merges": ["a a"]}, "holds 100 tokens twice"),
    ],
)
def test_metadata_that_cannot_be_run_is_refused_in_one_sentence(
    metadata: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    path = write_gguf(small_hf_model("Llama"), tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(BadModel, match=sentence):
        load(path)


@pytest.mark.parametrize(
    ("name", "tensor", "sentence"),
    [
        ("blk.0.attn_sinks.weight", torch.zeros(4), r"blk\.0\.attn_sinks\.weight, which LlamaForCausalLM does not use"),
        ("rope_freqs.weight", torch.ones(5), "must be 8 positive numbers"),
        ("rope_freqs.weight", torch.ones(4, 2), "must be one row in float32"),
        ("model.norm.weight", torch.ones(48), "one weight twice, as 'output_norm.weight' and as 'model.norm.weight'"),
    ],
)
def test_a_tensor_that_the_model_does_not_use_is_refused(
    name: str, tensor: torch.Tensor, sentence: str, tmp_path: Path
) -> None:
    path = write_gguf(small_hf_model("Llama"), tmp_path / "m.gguf", tensors={name: tensor})
    with pytest.raises(BadModel, match=sentence):
        load(path)


@pytest.mark.nightly  # the stage text loads it in every run
def test_the_real_file_says_what_it_holds() -> None:
    file = GGUFFile(find_model("smollm2"))
    assert file.metadata["llama.block_count"] == 30
    assert file.shapes()["model.layers.29.mlp.down_proj.weight"] == (576, 1536)


def test_transformers_reads_the_files_written_here_as_they_were_meant(tmp_path: Path) -> None:
    """So the order of q and k rows in them is llama.cpp's, not one that only this project knows."""
    reference = small_hf_model("Llama")
    path = write_gguf(reference, tmp_path / "m.gguf")
    read: Any = load_gguf_checkpoint
    tensors = read(str(path), return_tensors=True, model_to_load=reference)["tensors"]
    for name, tensor in reference.state_dict().items():
        torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=0)
