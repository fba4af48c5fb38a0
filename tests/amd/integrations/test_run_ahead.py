"""Kernels are run before an engine's first step, over its own pages, and write to none of them."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rocm_attn.capture import engine_kernels
from rocm_attn.capture.engine_kernels import StepsAhead, log_run_ahead, run_ahead
from rocm_attn.errors import DeviceFault
from rocm_attn.external import Bounds, ExternalAttention
from rocm_attn.integrations.sglang.hooks import AttentionHooks
from rocm_attn.integrations.sglang.steps import as_sglang_makes_it
from rocm_attn.integrations.vllm.latent_probe import LatentProbe
from rocm_attn.machine.target import known_target
from tests.amd.integrations import vllm_runner
from tests.amd.integrations.sglang_stand_in import Engine, Mode
from tests.amd.integrations.test_sglang_truth import sparse_engine
from tests.amd.integrations.test_vllm_latent import Rank
from tests.amd.integrations.vllm_runner import Runner

# Pages without a request are NaN here, and the interpreter's NumPy says so of the sums over them.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning"),
]

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of few sizes are enough here, and the interpreter takes seconds for each large one."""
    monkeypatch.setattr(engine_kernels, "MOST_TOKENS", 12)
    monkeypatch.setattr(engine_kernels, "_num_seqs", lambda most: [1, 3, most])


def bits(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.contiguous().view(torch.uint8).clone() for tensor in tensors]


class Ahead:
    """Runs steps ahead, and checks that the bits of an engine's pages stay. done: the number of steps"""

    def __init__(self) -> None:
        self.pages: list[Tensor] = []
        self.done = 0

    def __call__(self, attention: ExternalAttention, ahead: StepsAhead) -> None:
        before = bits(self.pages)
        self.done += run_ahead(attention, ahead)
        assert all(map(torch.equal, before, bits(self.pages)))


def test_steps_run_ahead_over_blocks_that_vllm_makes_in_inference_mode() -> None:
    """So vLLM makes those over which it measures its graphs."""
    ahead = Ahead()
    with torch.inference_mode():
        runner = Runner(device=CPU, provider="torch", ran_ahead=ahead)
        runner.admit()
        runner.step([9])
    assert ahead.done > 8


@pytest.mark.parametrize(
    "kind",
    [{}, {"windows": (-1, 5), "with_window_pool": True}, {"is_latent": True}, {"with_trees": True, "draft_tokens": 4}],
    ids=["plain", "pools", "latent", "trees"],
)
def test_sglangs_pool_stays_and_its_steps_are_right_afterwards(
    kind: dict[str, Any], provider: str, device: torch.device
) -> None:
    ahead = Ahead()
    engine = Engine(provider, device, serve=False, **kind)
    layers = range(len(engine.layers))
    ahead.pages = [engine.pool.get_key_buffer(layer) for layer in layers]
    engine.hooks = AttentionHooks(engine.runner, replace(engine.serving, ran_ahead=ahead))
    one, two = engine.admit(), engine.admit()
    engine.run(Mode.EXTEND, [one, two], [7, 3])
    engine.run(Mode.DECODE, [one, two], [1, 1])
    assert ahead.done > 8


def test_no_step_runs_ahead_over_the_null_block_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM measures its graphs over one block if it serves one sequence at a time. A step there would be a fault."""
    monkeypatch.setattr(vllm_runner, "NUM_BLOCKS", 1)
    ahead = Ahead()
    runner = Runner(device=CPU, provider="torch", ran_ahead=ahead)
    runner.capture(1, 1, 1)
    runner.groups[0].attention.check_device()
    assert ahead.done == 0


def test_layers_with_an_indexer_choose_in_the_steps_that_are_run_ahead() -> None:
    ahead, engine = Ahead(), sparse_engine()
    AttentionHooks(engine.runner, replace(engine.serving, ran_ahead=ahead))
    assert ahead.done > 8


def test_vllm_stores_and_chooses_for_its_latent_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[StepsAhead] = []
    monkeypatch.setattr("rocm_attn.integrations.vllm.latent_probe.log_run_ahead", lambda *args: given.append(args[2]))
    ahead = Ahead()
    rank = Rank(0, 1, CPU, "torch", 12, ran_ahead=LatentProbe([], logging.getLogger("test"), most_new=3).ahead)
    rank.group.begin(rank.common(1, 1))
    (steps,) = given
    assert (steps.stores, steps.most_new) == (False, 3)
    ahead.pages = [rank.layer.kv_cache]
    ahead(rank.group.attention, steps)
    assert ahead.done > 3


def logged(attention: Any, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> list[str]:
    """The lines that log_run_ahead writes on a GPU. error: raised by the steps"""
    lines: list[str] = []
    log = logging.Logger("ahead")
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: lines.append(f"{record.levelname}: {record.getMessage()}"))
    log.addHandler(handler)

    def steps(attention: ExternalAttention, ahead: StepsAhead) -> int:
        if error is not None:
            raise error
        return 7

    monkeypatch.setattr(engine_kernels, "run_ahead", steps)
    log_run_ahead(log, attention, None)  # type: ignore[arg-type]
    return lines


def test_no_step_is_larger_than_the_engines_largest() -> None:
    for bounds in (
        Bounds(num_seqs=16, num_tokens=16, kv_len=64, num_pages=9),
        Bounds(num_seqs=5, kv_len=9, num_pages=9),
    ):
        for shape, q_len in engine_kernels._steps(bounds, 8192):
            assert max(shape.num_tokens, sum(q_len)) <= min(bounds.num_tokens, 16)
            assert len(q_len) <= shape.num_seqs <= bounds.num_seqs
            assert max(q_len) <= bounds.kv_len


class OnGpu:
    def __init__(self, arch: str) -> None:
        self._arch = arch

    def kernels(self) -> Any:
        return type("Kinds", (), {"selections": [type("Selection", (), {"target": known_target(self._arch)})]})


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (None, "INFO: ran 7 steps ahead: 0 kernels compiled"),
        (torch.OutOfMemoryError("no room"), "WARNING: the kernels of later steps were not run ahead: no room"),
        (DeviceFault("a fault"), "ERROR: running the kernels of later steps ahead met a fault of the device: a fault"),
    ],
    ids=["done", "no memory", "a fault"],
)
def test_one_line_says_what_was_run(error: Exception | None, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (written,) = logged(OnGpu("gfx942"), monkeypatch, error)
    assert written.startswith(line)


def test_nothing_is_run_ahead_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert logged(OnGpu("cpu"), monkeypatch) == []


def test_a_step_without_a_request_has_the_form_of_the_engines_own(device: torch.device) -> None:
    """One form of lengths, rows and boundaries is one variant of the kernels that read them."""
    engine = Engine("torch", device)
    hooks = engine.hooks
    requests = [engine.admit(), engine.admit()]
    extend = hooks._steps.eager(engine.batch(Mode.EXTEND, requests, [5, 1]))
    decode = hooks._steps.eager(engine.batch(Mode.DECODE, requests, [1, 1]))
    for own, q_len in ((decode, [1, 1]), (extend, [5, 1])):
        step = as_sglang_makes_it(engine_kernels._new_step(q_len, 2, device))
        assert own is not None
        assert (own.shape, own.lengths.q_form) == (step.shape, step.lengths.q_form)
        for name in ("kv_len", "rows"):
            assert getattr(own, name).dtype == getattr(step, name).dtype
