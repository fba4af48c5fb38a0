"""Logprobs name each token by its text and its bytes, as OpenAI's answers do."""

from __future__ import annotations

import math

import pytest
import tokenizers
from starlette.responses import JSONResponse
from tokenizers import decoders, models

from rocm_serve.request import Completion
from rocm_serve.request_stream import OutputChunk
from rocm_serve.sampling.logprobs import TokenLogprobs
from rocm_serve.server import long_json
from rocm_serve.server.call_reader import Reader
from rocm_serve.server.emitted_tokens import EmittedTokens
from rocm_serve.server.event_stream import _Frame
from rocm_serve.server.replies import ChatReplies, CompletionReplies, PromptReport, TextChunk, Usage, as_event
from rocm_serve.text.tokenizer import Tokenizer
from tests.amd.runner.small_tokenizers import sentencepiece

END = "<｜end▁of▁text｜>"
# GPT-2's characters for the four bytes of U+1F389, two to a token, and for " a".
VOCABULARY = {"ðŁ": 0, "İī": 1, "Ġa": 2, "b": 3}


@pytest.fixture
def emitted() -> EmittedTokens:
    backend = tokenizers.Tokenizer(models.BPE(VOCABULARY, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END])
    return EmittedTokens(Tokenizer(backend, None, None))


@pytest.mark.parametrize("text", [" the", 'a "quoted" \\ word\n', "\N{PARTY POPPER} \x00 \x7f", "\u2028"])
def test_the_event_of_a_text_is_the_json_of_its_chunk(text: str, emitted: EmittedTokens) -> None:
    for replies in (ChatReplies("m", emitted, Reader), CompletionReplies("m", emitted)):
        frame = _Frame({"usage": None})
        for each in ("first", text):
            (chunk,) = replies.chunk(0, OutputChunk((1,), each, None))
            assert isinstance(chunk, TextChunk)
            assert frame.event(chunk) == as_event({**chunk.make(0, each), "usage": None})
    assert ChatReplies("m", emitted, Reader).chunk(0, OutputChunk((1,), "", None)) == []


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


@pytest.mark.parametrize("prompt", ["hello world", "é low"])
def test_an_echoed_token_stands_at_its_place_in_the_text(prompt: str) -> None:
    """SentencePiece writes a space before a text."""
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
        assert token.startswith("bytes:") or text.startswith(token, offset)


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
    longest, encode = list[int](), long_json._encode

    def noted(value: object) -> str:
        longest.append(len(encode(value)))
        return encode(value)

    monkeypatch.setattr(long_json, "_encode", noted)
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
    assert max(longest) < 700


def test_an_id_without_an_entry_has_no_bytes(emitted: EmittedTokens) -> None:
    answer = emitted.in_messages(of(9))
    assert answer is not None
    assert (answer["content"][0]["token"], answer["content"][0]["bytes"]) == ("", None)
    nameless = EmittedTokens(None).in_messages(of(9))
    assert nameless is not None
    assert nameless["content"][0]["token"] == "token_id:9"
