"""Clients get the engine's output, streamed or whole; the client is OpenAI's own."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel
from rocm_serve.request import Completion, Request
from rocm_serve.sampling.sampling_options import Sampling
from rocm_serve.server.served_model import seed_of_answer
from tests.amd.runner.async_engines import engine
from tests.amd.server.raw import CHAT, post, requested
from tests.amd.server.running import NAME, Running, running

PROMPT = "w9 w12 w33"


@pytest.fixture(scope="module")
def server(loaded: LoadedModel) -> Iterator[Running]:
    with running(engine(loaded)) as served:
        yield served


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def direct(loaded: LoadedModel) -> Engine:
    return engine(loaded)


def generated(direct: Engine, prompt: tuple[int, ...], tokens: int, **options: Any) -> Completion:
    """Returns the engine's completion of a prompt, without a server."""
    (completion,) = direct.generate([Request(prompt, tokens, **options)])
    return completion


def test_echo_puts_the_prompt_before_each_answer(client: openai.OpenAI) -> None:
    requested: dict[str, Any] = {"model": NAME, "max_tokens": 3, "temperature": 0, "n": 2}
    for prompt in (["w9  w12", "w33"], [[9, 12], [33]]):
        plain = client.completions.create(prompt=prompt, **requested)
        echoed = client.completions.create(prompt=prompt, echo=True, **requested)
        before = ["w9  w12", "w9  w12", "w33", "w33"] if isinstance(prompt[0], str) else ["w9 w12"] * 2 + ["w33"] * 2
        assert [each.text for each in echoed.choices] == [
            text + each.text for text, each in zip(before, plain.choices, strict=True)
        ]
        streamed = [""] * 4
        for chunk in client.completions.create(prompt=prompt, echo=True, stream=True, **requested):
            for choice in chunk.choices:
                streamed[choice.index] += choice.text
        assert streamed == [each.text for each in echoed.choices]


def test_an_answer_has_the_space_between_it_and_the_prompt(client: openai.OpenAI) -> None:
    """The tokenizer writes a space between two words, and none before the first one of a text."""
    requested: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "max_tokens": 3, "temperature": 0, "logprobs": 0}
    (choice,) = client.completions.create(echo=True, **requested).choices
    assert choice.logprobs is not None
    assert choice.text == " ".join(choice.logprobs.tokens or ())
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(stream=True, **requested))
    assert PROMPT + streamed == choice.text


@pytest.mark.parametrize("seed", [-1, 2**63 - 1])
def test_a_stream_is_the_whole_answer_in_pieces(seed: int, client: openai.OpenAI, direct: Engine) -> None:
    requested: dict[str, Any] = {
        "model": NAME,
        "prompt": PROMPT,
        "max_tokens": 12,
        "temperature": 0.9,
        "seed": seed,
        "n": 3,
    }
    whole = client.completions.create(**requested)
    texts, reasons, usage = ["", "", ""], [None] * 3, []
    for chunk in client.completions.create(**requested, stream=True, stream_options={"include_usage": True}):
        usage.append(chunk.usage)
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    sampled = [Sampling(temperature=0.9, seed=seed_of_answer(seed, 0, choice)) for choice in range(3)]
    expected = [generated(direct, (9, 12, 33), 12, sampling=each) for each in sampled]
    assert texts == [each.text for each in whole.choices] == [each.text for each in expected]
    assert reasons == ["length"] * 3
    assert usage[-1] == whole.usage
    assert set(usage[:-1]) == {None}
    assert len(set(texts)) == 3, "each choice draws for itself"


def test_each_prompt_of_a_list_draws_for_itself(client: openai.OpenAI, direct: Engine) -> None:
    requested: dict[str, Any] = {"model": NAME, "prompt": [PROMPT] * 3, "max_tokens": 12, "temperature": 0.9}
    texts = [each.text for each in client.completions.create(**requested, seed=5, n=2).choices]
    seeds = [seed_of_answer(5, place, choice) for place in range(3) for choice in range(2)]
    assert seeds[0] == 5
    sampled = [Sampling(temperature=0.9, seed=seed) for seed in seeds]
    assert texts == [generated(direct, (9, 12, 33), 12, sampling=each).text for each in sampled]
    assert len(set(texts)) == 6
    drawn = [each.text for each in client.completions.create(**requested).choices]
    assert len(set(drawn)) == 3, "without a seed, too"


def test_a_conversation_is_written_by_the_models_template(client: openai.OpenAI, direct: Engine) -> None:
    expected = generated(direct, (63, 9, 12), 6)
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "w9 "}, {"type": "text", "text": "w12"}]}]
    requested: dict[str, Any] = {"model": NAME, "messages": messages, "temperature": 0}
    answer = client.chat.completions.create(**requested, max_completion_tokens=6)
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].message.role == "assistant"
    chunks = list(client.chat.completions.create(**requested, max_tokens=6, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "length"


def test_without_a_bound_a_conversation_goes_on_as_far_as_there_is_room(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "w9"}], temperature=0)
    assert answer.usage is not None
    assert answer.usage.total_tokens == 64  # max_kv_len


def test_without_a_bound_a_completion_has_16_tokens_or_as_many_as_there_is_room_for(
    client: openai.OpenAI, loaded: LoadedModel
) -> None:
    def tokens_after(client: openai.OpenAI, prompt: list[int]) -> int:
        usage = client.completions.create(model=NAME, prompt=prompt, extra_body={"ignore_eos": True}).usage
        assert usage is not None
        tokens: int = usage.completion_tokens
        return tokens

    assert [tokens_after(client, [9] * length) for length in (3, 60)] == [16, 4]  # max_kv_len is 64
    with (
        running(engine(loaded), max_new_tokens=5) as strict,
        openai.OpenAI(base_url=f"{strict.url}/v1", api_key="none", max_retries=0) as asking,
    ):
        assert tokens_after(asking, [9]) == 5


@pytest.mark.parametrize(
    "prompt",
    ["w9 w12", ["w9 w12"], [9, 12], [[9, 12]], ["w9 w12", "w3"], [[9, 12], [3]]],
    ids=["text", "texts", "ids", "lists of ids", "two texts", "two lists"],
)
def test_prompts_are_texts_or_token_ids(prompt: Any, client: openai.OpenAI, direct: Engine) -> None:
    num = 2 if len(prompt) == 2 and not isinstance(prompt[0], int) and not isinstance(prompt, str) else 1
    expected = [generated(direct, ids, 4).text for ids in ((9, 12), (3,))[:num]]
    answer = client.completions.create(model=NAME, prompt=prompt, max_tokens=4, temperature=0, n=2)
    assert [choice.text for choice in answer.choices] == [text for text in expected for _ in range(2)]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == (3 if num == 2 else 2), "a prompt counts once, however many answers it gets"


def test_stop_tokens_end_the_text(client: openai.OpenAI, direct: Engine) -> None:
    third = generated(direct, (9, 12, 33), 10).token_ids[2]
    expected = generated(direct, (9, 12, 33), 10, stop_token_ids=(third,))
    extra = {"stop_token_ids": [third]}
    answer = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=10, temperature=0, extra_body=extra)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected.text, "stop")


def test_only_allowed_tokens_are_picked(server: Running, direct: Engine) -> None:
    """They hold in each of n answers, however often and in whichever order a client names them."""
    expected = generated(direct, (9, 12, 33), 10, allowed_token_ids=(5, 40, 7))
    assert {*expected.token_ids} <= {5, 7, 40}
    reply = post(server, requested(prompt=PROMPT, max_tokens=10, allowed_token_ids=[40, 7, 5, 7]))
    assert reply.json["choices"][0]["text"] == expected.text
    fields = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 6, "n": 2, "temperature": 2}
    reply = post(server, {"model": NAME, **fields, "allowed_token_ids": [5, 7]}, CHAT)
    for choice in reply.json["choices"]:
        assert {*choice["message"]["content"].split()} <= {"w5", "w7"}


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("other")
    assert refused.value.code == "model_not_found"


def test_a_request_of_lower_priority_is_answered_first(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has one place; all three have come by the end of its first step."""
    served = engine(loaded, max_batch_size=1)
    ended: list[int] = []
    completion, step = served.completion, served.step
    priorities, all_there = [2, 0, -1], threading.Event()

    def in_turn(number: int) -> Completion:
        done = completion(number)
        ended.append(done.prompt_token_ids[0])
        return done

    def once_all_wait() -> Any:
        all_there.wait()
        return step()

    monkeypatch.setattr(served, "completion", in_turn)
    monkeypatch.setattr(served, "step", once_all_wait)
    with running(served) as server, ThreadPoolExecutor() as threads:
        bodies = [requested(prompt=[9 + place], priority=each) for place, each in enumerate(priorities)]
        replies = [threads.submit(post, server, body) for body in bodies]
        server.wait_until(lambda: server.front.num_requests >= len(bodies))
        all_there.set()
        assert [each.result().status for each in replies] == [200] * 3
    assert ended == [11, 10, 9]
