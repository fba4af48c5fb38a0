"""/tokenize, /detokenize and small facts about the server, with vLLM's fields."""

import json
import threading
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any

import pytest
import tokenizers

from rocm_serve.engine import Engine
from rocm_serve.server import text_routes
from rocm_serve.server.record import GENERATING
from rocm_serve.server.unserved import PATHS
from rocm_serve.text.tokenizer import Tokenizer
from tests.amd.runner.async_engines import engine
from tests.amd.runner.serving import BASE
from tests.amd.runner.tiny_model import tiny_model, word_tokenizer
from tests.amd.server.raw import CHAT, post, requested, send
from tests.amd.server.running import NAME, Running, running

KEY = "first-secret-key"


def with_special_tokens() -> Tokenizer:
    """w63 is special; w2 comes before each plain text."""
    words = word_tokenizer()
    words.backend.add_special_tokens([tokenizers.AddedToken("w63", special=True)])
    return Tokenizer(words.backend, 2, words.chat_template)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(Engine(tiny_model(), BASE), tokenizer=with_special_tokens()) as served:
        yield served


def test_a_prompt_is_tokenised_as_a_completion_is(server: Running) -> None:
    reply = post(server, {"model": NAME, "prompt": "w9 w12"}, "/tokenize")
    assert (reply.status, reply.json) == (
        200,
        {"count": 3, "max_model_len": 64, "tokens": [2, 9, 12], "token_strs": None},
    )
    usage = post(server, requested(prompt="w9 w12")).json["usage"]
    assert usage["prompt_tokens"] == 3
    bare = post(server, {"prompt": "w9 w12", "add_special_tokens": False, "return_token_strs": True}, "/tokenize")
    assert (bare.json["tokens"], bare.json["token_strs"]) == ([9, 12], ["w9", "w12"])


def test_a_conversation_is_tokenised_as_it_is_answered(server: Running) -> None:
    messages = [{"role": "user", "content": "w9 w12"}]
    reply = post(server, {"messages": messages}, "/tokenize")
    assert reply.json["tokens"] == [63, 9, 12]
    answer = post(server, {"model": NAME, "messages": messages, "max_tokens": 1}, CHAT)
    assert answer.json["usage"]["prompt_tokens"] == reply.json["count"]


def test_a_list_of_tokens_is_written_in_pieces_by_the_thread_that_tokenises(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[str, int]] = []

    class Json:
        def dumps(self, items: Sequence[Any], **options: Any) -> str:
            written.append((threading.current_thread().name, len(items)))
            return json.dumps(items, **options)

    monkeypatch.setattr(text_routes, "json", Json())
    monkeypatch.setattr(text_routes, "PIECE", 4)
    tokens = [each % 60 for each in range(9)]
    asked = {"prompt": " ".join(f"w{each}" for each in tokens), "add_special_tokens": False, "return_token_strs": True}
    reply = post(server, asked, "/tokenize")
    assert reply.headers["content-type"] == "application/json"
    names = [f"w{each}" for each in tokens]
    assert reply.json == {"count": 9, "max_model_len": 64, "tokens": tokens, "token_strs": names}
    assert [length for _, length in written] == [4, 4, 1] * 2
    assert all(name.startswith("tokenise") for name, _ in written)


def test_tokens_become_the_text_with_special_ones(server: Running) -> None:
    assert post(server, {"tokens": [63, 9, 12]}, "/detokenize").json == {"prompt": "w63 w9 w12"}
    assert post(server, {"tokens": []}, "/detokenize").json == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/tokenize", {}, 400, "both prompt and messages, or neither"),
        ("/tokenize", {"prompt": "w1", "messages": [{"role": "user", "content": "w1"}]}, 400, "or neither"),
        ("/tokenize", {"messages": [{"role": "user", "content": "w1"}], "add_special_tokens": True}, 400, "template"),
        ("/tokenize", {"prompt": "w1", "model": "other"}, 404, "there is no model 'other'"),
        ("/tokenize", {"prompt": [1]}, 400, "prompt: Input should be a valid string"),
        ("/tokenize", {"prompt": "w1", "\ud800": 1}, 400, "half of a character"),
        ("/tokenize", {"prompt": "w1", "chat_template": "x"}, 400, "chat_template is not taken from requests"),
        ("/detokenize", {"tokens": "w1"}, 400, "tokens"),
        ("/detokenize", {"tokens": [64]}, 400, "token 64 is not in the model's vocabulary"),
        ("/detokenize", {}, 400, "tokens is missing"),
    ],
    ids=str,
)
def test_a_wrong_body_is_refused_in_a_sentence(
    path: str, body: dict[str, Any], status: int, says: str, server: Running
) -> None:
    reply = post(server, body, path)
    assert reply.status == status
    assert says in reply.error["message"]


def test_the_tokenizer_is_described_for_clients_that_write_conversations(server: Running) -> None:
    """lm-eval's client asks for it, and needs no tokenizer of its own then."""
    template = with_special_tokens().chat_template
    assert template is not None
    expected = {"chat_template": template.source, "bos_token": None, "eos_token": None}
    assert send(server, "GET", "/tokenizer_info").json == expected


def test_a_stop_text_that_names_a_special_token_ends_the_answer_there() -> None:
    """Clients name <|im_end|> and the like. Such a token has no text in which its name could be found."""
    words = with_special_tokens()
    with running(engine(tiny_model(tokenizer=words)), tokenizer=words) as served:
        for stop, reason, num in (("w7", "length", 5), ("w63", "stop", 1)):
            reply = post(served, requested(prompt=[9], max_tokens=5, logit_bias={"63": 100}, stop=["w7", stop])).json
            assert (reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]) == ("", reason)
            assert reply["usage"]["completion_tokens"] == num


def test_small_facts_are_told_without_a_key() -> None:
    with running(engine(tiny_model()), keys=[KEY]) as locked:
        assert send(locked, "GET", "/version").json == {"version": version("rocm-serve")}
        assert send(locked, "GET", "/load").json == {"server_load": 0}
        assert [send(locked, method, "/ping").status for method in ("GET", "POST")] == [200, 200]
        assert "GET" in send(locked, "DELETE", "/version").headers["allow"]
        assert send(locked, "GET", "/tokenizer_info").status == 401
        bodies: dict[str, dict[str, Any]] = {"/tokenize": {"prompt": "w1"}, "/detokenize": {"tokens": [1]}}
        for path, body in bodies.items():
            assert post(locked, body, path).status == 401
            assert post(locked, body, path, Authorization=f"Bearer {KEY}").status == 200


def test_a_model_without_a_tokenizer_takes_token_ids_alone() -> None:
    with running(engine(tiny_model()), tokenizer=None) as bare:
        assert post(bare, requested(prompt=[1, 2])).json["usage"]["completion_tokens"] > 0
        said: list[dict[str, Any]] = [{"role": "user", "content": "w1"}]
        for path, body in (
            ("/tokenize", {"prompt": "w1"}),
            (CHAT, {"model": NAME, "messages": said}),
            ("/v1/completions", requested(prompt="w1")),
            ("/v1/completions", requested(prompt=[1], echo=True)),
            ("/v1/completions", requested(prompt=[1], guided_regex="w1")),
        ):
            reply = post(bare, body, path)
            assert reply.status == 400
            assert "the model has no tokenizer" in reply.error["message"]


def test_the_load_counts_requests_that_are_not_answered(server: Running) -> None:
    end = server.hold()
    try:
        assert send(server, "GET", "/load").json == {"server_load": 1}
    finally:
        end()


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/completions", "/v1/completions"),
        ("/v1/responses-api/responses/", "/v1/responses"),
        ("/v1/tokenize", "/tokenize"),
    ],
)
def test_a_path_under_another_base_url_names_the_one_that_is_served(path: str, near: str, server: Running) -> None:
    assert f"there is no {path}; did you mean {near}? GET" in post(server, {}, path).error["message"]
    assert "there is no /nowhere; GET" in post(server, {}, "/nowhere").error["message"]


def test_a_path_that_is_not_served_says_why_and_so_does_each_below_it(server: Running) -> None:
    for path in sorted(PATHS.keys() - GENERATING):
        for reply in (post(server, {}, path), send(server, "GET", path)):
            assert (reply.status, reply.error["code"]) == (404, "not_served")
            assert reply.error["message"].startswith(f"not served: {path}; ")
    for method in ("GET", "DELETE"):
        assert send(server, method, "/v1/responses/resp_1").error["code"] == "not_served"
