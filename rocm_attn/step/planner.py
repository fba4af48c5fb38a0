"""Planner: finds the StepPlan of a batch. Steps that are padded to the same shape share a plan, and so a graph."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import torch
from torch import Tensor

from rocm_attn.batch.drafts import NO_DRAFTS, Drafts
from rocm_attn.batch.mask import NO_MASK, StepMask, TokenSpans
from rocm_attn.batch.padding import PaddedShape, PaddingPolicy, PadTo, fits, is_prefill, require_pad_to
from rocm_attn.batch.prefixes import NO_PREFIXES
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.batch.step_kinds import FEW_TOKENS, Extra, StepKind
from rocm_attn.errors import BadBatch, BadTensor, NeverFits, Unsupported, WrongState
from rocm_attn.kernels.tuning.tiles import next_power_of_2
from rocm_attn.problem import require_cells
from rocm_attn.providers.contract import Baked
from rocm_attn.providers.select import Selection
from rocm_attn.step.plan import GraphKey, StepPlan, keep_latest, kv_len_bucket, make_plan

# The most new tokens per sequence for which the plan of a step with equal counts is kept by its sizes.
_MOST_VERIFIED = 64

# Name -> tensor, for the tensors in the memory of steps that graphs read
SealedTensors = Callable[[], Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class PlanningGuards:
    """The safeguards of plans.

    longest:   tensors that graphs read -> batch -> tokens of the longest sequence that a step is planned for
    graph_key: the part of a plan's key by which graphs differ: all of it
    """

    longest: Callable[[SealedTensors], Callable[[StepBatch], int]] = lambda sealed_tensors: attrgetter("max_kv_len")
    graph_key: Callable[[GraphKey], GraphKey] = lambda key: key


class Planner:
    """Makes and keeps the plans for one set of kernels and one padding policy.

    selections: the kernels of each kind of layer
    device:     the runtime's device
    max_kv_len: most tokens of a row of the table
    sealed_tensors: the tensors that graphs read; no plan depends on them
    """

    def __init__(
        self,
        selections: Sequence[Selection],
        padding: PaddingPolicy,
        device: torch.device,
        *,
        max_kv_len: int,
        sealed_tensors: SealedTensors,
        guards: PlanningGuards,
    ) -> None:
        self.padding = padding
        self._problems = tuple(selection.problem for selection in selections)
        self._selections, self._device, self._max_kv_len = tuple(selections), device, max_kv_len
        self._longest, self._graph_key = guards.longest(sealed_tensors), guards.graph_key
        entries = [kernel.entry for s in selections for kernel in s.kernels.values()]
        bakes = {b for entry in entries for b in entry.bakes}
        self._bakes_kv_len = Baked.MAX_KV_LEN in bakes
        self._bakes_q_len = Baked.MAX_Q_LEN in bakes
        self._has_verify = any(entry.kind is StepKind.VERIFY for entry in entries)
        self._has_prefill = any(entry.kind is StepKind.PREFILL for entry in entries)
        self._plan_of_key: dict[GraphKey, StepPlan] = {}
        # Plans of steps that no graph replays: by shape, max_q_len, max_kv_len and may_capture, the latest one last.
        self._ragged: dict[tuple[PaddedShape, int, int, bool], StepPlan] = {}
        self._bucket = (1, 0)  # the first and the last length of the last bucket, if a kernel bakes lengths in
        # Keyed by everything that a plan depends on, so that a step of known sizes costs one look-up.
        self._plan_of_sizes: dict[tuple[object, ...], StepPlan] = {}

    def start_over(self, padding: PaddingPolicy) -> None:
        """Drops every plan and pads by another policy."""
        # In one statement, so that no interrupt leaves plans of one policy under another.
        self.padding, self._plan_of_key, self._plan_of_sizes, self._ragged = padding, {}, {}, {}

    def plan(self, batch: StepBatch, pad_to: PadTo | None = None, num_children: int = 1) -> StepPlan:
        """The plan of a batch that runs whole, or as two halves; see AttentionRuntime.plan. pad_to: of PaddingPolicy"""
        if pad_to is not None:
            require_pad_to(pad_to)
        max_kv_len = self._max_kv_len_of(batch, pad_to) if self._bakes_kv_len else self._max_kv_len
        sizes: tuple[object, ...]
        if batch.decodes and pad_to is None and num_children == 1:  # true for most steps
            sizes = batch.num_seqs, max_kv_len
        else:
            sizes = (
                batch.num_seqs,
                self._new_tokens(batch, pad_to, num_children),
                max_kv_len,
                # Its kv_len differs in each step, and is part of max_kv_len.
                pad_to and pad_to[:2],
                num_children,
                batch.inputs.device,
                # Trees have room in every graph of their size; other masks may have none.
                type(batch.mask),
                batch.prefixes is NO_PREFIXES,
                batch.drafts,
            )
        plan = self._plan_of_sizes.get(sizes)
        if plan is None:
            shape_of = self.padding.shape if num_children == 1 else self.padding.split_shape
            shape = shape_of(batch, pad_to)
            # If ranks agree on sizes, none of them has a bucket of its own.
            longest = shape.child.num_tokens if pad_to is not None and pad_to.tokens else batch.max_q_len
            plan = self._make_plan(shape, batch, longest, max_kv_len)
            if plan.replayable and (plan.shape.kind.decodes or self._is_one_of_few(batch)):
                self._plan_of_sizes[sizes] = plan
        return plan

    def _new_tokens(self, batch: StepBatch, pad_to: PadTo | None, num_children: int) -> tuple[int, int, int]:
        """The new tokens of a batch that a plan depends on: their number, and the fewest and most of a sequence.

        In verify steps every sequence is padded to the same number. The plan then depends only on whether a sequence
        has at most one new token, which decides the kind of the step.
        """
        most = batch.max_q_len
        if most > 1 and pad_to is None and num_children == 1 and self.padding.pads_as_verified(batch):
            return 0, min(batch.min_q_len, 2), self.padding.verify
        return batch.num_tokens, batch.min_q_len, most

    def _is_one_of_few(self, batch: StepBatch) -> bool:
        """True for steps whose sizes come again: rounds of drafts and verify steps, not prompts."""
        if isinstance(batch.mask, StepMask):  # it may have more cells in the next step, and no room in a graph
            return False
        if batch.drafts is not NO_DRAFTS or self.padding.pads_as_verified(batch):
            return True
        return batch.max_q_len == batch.min_q_len <= _MOST_VERIFIED

    def admit(self, batch: StepBatch, plan: StepPlan) -> StepPlan:
        """Returns the plan if the batch fits it.

        Raises BadBatch for a value that is no plan, NeverFits, WrongState for an old plan, what plan() raises.
        """
        if not isinstance(plan, StepPlan):
            raise BadBatch(f"plan is {plan!r}; give what runtime.plan(batch) returns, or leave it out")
        if plan.replayable and self._plan_of_key.get(self._graph_key(plan.key)) is not plan:
            raise WrongState("the plan was made before the sealed addresses were released; plan the step again")
        _require_fit(batch, plan.shape)
        if plan.shape.kind is StepKind.PREFILL and not is_prefill(batch):
            raise NeverFits("the plan is for prompts without stored tokens, and the step has some; plan the step again")
        drafts = batch.drafts
        longest = batch.max_q_len if drafts is NO_DRAFTS else min(drafts.branches, batch.max_q_len)
        bounds = plan.bounds
        kv_len = self._longest(batch)
        is_longer = kv_len > bounds.max_kv_len and (
            self._graph_key(replace(plan.key, max_kv_len=kv_len)) != self._graph_key(plan.key)
        )
        if longest > bounds.max_q_len or is_longer:
            raise NeverFits(
                f"the step has up to {longest} new tokens and {kv_len} tokens in a sequence, and its plan allows "
                f"{bounds.max_q_len} and {bounds.max_kv_len}; plan the step again"
            )
        if plan.replayable and not self.padding.has_room(batch, plan.shape):
            raise NeverFits("the step's mask has more cells than its plan's memory; plan the step again")
        self._check_inputs(batch, plan)
        return plan

    def plan_as(self, batch: StepBatch, shape: PaddedShape) -> StepPlan:
        """The plan of a batch padded to a shape. Raises NeverFits if it does not fit, and what plan() raises."""
        if not shape.is_sound:
            raise NeverFits(f"no step runs at {shape}; use a shape that runtime.padding returns")
        _require_fit(batch, shape)
        return self._make_plan(shape, batch, batch.max_q_len, self._max_kv_len_of(batch, None))

    def _max_kv_len_of(self, batch: StepBatch, pad_to: PadTo | None) -> int:
        """Tokens of the longest sequence, in the form that plans use."""
        if not self._bakes_kv_len:
            return self._max_kv_len
        longest = self._longest(batch)
        first, last = self._bucket
        if pad_to is None and first <= longest <= last:
            return last
        if pad_to is not None and pad_to.kv_len:
            if pad_to.kv_len < longest:
                raise NeverFits(
                    f"a sequence has {longest} tokens and pad_to allows {pad_to.kv_len}; give the largest number "
                    "of all ranks, as PadTo.all_of() does"
                )
            longest = pad_to.kv_len
        last = kv_len_bucket(longest, self._max_kv_len)
        self._bucket = longest, last
        return last

    def _make_plan(self, shape: PaddedShape, batch: StepBatch, max_q_len: int, max_kv_len: int) -> StepPlan:
        """Makes a plan. max_q_len: new tokens of a sequence at most, for kernels that bake them in"""
        may_capture = self.padding.captures(shape) and self.padding.has_room(batch, shape)
        if isinstance(batch.drafts, Drafts):
            max_q_len = batch.drafts.branches
        if self._has_prefill and not may_capture and shape.kind is StepKind.EXTEND and is_prefill(batch):
            shape = replace(shape, kind=StepKind.PREFILL)
        max_q_len = max(max_q_len, self.padding.fixed_q_len(shape))
        # A shape that sequences with more new tokens may have too would need two graphs.
        if self._has_verify and (not may_capture or self.padding.verifies(shape)):
            shape = shape.of_few(max_q_len)
        if shape.kind is StepKind.VERIFY:
            max_q_len = FEW_TOKENS
        elif not self._bakes_q_len:
            max_q_len = 1 if shape.kind.decodes else shape.child.num_tokens
        else:
            max_q_len = next_power_of_2(max_q_len) if may_capture else max(1, min(max_q_len, batch.max_q_len))
        sizes = shape, max_q_len, max_kv_len, may_capture
        plan = self._ragged.get(sizes)
        if plan is None:
            kernels = [selection.kernel(shape.kind) for selection in self._selections]
            plan = make_plan(shape, kernels, max_q_len=max_q_len, max_kv_len=max_kv_len, may_capture=may_capture)
        self._check_inputs(batch, plan)
        if plan.replayable:
            # Sizes that are padded to the same shape share a plan, and so a graph and the views of its buffers.
            return self._plan_of_key.setdefault(self._graph_key(plan.key), plan)
        keep_latest(self._ragged, sizes, plan)
        return plan

    def _check_inputs(self, batch: StepBatch, plan: StepPlan) -> None:
        """Refuses tensors of another device, masks for no layer, and lengths that the host must know and does not."""
        if batch.mask is not NO_MASK and Extra.MASK not in self.padding.extras:
            raise BadBatch("the step has a mask and no layer uses one; build the runtime of problems with custom_mask")
        if batch.mask is not NO_MASK and not isinstance(batch.mask, TokenSpans):
            require_cells(self._problems, "a mask of cells or trees", "bring spans, or no mask")
        if isinstance(batch.drafts, Drafts) and batch.drafts.branches > 1:
            require_cells(self._problems, "drafts with several branches", "draft with one branch")
            without = [f"no custom_mask: {problem}" for problem in self._problems if not problem.custom_mask]
            if without:  # its drafts would see those of other branches
                raise Unsupported(
                    f"drafts with {batch.drafts.branches} branches need masks in every layer; build the runtime of "
                    "problems with custom_mask, or draft with one branch",
                    without,
                )
        if batch.mask.device not in (None, self._device):
            raise BadTensor(f"the step's mask is on {batch.mask.device}; the runtime is on {self._device}")
        if batch.prefixes is not NO_PREFIXES and not any(
            kernel.entry.kind.extra is Extra.PREFIXES for kernel in plan.kernels
        ):
            reasons = {
                f"{refusal.kernel}: {refusal.reason}": None
                for selection in self._selections
                for refusal in selection.refusals
                if refusal.kind.extra is Extra.PREFIXES
            }
            raise Unsupported("no layer can share prefixes; leave them out of the step", list(reasons))
        if batch.inputs.device not in (None, self._device):
            raise BadTensor(
                f"the step's lengths or token ids are on {batch.inputs.device}; the runtime is on {self._device}"
            )
        needy = [kernel.entry.name for kernel in plan.kernels if kernel.entry.needs_host_lengths]
        if needy and not batch.inputs.lengths_on_host:
            raise Unsupported(
                f"{', '.join(needy)} cannot run with the lengths of a step on {self._device}; read "
                "them back before the step, or choose another provider"
            )


def _require_fit(batch: StepBatch, shape: PaddedShape) -> None:
    """Raises NeverFits for a batch that cannot run at a shape."""
    if not fits(batch, shape):
        raise NeverFits(
            f"{batch.num_seqs} sequences with {batch.num_tokens} new tokens do not fit {shape}; use the shape that "
            "runtime.padding returns for them"
        )
