"""/health/truth: the verdict on each layer, one run at a time and not too often, and its part in /health."""

import asyncio
import threading
from dataclasses import replace
from typing import Any, cast

import pytest

from rocm_attn.truth.verdict import TruthVerdict
from rocm_serve.async_engine import AsyncEngine
from rocm_serve.cli.ready_engine import _make_ready
from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel
from rocm_serve.server.health import Health
from rocm_serve.server.truth import TruthProbe
from tests.amd.runner.serving import BASE
from tests.amd.runner.tiny_model import NAN_TOKEN, with_nan_token, word_tokenizer
from tests.amd.runner.wide_model import wide_model
from tests.amd.server.raw import Client, post, requested, send
from tests.amd.server.running import running

RIGHT = TruthVerdict({}, {}, "", False, 2, 9)
WRONG = replace(RIGHT, wrong={1: "key 7 was not found"})
UNKNOWN = replace(RIGHT, reason="too few pages are free for 9 tokens; ask again")


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return with_nan_token(wide_model(tokenizer=word_tokenizer()))


def engine(loaded: LoadedModel) -> Engine:
    return Engine(loaded, replace(BASE, chunk=256, max_kv_len=400))


def saying(served: Engine, *verdicts: TruthVerdict, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes an engine's probe return these verdicts in turn, and returns the list of seeds of its runs."""
    seeds: list[int] = []

    def probe(seed: int) -> TruthVerdict:
        seeds.append(seed)
        return verdicts[len(seeds) - 1]

    monkeypatch.setattr(served, "probe_truth", probe)
    return seeds


def test_the_verdict_of_a_server_that_serves_names_each_layer(loaded: LoadedModel) -> None:
    with running(engine(loaded)) as server:
        stream = Client(server, requested(prompt="w9 w12", max_tokens=300, ignore_eos=True, stream=True))
        stream.read_until(b"data: ")
        reply = send(server, "GET", "/health/truth")
        assert reply.status == 200
        verdict: dict[str, Any] = reply.json
        assert (verdict["verdict"], verdict["reason"]) == ("right", "")
        assert verdict["layers"] == [{"layer": layer, "verdict": "right"} for layer in range(2)]
        assert verdict["keys"] > 1000
        stream.leave()
        assert server.holds_nothing()


def test_a_wrong_verdict_is_503_here_and_at_health_until_a_right_one(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = engine(loaded)
    saying(served, WRONG, UNKNOWN, RIGHT, monkeypatch=monkeypatch)
    with running(served, truth_seconds=1e-9) as server:
        reply = send(server, "GET", "/health/truth")
        assert (reply.status, reply.json["verdict"]) == (503, "wrong")
        assert "layer 1: key 7 was not found" in reply.json["reason"]
        for path in ("/health", "/ready"):
            health = send(server, "GET", path)
            assert (health.status, health.json["status"]) == (503, "failing")
            assert "layer 1: key 7 was not found" in health.json["reason"]
        assert post(server, requested()).status == 200  # a request that is answered proves nothing
        assert send(server, "GET", "/health").status == 503
        reply = send(server, "GET", "/health/truth")
        assert (reply.status, reply.json["verdict"]) == (200, "not checked")
        assert send(server, "GET", "/health").status == 503
        assert send(server, "GET", "/health/truth").status == 200
        assert send(server, "GET", "/health").status == 200


def test_a_right_verdict_ends_a_row_of_failures(loaded: LoadedModel) -> None:
    with running(engine(loaded), unhealthy_after=2) as server:
        for _ in range(2):
            assert post(server, requested(prompt=f"w{NAN_TOKEN}")).status == 500
        assert send(server, "GET", "/health").status == 503
        assert send(server, "GET", "/health/truth").json["verdict"] == "right"
        assert send(server, "GET", "/health").status == 200


def test_clients_that_ask_often_cost_one_run(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    served = engine(loaded)
    seeds = saying(served, RIGHT, monkeypatch=monkeypatch)
    with running(served, truth_seconds=3600.0) as server:
        clients = [threading.Thread(target=send, args=(server, "GET", "/health/truth")) for _ in range(20)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        assert seeds == [0]
        assert send(server, "GET", "/health/truth").json["age_seconds"] >= 0


def test_it_runs_by_itself_where_that_is_asked_for(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served = engine(loaded)
    has_run = threading.Event()

    def probe(seed: int) -> TruthVerdict:
        if seed == 0:
            raise RuntimeError("HIP out of memory")
        if seed > 1:
            has_run.set()
        return WRONG

    monkeypatch.setattr(served, "probe_truth", probe)
    with running(served, truth_every=0.01, truth_seconds=1e-9) as server:
        assert has_run.wait(60), "a run that failed was the last one"
        assert send(server, "GET", "/health").status == 503
    assert "the truth probe could not run: HIP out of memory" in caplog.text


def test_a_server_on_a_gpu_says_before_it_listens_that_its_layers_are_wrong(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served = engine(loaded)
    saying(served, WRONG, RIGHT, monkeypatch=monkeypatch)
    _make_ready(served, "cuda")
    assert "1 of 2 layers wrong; layer 1: key 7 was not found" in capsys.readouterr().err
    _make_ready(served, "cuda")
    assert "wrong" not in capsys.readouterr().err


async def test_a_task_that_is_cancelled_does_not_end_the_run_of_the_others() -> None:
    class Front:
        """The part of AsyncEngine that the probe uses; a run ends when the test says so."""

        def __init__(self) -> None:
            self.may_end = asyncio.Event()

        async def truth(self, seed: int) -> TruthVerdict:
            await self.may_end.wait()
            return RIGHT

    front = Front()
    probe = TruthProbe(cast(AsyncEngine, front), Health(5), 3600.0)
    leaving, staying = (asyncio.ensure_future(probe.verdict()) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.sleep(0)
    front.may_end.set()
    assert (await staying)[0] == RIGHT


def test_other_routes_answer_while_it_waits_for_a_step(loaded: LoadedModel) -> None:
    served = engine(loaded)
    begun, may_end, probe = threading.Event(), threading.Event(), served.probe_truth

    def slow(seed: int) -> TruthVerdict:
        begun.set()
        may_end.wait()
        return probe(seed)

    served.probe_truth = slow  # type: ignore[method-assign]
    found: list[Any] = []
    with running(served) as server:
        asking = threading.Thread(target=lambda: found.append(send(server, "GET", "/health/truth")))
        asking.start()
        begun.wait()
        assert send(server, "GET", "/health").status == 200
        may_end.set()
        asking.join()
    assert found[0].json["verdict"] == "right"
