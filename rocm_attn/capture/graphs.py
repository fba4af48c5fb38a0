"""Captured graphs of steps: their recorder, the order in which shapes are captured, and the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic

import torch
from torch import Tensor

from rocm_attn.batch.drafts import NO_DRAFTS, Drafts
from rocm_attn.batch.padding import PaddedShape, PaddingPolicy
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.hip_graphs.recorder import GraphRecorder, Recording
from rocm_attn.hip_graphs.size_ladder import round_up
from rocm_attn.kernels.launch import does_only_launch, observe_launches
from rocm_attn.kernels.metadata.slot_layout import MOST_TAKEN
from rocm_attn.machine.devices import device_of, require_there
from rocm_attn.step.gate import Effects, RanStep
from rocm_attn.step.outputs import Outputs, real_rows
from rocm_attn.step.plan import GraphKey, StepPlan
from rocm_attn.step.step import Step

if TYPE_CHECKING:
    from rocm_attn.runtime import AttentionRuntime

# (buckets done, buckets in all, the bucket that comes next; empty at the end)
Progress = Callable[[int, int, str], None]

# The cost of making and checking a graph on a CPU, in runs of forward: recording takes two, and each of three draws of
# probe requests is run eagerly and as a graph.
CPU_CAPTURE_RUNS = 8
# A graph is made once the eager runs of its steps cost this many captures, so that captures stay below a tenth.
_RUNS_PER_CAPTURE_RUN = 10


def recorder_for(device: torch.device | str) -> GraphRecorder:
    """Returns a recorder of HIP or CUDA graphs on a GPU; on a CPU, one that replays torch operations and launches.

    Raises BadSetting.
    """
    device = device_of(device)
    require_there(device)
    if device.type == "cuda":
        from rocm_attn.hip_graphs.torch_recorder import TorchRecorder

        return TorchRecorder(device)
    from rocm_attn.hip_graphs.fake_recorder import FakeRecorder

    return FakeRecorder(observe_launches)


@dataclass(slots=True, eq=False)
class Graph(Generic[Outputs]):
    """A graph that runs all steps of a plan.

    recording:    replays it; its runs are counted if it takes inputs
    outputs:      its outputs, rows of pads included
    seconds:      of warm-up and recording
    effects:      of each step that it replays
    takes_inputs: True if its head takes the inputs of its steps
    epoch:        of the pinned tensors, when it was made
    num_seqs:     padded
    """

    plan: StepPlan
    recording: Recording
    outputs: Outputs
    seconds: float
    effects: Effects
    takes_inputs: bool
    epoch: int
    num_seqs: int = field(init=False)
    # Sequences of the last step, and its outputs without the rows of pads.
    num_real: int = field(init=False, default=-1)
    real: Outputs = field(init=False)
    # The step that this graph is known to run again.
    ran: RanStep | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.num_seqs = self.plan.shape.num_seqs

    def real_of(self, batch: StepBatch) -> Outputs:
        """Returns the outputs without the rows of pads."""
        outputs = real_rows(self.outputs, batch.num_seqs, batch.num_fed)
        # A tree belongs to the caller, so a new one is returned each time.
        if isinstance(outputs, Tensor):
            self.num_real, self.real = batch.num_seqs, outputs
        return outputs


def takes_inputs(runtime: AttentionRuntime, step: Step) -> bool:
    """True if the graph of a step takes its inputs. Twins cannot in a device's graph, because they ask the host."""
    shape = step.plan.shape
    if len(step.parts) > 1 or shape.drafts is not NO_DRAFTS or max(shape.num_seqs, shape.num_tokens) > MOST_TAKEN:
        return False
    return runtime.device.type == "cpu" or does_only_launch(runtime.core.ops.take_inputs)


def eager_steps_before_capture(device: torch.device | str) -> int:
    """Returns how many steps of a plan run eagerly before it is captured, unless capture_all() has captured it before.

    0 on a GPU, because a replay saves most of a step's host time. On a CPU it saves little. The number counts steps,
    not seconds, because all ranks of a model must capture at the same step.
    """
    return 0 if device_of(device).type == "cuda" else _RUNS_PER_CAPTURE_RUN * CPU_CAPTURE_RUNS


def capture_shapes(padding: PaddingPolicy) -> tuple[PaddedShape, ...]:
    """The padded shapes that are captured ahead of the first request, largest first, so that they share memory well.

    Decode steps, and steps that verify drafts, have a shape per sequence count. Other steps have one per pair of a
    sequence count and a token count, if each sequence can have a token. A token count of 1 is captured when such a step
    comes, since only steps with idle sequences have it. Split and masked steps, and those that share prefixes, have the
    same shapes, if they may be captured. Steps with prompts have their own token counts, at the largest sequence count.
    """
    shapes = [shape for children in range(1, padding.max_children + 1) for shape in _shapes(padding, children)]
    shapes += padding.prompt_shapes()
    return _largest_first(shapes)


def draft_shapes(padding: PaddingPolicy) -> tuple[PaddedShape, ...]:
    """Like `capture_shapes`, but for the rounds of drafts that may be captured, whole and in halves."""
    shapes = [
        PaddedShape.of_drafts(drafts, num_seqs, halves)
        for halves in range(1, padding.max_children + 1)
        for drafts in padding.drafts
        for num_seqs in dict.fromkeys(round_up(size, halves) for size in padding.seqs)
    ]
    return _largest_first(shapes)


def _largest_first(shapes: list[PaddedShape]) -> tuple[PaddedShape, ...]:
    return tuple(sorted(dict.fromkeys(shapes), key=lambda shape: (shape.num_tokens, shape.num_seqs), reverse=True))


def _shapes(padding: PaddingPolicy, children: int) -> list[PaddedShape]:
    seqs, tokens = (
        tuple(dict.fromkeys(round_up(size, children) for size in ladder)) for ladder in (padding.seqs, padding.tokens)
    )
    shapes = []
    for kind in padding.kinds(children):
        if kind.decodes:
            shapes += [PaddedShape(kind, size, size, children) for size in seqs]
            continue
        shapes += [
            PaddedShape(kind, num_seqs, num_tokens, children)
            for num_seqs, below in zip(seqs, (0, *seqs), strict=False)
            for num_tokens in tokens
            if _exists(kind, num_seqs, below + 1, num_tokens, children)
        ]
        if padding.verify > 1 and children == 1:
            shapes += [
                PaddedShape(kind, num_seqs, num_seqs * padding.verify) for num_seqs in seqs if num_seqs > kind.mixes
            ]
    return shapes


def _exists(kind: StepKind, num_seqs: int, fewest_seqs: int, num_tokens: int, children: int) -> bool:
    """True if a step with a token in each sequence is padded to these sizes.

    Its sequences have two tokens or more; where kinds are mixed, each child has some with one token and one with more.
    fewest_seqs: the fewest sequences that are padded to num_seqs
    """
    if kind.mixes:
        return num_seqs > children and num_tokens >= max(fewest_seqs, 2 * children) + children
    return num_tokens >= 2 * round_up(fewest_seqs, children)


def shape_name(shape: PaddedShape) -> str:
    """A padded shape in words."""
    seqs = "1 sequence" if shape.num_seqs == 1 else f"{shape.num_seqs} sequences"
    halves = "" if shape.num_halves == 1 else " in two halves"
    drafts = shape.drafts
    if isinstance(drafts, Drafts):
        branches = "1 branch" if drafts.branches == 1 else f"{drafts.branches} branches"
        return f"{drafts.steps} draft steps of {seqs} with {branches}{halves}"
    tokens = "" if shape.kind.decodes else f" with {shape.num_tokens} tokens"
    return f"{shape.kind.value} of {seqs}{tokens}{halves}"


@dataclass(frozen=True, slots=True)
class CapturedBucket:
    """One graph that was made.

    seconds:       wall time of warm-up and recording
    check_seconds: wall time of the comparison with the eager run
    num_bytes:     bytes by which the graphs' memory pool grew for it
    output_bytes:  bytes of its outputs, which no later graph of the pool may use
    check:         the steps that it was compared on, in words
    """

    key: GraphKey
    seconds: float
    check_seconds: float
    num_bytes: int
    output_bytes: int
    check: str

    @property
    def name(self) -> str:
        """The bucket in words, with the length bucket, because several graphs may have one shape."""
        return f"{shape_name(self.key.shape)}, lengths to {self.key.max_kv_len}"


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """The graphs that a runner has captured.

    buckets:    the graphs that exist, in order of capture
    skipped:    shape -> why capture_all() has not captured it yet. It is tried again when a step has this shape
    graphs_off: why graphs were switched off; empty while they are on or were never requested
    """

    buckets: tuple[CapturedBucket, ...]
    skipped: Mapping[PaddedShape, str]
    graphs_off: str

    @property
    def seconds(self) -> float:
        """Wall time of all captures and their checks, in seconds."""
        return sum(bucket.seconds + bucket.check_seconds for bucket in self.buckets)

    @property
    def num_bytes(self) -> int:
        return sum(bucket.num_bytes for bucket in self.buckets)

    def lines(self) -> list[str]:
        """A line of text for each graph, and one for all."""
        lines = [
            f"{bucket.name}: {bucket.seconds:.2f} s + {bucket.check_seconds:.2f} s check, "
            f"{bucket.num_bytes / 2**20:.1f} MiB, {bucket.check}"
            for bucket in self.buckets
        ]
        lines += [f"{shape_name(shape)}: not captured: {reason}" for shape, reason in self.skipped.items()]
        lines.append(f"{len(self.buckets)} graphs, {self.seconds:.2f} s, {self.num_bytes / 2**20:.1f} MiB")
        return [*lines, f"graphs are off: {self.graphs_off}"] if self.graphs_off else lines
