"""Watches every kernel for races, removes its barriers, proves its programs apart, and writes a document.

    python -m tests.amd.simulator.race_record docs/races.md

The document has two tables, each between two marks, which are written anew. Exits with 1, and leaves the document as it
is, if there is a race that is not in TOLERATED, a barrier whose removal is a race that is not found, or an example of
two programs that race.
"""

import multiprocessing
import re
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from rocm_lab.page_parts import with_rows
from rocm_lab.races.programs import Proof, prove_apart
from rocm_lab.races.programs import Word as ProofWord
from rocm_lab.races.watch import Race, RaceWatch
from rocm_lab.simulator import launcher
from rocm_lab.simulator.launcher import SimulatedLaunch, watched
from tests.amd.simulator.barrier_mutants import Barrier, Removed, reached_barriers, removed_barriers
from tests.amd.simulator.case import KernelCase
from tests.amd.simulator.kernel_cases import GRID, QUICK

# Accesses to a kernel's tensors that are in no order, and why every order is right.
TOLERATED = {
    ("_watch_pages_kernel", "rows"): "a row has the words of two steps, and those that this step writes are not used",
    ("_watch_pages_kernel", "entries"): "a page that this step writes is reported now or in the row's next step",
    ("_watch_pages_kernel", "pages"): "a page that this step writes is reported now or in the row's next step",
    (
        "_next_step_kernel",
        "counts",
    ): "an error of another sequence is reported by that one too, and again by the next step",
}

# A case for each kernel with barriers that are reached.
CASES_OF_BARRIERS = {
    "_accept_sampled_kernel": "gfx950-speculative/accept_sampled",
    "_add_norm_kernel": "gfx950-model-float16",
    "_cdna_extend_kernel": "gfx950-cdna-extend-plain",
    "_cdna_latent_decode_kernel": "gfx950-cdna-latent-plain",
    "_cdna_selected_kernel": "gfx950-cdna-selected-unseen",
    "_check_pages_kernel": "gfx942-metadata/check_pages",
    "_choose_experts_kernel": "gfx950-choice-float16",
    "_chunk_rows_kernel": "gfx950-states-channels",
    "_chunk_walk_kernel": "gfx950-states-channels",
    "_cut_rows_kernel": "gfx950-sampling/cut_rows",
    "_decode_kernel": "gfx950-8x2-128x128-bfloat16-E4M3FN_HEAD-page16-below",
    "_device_inputs_kernel": "gfx950-metadata/device_inputs",
    "_expert_product_kernel": "gfx942-experts-float16-1",
    "_expert_sums_kernel": "gfx950-choice-float16",
    "_extend_kernel": "gfx950-6x2-80x48-float16-page5-below",
    "_extend_merge_kernel": "gfx942-shared_rows-6x2-128x128-bfloat16-page16",
    "_fill_kernel": "gfx950-metadata/fill_roles",
    "_fold_rows_kernel": "gfx942-sparse-rows",
    "_index_scores_kernel": "gfx950-sparse-coded_tokens",
    "_few_rows_kernel": "gfx950-model-float16",
    "_gated_norm_kernel": "gfx950-gates-float16",
    "_gates_kernel": "gfx942-gates-bfloat16",
    "_inner_products_kernel": "gfx950-choice-float16",
    "_latent_decode_kernel": "gfx942-latent-above",
    "_latent_extend_kernel": "gfx942-latent-above",
    "_latent_segment_decode_kernel": "gfx942-latent-segments",
    "_latent_segment_extend_kernel": "gfx942-latent-segments",
    "_likeliest_kernel": "gfx942-sampling/likeliest",
    "_list_kernel": "gfx950-6x2-80x48-float16-page5-below",
    "_merge_kernel": "gfx950-merge-1x20",
    "_move_paths_kernel": "gfx942-speculative/move_paths",
    "_next_step_kernel": "gfx950-speculative/next_step",
    "_pack_mask_kernel": "gfx950-metadata/pack_mask",
    "_pick_rows_kernel": "gfx942-sampling/order",
    "_place_mask_kernel": "gfx942-metadata/place_mask",
    "_place_spans_kernel": "gfx950-metadata/place_spans",
    "_place_trees_kernel": "gfx942-metadata/place_trees",
    "_normed_product_kernel": "gfx950-model-float16",
    "_plain_decode_kernel": "gfx950-plain_decode",
    "_publish_engine_kernel": "gfx942-metadata/publish_engine",
    "_publish_kernel": "gfx950-metadata/publish",
    "_row_product_kernel": "gfx950-model-float16",
    "_schedule_kernel": "gfx942-merge-1x20",
    "_segment_decode_kernel": "gfx942-segments-capped",
    "_segment_extend_kernel": "gfx942-segments-capped",
    "_selected_attention_kernel": "gfx942-sparse-split",
    "_share_kernel": "gfx950-shared_rows-4x2-128x128-bfloat16-page16",
    "_sort_pairs_kernel": "gfx942-pairs-1500",
    "_state_places_kernel": "gfx950-states/places",
    "_store_kernel": "gfx942-store-bfloat16-below",
    "_take_inputs_kernel": "gfx950-metadata/take_inputs",
    "_token_steps_kernel": "gfx950-states-channels",
}
# Kernels with other barriers on another arch, or in other layers.
CASES_OF_OTHER_BARRIERS = {
    "_cdna_extend_kernel": (
        "gfx942-cdna-extend-plain",
        "gfx942-cdna-extend-wide",
        "gfx950-cdna-extend-wide",
        "gfx950-cdna-extend-codes",
    ),
    "_cdna_latent_decode_kernel": (
        "gfx942-cdna-latent-plain",
        "gfx942-cdna-latent-heads_of_2_tiles",
        "gfx950-cdna-latent-codes",
    ),
    "_cdna_selected_kernel": (
        "gfx942-cdna-selected-unseen",
        "gfx942-cdna-selected-1_tile",
        "gfx942-cdna-selected-records",
        "gfx950-cdna-selected-records",
    ),
}
_CASES = {str(case): case for case in GRID}


@dataclass(frozen=True, slots=True)
class Watched:
    """The kernels of a case's run, those of this process that have reached a barrier, the run's races, and proofs."""

    kernels: frozenset[str]
    with_barriers: frozenset[str]
    races: tuple[Race, ...]
    proofs: frozenset[Proof]

    @property
    def not_tolerated(self) -> list[str]:
        """The races that are not in TOLERATED, a line each."""
        return [race.line() for race in self.races if (race.kernel, race.memory) not in TOLERATED]


@dataclass(slots=True)
class _Row:
    """The counts of one kernel."""

    cases: int = 0
    races: int = 0
    barriers: Counter[Barrier] = field(default_factory=Counter)

    def line(self, kernel: str) -> str:
        found, rest = self.barriers[Barrier.FOUND], self.barriers[Barrier.NOT_NEEDED]
        return f"| `{kernel}` | {self.cases} | {self.races or 'none'} | {self.barriers.total()} | {found} | {rest} |\n"


def watch_case(case: KernelCase, seed: int = 0) -> Watched:
    """Runs a case under a watch. Raises if a result is wrong, in this order of programs and waves."""
    with watched(RaceWatch(seed=seed)) as watch:
        simulation = case.simulate()
    reached = {kernel.assembly.name for _, kernel in launcher._simulated.values() if reached_barriers(kernel)}
    proofs = frozenset(map(_proof_of, simulation.launches))
    return Watched(frozenset(simulation.kernels), frozenset(reached), tuple(watch.races), proofs)


def _proof_of(launch: SimulatedLaunch) -> Proof:
    """For every grid; if an example needs several programs along an axis that has one here, for one along it."""
    if not launch.code.ttir:
        return Proof(launch.code.kernel, ProofWord.NOT_PROVED, why="Gluon has no TTIR")
    proof = _prove_apart(launch.code.ttir)
    if proof.word is not ProofWord.RACE:
        return proof
    return _prove_apart(
        launch.code.ttir, tuple(axis for axis, size in zip("xyz", launch.grid, strict=True) if size == 1)
    )


_prove_apart = cache(prove_apart)


def without_barriers(kernel: str) -> list[Removed]:
    """Every barrier that the kernel's cases reach, removed."""
    names = (CASES_OF_BARRIERS[kernel], *CASES_OF_OTHER_BARRIERS.get(kernel, ()))
    return [removed for name in names for removed in removed_barriers(_CASES[name], kernel)]


def _proof_row(kernel: str, proofs: set[Proof]) -> str:
    """The answers about a kernel's variants, one for those that differ in nothing but numbers."""
    answers: dict[str, str] = {}
    for proof in sorted(proofs, key=str):
        condition = f" if {', '.join(f'`{each}`' for each in proof.assumes)}" if proof.assumes else ""
        reason = f": {proof.why}" if proof.word is ProofWord.NOT_PROVED else ""
        answer = f"{proof.word.value}{condition}{reason}"
        answers.setdefault(re.sub(r"\d+ \* |\d+", "", answer), answer)
    return f"| `{kernel}` | {'; '.join(answers.values())} |\n"


def main(document: Path, num_processes: int) -> int:
    """Run, print, write; the exit status."""
    rows: dict[str, _Row] = {}
    proofs: dict[str, set[Proof]] = {}
    faults: list[str] = []
    with ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn")) as pool:
        for case, seen in zip(QUICK, pool.map(watch_case, QUICK), strict=True):
            faults += seen.not_tolerated
            faults += [f"{kernel} has no case" for kernel in seen.with_barriers - CASES_OF_BARRIERS.keys()]
            for kernel in seen.kernels:
                rows.setdefault(kernel, _Row()).cases += 1
            for race in seen.races:
                rows[race.kernel].races += 1
            for proof in seen.proofs:
                proofs.setdefault(proof.kernel, set()).add(proof)
            faults += [proof.line() for proof in seen.proofs if proof.word is ProofWord.RACE]
            print(case, *seen.not_tolerated, sep="\n    ", flush=True)
        for kernel, removed in zip(CASES_OF_BARRIERS, pool.map(without_barriers, CASES_OF_BARRIERS), strict=True):
            rows[kernel].barriers.update(each.barrier for each in removed)
            faults += [f"{kernel}, {each.index}" for each in removed if each.barrier is Barrier.MISSED]
            print(kernel, rows[kernel].barriers, flush=True)
    print(*faults, sep="\n")
    if not faults:
        page = with_rows(document.read_text(), "races", [row.line(name) for name, row in sorted(rows.items())])
        document.write_text(with_rows(page, "proofs", [_proof_row(*each) for each in sorted(proofs.items())]))
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), multiprocessing.cpu_count()))
