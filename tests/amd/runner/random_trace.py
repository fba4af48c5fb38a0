"""Requests that come at random to a real engine with few pages, and a check of each output by dense attention.

They have shared beginnings, second turns, tenants, priorities, aborts and prompts in chunks. Some have NaN in K and V,
and some get NaN in the K and V of one token in one step.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
from torch import Tensor

from rocm_attn.batch.padding import PadTo
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.step.metrics import Metrics
from rocm_serve.engine import Engine
from rocm_serve.models.model import Model
from rocm_serve.request import AbortEvent, Completion, Event, FailureEvent, Request, TokenEvent
from tests.amd.runner.cache_invariants import check_cache
from tests.amd.runner.dense_attention import assert_greedy
from tests.amd.runner.serving import BASE, all_pages_are_free
from tests.amd.runner.tiny_model import CONFIG, NAN_TOKEN, tiny_model, with_nan_token, with_windows

LONGEST = 64
TAKEN = -2
OPTIONS = replace(BASE, max_batch_size=6, max_kv_len=LONGEST, num_pages=26)


@dataclass(frozen=True)
class Served:
    """The results of a trace."""

    completions: dict[int, Completion]
    hit_in_passing: set[int]
    metrics: Metrics


class NoNumbersInPassing:
    """Runs an engine's steps. In some of them one token of a prompt becomes NaN in the model.

    hit: numbers of the requests that got such a NaN. They may have received wrong tokens before it was reported.
    """

    def __init__(self, engine: Engine, chooser: random.Random) -> None:
        self._engine, self._random = engine, chooser
        self._run = engine._steps.run
        self._token = -1
        self.hit: set[int] = set()

    def run(self, batch: StepBatch, pad_to: PadTo | None = None) -> Tensor:
        """Does the same as the `run` of the steps that it replaces."""
        long = np.flatnonzero(batch.q_len > 1)
        if len(long) and self._random.random() < 0.08:
            seq = self._random.choice(long.tolist())
            # not the last one, whose logits would be NaN
            self._token = int(batch.q_len[:seq].sum()) + self._random.randrange(int(batch.q_len[seq]) - 1)
        try:
            return self._run(batch, pad_to)
        finally:
            if self._token == TAKEN:
                row = batch.rows[seq]
                self.hit |= {each.number for each in self._engine._scheduler._running if each.row == row}
            self._token = -1

    def embed(self, rows: Tensor) -> Tensor:
        """Returns the result of Model.embed, with NaN in place of the token."""
        if self._token >= 0:
            rows[self._token] = float("nan")
            self._token = TAKEN
        return rows


class Trace:
    """One engine, the requests that it was given, and its outputs for them."""

    def __init__(self, seed: int, num_requests: int, steps_ahead: int) -> None:
        self._random = random.Random(seed)
        self._num_requests = num_requests
        windows = seed & 2 > 0
        self.loaded = with_nan_token(tiny_model(base=with_windows(CONFIG, 9, -1) if windows else CONFIG))
        options = replace(OPTIONS, graphs=seed & 1 > 0, swa_pages=13 if windows else 0, deterministic=seed % 5 == 4)
        options = replace(options, steps_ahead=steps_ahead)
        self.engine = Engine(self.loaded, options)
        self._in_passing = NoNumbersInPassing(self.engine, random.Random(seed))
        self._begins = [self._tokens(self._random.randrange(12, 40)) for _ in range(3)]
        self.requests: list[Request] = []
        self.events: dict[int, list[Event]] = {}
        self.done: dict[int, Completion] = {}

    def _tokens(self, num: int) -> tuple[int, ...]:
        return tuple(self._random.choice([token for token in range(64) if token != NAN_TOKEN]) for _ in range(num))

    def _request(self) -> Request:
        chooser = self._random
        if self.done and chooser.random() < 0.3:  # a second turn
            earlier = self.done[chooser.choice(list(self.done))]
            prompt = earlier.prompt_token_ids + earlier.token_ids + self._tokens(chooser.randrange(1, 5))
        else:
            begin = chooser.choice(self._begins)
            prompt = begin[: chooser.choice([len(begin), chooser.randrange(len(begin))])]
            prompt += self._tokens(chooser.randrange(1, 9))
        if chooser.random() < 0.04:
            at = chooser.randrange(len(prompt) + 1)
            prompt = (*prompt[:at], NAN_TOKEN, *prompt[at:])
        return Request(
            prompt[:LONGEST],
            max_new_tokens=chooser.randrange(1, 16),
            priority=chooser.choice([0, 0, 0, -1, 1]),
            cache_salt=chooser.choice(["", "", "", "tenant"]),
            prefix_caching=chooser.random() < 0.95,
        )

    def _arrive_or_leave(self) -> None:
        while len(self.requests) < self._num_requests and self._random.random() < 0.4:
            request = self._request()
            number = self.engine.submit(request)
            assert number == len(self.requests)
            self.requests.append(request)
            self.events[number] = []
        if self.requests and self._random.random() < 0.05:
            self.engine.abort(self._random.randrange(len(self.requests)))

    def run(self) -> Served:
        """Serves all requests and compares their outputs."""
        if self.engine.options.graphs:  # the model is not called in a replay
            return self._run()
        with pytest.MonkeyPatch.context() as patch:
            embed = Model.embed
            patch.setattr(self.engine, "_steps", self._in_passing)
            patch.setattr(Model, "embed", lambda model, token_ids: self._in_passing.embed(embed(model, token_ids)))
            return self._run()

    def _run(self) -> Served:
        cache, table = self.engine._scheduler._cache, self.engine.runtime.table
        while len(self.requests) < self._num_requests or self.engine.has_work:
            self._arrive_or_leave()
            if self.engine.has_work:
                events = self.engine.step()
                for event in events:
                    self.events[event.request].append(event)
                for number in {event.request for event in events if _is_last(event)}:
                    self.done[number] = self.engine.completion(number)
                check_cache(cache, table)
        metrics = self.engine.report().metrics
        for number, completion in self.done.items():
            self._compare(number, completion)
        assert len(self.done) == len(self.requests)
        assert all_pages_are_free(self.engine)
        self.engine.runtime.check_device()
        return Served(self.done, self._in_passing.hit, metrics)

    def _compare(self, number: int, done: Completion) -> None:
        request, events = self.requests[number], self.events[number]
        tokens = [event.token_id for event in events if isinstance(event, TokenEvent)]
        assert tuple(tokens) == done.token_ids, f"request {number}: events and completion differ"
        had_no_numbers = NAN_TOKEN in request.prompt_token_ids or number in self._in_passing.hit
        if done.finish_reason == "error":
            # A request that ended in the step of another's fault, but was not handed over, is not computed again.
            had_ended = any(map(_is_last, events[:-1]))
            assert had_no_numbers or had_ended, f"request {number}: {done.error}"
            assert isinstance(events[-1], FailureEvent)
            return
        if had_no_numbers:
            return  # some of its tokens were picked before the fault was known
        assert_greedy(self.loaded, done)
        if done.finish_reason == "abort":
            assert isinstance(events[-1], AbortEvent)
            return
        room = LONGEST + 1 - len(request.prompt_token_ids)
        assert (len(tokens), done.finish_reason) == (min(request.max_new_tokens, room), "length")


def _is_last(event: Event) -> bool:
    return not isinstance(event, TokenEvent) or event.finish_reason is not None


def run_trace(seed: int, num_requests: int, steps_ahead: int = 0) -> Served:
    """Serves the requests of a seed. Raises AssertionError for an output that differs from the reference's."""
    return Trace(seed, num_requests, steps_ahead).run()
