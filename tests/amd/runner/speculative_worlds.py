"""Random requests to an engine with speculation, in random worlds: each text must be that of plain decoding.

A world is a seed: the drafter, the number of draft tokens and branches, pages of 1, 2 or 16 tokens and few of them,
windows that may be shorter than a tree is deep, graphs, one step ahead. Requests arrive while others run, share
beginnings, are second turns, are greedy or draw by their own seeds, and some are aborted.

    python -m tests.amd.runner.speculative_worlds --worlds 40 --device cuda --dtype bfloat16
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

import torch

from rocm_attn.step.metrics import Metrics
from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel
from rocm_serve.options import EngineOptions
from rocm_serve.request import Completion, Event, Request, TokenEvent
from rocm_serve.sampling.sampling_options import Sampling
from rocm_serve.speculation.draft_model import ModelDrafter
from rocm_serve.speculation.eagle import EagleDrafter
from rocm_serve.speculation.engines import model_drafter
from rocm_serve.speculation.speculation import Speculation
from tests.amd.runner.cache_invariants import check_cache
from tests.amd.runner.scripted_drafts import ScriptedDrafter, with_drafter
from tests.amd.runner.serving import all_pages_are_free
from tests.amd.runner.tiny_model import CONFIG, tiny_model, with_windows

LONGEST = 64
# Drafts that are mostly right; a small model, or the model itself; heads of random weights, which are mostly wrong.
SCRIPT, MODEL = "script", "draft"
WAYS = (SCRIPT, MODEL, "eagle:seeded", SCRIPT, "ngram", MODEL, "eagle:seeded3")
WINDOWS = ((-1, -1), (9, -1), (2, -1), (-1, 1))


@dataclass(frozen=True)
class World:
    """The random choices of an engine and its requests.

    way:         of WAYS
    window_left: of the model's layers
    few_pages:   true if sequences are preempted for lack of pages
    """

    seed: int
    way: str
    window_left: tuple[int, int]
    options: EngineOptions
    few_pages: bool
    num_requests: int

    @classmethod
    def of_seed(cls, seed: int, num_requests: int = 24) -> World:
        """Takes ways, branches and page sizes in turn, and the rest at random.

        Steps sum in a fixed order. Otherwise the last bits of scores depend on the other sequences of a step, and a
        drawn number near the border of two tokens' shares can pick the other token. In float32, at 1e-6, that happened
        in one of 200 worlds.
        """
        draw = random.Random(seed)
        page_size, way = (1, 2, 16)[seed % 3], WAYS[seed % len(WAYS)]
        topk = (1, 2, 4, 1, 8)[seed % 5]
        window_left = draw.choice(WINDOWS)
        num_pages = 1 + draw.randrange(96, 160) // page_size
        options = EngineOptions(
            speculative="ngram" if way in (SCRIPT, MODEL) else way,
            draft_tokens=draw.randrange(max(2, topk), 12),
            topk=topk,
            page_size=page_size,
            num_pages=num_pages,
            swa_pages=draw.choice([0, num_pages]) if max(window_left) >= 0 else 0,
            max_batch_size=draw.choice([2, 6]),
            chunk=draw.choice([9, 16, 64]),
            max_kv_len=LONGEST,
            graphs=draw.random() < 0.5,
            capture_after=draw.choice([0, 2]),
            steps_ahead=draw.choice([0, 1]),
            deterministic=True,
        )
        return cls(seed, way, window_left, options, num_pages * page_size < 130, num_requests)

    def __str__(self) -> str:
        o = self.options
        return (
            f"world {self.seed}: {self.way}, {o.draft_tokens} drafts, {o.topk} branches, {o.num_pages} pages of "
            f"{o.page_size}, windows {self.window_left} in {o.swa_pages} pages, {o.max_batch_size} at a time, "
            f"chunks of {o.chunk}, graphs {o.graphs} after {o.capture_after}, {o.steps_ahead} ahead"
        )


class Run:
    """One world's engine, the requests that it was given, and its outputs for them."""

    def __init__(self, world: World, loaded: LoadedModel, small: LoadedModel) -> None:
        self.world = world
        self._random = random.Random(world.seed)
        plain = replace(
            world.options,
            speculative="off",
            draft_tokens=4,
            topk=1,
            graphs=False,
            num_pages=None,
            swa_pages=0,
            steps_ahead=0,
            max_batch_size=1,
        )
        self._plain = Engine(loaded, plain)
        engine = self.engine = Engine(loaded, world.options)
        self._texts: list[tuple[int, ...]] = []
        if world.way == SCRIPT:
            with_drafter(engine, ScriptedDrafter(self._texts, CONFIG.vocab_size, branches=world.options.topk > 1))
        elif world.way == MODEL:
            drafter = model_drafter(small, loaded, world.options, engine.runtime)
            num = world.options.draft_tokens
            engine._speculation = Speculation(drafter, engine.runtime, engine._picker, num, engine.metrics)
        self._begins = [self._tokens(self._random.randrange(8, 36)) for _ in range(3)]
        self.requests: list[Request] = []
        self.wanted: list[Completion] = []
        self.emitted: dict[int, list[int]] = {}
        self.done: dict[int, Completion] = {}

    def _tokens(self, num: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(CONFIG.vocab_size) for _ in range(num))

    def _sampling(self) -> Sampling:
        draw = self._random
        if draw.random() < 0.5:
            return Sampling()
        sampling = Sampling(draw.choice([0.3, 0.8, 1.5]), draw.choice([1.0, 0.8]), seed=draw.randrange(1000))
        if draw.random() < 0.3:
            sampling = replace(sampling, top_k=draw.choice([0, 3]), presence_penalty=draw.choice([0.0, 0.7]))
        return sampling

    def _request(self) -> Request:
        draw = self._random
        if self.done and draw.random() < 0.3:  # a second turn
            earlier = self.done[draw.choice(list(self.done))]
            prompt = earlier.prompt_token_ids + earlier.token_ids + self._tokens(draw.randrange(1, 4))
        else:
            begin = draw.choice(self._begins)
            prompt = begin[: draw.choice([len(begin), draw.randrange(len(begin))])] + self._tokens(draw.randrange(1, 6))
        return Request(
            prompt[:LONGEST],
            max_new_tokens=draw.randrange(1, 30),
            sampling=self._sampling(),
            stop_token_ids=self._tokens(1) if draw.random() < 0.3 else (),
            priority=draw.choice([0, 0, 0, -1, 1]),
            prefix_caching=draw.random() < 0.9,
            logprobs=draw.choice([-1, -1, -1, 2]),
        )

    def _arrive_or_leave(self) -> None:
        while len(self.requests) < self.world.num_requests and self._random.random() < 0.4:
            request = self._request()
            number = self.engine.submit(request)
            assert number == len(self.requests)
            (wanted,) = self._plain.generate([request])
            self._texts.append(wanted.prompt_token_ids + wanted.token_ids)
            self.requests.append(request)
            self.wanted.append(wanted)
            self.emitted[number] = []
        if self.requests and self._random.random() < 0.04:
            self.engine.abort(self._random.randrange(len(self.requests)))

    def run(self) -> Metrics:
        """Serves all requests and compares their outputs."""
        engine = self.engine
        cache, table = engine._scheduler._cache, engine.runtime.table
        while len(self.requests) < self.world.num_requests or engine.has_work:
            self._arrive_or_leave()
            if engine.has_work:
                self._note(engine.step())
                check_cache(cache, table)
        assert len(self.done) == len(self.requests)
        for number, completion in self.done.items():
            self._compare(number, completion)
        assert all_pages_are_free(engine)
        engine.runtime.check_device()
        self._check_drafter()
        return engine.report().metrics

    def _check_drafter(self) -> None:
        """A model or a head that drafts gives its pages back."""
        drafter = self.engine._speculation._drafter
        if isinstance(drafter, ModelDrafter | EagleDrafter):
            drafter.draft([], frozenset())
            assert drafter.table.num_free_rows == len(drafter.table.full.entries_host) - 1
            assert drafter.table.full.num_free_pages == drafter.table.full.num_usable_pages

    def _note(self, events: Many[Event]) -> None:
        for event in events:
            if isinstance(event, TokenEvent):
                self.emitted[event.request].append(event.token_id)
        for number in {event.request for event in events}:
            if not isinstance(last := [e for e in events if e.request == number][-1], TokenEvent) or last.finish_reason:
                self.done[number] = self.engine.completion(number)

    def _compare(self, number: int, done: Completion) -> None:
        request, wanted = self.requests[number], self.wanted[number]
        what = f"{self.world}; request {number} of {len(request.prompt_token_ids)} tokens, {request.sampling}"
        assert tuple(self.emitted[number]) == done.token_ids, f"{what}: events and completion differ"
        if done.finish_reason == "abort":
            wanted = replace(wanted, token_ids=wanted.token_ids[: len(done.token_ids)])
        else:
            assert done.finish_reason == wanted.finish_reason, what
        assert done.token_ids == wanted.token_ids, what


def run_world(
    seed: int, num_requests: int = 24, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> Metrics:
    """Serves the requests of a world. Raises AssertionError for a text that differs from plain decoding's."""
    world = World.of_seed(seed, num_requests)
    loaded = tiny_model(base=with_windows(CONFIG, *world.window_left), dtype=dtype, device=device)
    small = loaded if world.few_pages else tiny_model(seed=1, dtype=dtype, device=device)
    return Run(world, loaded, small).run()


def main() -> None:
    """Runs worlds, and prints their results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="seed of the first world (0)")
    parser.add_argument("--worlds", type=int, default=10, help="so many (10)")
    parser.add_argument("--requests", type=int, default=24, help="of a world (24)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    failed, drafts, accepted, preempted = list[str](), 0, 0, 0
    for seed in range(args.first, args.first + args.worlds):
        try:
            metrics = run_world(seed, args.requests, getattr(torch, args.dtype), torch.device(args.device))
        except Exception as failure:
            failed.append(f"world {seed}: {type(failure).__name__}: {failure}")
            print(failed[-1], flush=True)
            continue
        counts = f"{metrics.accepted_drafts} of {metrics.drafts} drafts accepted, {metrics.preemptions} preemptions"
        print(f"world {seed}: {counts}, {metrics.prefix_hits} tokens found, {metrics.aborts} aborts", flush=True)
        drafts, accepted = drafts + metrics.drafts, accepted + metrics.accepted_drafts
        preempted += metrics.preemptions
    print(
        f"{args.worlds} worlds, {len(failed)} failed; {drafts} drafts, {accepted} accepted, {preempted} preemptions",
        flush=True,
    )
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
