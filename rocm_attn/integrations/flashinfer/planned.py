"""PlannedAttention: a batch that was planned once, and attention over it for each layer that runs.

Every geometry that runs has an ExternalAttention over the same lists of pages. plan() begins and fills the steps of the
geometries that ran after the previous plan. Other steps begin at their first run, which must not be captured.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rocm_attn.batch.step_batch import INT32_MAX, MOST_TOKENS
from rocm_attn.errors import BadBatch, BadTensor, NeverFits, Unsupported, WrongState
from rocm_attn.external import Bounds, ExternalAttention, ExternalOptions, LayerSource
from rocm_attn.hip_graphs.record_guard import guard_here
from rocm_attn.integrations.flashinfer.batch import NO_ROOM, BatchCapacity, PlannedBatch
from rocm_attn.integrations.flashinfer.cells import seen_cells, token_positions
from rocm_attn.integrations.flashinfer.lengths import BatchLengths, Sight
from rocm_attn.integrations.flashinfer.page_lists import PageLists
from rocm_attn.integrations.flashinfer.requests import Geometry, alibi_slopes
from rocm_attn.machine.devices import StreamOrder, with_index
from rocm_attn.machine.sending import sent
from rocm_attn.paging.adopted_pages import EnginePages
from rocm_attn.problem import UNLIMITED_WINDOW, Problem
from rocm_attn.providers.mixed import is_capturing
from rocm_attn.step.external_step import NO_CELLS, ONE_EACH, BoolCells, Boundaries, ExternalStep, NoCells
from rocm_attn.step.head_weights import HeadWeights

LOG2_E = 1.4426950408889634
# The most attentions that are kept if nothing is captured, for instance for scales that differ between calls.
_MOST_BUILT = 32


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs and outputs of one call.

    q:        [tokens, q_heads, head_dim]
    k, v:     pages, [pages, page_size, kv_heads, head_dim | v_head_dim]
    out, lse: as in ExternalAttention.layers.attend; lse receives the natural log, and for tokens that see nothing
              their sinks, or -inf without sinks
    sinks:    float [q_heads], if the geometry has sinks
    k_scale, v_scale: float32 [1], for pages in eight bits
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor | None = None
    sinks: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


class _Run(NamedTuple):
    """The geometry of a plan, and that of a run after it, whose scores, scale or sinks may differ."""

    planned: Geometry
    ran: Geometry


@dataclass(slots=True)
class _Built:
    """An attention, and the plan that it began last."""

    attention: ExternalAttention
    plan: int = 0


class PlannedAttention:
    """Attention over batches of one wrapper.

    fixed: the largest batch of a wrapper whose run() is captured. Every batch has its number of sequences, and steps
           are padded to its number of tokens. None if nothing is captured
    each_one: for such a wrapper: whether every sequence has one new token in every batch
    """

    def __init__(
        self, device: torch.device, provider: str, *, fixed: BatchCapacity | None = None, each_one: bool = False
    ) -> None:
        self.device, self._provider = with_index(device), provider
        self._fixed, self._each_one = fixed, each_one
        # Calls share memory, and a program that knows of none may make them on several streams.
        self._streams = StreamOrder(self.device)
        self._room = NO_ROOM
        self._page_size = 0
        self._lists: PageLists | None = None
        # By problem, by Geometry.deterministic, and by window, which a masked step has in its cells.
        self._built: dict[tuple[Problem, bool, int], _Built] = {}
        self._ran: set[_Run] = set()
        self._geometry: Geometry | None = None
        self._plan = 0
        self._batch: PlannedBatch | None = None
        self._sight: Sight | None = None
        self._on_device = torch.zeros(0, dtype=torch.int32)

    @property
    def batch(self) -> PlannedBatch:
        """The batch that was planned last. Raises WrongState."""
        if self._batch is None:
            raise WrongState("nothing is planned; call plan() before run()")
        return self._batch

    def plan(self, batch: PlannedBatch, geometry: Geometry) -> None:
        """Plans a batch for later runs, and begins its steps. Raises Unsupported, BadBatch, NeverFits, BadTensor."""
        self._refuse_capture()
        self._streams.follow()
        self._batch = None
        if self._fixed is not None and self._each_one and (batch.lengths.q_len != 1).any():
            raise BadBatch("the wrapper was first planned with one new token per sequence, and now with others")
        self._make_room(batch, geometry.page_size)
        assert self._lists is not None
        self._lists.write(batch.pages, batch.num_entries)
        self._plan += 1
        lengths = batch.lengths
        self._on_device = sent(
            np.concatenate([lengths.kv_len, lengths.q_indptr, lengths.first_page]).astype(np.int32), self.device
        )
        if self._fixed is not None or lengths.num_tokens:
            # A recording reads the steps of all that ran; other wrappers are likely to run the same after a like plan.
            likely = {run.ran for run in self._ran if self._fixed is not None or run.planned == geometry}
            for each in likely or {geometry}:
                self._begin(batch, each)
        if self._fixed is None:
            self._ran.clear()
        self._batch, self._geometry = batch, geometry

    def run(self, geometry: Geometry, inputs: Inputs, *, scale_value: float = 1.0) -> None:
        """Computes attention. scale_value: multiplies the scale. Raises BadTensor, WrongState, Unsupported."""
        batch = self.batch
        self._streams.join()
        if not batch.lengths.num_tokens:
            return
        (low, high), num_pages = batch.page_ids, min(len(inputs.k), len(inputs.v))
        if low < 0 or high >= num_pages:
            raise BadTensor(f"the plan names pages {low} to {high}; the KV cache has pages 0 to {num_pages - 1}")
        if not num_pages:
            _see_nothing(inputs)
            return
        if geometry.sinks != (inputs.sinks is not None):
            geometry = replace(geometry, sinks=inputs.sinks is not None)
        geometry = geometry.scaled(scale_value)
        attention = self._begin(batch, geometry)
        assert self._geometry is not None
        self._ran.add(_Run(self._geometry, geometry))
        coded = None
        if inputs.k_scale is not None and inputs.v_scale is not None:
            coded = EnginePages(inputs.k_scale, inputs.v_scale, geometry.problem(causal=True, masked=False).page_format)
        attention.pages.bind(0, inputs.k, inputs.v, coded)
        if inputs.sinks is not None:
            attention.set_head_weights(0, _head_weights(geometry, inputs.sinks))
        if self._fixed is not None and len(inputs.q) < self._fixed.num_tokens:
            self._attend_padded(attention, inputs, self._fixed.num_tokens)
        else:
            attention.layers.attend(0, inputs.q, inputs.out, inputs.lse)
        if self._fixed is None:
            _let_go(attention)
        if inputs.lse is not None:
            _count_sinks(inputs.lse, inputs.sinks)
            if geometry.alibi:
                self._raise_lse(batch.lengths, geometry, inputs.lse)

    def _attend_padded(self, attention: ExternalAttention, inputs: Inputs, num_tokens: int) -> None:
        """Computes attention for fewer tokens than the captured step has."""
        count = len(inputs.q)
        q, out = (each.new_zeros((num_tokens, *each.shape[1:])) for each in (inputs.q, inputs.out))
        q[:count] = inputs.q
        lse = None if inputs.lse is None else inputs.lse.new_empty((num_tokens, *inputs.lse.shape[1:]))
        attention.layers.attend(0, q, out, lse)
        inputs.out.copy_(out[:count])
        if inputs.lse is not None and lse is not None:
            inputs.lse.copy_(lse[:count])

    def _raise_lse(self, lengths: BatchLengths, geometry: Geometry, lse: Tensor) -> None:
        """Converts the LSE to FlashInfer's bias, which is 0 at key i for new token i; ours is 0 at its own key."""
        if self._fixed is not None:
            raise Unsupported(
                "the log-sum-exp of ALIBI is not served if run() is captured, because its lengths are frozen"
            )
        rise = np.repeat(lengths.kv_len - lengths.q_len, lengths.q_len).astype(np.float32)
        slopes = alibi_slopes(geometry.num_q_heads).to(self.device)
        lse.add_(sent(rise, self.device)[:, None] * slopes)

    def _begin(self, batch: PlannedBatch, geometry: Geometry) -> ExternalAttention:
        """Returns the attention of a geometry, after a step of the batch has begun in it."""
        sight = self._sight_of(batch, geometry)
        problem = geometry.problem(causal=sight is Sight.CAUSAL, masked=sight is Sight.CELLS)
        key = problem, geometry.deterministic, geometry.window_left
        built = self._built.get(key)
        if built is not None:
            built.attention.take_over()  # a wrapper's calls do not overlap, but may come from any thread
            if built.plan == self._plan:
                return built.attention
        self._refuse_capture()
        if built is None:
            if self._fixed is None and len(self._built) >= _MOST_BUILT:
                del self._built[next(iter(self._built))]
            built = _Built(self._new(geometry, problem))
            self._built[key] = built
        built.attention.begin(self._step(batch, geometry, sight))
        built.attention.fill()
        built.plan = self._plan
        return built.attention

    def _sight_of(self, batch: PlannedBatch, geometry: Geometry) -> Sight:
        """Returns the rule for the keys that tokens see. Raises BadBatch if it changes although run() is captured."""
        sight = batch.lengths.sight(
            causal=geometry.causal,
            has_mask=batch.mask is not None,
            one_is_causal=self._fixed is None,
        )
        if self._fixed is not None:
            self._sight = self._sight or sight
            if sight is not self._sight:
                raise BadBatch(
                    f"the wrapper was first planned for {self._sight.value}, and now for "
                    f"{sight.value}; use two wrappers for plans with and without masks, and put sequences without KV "
                    "last"
                )
        return sight

    def _step(self, batch: PlannedBatch, geometry: Geometry, sight: Sight) -> ExternalStep:
        lengths, num_seqs = batch.lengths, batch.lengths.num_seqs
        kv_len, q_indptr, rows = torch.split(self._on_device, [num_seqs, num_seqs + 1, num_seqs])
        q_len = lengths.q_len[lengths.q_len > 0]
        captured = self._fixed is not None
        each_one = self._each_one if captured else len(q_len) == num_seqs and bool((q_len == 1).all())
        each_one &= sight is not Sight.CELLS
        num_tokens = self._fixed.num_tokens if self._fixed is not None else lengths.num_tokens
        # A step counts as decode only if each of its sequences has one new token.
        most = 1 if each_one else max(2, num_tokens if captured else int(q_len.max()))
        cells: NoCells | BoolCells = NO_CELLS
        if sight is Sight.CELLS:
            seen = seen_cells(
                lengths, batch.mask, causal=geometry.causal, window_left=geometry.window_left, device=self.device
            )
            cells = BoolCells(seen, sent(token_positions(lengths).astype(np.int32), self.device))
        return ExternalStep(
            num_seqs,
            num_seqs,
            num_tokens,
            kv_len,
            ONE_EACH if each_one else Boundaries(q_indptr),
            rows,
            1 if captured or each_one else min(int(q_len.min()), 2),
            most,
            max(lengths.max_kv_len, 1),
            captured=captured,
            mask=cells,
        )

    def _new(self, geometry: Geometry, problem: Problem) -> ExternalAttention:
        assert self._lists is not None
        room = self._room
        attention = ExternalAttention(
            [LayerSource(problem, head_weights=_head_weights(geometry, None))],
            self._lists.table,
            device=self.device,
            bounds=Bounds(
                num_seqs=room.num_seqs,
                num_tokens=room.num_tokens,
                kv_len=min(room.width * geometry.page_size, MOST_TOKENS),
                num_pages=INT32_MAX // geometry.page_size,
            ),
            options=ExternalOptions(
                provider=self._provider,
                deterministic=geometry.deterministic,
                page_strides=True,
                # A plan with later keys of a window has refused requests with fewer keys than new tokens.
                short_kv=problem.window_right == UNLIMITED_WINDOW,
                binds_calls=True,
            ),
        )
        if self._fixed is not None:
            attention.seal()
        return attention

    def _make_room(self, batch: PlannedBatch, page_size: int) -> None:
        """Makes room for the batch. Drops attentions that were built for less room, or for another page size."""
        needs = batch.room(page_size)
        if self._fixed is not None:
            if not self._fixed.holds(needs) or needs.num_seqs != self._fixed.num_seqs:
                raise NeverFits(
                    f"the batch has {needs}, and a wrapper whose run() is captured keeps {self._fixed}; keep the "
                    "number of sequences and stay within the other sizes, or make a wrapper with larger buffers"
                )
            if self._page_size not in (0, page_size):
                raise BadBatch(
                    f"pages of {page_size} tokens were given after pages of {self._page_size}; make a wrapper "
                    "for each page size"
                )
        if self._lists is not None and self._room.holds(needs) and self._page_size == page_size:
            return
        room = self._fixed or self._room.grown(needs)
        lists = PageLists(room.num_entries, room.width, self.device)  # memory may run out, and nothing has changed then
        self._built.clear()
        self._lists, self._room, self._page_size = lists, room, page_size

    def _refuse_capture(self) -> None:
        if guard_here() is not None or is_capturing(self.device):
            raise WrongState(
                "a plan cannot be captured, and functions without one make theirs; before the capture call plan(), and "
                "run() once with the same arguments"
            )


def _let_go(attention: ExternalAttention) -> None:
    """Drops the references to a call's pages, which its program may free, as a wrapper keeps many attentions."""
    run = attention.gate.running()
    attention.pages.bound[0] = None
    run.core.layers.forms.let_go(run.step.prepared, 0)


def _see_nothing(inputs: Inputs) -> None:
    """Writes the results over a cache without pages, which no kernel reads."""
    inputs.out.zero_()
    if inputs.lse is not None:
        inputs.lse.fill_(float("-inf"))
        _count_sinks(inputs.lse, inputs.sinks)


def _count_sinks(lse: Tensor, sinks: Tensor | None) -> None:
    """Makes the LSE of tokens that see nothing that of their sinks, as in FlashInfer; kernels here write -inf."""
    if sinks is not None:
        lse.copy_(torch.where(lse.isneginf(), sinks, lse))


def _head_weights(geometry: Geometry, sinks: Tensor | None) -> HeadWeights:
    """Returns the weights per head of the geometry. Sinks that are not given yet are -inf, and so have no effect."""
    slopes = alibi_slopes(geometry.num_q_heads) if geometry.alibi else None
    if geometry.sinks and sinks is None:
        sinks = torch.full((geometry.num_q_heads,), float("-inf"), dtype=torch.float32)
    return HeadWeights(sinks, slopes)
