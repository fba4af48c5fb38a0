"""The goals of attention on one H200, row by row, with the results that each row is read from and compared by.

A row is met if each of its checks is. A miss has a next idea in words, and launches whose counters profile_misses.py
reads. Numbers that the tables show with a goal come from rocm_lab/benchmarks/results alone. Those in next ideas are
trials, in words, of the H200 on 22 and 23 November 2026: no result file has them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

from rocm_lab.benchmarks.shape_sweep import timed_of

RESULTS = Path(__file__).parent / "results"
OWN, DETERMINISTIC, FA3, SDPA = "triton", "triton+deterministic", "fa3", "sdpa"
CUDNN = "cudnn"
# The harness with ROCM_ATTN_BENCH_WITHOUT=triton.hopper_extend.
PLAIN = "attention_plain"
GB = 1e9
COMMIT_LETTERS = 8
MOST_NAMED = 5


class Profiled(NamedTuple):
    """A launch that is profiled: a case of `rocm-attn bench kernels`, and one of its providers."""

    case: str
    provider: str


class ResultFiles:
    """Result files, each read once."""

    def __init__(self, folder: Path = RESULTS) -> None:
        self._folder = folder
        self._kept: dict[str, Any] = {}

    def of(self, name: str) -> Any:
        """Returns the result file of a script."""
        if name not in self._kept:
            self._kept[name] = json.loads(self._path(name).read_text())
        return self._kept[name]

    def has(self, name: str) -> bool:
        """True if the script was run."""
        return name in self._kept or self._path(name).exists()

    def commits(self, name: str) -> tuple[str, ...]:
        """Returns the commits of its numbers, the commit of most rows first."""
        found = self.of(name)
        rows = found["rows"].values() if isinstance(found["rows"], dict) else ()
        counted = Counter(row["commit"][:COMMIT_LETTERS] for row in rows if "commit" in row)
        return tuple(commit for commit, _ in counted.most_common()) or (found["machine"]["commit"][:COMMIT_LETTERS],)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}_h200.json"


class FastestPeer(NamedTuple):
    """The fastest peer of a case, and its number."""

    name: str
    value: float


# Case -> the number that is compared with the goal, and the fastest peer's.
Values = Callable[[ResultFiles], Mapping[str, float]]
Peers = Callable[[ResultFiles], Mapping[str, FastestPeer]]


def of_no_peer(results: ResultFiles) -> Mapping[str, FastestPeer]:
    """The peers of goals whose numbers no peer has, or that are relative to a peer already."""
    return {}


@dataclass(frozen=True, slots=True)
class GoalPart:
    """Part of a goal.

    what:   the number in words
    most:   the largest that is allowed
    cases:  their number; with fewer a miss could drop out
    values: of each case; the largest counts
    mean:   their geometric mean counts instead
    peers:  the fastest peer's results, if peers have the number too
    """

    what: str
    most: float
    cases: int
    values: Values
    mean: bool = False
    peers: Peers = of_no_peer

    def found(self, results: ResultFiles) -> Mapping[str, float]:
        """The value of each case. Raises ValueError if a case, its time or its peer's is missing, or if one is new."""
        found = self.values(results)
        if len(found) != self.cases:
            raise ValueError(
                f'"{self.what}", at most {self.most:g}, is of {self.cases} cases, and the result file has times of '
                f"{len(found)} ({_few(tuple(found))}); run its script again with every peer"
            )
        return found

    def reached(self, results: ResultFiles) -> float:
        """Returns the value that counts. Raises ValueError like `found`."""
        found = self.found(results).values()
        return geometric_mean(found) if self.mean else max(found)

    def where(self, results: ResultFiles) -> str:
        """Returns the case that counts, and the number of cases."""
        found = self.found(results)
        counts = "mean" if self.mean else max(found, key=lambda case: found[case])
        return f"{counts}, of {len(found)}" if len(found) > 1 else counts

    def missed(self, results: ResultFiles) -> Mapping[str, float]:
        """Cases above the goal; none of a mean that is met."""
        if self.mean and self.reached(results) <= self.most:
            return {}
        return {case: value for case, value in self.found(results).items() if value > self.most}


def _few(cases: tuple[str, ...]) -> str:
    """Names the first of them."""
    if len(cases) > MOST_NAMED:
        return f"{', '.join(cases[:MOST_NAMED])} and {len(cases) - MOST_NAMED} more"
    return ", ".join(cases) or "none"


@dataclass(frozen=True, slots=True)
class Goal:
    """A row.

    work:      the work in words
    sources:   scripts whose result files it is read from
    checks:    all of them must be met
    profiled:  launches whose counters explain a miss
    next_idea: the next attempt if it is missed
    """

    work: str
    sources: tuple[str, ...]
    checks: tuple[GoalPart, ...]
    profiled: tuple[Profiled, ...] = ()
    next_idea: str = ""

    def is_measured(self, results: ResultFiles) -> bool:
        """True if its result files are there."""
        return all(results.has(name) for name in self.sources)

    def is_missed(self, results: ResultFiles) -> bool:
        """True if it was measured, and a check is not met."""
        return self.is_measured(results) and any(check.reached(results) > check.most for check in self.checks)


@dataclass(frozen=True, slots=True)
class Older:
    """A result file that is older than the code.

    source:  the script whose file it is
    commit:  of the file; the page mentions it as long as it is the file's
    changed: the changes since, in words that follow "since then"; the page adds the full stop
    """

    source: str
    commit: str
    changed: str

    def is_so(self, results: ResultFiles) -> bool:
        """True if the file is still the one of that commit."""
        return results.has(self.source) and self.commit in results.commits(self.source)


# A line per file, to be removed when a newer file comes: a test names it.
OLDER: tuple[Older, ...] = ()


def beside(suite: str, peer: str, ours: str = OWN, layer: str = "", but: str = "\n") -> Values:
    """Our times relative to a peer's, in the suite's cases of a layer, except those with `but` in their name."""

    def values(results: ResultFiles) -> Mapping[str, float]:
        rows = [row for row in results.of("kernels")["rows"] if row["suite"] == suite and "us" in row]
        of = {(row["case"], row["provider"]): row["us"] for row in rows}
        return {
            case: us / of[case, peer]
            for (case, provider), us in of.items()
            if provider == ours and (case, peer) in of and case.startswith(layer) and but not in case
        }

    return values


def harness(field: str, *parts: str, source: str = "attention") -> Values:
    """A field of the harness's rows whose case is one of these, up to the page size at its end."""

    def values(results: ResultFiles) -> Mapping[str, float]:
        rows = results.of(source)["rows"]
        return {row["case"]: row[field] for row in rows if row["case"].rpartition("/")[0] in parts}

    return values


def decode_between(results: ResultFiles, least: float, most: float) -> list[Any]:
    """The harness's decode cases, without windows, that read between `least` and `most` bytes."""
    rows = results.of("attention")["rows"]
    return [row for row in rows if row["case"].startswith("dec/") and least <= row["bytes"] <= most]


def decode_by_bound(least: float, most: float) -> Values:
    """x bound of decode cases that read between `least` and `most` bytes."""
    return lambda results: {row["case"]: row["times_bound"] for row in decode_between(results, least, most)}


def peers_by_bound(least: float, most: float) -> Peers:
    """The same of the fastest peer of each case."""

    def peers(results: ResultFiles) -> Mapping[str, FastestPeer]:
        found = {}
        for row in decode_between(results, least, most):
            us, name = min((us, name) for name, us in row["peers"].items())
            found[row["case"]] = FastestPeer(name, us / row["lower_bound_us"])
        return found

    return peers


def by_peer(peer: str, *parts: str) -> Values:
    """Our times relative to a peer's in the harness, of cases as in harness()."""

    def values(results: ResultFiles) -> Mapping[str, float]:
        rows = results.of("attention")["rows"]
        return {
            row["case"]: row["us"] / row["peers"][peer]
            for row in rows
            if row["case"].rpartition("/")[0] in parts and peer in row["peers"]
        }

    return values


def caps(results: ResultFiles) -> Mapping[str, float]:
    """Times of layers with a soft cap, relative to those of the same without."""
    rows = [row for row in results.of("kernels")["rows"] if row["suite"] == "soft-cap" and row["provider"] == OWN]
    of = {row["case"]: row["us"] for row in rows}
    return {case: us / of[case.replace(", cap 50", "")] for case, us in of.items() if "cap" in case}


def pages_of_8(results: ResultFiles) -> Mapping[str, float]:
    """Times with pages of 8 relative to those with pages of 32."""
    rows = [row for row in results.of("kernels")["rows"] if row["suite"] == "page-sizes" and row["provider"] == OWN]
    of = {row["case"]: row["us"] for row in rows}
    return {case: us / of[case.replace("pages of 8", "pages of 32")] for case, us in of.items() if "pages of 8" in case}


def deterministic(results: ResultFiles) -> Mapping[str, float]:
    """Times of the deterministic mode relative to the normal one's."""
    return {f"{row['suite']}, {row['case']}": row["times"] for row in results.of("deterministic_cost")["rows"]}


def eager_layer(results: ResultFiles) -> Mapping[str, float]:
    """Host microseconds of a layer of an eager step."""
    rows = results.of("eager_step")["rows"]
    return {sequences(row): row["step_us_median"] / row["layers"] for row in rows}


def graphed_step(results: ResultFiles) -> Mapping[str, float]:
    """Host microseconds of a graphed step of 256 sequences."""
    rows = results.of("host_time")["rows"]
    return {sequences(row): row["step_us_median"] for row in rows if row["num_seqs"] == 256}


def sequences(row: Mapping[str, Any]) -> str:
    """Names the number of sequences of a row."""
    return f"{row['num_seqs']} {'sequence' if row['num_seqs'] == 1 else 'sequences'}"


def random_shapes(results: ResultFiles) -> Mapping[str, float]:
    """A shape's distance from its limit relative to its neighbour's, or its time relative to its peer's."""
    rows = timed_of(results.of("random_shapes"))
    return {row.name: max(row.x_neighbour, row.x_peer if row.peer_us else 0.0) for row in rows}


_LARGE = "64/8 x 192"
_LLAMA, _LLAMA_70B = "ext/llama8b", "ext/llama70b"
_CHUNKS = (f"{_LLAMA}/1x2048+6144", f"{_LLAMA}/8x512+4096")
_LONG = (f"{_LLAMA}/1x2048+30720", f"{_LLAMA_70B}/1x2048+30720")
_LARGEST, _MIDDLE = (1.0 * GB, 1e15), (0.06 * GB, 0.54 * GB)

GOALS = (
    Goal(
        "few tiles: 777 new tokens over 5,001, and ragged chunks",
        ("kernels",),
        (
            GoalPart("x FA3, mean", 0.9, 8, beside("few-tiles", FA3), mean=True),
            GoalPart("x FA3", 1.05, 8, beside("few-tiles", FA3)),
        ),
    ),
    Goal(
        "head dims 80, 96 and 192, the same",
        ("kernels",),
        (
            GoalPart("x FA3, D 80 and 96", 1.0, 4, beside("odd-dims", FA3, but=_LARGE)),
            GoalPart("x FA3, D 192", 1.15, 2, beside("odd-dims", FA3, layer=_LARGE)),
        ),
        (Profiled("32/32 x 96: 12 ragged chunks", OWN), Profiled("32/32 x 96: 12 ragged chunks", FA3)),
        "Tiles of 128 rows compute 1.59 times what the twelve chunks need. Shares that count tiles of few rows as "
        "4, 5 or 6 eighths, with warps that pass where they have no row, took 267 to 281 us, in place of 265. Where "
        "rows are drawn it takes 236, and 256 where they are dealt out. Of heads of 128, with 16 query heads on one KV "
        "head, 12 chunks take 94 us and 108, but most other steps of heads of 64, 128 and 192 1 to 4 percent longer. "
        "Next: both groups of warps share the keys of a tile of 64 rows.",
    ),
    Goal(
        "verify: 64 sequences, 5 new tokens over 2,500",
        ("kernels",),
        (
            GoalPart("x FA3, mean", 0.95, 7, beside("verify", FA3), mean=True),
            GoalPart("x FA3", 1.1, 7, beside("verify", FA3)),
        ),
    ),
    Goal(
        "mixed: 31 decodes and 2 chunks of 700",
        ("kernels",),
        (GoalPart("x FA3, mean", 1.0, 7, beside("mixed", FA3), mean=True),),
    ),
    Goal(
        "Llama 8B, 2,048 new over 6,144, and 8 x 512 over 4,096",
        ("attention",),
        (GoalPart("x limit, Gluon", 1.35, 2, harness("times_limit", *_CHUNKS)),),
        next_idea="As of 2,048 new tokens over 30,720.",
    ),
    Goal(
        "Llama 8B and 70B, 2,048 new over 30,720",
        ("attention",),
        (GoalPart("x limit, Gluon", 1.3, 4, harness("times_limit", *_LONG)),),
        (Profiled("32/8 x 128: 1x2k+30k", OWN), Profiled("32/8 x 128: 1x2k+30k", FA3)),
        "The clock falls under the power limit while tensor cores are this busy: fewer instructions beside the "
        "products (exponentials in pairs, scaling folded into the query) leave it higher.",
    ),
    Goal(
        "the same by the plain Triton kernel on Hopper",
        (PLAIN,),
        (
            GoalPart(
                "x limit, 2,048 over 6,144, 8 x 512 over 4,096", 1.75, 2, harness("times_limit", *_CHUNKS, source=PLAIN)
            ),
            GoalPart("x limit, 2,048 over 30,720", 1.7, 4, harness("times_limit", *_LONG, source=PLAIN)),
        ),
        next_idea="None: Hopper's own kernel serves these shapes, and this one stands in where it cannot.",
    ),
    Goal(
        "Llama 8B, 2,048 new tokens",
        ("attention",),
        (GoalPart("us", 82.0, 1, harness("us", f"{_LLAMA}/1x2048+0")),),
    ),
    Goal(
        "soft cap in extend, D 128 and D 256, by the same without",
        ("kernels",),
        (GoalPart("x without", 1.05, 2, caps),),
        (Profiled("32/8 x 128, cap 50: 1x2k+6k", OWN), Profiled("32/8 x 128: 1x2k+6k", OWN)),
        "Without a cap heads of 128 scale what they add up seldom, which with one nothing ever does: 340 us in place "
        "of 368. A tanh and a product more for each score: for 16 rows and 128 keys a warp has 581 instructions, 96 "
        "of them for the unit of special functions; without a cap 436 and 66. Tried: one or three of four "
        "exponentials by products take 416 and 417 us in place of 398; products with K a step ahead, under the tanh, "
        "416, and 404 in place of 368 without a cap. tanh in two bytes may be off by 0.02 at a cap of 50. Sums of "
        "weights on the matrix units have 64 additions fewer and take longer, by wgmma with eight columns of ones 480 "
        "us in place of 402, without a cap 445 and 374; by mma.sync, which wgmma of the other group holds up, 443 "
        "and 406. With polynomials in pairs of bfloat16 besides, 431. What is left is the order of instructions: the "
        "same ones in another order take 1 % more.",
    ),
    Goal(
        "decode, 1 GB and more",
        ("attention",),
        (GoalPart("x bound", 1.06, 19, decode_by_bound(*_LARGEST), peers=peers_by_bound(*_LARGEST)),),
        (Profiled("32/8 x 128: 256d2k", OWN), Profiled("32/8 x 128: 256d2k", SDPA)),
        "Programs run in up to four rounds already; other numbers of rounds, blocks of 32 keys and more stages came no "
        "nearer. Whole rows without shares and merge take 491 us in place of 502 at 8B 256 x 2k, as cuDNN, and gain "
        "nothing at 128 x 8k (973 and 973; cuDNN 967). Ragged 64 (70B; whole pages read by nothing but a stream of "
        "loads 321) takes 338 in a run where row by row it takes 345, since programs work side by side on the same "
        "keys of a sequence's eight rows. Where no part is added up side by side takes 325 and row by row 341. Of "
        "pages of 1 a token's 2 KB lie anywhere, which a stream of loads pays for too; two KV heads at a time take "
        "1.02 to 1.08 of the time there, and parts in groups of 8 in place of 16 0.98. Unequal shares, first those of "
        "4 to 64 times as much as the later ones, gain nothing: ragged 64 takes 1.00 to 1.03 of the time, rows that "
        "are alike 1.01 to 1.06. Three programs an SM with two blocks in flight take 1.01 to 1.35. Four of two warps "
        "take 0.99 at gptoss 256 x 2k, but 1.04 at 64 x 4k and 1.02 at ragged 64: next, tiles by the "
        "number of rows.",
    ),
    Goal(
        "decode, 60 to 540 MB",
        ("attention",),
        (GoalPart("x bound", 1.12, 18, decode_by_bound(*_MIDDLE), peers=peers_by_bound(*_MIDDLE)),),
        (Profiled("8/1 x 128: 64d4k", OWN), Profiled("8/1 x 128: 64d4k", SDPA)),
        "By stamps at 8/1 heads, 1 x 128k (25 us): words and page numbers are there 1.2 us after the wait, the first "
        "block after 5.4, the next ones at 4.2 TB/s; programs end at 18 to 23, and the merge takes 3. A stream of "
        "loads of the same pages takes 18.4 us, in order 17.5. A sequence's row of the table beside a program's words "
        "saves 0.3. First keys fetched into L2 before the wait gain 1 us at most, and cost 1 to 4 after a kernel that "
        "is not early; fetched ahead in the loop they take a third more. The program that ends last merges where rows "
        "have few parts; where they have more it takes longer than a launch of its own (us: so, as it is): TP8 16 x 4k "
        "19.6, 15.0, 64 x 4k 42.3, 41.4, 1 x 128k 32.7, 25.9. Next: parts merged within a cluster.",
    ),
    Goal(
        "decode beside cuDNN: 70B 16 x 4k and 64 x 4k, TP8 256 x 2k",
        ("attention",),
        (
            GoalPart(
                "x cuDNN", 1.0, 3, by_peer(CUDNN, "dec/llama70b/16x4k", "dec/llama70b/64x4k", "dec/70b_tp8/256x2k")
            ),
        ),
        (
            Profiled("64/8 x 128: 16d4k", OWN),
            Profiled("64/8 x 128: 16d4k", SDPA),
            Profiled("64/8 x 128: 64d4k", OWN),
            Profiled("64/8 x 128: 64d4k", SDPA),
            Profiled("32/8 x 128: 128d8k", OWN),
            Profiled("32/8 x 128: 128d8k", SDPA),
        ),
        "Whole rows, a program for each, by a launch that reads no shares and has no merge were tried (us: so, as it "
        "is in the same run, and cuDNN). 16 x 4k, one program an SM, blocks of 128 keys, 8 warps: 67.9, 70.8, 64.9; 64 "
        "x 4k: 248, 252, 247; TP8 256 x 2k: 68.0, 69.5, 65.6. Hopper's extend as decode, with pages by TMA: 72 to 75 "
        "at 16 x 4k, 252 to 257 at 64 x 4k. Neither is built: the host does not know whether rows are alike, and one "
        "long row would hold up all. By the schedule, where rows are nearly as many as SMs, and whole if alike, "
        "those tiles take 66.8 in place of 68.8 at 16 x 4k; with more rows they take longer, at 64 x 4k 259 to 263 in "
        "place of 250 in any number of rounds. Since then they merge within the launch: next the same without.",
    ),
    Goal(
        "pages of 8 by pages of 32",
        ("kernels",),
        (GoalPart("x pages of 32", 1.05, 4, pages_of_8),),
    ),
    Goal(
        "decode with D 192",
        ("kernels",),
        (GoalPart("x FA3", 1.0, 2, beside("decode-192", FA3)),),
    ),
    Goal(
        "deterministic mode, extend and decode",
        ("deterministic_cost",),
        (GoalPart("x normal", 1.15, 65, deterministic),),
        (
            Profiled("12/4 x 64: 1x777+5001", OWN),
            Profiled("12/4 x 64: 1x777+5001", DETERMINISTIC),
            Profiled("64/8 x 192: 16d4k", DETERMINISTIC),
            Profiled("32/8 x 128: 1d8k", OWN),
            Profiled("32/8 x 128: 1d8k", DETERMINISTIC),
        ),
        "In extend a segment's end each 1,024 keys and a softmax by blocks of 64 keys cost most of it: 8B 1 x 2,048 + "
        "6,144 took 453 us in a trial, 394 in normal mode; with segments of 2,048 keys or blocks of 128 it took 439, "
        "within the goal. But decode must then have the same blocks, and takes 299 us in place of 271 at 64 x 4k: it "
        "would have to compute k q^T, with 16 rows. Short decodes of few sequences have fewer segments than programs: "
        "segments of 512 take 18.5 us in place of 21.6 at TP8 16 x 4k, but 1.11 in place of 1.06 of normal at 64 x 4k. "
        "Two or four programs that share a segment's columns of V take 23.5 and 26.1 us there: the chain of its blocks "
        "stays as long. Maxima rounded up to whole numbers make scales exact, so that extend may have blocks of 128 "
        "keys beside decode's of 64; 8B 1 x 2,048 + 6,144 took 463 us so, and 455 without. The merge of shared rows "
        "in smaller blocks gains nothing (12/4 x 64 1 x 777 + 5,001: 61 us each time). Of all cases, by the geometric "
        "mean: segments of 512 take 1.05, since a segment's end costs 2.2 us of an SM that has 1,024 keys of 128 rows "
        "in 12.5. Maxima raised by more than 8 powers of two alone take 1.00, and 0.92 to 0.96 with heads of 192. "
        "Segments that end within the loop over keys, while the next ones' first products run, cost 1.0 us in place "
        "of 2.2, but the loop of extend is slower by more (1 x 2,048 + 30,720: 1,950 to 2,080 us in place of 1,770); "
        "decode's takes 0.96 to 1.00 so with many segments a program (16 x 4k 74.8 in place of 78.0) and up to 1.02 "
        "with one. Next: decode's loop so.",
    ),
    Goal(
        "host, eager: a layer",
        ("eager_step",),
        (GoalPart("us", 12.0, 3, eager_layer),),
        next_idea="A launch takes 3 to 4 us, by the driver's own functions with arguments packed once too. A layer "
        "had three of them; decode that stores the new K and V and merges its parts itself has one, and few rows, "
        "or as many as SMs, whose max_kv_len is over 1,024 have two. Merged within the launch, few rows would take "
        "the host 3 us less, and "
        "the device more: by the program that ends last 0.3 (1 x 256) to 4 us (1 x 2k); by programs at the end of "
        "decode's own grid, which wait for the others, 0.9 (1 x 256), 1.5 (1 x 2k), 0.3 (1 x 8k) and 3 (1 x 128k). "
        "Short rows that are not cut take 1.3 us more a block of 64 keys. Next: a merge that gives the same bits "
        "within the launch and outside it, for eager steps to choose by their lengths.",
    ),
    Goal(
        "host, a graphed step of 256 sequences",
        ("host_time",),
        (GoalPart("us", 25.0, 1, graphed_step),),
        next_idea="One launch is left, the graph's, by the driver's own function; the rest is Python, some 35 calls. "
        "Writing the whole slot takes less than writing only those parts of it that change. Which device is current is "
        "asked twice, for 0.24 us each, and a call of the driver by ctypes takes 0.5 before the driver does anything.",
    ),
    Goal(
        "300 random shapes: by the neighbour, or by the best peer",
        ("random_shapes",),
        (
            GoalPart(
                "x limit (bytes, products or softmax's powers) by the neighbour's (nearest tuned layout, in decode of "
                "up to 64 query heads on a KV head), or x peer",
                1.5,
                300,
                random_shapes,
            ),
        ),
    ),
)
