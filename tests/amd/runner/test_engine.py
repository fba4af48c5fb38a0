"""The engine over the real runtime: its output depends on the request and on nothing else."""

import pickle
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.errors import BadRequest, BadSetting, CapacityExceeded, Unsupported
from rocm_attn.hip_graphs.fake_recorder import FakeRecording
from rocm_attn.step.layers import StepLayers
from rocm_attn.watch.flight_recorder import read_dump
from rocm_serve.engine import Engine
from rocm_serve.engine_runtime import prompt_sizes
from rocm_serve.models.loading import LoadedModel
from rocm_serve.models.model import Model
from rocm_serve.request import Request
from tests.amd.runner.serving import engine, served_to_the_end, some_requests
from tests.amd.runner.small_tokenizers import half_characters, sentencepiece
from tests.amd.runner.tiny_model import tiny_model


def test_an_end_token_ends_the_text_unless_it_is_passed_over(loaded: LoadedModel) -> None:
    request = some_requests(1)[0]
    free = engine(loaded).generate([request])[0].token_ids
    end = free[4]
    ends = tiny_model(eos_token_ids=(end,))
    stopped = engine(ends).generate([request])[0]
    assert (stopped.token_ids, stopped.finish_reason) == (free[: free.index(end) + 1], "stop")
    passed = engine(ends).generate([replace(request, ignore_eos=True)])[0]
    assert (passed.token_ids, passed.finish_reason) == (free, "length")
    requested = engine(loaded).generate([replace(request, stop_token_ids=(end,))])[0]
    assert requested == stopped


def test_a_stop_token_is_no_part_of_the_text() -> None:
    tokenizer = sentencepiece()
    loaded = tiny_model(tokenizer=tokenizer)
    request = some_requests(1)[0]
    free = engine(loaded).generate([request])[0]
    end = free.token_ids[5]
    stopped = engine(loaded).generate([replace(request, stop_token_ids=(end,))])[0]
    assert stopped.text == tokenizer.decode(free.token_ids[: free.token_ids.index(end)])


class Whole(array):  # type: ignore[type-arg]
    """Token ids that may be read together, and not one by one."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("a prompt was gone through")


def test_a_prompt_that_is_an_array_is_gone_through_nowhere_and_sent_as_it_is(loaded: LoadedModel) -> None:
    requests = some_requests(4)
    wholes = [replace(each, prompt_token_ids=Whole("i", each.prompt_token_ids)) for each in requests]
    expected = engine(loaded).generate(requests)
    assert [each.token_ids for each in engine(loaded).generate(wholes)] == [each.token_ids for each in expected]
    with pytest.raises(BadRequest, match="token 64 is not in the model's vocabulary, 0 to 63"):
        engine(loaded).submit(Request(Whole("i", (1, 64, 2))))
    wrong: Any
    for wrong, kind in (((1, 2.5), "float64"), ((1, None), "object"), (((1,), (2,)), "int64")):
        with pytest.raises(BadRequest, match=f"the token ids are of type {kind}; give whole numbers"):
            engine(loaded).submit(Request(wrong))
    wrong = (1, (2,))
    for request in (Request(wrong), Request((1,), stop_token_ids=wrong)):
        with pytest.raises(BadRequest, match="a token id is a list or an array; give whole numbers"):
            engine(loaded).submit(request)
    with pytest.raises(BadRequest, match=f"token {2**70} is not in the model's vocabulary"):
        engine(loaded).submit(Request((1, 2**70)))
    long = Request(array("i", range(9000)))
    assert pickle.loads(pickle.dumps(long)) == long
    assert len(pickle.dumps(long)) < 4 * 9000 + 1000


def test_text_that_ends_inside_a_character_comes_out_at_the_end() -> None:
    tokenizer = half_characters()
    for completion in engine(tiny_model(tokenizer=tokenizer)).generate(some_requests()):
        assert completion.text == tokenizer.decode(completion.token_ids)
        assert completion.text.endswith("\N{REPLACEMENT CHARACTER}")


def test_decode_steps_replay_and_the_report_says_so(loaded: LoadedModel) -> None:
    served = engine(loaded, graphs=True, max_batch_size=6)
    served.generate(some_requests(5))
    report = served.report()
    assert (report.provider, report.device, report.dtype, report.graphs) == ("auto", "cpu", "float32", "on")
    assert report.metrics.replays > 0
    assert report.metrics.captures > 0
    assert report.metrics.steps > report.metrics.replays
    assert 0 < report.metrics.padded_share < 1  # 5 sequences run at 6 or 8
    assert report.metrics.new_tokens == 5 * 12
    assert report.metrics.prompt_tokens == sum(len(request.prompt_token_ids) for request in some_requests(5))
    assert report.metrics.seconds > 0
    assert report.metrics.tokens_per_s > 0
    assert any(line.startswith("decode: cpu.decode") for line in report.kernels)
    assert engine(loaded).report().graphs == "off"


@pytest.mark.parametrize(("num_requests", "max_new_tokens"), [(6, 12), (24, 36)], ids=["short", "long"])
def test_on_a_cpu_captures_never_take_more_than_a_tenth_of_the_work(
    num_requests: int, max_new_tokens: int, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks of 7. Work is counted in runs of the model, eager ones and replays alike."""
    work = {"serving": 0, "capturing": 0}
    doing = ["serving"]

    def counted(run: Callable[..., Any]) -> Callable[..., Any]:
        def runs(*arguments: Any) -> Any:
            work[doing[-1]] += 1
            return run(*arguments)

        return runs

    def capturing(*arguments: Any) -> None:
        doing.append("capturing")
        capture(*arguments)
        doing.pop()

    capture = StepRunner._capture
    monkeypatch.setattr(StepRunner, "_capture", capturing)
    monkeypatch.setattr(FakeRecording, "replay", counted(FakeRecording.replay))
    monkeypatch.setattr(Model, "forward", counted(Model.forward))
    served = engine(loaded, graphs=True, chunk=7, max_batch_size=3, max_kv_len=96, capture_after=None)
    for request in some_requests(num_requests):
        served.submit(replace(request, max_new_tokens=max_new_tokens))
    while served.has_work:
        served.step()
        assert work["capturing"] <= sum(work.values()) / 10
    assert (served.report().metrics.captures > 0) == (num_requests > 6)


def test_graphs_made_ahead_serve_every_step_that_can_be_replayed(loaded: LoadedModel) -> None:
    served, calls = engine(loaded, graphs=True, max_batch_size=6), []
    made = served.capture_all(lambda done, total, name: calls.append((done, total)))
    assert len(made.buckets) > 1
    assert not made.skipped
    assert calls[0] == (0, len(made.buckets) + len(made.skipped))
    assert calls[-1] == (calls[0][1], calls[0][1])
    results = served.generate(some_requests(5))
    report = served.report()
    assert report.metrics.captures == len(made.buckets), "no step waited for a graph"
    assert report.metrics.replays > 0
    assert report.metrics.seconds > report.metrics.capture_seconds > 0
    assert results == engine(loaded).generate(some_requests(5))


@pytest.mark.parametrize(
    "options",
    [
        {"num_pages": 4},
        {"num_pages": 7, "chunk": 64, "max_kv_len": 64, "speculative": "ngram", "graphs": True, "capture_after": 0},
    ],
)
def test_kernels_are_compiled_ahead_where_sequences_have_not_a_page_each(
    options: dict[str, Any], loaded: LoadedModel
) -> None:
    served = engine(loaded, page_size=16, max_batch_size=6, **options)
    served.compile_all(lambda done, total, name: None)
    assert served.generate(some_requests(3)) == engine(loaded, max_batch_size=6).generate(some_requests(3))


def test_a_step_that_fails_leaves_a_flight_record(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(*tensors: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    path = tmp_path / "flight.json"
    served = engine(loaded, flight_record=path)
    served.generate(some_requests(1))
    assert not path.exists()
    served.submit(some_requests(1)[0])
    monkeypatch.setattr(StepLayers, "attend", fault)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        served.step()
    dump = read_dump(path)
    assert dump.steps[-1].kv_len == (len(some_requests(1)[0].prompt_token_ids),)
    assert dump.reason == "RuntimeError: an illegal memory access was encountered"


BAD_REQUESTS: tuple[tuple[Callable[[], Request], str], ...] = (
    (lambda: Request((1,) * 97), r"the prompt has 97 tokens and the model's context is 96; shorten it"),
    (
        lambda: Request((1,) * 65),
        r"has 65 tokens and the KV pool holds sequences of up to 64; .* raise max_kv_len, kv_bytes or num_pages",
    ),
    (lambda: Request((1, 64)), "token 64 is not in the model's vocabulary, 0 to 63"),
    (lambda: Request((-1,)), "token -1 is not in"),
    (lambda: Request((1,), stop_token_ids=(99,)), "token 99 is not in"),
    (lambda: Request(()), "the prompt is empty"),
    (lambda: Request((1,), max_new_tokens=0), "max_new_tokens is 0; it must be at least 1"),
)


def test_bad_requests_are_refused_in_one_sentence_and_the_others_go_on(loaded: LoadedModel) -> None:
    requests, served = some_requests(3), engine(loaded)
    numbers = [served.submit(requests[0]), served.submit(requests[1])]
    served.step()
    for make, sentence in BAD_REQUESTS:
        with pytest.raises(BadRequest, match=sentence):
            served.submit(make())
    numbers.append(served.submit(requests[2]))
    assert served_to_the_end(served, numbers) == engine(loaded).generate(requests)


def test_generate_serves_the_requests_of_an_iterator(loaded: LoadedModel) -> None:
    requests = some_requests(2)
    assert engine(loaded).generate(iter(requests)) == engine(loaded).generate(requests)  # type: ignore[arg-type]


def test_what_is_no_request_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(BadRequest, match="the request is a str; give a Request"):
        engine(loaded).submit("tokens")  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="the request is a str; it must be of type Request"):
        engine(loaded).can_prepare("tokens")  # type: ignore[arg-type]


def test_an_engine_of_another_kind_of_model_or_options_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(BadSetting, match="loaded is a str; it must be of type LoadedModel"):
        Engine("HuggingFaceTB/SmolLM2-135M")  # type: ignore[arg-type]
    with pytest.raises(BadSetting, match="options is a dict; it must be of type EngineOptions"):
        Engine(loaded, {"chunk": 16})  # type: ignore[arg-type]


def test_generate_refuses_before_anything_runs(loaded: LoadedModel) -> None:
    served = engine(loaded)
    with pytest.raises(BadRequest, match="97 tokens"):
        served.generate([*some_requests(2), Request((1,) * 97)])
    assert not served.has_work
    assert served.report().metrics.steps == 0


def test_a_prompt_as_long_as_the_pool_gets_one_token(loaded: LoadedModel) -> None:
    completion = engine(loaded).generate([Request((3,) * 64)])[0]
    assert (len(completion.token_ids), completion.finish_reason) == (1, "length")


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"max_kv_len": 97}, BadSetting, "max_kv_len is 97; it must be at most the model's context, 96"),
        ({"kv_bytes": 1000}, CapacityExceeded, "1000 bytes for K and V hold 0 pages of 1024 bytes"),
        ({"provider": "cudnn"}, BadSetting, "provider 'cudnn' is not known"),
        ({"page_size": 100_000, "num_pages": 3}, Unsupported, "page size 100000"),
    ],
)
def test_options_that_cannot_be_are_refused(
    changes: dict[str, Any], error: type[Exception], sentence: str, loaded: LoadedModel
) -> None:
    with pytest.raises(error, match=sentence):
        engine(loaded, **changes)


@pytest.mark.parametrize(
    ("changes", "num_pages", "max_kv_len"),
    [
        ({}, 1 + 8 * 16, 64),
        ({"max_kv_len": None}, 1 + 8 * 24, 96),
        ({"max_kv_len": 61}, 1 + 8 * 16, 61),
        # a page is 4 tokens of 2 layers of K and V of 2 heads of 8 float32: 1024 bytes
        ({"kv_bytes": 20 * 1024 + 1023}, 20, 64),
        ({"kv_bytes": 10 * 1024}, 10, 36),
        ({"num_pages": 5}, 5, 16),
    ],
)
def test_the_pool_is_as_large_as_needed_and_no_larger_than_allowed(
    changes: dict[str, Any], num_pages: int, max_kv_len: int, loaded: LoadedModel
) -> None:
    report = engine(loaded, **changes).report()
    assert (report.num_pages, report.max_kv_len) == (num_pages, max_kv_len)


def test_the_report_says_what_runs_and_what_waits(loaded: LoadedModel) -> None:
    served = engine(loaded, max_batch_size=2)
    for request in some_requests(5):
        served.submit(request)
    assert (served.report().metrics.running, served.report().metrics.waiting) == (0, 5)
    served.step()
    metrics = served.report().metrics
    assert (metrics.running, metrics.waiting) == (2, 3)
    assert 0 < metrics.pages_in_use < metrics.usable_pages == served.runtime.table.full.num_usable_pages


def test_steps_with_many_new_tokens_are_no_graphs() -> None:
    """A GPU takes longer for the step than its host, the sooner the larger the layers are."""
    assert [prompt_sizes(chunk, 1000) for chunk in (2, 3, 300)] == [
        (),
        (3,),
        (5, 10, 19, 29, 38, 57, 75, 113, 150, 225, 300),
    ]
    of_a_small_model, of_a_large_one = (prompt_sizes(8192, elements) for elements in (61_000_000, 875_000_000))
    assert of_a_small_model == (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
    assert of_a_large_one == (4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
    assert prompt_sizes(8192, 61_000_000, has_states=True)[-1] == 8192
    assert prompt_sizes(512, 61_000_000)[-1] == 512
