"""Tools that inspect steps work with two spaces of pages: the capture plan, the flight recorder, the sampled check."""

import json
from pathlib import Path

import pytest
import torch

from rocm_attn.cli import DONE, main
from rocm_attn.errors import DeviceFault
from rocm_attn.paging.index_spaces import RESERVED_ROW, Space
from rocm_attn.problem import Problem
from rocm_attn.watch.flight_recorder import FlightRecorder, read_dump
from tests.amd.graphs.small_models import Tiny

WINDOW = 5
# Long enough for pages of four tokens to leave a window of six.
STEPS = [[9, 14, 6], [1, 1, 1], [5, 3], [1, 1, 1], [1, 8, 1], [20, 1, 1], [1, 1], [1, 1, 1]]


def hybrid(device: torch.device, provider: str) -> tuple[Tiny, list[Problem]]:
    tiny = Tiny.build(device, provider, [2, 4], tokens=(8, 16), window_left=WINDOW, swa_pages=60)
    return tiny, list(tiny.problems)


def test_the_plan_counts_the_tables_buffers_and_pools_of_both_spaces(provider: str, device: torch.device) -> None:
    tiny, _ = hybrid(device, provider)
    tiny.runner()
    plan, held = tiny.planned(), tiny.held()
    assert {part.name: part.num_bytes for part in plan.parts} == held
    knobs = {part.name: part.knob for part in plan.parts}
    assert knobs["SWA KV pool"].startswith("swa_pages 60 of ")
    assert held["KV pool"] * 60 == held["SWA KV pool"] * 200


def test_a_step_whose_pages_have_left_the_window_can_be_run_again(
    provider: str, device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny, _ = hybrid(device, provider)
    flight = FlightRecorder(tiny.runtime, tmp_path / "dump.json")
    runner = tiny.runner(flight=flight)
    requests = tiny.admitted(3)
    for q_len in STEPS:
        requests.run(runner, q_len)
    assert not tiny.runtime.table.pages_of(requests.rows[0], Space.SWA)[:4].any()
    path = str(flight.dump("a test"))
    facts = read_dump(Path(path)).runtime.options
    assert (facts.num_pages, facts.swa_pages, facts.swa_kept) == (200, 60, 0)
    for number in (4, 5, 7):  # a chunk among decodes, a long one, and a decode step after both
        assert main(["replay-step", path, "--step", str(number), "--json", "--device", str(device)]) == DONE
        kinds = json.loads(capsys.readouterr().out)["layer_kinds"]
        assert [kind["eager"] for kind in kinds] == ["agrees", "agrees"]
        assert {kind["bitwise"] for kind in kinds} <= {True, None}


def test_a_written_row_0_is_reported_with_its_space(device: torch.device) -> None:
    tiny, _ = hybrid(device, "torch")
    tiny.runtime.check_device()
    tiny.runtime.table.space(Space.SWA).entries[RESERVED_ROW, 1] = 3
    with pytest.raises(DeviceFault, match="row 0 of the request table in the SWA space must stay zero"):
        tiny.runtime.check_device()
