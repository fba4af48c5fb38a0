"""FlightRecorder: keeps the last steps in memory, and writes them to a file when a step raises.

It keeps no token ids and no values: a replay runs a step with its lengths, rows and sizes, and with random K and V.
"""

from __future__ import annotations

import json
import logging
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import torch

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.prefixes import NO_PREFIXES, Prefixes, PrefixGroup, SharedPrefixes
from rocm_attn.batch.step_batch import NO_TOKEN_IDS, Int32Array, StepBatch
from rocm_attn.batch.step_kinds import Extra, StepKind
from rocm_attn.errors import BadBatch, BadSetting, reason_of
from rocm_attn.machine.settings import whole_number
from rocm_attn.machine.values_json import as_json, from_json
from rocm_attn.machine.whole_files import require_place, whole_file
from rocm_attn.problem import Problem
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.plan import StepPlan
from rocm_attn.step.protocols import Flight

NUM_STEPS = 64
_FORMAT = 8
# Fields of the file that are no field of a FlightDump.
_FACTS_OF_THE_FILE = ("format", "torch")

_Noted = tuple[int, StepPlan, bool, int, Int32Array, Int32Array, Int32Array, Prefixes]


class FlightRecorder(Flight):
    """A ring buffer of a runtime's last steps, written to a file when a step raises.

    path:      the file of a dump; an earlier one is replaced
    num_steps: how many steps are remembered, at least 1

    Raises BadSetting at once if no file can be written there, and for another number of steps.
    """

    def __init__(self, runtime: AttentionRuntime, path: Path | str, *, num_steps: int = NUM_STEPS) -> None:
        self.path = Path(path)
        require_place(self.path, "the flight record")
        self._runtime = runtime
        self._num_steps = whole_number("num_steps", num_steps, least=1)
        self._ring: list[_Noted | None] = [None] * self._num_steps
        self._noted = 0

    def note(self, batch: StepBatch, plan: StepPlan, replayed: bool, epoch: int) -> None:
        """See `Flight.note`. A batch has its own copies of lengths, so the caller may change its arrays."""
        at = self._noted
        self._ring[at % self._num_steps] = (
            at,
            plan,
            replayed,
            epoch,
            batch.rows,
            batch.kv_len,
            batch.q_len,
            batch.prefixes,
        )
        self._noted = at + 1

    def failed(self, error: BaseException) -> None:
        """See `Flight.failed`: dumps, and adds a note to the error. If the dump fails, the error is still raised."""
        try:
            note = f"the last steps are in {self.dump(f'{type(error).__name__}: {error}')}; see rocm-attn replay-step"
        except OSError as failure:
            note = f"the last steps could not be written ({failure})"
        if hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(note)

    def dump(self, reason: str) -> Path:
        """Writes the remembered steps to the file. Raises OSError."""
        content = {
            "format": _FORMAT,
            "reason": reason,
            "torch": torch.__version__,
            "runtime": as_json(RuntimeFacts.of(self._runtime)),
            "problems": [as_json(selection.problem) for selection in self._runtime.selections],
            "steps": [as_json(step) for step in self.steps()],
        }
        with whole_file(self.path) as part:
            part.write_text(json.dumps(content))
        return self.path

    def dump_or_log(self, reason: str) -> None:
        """Like dump(), but logs an error if the file cannot be written, instead of raising."""
        try:
            self.dump(reason)
        except OSError as failure:
            logging.getLogger(__name__).warning("the last steps could not be written (%s)", failure)

    def steps(self) -> list[NotedStep]:
        """The remembered steps, oldest first."""
        noted = [step for step in self._ring if step is not None]
        return [NotedStep.of(*step) for step in sorted(noted, key=lambda step: step[0])]


def dump_on_signal(recorder: FlightRecorder, number: signal.Signals = signal.SIGUSR1) -> None:
    """Dumps whenever the process gets the signal. For the main thread of a program, not for a library."""

    def dump(received: int, frame: FrameType | None) -> None:
        recorder.dump_or_log(f"signal {signal.Signals(received).name}")

    signal.signal(number, dump)


@dataclass(frozen=True, slots=True)
class NotedStep:
    """A step that was run.

    number:      of the step, from 0 for the first that was noted
    kind:        of the step
    real_*, padded_*: sequences and tokens
    children:    parts that it ran in: halves, draft steps, or those of both halves; 1 for a step that ran whole
    branches, draft_steps: of a round of drafts; 0 and 1 of another step
    max_q_len, max_kv_len: the bounds in its graph key
    kernels:     per kind of layer
    replayed:    whether a graph of it existed when it began
    epoch:       of the addresses that graphs read
    rows, kv_len, q_len: as in StepBatch
    group_seqs, group_prefix_len: sequences and shared tokens of each group, of a step that shares prefixes
    Raises BadSetting if there is no such kind, and for groups of which one of the two is missing.
    """

    number: int
    kind: str
    real_seqs: int
    real_tokens: int
    padded_seqs: int
    padded_tokens: int
    children: int
    branches: int
    draft_steps: int
    max_q_len: int
    max_kv_len: int
    kernels: tuple[str, ...]
    replayed: bool
    epoch: int
    rows: tuple[int, ...]
    kv_len: tuple[int, ...]
    q_len: tuple[int, ...]
    group_seqs: tuple[int, ...]
    group_prefix_len: tuple[int, ...]

    def __post_init__(self) -> None:
        kinds = [kind.value for kind in StepKind]
        if self.kind not in kinds:
            raise BadSetting(f"kind is {self.kind!r}; it must be one of {', '.join(kinds)}")
        if len(self.group_seqs) != len(self.group_prefix_len):
            raise BadSetting(
                f"group_seqs has {len(self.group_seqs)} groups and group_prefix_len {len(self.group_prefix_len)}; "
                "they must have the same number"
            )

    @classmethod
    def of(
        cls,
        number: int,
        plan: StepPlan,
        replayed: bool,
        epoch: int,
        rows: Int32Array,
        kv_len: Int32Array,
        q_len: Int32Array,
        prefixes: Prefixes,
    ) -> NotedStep:
        """A step from the values that the ring holds."""
        key, shape = plan.key, plan.shape
        groups = prefixes.groups if isinstance(prefixes, SharedPrefixes) else ()
        return cls(
            number=number,
            kind=shape.kind.value,
            real_seqs=len(rows),
            real_tokens=int(q_len.sum()),
            padded_seqs=shape.num_seqs,
            padded_tokens=shape.num_tokens,
            children=shape.num_children,
            branches=shape.drafts.branches,
            draft_steps=shape.drafts.steps,
            max_q_len=key.max_q_len,
            max_kv_len=key.max_kv_len,
            kernels=key.kernel_names,
            replayed=replayed,
            epoch=epoch,
            rows=tuple(rows.tolist()),
            kv_len=tuple(kv_len.tolist()),
            q_len=tuple(q_len.tolist()),
            group_seqs=tuple(group.num_seqs for group in groups),
            group_prefix_len=tuple(group.prefix_len for group in groups),
        )

    @property
    def shape(self) -> PaddedShape:
        return PaddedShape(StepKind(self.kind), self.padded_seqs, self.padded_tokens, self.children)

    def batch(self) -> StepBatch:
        """The step's sequences, without token ids. Raises BadBatch."""
        if self.branches:
            raise BadBatch(f"step {self.number} is a round of drafts, which cannot be replayed; replay another step")
        if StepKind(self.kind).extra is Extra.MASK:
            raise BadBatch(f"step {self.number} has a mask, which a dump does not hold; replay a step without one")
        return StepBatch(self.rows, self.kv_len, self.q_len, NO_TOKEN_IDS, prefixes=self.prefixes)

    @property
    def prefixes(self) -> Prefixes:
        """The prefixes that its sequences shared. Raises BadBatch."""
        if StepKind(self.kind).extra is not Extra.PREFIXES:
            return NO_PREFIXES
        return SharedPrefixes(list(map(PrefixGroup, self.group_seqs, self.group_prefix_len)))


@dataclass(frozen=True, slots=True)
class RuntimeFacts:
    """The settings of a runtime that a step depends on.

    options:    with the provider that was chosen, and the sizes that graphs are captured at now
    guards_off: safeguards that were switched off
    """

    device: str
    arch: str
    options: RuntimeOptions
    guards_off: tuple[str, ...]

    @classmethod
    def of(cls, runtime: AttentionRuntime) -> RuntimeFacts:
        options = replace(
            runtime.options,
            provider=runtime.selections[0].provider,
            capture_sizes=runtime.padding.seqs.sizes,
            capture_tokens=runtime.padding.tokens.sizes,
            deterministic=runtime.deterministic,
        )
        return cls(str(runtime.device), runtime.target.arch, options, runtime.guards.off)


@dataclass(frozen=True, slots=True)
class FlightDump:
    """A dump that was read back.

    reason:   why it was written
    problems: one for each kind of layer
    steps:    oldest first

    Raises BadSetting if there is no problem, or one twice.
    """

    reason: str
    runtime: RuntimeFacts
    problems: tuple[Problem, ...]
    steps: tuple[NotedStep, ...]

    def __post_init__(self) -> None:
        if not self.problems or len(set(self.problems)) < len(self.problems):
            is_what = "has one twice" if self.problems else "is empty"
            raise BadSetting(f"problems {is_what}; it must have one for each kind of layer")

    def step(self, number: int | None) -> NotedStep:
        """The step with this number; the last one if it is None. Raises BadSetting."""
        if not self.steps:
            raise BadSetting("the dump holds no step; it was written before the first one ran")
        if number is None:
            return self.steps[-1]
        for step in self.steps:
            if step.number == number:
                return step
        raise BadSetting(
            f"the dump holds no step {number}; it has steps {self.steps[0].number} to {self.steps[-1].number}"
        )


def read_dump(path: Path) -> FlightDump:
    """Reads a dump from its file. Raises BadSetting if the file does not hold one; it names the field that is wrong."""
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise TypeError("its JSON is no object")
        if "format" not in content:
            raise TypeError("its JSON names no format")
        if content["format"] != _FORMAT:
            raise BadSetting(f"{path} is a dump of format {content['format']}; this version reads format {_FORMAT}")
        fields = {name: value for name, value in content.items() if name not in _FACTS_OF_THE_FILE}
        dump: FlightDump = from_json(FlightDump, fields, f"{path}: dump")
        return dump
    except BadSetting:
        raise
    # A ValueError also comes from a number with more digits than Python reads.
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadSetting(
            f"{path} is not a dump of a flight recorder ({reason_of(error)}); give a file that --flight-record has "
            "written"
        ) from error
