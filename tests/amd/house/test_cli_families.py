"""`rocm-attn generate --model DIR` for each family, from a directory that transformers has written."""

import json
from pathlib import Path

import pytest
import tokenizers
import torch

from rocm_attn.cli import BAD_INPUT, DONE, main
from tests.amd.runner.families import FAMILIES, family_model
from tests.amd.runner.hf_models import SMALL, hf_logits, save

PROMPT = "w4 w40 w17 w8 w8 w90 w33 w2 w71"


def with_tokenizer(directory: Path) -> Path:
    """Writes a tokenizer in which token i is the word wi."""
    words = {f"w{number}": number for number in range(SMALL["vocab_size"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.mark.fast(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_directory_is_served(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reference = family_model(family, eos_token_id=None)
    directory = with_tokenizer(save(reference, tmp_path))
    options = ["--json", "--raw", "--device", "cpu", "--provider", "torch", "--max-new-tokens", "8"]
    assert main(["generate", "--model", str(directory), *options, PROMPT]) == DONE
    (result,) = json.loads(capsys.readouterr().out)["results"]
    token_ids = [int(word[1:]) for word in PROMPT.split()]
    assert result["prompt_token_ids"] == token_ids
    for _ in range(8):
        token_ids.append(int(hf_logits(reference, torch.tensor(token_ids))[-1].argmax()))
    assert result["token_ids"] == token_ids[-8:]
    assert PROMPT + result["text"] == " ".join(f"w{token}" for token in token_ids)


def test_an_architecture_that_is_not_known_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = with_tokenizer(save(family_model("qwen3"), tmp_path))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "architectures": ["MambaForCausalLM"]}))
    assert main(["generate", "--model", str(directory), "--device", "cpu", PROMPT]) == BAD_INPUT
    printed = capsys.readouterr()
    assert printed.out == ""
    *_, sentence = printed.err.splitlines()
    assert "the engine does not serve MambaForCausalLM; try vLLM or SGLang with the plug-in" in sentence
    assert "GptOssForCausalLM" in sentence
