"""Logprobs name each token by its text and its bytes, as OpenAI's answers do.

Logprobs of prompts over HTTP: the requests of lm-eval's client, and vLLM's form.
"""

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import tokenizers
import torch
from starlette.responses import JSONResponse
from tokenizers import decoders, models

from rocm_serve.engine import Engine
from rocm_serve.request import Completion
from rocm_serve.request_stream import OutputChunk
from rocm_serve.sampling.logprobs import NO_LOGPROBS, TokenLogprobs
from rocm_serve.server import long_json
from rocm_serve.server.call_reader import Reader
from rocm_serve.server.emitted_tokens import EmittedTokens
from rocm_serve.server.event_stream import _Frame
from rocm_serve.server.replies import ChatReplies, CompletionReplies, PromptReport, TextChunk, Usage, as_event
from rocm_serve.text.tokenizer import Tokenizer
from tests.amd.noted import noted
from tests.amd.runner.async_engines import engine
from tests.amd.runner.hf_models import hf_logits, load, save, small_hf_model
from tests.amd.runner.small_tokenizers import sentencepiece
from tests.amd.server.raw import CHAT, post, requested
from tests.amd.server.running import NAME, Running, running

END = "<｜end▁of▁text｜>"
# GPT-2's characters for the four bytes of U+1F389, two to a token, and for " a".
VOCABULARY = {"ðŁ": 0, "İī": 1, "Ġa": 2, "b": 3}


@pytest.fixture
def emitted() -> EmittedTokens:
    backend = tokenizers.Tokenizer(models.BPE(VOCABULARY, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END])
    return EmittedTokens(Tokenizer(backend, None, None))


@pytest.mark.parametrize("text", [" the", 'a "quoted" \\ word\n', "\N{PARTY POPPER} \x00 \x7f", "\u2028\x85"])
def test_the_event_of_a_text_is_the_json_of_its_chunk(text: str, emitted: EmittedTokens) -> None:
    for replies in (
        ChatReplies("m", emitted, Reader, PromptReport()),
        CompletionReplies("m", emitted, (), PromptReport()),
    ):
        frame = _Frame({"usage": None})
        for each in ("first", text):
            (chunk,) = replies.chunk(0, OutputChunk((1,), each, None))
            assert isinstance(chunk, TextChunk)
            event = frame.event(chunk)
            assert event == as_event({**chunk.make(0, each), "usage": None})
            line, _ = event.decode().splitlines()
            assert json.loads(line.removeprefix("data: "))["choices"] == chunk.make(0, each)["choices"]
    assert ChatReplies("m", emitted, Reader, PromptReport()).chunk(0, OutputChunk((1,), "", None)) == []


def of(*token_ids: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(token, -1.0, ((token, -1.0),)) for token in token_ids]


def test_parts_of_a_character_have_their_bytes(emitted: EmittedTokens) -> None:
    assert emitted.in_messages([]) is None
    answer = emitted.in_messages(of(0, 1, 2))
    assert answer is not None
    content = answer["content"]
    assert [each["token"] for each in content] == ["\\xf0\\x9f", "\\x8e\\x89", " a"]
    assert bytes(byte for each in content for byte in each["bytes"]).decode() == "\N{PARTY POPPER} a"
    assert [each["top_logprobs"][0]["bytes"] for each in content] == [each["bytes"] for each in content]


def test_a_special_token_has_its_name_and_no_place_in_the_text(emitted: EmittedTokens) -> None:
    answer = emitted.in_messages(of(4))
    assert answer is not None
    assert (answer["content"][0]["token"], answer["content"][0]["bytes"]) == (END, list(END.encode()))
    beside, offset = emitted.beside_text(of(3, 4, 3), 0)
    assert (beside["tokens"], beside["text_offset"], offset) == (["b", END, "b"], [0, 1, 1], 2)


def test_offsets_count_the_characters_that_begin_before_a_token(emitted: EmittedTokens) -> None:
    beside, offset = emitted.beside_text(of(0, 1, 2, 3), 5)
    assert beside["tokens"] == ["bytes:\\xf0\\x9f", "bytes:\\x8e\\x89", " a", "b"]
    assert (beside["text_offset"], offset) == ([5, 6, 6, 8], 9)


@pytest.mark.parametrize("prompt", ["hello world", "é low", "hello<s>low</s>  é<s>lower", "low▁low low"])
def test_an_echoed_token_stands_at_its_place_in_the_text(prompt: str) -> None:
    """SentencePiece writes a space before a text, and after each special token."""
    tokenizer = sentencepiece()
    ids, new = tokenizer.encode(prompt), tokenizer.encode("lower")
    text = prompt + " lower"
    done = Completion(tuple(ids), tuple(new), " lower", "length", "", tuple(of(*new)), 0, 0.0, tuple(of(*ids[1:])))
    replies = CompletionReplies("m", EmittedTokens(tokenizer), [prompt], PromptReport(num_echoed=1))
    (choice,) = replies.whole([done], Usage(len(ids), len(new), 0))["choices"]
    assert choice["text"] == text
    tokens, offsets = (choice["logprobs"][name] for name in ("tokens", "text_offset"))
    assert offsets[len(ids)] == len(prompt)
    for token, offset in list(zip(tokens, offsets, strict=True))[1:]:
        assert token.startswith("bytes:") or text.replace("▁", " ").startswith((token, token.lstrip(" ")), offset)


def test_a_special_token_that_a_prompt_spells_has_its_place_in_the_echo(emitted: EmittedTokens) -> None:
    spelled = emitted.of_echo((3, 4, 3), f"b{END}b", of(4, 3), 0)
    assert (spelled["tokens"], spelled["text_offset"]) == (["b", END, "b"], [0, 1, 1 + len(END)])
    of_ids = emitted.of_echo((4, 3, 4, 3), "bb", of(3, 4, 3), 0)
    assert of_ids["text_offset"] == [0, 0, 1, 1]


def test_a_token_that_the_model_excludes_has_a_number_that_json_can_hold(emitted: EmittedTokens) -> None:
    excluded = [TokenLogprobs(3, -math.inf, ((2, 0.0),))]
    beside, _ = emitted.beside_text(excluded, 0)
    assert beside["token_logprobs"] == [-9999.0]
    assert list(emitted.of_prompt(excluded, 1))[1] == {
        "2": {"logprob": 0.0, "rank": 1, "decoded_token": " a"},
        "3": {"logprob": -9999.0, "rank": None, "decoded_token": "b"},
    }


def test_a_long_answer_is_written_token_by_token(emitted: EmittedTokens, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the answer to a prompt of 128,000 tokens holds up every other stream for seconds."""
    encode, encoded = long_json._encode, noted(monkeypatch, long_json, "_encode")
    prompt, report = of(*range(3)) * 200, PromptReport(num_likeliest=1, num_echoed=1)
    done = Completion((0,) * 601, (3,) * 600, "b" * 600, "length", logprobs=tuple(of(3)) * 600, prompt_logprobs=prompt)
    for replies in (
        CompletionReplies("m", emitted, ["b"] * 2, report),
        ChatReplies("m", emitted, Reader, report),
    ):
        usage = Usage(601, 600, 0)
        plain = replies.whole([done] * 2, usage)
        for each in (plain, *plain["choices"]):
            if "prompt_logprobs" in each:
                each["prompt_logprobs"] = list(each["prompt_logprobs"])
        assert long_json.long_json(replies.whole([done] * 2, usage)) == JSONResponse(plain).body
    assert max(len(encode(value)) for (value,) in encoded) < 700


def test_an_id_without_an_entry_has_no_bytes(emitted: EmittedTokens) -> None:
    answer = emitted.in_messages(of(9))
    assert answer is not None
    assert (answer["content"][0]["token"], answer["content"][0]["bytes"]) == ("", None)
    nameless = EmittedTokens(None).in_messages(of(9))
    assert nameless is not None
    assert nameless["content"][0]["token"] == "token_id:9"


TOLERANCE = 1e-3
CONTEXTS = ((5, 17, 60, 33), (9, 12, 33, 61, 4, 8, 15), (40,))


@pytest.fixture(scope="module")
def model() -> Any:
    return small_hf_model("Llama", vocab_size=64)


@pytest.fixture(scope="module")
def server(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    loaded = load(save(model, tmp_path_factory.mktemp("model")))
    with running(engine(loaded, chunk=6)) as served:
        yield served


def logprobs_of(model: Any, token_ids: tuple[int, ...]) -> torch.Tensor:
    """float64 [tokens - 1, vocab]: the logprobs before each token but the first, by transformers."""
    return hf_logits(model, torch.tensor(token_ids))[:-1].double().log_softmax(-1)


def likelihood(model: Any, context: tuple[int, ...], continuation: tuple[int, ...]) -> tuple[float, bool]:
    """The log-likelihood of a continuation, and whether it is the greedy one, by transformers."""
    rows = logprobs_of(model, context + continuation)[len(context) - 1 :]
    own = rows.gather(1, torch.tensor(continuation)[:, None])[:, 0]
    return float(own.sum()), bool((own == rows.max(1).values).all())


def greedy(model: Any, context: tuple[int, ...], num: int) -> tuple[int, ...]:
    tokens = context
    for _ in range(num):
        tokens += (int(hf_logits(model, torch.tensor(tokens))[-1].argmax()),)
    return tokens[len(context) :]


def as_lm_eval_asks(prompts: list[list[int]], **fields: Any) -> dict[str, Any]:
    """The body that lm-eval's local-completions sends for log-likelihoods."""
    body = {"model": NAME, "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    return {**body, "echo": True, **fields}


def as_lm_eval_reads(choice: Any, num_context: int, end: int | None) -> tuple[float, bool]:
    """The log-likelihood of a choice's continuation, and whether it is the greedy one, as lm-eval reads the answer."""
    own, top = (choice["logprobs"][name][num_context:end] for name in ("token_logprobs", "top_logprobs"))
    return sum(own), all(one == max(others.values()) for one, others in zip(own, top, strict=True))


@pytest.mark.parametrize(("max_tokens", "end"), [(1, -1), (0, None)])
def test_log_likelihoods_that_lm_eval_asks_for_are_those_of_transformers(
    max_tokens: int, end: int | None, server: Running, model: Any
) -> None:
    continuations = [greedy(model, CONTEXTS[0], 3), (7, 8, 50), greedy(model, CONTEXTS[2], 20)]
    prompts = [[*context, *more] for context, more in zip(CONTEXTS, continuations, strict=True)]
    reply = post(server, as_lm_eval_asks(prompts, max_tokens=max_tokens))
    assert reply.status == 200
    choices = sorted(reply.json["choices"], key=lambda choice: choice["index"])
    for context, more, choice in zip(CONTEXTS, continuations, choices, strict=True):
        found, is_greedy = as_lm_eval_reads(choice, len(context), end)
        expected, expected_greedy = likelihood(model, context, more)
        assert found == pytest.approx(expected, abs=TOLERANCE)
        assert is_greedy == expected_greedy == (more != (7, 8, 50))
        assert choice["logprobs"]["token_logprobs"][0] is choice["logprobs"]["top_logprobs"][0] is None
        assert len(choice["logprobs"]["tokens"]) == len(context) + len(more) + max_tokens
    assert reply.json["usage"]["completion_tokens"] == 3 * max_tokens


def test_an_echo_alone_is_the_prompt_and_its_logprobs(server: Running) -> None:
    with_one, alone = (
        post(server, requested(echo=True, logprobs=2, max_tokens=num)).json["choices"][0] for num in (1, 0)
    )
    assert (alone["text"], alone["finish_reason"]) == ("w9 w12 w33", "length")
    assert with_one["text"].startswith(alone["text"])
    assert {name: values[:-1] for name, values in with_one["logprobs"].items()} == alone["logprobs"]
    assert post(server, requested(echo=True, max_tokens=0)).json["choices"][0]["logprobs"] is None


def test_one_choice_of_a_prompt_computes_its_logprobs_and_all_have_them(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [list(context) for context in CONTEXTS[:2]]
    submitted = noted(monkeypatch, Engine, "submit")
    choices = post(server, requested(prompt=prompts, prompt_logprobs=1, n=3)).json["choices"]
    assert [request.prompt_logprobs for _, request in submitted] == [1, NO_LOGPROBS, NO_LOGPROBS] * 2
    for prompt, place in zip(prompts, (0, 3), strict=True):
        first, *others = (each["prompt_logprobs"] for each in choices[place : place + 3])
        assert [first] * 2 == others
        assert all(str(token) in found for token, found in zip(prompt[1:], first[1:], strict=True))


def test_prompt_logprobs_have_the_form_of_vllm(server: Running, model: Any) -> None:
    tokens, num = CONTEXTS[1], 2
    answers = (
        post(server, requested(prompt=list(tokens), prompt_logprobs=num)).json["choices"][0],
        post(server, requested(prompt=list(tokens), prompt_logprobs=num, n=2)).json["choices"][1],
        post(
            server,
            {
                "model": NAME,
                "temperature": 0,
                "max_tokens": 2,
                "prompt_logprobs": num,
                "messages": [{"role": "user", "content": " ".join(f"w{token}" for token in tokens)}],
            },
            CHAT,
        ).json,
    )
    for answer, prompt in zip(answers, (tokens, tokens, (63, *tokens)), strict=True):
        first, *others = answer["prompt_logprobs"]
        assert first is None
        for token, known, row in zip(prompt[1:], others, logprobs_of(model, prompt), strict=True):
            ranks = row.sort(descending=True).indices[:num].tolist()
            assert set(known) == {str(each) for each in (token, *ranks)}
            for name, each in known.items():
                assert each["logprob"] == pytest.approx(float(row[int(name)]), abs=TOLERANCE)
                assert each["rank"] == (ranks.index(int(name)) + 1 if int(name) in ranks else None)
                assert each["decoded_token"] == f"w{name}"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True, "prompt_logprobs": 0}, "stream"),
        ({"stream": True, "echo": True, "logprobs": 0}, "stream"),
        ({"stream": True, "echo": True, "max_tokens": 0}, "stream"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ],
    ids=str,
)
def test_what_cannot_be_answered_is_refused(fields: dict[str, Any], param: str, server: Running) -> None:
    reply = post(server, requested(**fields))
    assert (reply.status, reply.error["param"]) == (400, param)
