"""ProbeRequests: requests with random content, and steps of them, on which CaptureCheck checks a graph.

They use rows and pages that are free at the moment, and free them afterwards. Requests of one step share all pages
except those of their new tokens, so that long ones cost little memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rocm_attn.batch.drafts import NO_DRAFTS, Drafts
from rocm_attn.batch.halves import split_point
from rocm_attn.batch.inputs import HOST_INPUTS
from rocm_attn.batch.mask import random_mask, random_trees, spans_of_blocks
from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.prefixes import PrefixGroup, SharedPrefixes
from rocm_attn.batch.step_batch import Int32Array, StepBatch
from rocm_attn.batch.step_kinds import Extra
from rocm_attn.errors import DeviceFault
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.page_format import PageFormat, Scales
from rocm_attn.kernels.cache.page_rows import PageRows
from rocm_attn.kernels.cache.records import RecordParts
from rocm_attn.machine.target import Target
from rocm_attn.paging.index_spaces import RESERVED_PAGE, Space, num_pages
from rocm_attn.problem import all_see_cells
from rocm_attn.providers.contract import Baked
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.plan import SMALLEST_KV_BUCKET, StepPlan

# Tokens of a span in steps of layers that see no cells.
_BLOCK = 3
# Pages that are filled with random values at a time.
_FILL_PAGES = 512


@dataclass(frozen=True, slots=True)
class ProbeLimits:
    """Limits on the cost of a check.

    longest: tokens of the longest probe request; a length bucket above it is still tested at its shortest length
    total:   approximate number of KV tokens that the probe requests of one draw have together
    """

    longest: int
    total: int

    @classmethod
    def of(cls, target: Target) -> ProbeLimits:
        """Returns the limits of a check on a target."""
        if target.is_gpu:
            # 128k KV tokens of an 8B model are 17 GB over all layers: some 5 ms of reading a run on an MI300X or H200.
            return cls(1 << 17, 1 << 17)
        # Triton's interpreter needs 10 ms for work that takes a CPU 10 us.
        return cls(32, 64) if target.is_interpreted else cls(256, 512)


@dataclass(frozen=True, slots=True)
class GraphCandidate:
    """A graph that is to be made, and the steps that it may be made of.

    runtime: idle, and idle again afterwards; its table then holds the same requests and as many free pages
    plan:    of its steps
    q_len:   int32 [num_seqs], new tokens of the sequences of some step with this plan; a decode step may have fewer
    live:    a step that waits to be run, whose requests may be used if there is no room for others; one without
             sequences if other ranks make their graphs too. None: no step waits, or it may not store
    """

    runtime: AttentionRuntime
    plan: StepPlan
    q_len: Int32Array
    live: StepBatch | None

    @classmethod
    def of(cls, runtime: AttentionRuntime, shape: PaddedShape, q_len: Int32Array) -> GraphCandidate:
        """A graph of a shape for which no step waits. Raises what AttentionRuntime.plan raises."""
        batch = StepBatch(np.arange(1, len(q_len) + 1, dtype=np.int32), q_len, q_len)
        batch = as_steps_of(runtime, shape, batch, torch.Generator(runtime.device))
        return cls(runtime, runtime.plan(batch, shape), q_len, None)


class ProbeRequests:
    """Requests with random content on rows and pages that no request holds; given back when the context ends.

    vocabulary: token ids are below it; live: if its lengths are on the device, those of probes are too
    """

    def __init__(self, runtime: AttentionRuntime, *, vocabulary: int, seed: int, live: StepBatch | None = None) -> None:
        self._runtime = runtime
        self._vocabulary = vocabulary
        self._inputs = HOST_INPUTS if live is None else live.inputs
        self._random = np.random.default_rng(seed)
        self._generator = torch.Generator(runtime.device).manual_seed(seed)
        self._rows: list[int] = []
        self._filled: dict[Space, set[int]] = {table.space: set() for table in runtime.table.spaces}

    def __enter__(self) -> ProbeRequests:
        return self

    def __exit__(self, *exception: object) -> None:
        self.free()

    def free(self) -> None:
        """Frees the rows and pages."""
        while self._rows:
            self._runtime.table.free(self._rows.pop())

    def admit(self, kv_len: Sequence[int], q_len: Sequence[int]) -> StepBatch:
        """Replaces the earlier requests by new ones, and returns their step. Raises NeverFits, FitsLater.

        All share the pages of one base request, up to their own new tokens: the one with the fewest new tokens among
        the longest. So the shared prefix is as long as possible, and its pages are needed once.
        """
        self.free()
        table, page_size = self._runtime.table, self._runtime.table.page_size
        base = max(range(len(kv_len)), key=lambda seq: (kv_len[seq] - q_len[seq], -q_len[seq]))
        rows = [0] * len(kv_len)
        for seq in (base, *(seq for seq in range(len(kv_len)) if seq != base)):
            # Only whole pages that no new token goes to are shared: otherwise two sequences would write to one.
            shared = (kv_len[seq] - q_len[seq]) // page_size * page_size
            rows[seq] = table.admit() if seq == base else table.fork(rows[base], shared)
            self._rows.append(rows[seq])
            table.reserve(rows[seq], kv_len[seq])
        self._fill(rows)
        table.mark_stored(np.array(rows, np.int32), np.array(kv_len, np.int32))
        self._fill_states(rows, [all_tokens - new for all_tokens, new in zip(kv_len, q_len, strict=True)])
        token_ids = self._random.integers(min(1, self._vocabulary - 1), self._vocabulary, sum(q_len))
        arrays = [np.array(values, np.int32) for values in (rows, kv_len, q_len, token_ids)]
        return StepBatch(*arrays, inputs=self._inputs.for_lengths(arrays[2]))

    def draws(self, candidate: GraphCandidate, room: ProbeLengths) -> Iterator[StepBatch]:
        """Yields steps that have the plan: the largest lengths, two ragged draws, the largest lengths again.

        Each step is freed when the next one is requested.
        """
        shape = candidate.plan.shape
        new = [int(tokens) for tokens in candidate.q_len[: room.num_seqs]]
        fewer = new[: (len(new) + 1) // 2] if is_uniform(shape) else new
        cut = split_point(candidate.q_len, shape.child.num_seqs) if shape.num_halves > 1 else 0
        for kv_len, q_len in (
            (room.largest(new), new),
            self._ragged(room, new, cut),
            self._ragged(room, fewer, cut),
            (room.largest(new), new),
        ):
            batch = self.admit(kv_len, q_len)
            if shape.kind.extra is Extra.PREFIXES:
                yield self._with_random_groups(batch)
            else:
                yield as_steps_of(self._runtime, shape, batch, self._generator)

    def _ragged(self, room: ProbeLengths, q_len: Sequence[int], cut: int) -> tuple[list[int], list[int]]:
        """Draws lengths of every order of magnitude, one of them in the bucket's upper part.

        cut: new tokens are shuffled before and after it, so that the halves of a split step keep theirs
        """
        new = [int(tokens) for part in (q_len[:cut], q_len[cut:]) for tokens in self._random.permutation(part)]
        most = room.usual(len(new), 2)
        drawn = np.exp(self._random.uniform(0, np.log(most + 1), len(new))).astype(int)
        kv_len = [max(tokens, min(int(length), most)) for tokens, length in zip(new, drawn, strict=True)]
        at = new.index(min(new))
        upper = max(room.shortest_longest, room.longest // 2, new[at])
        kv_len[at] = int(self._random.integers(upper, room.longest + 1))
        return kv_len, new

    def _with_random_groups(self, batch: StepBatch) -> StepBatch:
        """The step with groups of a few neighbours, which share all pages they can; one in four shares none."""
        page_size = self._runtime.table.page_size
        # Requests of a draw share all pages but those of their new tokens.
        own = (batch.kv_len - 1) // page_size * page_size
        groups, first = [], 0
        while first < batch.num_seqs:
            count = min(int(self._random.geometric(0.3)), batch.num_seqs - first)
            shares = self._random.random() < 0.75
            groups.append(PrefixGroup(count, int(own[first : first + count].min()) if shares else 0))
            first += count
        return replace(batch, prefixes=SharedPrefixes(groups))

    def _fill(self, rows: Sequence[int]) -> None:
        """Writes random K and V, of standard deviation 1, to the rows' pages that have none yet."""
        for space, filled in self._filled.items():
            pages = {int(page) for row in rows for page in self._runtime.table.pages_of(row, space)}
            ids = torch.tensor(sorted(pages - filled - {RESERVED_PAGE}), dtype=torch.long, device=self._runtime.device)
            filled |= pages
            for layer in self._runtime.pool.in_space(space).layers:
                for some in torch.split(ids, _FILL_PAGES):
                    self._fill_pages(layer, some)

    def _fill_pages(self, layer: LayerPages, ids: Tensor) -> None:
        """Writes random numbers to pages of a layer, in their format."""
        form, device = layer.format, self._runtime.device
        if layer.record is not None:
            shape = len(ids), form.page_size, 1, form.head_dim
            rows = torch.randn(shape, generator=self._generator, device=device)
            layer.record.put((ids,), RecordParts.of_rows(rows, form))
            return
        for raw, scale in ((layer.raw_k, layer.k_scale), (layer.raw_v, layer.v_scale)):
            raw.index_copy_(0, ids, self._random_pages(len(ids), raw, scale, form))
            if scale is not None and form.scales is Scales.TOKEN:
                scale.index_fill_(0, ids, 1.0)

    def _fill_states(self, rows: Sequence[int], num_tokens: Sequence[int]) -> None:
        """Gives recurrent layers random states before the rows' new tokens."""
        states = self._runtime.states
        at = give_states(self._runtime, np.array(rows, np.int32), np.array(num_tokens, np.int32))
        for tensor in states.before_kept_tokens():
            shape = len(at), *tensor.shape[1:]
            random = torch.randn(shape, generator=self._generator, device=states.device)
            tensor.index_copy_(0, at, random.to(tensor.dtype))

    def _random_pages(self, count: int, raw: Tensor, scale: Tensor | None, form: PageFormat) -> Tensor:
        """Pages of random numbers, encoded in the format of raw."""
        dtype = torch.float32 if form.encoding.is_fp8 else raw.dtype
        shape = (count, *raw.shape[1:])
        values = torch.randn(shape, generator=self._generator, device=raw.device, dtype=dtype)
        if not form.encoding.is_fp8:
            return values
        if scale is not None and form.scales is not Scales.TOKEN:
            # One scale for all heads, because the dimension of heads depends on the layout.
            values /= scale.amax()
        return values.clamp_(-form.encoding.largest, form.encoding.largest).to(form.encoding.dtype).view(raw.dtype)


@dataclass(frozen=True, slots=True)
class ProbeLengths:
    """Limits of the probe requests of a draw."""

    num_seqs: int
    longest: int
    shortest_longest: int  # otherwise the plan is another
    total: int  # KV tokens

    def usual(self, num_seqs: int, times: int) -> int:
        """A length that num_seqs sequences may have on average, times `times`."""
        return max(1, min(self.longest, times * self.total // num_seqs))

    def largest(self, q_len: Sequence[int]) -> list[int]:
        """The largest lengths for sequences with these new tokens."""
        kv_len = [max(tokens, self.usual(len(q_len), 1)) for tokens in q_len]
        kv_len[q_len.index(min(q_len))] = self.longest
        return kv_len


def has_sound_inputs(candidate: GraphCandidate) -> bool:
    """True if the device finds no fault in the inputs of the live step; else running that step raises the fault.

    Inputs that the host knows are checked, except for states of rows whose track it has lost.
    """
    runtime, live = candidate.runtime, candidate.live
    if live is None or (live.inputs is HOST_INPUTS and runtime.states.is_empty):
        return True
    try:
        with torch.no_grad(), runtime.stage(live, candidate.plan) as step:
            step.fill()
        runtime.faults.report_own()
    except DeviceFault:
        runtime.faults.forget()
        return False
    return True


def room_for(candidate: GraphCandidate, limits: ProbeLimits) -> ProbeLengths | None:
    """The lengths that fit into the free rows and pages; None if no step of the plan fits."""
    runtime, plan, q_len = candidate.runtime, candidate.plan, candidate.q_len
    table, page_size = runtime.table, runtime.table.page_size
    bakes = {b for s in runtime.selections for kernel in s.kernels.values() for b in kernel.entry.bakes}
    bucket, low = plan.key.max_kv_len, 0
    if Baked.MAX_KV_LEN in bakes and bucket > SMALLEST_KV_BUCKET:
        low = (1 << (bucket - 1).bit_length() - 1) + 1  # the shortest length that falls into the bucket
    needed = max(low, int(q_len.max(initial=0)), 1)
    bound = min(bucket, table.max_kv_len, max(limits.longest, needed))
    num_seqs = min(len(q_len), table.most_new_seqs)
    if not is_uniform(plan.shape) and num_seqs < len(q_len):
        return None
    while num_seqs > 0:
        own_pages = num_pages(q_len[:num_seqs], page_size) + 1
        # The longest sequence's pages are those that the others share.
        left = table.fewest_free_pages - int(own_pages.sum() - own_pages.min())
        longest = min(bound, left * page_size)
        if longest >= needed:
            return ProbeLengths(num_seqs, longest, low, limits.total)
        num_seqs = num_seqs // 2 if is_uniform(plan.shape) else 0
    return None


def is_uniform(shape: PaddedShape) -> bool:
    """True if a step of the shape may have any number of sequences, each with the same number of new tokens."""
    return shape.kind.decodes or shape.drafts is not NO_DRAFTS


def typical_new_tokens(runtime: AttentionRuntime, shape: PaddedShape) -> Int32Array | None:
    """Calls typical_q_len() with the limits of the runtime's table at the moment."""
    return new_tokens_of(runtime, shape, runtime.table.most_new_seqs)


def new_tokens_of(runtime: AttentionRuntime, shape: PaddedShape, max_seqs: int) -> Int32Array | None:
    """Calls typical_q_len() for steps of the runtime. Those that bring a prompt may have nothing else."""
    most, max_kv_len = runtime.padding.most_q_len(shape), runtime.table.max_kv_len
    fewest = 1 if shape in runtime.padding.prompt_shapes() else 2
    return typical_q_len(shape, most=most, max_seqs=max_seqs, max_kv_len=max_kv_len, fewest=fewest)


def typical_q_len(
    shape: PaddedShape, *, most: int, max_seqs: int, max_kv_len: int, fewest: int = 2
) -> Int32Array | None:
    """New tokens of the sequences of a step that is padded to shape, or None if there is no such step.

    most:     new tokens that a sequence may have
    max_seqs: sequences that the step may have; fewer than the padded ones if there are few requests
    fewest:   sequences that steps of the shape have at least, if it mixes
    """
    num_seqs = min(shape.num_seqs, max_seqs)
    if num_seqs == 0:
        return None
    if isinstance(shape.drafts, Drafts):
        tokens = shape.drafts.tokens
        return np.full(num_seqs, tokens, np.int32) if tokens <= max_kv_len else None
    if shape.kind.decodes:
        return np.ones(num_seqs, np.int32)
    # Halves are alike, so the cut lies between them.
    halves, num_tokens = shape.num_halves, shape.child.num_tokens
    num_seqs = min(shape.child.num_seqs, max_seqs // halves)
    if not shape.kind.mixes:
        num_seqs = min(num_seqs, num_tokens // 2)
        q_len = evenly(min(num_tokens, num_seqs * most), num_seqs)
    elif most < num_tokens:
        # A verify step: every sequence has its drafts, except one that has none.
        q_len = [most] * (num_seqs - 1) + [1]
    else:
        # A serving step: every sequence decodes, except the one that brings a prompt.
        num_seqs = min(num_seqs, num_tokens - 1)
        q_len = [1] * (num_seqs - 1) + [num_tokens - num_seqs + 1]
    if not q_len or max(q_len) > max_kv_len or (shape.kind.mixes and len(q_len) < fewest):
        return None
    return np.tile(np.array(q_len, np.int32), halves)


def evenly(num_tokens: int, num_seqs: int) -> list[int]:
    """Shares num_tokens tokens out among num_seqs sequences, the larger shares first."""
    if num_seqs == 0:
        return []
    share, rest = divmod(num_tokens, num_seqs)
    return [share + 1] * rest + [share] * (num_seqs - rest)


def as_steps_of(
    runtime: AttentionRuntime, shape: PaddedShape, batch: StepBatch, generator: torch.Generator
) -> StepBatch:
    """Turns a batch with as many new tokens as steps of a shape into such a step.

    It gets a random mask (of trees in halves, of spans if a layer sees no cells), or prefixes that no sequence shares,
    or becomes a round of drafts.
    """
    if isinstance(shape.drafts, Drafts):
        first = batch.token_ids[: batch.num_seqs * shape.drafts.branches]
        return replace(batch, drafts=shape.drafts, token_ids=first)
    if shape.kind.extra is Extra.PREFIXES:
        return replace(batch, prefixes=SharedPrefixes([PrefixGroup(1, 0)] * batch.num_seqs))
    if shape.kind.extra is not Extra.MASK:
        return batch
    if not all_see_cells(each.problem for each in runtime.selections):
        return replace(batch, mask=spans_of_blocks(batch.kv_len, batch.q_len, _BLOCK, runtime.device))
    if shape.num_halves > 1:
        return replace(batch, mask=random_trees(batch.q_len, generator))
    # The mask has cells for new keys alone: all masked steps have room for those.
    return replace(batch, mask=random_mask(batch.kv_len, batch.q_len, generator, keys_before=0))


def give_states(runtime: AttentionRuntime, rows: Int32Array, kv_len: Int32Array) -> Tensor:
    """Gives rows of no step yet a state after kv_len[i] tokens. Returns int64 [n], the slots to be filled.

    It is empty without recurrent layers.
    """
    states = runtime.states
    if states.is_empty:
        return torch.empty(0, dtype=torch.int64, device=states.device)
    slots, headers = runtime.table.states.give(states, rows, kv_len)
    at = torch.from_numpy(slots).to(states.device)
    states.headers.index_copy_(0, at, torch.from_numpy(headers).to(states.device))
    return at


def forget_new_tokens(runtime: AttentionRuntime, batch: StepBatch) -> None:
    """Overwrites K and V of a step's new tokens with values that show if the step does not store its own."""
    for _, layer, page, offset in _new_tokens(runtime, batch):
        encoding = layer.format.encoding
        # A K of 0 has a usual score for any q, so that a V of 10,000 shows among 100,000 others.
        for rows, value in ((layer.keys, 0.0), (layer.values, 1e4)):
            if encoding.is_fp8:  # writes the code of a value that is no larger than the largest of the encoding
                value = torch.tensor(min(value, encoding.largest)).to(encoding.dtype).view(torch.uint8).item()
            new = rows.cells.new_full((len(page), rows.num_heads, rows.dim), value)
            rows.write_tokens(page, _place_in(rows, offset, runtime), new)


@contextmanager
def kept_new_tokens(runtime: AttentionRuntime, batch: StepBatch) -> Iterator[None]:
    """Restores the pages of a step's new tokens on exit, whatever was written to them inside.

    The step has been staged, so its rows no longer share these pages.
    """
    kept = []
    for _, layer, page, _ in _new_tokens(runtime, batch):
        pages = page.new_tensor(sorted(set(page.tolist())))
        kept += [(line, pages, line[pages]) for line in layer.lines]
    try:
        yield
    finally:
        for side, pages, before in kept:
            side.index_copy_(0, pages, before)


def stored_new_tokens(runtime: AttentionRuntime, batch: StepBatch) -> dict[str, Tensor]:
    """Copies of K and V at the places of a step's new tokens, [num_tokens, kv_heads, dim], by side and layer."""
    stored = {}
    for name, layer, page, offset in _new_tokens(runtime, batch):
        for side, rows in (("K", layer.keys), ("V", layer.values)):
            cells = rows.cells.new_empty((len(page), rows.num_heads, rows.dim))
            rows.read_tokens(page, _place_in(rows, offset, runtime), cells)
            # Dtypes of one byte have no comparisons and no bounds, so they are compared as integers.
            stored[f"{side} of {name}"] = cells.view(torch.uint8) if cells.element_size() == 1 else cells
    return stored


def _new_tokens(runtime: AttentionRuntime, batch: StepBatch) -> Iterator[tuple[str, LayerPages, Tensor, Tensor]]:
    """Yields each layer with its name, and the page and place of each new token in it, int64 [num_tokens]."""
    seq = np.repeat(np.arange(batch.num_seqs), batch.q_len)
    kv_len = batch.inputs.known_kv_len(batch.kv_len)
    kv_index = kv_len[seq] - np.cumsum(batch.q_len)[seq] + np.arange(batch.num_tokens)
    page_size = runtime.table.page_size
    for table in runtime.table.spaces:
        pages = table.entries_host[batch.rows[seq], kv_index // page_size]
        page, offset = (torch.from_numpy(x.astype(np.int64)).to(runtime.device) for x in (pages, kv_index % page_size))
        for number, layer in enumerate(runtime.pool.in_space(table.space).layers):
            yield f"layer {number} of the {table.space.value} space", layer, page, offset


def _place_in(rows: PageRows, offset: Tensor, runtime: AttentionRuntime) -> Tensor:
    """The place in a page of a token's row: its own, or the pooled index key that it belongs to."""
    return offset // (runtime.table.page_size // rows.page_size)
