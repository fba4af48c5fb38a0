"""The journal of trials, one line of JSON each, so that a search continues where the last one ended.

A candidate gets a line before it is compiled. If it takes the process down, later searches skip it.
"""

import fcntl
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rocm_attn.errors import BadSetting
from rocm_attn.kernels.tuning.measured import Tiles
from rocm_attn.providers.tiles import layer_of
from rocm_lab.tune.candidates import CandidateTiles
from rocm_lab.tune.jobs import TuneJob

BEGUN, INTERRUPTED = "begun", "interrupted"


@dataclass(frozen=True, slots=True)
class CandidateResult:
    """The result of a candidate.

    ratio:   its time divided by that of the choice in use, over all shapes; infinite if it has none
    outcome: "timed", BEGUN, INTERRUPTED, or why it has no time
    spilled: registers that the compiler keeps in memory
    """

    outcome: str
    ratio: float = float("inf")
    spilled: int = 0


class Journal:
    """The trials of a search's machine and software, read at once and appended to.

    place: a file that is created; lines that cannot be read are skipped
    facts: facts that a time depends on in addition to the job: device, arch, releases, commit
    Raises BadSetting if the file cannot be read or written.
    """

    def __init__(self, place: Path, facts: dict[str, str]) -> None:
        self._place, self._facts = place, facts
        self._trials: dict[str, CandidateResult] = {}
        try:
            lines = place.read_text(errors="replace").splitlines() if place.exists() else []
            place.parent.mkdir(parents=True, exist_ok=True)
            self._file = place.open("ab", buffering=0)  # what a full disk does not take is not written again
        except OSError as error:
            raise BadSetting(f"the list of trials {place} cannot be used ({error}); choose another --output") from error
        for line in lines:
            self._take(line)
        # Ends a line that was cut off in the middle.
        self._write("\n" if lines else "")

    def _take(self, line: str) -> None:
        try:
            said = json.loads(line)
            ratio = float(said["ratio"]) if said["ratio"] is not None else float("inf")
            self._trials[str(said["key"])] = CandidateResult(str(said["outcome"]), ratio, int(said["spilled"]))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return

    def of(self, job: TuneJob, tiles: Tiles) -> CandidateResult | None:
        """The trial of these tiles, now or in an earlier search; None if they are still to be tried."""
        trial = self._trials.get(self._key(job, tiles))
        return None if trial is not None and trial.outcome == INTERRUPTED else trial

    def begin(self, job: TuneJob, candidate: CandidateTiles) -> None:
        """Records that a candidate is about to be compiled."""
        self.end(job, candidate, CandidateResult(BEGUN))

    def end(self, job: TuneJob, candidate: CandidateTiles, trial: CandidateResult) -> None:
        """Records the result of a candidate. Raises BadSetting if the file cannot be written."""
        key = self._key(job, candidate.tiles)
        self._trials[key] = trial
        ratio = None if trial.ratio == float("inf") else round(trial.ratio, 4)
        said: dict[str, Any] = {"key": key, "outcome": trial.outcome, "ratio": ratio, "spilled": trial.spilled}
        said |= {"job": str(job), "candidate": str(candidate)}  # for readers
        self._write(json.dumps(said) + "\n")

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A context in which no other search changes the file of tiles that this is the journal of."""
        with suppress(OSError):  # some disks have no locks
            fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _write(self, text: str) -> None:
        try:
            self._file.write(text.encode())
        except OSError as error:
            raise BadSetting(
                f"the list of trials {self._place} cannot be written ({error.strerror}); make room, and run the same "
                "command again to continue"
            ) from error

    def _key(self, job: TuneJob, tiles: Tiles) -> str:
        """A key of a job and tiles, with all facts that their time depends on."""
        layer = asdict(layer_of(job.problem))
        names = [f"{type(each).__name__} {sorted(asdict(each).items())}" for each in (job.in_use, tiles)]
        facts = [self._facts, job.table.value, layer, job.max_rows, [str(shape) for shape in job.shapes], names]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]
