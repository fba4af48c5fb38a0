"""Sampled verification: right steps pass, wrong graphs and wrong layers are counted, and results do not change."""

import inspect
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.batch.inputs import DeviceInputs
from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch
from rocm_attn.capture.check import NO_CHECK
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.errors import BadSetting, DeviceFault, WrongState
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.protocols import LayerCalls
from rocm_attn.step.step import Part
from rocm_attn.watch.sampled_check import LayerTap, SampledCheck
from tests.amd.graphs.small_models import SERVED, Requests, Tiny, counts_on_the_host, serve
from tests.amd.worlds.problems import small_problem


class OffByALittle(LayerTap):
    """Layers with wrong attention in one of them."""

    def __init__(self, wrong_layer: int) -> None:
        super().__init__()
        self._wrong_layer = wrong_layer

    def attend(self, layer: int, q: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        super().attend(layer, q, out, lse)
        if layer == self._wrong_layer:
            out += 0.01


def checked(tiny: Tiny, runner: StepRunner | None = None, every: int = 1) -> SampledCheck:
    """Returns a check of a runner, or of one that runs every step eagerly; it taps the model's layers."""
    tap, around = LayerTap(), tiny.around
    tiny.around = lambda layers: tap.around(around(layers))
    return SampledCheck(runner or tiny.runner(graphs=False), tiny.runtime, tiny.problems, tap, every=every)


def compared(check: SampledCheck) -> tuple[int, int, int, int, str]:
    """Returns the number of checked steps, the counts of their faults by kind, and the last finding."""
    got = check.counters
    return got.samples, got.rows_differ, got.attention_differs, got.reserved_written, got.finding


def test_a_request_with_nan_is_no_layer_that_went_wrong(device: torch.device) -> None:
    tiny = Tiny.build(device, "torch")
    check, requests = checked(tiny), tiny.admitted(2)
    requests.run(check, [4, 3])
    batch = requests.batch([1, 1])
    tiny.embedding[batch.token_ids[0]] = float("nan")
    out = check.run(batch)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()
    assert compared(check) == (2, 0, 0, 0, "")


def test_a_forward_that_leaves_the_tap_out_is_refused(device: torch.device) -> None:
    """Steps counted as samples, and no attention was compared."""
    tiny = Tiny.build(device, "torch")
    check = SampledCheck(tiny.runner(graphs=False), tiny.runtime, tiny.problems, LayerTap(), every=2)
    requests = tiny.admitted(1)
    requests.run(check, [4])
    with pytest.raises(WrongState, match=r"leaves the tap out; let it call the layers of tap\.around\(part\.layers\)"):
        requests.run(check, [1])


def test_one_step_in_so_many_is_looked_at(provider: str, device: torch.device) -> None:
    tiny = Tiny.build(device, provider)
    check = checked(tiny, every=3)
    serve(check, tiny.runtime)
    assert check.counters.samples == len(SERVED) // 3


def test_a_graph_that_went_wrong_is_counted(provider: str, device: torch.device) -> None:
    tiny = Tiny.build(device, provider, [4])
    forward = counts_on_the_host(tiny)
    check = checked(tiny, StepRunner(tiny.runtime, forward, recorder_for(tiny.runtime.device), check=NO_CHECK))
    serve(check, tiny.runtime)
    counters = check.counters
    # Recorded for three sequences: wrong for the two steps of two and the step of one.
    assert (counters.samples, counters.rows_differ, counters.attention_differs) == (len(SERVED), 3, 0)
    assert "rows [0, 1] of a step of 2 sequences" in counters.finding
    assert counters.finding.word == "rows"


@pytest.mark.parametrize("wrong_layer", [0, 1])
def test_a_layer_that_went_wrong_is_counted(wrong_layer: int, provider: str, device: torch.device) -> None:
    tiny = Tiny.build(device, provider, layers=2)
    tiny.around = OffByALittle(wrong_layer).around
    check = checked(tiny)
    serve(check, tiny.runtime)
    counters = check.counters
    # One of two layers is checked in each step.
    assert 0 < counters.attention_differs < len(SERVED)
    assert counters.rows_differ == 0
    assert f"layer {wrong_layer} of sequences" in counters.finding
    assert counters.finding.word == "attention"


@pytest.mark.parametrize(("scale_value", "differs"), [(1.0, False), (1.1, True)])
def test_rounding_of_large_scores_is_no_fault(
    scale_value: float, differs: bool, provider: str, device: torch.device
) -> None:
    """With a scale of 1, as in Gemma, scores are large; a wrong scale is still found."""
    problem = replace(small_problem(head_dim=256, v_head_dim=64), scale=1.0)
    runtime = build_runtime(
        [problem], RuntimeOptions(num_pages=64, max_num_seqs=2, max_kv_len=200, provider=provider), device=device
    )
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(200, *dims, generator=generator).to(device) for dims in ((6, 256), (2, 256), (2, 64)))
    tap = LayerTap()

    def forward(step: Part) -> Tensor:
        at = step.positions
        out = torch.empty(len(at), 6, 64, device=device)
        tap.around(step.layers).store_and_attend(0, 4 * q[at], k[at], v[at], out)
        return out[step.last_token_of_seq]

    runner = StepRunner(runtime, forward, None)
    check = SampledCheck(runner, runtime, [replace(problem, scale=scale_value)], tap, every=1)
    row = runtime.table.admit()
    runtime.table.reserve(row, 200)
    for length in range(150, 200, 10):
        tokens = 150 if length == 150 else 10
        check.run(StepBatch(np.array([row]), np.array([length]), np.array([tokens]), NO_TOKEN_IDS))
    assert (check.counters.attention_differs > 0) == differs, check.counters.finding


@pytest.mark.fast
@pytest.mark.parametrize("reserved", ["page 0 of layer 1", "row 0 of the request table"])
def test_a_write_to_what_is_reserved_is_counted(
    reserved: str, graphs: bool, provider: str, device: torch.device
) -> None:
    """The first step has the sound state; then forward writes to reserved places."""
    tiny = Tiny.build(device, provider, layers=2)
    table, pages = tiny.runtime.table.full.entries, tiny.runtime.pool.layer(1)
    requests, writes = Requests(tiny.runtime), torch.zeros((), dtype=torch.int32, device=tiny.runtime.device)

    def forward(step: Part) -> Tensor:
        out = tiny.forward(step)
        if reserved.startswith("page"):
            pages.v[0, 1, 0, 3] += writes  # not in the page's last token
        else:
            table[0, -1] += writes
        return out

    recorder = recorder_for(tiny.runtime.device) if graphs else None
    check = checked(tiny, StepRunner(tiny.runtime, forward, recorder, check=NO_CHECK))
    requests.admit(2)
    requests.run(check, [3, 2])
    requests.run(check, [1, 1])
    assert check.counters.reserved_written == 0
    writes.fill_(1)
    for _ in range(4):
        requests.run(check, [1, 1])
    counters = check.counters
    # Each step checks the table and one of two layers.
    assert counters.samples == 6
    assert counters.reserved_written == 4 if reserved.startswith("row") else 0 < counters.reserved_written <= 4
    if not counters.rows_differ and not counters.attention_differs:
        assert counters.finding == f"{reserved} must stay zero and was written"
        assert counters.finding.word == "reserved"
    with pytest.raises(DeviceFault, match=f"{reserved} must stay zero and was written; padded sequences read it"):
        tiny.runtime.check_device()


def test_a_step_with_inputs_on_the_device_is_looked_at_but_not_run_again(provider: str, device: torch.device) -> None:
    """Its forward advances the lengths, as an overlapped scheduler does: a second run would be another step."""
    tiny = Tiny.build(device, provider)
    kv_len = torch.tensor([4], dtype=torch.int32, device=tiny.runtime.device)

    def forward(step: Part) -> Tensor:
        out = tiny.forward(step)
        kv_len.add_(1)
        return out

    check = checked(tiny, StepRunner(tiny.runtime, forward, None))
    requests = tiny.admitted(1)
    requests.run(check, [3])
    for step in range(3):
        batch = requests.batch([1])
        kv_len.fill_(4 + step)
        check.run(replace(batch, inputs=DeviceInputs(kv_len=kv_len)))
        assert kv_len.item() == 5 + step
    assert compared(check) == (4, 0, 0, 0, "")


@pytest.mark.parametrize("every", [0, -1, 1.5, None])
def test_a_number_of_steps_that_never_comes_is_refused(every: Any, device: torch.device) -> None:
    """With 1.5 no step was ever checked."""
    with pytest.raises(BadSetting, match=f"every is {every}; it must be"):
        checked(Tiny.build(device, "torch"), every=every)


@pytest.mark.parametrize("name", sorted(LayerCalls.__abstractmethods__))
def test_a_call_reaches_the_wrapped_layers_with_all_that_it_was_given(name: str) -> None:
    layers, given = Mock(spec=LayerCalls), inspect.signature(getattr(LayerTap, name)).parameters
    by_place = [object() for parameter in given.values() if parameter.kind != parameter.KEYWORD_ONLY][1:]
    by_name = {each: object() for each, parameter in given.items() if parameter.kind == parameter.KEYWORD_ONLY}
    getattr(LayerTap().around(layers), name)(*by_place, **by_name)
    getattr(layers, name).assert_called_once_with(*by_place, **by_name)
