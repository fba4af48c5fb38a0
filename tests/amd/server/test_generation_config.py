"""Requests that do not say how they are sampled are sampled as the model's generation_config.json says."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rocm_attn.errors import BadModel, BadSetting
from rocm_serve.request import Request
from rocm_serve.sampling.sampling_options import Sampling
from rocm_serve.server.generation_config import OPENAI_DEFAULTS, defaults_from
from tests.amd.runner.async_engines import engine
from tests.amd.server.raw import post
from tests.amd.server.running import NAME, Running, running, word_model

OF_MODEL = Sampling(temperature=0.6, top_p=0.9, top_k=20, min_p=0.05, repetition_penalty=1.1)
FIELDS = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(engine(word_model()), defaults=OF_MODEL) as served:
        yield served


def write(folder: Path, fields: dict[str, Any]) -> Path:
    file = folder / "generation_config.json"
    file.write_text(json.dumps(fields))
    return file


def test_the_models_file_gives_the_defaults(tmp_path: Path) -> None:
    assert defaults_from("auto", str(tmp_path), print) == OPENAI_DEFAULTS
    file = write(tmp_path, {**FIELDS, "eos_token_id": 2, "do_sample": True, "max_new_tokens": 5})
    assert defaults_from("auto", str(tmp_path), print) == OF_MODEL
    assert defaults_from("none", str(tmp_path), print) == OPENAI_DEFAULTS
    for place in (tmp_path, file):
        assert defaults_from(str(place), "no model there", print) == OF_MODEL
    write(
        tmp_path,
        {"temperature": 0, "top_k": -1, "top_p": None, "begin_suppress_tokens": [], "forced_bos_token_id": None},
    )
    assert defaults_from("auto", str(tmp_path), print) == Sampling(temperature=0.0)
    write(tmp_path, {"top_k": 50})
    assert defaults_from("auto", str(tmp_path), print) == Sampling(temperature=1.0, top_k=50)


def test_what_the_file_sets_and_the_server_does_not_read_is_announced(tmp_path: Path) -> None:
    lines = list[str]()
    unheard = {"do_sample": True, "eos_token_id": 2, "output_scores": False, "num_beams": None, "temperature": 0.6}
    write(tmp_path, unheard)
    defaults_from("auto", str(tmp_path), lines.append)
    assert lines == []
    file = write(tmp_path, {**unheard, "do_sample": False, "stop_strings": ["END"]})
    defaults_from("auto", str(tmp_path), lines.append)
    assert lines == [
        f"{file} sets do_sample False, stop_strings ['END'], which the server does not read; requests give "
        "temperature, stop and max_tokens themselves"
    ]


def test_tokens_that_the_models_file_suppresses_are_in_no_answer(server: Running, tmp_path: Path) -> None:
    """Gemma 4 suppresses marks of images, which may be the likeliest tokens: its answers had them, and were empty."""

    def words(asked: Running, **more: Any) -> set[str]:
        body = {"model": NAME, "prompt": [9, 12, 33], "max_tokens": 20, "temperature": 0, **more}
        return set(post(asked, body).json["choices"][0]["text"].split())

    before = words(server)
    tokens = [int(word[1:]) for word in before]
    write(tmp_path, {"suppress_tokens": [*tokens, *tokens, 2**20]})  # the last one is beyond the vocabulary
    with running(engine(word_model()), defaults=defaults_from("auto", str(tmp_path), print)) as served:
        after = words(served)
        assert len(after) > len(after & before) == 0
        assert words(served, logit_bias={tokens[0]: 100}) == {f"w{tokens[0]}"}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": 1.5}, "top_k"),
        (
            {"begin_suppress_tokens": [3]},
            "sets begin_suppress_tokens, which forces or forbids tokens at one place of an",
        ),
        (
            {"forced_decoder_ids": [[1, 3]], "forced_bos_token_id": 0},
            "sets forced_bos_token_id, forced_decoder_ids, which",
        ),
        ({"forced_eos_token_id": 2}, "sets forced_eos_token_id, which .* set --generation-config none"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_before_the_server_begins(
    fields: dict[str, Any], says: str, tmp_path: Path
) -> None:
    write(tmp_path, fields)
    with pytest.raises(BadModel, match=says):
        defaults_from("auto", str(tmp_path), print)
    with pytest.raises(BadSetting, match="generation_config is nowhere, and there is no file nowhere"):
        defaults_from("nowhere", str(tmp_path), print)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, OF_MODEL),
        ({"temperature": 0}, Sampling(repetition_penalty=1.1)),
        ({"temperature": 1.5, "top_k": -1}, Sampling(1.5, 0.9, min_p=0.05, repetition_penalty=1.1)),
        ({"top_p": 1, "min_p": 0, "top_k": 3, "repetition_penalty": 1}, Sampling(0.6, top_k=3)),
    ],
    ids=str,
)
def test_what_a_request_says_wins(said: dict[str, Any], expected: Sampling, server: Running) -> None:
    body = {"model": NAME, "prompt": [9, 12, 33], "max_tokens": 20, "seed": 3, **said}
    text = post(server, body).json["choices"][0]["text"]
    sampling = Sampling(**{name: getattr(expected, name) for name in FIELDS}, seed=3)
    (done,) = engine(server.engine._loaded).generate([Request((9, 12, 33), 20, sampling)])
    assert text == done.text
