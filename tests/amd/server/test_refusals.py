"""Requests that cannot be served are refused with a sentence in OpenAI's form, and never with a status of 5xx."""

import gzip
import json
import math
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from rocm_attn.errors import BadSetting
from rocm_attn.machine.settings import API_KEYS
from rocm_serve.server.http_metrics import HttpMetrics
from rocm_serve.server.keys import ApiKeys, keys_from
from rocm_serve.server.options import ServerOptions
from rocm_serve.server.schema import ChatBody, CompletionBody
from rocm_serve.server.unserved import FIELDS
from rocm_serve.text.chat_template import ChatTemplate
from rocm_serve.text.tokenizer import Tokenizer
from tests.amd.runner.async_engines import engine
from tests.amd.runner.tiny_model import CONFIG, tiny_model, word_tokenizer
from tests.amd.server.raw import CHAT, COMPLETIONS, all_of, head_of_a_post, post, requested, send
from tests.amd.server.running import NAME, Running, gate_of, running

MOST_BYTES = 20_000
USER = [{"role": "user", "content": "w9"}]
KEYS = ("first-secret-key", "second-secret-key")


def picky_tokenizer() -> Tokenizer:
    """Its template refuses a system message, and fails on an assistant's."""
    words = word_tokenizer()
    template = (
        "{% for m in messages %}"
        "{% if m.role == 'system' %}{{ raise_exception('no system here: ' + m.content) }}{% endif %}"
        "{% if m.role == 'assistant' %}{{ m.content.nothing.at_all }}{% endif %}{{ m.content }} {% endfor %}"
    )
    return Tokenizer(words.backend, None, ChatTemplate(template))


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    limits: dict[str, Any] = {"max_body_bytes": MOST_BYTES, "max_choices": 4, "max_stops": 2, "max_new_tokens": 40}
    with running(
        engine(tiny_model()), tokenizer=picky_tokenizer(), max_logprobs=3, max_prompt_tokens=50, **limits
    ) as served:
        yield served


@pytest.fixture(scope="module")
def locked() -> Iterator[Running]:
    with running(engine(tiny_model()), keys=KEYS) as served:
        yield served


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "JSON object"),
        (b"{", "not JSON"),
        (b'{"model": "tiny", "prompt": "w1", "logit_bias": {"1": 1' + b"0" * 400 + b"}}", "logit_bias must map"),
        (
            b'{"model": "tiny", "prompt": "w1", "response_format": '
            b'{"type": "json_schema", "json_schema": {"schema": {"const": "\\ud800"}}}}',
            "of the constraint is the surrogate",
        ),
        (b'"\xff"', "the body is not JSON: byte 1 is not UTF-8"),
        (b"[" * 15_000, "the body is not JSON: it is nested too deeply"),
        (b"9" * 5000, "the body is not JSON: an integer has too many digits"),
    ],
    ids=["empty", "half", "large bias", "half a character of a schema", "no UTF-8", "deep", "many digits"],
)
def test_a_refused_body_is_answered_with_the_reason(body: bytes, says: str, server: Running) -> None:
    """load/test_hostile_bytes.py has more of them."""
    reply = post(server, body)
    assert (reply.status, says in reply.error["message"]) == (400, True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": [[1], "w2"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"model": None}, "model"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 41}, "max_tokens"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 5}, "n"),
        ({"prompt": ["w1"] * 3, "n": 2}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ["a", "b", "c"]}, "stop"),
        ({"stop": ["a"], "stop_token_ids": [4, 5]}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"logprobs": 4}, "logprobs"),
        ({"logit_bias": {"w1": 4}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"timeout": 5e-324}, "timeout"),
        ({"response_format": {"type": "poem"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"priority": 1001}, "priority"),
        ({"suffix": "w3"}, "suffix"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"best_of": 2}, "best_of"),
        ({"max_completion_tokens": 3}, "max_completion_tokens"),
        ({"messages": USER}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
    ],
    ids=str,
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str, server: Running) -> None:
    reply = post(server, requested(**fields))
    assert (reply.status, reply.error["param"], reply.error["type"]) == (400, param, "invalid_request_error")


def test_a_prompt_and_an_answer_longer_than_the_context_are_refused() -> None:
    """max_kv_len is 64."""
    with running(engine(tiny_model())) as served:
        for path, body in (
            ("/v1/completions", requested(prompt=[9] * 40, max_tokens=25)),
            ("/v1/completions", requested(prompt=[[9], [9] * 40], max_tokens=25)),
            (CHAT, {"model": NAME, "messages": [{"role": "user", "content": "w9 " * 39}], "max_tokens": 25}),
        ):
            reply = post(served, body, path)
            assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
            assert "the prompt has 40 tokens and the answer may have 25, together 65" in reply.error["message"]
            assert "and the context holds 64" in reply.error["message"]
        fits = post(served, requested(prompt=[9] * 40, max_tokens=24))
        assert fits.json["usage"]["total_tokens"] == 64


@pytest.mark.parametrize(
    "changing",
    [
        *({"thinking": {"type": "disabled"}}, {"echo": True}, {"input_ids": [1]}, {"session_params": {"id": "a"}}),
        *({"stop_regex": "a+"}, {"no_stop_trim": True}, {"thinking_token_budget": 9}, {"watermarking": True}),
        *({"repetition_detection": {}}, {"logprob_token_ids": [1]}, {"return_prompt_token_ids": True}),
        *({"grammar": 'root ::= "a"'}, {"repeat_penalty": 1.1}, {"n_predict": 9}, {"typical_p": 0.9}, {"mirostat": 2}),
        *({"xtc_probability": 0.5}, {"dry_multiplier": 0.8}, {"enable_thinking": False}, {"thinking_budget": 9}),
        *({"max_new_tokens": 9}, {"stop_sequences": ["a"]}, {"do_sample": False}, {"extra_body": {"top_k": 5}}),
        *({"instructions": "Be brief."}, {"prompt": "w1"}, {"max_output_tokens": 9}, {"num_beams": 4}),
        *({"reasoning": {"effort": "none"}}, {"moderation": {"model": "any"}}, {"return_prompt_text": True}),
    ],
    ids=str,
)
def test_what_other_engines_would_do_is_not_left_out_in_silence(changing: dict[str, Any], server: Running) -> None:
    reply = post(server, {"model": NAME, "messages": USER, "max_tokens": 1, **changing}, CHAT)
    assert (reply.status, reply.error["param"]) == (400, *changing)


@pytest.mark.parametrize("name", ["input", "instructions"])
def test_a_text_under_another_name_is_refused_in_words_that_fit_each_path(name: str, server: Running) -> None:
    """A completion, which has no messages, was said to have its conversation there."""
    reply = post(server, requested(**{name: "Be brief."}))
    assert (
        f"not served: {name}; a text goes into prompt of {COMPLETIONS}, a conversation into" in reply.error["message"]
    )


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_field_that_is_not_served_says_why(path: str, server: Running) -> None:
    body = requested(max_tokens=1) if path == COMPLETIONS else {"model": NAME, "messages": USER, "max_tokens": 1}
    refused = FIELDS.keys() - (ChatBody if path == CHAT else CompletionBody).model_fields
    for name in refused:
        reply = post(server, {**body, name: ["a", "value"]}, path)
        assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "unsupported_parameter", name)
        assert reply.error["message"].startswith(f"not served: {name}; ")
    for number in range(max(len(FIELDS[name].harmless) for name in refused)):
        given = {name: FIELDS[name].harmless[number : number + 1] for name in refused}
        harmless = {name: value for name, values in given.items() for value in values}
        assert post(server, {**body, **harmless}, path).status == 200


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": [CONFIG.vocab_size]}, f"token {CONFIG.vocab_size} is not in the model's vocabulary"),
        ({"prompt": "w1 " * 51}, "the prompt has 51 tokens and this server allows at most 50"),
        ({"stop_token_ids": [CONFIG.vocab_size]}, "not in the model's vocabulary"),
        ({"allowed_token_ids": [1, CONFIG.vocab_size]}, f"token {CONFIG.vocab_size} is not in the model's vocabulary"),
        ({"stop": [""]}, "a text of stop has 0 characters"),
        ({"logit_bias": {"1": 101}}, "logit_bias of token 1 is 101"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}}, "constraint"),
    ],
    ids=str,
)
def test_what_the_engine_refuses_is_the_requests_fault(fields: dict[str, Any], says: str, server: Running) -> None:
    reply = post(server, requested(**fields))
    assert reply.status == 400
    assert says in reply.error["message"]


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "messages must be a list of at least one message"),
        ("w1", "messages must be"),
        ([{"role": "king", "content": "w1"}], "messages must be"),
        ([{"role": "user"}], "messages must be"),
        ([{"role": "user", "content": "w1"}, {"role": "king", "content": "w1"}], "; messages.1.role is wrong"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "; messages.0.content.0.type is wrong",
        ),
        ([{"role": "user", "content": 5}], "; messages.0.content is wrong"),
        ([{"role": "system", "content": "\ud800"}], "the model's chat template refuses the messages: no system here"),
        ([{"role": "assistant", "content": "w1"}], "the model's chat template fails"),
        ([{"role": "user", "content": " "}], "the prompt is empty"),
    ],
    ids=str,
)
def test_messages_that_no_template_can_write_are_refused(messages: Any, says: str, server: Running) -> None:
    reply = post(server, {"model": NAME, "messages": messages}, CHAT)
    assert reply.status == 400
    assert says in reply.error["message"]


def test_a_wrong_place_belongs_to_the_field_that_is_refused(server: Running) -> None:
    """That of a later field, or message, was named if it lies deeper."""
    later = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": 3}}]}
    tools = [{"type": "function", "function": {"name": 3}}]
    reply = post(server, {"model": NAME, "messages": [{"role": "king", "content": "w1"}, later], "tools": tools}, CHAT)
    assert reply.error["param"] == "messages"
    assert reply.error["message"].endswith("; messages.0.role is wrong")


def test_a_number_of_likely_tokens_without_logprobs_is_refused(server: Running) -> None:
    reply = post(server, {"model": NAME, "messages": USER, "top_logprobs": 2}, CHAT)
    assert (reply.status, reply.error["param"]) == (400, "top_logprobs")


def test_what_changes_nothing_is_ignored(server: Running) -> None:
    plain = post(server, requested()).json["choices"]
    for fields in ({"user": "me"}, {"best_of": 1}, {"echo": False}, {"metadata": {"a": "b"}}, {"tools": None}):
        reply = post(server, requested(**fields))
        assert reply.status == 200, reply.body
        assert reply.json["choices"] == plain


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/v1/nothing", 404, "not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/nobody", 404, "model_not_found"),
        ("GET", "/docs", 404, "not_found"),
    ],
)
def test_errors_of_http_have_openais_form(method: str, path: str, status: int, code: str, server: Running) -> None:
    reply = send(server, method, path)
    assert (reply.status, reply.error["code"]) == (status, code)


def test_a_wrong_method_is_answered_with_the_right_ones(server: Running) -> None:
    reply = send(server, "DELETE", "/v1/completions")
    assert reply.error["message"] == "/v1/completions does not serve DELETE; it serves POST"


@pytest.mark.parametrize("path", ["/", "/docs", "/v1", "/v1/completions/more"])
def test_a_path_that_is_not_there_is_named_with_where_the_others_are(path: str, server: Running) -> None:
    reply = send(server, "GET", path)
    assert reply.error["message"] == f"there is no {path}; GET /openapi.json lists the paths"
    assert "/v1/completions" in send(server, "GET", "/openapi.json").json["paths"]


def test_no_client_is_sent_elsewhere(server: Running) -> None:
    """A redirect would go to the host that the client names, which may be another's."""
    for path in ("/v1/completions/", "/health/", "/v1/models/"):
        reply = send(server, "GET", path, headers={"Host": "elsewhere.example"})
        assert (reply.status, "location" in reply.headers) == (404, False)


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/v1/models", "/nothing"])
def test_a_head_is_answered_like_a_get_without_its_body(path: str, server: Running) -> None:
    get, head = (send(server, method, path) for method in ("GET", "HEAD"))
    assert (head.status, head.body) == (get.status, b"")
    assert head.headers["content-type"] == get.headers["content-type"]


def test_a_request_with_two_lengths_is_refused_and_nothing_after_it_is_read(server: Running) -> None:
    """A proxy that goes by the other length would take the second request for a part of the body (RFC 9112, 6.1)."""
    with socket.create_connection(server.address) as client:
        both = head_of_a_post("Content-Length: 5", "Transfer-Encoding: chunked")
        client.sendall(both + b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: t\r\n\r\n")
        received = all_of(client)
    assert received.startswith(b"HTTP/1.1 400 ")
    assert b"\r\nconnection: close\r\n" in received.lower()
    assert b'"code":"ambiguous_length"' in received
    assert received.count(b"HTTP/1.1") == 1


def test_a_body_of_another_type_is_refused(server: Running) -> None:
    """A page in a browser can send text to a server on the loopback address without asking, but not JSON."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "", "application/jsonp"):
        reply = post(server, requested(), Content_Type=kind)
        assert (reply.status, reply.error["code"]) == (415, "unsupported_media_type")
        assert "Content-Type: application/json" in reply.error["message"]
    for kind in ("application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"):
        assert post(server, requested(), Content_Type=kind).status == 200


def test_a_compressed_body_is_refused_by_its_header(server: Running) -> None:
    reply = post(server, gzip.compress(json.dumps(requested()).encode()), Content_Encoding="gzip")
    assert (reply.status, reply.error["code"]) == (415, "unsupported_media_type")
    assert "the body is compressed (Content-Encoding: gzip)" in reply.error["message"]
    assert post(server, requested(), Content_Encoding="utf-8").status == 200


@pytest.mark.parametrize("extra", [1, MOST_BYTES, 9 * MOST_BYTES])
def test_a_body_that_is_too_long_is_not_kept(extra: int, server: Running) -> None:
    reply = post(server, b" " * (MOST_BYTES + extra))
    assert (reply.status, reply.error["code"]) == (413, "body_too_large")
    assert post(server, requested(prompt="w1" + " " * (MOST_BYTES - 200))).status == 200


def test_the_bound_of_a_body_holds_while_it_streams_in(server: Running) -> None:
    """A body without a length, in chunks: the server answers before it has ended."""
    with socket.create_connection(server.address) as connection:
        connection.sendall(head_of_a_post("Transfer-Encoding: chunked"))
        chunk = b"%x\r\n%s\r\n" % (MOST_BYTES, b" " * MOST_BYTES)
        connection.sendall(chunk * 2 + b"1\r\n \r\n")  # and no end
        received = all_of(connection)
    assert received.startswith(b"HTTP/1.1 413 ")
    assert b'"code":"body_too_large"' in received


async def test_a_body_that_no_route_reads_is_not_kept() -> None:
    """There is no limit on how many of them come at a time, and they need no key."""
    read: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        read.append(await receive())
        await JSONResponse({})(scope, receive, send)

    async def receive() -> Message:
        return {"type": "http.request", "body": b"x" * 1000, "more_body": False}

    async def send(message: Message) -> None:
        pass

    scope = {"type": "http", "method": "POST", "path": "/health", "headers": []}
    await gate_of(app, HttpMetrics())(scope, receive, send)
    assert read == [{"type": "http.request", "body": b"", "more_body": False}]


def test_a_body_that_comes_slowly_is_given_up() -> None:
    with running(engine(tiny_model()), body_seconds=0.05) as served, socket.create_connection(served.address) as slow:
        slow.sendall(head_of_a_post("Content-Length: 9") + b"{")
        received = all_of(slow)
    assert received.startswith(b"HTTP/1.1 408")
    assert b'"code":"body_too_slow"' in received


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer wrong", f"Basic {KEYS[0]}", KEYS[0], f"Bearer {KEYS[0]}x"])
def test_without_a_key_nothing_of_the_api_is_served(header: str, locked: Running) -> None:
    for reply in (post(locked, requested(), Authorization=header), send(locked, "GET", "/v1/models")):
        assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
        assert reply.headers["www-authenticate"] == "Bearer"
    assert send(locked, "GET", "/health").status == 200


def test_a_public_address_needs_keys() -> None:
    with pytest.raises(BadSetting, match=r"would listen on 0\.0\.0\.0, .* give --api-key-file"):
        keys_from(ServerOptions(host="0.0.0.0"), {})
    assert keys_from(ServerOptions(host="0.0.0.0", allow_anonymous=True), {}) == ApiKeys()
    for host in ("127.0.0.1", "::1", "localhost"):
        assert keys_from(ServerOptions(host=host), {}) == ApiKeys()
    both = keys_from(ServerOptions(host="0.0.0.0"), {API_KEYS: f"{KEYS[0]}, {KEYS[1]},"})
    assert both == ApiKeys.of(list(KEYS))


@pytest.mark.parametrize("given", [",", " "])
def test_a_variable_that_should_have_keys_and_has_none_opens_no_server(given: str) -> None:
    with pytest.raises(BadSetting, match="which holds no API key; give keys, or unset it"):
        keys_from(ServerOptions(), {API_KEYS: given})
    assert keys_from(ServerOptions(), {API_KEYS: ""}) == ApiKeys()
    with pytest.raises(BadSetting, match="ROCM_ATTN_API_KEY is set, which nothing reads; keys are in ROCM_ATTN_API_KE"):
        keys_from(ServerOptions(), {"ROCM_ATTN_API_KEY": KEYS[0]})


def test_keys_are_read_from_a_file(tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# ours\n{KEYS[0]}\n\n  {KEYS[1]}\n")
    assert keys_from(ServerOptions(api_key_file=file), {API_KEYS: "not-looked-at"}) == ApiKeys.of(list(KEYS))
    for content, says in (("# none\n", "holds no API key"), ("short", "cannot be used")):
        file.write_text(content)
        with pytest.raises(BadSetting, match=says):
            keys_from(ServerOptions(api_key_file=file), {})
    file.write_bytes(b"\xef\xbb\xbf# na\xefve\n" + KEYS[0].encode() + b"\r\n")
    assert keys_from(ServerOptions(api_key_file=file), {}) == ApiKeys.of(list(KEYS[:1]))
    for odd in ("\x0b", "\x0c", "\x1c", "\x85", "\u2028"):
        file.write_text(f"# a comment ends with its line,{odd}not-before\n{KEYS[0]}\n", encoding="utf-8")
        assert keys_from(ServerOptions(api_key_file=file), {}) == ApiKeys.of(list(KEYS[:1]))
    file.write_bytes(KEYS[0].encode() + b"\xc3\n")
    with pytest.raises(BadSetting, match="API key 1 cannot be used; a key has at least 8 printable ASCII characters"):
        keys_from(ServerOptions(api_key_file=file), {})
    with pytest.raises(BadSetting, match="cannot be read"):
        keys_from(ServerOptions(api_key_file=tmp_path / "missing"), {})
    assert KEYS[0] not in repr(ApiKeys.of(list(KEYS)))


@pytest.mark.parametrize(
    "wrong",
    [
        *({"port": -1}, {"port": 65536}, {"max_requests": 0}, {"deadline_seconds": 0}, {"drain_seconds": -1}),
        *({"deadline_seconds": math.nan}, {"drain_seconds": math.nan}, {"truth_every": math.nan}),
        *({"truth_every": math.inf}, {"port": "8000"}),
        *({"host": "localhost:8000"}, {"host": "http://localhost"}),
    ],
    ids=str,
)
def test_options_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadSetting, match=next(iter(wrong))):
        ServerOptions(**wrong)
