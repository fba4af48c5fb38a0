"""The small engine of the tests here: its options, requests to it, and what must be left of it afterwards."""

import random
import sys
import types
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from rocm_attn.errors import DeviceFault
from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel
from rocm_serve.options import EngineOptions
from rocm_serve.request import Completion, Event, Request
from tests.amd.runner.tiny_model import CONFIG

BASE = EngineOptions(
    provider="auto", page_size=4, max_batch_size=8, chunk=16, graphs=False, max_kv_len=64, capture_after=0
)


def engine(loaded: LoadedModel, **changes: Any) -> Engine:
    return Engine(loaded, replace(BASE, **changes))


def some_requests(num: int = 7, new_tokens: int = 12, longest: int = 30, **options: Any) -> list[Request]:
    """Requests with random prompts of fewer than `longest` tokens."""
    chooser = random.Random(11)
    lengths = [chooser.randrange(1, longest) for _ in range(num)]
    return [
        Request(tuple(chooser.randrange(CONFIG.vocab_size) for _ in range(length)), new_tokens, **options)
        for length in lengths
    ]


def short_requests(num: int = 3, new_tokens: int = 6, **options: Any) -> list[Request]:
    """Requests with short prompts of different lengths, without NAN_TOKEN."""
    return [Request(tuple(range(10 + number, 14 + 3 * number)), new_tokens, **options) for number in range(num)]


def salt_of_a_class_that_others_lack(monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns a salt of a class that pickle finds in this process only, such as one of a notebook."""
    module = types.ModuleType("only_in_this_process")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    salt: type[str] = type("Salt", (str,), {"__module__": module.__name__})
    module.Salt = salt  # type: ignore[attr-defined]
    return salt("a")


def tokens_of(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


def alone(loaded: LoadedModel, request: Request, **changes: Any) -> Completion:
    """Returns the completion of a request that an engine of its own serves."""
    return engine(loaded, **changes).generate([request])[0]


def until_done(served: Engine) -> list[Event]:
    """Serves all requests that are left."""
    events: list[Event] = []
    while served.has_work:
        events += served.step()
    return events


def faults_until_done(served: Engine) -> list[DeviceFault]:
    """Serves all requests that are left; returns the faults that were raised on the way."""
    faults: list[DeviceFault] = []
    while served.has_work:
        try:
            served.step()
        except DeviceFault as fault:
            faults.append(fault)
    return faults


def served_to_the_end(served: Engine, numbers: Sequence[int]) -> list[Completion]:
    """Serves all requests that are left; returns the completions of some."""
    until_done(served)
    return [served.completion(number) for number in numbers]


def all_pages_are_free(served: Engine) -> bool:
    """True if no page, row or work is left, except cached prefixes, which are forgotten here."""
    served.forget_prefixes()
    table = served.runtime.table
    has_all_rows = table.num_free_rows == len(table.full.entries_host) - 1  # row 0 is reserved
    return has_all_rows and all(s.num_free_pages == s.num_usable_pages for s in table.spaces) and not served.has_work
