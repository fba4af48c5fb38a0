"""What attention shall reach on one H200, row by row, and what each row is read from: data, and how it is compared.

A row is met where each of its checks is. What is behind a miss is a next idea in words, and launches that
profile_misses.py reads the counters of. Numbers of a row other than its goal come from benchmarks/results alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

from benchmarks.shape_sweep import Timed

RESULTS = Path(__file__).parent / "results"
OWN, DETERMINISTIC, FA3, SDPA = "triton", "triton+deterministic", "fa3", "sdpa"
CUDNN = "cudnn"
GB = 1e9


class Profiled(NamedTuple):
    """A launch that is profiled: a case of `rocm-attn bench kernels`, and one of its providers."""

    case: str
    provider: str


class Results:
    """Result files, each read once."""

    def __init__(self, folder: Path = RESULTS) -> None:
        self._folder = folder
        self._kept: dict[str, Any] = {}

    def of(self, name: str) -> Any:
        """The file of a script."""
        if name not in self._kept:
            self._kept[name] = json.loads((self._folder / f"{name}_h200.json").read_text())
        return self._kept[name]


# Case -> what is compared with the goal.
Values = Callable[[Results], Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Check:
    """Part of a goal.

    what:   the number in words
    most:   that is allowed
    values: of each case; the largest counts
    mean:   their geometric mean counts instead
    """

    what: str
    most: float
    values: Values
    mean: bool = False

    def reached(self, results: Results) -> float:
        """What counts. Raises ValueError where nothing was measured."""
        found = self.values(results).values()
        return geometric_mean(found) if self.mean else max(found)

    def where(self, results: Results) -> str:
        """The case that counts; of a mean, how many there are."""
        found = self.values(results)
        return f"{len(found)} cases" if self.mean else max(found, key=lambda case: found[case])

    def missed(self, results: Results) -> Mapping[str, float]:
        """Cases above the goal; none of a mean that is met."""
        if self.mean and self.reached(results) <= self.most:
            return {}
        return {case: value for case, value in self.values(results).items() if value > self.most}


@dataclass(frozen=True, slots=True)
class Goal:
    """A row.

    work:      the work in words
    sources:   scripts whose result files it is read from
    checks:    all of them must be met
    profiled:  launches whose counters explain a miss
    next_idea: what would be tried next, where it is missed
    """

    work: str
    sources: tuple[str, ...]
    checks: tuple[Check, ...]
    profiled: tuple[Profiled, ...] = ()
    next_idea: str = ""

    def is_met(self, results: Results) -> bool:
        """Whether every check is."""
        return all(check.reached(results) <= check.most for check in self.checks)


def beside(suite: str, peer: str, ours: str = OWN, layer: str = "", but: str = "\n") -> Values:
    """Times of ours by a peer's, of the suite's cases of a layer; not of those with `but` in their name."""

    def values(results: Results) -> Mapping[str, float]:
        rows = [row for row in results.of("kernels")["rows"] if row["suite"] == suite and "us" in row]
        of = {(row["case"], row["provider"]): row["us"] for row in rows}
        return {
            case: us / of[case, peer]
            for (case, provider), us in of.items()
            if provider == ours and (case, peer) in of and case.startswith(layer) and but not in case
        }

    return values


def harness(field: str, *parts: str) -> Values:
    """A field of the harness's rows whose case is one of these, but for the pages' size at its end."""

    def values(results: Results) -> Mapping[str, float]:
        rows = results.of("attention")["rows"]
        return {row["case"]: row[field] for row in rows if row["case"].rpartition("/")[0] in parts}

    return values


def decode_by_floor(least: float, most: float) -> Values:
    """x floor of the harness's decode cases, without windows, that read between so many bytes."""

    def values(results: Results) -> Mapping[str, float]:
        found = results.of("attention")
        rows = [row for row in found["rows"] if row["case"].startswith("dec/")]
        return {row["case"]: row["times_floor"] for row in rows if least <= row["bytes"] <= most}

    return values


def by_peer(peer: str, *parts: str) -> Values:
    """Times of ours by a peer's in the harness, of cases as in harness()."""

    def values(results: Results) -> Mapping[str, float]:
        rows = results.of("attention")["rows"]
        return {
            row["case"]: row["us"] / row["peers"][peer]
            for row in rows
            if row["case"].rpartition("/")[0] in parts and peer in row["peers"]
        }

    return values


def caps(results: Results) -> Mapping[str, float]:
    """Of layers with a soft cap, their times by those of the same without."""
    rows = [row for row in results.of("kernels")["rows"] if row["suite"] == "soft-cap" and row["provider"] == OWN]
    of = {row["case"]: row["us"] for row in rows}
    return {case: us / of[case.replace(", cap 50", "")] for case, us in of.items() if "cap" in case}


def pages_of_8(results: Results) -> Mapping[str, float]:
    """Times with pages of 8 by those with pages of 32."""
    rows = [row for row in results.of("kernels")["rows"] if row["suite"] == "page-sizes" and row["provider"] == OWN]
    of = {row["case"]: row["us"] for row in rows}
    return {case: us / of[case.replace("pages of 8", "pages of 32")] for case, us in of.items() if "pages of 8" in case}


def deterministic(results: Results) -> Mapping[str, float]:
    """Times of the deterministic mode by the normal one's."""
    return {f"{row['suite']}, {row['case']}": row["times"] for row in results.of("deterministic_cost")["rows"]}


def eager_layer(results: Results) -> Mapping[str, float]:
    """Host microseconds of a layer of an eager step."""
    rows = results.of("eager_step")["rows"]
    return {f"{row['num_seqs']} sequences": row["step_us_median"] / row["layers"] for row in rows}


def graphed_step(results: Results) -> Mapping[str, float]:
    """Host microseconds of a graphed step of 256 sequences."""
    rows = results.of("host_time")["rows"]
    return {f"{row['num_seqs']} sequences": row["step_us_median"] for row in rows if row["num_seqs"] == 256}


def random_shapes(results: Results) -> Mapping[str, float]:
    """How many times further from its limit a shape is than its neighbour, or its time by its peer's."""
    names = {field.name for field in fields(Timed)}
    rows = [
        Timed(**{name: value for name, value in row.items() if name in names})
        for row in results.of("random_shapes")["rows"].values()
    ]
    return {row.name: max(row.x_neighbour, row.x_peer if row.peer_us else 0.0) for row in rows}


_LARGE = "64/8 x 192"
_LLAMA, _LLAMA_70B = "ext/llama8b", "ext/llama70b"

GOALS = (
    Goal(
        "few tiles: 777 new tokens over 5,001, and ragged chunks",
        ("kernels",),
        (
            Check("x FA3, mean", 0.9, beside("few-tiles", FA3), mean=True),
            Check("x FA3", 1.05, beside("few-tiles", FA3)),
        ),
    ),
    Goal(
        "head dims 80, 96 and 192, the same",
        ("kernels",),
        (
            Check("x FA3, mean", 1.0, beside("odd-dims", FA3), mean=True),
            Check("x FA3, D 192", 1.15, beside("odd-dims", FA3, layer=_LARGE)),
        ),
    ),
    Goal(
        "verify: 64 sequences, 5 new tokens over 2,500",
        ("kernels",),
        (Check("x FA3, mean", 0.95, beside("verify", FA3), mean=True), Check("x FA3", 1.1, beside("verify", FA3))),
    ),
    Goal(
        "mixed: 31 decodes and 2 chunks of 700",
        ("kernels",),
        (Check("x FA3, mean", 1.0, beside("mixed", FA3), mean=True),),
    ),
    Goal(
        "Llama 8B, 2,048 new over 6,144, and 8 x 512 over 4,096",
        ("attention",),
        (Check("x limit, Gluon", 1.35, harness("times_limit", f"{_LLAMA}/1x2048+6144", f"{_LLAMA}/8x512+4096")),),
    ),
    Goal(
        "Llama 8B and 70B, 2,048 new over 30,720",
        ("attention",),
        (Check("x limit, Gluon", 1.3, harness("times_limit", *(f"{m}/1x2048+30720" for m in (_LLAMA, _LLAMA_70B)))),),
        (Profiled("32/8 x 128: 1x2k+30k", OWN), Profiled("32/8 x 128: 1x2k+30k", FA3)),
        "The clock falls under the power limit while tensor cores are this busy: fewer instructions beside the "
        "products (exponentials in pairs, scaling folded into the query) leave it higher.",
    ),
    Goal(
        "Llama 8B, 2,048 new tokens",
        ("attention",),
        (Check("us", 82.0, harness("us", f"{_LLAMA}/1x2048+0")),),
    ),
    Goal(
        "soft cap in extend, D 128 and D 256, by the same without",
        ("kernels",),
        (Check("x without", 1.05, caps),),
        (Profiled("32/8 x 128, cap 50: 1x2k+6k", OWN), Profiled("32/8 x 128: 1x2k+6k", OWN)),
        "A tanh and a product more for each score: they take issue slots that the exponentials of the other warp "
        "group's scores need. Half of the tanh as a polynomial of two-element operations, as exponentials are already.",
    ),
    Goal(
        "decode, 1 GB and more",
        ("attention",),
        (Check("x floor", 1.06, decode_by_floor(1.0 * GB, 1e15)),),
        (Profiled("32/8 x 128: 256d2k", OWN), Profiled("32/8 x 128: 256d2k", SDPA)),
        "As of decode beside cuDNN: by whole rows without shares and merge 256 x 2k takes 491 us in place of 502, but "
        "128 x 8k gains nothing.",
    ),
    Goal(
        "decode, 60 to 540 MB",
        ("attention",),
        (Check("x floor", 1.12, decode_by_floor(0.06 * GB, 0.54 * GB)),),
        (Profiled("8/1 x 128: 64d4k", OWN), Profiled("8/1 x 128: 64d4k", SDPA)),
        "What is left is the beginning and end of two launches: the first loads wait for the schedule and then for "
        "page numbers, and the merge for the last program. A merge by the program that ends last was built, and gains "
        "nothing; first page numbers in the schedule itself would save one latency.",
    ),
    Goal(
        "decode beside cuDNN: 70B 16 x 4k and 64 x 4k, TP8 256 x 2k",
        ("attention",),
        (Check("x cuDNN", 1.0, by_peer(CUDNN, "dec/llama70b/16x4k", "dec/llama70b/64x4k", "dec/70b_tp8/256x2k")),),
        (
            Profiled("64/8 x 128: 16d4k", OWN),
            Profiled("64/8 x 128: 16d4k", SDPA),
            Profiled("64/8 x 128: 64d4k", OWN),
            Profiled("64/8 x 128: 64d4k", SDPA),
            Profiled("32/8 x 128: 128d8k", OWN),
            Profiled("32/8 x 128: 128d8k", SDPA),
        ),
        "Tried: whole rows, a program for each, by a launch that reads no shares and has no merge (here, today's "
        "kernel and cuDNN, us). 16 x 4k with one program an SM, blocks of 128 keys and 8 warps: 67.9, 70.8, 64.9; "
        "64 x 4k: 248.4, 251.8, 247.2 in today's tiles, 246.9, 251.1, 247.5 in blocks of 32 keys with all rows at "
        "once, which take 542 at 256 x 2k; 256 x 2k of 32/8 x 128: 491, 502, 491; of TP8: 68.0, 69.5, 65.6. Four and "
        "more stages came no nearer. Hopper's extend as decode, one group of 64 rows and pages by TMA: 72 to 75 at 16 "
        "x 4k, 252 to 257 at 64 x 4k, 493 at 256 x 2k with two programs an SM, which were not measured at 16 x 4k. "
        "None is built: the host does not know whether rows are alike, and one long row would hold up all. The same "
        "whole rows by the schedule, with a merge that adds up nothing, gain nothing (502 at 256 x 2k); which of the "
        "two costs it was not measured. Next: measure that; then a flag in the schedule for the short way, and a merge "
        "of few programs.",
    ),
    Goal(
        "pages of 8 by pages of 32",
        ("kernels",),
        (Check("x pages of 32", 1.05, pages_of_8),),
    ),
    Goal(
        "decode with D 192",
        ("kernels",),
        (Check("x FA3", 1.0, beside("decode-192", FA3)),),
    ),
    Goal(
        "deterministic mode, extend and decode",
        ("deterministic_cost",),
        (Check("x normal", 1.15, deterministic),),
        (
            Profiled("12/4 x 64: 1x777+5001", OWN),
            Profiled("12/4 x 64: 1x777+5001", DETERMINISTIC),
            Profiled("64/8 x 192: 16d4k", DETERMINISTIC),
            Profiled("32/8 x 128: 1d8k", OWN),
            Profiled("32/8 x 128: 1d8k", DETERMINISTIC),
        ),
        "A segment's end each 1,024 keys and a softmax by blocks of 64 keys cost most of it (segments twice as long, "
        "or blocks of 128, are within the goal in extend, but decode must then have the same: k q^T with 16 rows).",
    ),
    Goal(
        "host, eager: a layer",
        ("eager_step",),
        (Check("us", 12.0, eager_layer),),
        next_idea="Triton's launcher takes most of a launch: the compiled kernel called by the driver with arguments "
        "packed once, as graph capture needs them.",
    ),
    Goal(
        "host, a graphed step of 256 sequences",
        ("host_time",),
        (Check("us", 25.0, graphed_step),),
        next_idea="The step's checks and copies in NumPy are many small calls: one pass over a packed record.",
    ),
    Goal(
        "300 random shapes: by the neighbour, or by the best peer",
        ("random_shapes",),
        (Check("x", 1.5, random_shapes),),
        next_idea="Heads of 16 and 24 fill a part of the matrix unit and of each load: two KV heads beside each other "
        "as one block, as heads of 64 are read in eight bits.",
    ),
)
