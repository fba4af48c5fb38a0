"""`rocm-attn generate` on a tiny random model: prompts in, a JSON object or ordered text out, errors in a sentence."""

import io
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from rocm_attn.cli import BAD_INPUT, DONE, FAILED, INTERRUPTED, main
from rocm_attn.cli.parser import build_parser
from rocm_attn.cli.signals import signals_to
from rocm_attn.errors import Unsupported
from rocm_attn.models.config import ModelConfig
from rocm_attn.watch.flight_recorder import read_dump
from rocm_serve.cli import generate as generate_command
from rocm_serve.cli.ready_engine import dtype_of
from rocm_serve.models.loading import LoadedModel, ModelFiles
from rocm_serve.ranks import Ranks
from rocm_serve.request import Event, Request
from rocm_serve.sampling.sampling_options import Sampling
from tests.amd.runner.tiny_model import (
    CONFIG,
    WORDS,
    RandomTensors,
    tiny_model,
    with_nan_token,
    with_windows,
    word_tokenizer,
)

RESULT_KEYS = [
    "prompt",
    "prompt_token_ids",
    "token_ids",
    "text",
    "finish_reason",
    "error",
    "logprobs",
    "prompt_logprobs",
]


class Terminal(io.StringIO):
    """A stdin that a user could type into."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serves a tiny model of words under any name. "windowed" has a window; token w7 gives NaN to "poisoned"."""
    tokenizer = word_tokenizer()

    def config_of(path: str) -> ModelConfig:
        return with_windows(CONFIG, 9, -1) if path == "windowed" else CONFIG

    def open_tiny(path: str) -> ModelFiles:
        return ModelFiles(config_of(path), RandomTensors(config_of(path), 0), tokenizer)

    def load_tiny(path: str, *, dtype: torch.dtype, device: torch.device, ranks: Ranks) -> LoadedModel:
        loaded = tiny_model(base=config_of(path), dtype=dtype, device=device, tokenizer=tokenizer, ranks=ranks)
        return with_nan_token(loaded) if path == "poisoned" else loaded

    monkeypatch.setattr("rocm_serve.cli.generate.find_model", Path)
    monkeypatch.setattr("rocm_serve.cli.generate.open_model", open_tiny)
    monkeypatch.setattr("rocm_serve.cli.ready_engine.load_model", load_tiny)
    monkeypatch.setattr("rocm_serve.models.loading.find_model", lambda path: tmp_path)
    monkeypatch.setattr(sys, "stdin", Terminal())


def generate(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Returns the output of `rocm-attn generate --json`, which must be one line of JSON on stdout and nothing else."""
    code = main(["generate", "--json", "--device", "cpu", "--provider", "torch", *arguments])
    printed = capsys.readouterr()
    assert code == DONE, printed.err
    (line,) = printed.out.splitlines()
    parsed: dict[str, Any] = json.loads(line)
    return parsed


def test_json_holds_the_results_in_the_order_of_the_prompts_and_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["w5 w6 w7", "w1", "w9 w8 w9 w8 w9 w8 w9"]
    printed = generate(capsys, "--raw", "--max-new-tokens", "6", "--chunk", "4", "--max-batch-size", "2", *prompts)
    assert list(printed) == ["results", "report"]
    for prompt, result in zip(prompts, printed["results"], strict=True):
        assert list(result) == RESULT_KEYS
        assert result["prompt"] == prompt
        assert result["prompt_token_ids"] == [WORDS.index(word) for word in prompt.split()]
        assert len(result["token_ids"]) == 6
        assert result["text"].split() == [WORDS[token] for token in result["token_ids"]]
        assert result["finish_reason"] == "length"
    report = printed["report"]
    assert report["provider"] == "torch"
    assert report["new_tokens"] == 18
    assert report["max_batch_size"] == 2
    assert report["steps"] > report["replays"] == report["captures"] == 0, "on a CPU a short run makes no graph"


def test_a_long_run_makes_a_graph_of_its_decode_step_and_changes_no_token(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--raw", "--max-new-tokens", "60", "--max-batch-size", "1", "w5", "w6"]
    graphed, eager = (generate(capsys, *arguments, *more) for more in ([], ["--no-graphs"]))
    assert graphed["results"] == eager["results"]
    assert (graphed["report"]["captures"], eager["report"]["captures"]) == (1, 0)
    assert graphed["report"]["replays"] > 0


def test_the_chat_template_is_applied_unless_the_prompt_is_raw(capsys: pytest.CaptureFixture[str]) -> None:
    chat = generate(capsys, "--max-new-tokens", "1", "w5")["results"][0]
    raw = generate(capsys, "--max-new-tokens", "1", "--raw", "w5")["results"][0]
    assert chat["prompt_token_ids"] == [63, 5]
    assert raw["prompt_token_ids"] == [5]


def test_options_of_serving_change_no_token(capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["w5 w6 w7", "w1 w2", "w3"]
    plain = generate(capsys, *prompts, "--max-new-tokens", "5")["results"]
    for options in (
        ["--no-graphs"],
        ["--page-size", "1"],
        ["--pool", "vectorized"],
        ["--page-size", "auto", "--pool", "auto"],
        ["--chunk", "1", "--max-batch-size", "1"],
        ["--num-pages", "3"],
    ):
        assert generate(capsys, *prompts, "--max-new-tokens", "5", *options)["results"] == plain


def test_the_flight_record_of_a_served_prompt_is_written_on_a_signal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, before = tmp_path / "flight.json", signal.getsignal(signal.SIGUSR1)
    try:
        generate(capsys, "--raw", "--max-new-tokens", "3", "--flight-record", str(path), "w5 w6 w7")
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    dump = read_dump(path)
    assert dump.reason == "signal SIGUSR1"
    assert [step.q_len for step in dump.steps] == [(3,), (1,), (1,)]
    assert [step.kv_len for step in dump.steps] == [(3,), (4,), (5,)]


def test_text_goes_to_stdout_and_the_report_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "cpu", "--provider", "torch", "--raw", "--max-new-tokens", "4", "w5 w6", "w1"]
    results = generate(capsys, *arguments)["results"]
    assert main(["generate", *arguments]) == DONE
    printed = capsys.readouterr()
    texts = printed.out.split("\n\n")
    assert [text.splitlines()[0] for text in texts] == [">>> w5 w6", ">>> w1"]
    assert [text.splitlines()[1].split() for text in texts] == [result["text"].split() for result in results]
    assert "provider torch on cpu" in printed.err
    assert "decode: torch.decode" in printed.err
    assert "8 new tokens" in printed.err


def test_prompts_come_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("w5 w6\n\n  \nw7\n")
    printed = generate(capsys, "--max-new-tokens", "1", "--prompts-file", str(path))
    assert [result["prompt"] for result in printed["results"]] == ["w5 w6", "w7"]


def test_prompts_come_from_stdin(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # The stream's encoding is the locale's, and is ignored.
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("w5\r\nw6 w7 é\n".encode()), "ascii"))
    printed = generate(capsys, "--max-new-tokens", "1")
    assert [result["prompt"] for result in printed["results"]] == ["w5", "w6 w7 é"]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\r"])
def test_only_line_feeds_end_a_prompt(separator: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(f"\ufeffw5{separator}w6\r\nw7\n".encode())
    printed = generate(capsys, "--max-new-tokens", "1", "--prompts-file", str(path))
    assert [result["prompt"] for result in printed["results"]] == [f"w5{separator}w6", "w7"]


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"w5\r\n\nw6 \xff\n", "line 3 of {} is not UTF-8: byte 4 of it is 0xff; save the file as UTF-8"),
        ("w5\n".encode("utf-16"), "line 1 of {} is not UTF-8: byte 1 of it is 0xff"),
        ("w5\nw6\ud800".encode("utf-8", "surrogatepass"), "line 2 of {} is not UTF-8: byte 3 of it is 0xed"),
    ],
)
def test_a_prompt_that_is_no_utf_8_is_refused_by_its_line(
    data: bytes, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(data)
    assert main(["generate", "--prompts-file", str(path)]) == BAD_INPUT
    assert complaint.format(path) in capsys.readouterr().err


def test_a_prompt_that_fails_is_named_and_the_others_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "poisoned", "--device", "cpu", "--provider", "torch", "--raw", "--max-new-tokens", "4"]
    good = [generate(capsys, *arguments, prompt)["results"][0] for prompt in ("w5 w6", "w1")]
    prompts = ["w5 w6", "w3 w7", "w1"]
    assert main(["generate", "--json", *arguments, *prompts]) == FAILED
    printed = capsys.readouterr()
    first, failed, last = json.loads(printed.out)["results"]
    assert [first, last] == good
    assert (failed["finish_reason"], failed["token_ids"], failed["text"]) == ("error", [], "")
    assert failed["error"].startswith("the largest logit of the next token is nan, so no token can be sampled")
    assert f"prompt 2 failed: {failed['error']}\n" in printed.err
    assert printed.err.splitlines()[-1] == f"rocm-attn: 1 of 3 prompts failed; prompt 2: {failed['error']}"
    assert main(["generate", *arguments, *prompts]) == FAILED
    printed = capsys.readouterr()
    assert printed.out == f">>> w5 w6\n{first['text']}\n\n>>> w3 w7\n\n\n>>> w1\n{last['text']}\n"
    assert f"prompt 2 failed: {failed['error']}\n" in printed.err


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_prompts_that_are_done_before_an_interrupt_are_printed_as_json(
    by: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def progress(num_prompts: int) -> Callable[[Event], None]:
        return lambda event: os.kill(os.getpid(), by) if event.request == 1 else None

    monkeypatch.setattr(generate_command, "_progress", progress)
    before = signal.getsignal(by)
    command = ["generate", "--json", "--device", "cpu", "--provider", "torch", "--raw", "--max-batch-size", "1"]
    assert main([*command, "--max-new-tokens", "4", "w5 w6", "w1", "w9"]) == INTERRUPTED
    printed = capsys.readouterr()
    results = json.loads(printed.out)["results"]
    assert [result["finish_reason"] for result in results] == ["length", "abort", "abort"]
    assert len(results[0]["token_ids"]) == 4
    assert printed.err.splitlines()[-1] == "rocm-attn: interrupted"
    assert signal.getsignal(by) == before


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_texts_that_are_done_before_an_interrupt_are_printed_though_an_earlier_one_is_not(
    by: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finish = generate_command.OrderedText.finish

    def finish_and_interrupt(texts: generate_command.OrderedText, text: int) -> None:
        finish(texts, text)
        if text == 2:
            signal.raise_signal(by)

    monkeypatch.setattr(generate_command.OrderedText, "finish", finish_and_interrupt)
    lengths = iter([8, 8, 2, 8])
    made = generate_command._request

    def request(*given: Any) -> Request:
        return replace(made(*given), max_new_tokens=next(lengths))

    monkeypatch.setattr(generate_command, "_request", request)
    command = ["generate", "--device", "cpu", "--provider", "torch", "--raw", "--max-batch-size", "3"]
    assert main([*command, "w5 w6", "w1", "w9", "w4"]) == INTERRUPTED
    printed = capsys.readouterr()
    live, done = printed.out.split("\n\n")
    assert live.startswith(">>> w5 w6\n")
    assert done.startswith(">>> w9\n")
    assert len(done.splitlines()[1].split()) == 2
    assert printed.err.splitlines()[-1] == "rocm-attn: interrupted"


@pytest.mark.usefixtures("heard")
def test_a_second_interrupt_does_not_wait() -> None:
    ending = generate_command.EarlyEnd(Mock(), 1, print)
    with signals_to(ending.ask, signal.SIGINT, signal.SIGTERM):
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_an_interrupt_that_is_ignored_stays_so() -> None:
    before, heard = signal.signal(signal.SIGINT, signal.SIG_IGN), list[int]()
    try:
        with signals_to(lambda number, frame: heard.append(number), signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGINT, before)


def test_ranks_that_a_model_is_not_divided_over_are_refused_before_they_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(config: ModelConfig, num_ranks: int) -> ModelConfig:
        raise Unsupported(f"8 groups are not divided over {num_ranks} ranks", [])

    monkeypatch.setattr(ModelConfig, "on_one_of", refuse)
    monkeypatch.setattr("rocm_serve.cli.generate.loaded_engine", Mock(side_effect=AssertionError("ranks were started")))
    assert main(["generate", "--device", "cpu", "--tp", "3", "--raw", "w5"]) == FAILED
    assert capsys.readouterr().err == "rocm-attn: 8 groups are not divided over 3 ranks\n"


def test_flags_of_a_request_shape_its_text(capsys: pytest.CaptureFixture[str]) -> None:
    (plain,) = generate(capsys, "--raw", "--max-new-tokens", "8", "w5 w6")["results"]
    words = plain["text"].split()
    stop, token = words[3], plain["token_ids"][0]

    def requested(*flags: str) -> dict[str, Any]:
        result: dict[str, Any]
        (result,) = generate(capsys, "--raw", "--max-new-tokens", "8", "w5 w6", *flags)["results"]
        return result

    before = plain["text"].partition(stop)[0]
    stopped = requested("--stop", stop)
    assert (stopped["text"], stopped["finish_reason"]) == (before, "stop")
    assert requested("--stop", stop, "--include-stop")["text"] == before + stop
    assert requested("--stop-token-ids", str(token))["token_ids"] == [token]
    assert len(requested("--stop-token-ids", str(token), "--min-tokens", "5")["token_ids"]) >= 5
    assert set(requested("--allowed-token-ids", "7,9")["token_ids"]) <= {7, 9}
    assert token not in requested("--logit-bias", f"{token}=-100")["token_ids"]
    reported = requested("--logprobs", "2")["logprobs"]
    assert [each["token_id"] for each in reported] == plain["token_ids"]
    assert all(len(each["likeliest"]) == 2 for each in reported)
    reported = requested("--prompt-logprobs", "1")
    assert [each["token_id"] for each in reported["prompt_logprobs"]] == reported["prompt_token_ids"][1:]
    drawn = ("--temperature", "2", "--seed", "3")
    assert requested(*drawn, "--top-k", "1") == requested(*drawn, "--min-p", "1") == plain
    assert requested(*drawn) != plain
    for penalty in ("--presence-penalty", "--frequency-penalty"):
        assert requested(penalty, "-2")["token_ids"] != requested(penalty, "2")["token_ids"]
    assert requested("--repetition-penalty", "100")["token_ids"] != plain["token_ids"]


def test_every_field_of_a_request_has_a_flag_but_those_that_only_a_server_needs() -> None:
    flags = {*vars(build_parser().parse_args(["generate"]))}
    others = {"prompt_token_ids", "priority", "cache_salt", "sampling", "constraint", "detokenise"}
    assert {each.name for each in (*fields(Request), *fields(Sampling))} - others <= flags
    assert {"json_schema", "regex"} <= flags


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        ([], BAD_INPUT, "there is no prompt; give one as an argument, with --prompts-file, or on stdin"),
        (["  "], BAD_INPUT, "a prompt is empty"),
        (
            ["w5", "w6 \udcff"],
            BAD_INPUT,
            "prompt 2 is not UTF-8: its character 4 cannot be read; give it with --prompts",
        ),
        (["--prompts-file", "gone.txt"], BAD_INPUT, "the prompts in gone.txt cannot be read"),
        (["--prompts-file", "gone.txt", "w5"], BAD_INPUT, "give them in one way"),
        (["--device", "abacus", "w5"], BAD_INPUT, "device 'abacus' is not known"),
        (["--stop", "", "w5"], BAD_INPUT, "a text of stop has 0 characters"),
        (["--min-tokens", "9", "--max-new-tokens", "8", "w5"], BAD_INPUT, "min_tokens is 9; it must be at least 0"),
        (["--json-schema", "gone.json", "w5"], BAD_INPUT, "the JSON schema in gone.json cannot be read"),
        (["--json-schema", '{"type": "strin"}', "w5"], BAD_INPUT, "the constraint cannot be used"),
        (["--json-schema", "{}", "--regex", "a", "w5"], BAD_INPUT, "leave one of them out"),
        (["--logprobs", "2", "w5"], BAD_INPUT, "--logprobs is printed only with --json"),
        (["--logit-bias", "99=1", "w5"], BAD_INPUT, "token 99 is not in the model's vocabulary, 0 to 63"),
        (
            ["--raw", "w5 " * (CONFIG.context_len + 1)],
            BAD_INPUT,
            "the prompt has 97 tokens and the model's context is 96",
        ),
        (["--raw", "--num-pages", "2", "w5 " * 40], BAD_INPUT, "the prompt has 40 tokens"),
        (["--swa-pages", "4", "w5"], BAD_INPUT, "swa_pages is 4, and no layer of the model has a window"),
        (
            ["--model", "windowed", "--raw", "--max-new-tokens", "2", "--swa-pages", "4", "w5 " * 8],
            BAD_INPUT,
            "no layer of the model has a window",
        ),
        (
            ["--model", "windowed", "--raw", "--page-size", "4", "--swa-pages", "3", "w5 " * 30],
            FAILED,
            "pages of the SWA space and there are 2; raise swa_pages",
        ),
        (["--flight-record", "gone/flight.json", "w5"], BAD_INPUT, "gone is not a folder; create it"),
        (["--provider", "aiter", "w5"], FAILED, "decode: aiter.unified_attention: arch cpu is not one of gfx942"),
        (["--page-size", "100000", "w5"], FAILED, "page_size"),
    ],
)
def test_bad_input_is_answered_in_a_sentence(
    arguments: list[str], code: int, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--device", "cpu", *arguments]) == code
    printed = capsys.readouterr()
    assert complaint in printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""


def test_an_empty_file_of_prompts_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("\n \n")
    assert main(["generate", "--prompts-file", str(path)]) == BAD_INPUT
    assert "holds no prompt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "device", "dtype"),
    [
        (None, "cpu", torch.float32),
        (None, "cuda", torch.bfloat16),
        ("float16", "cuda", torch.float16),
        ("float16", "cpu", torch.float16),
    ],
)
def test_what_dtype_says_goes_before_the_default(name: str | None, device: str, dtype: torch.dtype) -> None:
    assert dtype_of(name, "any", torch.device(device)) is dtype


def test_a_memory_that_is_full_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load_too_much(path: str, **_: object) -> torch.Tensor:
        return torch.empty(1 << 50, dtype=torch.uint8)

    monkeypatch.setattr("rocm_serve.cli.ready_engine.load_model", load_too_much)
    assert main(["generate", "--device", "cpu", "w5"]) == FAILED
    sentence = capsys.readouterr().err.splitlines()[-1]
    assert sentence.startswith("rocm-attn: out of memory (")
    assert sentence.endswith("; lower --max-batch-size, --num-pages or --swa-pages, or use a smaller model")


def test_another_error_of_torch_is_not_called_a_full_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str, **_: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr("rocm_serve.cli.ready_engine.load_model", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        main(["generate", "--device", "cpu", "w5"])
