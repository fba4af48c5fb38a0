"""Long texts, counted in pieces, and bodies of many items: refused if they cannot fit, before anything is read."""

import os
import threading
import weakref
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from rocm_attn.errors import BadRequest
from rocm_serve.models.loading import LoadedModel
from rocm_serve.server import tokenising
from rocm_serve.server.schema import MOST_MESSAGES
from rocm_serve.server.tokenising import NICENESS
from rocm_serve.text.chat_template import ChatTemplate
from rocm_serve.text.token_count import PIECE
from rocm_serve.text.tokenizer import Tokenizer
from tests.amd.noted import noted
from tests.amd.runner.async_engines import engine
from tests.amd.runner.tiny_model import tiny_model, word_tokenizer
from tests.amd.server.raw import CHAT, COMPLETIONS, Client, post, requested, send
from tests.amd.server.running import NAME, Running, running

PLAIN = ChatTemplate("{% for m in messages %}{{ m.content }}{{ m.reasoning_content or '' }}{% endfor %}")
LONG = 70_000
SAID: dict[str, Any] = {"role": "user", "content": ""}


class Encoding:
    """A text's tokens. made: gets the number of ids when they are asked for"""

    def __init__(self, encoding: Any, made: list[int]) -> None:
        self._encoding, self._made = encoding, made

    def __len__(self) -> int:
        return len(self._encoding)

    @property
    def ids(self) -> Any:
        self._made.append(len(self))
        return self._encoding.ids


class Backend:
    """A tokenizer's backend that records the lengths of the texts that it splits, and may hold long ones up.

    lengths:  of the texts, in characters
    made:     the numbers of ids that were made, per text
    niceness: of the threads that split them
    encoding: the last text's
    """

    def __init__(self, backend: Any) -> None:
        self._backend, self.lengths, self.made = backend, list[int](), list[int]()
        self.niceness = list[int]()
        self.encoding: Callable[[], Encoding | None] = lambda: None
        self._may_go_on = threading.Event()
        self._may_go_on.set()
        self._begun = threading.Semaphore(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.lengths += map(len, texts)
        self.niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        if len(texts[0]) >= LONG:
            self._begun.release()
            self._may_go_on.wait()
        (encoding,) = (Encoding(each, self.made) for each in self._backend.encode_batch_fast(texts, **options))
        self.encoding = weakref.ref(encoding)
        return [encoding]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within the context, no long text is split to its end."""
        self._may_go_on.clear()
        try:
            yield
        finally:
            self._may_go_on.set()

    def begun(self) -> None:
        """Waits until it has begun to split another long text."""
        self._begun.acquire()


def recording(tokenizer: Tokenizer, backend: Backend) -> Tokenizer:
    as_tokenizer: Any = backend
    return Tokenizer(as_tokenizer, tokenizer.bos_token_id, PLAIN)


def body(path: str, text: str) -> dict[str, Any]:
    """Returns a request of either kind with a text."""
    if path == CHAT:
        return {"model": NAME, "messages": [{**SAID, "content": text}], "max_tokens": 2, "temperature": 0}
    return requested(prompt=text)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model()


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_text_of_too_many_tokens_is_refused_before_an_id_is_made(path: str, loaded: LoadedModel) -> None:
    backend = Backend(word_tokenizer().backend)
    with running(engine(loaded), tokenizer=recording(word_tokenizer(), backend), max_prompt_tokens=20) as server:
        reply = post(server, body(path, "w1 " * 21), path)
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
        assert "the prompt has 21 tokens and this server allows at most 20" in reply.error["message"]
        assert (len(backend.lengths), backend.made) == (1, [])
        assert post(server, body(path, "w1 " * 20), path).json["usage"]["prompt_tokens"] == 20
        assert backend.made == [20]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_text_that_is_far_too_long_is_never_given_to_the_tokenizer_whole(path: str, loaded: LoadedModel) -> None:
    backend = Backend(word_tokenizer().backend)
    with running(engine(loaded), tokenizer=recording(word_tokenizer(), backend), max_prompt_tokens=20) as server:
        reply = post(server, body(path, "w1 " * LONG), path)
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
        assert "at least " in reply.error["message"]
        assert backend.lengths == [PIECE]
        assert (
            post(server, body(path, "w1 " * LONG + "\ud800"), path)
            .error["message"]
            .startswith(f"character {3 * LONG + 1} of the text is the surrogate")
        )


def test_the_number_of_tokens_that_is_checked_counts_the_first_one_of_the_model() -> None:
    checked: list[int] = []
    words = Tokenizer(word_tokenizer().backend, 2, PLAIN)
    assert words.encode("w1 w3", checked.append) == [2, 1, 3]
    assert words.encode_unmarked("w1 w3", checked.append) == [1, 3]
    assert checked == [3, 2]


def test_a_refusal_keeps_nothing_of_the_tokens() -> None:
    def refuse(num_tokens: int) -> None:
        raise BadRequest(f"{num_tokens} are too many")

    backend = Backend(word_tokenizer().backend)
    with pytest.raises(BadRequest, match="2 are too many") as refused:
        recording(word_tokenizer(), backend).encode("w1 w3", refuse)
    assert refused.tb is not None
    assert backend.encoding() is None


THOUGHT = {"role": "assistant", "content": "w1", "reasoning_content": " " * LONG}


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("path", "long"),
    [
        (COMPLETIONS, body(COMPLETIONS, "w1" + " " * LONG)),
        (CHAT, body(CHAT, "w1" + " " * LONG)),
        (CHAT, {**body(CHAT, "w1"), "messages": [THOUGHT]}),
    ],
    ids=["prompt", "message", "reasoning"],
)
def test_while_a_long_text_is_read_others_are_answered_and_long_ones_wait(
    path: str, long: dict[str, Any], loaded: LoadedModel
) -> None:
    backend = Backend(word_tokenizer().backend)
    with (
        running(engine(loaded), tokenizer=recording(word_tokenizer(), backend)) as server,
        ThreadPoolExecutor(12) as threads,
    ):
        with backend.held():
            asked = [threads.submit(post, server, long, path) for _ in range(12)]
            backend.begun()
            # The first of each is read in the event loop, the others in threads.
            for text in ("w1 w2", "w1 w2" + " " * 3000):
                for other in (COMPLETIONS, CHAT):
                    assert post(server, body(other, text), other).status == 200
            constrained = {**body(CHAT, "w1"), "logprobs": True, "max_tokens": 1}
            assert post(server, constrained, CHAT).status == 200
            assert send(server, "GET", "/health").status == 200
            assert sum(length >= LONG for length in backend.lengths) == 1
        assert {each.result().status for each in asked} == {200}
        assert sum(length >= LONG for length in backend.lengths) == 12


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_deadlines_and_clients_that_leave_end_requests_whose_texts_are_read_or_wait_for_it(
    path: str, loaded: LoadedModel
) -> None:
    backend, long = Backend(word_tokenizer().backend), body(path, "w1" + " " * LONG)
    with running(engine(loaded), tokenizer=recording(word_tokenizer(), backend)) as server:
        with backend.held():
            with Client(server, long, path):
                backend.begun()
            server.jobs_are_done()
            for _ in range(2):
                assert post(server, {**long, "timeout": 0.01}, path).status == 504
        assert post(server, long, path).status == 200
        assert sum(length >= LONG for length in backend.lengths) == 2, "those that waited are not read"
        assert server.holds_nothing()


def test_a_client_that_leaves_ends_the_reading_of_a_text_for_its_tokens_alone(loaded: LoadedModel) -> None:
    backend, long = Backend(word_tokenizer().backend), {"prompt": "w1" + " " * LONG}
    with running(engine(loaded), tokenizer=recording(word_tokenizer(), backend)) as server, backend.held():
        with Client(server, long, "/tokenize"):
            backend.begun()
        server.jobs_are_done()


def test_a_long_text_is_read_with_a_low_priority_and_a_short_one_is_not(loaded: LoadedModel) -> None:
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    backend = Backend(word_tokenizer().backend)
    with running(engine(loaded), tokenizer=recording(word_tokenizer(), backend)) as server:
        for blanks in (1, 3000, LONG):
            assert post(server, requested(prompt="w1" + " " * blanks)).status == 200
    low = min(NICENESS, 19)
    assert backend.niceness == [usual, usual, usual, low, low, low]  # a text of so many blanks is counted first


def test_the_thread_that_has_read_a_large_text_gives_its_memory_back(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    trims: list[str] = []
    monkeypatch.setattr(tokenising, "_give_back", lambda _: trims.append(threading.current_thread().name))
    backend = Backend(word_tokenizer().backend)
    with running(engine(loaded), tokenizer=recording(word_tokenizer(), backend)) as server:
        for blanks, path in ((LONG, COMPLETIONS), (2**20, COMPLETIONS), (2**20, CHAT)):
            assert post(server, body(path, "w1" + " " * blanks), path).status == 200
        assert post(server, {"prompt": "w1 " * 2**19}, "/tokenize").json["count"] == 2**19
        while len(trims) < 3:
            server.between_loops(lambda: None)
    assert trims == ["tokenise-long_0"] * 3


def test_prompts_of_every_kind_reach_the_engine_as_arrays(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    served = engine(loaded)
    submitted = noted(monkeypatch, served, "submit")
    with running(served, tokenizer=recording(word_tokenizer(), Backend(word_tokenizer().backend))) as server:
        for prompt in ([1, 2], "w1 w2", "w1 w2" + " " * 3000):
            assert post(server, requested(prompt=prompt), COMPLETIONS).status == 200
        assert post(server, body(CHAT, "w1 w2"), CHAT).status == 200
    assert [request.prompt_token_ids for (request,) in submitted] == [array("i", (1, 2))] * 4


def test_a_server_that_ends_has_no_thread_left_that_reads_texts(loaded: LoadedModel) -> None:
    with running(engine(loaded), tokenizer=word_tokenizer()) as server:
        for length in (3000, LONG):
            assert post(server, requested(prompt="w1" + " " * length)).status == 200
        assert [each for each in threading.enumerate() if each.name.startswith("tokenise")]
    for each in threading.enumerate():
        if each.name.startswith("tokenise"):
            each.join()


RESPONSES = "/v1/responses"
TURN = {"role": "user", "content": "w1"}
# An item that no list may have: the error of a body says whether it was looked at.
WRONG = {"role": "king", "content": 5}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(engine(tiny_model()), max_prompt_tokens=20, max_choices=4) as server:
        yield server


@pytest.mark.parametrize(
    ("path", "field"),
    [(CHAT, "messages"), ("/tokenize", "messages"), (RESPONSES, "input")],
    ids=["chat", "text", "new"],
)
def test_too_many_messages_are_refused_before_the_first_is_read(path: str, field: str, server: Running) -> None:
    reply = post(server, {"model": NAME, field: [WRONG] * (MOST_MESSAGES + 1)}, path)
    assert (reply.status, reply.error["param"]) == (400, field)
    assert reply.error["message"] == (
        f"{field} has {MOST_MESSAGES + 1} items and this server reads at most {MOST_MESSAGES}; leave some out, or join "
        "them"
    )
    looked_at = post(server, {"model": NAME, field: [WRONG] * MOST_MESSAGES}, path).error["message"]
    assert f"{field} must be" in looked_at


def test_as_many_messages_as_are_read_reach_the_template(server: Running) -> None:
    assert post(server, {"model": NAME, "messages": [TURN] * MOST_MESSAGES}, "/tokenize").json["tokens"]


@pytest.mark.parametrize(
    ("prompt", "code", "says"),
    [
        ([-1] * 21, "context_length_exceeded", "the prompt has 21 tokens and this server allows at most 20"),
        ([[-1] * 21], "context_length_exceeded", "the prompt has 21 tokens and this server allows at most 20"),
        ([[1], [-1] * 21], "context_length_exceeded", "the prompt has 21 tokens and this server allows at most 20"),
        ([[-1]] * 5, "invalid_value", "prompts: 5, n: 1"),
        (["w1", *[5] * 4], "invalid_value", "prompts: 5, n: 1"),
    ],
    ids=["ids", "one of ids", "several of ids", "prompts", "texts"],
)
def test_a_prompt_that_is_too_large_is_refused_before_its_first_id_is_read(
    prompt: Any, code: str, says: str, server: Running
) -> None:
    reply = post(server, requested(prompt=prompt), COMPLETIONS)
    assert (reply.status, reply.error["code"]) == (400, code)
    assert says in reply.error["message"]


def test_a_prompt_of_the_largest_size_has_each_of_its_ids_read(server: Running) -> None:
    assert post(server, requested(prompt=[1] * 20), COMPLETIONS).json["usage"]["prompt_tokens"] == 20
    for last in (-1, 2**30, 2**31, 2**70, True, 1.0, "w1"):
        says = f"token {2**30} is not in the model's vocabulary" if last == 2**30 else "prompt must be"
        for prompt in ([1] * 19 + [last], [[1]] * 3 + [[last]]):
            reply = post(server, requested(prompt=prompt), COMPLETIONS)
            assert (reply.status, says in reply.error["message"]) == (400, True), reply.error


def test_more_tokens_than_the_context_holds_are_refused_before_the_first_is_read(server: Running) -> None:
    most = post(server, {"prompt": "w1"}, "/tokenize").json["max_model_len"]
    reply = post(server, {"tokens": [-1] * (most + 1)}, "/detokenize")
    assert (reply.status, reply.error["param"]) == (400, "tokens")
    assert reply.error["message"].startswith(
        f"the body has {most + 1} tokens and this server writes the text of at most {most}"
    )
    assert "tokens.0: Input" in post(server, {"tokens": [-1] * most}, "/detokenize").error["message"]
    assert post(server, {"tokens": [1] * most}, "/detokenize").json == {"prompt": " ".join(["w1"] * most)}
