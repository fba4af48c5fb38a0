"""Options of a request other than its prompt: stop texts, logprobs, biases, and constraints as engines name them.

Most tokens are characters here.
"""

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import tokenizers

from rocm_serve.engine import Engine
from rocm_serve.options import EngineOptions
from rocm_serve.request import Request
from rocm_serve.sampling.sampling_options import Sampling
from rocm_serve.server.emitted_tokens import EmittedTokens
from rocm_serve.text.tokenizer import Tokenizer
from tests.amd.runner.tiny_model import WORDS, tiny_model
from tests.amd.runner.with_parameters import END, PROMPT
from tests.amd.server.raw import post, requested, send
from tests.amd.server.running import Running, letter_model, running
from tests.amd.server.test_ends import events

OPTIONS = EngineOptions(
    provider="torch", page_size=4, max_batch_size=8, chunk=16, graphs=False, max_kv_len=64, deterministic=True
)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    loaded = letter_model()
    with running(Engine(loaded, OPTIONS), tokenizer=loaded.tokenizer, constraint_seconds=1) as served:
        yield served


def choice_of(server: Running, **fields: Any) -> Any:
    """Returns the only answer, and checks that a stream has the same."""
    body = requested(**{"prompt": list(PROMPT), "max_tokens": 16, "seed": 4, **fields})
    whole = post(server, body).json["choices"][0]
    *chunks, done = events(post(server, {**body, "stream": True}).body)
    streamed = [chunk["choices"][0] for chunk in chunks]
    assert done == "[DONE]"
    assert "".join(each["text"] for each in streamed) == whole["text"]
    assert streamed[-1]["finish_reason"] == whole["finish_reason"]
    if whole["logprobs"] is not None:
        for name, values in whole["logprobs"].items():
            reported = [each["logprobs"][name] for each in streamed if each["logprobs"] is not None]
            assert [value for some in reported for value in some] == values
    return whole


def test_the_text_ends_before_a_stop_text(server: Running) -> None:
    text = choice_of(server, temperature=1, seed=11)["text"]
    stop = text[5:7]
    found = choice_of(server, temperature=1, seed=11, stop=["never in it", stop])
    assert (found["text"], found["finish_reason"]) == (text[: text.index(stop)], "stop")


def test_logprobs_are_the_engines(server: Running) -> None:
    loaded = letter_model()
    assert loaded.tokenizer is not None
    (expected,) = Engine(loaded, OPTIONS).generate([Request(PROMPT, 16, logprobs=2)])
    reported = choice_of(server, logprobs=2)["logprobs"]
    assert reported["token_logprobs"] == [each.logprob for each in expected.logprobs]
    assert "".join(reported["tokens"]) == expected.text
    assert [max(each.values()) for each in reported["top_logprobs"]] == [
        each.likeliest[0][1] for each in expected.logprobs
    ]
    assert max(map(len, reported["top_logprobs"])) == 2  # tokens of one text are reported once
    assert reported["text_offset"] == [len("".join(reported["tokens"][:place])) for place in range(16)]
    reply = post(server, requested(prompt=list(PROMPT), logprobs=0))
    assert reply.json["choices"][0]["logprobs"]["top_logprobs"] == [{}] * 4


def test_a_long_answers_logprobs_are_not_written_in_the_event_loop(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    text_of, threads = EmittedTokens._text, set[threading.Thread]()

    def seen(reported: EmittedTokens, token_id: int, mark: str = "") -> str:
        threads.add(threading.current_thread())
        return text_of(reported, token_id, mark)

    monkeypatch.setattr(EmittedTokens, "_text", seen)
    assert post(server, requested(prompt=list(PROMPT), logprobs=2)).status == 200
    assert len(threads) == 1
    assert server.thread not in threads


def test_biases_and_penalties_are_the_engines(server: Running) -> None:
    loaded = letter_model()
    sampling = Sampling(temperature=0.8, seed=4, frequency_penalty=1.5, logit_bias=((30, 9.0), (31, 9.0)), top_k=5)
    (expected,) = Engine(loaded, OPTIONS).generate([Request(PROMPT, 16, sampling)])
    fields = {"logit_bias": {"30": 9, "31": 9}, "frequency_penalty": 1.5, "top_k": 5}
    assert choice_of(server, temperature=0.8, **fields)["text"] == expected.text


def test_a_character_of_several_tokens_comes_whole() -> None:
    """The two bytes of an é are separate tokens, and nothing else is picked."""
    vocabulary = {word: number for number, word in enumerate([*WORDS[:62], "<0xC3>", "<0xA9>"])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    decoders = tokenizers.decoders
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = Tokenizer(backend, None, None)
    with running(Engine(tiny_model(tokenizer=tokenizer), OPTIONS), tokenizer=tokenizer) as served:
        bias = {"62": 100, "63": 100}
        text = choice_of(served, prompt=[9], temperature=2, max_tokens=16, logit_bias=bias)["text"]
    assert set(text) == {"é", "\N{REPLACEMENT CHARACTER}"}


SCHEMA = {"enum": ["no", "yes"]}
LARK = 'start: "a" b+\nb: "b"'


def format_of(schema: object) -> dict[str, Any]:
    """OpenAI's own field."""
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


def asked(server: Running, **fields: Any) -> Any:
    return post(server, requested(**{"prompt": list(PROMPT), "max_tokens": 40, "seed": 4, "temperature": 1, **fields}))


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"json": SCHEMA}}, '"(no|yes)"'),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, '"(no|yes)"'),
        ({"structured_outputs": {"regex": "a{2}b{3}"}}, "aabbb"),
        ({"structured_outputs": {"choice": ["one", "two"]}}, "one|two"),
        ({"structured_outputs": {"grammar": LARK}}, "ab+"),
        ({"structured_outputs": {"json_object": True}}, r"\s*\{.*"),
        ({"guided_json": SCHEMA}, '"(no|yes)"'),
        ({"guided_regex": "a{2}b{3}"}, "aabbb"),
        ({"guided_choice": ["one", "two"]}, "one|two"),
        ({"guided_grammar": LARK}, "ab+"),
        ({"regex": "a{2}b{3}"}, "aabbb"),
        ({"json_schema": json.dumps(SCHEMA)}, '"(no|yes)"'),
        ({"regex": "a{2}", "response_format": {"type": "text"}, "guided_json": None}, "aa"),
        (format_of(SCHEMA), '"(no|yes)"'),
        ({"response_format": {"type": "json_object"}}, r"\s*\{.*"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, '"(no|yes)"'),
    ],
    ids=str,
)
def test_the_answer_matches_whatever_the_field_is_called(fields: dict[str, Any], pattern: str, server: Running) -> None:
    (choice,) = asked(server, **fields).json["choices"]
    assert re.fullmatch(pattern, choice["text"], re.DOTALL), choice


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"guided_regex": "a", "guided_json": SCHEMA}, "constrains its answer by guided_json and by guided_regex"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs.regex and by structured_outputs.ch",
        ),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "by regex and by response_format.json_object"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag is not supported here"),
        ({"structured_outputs": {}}, "structured_outputs has no constraint"),
        ({"structured_outputs": {"choice": []}}, "a choice needs at least one text"),
        ({"guided_regex": "("}, "the constraint cannot be used"),
        ({"guided_grammar": "begin: x"}, "the constraint cannot be used"),
        ({"guided_json": "{"}, "the JSON schema is not JSON"),
        ({"guided_regex": "x" * 70_000}, "the constraint has 70000 characters; at most 65536 are allowed"),
        ({"guided_choice": "one"}, "guided_choice"),
        (format_of({"$ref": "#"}), "the constraint cannot be used"),
        (format_of({"type": "object", "properties": {"a": {"type": "strin"}}}) | {"stream": True}, "the constraint"),
        ({"ebnf": "root ::= x"}, "not served: ebnf"),
        ({"structural_tag": "{}"}, "not served: structural_tag"),
    ],
    ids=lambda each: str(each)[:60],
)
def test_a_constraint_that_cannot_be_followed_is_refused(fields: dict[str, Any], says: str, server: Running) -> None:
    reply = asked(server, **fields)
    assert reply.status == 400
    assert says in reply.error["message"]
    assert server.holds_nothing()


def test_a_constraint_that_the_requests_other_options_contradict_is_the_clients_fault(server: Running) -> None:
    for _ in range(6):  # as many as the server's own failures would need for /health to say so
        reply = asked(server, guided_regex="a+", allowed_token_ids=[END])
        assert reply.status == 400
        assert "no token is left that the request allows" in reply.error["message"]
    assert send(server, "GET", "/health").status == 200
