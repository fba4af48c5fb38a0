"""python -m tests.amd.random_calls.guard_table --results FILE [--seeds N] [--steps N] [--device cuda] [--write] ...

Shows the safeguards that the random tester and the soak need. Each is switched off alone, and they run until one finds
a fault. A row goes to FILE as soon as it is known, and a later call with this file runs the other safeguards. With
--write the table goes to docs/guards.md, between the markers of the kind of device. With --guard ID, which may be
repeated, only these are run, and only their rows are written.
"""

import argparse
import datetime
import json
import logging
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import torch

from rocm_attn.guards.registry import GUARDS, Guards
from rocm_lab.bench.machine import commit
from rocm_lab.page_parts import rows_of, with_part, with_rows
from rocm_lab.soak.scenario import LONG_KV_LEN, Scenario
from rocm_lab.soak.soak import Soak, SoakFailed
from tests.amd.random_calls.__main__ import prepare
from tests.amd.random_calls.pairs import is_found

PAGE = Path(__file__).parents[3] / "docs" / "guards.md"
PART = "without a safeguard on {}"  # of the page, for a kind of device
# Safeguard -> the soak in which there is something for it to do.
SOAKS = {
    "cut_points": Scenario.of_seed(0, LONG_KV_LEN).in_order(),
    "state_lineage": Scenario.of_seed(0).with_states(),
    "mask_room": Scenario.of_seed(0).speculative(),
}
_T = TypeVar("_T")

_SELECTS = "no layer of these runs selects keys: tests/amd/guards/test_selections.py"
_STAYS = "no page of these runs moves to host memory: tests/amd/guards/test_host_pages.py"
# Why no run needs a safeguard: what would meet it is not there, on any machine or on a kind of device.
UNSEEN = {
    **dict.fromkeys(("fresh_selection", "selection_place"), _SELECTS),
    **dict.fromkeys(("host_bytes", "host_lineage"), _STAYS),
    "row_zero": "no call of the API changes row 0, and the pads of an update have no cell",
    "table_tails": "read by AITER's kernels alone: those of torch and Triton read no entry after the last page",
    "sealed_growth": "refuses what the planner does not ask for: a step above the captured sizes uses other memory",
    "page_format": "no engine of these runs has pages in eight bits: tests/amd/guards/test_formats.py",
    "sealed_capture": "an interrupt between two statements of reopen(): tests/amd/guards/test_reopening.py",
    "graph_epoch": "nothing moves under a graph while the other safeguards of sealed memory are on",
}
UNSEEN_ON = {
    "cpu": {"ring_wait": "on a CPU the device is never late"},
    "cuda": {
        "graph_key": "Triton's kernels freeze no length; those of torch do, on a CPU",
        **dict.fromkeys(("kv_scales", "path_pages", "copy_sources"), "not within this time; on a CPU the tester does"),
        "ring_wait": "every result is compared before the next step, so the device is never that late",
    },
}


@dataclass(frozen=True, slots=True)
class Row:
    """The findings with a safeguard off.

    by_driver: the seed at which the tester found it; None: not
    by_soak:   the step of a soak at which it was found; None: at none
    """

    guard: str
    by_driver: int | None
    by_soak: int | None

    def line(self, device_type: str) -> str:
        """A row of the table of a kind of device."""
        tester = "-" if self.by_driver is None else f"seed {self.by_driver}"
        soak = "-" if self.by_soak is None else f"step {self.by_soak:,}"
        reasons = {**UNSEEN, **UNSEEN_ON[device_type]}
        why = reasons.get(self.guard, "") if self.by_driver is None and self.by_soak is None else ""
        return f"| `{self.guard}` | {tester} | {soak} | {why} |"


def found_by_drivers(guard: str, seeds: int, seconds: float, device: torch.device) -> int | None:
    """The first seed that has a finding without the safeguard, and none with it.

    seconds: no seed is begun after so many
    """
    guards, started = Guards().without(guard), time.monotonic()
    for seed in range(seeds):
        if time.monotonic() - started > seconds:
            break
        if is_found(seed, device, guards) and not alone(_finds, seed, device):
            return seed
    return None


def _finds(seed: int, device: torch.device) -> bool:
    """True if the tester has findings with all safeguards on."""
    prepare(device)
    return is_found(seed, device, Guards())


def alone(function: Callable[..., _T], *arguments: object) -> _T:
    """Calls a function in a process of its own: a fault without a safeguard may end the GPU context of its process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def found_by_soak(guard: str, steps: int, device: torch.device) -> int | None:
    """The step at which a soak finds something without the safeguard."""
    scenario = SOAKS.get(guard, Scenario.of_seed(0))
    guards, dtype = Guards().without(guard), torch.float32 if device.type == "cpu" else torch.bfloat16
    soak = Soak(scenario, seed=0, device=device, provider="auto", dtype=dtype, guards=guards)
    try:
        soak.run(steps)
    except SoakFailed as failed:
        return failed.finding.step
    return None


def found_without(guard: str, *, seeds: int, seconds: float, steps: int, device: torch.device) -> Row:
    """The tester and the soak without a safeguard."""
    logging.getLogger("rocm_attn").setLevel(logging.ERROR)
    prepare(device)
    return Row(guard, found_by_drivers(guard, seeds, seconds, device), found_by_soak(guard, steps, device))


def page_with(text: str, rows: list[Row], where: str, device_type: str) -> str:
    """The page with the table between the markers of a kind of device."""
    table = [
        where,
        "",
        "| without | found by the random tester | found by the soak | why by neither |",
        "|---|---|---|---|",
        *(row.line(device_type) for row in rows),
    ]
    return with_part(text, PART.format(device_type), "\n".join(table) + "\n")


def page_with_rows(text: str, rows: list[Row], device_type: str) -> str:
    """The page with these rows in place of theirs in the table of a kind of device."""
    part = PART.format(device_type)
    table = {line.split("`")[1]: line for line in rows_of(text, part)}
    if missing := {row.guard for row in rows} - table.keys():
        raise ValueError(f"{PAGE.name} has no row of {', '.join(sorted(missing))} in its part {part!r}")
    return with_rows(text, part, (table | {row.guard: row.line(device_type) + "\n" for row in rows}).values())


def main() -> int:
    """Run both with each safeguard off."""
    parser = argparse.ArgumentParser(prog="python -m tests.amd.random_calls.guard_table")
    parser.add_argument("--seeds", type=int, default=200, help="at most")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for a safeguard's seeds, at most")
    parser.add_argument("--steps", type=int, default=1600, help="of the soak, at most")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--results", type=Path, required=True, metavar="FILE", help="rows that are known, as JSON lines"
    )
    parser.add_argument("--write", action="store_true", help="put the table into docs/guards.md")
    parser.add_argument("--processes", type=int, default=1, help="safeguards at a time")
    every = [guard.id for guard in GUARDS]
    parser.add_argument("--guard", action="append", choices=every, metavar="ID", help="not given: all of them")
    options = parser.parse_args()
    device = torch.device(options.device)
    today = datetime.datetime.now(datetime.timezone.utc).date()
    machine = "a CPU" if device.type == "cpu" else f"an {torch.cuda.get_device_name(device)}"
    where = (
        f"At commit {commit()}, {today:%d %B %Y}, on {machine}: up to {options.seeds} seeds of the tester "
        f"(`python -m tests.amd.random_calls`) in at most {options.seconds:.0f} s, and up to {options.steps:,} steps "
        "of `rocm-attn soak`, each until it found something. With all of them on, none finds anything."
    )
    find = partial(found_without, seeds=options.seeds, seconds=options.seconds, steps=options.steps, device=device)
    options.results.touch()
    rows = {row.guard: row for row in (Row(**json.loads(line)) for line in options.results.read_text().splitlines())}
    missing = [guard for guard in options.guard or every if guard not in rows]
    with ThreadPoolExecutor(options.processes) as pool:
        for done in as_completed(pool.submit(alone, find, guard) for guard in missing):
            row = rows[done.result().guard] = done.result()
            with options.results.open("a") as results:
                results.write(json.dumps(asdict(row)) + "\n")
            print(row.line(device.type), flush=True)
    if options.write and options.guard:
        PAGE.write_text(page_with_rows(PAGE.read_text(), [rows[guard] for guard in options.guard], device.type))
    elif options.write:
        PAGE.write_text(page_with(PAGE.read_text(), [rows[guard] for guard in every], where, device.type))
    return 0


if __name__ == "__main__":
    sys.exit(main())
