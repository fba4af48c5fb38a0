"""Without any one of its masks a kernel is caught: by a wrong value, or by an access to memory that is not its own."""

from pathlib import Path

import pytest

from tests.amd.mutation.checks import CHECKS
from tests.amd.mutation.copies import TRIALS, Trial, copy_of_kernels, start_server, verdict
from tests.amd.mutation.mutants import KERNELS, Mutant, mutants

MUTANTS = mutants()
# The first file of each check: on unchanged kernels, a check does the same for all of its files.
FILES = {CHECKS[path]: path for path in sorted(CHECKS, reverse=True)}.values()
# The first mask of these files, at least one per folder, is removed in every run. The night has the other masks, and
# the checks that take long.
FILES_BY_DAY = (
    "attention/plain_decode.py",
    "cache/store.py",
    "experts/product.py",
    "latent/decode.py",
    "metadata/table_update.py",
    "model/add_norm.py",
    "sampling/likeliest.py",
    "sparse/top_k.py",
    "speculative/accept_drawn.py",
    "states/updates.py",
)
JUDGES_BY_DAY = {CHECKS[path] for path in FILES_BY_DAY}
BY_DAY = {mutant.path: mutant for mutant in reversed(MUTANTS) if mutant.path in FILES_BY_DAY}


# Masks that change neither a value nor an access, and why they stay.
HARMLESS = {
    "attention/plain_decode.py: load without is_seen[:, None] in the mask of "
    "tl.load(k_at, mask=is_seen[:, None] & is_k, other=0.0)": "the scores of keys that are not seen are replaced",
    "metadata/fill_roles.py: load without live in the mask of "
    "tl.load(table.entries + row * table.stride + page_no, mask=live & (page_no < table.width), other=0)": (
        "the rest of the row is memory of the table; the store drops it"
    ),
    "attention/merge_within.py: store without mask tl.store(at.acc + first, acc / total, mask=mask)": (
        "a line past the heads lies on a part that was added up before, or on no row's; of columns past V's the "
        "interpreter stores in order, so that a line's own value comes last. On a GPU that would be a race"
    ),
    "attention/merge_within.py: store without mask tl.store(at.sums + first, maximum + tl.log2(total), mask=mask)": (
        "as the accumulator"
    ),
    "attention/decode.py: store without mask tl.store(part_row + v_own[i], acc[i] / wide, mask=is_out[i])": (
        "as in attention/merge_within.py: a part has all lines of a tile; of columns past V's the interpreter stores "
        "in order"
    ),
    "attention/decode.py: store without mask "
    "tl.store(sum_row + v_own[i], tl.broadcast_to(wide_sum, acc[i].shape), mask=is_out[i])": ("as the accumulator"),
    "attention/merge.py: load without mask tl.load(q_indptr + seq, mask=mine, other=0)": (
        "a program without work has the sequence after the last one, and q_indptr an entry for its end"
    ),
    "states/chunk_rows.py: load without mask tl.load(first_words, mask=heads < G.HEADS, other=0.0)": (
        "words of later chunks decide only whether heads that are there are looked at once more"
    ),
}


@pytest.fixture(scope="module", autouse=True)
def server() -> None:
    start_server()


@pytest.mark.parametrize(
    ("path", "trial"),
    [
        # The checks by day are those that judge a mutant, at least one per folder. Their trials are by turns.
        pytest.param(
            path,
            trial,
            id=f"{path}-{trial.memory.__name__}",
            marks=[pytest.mark.nightly] * (CHECKS[path] not in JUDGES_BY_DAY or number % len(TRIALS) != turn),
        )
        for number, path in enumerate(FILES)
        for turn, trial in enumerate(TRIALS)
    ],
)
def test_the_kernels_pass_their_checks(path: str, trial: Trial, tmp_path: Path) -> None:
    assert verdict(copy_of_kernels(tmp_path), path, trial) == "right"


@pytest.mark.fast(1)
@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: trial.memory.__name__)
def test_a_kernel_that_never_ends_is_noticed_by_what_it_has_done(trial: Trial, tmp_path: Path) -> None:
    path, loop = "metadata/place_mask.py", "in range(first, num_bytes, PROGRAMS * BLOCK)"
    source = (KERNELS / path).read_text()
    assert loop in source
    folder = copy_of_kernels(tmp_path, path, source.replace(loop, "in range(first, 1 << 62, PROGRAMS * BLOCK)"))
    assert verdict(folder, path, trial, most_operations=2_000) == "endless"


def test_every_kernel_with_a_mask_has_a_check() -> None:
    assert {mutant.path for mutant in MUTANTS} == CHECKS.keys()


def test_every_run_removes_a_mask_of_each_folder() -> None:
    assert BY_DAY.keys() == set(FILES_BY_DAY)
    assert {Path(path).parent for path in FILES_BY_DAY} == {Path(mutant.path).parent for mutant in MUTANTS}


def test_masks_that_are_called_harmless_exist() -> None:
    assert HARMLESS.keys() <= {mutant.name for mutant in MUTANTS}


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(
            mutant,
            id=f"{mutant.path}:{mutant.line} {mutant.what}",
            marks=[pytest.mark.nightly] * (mutant not in BY_DAY.values()),
        )
        for mutant in MUTANTS
    ],
)
def test_a_missing_mask_is_noticed(mutant: Mutant, tmp_path: Path) -> None:
    folder = copy_of_kernels(tmp_path, mutant.path, mutant.source)
    is_noticed = any(verdict(folder, mutant.path, trial) != "right" for trial in TRIALS)
    assert is_noticed == (mutant.name not in HARMLESS), mutant.name
