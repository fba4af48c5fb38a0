"""Random requests to whole engines, in random worlds: each output is that of a reference.

A world is a seed: the drafter, the number of draft tokens and branches, pages of 1 to 16 tokens and few of them,
windows that may be shorter than a tree is deep, graphs, one step ahead. Requests arrive while others run, share
beginnings, are second turns, have tenants and priorities, and some are aborted.

Without draft tokens all are greedy, some have NaN in K and V, some get it in one step, and dense attention is the
reference. With draft tokens some draw by their own seeds, and plain decoding is the reference.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.batch.padding import PadTo
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.step.metrics import Metrics
from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel
from rocm_serve.models.model import Model
from rocm_serve.options import EngineOptions
from rocm_serve.request import Completion, Event, Request, TokenEvent
from rocm_serve.sampling.sampling_options import Sampling
from rocm_serve.speculation.device_steps import DeviceSpeculation
from rocm_serve.speculation.draft_model import ModelDrafter
from rocm_serve.speculation.eagle import EagleDrafter
from rocm_serve.speculation.engines import model_drafter
from rocm_serve.speculation.speculation import Speculation
from tests.amd.runner.cache_invariants import check_cache
from tests.amd.runner.dense_attention import assert_greedy
from tests.amd.runner.round_texts import launched, round_model
from tests.amd.runner.scripted_drafts import ScriptedDrafter, with_drafter
from tests.amd.runner.serving import BASE, all_pages_are_free
from tests.amd.runner.tiny_model import CONFIG, NAN_TOKEN, tiny_model, with_nan_token, with_windows

# Drafts that are mostly right; a small model, or the model itself; heads of random weights, which are mostly wrong; the
# texts of a model that repeats itself.
PLAIN, SCRIPT, MODEL, NGRAM = "off", "script", "draft", "ngram"
WAYS = (SCRIPT, MODEL, "eagle:seeded", SCRIPT, NGRAM, MODEL, "eagle:seeded3")
WINDOWS = ((-1, -1), (9, -1), (2, -1), (-1, 1))


class NanTokens:
    """In some steps of an engine a token is NaN in the model.

    choose: the place of that token among those of a step, or None
    """

    def __init__(self, engine: Engine, choose: Callable[[StepBatch], int | None], patch: pytest.MonkeyPatch) -> None:
        self._run, self._embed, self._choose = engine._steps.run, Model.embed, choose
        self._token: int | None = None
        patch.setattr(engine, "_steps", self)
        patch.setattr(Model, "embed", lambda model, token_ids: self._embedded(model, token_ids))

    def run(self, batch: StepBatch, pad_to: PadTo | None = None) -> Tensor:
        """Does the same as the `run` of the steps that it replaces."""
        self._token = self._choose(batch)
        try:
            return self._run(batch, pad_to)
        finally:
            self._token = None

    def _embedded(self, model: Model, token_ids: Tensor) -> Tensor:
        rows = self._embed(model, token_ids)
        if self._token is not None:
            rows[self._token] = float("nan")
            self._token = None
        return rows


@dataclass(frozen=True)
class World:
    """The random choices of an engine and its requests.

    way:         PLAIN, or of WAYS
    window_left: of the model's layers
    """

    seed: int
    way: str
    window_left: tuple[int, int]
    options: EngineOptions
    num_requests: int

    @classmethod
    def plain(cls, seed: int, num_requests: int, steps_ahead: int = 0) -> World:
        """A world without draft tokens: every other one with graphs, two of four with windows."""
        options = replace(BASE, max_batch_size=6, num_pages=26, graphs=seed & 1 > 0, deterministic=seed % 5 == 4)
        options = replace(options, swa_pages=13 if seed & 2 else 0, steps_ahead=steps_ahead)
        return cls(seed, PLAIN, (9, -1) if seed & 2 else (-1, -1), options, num_requests)

    @classmethod
    def speculating(cls, seed: int, num_requests: int = 24) -> World:
        """Takes ways, branches and page sizes in turn, and the rest at random.

        In worlds of ngram few requests come at a time, and few draw: rounds follow from each other on the device.

        Steps sum in a fixed order. Otherwise the last bits of scores depend on the other sequences of a step, and a
        drawn number near the border of two tokens' shares can pick the other token. In float32, at 1e-6, that happened
        in one of 200 worlds.
        """
        draw = random.Random(seed)
        page_size, way, topk = (1, 2, 16)[seed % 3], WAYS[seed % len(WAYS)], (1, 2, 4, 1, 8)[seed % 5]
        window_left, num_tokens = draw.choice(WINDOWS), draw.randrange(96, 160) * (3 if way == NGRAM else 1)
        num_pages = 1 + num_tokens // page_size
        options = EngineOptions(
            speculative=NGRAM if way in (SCRIPT, MODEL) else way,
            draft_tokens=draw.randrange(max(2, topk), 12) if way != NGRAM or topk > 1 else draw.randrange(1, 5),
            topk=topk,
            page_size=page_size,
            num_pages=num_pages,
            swa_pages=draw.choice([0, num_pages]) if max(window_left) >= 0 else 0,
            max_batch_size=draw.choice([2, 6]),
            chunk=draw.choice([9, 16, 64]),
            max_kv_len=160 if way == NGRAM else 64,
            graphs=draw.random() < 0.5,
            capture_after=draw.choice([0, 2]),
            steps_ahead=draw.choice([0, 1]),
            deterministic=True,
        )
        return cls(seed, way, window_left, options, num_requests)

    def model(self, device: torch.device | None = None) -> LoadedModel:
        """A new model of this world."""
        if self.way == NGRAM:
            return round_model(device, windows=self.window_left)
        loaded = tiny_model(base=with_windows(CONFIG, *self.window_left), device=device)
        return with_nan_token(loaded) if self.way == PLAIN else loaded

    @property
    def plain_options(self) -> EngineOptions:
        """Options of the reference: no draft tokens, graphs or prefix cache, and pages for everything."""
        plain = replace(self.options, speculative="off", draft_tokens=4, topk=1, graphs=False, steps_ahead=0)
        return replace(plain, num_pages=None, swa_pages=0, prefix_caching=False)

    def __str__(self) -> str:
        o = self.options
        return (
            f"world {self.seed}: {self.way}, {o.draft_tokens} drafts, {o.topk} branches, {o.num_pages} pages of "
            f"{o.page_size}, windows {self.window_left} in {o.swa_pages} pages, {o.max_batch_size} at a time, "
            f"chunks of {o.chunk}, graphs {o.graphs} after {o.capture_after}, {o.steps_ahead} ahead"
        )


class Run:
    """One world's engine, the requests that it was given, and its outputs for them.

    hit:    numbers of the requests that got NaN in one step; they may have got wrong tokens before it was reported
    rounds: a 1 for each round that the host has not planned
    """

    def __init__(self, world: World, device: torch.device | None = None) -> None:
        self.world, self._random = world, random.Random(world.seed)
        self._loaded = loaded = world.model(device)
        engine = self.engine = Engine(loaded, world.options)
        self.rounds = launched(engine) if isinstance(engine._speculative_steps, DeviceSpeculation) else []
        self._texts: list[tuple[int, ...]] = []
        if world.way == SCRIPT:
            with_drafter(engine, ScriptedDrafter(self._texts, CONFIG.vocab_size, branches=world.options.topk > 1))
        elif world.way == MODEL:
            small = loaded if world.seed % 2 else tiny_model(seed=1, device=device)
            drafter, num = model_drafter(small, loaded, world.options, engine.runtime), world.options.draft_tokens
            engine._speculation = Speculation(drafter, engine.runtime, engine._picker, num, engine.metrics)
        if world.way != PLAIN:
            self._plain = Engine(loaded, world.plain_options)
        self._begins = [self._tokens(self._random.randrange(10, 38)) for _ in range(3)]
        self.hit = set[int]()
        self.requests: list[Request] = []
        self.wanted: list[Completion] = []
        self.events: dict[int, list[Event]] = {}
        self.done: dict[int, Completion] = {}

    def _tokens(self, num: int) -> tuple[int, ...]:
        return tuple(self._random.choice([token for token in range(64) if token != NAN_TOKEN]) for _ in range(num))

    def _request(self) -> Request:
        draw, is_plain, longest = self._random, self.world.way == PLAIN, self.world.options.max_kv_len
        assert longest is not None
        if self.done and draw.random() < 0.3:  # a second turn
            earlier = self.done[draw.choice(list(self.done))]
            prompt = (*earlier.prompt_token_ids, *earlier.token_ids, *self._tokens(draw.randrange(1, 5)))
        else:
            begin = draw.choice(self._begins)
            prompt = begin[: draw.choice([len(begin), draw.randrange(len(begin))])] + self._tokens(draw.randrange(1, 9))
        if is_plain and draw.random() < 0.04:
            at = draw.randrange(len(prompt) + 1)
            prompt = (*prompt[:at], NAN_TOKEN, *prompt[at:])
        return Request(
            prompt[:longest],
            max_new_tokens=draw.randrange(1, 16 if is_plain else longest // 2),
            sampling=Sampling() if is_plain else self._sampling(),
            stop_token_ids=self._tokens(1) if not is_plain and draw.random() < 0.3 else (),
            priority=draw.choice([0, 0, 0, -1, 1]),
            cache_salt=draw.choice(["", "", "", "tenant"]),
            prefix_caching=draw.random() < 0.95,
            logprobs=-1 if is_plain or self.world.way == NGRAM else draw.choice([-1, -1, -1, 2]),
        )

    def _sampling(self) -> Sampling:
        draw = self._random
        if draw.random() < (0.9 if self.world.way == NGRAM else 0.5):
            return Sampling()
        sampling = Sampling(draw.choice([0.3, 0.8, 1.5]), draw.choice([1.0, 0.8]), seed=draw.randrange(1000))
        if draw.random() < 0.3:
            sampling = replace(sampling, top_k=draw.choice([0, 3]), presence_penalty=draw.choice([0.0, 0.7]))
        return sampling

    def _arrive_or_leave(self) -> None:
        most, rate = self.world.num_requests, 0.06 if self.world.way == NGRAM else 0.4
        while len(self.requests) < most and self._random.random() < rate:
            request = self._request()
            number = self.engine.submit(request)
            assert number == len(self.requests)
            if self.world.way == SCRIPT:  # which knows the text
                self.wanted += self._plain.generate([request])
                self._texts.append((*request.prompt_token_ids, *self.wanted[-1].token_ids))
            self.requests.append(request)
            self.events[number] = []
        if self.requests and self._random.random() < max(0.02, rate / 8):
            self.engine.abort(self._random.randrange(len(self.requests)))

    def _token_of_a_prompt(self, batch: StepBatch) -> int | None:
        """Not the last one, whose logits would be NaN."""
        long = np.flatnonzero(batch.q_len > 1).tolist()
        if not long or self._random.random() >= 0.08:
            return None
        seq = self._random.choice(long)
        self.hit |= {each.number for each in self.engine._scheduler._running if each.row == batch.rows[seq]}
        return int(batch.q_len[:seq].sum()) + self._random.randrange(int(batch.q_len[seq]) - 1)

    def run(self) -> Metrics:
        """Serves all requests and compares their outputs."""
        with pytest.MonkeyPatch.context() as patch:
            if self.world.way == PLAIN and not self.world.options.graphs:  # the model is not called in a replay
                NanTokens(self.engine, self._token_of_a_prompt, patch)
            self._serve()
        assert len(self.done) == len(self.requests)
        if self.world.way not in (PLAIN, SCRIPT):
            self.wanted = self._plain.generate(self.requests)
        metrics = self.engine.report().metrics
        for number, completion in self.done.items():
            self._compare(number, completion)
        assert all_pages_are_free(self.engine)
        self.engine.runtime.check_device()
        self._check_drafter()
        return metrics

    def _serve(self) -> None:
        engine = self.engine
        while len(self.requests) < self.world.num_requests or engine.has_work:
            self._arrive_or_leave()
            if engine.has_work:
                events = engine.step()
                for event in events:
                    self.events[event.request].append(event)
                for number in {event.request for event in events if is_last(event)}:
                    self.done[number] = engine.completion(number)
                check_cache(engine._scheduler._cache, engine.runtime.table)

    def _check_drafter(self) -> None:
        """A model or a head that drafts gives its pages back."""
        drafter = self.engine._speculation._drafter
        if isinstance(drafter, ModelDrafter | EagleDrafter):
            drafter.draft([], frozenset())
            assert drafter.table.num_free_rows == len(drafter.table.full.entries_host) - 1
            assert drafter.table.full.num_free_pages == drafter.table.full.num_usable_pages

    def _compare(self, number: int, done: Completion) -> None:
        request, events = self.requests[number], self.events[number]
        what = f"{self.world}; request {number} of {len(request.prompt_token_ids)} tokens, {request.sampling}"
        tokens = [event.token_id for event in events if isinstance(event, TokenEvent)]
        assert tuple(tokens) == done.token_ids, f"{what}: events and completion differ"
        if self.world.way != PLAIN:
            wanted = self.wanted[number]
            if done.finish_reason == "abort":
                wanted = replace(wanted, token_ids=wanted.token_ids[: len(tokens)], finish_reason="abort")
            assert (done.token_ids, done.finish_reason) == (wanted.token_ids, wanted.finish_reason), what
            return
        is_poisoned = NAN_TOKEN in request.prompt_token_ids or number in self.hit
        if done.finish_reason == "error":
            # A request that ended in the step of another's fault, but was not handed over, is not computed again.
            assert is_poisoned or any(map(is_last, events[:-1])), f"{what}: {done.error}"
        elif not is_poisoned:  # else some of its tokens were picked before the fault was known
            assert_greedy(self._loaded, done)
            room = 65 - len(request.prompt_token_ids)
            assert done.finish_reason == "abort" or len(tokens) == min(request.max_new_tokens, room), what


def is_last(event: Event) -> bool:
    """True if nothing comes of the request after it, except a failure."""
    return not isinstance(event, TokenEvent) or event.finish_reason is not None


def run_worlds(worlds: Many[World], device: torch.device | None = None) -> dict[str, int]:
    """Serves the requests of worlds; returns the sums of their counts.

    Raises AssertionError for an output that is not the reference's, and for worlds that do not show what they are for.
    """
    runs = [Run(world, device) for world in worlds]
    found = [each.run() for each in runs]
    is_plain, has_graphs = worlds[0].way == PLAIN, any(world.options.graphs for world in worlds)
    names = ["preemptions", "prefix_hits", "aborts", *(["faults"] if is_plain else ["drafts", "accepted_drafts"])]
    counts = {name: sum(getattr(metrics, name) for metrics in found) for name in names}
    shown = {**counts, "replays": sum(metrics.replays for metrics in found) if has_graphs else 1}
    shown |= (
        {"hit": 1 if has_graphs else len(runs[0].hit)}
        if is_plain
        else {"rounds": sum(len(each.rounds) for each in runs)}
    )
    assert min(shown.values()) > 0, f"the worlds do not show what they are for: {shown}"
    return counts
