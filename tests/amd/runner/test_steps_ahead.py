"""An engine that launches a step before it reads the tokens of the last one: the same tokens, and nothing is lost."""

import asyncio
import itertools
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from rocm_attn.batch.padding import PadTo
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.errors import DeviceFault
from rocm_serve.async_engine import AsyncEngine
from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel
from rocm_serve.options import EngineOptions
from rocm_serve.prompt_logprobs import ComingPromptLogprobs
from rocm_serve.request import Completion, Request
from rocm_serve.sampling.sampling import PickedTokens
from rocm_serve.sampling.sampling_options import Sampling
from rocm_serve.speculation.speculation import StepPicks
from tests.amd.runner.serving import all_pages_are_free, until_done
from tests.amd.runner.tiny_model import tiny_model
from tests.amd.runner.with_parameters import BASE as ALIKE

BASE = replace(ALIKE, max_batch_size=4, max_kv_len=40, steps_ahead=1)


def alone(loaded: LoadedModel, request: Request) -> Completion:
    return Engine(loaded, replace(BASE, steps_ahead=0)).generate([request])[0]


class Order:
    """The order of an engine's calls: "run" and "read"."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        self.ids: list[list[int]] = []
        run, read = engine._steps.run, PickedTokens.read

        def noted_run(batch: StepBatch, pad_to: PadTo | None = None) -> Tensor:
            self.seen.append("run")
            self.ids.append(batch.token_ids.tolist())
            return run(batch, pad_to)

        def noted_read(picks: PickedTokens) -> Any:
            self.seen.append("read")
            return read(picks)

        monkeypatch.setattr(engine._steps, "run", noted_run)
        monkeypatch.setattr(PickedTokens, "read", noted_read)


def test_a_step_is_launched_before_the_tokens_of_the_last_one_are_read(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its token ids are then places among that one's picks; a request that ends by its length runs no extra step."""
    engine = Engine(loaded, BASE)
    order = Order(engine, monkeypatch)
    engine.generate([Request((9, 10), 4), Request((11,), 3)])
    assert order.seen == ["run", "run", "read", "run", "read", "run", "read", "read"]
    assert order.ids == [[9, 10, 11], [-1, -2], [-1, -2], [-1]]


def test_one_that_has_ended_is_not_failed_by_the_step_that_it_was_in_too_many(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row is wiped on the device in the step after its stop token: it has ended before that."""
    prompt, run = tuple(range(20, 27)), Engine._run
    whole = alone(loaded, Request(prompt, 12))
    stop = next(token for at, token in enumerate(whole.token_ids) if at > 2 and token not in whole.token_ids[:at])
    last = whole.token_ids.index(stop) + 1
    engine, numbers = Engine(loaded, BASE), itertools.count(1)

    def wiping(engine: Engine, step: Any) -> tuple[StepPicks, ComingPromptLogprobs]:
        if next(numbers) == last + 1:
            engine.runtime.gate._publisher.apply_table_changes()
            engine.runtime.table.full.entries.zero_()
        return run(engine, step)

    monkeypatch.setattr(Engine, "_run", wiping)
    number = engine.submit(Request(prompt, 12, stop_token_ids=(stop,)))
    with pytest.raises(DeviceFault, match=f"step {last + 1}: a new token had no page"):
        until_done(engine)
    done = engine.completion(number)
    assert (done.token_ids, done.finish_reason) == (whole.token_ids[:last], "stop")


def test_weights_that_change_between_two_steps_are_seen_by_no_cached_prefix(loaded: LoadedModel) -> None:
    """forget_prefixes() reads the step that runs: its pages are not entered afterwards."""
    engine = Engine(tiny_model(), BASE)
    request = Request(tuple(range(8, 29)), 3)
    engine.submit(request)
    engine.step()
    engine.forget_prefixes()
    assert engine.report().metrics.cached_pages == len(engine._scheduler._cache) == 0
    until_done(engine)


def test_nothing_runs_once_the_last_request_was_cancelled(loaded: LoadedModel) -> None:
    """No step() comes after it: the step that ran would be read when the next request comes, and timed until then."""
    engine = Engine(loaded, BASE)
    number = engine.submit(Request((9, 10), 20))
    engine.step()
    assert engine._pending
    engine.cancel(number)
    assert not engine.has_work
    assert not engine._pending
    assert all_pages_are_free(engine)


async def test_no_step_runs_while_a_function_is_called_between_two(loaded: LoadedModel) -> None:
    """No step runs on the device either: so the function may change a step's inputs."""
    engine = Engine(loaded, BASE)
    async with AsyncEngine(engine) as front:
        served = asyncio.create_task(front.complete(Request((9, 10, 11), 30)))
        pending = []
        while not served.done():
            pending.append(await front.between_steps(lambda: len(engine._pending)))
    assert len(pending) > 2
    assert set(pending) == {0}
    assert served.result() == alone(loaded, Request((9, 10, 11), 30))


def test_checked_and_replayed_steps_give_the_same_tokens(loaded: LoadedModel) -> None:
    """A step that runs once more for the check reads the same tokens again."""
    engine = Engine(loaded, replace(BASE, graphs=True, check_every=1))
    wanted = [Request((9, 10 + n), 12, Sampling(0.7 * n, seed=n)) for n in range(3)]
    assert engine.generate(wanted) == [alone(loaded, request) for request in wanted]
    metrics = engine.report().metrics
    assert metrics.replays > 5
    assert (metrics.samples > 10, metrics.rows_differ, metrics.attention_differs) == (True, 0, 0)


def test_a_gpu_is_kept_busy_and_a_cpu_has_nothing_to_wait_for() -> None:
    assert [EngineOptions().steps_ahead_on(kind) for kind in ("cpu", "cuda")] == [0, 1]
    assert EngineOptions(steps_ahead=0).steps_ahead_on("cuda") == 0
