"""An interrupt between the reading of a step's tokens and their publishing loses none, and doubles none."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import CodeType, FrameType
from typing import Any

import pytest

from rocm_attn.runner.engine import Engine
from rocm_attn.runner.loading import LoadedModel
from rocm_attn.runner.options import EngineOptions
from rocm_attn.runner.request import Completion, Event, Request, TokenEvent
from tests.amd.house.source_tree import ROOT
from tests.amd.runner.asking import character_model
from tests.amd.runner.round_texts import round_model
from tests.amd.runner.test_rounds import BASE, KINDS

_OURS = str(ROOT / "rocm_attn" / "runner")
# Between these two a step's tokens are neither on the device alone nor told.
_WITHIN = (Engine._read_oldest.__code__, Engine._publish_read.__code__)

# A place in the code, and how often it was come to before.
Place = tuple[str, int, int]


@dataclass
class _Lines:
    """Lines of this project that run between reading and publishing; an interrupt comes at one of them, once.

    at: None: none comes
    """

    at: Place | None = None
    places: list[Place] = field(default_factory=list)
    came: bool = False
    _depth: int = 0
    _num: dict[tuple[str, int], int] = field(default_factory=dict)

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(_OURS):
            return None
        self._depth += code in _WITHIN
        return self._in_function

    def _in_function(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if event == "return":
            self._depth -= code in _WITHIN
        if event == "line" and self._depth and not self.came:
            line = code.co_filename, frame.f_lineno
            place = *line, self._num.get(line, 0)
            self._num[line] = place[2] + 1
            self.places.append(place)
            if place == self.at:
                self.came = True
                raise KeyboardInterrupt
        return self._in_function


@contextmanager
def traced(lines: _Lines) -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(lines)
    try:
        yield
    finally:
        sys.settrace(before)


def served(engine: Engine, requests: list[Request], lines: _Lines) -> tuple[list[Completion], list[Event]]:
    """What requests come to whose engine is asked again after each interrupt, and their events."""
    numbers, events = [engine.submit(request) for request in requests], list[Event]()
    while engine.has_work:
        try:
            with traced(lines):
                new = engine.step()
        except KeyboardInterrupt:
            assert lines.came
        else:
            events += new
    return [engine.completion(number) for number in numbers], events
