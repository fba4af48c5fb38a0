"""Finds what a model's layers leave on the table on an arch: preferred kernels that one change would make available.

Kernels are preferred by the order of the capability table. A gain is given only if this project has measured both
kernels, or if it follows from bytes; otherwise the line says that it is not known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rocm_attn.batch.step_kinds import Extra, StepKind
from rocm_attn.errors import BadProblem, Unsupported
from rocm_attn.machine.releases import EVERY_RELEASE, UNKNOWN, Release, ReleaseRange, Releases
from rocm_attn.machine.target import Target
from rocm_attn.problem import KVEncoding, PoolKind, Problem
from rocm_attn.providers.contract import PoolSize
from rocm_attn.providers.select import ENTRIES, Selection, select
from rocm_attn.selection.pages import PAGE_SIZES, POOLS
from rocm_lab.cost.cost import GPUS, CostShape, Range, predicted, seen_keys

# Steps with many K and V, for which the saving of eight bits is given.
_DECODE = CostShape(64, 4096)
_NOT_KNOWN = "unknown: both were never timed on this arch"


@dataclass(frozen=True, slots=True)
class UnusedCapability:
    """One finding.

    what:     what would change
    gate:     the obstacle; empty if the change only has to be requested
    how_much: the gain in words, with its range if one is known
    how:      how to get it
    seconds:  time that it would save of a layer at a shape, if that is known
    """

    what: str
    gate: str
    how_much: str
    how: str
    seconds: Range | None = None

    def line(self) -> str:
        """The finding, the change that gives it, the obstacle and the gain: a line each."""
        details = (f"how: {self.how}", self.gate and f"obstacle: {self.gate}", f"gain: {self.how_much}")
        return "\n      ".join(filter(None, (self.what, *details)))

    def as_json(self) -> dict[str, Any]:
        """The finding for --json."""
        seconds = None if self.seconds is None else [self.seconds.low, self.seconds.middle, self.seconds.high]
        return {
            "what": self.what,
            "gate": self.gate,
            "how_much": self.how_much,
            "how": self.how,
            "seconds_saved": seconds,
        }


@dataclass(frozen=True, slots=True)
class Choice:
    """The arguments of select(), by which kernels are chosen."""

    target: Target
    provider: str
    pool: PoolSize
    deterministic: bool

    def of(self, problem: Problem, target: Target) -> Selection:
        """The kernels of a problem. Raises Unsupported."""
        return select(problem, target, self.provider, pool=self.pool, deterministic=self.deterministic)


@dataclass(frozen=True, slots=True)
class _Change:
    """A layer on a target with one thing changed. how: the user's action for it"""

    problem: Problem
    target: Target
    how: str


def unused_of(selection: Selection, choice: Choice) -> list[UnusedCapability]:
    """Findings for one kind of layer."""
    return [*_kernels(selection, choice), *_eight_bits(selection, choice), *_tiles(selection)]


def _kernels(selection: Selection, choice: Choice) -> Iterator[UnusedCapability]:
    """Changes that give kinds of step a preferred kernel, and change no kernel for the worse."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for change in _changes(selection, choice):
        try:
            changed = choice.of(change.problem, change.target)
        except (Unsupported, BadProblem):
            continue
        kinds = [kind for kind in selection.kernels if kind.extra is Extra.NOTHING]
        ranks = {kind: (_rank(selection, kind), _rank(changed, kind)) for kind in kinds}
        if any(new > old for old, new in ranks.values()):
            continue
        better = [kind for kind, (old, new) in ranks.items() if new < old]
        if not better:
            continue
        kernels = {kind: (changed.kernel(kind).entry.name, selection.kernel(kind).entry.name) for kind in better}
        what = ", ".join(f"{kind.value} by {new}, not {old}" for kind, (new, old) in kernels.items())
        news = {new for new, _ in kernels.values()}
        gates = dict.fromkeys(refusal.reason for refusal in selection.refusals if refusal.kernel in news)
        found.setdefault((what, "; ".join(gates), _gain(selection, kernels)), []).append(change.how)
    for (what, gate, how_much), how in found.items():
        yield UnusedCapability(what, gate, how_much, " or ".join(dict.fromkeys(how)))


# Head dim -> microseconds of extend for Hopper and of the plain one at 1 x 2048 new + 6144 cached, on one H200.
_BESIDE_THE_PLAIN: Mapping[int, tuple[float, float]] = {64: (536, 631), 128: (394, 535)}


def _gain(selection: Selection, kernels: dict[StepKind, tuple[str, str]]) -> str:
    problem, pair = selection.problem, kernels.get(StepKind.EXTEND)
    times = _BESIDE_THE_PLAIN.get(problem.head_dim) if problem.head_dim == problem.v_head_dim else None
    if pair == ("triton.hopper_extend", "triton.extend") and times is not None:
        return f"{times[0]:g} us instead of {times[1]:g}, measured at 1x6144+2048 on one H200, one model"
    return _NOT_KNOWN


def _rank(selection: Selection, kind: StepKind) -> tuple[int, int]:
    """The rank of the kernel of a kind of step in the order of preference."""
    entry = selection.kernel(kind).entry
    entries = ENTRIES[entry.provider]
    return list(ENTRIES).index(entry.provider), entries.index(entry) if entry.kind is kind else len(entries)


def _changes(selection: Selection, choice: Choice) -> Iterator[_Change]:
    """Yields pages of another size or layout, and releases without the fault that stands in the way."""
    problem, target = selection.problem, choice.target
    for name, pool in POOLS.items():
        if problem.pool is PoolKind.LATENT and pool is not PoolKind.SPLIT:
            continue
        of = problem.pool if problem.pool is PoolKind.LATENT else pool
        for page_size in PAGE_SIZES:
            if (page_size, of) != (problem.page_size, problem.pool):
                flags = [f"--page-size {page_size}"] * (page_size != problem.page_size)
                flags += [f"--pool {name}"] * (of is not problem.pool)
                try:
                    yield _Change(replace(problem, page_size=page_size, pool=of), target, " ".join(flags))
                except BadProblem:
                    continue  # such pages are not possible
    for releases, how in _releases(selection, target):
        yield _Change(problem, replace(target, releases=releases), how)


def _releases(selection: Selection, target: Target) -> Iterator[tuple[Releases, str]]:
    refused = {refusal.kernel for refusal in selection.refusals}
    entries = [entry for each in ENTRIES.values() for entry in each if entry.name in refused]
    here = target.releases
    tritons = {each for entry in entries for each in entry.limits.tritons} - {here.triton}
    for triton in sorted(tritons):
        yield replace(here, triton=triton), f"install Triton {triton}"
    faults = [fault for entry in entries for fault in entry.faults if target.arch in fault.archs]
    for aiter in sorted(_ends(fault.aiter for fault in faults if here.aiter in fault.aiter)):
        yield replace(here, aiter=aiter), f"install AITER {aiter} or later"
    for rocm in sorted(_ends(fault.rocm for fault in faults if here.rocm in fault.rocm)):
        yield replace(here, rocm=rocm), f"install ROCm {rocm} or later"


def _ends(spans: Iterator[ReleaseRange]) -> set[Release]:
    """The first releases without a fault; a fault that no release has fixed has none."""
    return {span.before for span in spans if span.before not in (EVERY_RELEASE.before, UNKNOWN)}


def _eight_bits(selection: Selection, choice: Choice) -> Iterator[UnusedCapability]:
    """The most that K and V of half the bytes would save: the time of reading the other half."""
    problem, gpu = selection.problem, GPUS.get(choice.target.arch)
    if gpu is None or problem.kv_encoding is not KVEncoding.LIKE_Q or problem.dtype.itemsize != 2:
        return
    dims = problem.head_dim + (0 if problem.pool is PoolKind.LATENT else problem.v_head_dim)
    elements = _DECODE.num_seqs * seen_keys(problem, _DECODE.kv_len) * problem.num_kv_heads * dims
    saved = Range.between(elements / gpu.hbm[1], elements / gpu.hbm[0])
    now = predicted(problem, choice.target, _DECODE)
    of = "" if now is None else f" of {now.seconds.text(1e-6)}, as {now.kernel} is predicted,"
    yield UnusedCapability(
        "K and V in eight bits: half the bytes to store and to read",
        "",
        f"at most {saved.text(1e-6, 1)} us{of} less per layer at {_DECODE}, if HBM bounds it",
        "--kv-dtype fp8, which rounds results: see docs/eight_bit_kv.md",
        saved,
    )


def _tiles(selection: Selection) -> Iterator[UnusedCapability]:
    """Tiles of the tables, if a search on the GPU may find faster ones."""
    if not selection.target.is_gpu or selection.target.measured:
        return
    searched = (
        "triton.cdna_decode",
        "triton.cdna_extend",
        "triton.decode",
        "triton.extend",
        "triton.latent_decode",
        "triton.latent_extend",
    )
    kinds = [kind.value for kind, kernel in selection.kernels.items() if kernel.entry.name in searched]
    if kinds and selection.problem.pool is not PoolKind.VECTORIZED:
        yield UnusedCapability(
            f"measured tiles for this layer, in {_and(kinds)} steps",
            "",
            "unknown before a search",
            "rocm-attn tune on the GPU",
        )


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
