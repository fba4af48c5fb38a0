"""`rocm-attn generate`: continue prompts with a model. Text on stdout, everything else on stderr."""

import argparse
import codecs
import json
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import TextIO

from rocm_attn.capture.step_times import MOST_SEQS
from rocm_attn.cli.arguments import device_named
from rocm_attn.cli.progress_bar import ProgressBar
from rocm_attn.cli.signals import signals_to, sigterm_interrupts
from rocm_attn.cli.streams import say
from rocm_attn.cli.torch_failures import memory_failure
from rocm_attn.errors import BadModel, BadRequest, BadSetting, NeverFits, RocmAttnError
from rocm_serve.cli.engine_start import EngineStart, require_files
from rocm_serve.cli.options import ON_GENERATE
from rocm_serve.cli.ready_engine import layers_line, loaded_engine
from rocm_serve.cli.request_options import request_of
from rocm_serve.engine import Engine
from rocm_serve.models.loading import ModelFiles, open_model
from rocm_serve.models.places import find_model
from rocm_serve.options import EngineOptions
from rocm_serve.parallel.ranked_engine import RankedEngine
from rocm_serve.report import Report
from rocm_serve.request import AbortEvent, Completion, Event, FailureEvent, Request, RequestsFailed


class OrderedText:
    """Prints texts in order: the first that is not done is live; pieces of later ones are held until their turn.

    headers: one per text, printed before it, or none at all
    """

    def __init__(self, out: TextIO, headers: Sequence[str], num_texts: int) -> None:
        assert len(headers) in (0, num_texts)
        self._out = out
        self._headers = headers
        self._held = [""] * num_texts
        self._done = [False] * num_texts
        self._live = -1
        self._turn_to(0)

    def add(self, text: int, piece: str) -> None:
        """Adds a piece to the text with this number."""
        if text == self._live:
            self._write(piece)
        else:
            self._held[text] += piece

    def finish(self, text: int) -> None:
        """Marks the text with this number as complete."""
        self._done[text] = True
        while self._live < len(self._done) and self._done[self._live]:
            self._write("\n")
            self._turn_to(self._live + 1)

    def end_early(self) -> None:
        """Prints the complete texts that wait for their turn, after the live one, which is cut."""
        later = [text for text in range(self._live + 1, len(self._done)) if self._done[text]]
        for text in later:
            self._write("\n")
            self._turn_to(text)
        if later:
            self._write("\n")

    def _turn_to(self, text: int) -> None:
        self._live = text
        if text == len(self._held):
            return
        if self._headers:
            self._write(("\n" if text else "") + self._headers[text] + "\n")
        self._write(self._held[text])

    def _write(self, piece: str) -> None:
        self._out.write(piece)
        self._out.flush()


class EarlyEnd:
    """Aborts all requests at Ctrl-C or SIGTERM, so that those that are done are printed as JSON.

    show: called with each event until the signal
    """

    def __init__(self, engine: Engine | RankedEngine, num_requests: int, show: Callable[[Event], None]) -> None:
        self._engine, self._left, self._show = engine, range(num_requests), show
        self.is_asked = False

    def on_event(self, event: Event) -> None:
        """Passes an event on, or aborts the requests: here, and not in the middle of a step."""
        if not self.is_asked:
            self._show(event)
            return
        left, self._left = self._left, range(0)
        for number in left:
            self._engine.abort(number)

    def ask(self, number: int, frame: FrameType | None) -> None:
        """Notes a signal. The second one raises KeyboardInterrupt."""
        if self.is_asked:
            raise KeyboardInterrupt
        self.is_asked = True


_HEADER_COLUMNS = 76


class PromptsFailed(RocmAttnError):
    """Some prompts failed; the completions of the others are printed already."""


def run(options: argparse.Namespace) -> None:
    """Serves the prompts together and prints the completions. Raises RocmAttnError."""
    prompts = read_prompts(options, sys.stdin)
    try:
        _generate(options, prompts)
    except (RuntimeError, MemoryError) as error:
        if not (what := memory_failure(error)):
            raise
        raise NeverFits(
            f"out of memory ({what}); lower --max-batch-size, --num-pages or --swa-pages, or use a smaller model"
        ) from error


def read_prompts(options: argparse.Namespace, stdin: TextIO | None) -> list[str]:
    """The prompts, from the arguments, the file or stdin, which is None if it is closed.

    Raises BadRequest, BadSetting.
    """
    if options.prompts and options.prompts_file is not None:
        raise BadSetting("prompts are given both as arguments and with --prompts-file; give them in one way")
    if options.prompts:
        return [_in_unicode(number, prompt) for number, prompt in enumerate(options.prompts, 1)]
    read: Callable[[], bytes]
    if options.prompts_file is not None:
        place, read = str(options.prompts_file), Path(options.prompts_file).read_bytes
    elif stdin is None or stdin.isatty():
        raise BadRequest("there is no prompt; give one as an argument, with --prompts-file, or on stdin")
    else:
        place, read = "stdin", stdin.buffer.read
    try:
        data = read()
    except (OSError, ValueError) as error:
        raise BadSetting(f"the prompts in {place} cannot be read ({error})") from error
    prompts = [line for line in lines_of(data, place) if line.strip()]
    if not prompts:
        raise BadRequest(f"{place} holds no prompt; it must have one per line")
    return prompts


def lines_of(data: bytes, place: str) -> list[str]:
    """The lines of a text in UTF-8, which end in \\n or \\r\\n and in nothing else, in any locale.

    place: the name of the text in messages
    Raises BadSetting that names the line.
    """
    lines = []
    for number, line in enumerate(re.split(rb"\r?\n", data.removeprefix(codecs.BOM_UTF8)), 1):
        try:
            lines.append(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise BadSetting(
                f"line {number} of {place} is not UTF-8: byte {error.start + 1} of it is {line[error.start]:#04x}; "
                "save the file as UTF-8"
            ) from error
    return lines


def _in_unicode(number: int, prompt: str) -> str:
    """The prompt in Unicode. Python keeps bytes of an argument that are no valid text as lone surrogates."""
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRequest(
            f"prompt {number} is not {sys.getfilesystemencoding().upper()}: its character {error.start + 1} cannot "
            "be read; give it with --prompts-file, or in the encoding of the locale"
        ) from error
    return prompt


def _generate(options: argparse.Namespace, prompts: list[str]) -> None:
    requested = request_of(options)
    require_files(EngineOptions(**{name: getattr(options, name) for name in ON_GENERATE}))
    model = str(find_model(options.model))
    files = open_model(model)
    files.config.on_one_of(options.tp)  # before the ranks are started, which find the same fault
    requests = [_request(options, requested, files, prompt) for prompt in prompts]
    engine_options = _engine_options(options, files, requests)
    start = EngineStart(options.model, model, engine_options, options.device, options.dtype, options.tp)
    with loaded_engine(start) as engine:
        _serve(options, engine, prompts, requests)


def _serve(
    options: argparse.Namespace, engine: Engine | RankedEngine, prompts: list[str], requests: list[Request]
) -> None:
    """Serves the requests and prints the completions. Raises PromptsFailed."""
    if (
        device_named(options.device).type == "cuda"
    ):  # on a CPU a graph saves little, and is made once enough steps have paid for it
        engine.capture_all(ProgressBar(sys.stderr))
        engine.compile_all(ProgressBar(sys.stderr, "compiling"))
    with nullcontext(_progress(len(prompts))) if options.json else _texts(prompts) as show:
        ending = EarlyEnd(engine, len(requests), show)
        try:
            with signals_to(ending.ask, signal.SIGINT, signal.SIGTERM) if options.json else sigterm_interrupts():
                completions: Sequence[Completion] = engine.generate(requests, ending.on_event)
            failure = None
        except RequestsFailed as failed:
            completions, failure = failed.completions, failed
    if options.json:
        results = [_as_json(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        print(json.dumps({"results": results, "report": engine.report().as_dict()}))
    say(*_lines(engine.report()))
    if ending.is_asked:
        raise KeyboardInterrupt
    if failure is not None:
        raise PromptsFailed(_what_failed(completions) or str(failure)) from failure


def _what_failed(completions: Sequence[Completion]) -> str:
    """The number of prompts that failed, and why the first of them did; "" if none has."""
    failed = [(number, completion.error) for number, completion in enumerate(completions, 1) if completion.error]
    if not failed:
        return ""
    return f"{len(failed)} of {len(completions)} prompts failed; prompt {failed[0][0]}: {failed[0][1]}"


def _request(options: argparse.Namespace, requested: Request, model: ModelFiles, prompt: str) -> Request:
    if model.tokenizer is None:
        raise BadModel(f"{options.model} has no tokenizer.json, which prompts need")
    if not prompt.strip():
        raise BadRequest("a prompt is empty; give at least one word")
    token_ids = model.tokenizer.encode(prompt) if options.raw else model.tokenizer.encode_chat(prompt)
    return replace(requested, prompt_token_ids=tuple(token_ids))


def _engine_options(options: argparse.Namespace, model: ModelFiles, requests: Sequence[Request]) -> EngineOptions:
    """Options of an engine with room for these requests, so that a short prompt does not take all of the memory."""
    longest = max(len(request.prompt_token_ids) for request in requests) + options.max_new_tokens
    given = {name: getattr(options, name) for name in ON_GENERATE}
    given["max_batch_size"] = min(options.max_batch_size or MOST_SEQS, len(requests))
    return EngineOptions(**given, max_kv_len=min(longest, model.config.context_len))


def _progress(num_prompts: int) -> Callable[[Event], None]:
    """Shows on stderr how many prompts are done."""
    num_done = 0

    def show(event: Event) -> None:
        nonlocal num_done
        if isinstance(event, FailureEvent):
            say(f"prompt {event.request + 1} failed: {event.error}")
        elif isinstance(event, AbortEvent) or event.finish_reason is not None:
            num_done += 1
            say(f"{num_done} of {num_prompts} prompts done")

    return show


@contextmanager
def _texts(prompts: Sequence[str]) -> Iterator[Callable[[Event], None]]:
    """Shows the text on stdout as it comes; several texts one after the other, under their prompts.

    At an interrupt, SIGTERM or an error, texts that are complete and wait for their turn are printed.
    """
    texts = OrderedText(sys.stdout, [_header(prompt) for prompt in prompts] if len(prompts) > 1 else [], len(prompts))

    def show(event: Event) -> None:
        texts.add(event.request, event.text)
        if isinstance(event, FailureEvent):
            say(f"prompt {event.request + 1} failed: {event.error}")
            texts.finish(event.request)
        elif isinstance(event, AbortEvent) or event.finish_reason is not None:
            texts.finish(event.request)

    try:
        yield show
    finally:
        texts.end_early()


def _header(prompt: str) -> str:
    line = " ".join(prompt.split())
    return f">>> {line if len(line) <= _HEADER_COLUMNS else line[: _HEADER_COLUMNS - 3] + '...'}"


def _as_json(prompt: str, completion: Completion) -> dict[str, object]:
    return {
        "prompt": prompt,
        "prompt_token_ids": list(completion.prompt_token_ids),
        "token_ids": list(completion.token_ids),
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "error": completion.error,
        "logprobs": [asdict(each) for each in completion.logprobs],
        "prompt_logprobs": [asdict(each) for each in completion.prompt_logprobs],
    }


def _lines(report: Report) -> list[str]:
    return [
        layers_line(report),
        *(f"  {line}" for line in (*report.kernels, *report.rejected)),
        *(
            [f"{report.checkpoints} states of recurrent layers for prompts that begin alike"]
            if report.state_bytes
            else []
        ),
        *([f"{report.ranks} ranks share the model"] if report.ranks > 1 else []),
        *(f"  {sentence}" for sentence in report.cost_of_ranks),
        report.memory_line(),
        report.start_line(),
        *report.steps,
        *(["deterministic: a prompt's tokens do not depend on other prompts"] if report.deterministic else []),
        *([f"SAFEGUARDS OFF: {', '.join(report.guards_off)}"] if report.guards_off else []),
        *([f"rounds of draft tokens {report.speculative_steps}"] if report.speculative_steps else []),
        *([] if report.metrics.graphs_off else [f"graphs {report.graphs}"]),
        *report.metrics.lines(),
    ]
