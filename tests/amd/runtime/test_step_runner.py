"""Replayed steps: bitwise equal to the eager ones, after any earlier steps."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.batch.inputs import DeviceInputs
from rocm_attn.batch.padding import PadTo
from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.errors import BadBatch, BadSetting, BadTensor, CapacityExceeded, GraphStale
from rocm_attn.paging.index_spaces import Space
from rocm_attn.problem import Problem
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.step import Part
from tests.amd.runtime.stepping import padded_to, providers, small_problem
from tests.amd.tolerances import assert_same_but_for_rounding

pytestmark = [pytest.mark.parametrize("provider", providers()), pytest.mark.fast(interpreted=0)]

VOCABULARY = 50


@dataclass
class Model:
    """Two layers of attention over random embeddings; enough for every row of the output to depend on all of its KV."""

    runtime: AttentionRuntime
    embedding: Tensor
    projections: list[Tensor]

    @classmethod
    def build(cls, device: torch.device, provider: str, sizes: list[int], tokens: tuple[int, ...] = (1,)) -> Model:
        problem = small_problem()
        runtime = build_runtime(
            [problem, problem],
            RuntimeOptions(
                num_pages=200,
                max_num_seqs=8,
                max_kv_len=128,
                provider=provider,
                capture_sizes=sizes,
                capture_tokens=tokens,
            ),
            device=device,
        )
        for layer in range(2):
            runtime.pool.layer(layer).k[1:] = float("nan")
            runtime.pool.layer(layer).v[1:] = float("nan")
        generator = torch.Generator().manual_seed(3)
        weights = [torch.randn(96, 64, generator=generator).to(device) / 10 for _ in range(2)]
        return cls(runtime, torch.randn(VOCABULARY, 96, generator=generator).to(device), weights)

    def forward(self, step: Part) -> Tensor:
        hidden = self.embedding[step.token_ids] * (1 + step.positions[:, None] / 100)
        for layer, weight in enumerate(self.projections):
            kv = (hidden @ weight).view(-1, 4, 16)
            out = torch.empty_like(hidden).view(-1, 6, 16)
            step.layers.store_and_attend(layer, hidden.view(-1, 6, 16), kv[:, :2], kv[:, 2:], out)
            hidden = hidden + out.flatten(1)
        return hidden[step.last_token_of_seq]


def serve(model: Model, runner: StepRunner, counts: list[int], pad_to: int | None = None) -> list[Tensor]:
    """Decode steps of the given sequence counts: requests come and go between them. Same ids for every runner."""
    table = model.runtime.table
    random = np.random.default_rng(1)
    rows: list[int] = []
    kv_len: dict[int, int] = {}
    outs = []
    for count in counts:
        while len(rows) > count:
            table.free(rows.pop(0))
        while len(rows) < count:
            row = table.admit()
            rows.append(row)
            prompt = int(random.integers(2, 12))
            table.reserve(row, prompt)
            kv_len[row] = prompt
            ids = random.integers(1, VOCABULARY, prompt, dtype=np.int32)
            outs.append(
                runner.run(
                    StepBatch(np.array([row]), np.array([prompt]), np.array([prompt]), ids), padded_to(pad_to)
                ).clone()
            )
        for row in rows:
            kv_len[row] += 1
            table.reserve(row, kv_len[row])
        lengths = np.array([kv_len[row] for row in rows], np.int32)
        ids = random.integers(1, VOCABULARY, count, dtype=np.int32)
        batch = StepBatch(np.array(rows, np.int32), lengths, np.ones(count, np.int32), ids)
        outs.append(runner.run(batch, padded_to(pad_to)).clone())
    for row in rows:
        table.free(row)
    return outs


COUNTS = [3, 5, 1, 8, 2, 7, 4, 4, 6, 1]


def test_replay_equals_eager_bitwise_while_requests_come_and_go(provider: str, device: torch.device) -> None:
    outs = []
    for graphs in (False, True):
        model = Model.build(device, provider, [1, 2, 4, 8])
        runner = StepRunner(model.runtime, model.forward, recorder_for(model.runtime.device) if graphs else None)
        outs.append(serve(model, runner, COUNTS))
        assert all(torch.isfinite(out).all() for out in outs[-1])
        assert runner.counters.replays == (len(COUNTS) if graphs else 0)
        runner.check_addresses()
    for eager, replayed in zip(*outs, strict=True):
        assert torch.equal(eager, replayed)


def test_padding_to_a_larger_bucket_than_the_pool_changes_no_real_row(provider: str, device: torch.device) -> None:
    outs = []
    for pad_to in (None, 16):
        model = Model.build(device, provider, [1, 2, 4, 8, 16])
        runner = StepRunner(model.runtime, model.forward, recorder_for(model.runtime.device))
        outs.append(serve(model, runner, COUNTS, pad_to))
    for tight, padded in zip(*outs, strict=True):
        assert_same_but_for_rounding(tight, padded)


def test_extend_and_mixed_steps_replay_at_padded_token_counts(provider: str, device: torch.device) -> None:
    """Verify steps (three tokens each), chunks of prompts, and chunks among decodes; above 16 tokens eagerly."""
    steps = [[3, 3], [3, 3], [5, 1], [1, 9], [4, 4], [1, 1], [12, 8], [2, 7], [3, 3]]
    outs = []
    for graphs in (False, True):
        model = Model.build(device, provider, [2, 4], tokens=(8, 16))
        runner = StepRunner(model.runtime, model.forward, recorder_for(model.runtime.device) if graphs else None)
        rows = np.array([model.runtime.table.admit() for _ in range(2)], np.int32)
        random, kv_len, out = np.random.default_rng(5), np.zeros(2, np.int32), []
        for q_len in steps:
            kv_len = kv_len + np.array(q_len, np.int32)
            model.runtime.table.reserve_all(rows, kv_len)
            ids = random.integers(1, VOCABULARY, sum(q_len), dtype=np.int32)
            out.append(runner.run(StepBatch(rows, kv_len, np.array(q_len), ids)).clone())
        outs.append(out)
        assert runner.counters.replays == (8 if graphs else 0)
    for eager, replayed in zip(*outs, strict=True):
        assert torch.isfinite(eager).all()
        assert torch.equal(eager, replayed)


def test_steps_above_the_largest_graph_run_eagerly(provider: str, device: torch.device) -> None:
    model = Model.build(device, provider, [2])
    runner = StepRunner(model.runtime, model.forward, recorder_for(model.runtime.device))
    outs = serve(model, runner, [2, 8, 1, 7, 2])
    assert runner.counters.replays == 3
    reference = Model.build(device, provider, [2])
    eager = serve(reference, StepRunner(reference.runtime, reference.forward, None), [2, 8, 1, 7, 2])
    for mine, other in zip(outs, eager, strict=True):
        assert torch.equal(mine, other)


def test_a_graph_recomputes_whatever_was_left_in_its_buffers(provider: str, device: torch.device) -> None:
    """Poison: everything that graphs own, except the table and the pages, is garbage before each replay.

    And except the counts, in which the next step finds how the last one went.
    """
    outs = []
    for poison in (False, True):
        model = Model.build(device, provider, [4, 8])
        runner = StepRunner(model.runtime, model.forward, recorder_for(model.runtime.device))
        plain_run = runner.run
        if poison:

            def poisoned_run(
                batch: StepBatch, pad_to: PadTo | None = None, model: Model = model, run: object = plain_run
            ) -> Tensor:
                for name, tensor in model.runtime.seals.tensors().items():
                    if name not in ("table", "counts") and "pages" not in name:
                        tensor.fill_(float("nan") if tensor.is_floating_point() else 0x7F7F7F7F)
                return run(batch, pad_to)  # type: ignore[operator, no-any-return]

            runner.run = poisoned_run  # type: ignore[assignment, method-assign]
        outs.append(serve(model, runner, COUNTS))
        assert runner.counters.replays == len(COUNTS)
    for clean, poisoned in zip(*outs, strict=True):
        assert torch.equal(clean, poisoned)


def test_all_sizes_can_be_captured_before_the_first_request(provider: str, device: torch.device) -> None:
    model = Model.build(device, provider, [1, 4, 8])
    runner = StepRunner(model.runtime, model.forward, recorder_for(model.runtime.device))
    runner.capture_all()
    assert runner.counters.captures == 3
    serve(model, runner, COUNTS)
    assert runner.counters.captures == 3
    for layer in range(2):
        assert not model.runtime.pool.layer(layer).k[0].any()


def test_a_forward_that_cannot_be_captured_is_served_eagerly_with_the_reason(
    provider: str, device: torch.device
) -> None:
    model = Model.build(device, provider, [4, 8])

    def forward(step: Part) -> Tensor:
        rows = model.forward(step)
        return rows + float(rows.sum().item()) * 0

    runner = StepRunner(model.runtime, forward, recorder_for(model.runtime.device))
    outs = serve(model, runner, [3, 2])
    assert "test_step_runner.py" in runner.counters.graphs_off
    assert runner.counters.replays == 0
    reference = Model.build(device, provider, [4, 8])
    for mine, other in zip(
        outs, serve(reference, StepRunner(reference.runtime, reference.forward, None), [3, 2]), strict=True
    ):
        assert torch.equal(mine, other)


def test_an_exception_in_forward_leaves_the_runtime_ready(provider: str, device: torch.device) -> None:
    model = Model.build(device, provider, [4, 8])
    healthy = True

    def forward(step: Part) -> Tensor:
        if not healthy:
            raise ZeroDivisionError
        return model.forward(step)

    runner = StepRunner(model.runtime, forward, None)
    serve(model, runner, [2])
    healthy = False
    with pytest.raises(ZeroDivisionError):
        serve(model, runner, [2])
    healthy = True
    serve(model, runner, [2])


def test_a_forward_with_the_wrong_number_of_rows_is_refused(provider: str, device: torch.device) -> None:
    model = Model.build(device, provider, [4, 8])
    runner = StepRunner(model.runtime, lambda step: model.forward(step)[:1], None)
    with pytest.raises(BadTensor, match="1 rows for 4 padded sequences"):
        serve(model, runner, [2])


@pytest.mark.parametrize("eagerly", [False, True])
def test_forgotten_token_ids_are_refused_and_never_run_as_zeros(
    provider: str, device: torch.device, eagerly: bool
) -> None:
    model = Model.build(device, provider, [4, 8])
    runner = StepRunner(model.runtime, model.forward, None)
    run = runner.run_eagerly if eagerly else runner.run
    row = model.runtime.table.admit()
    model.runtime.table.reserve(row, 3)
    with pytest.raises(BadBatch, match="3 new tokens and no token ids; pass token_ids, or NO_TOKEN_IDS"):
        run(StepBatch([row], [3], [3]))
    on_device = DeviceInputs(token_ids=torch.tensor([5, 7, 9], dtype=torch.int32, device=device))
    from_device = run(StepBatch([row], [3], [3], inputs=on_device)).clone()
    assert torch.equal(from_device, run(StepBatch([row], [3], [3], [5, 7, 9])))
    assert run(StepBatch([row], [3], [3], NO_TOKEN_IDS)).isfinite().all()
    assert len(run(StepBatch([], [], []))) == 0


def test_growing_past_the_sealed_size_is_refused_before_anything_moves(provider: str, device: torch.device) -> None:
    model = Model.build(device, provider, [2])
    runner = StepRunner(model.runtime, model.forward, recorder_for(model.runtime.device))
    serve(model, runner, [2])
    addresses = {name: tensor.data_ptr() for name, tensor in model.runtime.seals.tensors().items()}
    with pytest.raises(CapacityExceeded, match="capture_sizes"):
        model.runtime.core.memory._sealed.ensure(model.runtime.padding.shape(_batch_of(64)))
    assert addresses == {name: tensor.data_ptr() for name, tensor in model.runtime.seals.tensors().items()}


def test_reopening_grows_what_was_sealed_and_goes_on_with_the_same_requests(
    provider: str, device: torch.device
) -> None:
    outs = []
    for sizes in ([1, 2, 4, 8], [2]):
        model = Model.build(device, provider, sizes)
        runner = StepRunner(model.runtime, model.forward, recorder_for(model.runtime.device))
        out = serve(model, runner, [2, 2], 2)  # bits are equal at equal padded shapes
        row = model.runtime.table.admit()
        model.runtime.table.reserve(row, 6)
        prompt = StepBatch(np.array([row]), np.array([5]), np.array([5]), np.arange(1, 6, dtype=np.int32))
        next_token = StepBatch(np.array([row]), np.array([6]), np.array([1]), np.array([7]))
        out.append(runner.run(prompt, PadTo(2)).clone())
        if sizes == [2]:
            old = weakref.ref(model.runtime.seals.tensors()["kv_len"])
            runner.reopen([1, 2, 4, 8])
            assert old() is None, "the old buffers are still held"
        out.append(runner.run(next_token, PadTo(2)).clone())
        model.runtime.table.free(row)
        out += serve(model, runner, [8, 3, 1])
        assert runner.counters.replays == 6
        outs.append(out)
    for mine, other in zip(*outs, strict=True):
        assert torch.equal(mine, other)


def test_reopening_with_sizes_that_make_no_ladder_changes_nothing(provider: str, device: torch.device) -> None:
    model = Model.build(device, provider, [2])
    runner = StepRunner(model.runtime, model.forward, recorder_for(model.runtime.device))
    serve(model, runner, [2])
    with pytest.raises(BadSetting, match="capture_sizes"):
        runner.reopen([4, 2])
    serve(model, runner, [2, 1])
    runner.check_addresses()


def test_a_buffer_that_moved_after_our_back_is_found(provider: str, device: torch.device) -> None:
    model = Model.build(device, provider, [2])
    runner = StepRunner(model.runtime, model.forward, recorder_for(model.runtime.device))
    runner.check_addresses()
    table = model.runtime.table.space(Space.FULL)
    table.entries = table.entries.clone()
    with pytest.raises(GraphStale, match="table"):
        runner.check_addresses()


def test_layers_may_repeat_a_problem(provider: str, device: torch.device) -> None:
    model = Model.build(device, provider, [2])
    assert len(model.runtime.selections) == 1
    assert isinstance(model.runtime.selections[0].problem, Problem)


def _batch_of(count: int) -> StepBatch:
    ones = np.ones(count, np.int32)
    return StepBatch(ones, ones, ones, NO_TOKEN_IDS)
