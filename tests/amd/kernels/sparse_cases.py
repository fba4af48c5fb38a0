"""Sparse attention problems with poison around everything that may not be read, and float64 references in plain code.

Index queries, keys and scales are small whole numbers and powers of two: scores are exact in every dtype, and many of
them are equal, so a selection has one right answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from torch import Tensor

from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.page_format import Encoding, PageFormat, PoolKind, Scales
from rocm_attn.kernels.sparse.arguments import (
    IndexArgs,
    Indexing,
    IndexPages,
    LastUnit,
    Pooling,
    SelectedArgs,
    SelectedKeys,
    SparseTokens,
)
from rocm_attn.kernels.sparse.attention import launch_selected_attention
from rocm_attn.kernels.sparse.cuts import select_words, selected_cut
from rocm_attn.kernels.sparse.index_scores import launch_select
from rocm_attn.kernels.tuning.latent_tiles import SelectedTiles
from rocm_attn.kernels.tuning.sparse_tiles import index_tiles, selected_tiles
from tests.amd.kernels.record_cases import POISON, RecordPages
from tests.amd.tolerances import assert_attention_close, assert_lse_close

UNTOUCHED = -77


@dataclass(frozen=True)
class Step:
    """Tokens of sequences over a block table: the last q_len tokens of each sequence's kv_len, then a padded tail."""

    kv_len: Sequence[int]
    q_len: Sequence[int]
    page_size: int = 16
    tail: int = 0
    seed: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(self.q_len) + self.tail

    @cached_property
    def pages_of_seq(self) -> list[list[int]]:
        """Pages 1 .. n in a random order; page 0 and the last one belong to no sequence."""
        generator = torch.Generator().manual_seed(self.seed)
        counts = [-(-length // self.page_size) for length in self.kv_len]
        free = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
        return [[free.pop() for _ in range(count)] for count in counts]

    @property
    def num_pages(self) -> int:
        return sum(len(pages) for pages in self.pages_of_seq) + 2

    @property
    def table(self) -> Tensor:
        """Rows in reverse order of the sequences, one more in front; unused entries point to the last page."""
        width = max([len(pages) for pages in self.pages_of_seq] + [1])
        table = torch.full((len(self.kv_len) + 1, width + 1), self.num_pages - 1, dtype=torch.int32)
        for seq, pages in enumerate(self.pages_of_seq):
            table[self.row(seq), : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        return table

    def row(self, seq: int) -> int:
        return len(self.kv_len) - seq

    @property
    def places(self) -> list[tuple[int, int]]:
        """Sequence and position of each token that belongs to one."""
        return [
            (seq, kv_len - q_len + new)
            for seq, (kv_len, q_len) in enumerate(zip(self.kv_len, self.q_len, strict=True))
            for new in range(q_len)
        ]

    def tokens(self, device: torch.device) -> SparseTokens:
        pad = [0] * self.tail
        return SparseTokens(
            torch.tensor([self.row(seq) for seq, _ in self.places] + pad, dtype=torch.int32, device=device),
            torch.tensor([position for _, position in self.places] + pad, dtype=torch.int32, device=device),
            torch.tensor([len(self.places)], dtype=torch.int32, device=device),
            max_q_len=max(self.q_len),
            max_kv_len=self.table.shape[1] * self.page_size,
        )

    def slots(self, seq: int, page_len: int) -> list[tuple[int, int]]:
        """Returns (page, offset) of each place in whole pages of page_len places."""
        return [(page, offset) for page in self.pages_of_seq[seq] for offset in range(page_len)]


@dataclass(frozen=True)
class IndexCase:
    """An indexer over a step. scales: NONE, LAYER or TOKEN; weighted: true if the heads have weights"""

    step: Step
    indexing: Indexing
    heads: int = 4
    dim: int = 32
    dtype: torch.dtype = torch.float32
    key_dtype: torch.dtype = torch.float32
    scales: Scales = Scales.NONE
    weighted: bool = True


@dataclass(frozen=True)
class IndexProblem:
    """The tensors of an IndexCase, and for each token of a sequence the scores of its candidates, [sets, units]."""

    case: IndexCase
    args: IndexArgs
    selection: SelectedKeys
    scores: list[Tensor]

    @property
    def expected(self) -> list[list[list[int]]]:
        """Returns the units of each token and set."""
        places = self.case.step.places
        return [
            [best_units(list(scores), position + 1, self.case.indexing) for scores in of_token.tolist()]
            for of_token, (_, position) in zip(self.scores, places, strict=True)
        ]

    def assert_selected(self) -> None:
        assert_units(self.selection, self.expected)


def run_select(arch: str, problem: IndexProblem, programs: int) -> None:
    """Runs scores and top-k, in the tiles of the tuning table."""
    args, indexing = problem.args, problem.case.indexing
    heads, dim = args.q.shape[1:]
    key_dtype, coded_q = args.pages.keys.dtype, args.q.dtype.itemsize == 1
    tiles = index_tiles(arch, heads=heads, dim=dim, key_dtype=key_dtype, coded_q=coded_q)
    workspace = torch.empty(select_words(len(args.q), args.tokens.max_kv_len, indexing), device=args.q.device)
    launch_select(args, problem.selection, workspace, indexing=indexing, tiles=tiles, programs=programs)


def candidates_of(scores: list[float], indexing: Indexing) -> set[int]:
    """The units that DeepSeek-V4.1's layer 20 leaves of all these, as its public source says.

    NVIDIA-NeMo/Automodel, deepseek_v41/attention.py: a block has the score of its best unit, and the last block that a
    token sees is always among those with the best scores.
    """
    size = indexing.block_keys
    blocks = [scores[first : first + size] for first in range(0, len(scores), size)]
    best = sorted(range(len(blocks)), key=lambda block: (block != len(blocks) - 1, -max(blocks[block]), block))
    kept = best[: indexing.candidate_blocks]
    return {block * size + unit for block in kept for unit in range(len(blocks[block]))}


@dataclass(frozen=True)
class TwoChoices:
    """A choice of blocks, and a choice by other queries among them, over the same keys."""

    of_blocks: IndexProblem
    later: IndexProblem

    @classmethod
    def build(cls, case: IndexCase, device: torch.device) -> TwoChoices:
        first, later = build_index(case, device), build_index(case, device, queries=1)
        of_blocks = case.indexing.of_blocks
        left = empty_selection(case.step.num_tokens, of_blocks, device)
        first = replace(first, case=replace(case, indexing=of_blocks), selection=left)
        return cls(first, replace(later, args=later.args._replace(among=left)))

    def assert_chosen(self) -> None:
        indexing = self.later.case.indexing
        expected: list[list[list[int]]] = []
        for of_blocks, later in zip(self.of_blocks.scores, self.later.scores, strict=True):
            expected.append([])
            for first, scores in zip(of_blocks.tolist(), later.tolist(), strict=True):
                kept = candidates_of(first, indexing)
                among = [score if unit in kept else math.nan for unit, score in enumerate(scores)]
                expected[-1].append(best_units(among, len(among), indexing))
        assert_units(self.later.selection, expected)


def build_index(case: IndexCase, device: torch.device, *, queries: int = 0) -> IndexProblem:
    """Returns whole numbers for q and keys. Keys of no token, those of incomplete pools, and their scales are NaN.

    queries: other numbers give other q over the same keys
    """
    step, indexing = case.step, case.indexing
    generator = torch.Generator().manual_seed(step.seed + 1)

    def whole(*shape: int, most: int = 2) -> Tensor:
        return torch.randint(-most, most + 1, shape, generator=generator).float()

    q = whole(step.num_tokens, case.heads, case.dim)
    weights = whole(step.num_tokens, case.heads, most=3) / 4
    if queries:
        q = torch.randint(-2, 3, q.shape, generator=torch.Generator().manual_seed(-queries)).float()
    page_keys = step.page_size // indexing.key_tokens
    keys = torch.full((step.num_pages, page_keys, case.dim), float("nan"))
    scale_values = torch.full((step.num_pages, page_keys), float("nan"))
    for seq, kv_len in enumerate(step.kv_len):
        for page, offset in step.slots(seq, page_keys)[: kv_len // indexing.key_tokens]:
            keys[page, offset] = whole(case.dim)
            scale_values[page, offset] = 2.0 ** int(torch.randint(-1, 2, (), generator=generator))
    layer_scale = torch.tensor([0.5])
    scores = []
    for token, (seq, position) in enumerate(step.places):
        places = step.slots(seq, page_keys)[: (position + 1) // indexing.key_tokens]
        seen = torch.stack([keys[place] for place in places]).double() if places else torch.zeros(0, case.dim).double()
        scale_value = torch.tensor([float(scale_values[place]) for place in places], dtype=torch.float64)
        if case.scales is not Scales.TOKEN:
            scale_value = torch.ones(len(places), dtype=torch.float64) * (0.5 if case.scales is Scales.LAYER else 1.0)
        scores.append(plain_scores(q[token].double(), weights[token].double(), seen, scale_value, case))
    args = IndexArgs(
        q.to(case.dtype).to(device),
        weights.to(device) if case.weighted else None,
        IndexPages(
            keys.to(case.key_dtype).to(device),
            {Scales.NONE: None, Scales.LAYER: layer_scale.to(device), Scales.TOKEN: scale_values.to(device)}[
                case.scales
            ],
        ),
        step.table.to(device),
        step.tokens(device),
    )
    return IndexProblem(case, args, empty_selection(step.num_tokens, indexing, device), scores)


def plain_scores(q: Tensor, weights: Tensor, keys: Tensor, scale_value: Tensor, case: IndexCase) -> Tensor:
    """Returns scores of one token's candidates, [sets, units].

    q: [heads, dim], keys: the visible ones, factor: the scale of each
    """
    indexing = case.indexing
    heads_of_set = case.heads // indexing.sets
    units = -(-len(keys) // indexing.unit_keys)
    result = torch.zeros(indexing.sets, units, dtype=torch.float64)
    for index_set in range(indexing.sets):
        total = torch.zeros(len(keys), dtype=torch.float64)
        for head in range(index_set * heads_of_set, (index_set + 1) * heads_of_set):
            score = indexing.scale * (keys @ q[head]) * scale_value
            score = torch.where(score < 0, 0, score) if indexing.rectified else score
            total += score * (weights[head] if case.weighted else 1.0)
        for unit in range(units):
            of_unit = total[unit * indexing.unit_keys : (unit + 1) * indexing.unit_keys]
            result[index_set, unit] = of_unit.max() if indexing.pooling is Pooling.MAX else of_unit.mean()
    return result


def best_units(scores: list[float], visible: int, indexing: Indexing) -> list[int]:
    """Returns the units of a token that sees this many tokens, by Indexing's definition."""
    whole, rest = divmod(visible, indexing.unit_tokens)
    candidates = whole + (1 if rest and indexing.last_unit is LastUnit.SCORED else 0)
    forced = {*range(min(indexing.first, candidates)), *range(max(candidates - indexing.last, 0), candidates)}
    ranked = sorted(
        (unit for unit in range(candidates) if unit in forced or not math.isnan(scores[unit])),
        key=lambda unit: (unit not in forced, 0.0 if unit in forced else -scores[unit], unit),
    )
    chosen = sorted(ranked[: indexing.top])
    return [*chosen, whole] if rest and indexing.last_unit is LastUnit.ADDED else chosen


def empty_selection(num_tokens: int, indexing: Indexing, device: torch.device) -> SelectedKeys:
    units = torch.full((num_tokens, indexing.sets, indexing.width), UNTOUCHED, dtype=torch.int32, device=device)
    counts = torch.full((num_tokens, indexing.sets), UNTOUCHED, dtype=torch.int32, device=device)
    return SelectedKeys(units, counts, indexing.unit_tokens)


def assert_units(selection: SelectedKeys, expected: list[list[list[int]]]) -> None:
    """Checks each token's units and their number, with NO_UNIT after them; padded tokens have none."""
    units, counts = selection.units.tolist(), selection.counts.tolist()
    pads: list[list[list[int]]] = [[[]] * selection.sets] * (len(units) - len(expected))
    for token, sets in enumerate([*expected, *pads]):
        for index_set, chosen in enumerate(sets):
            where = f"token {token}, set {index_set}"
            assert counts[token][index_set] == len(chosen), f"{where}: {counts[token][index_set]} of {len(chosen)}"
            assert units[token][index_set] == chosen + [-1] * (selection.width - len(chosen)), where


@dataclass(frozen=True)
class SelectedCase:
    """Attention over a random selection of a step. latent: pages whose rows hold V in their first elements"""

    step: Step
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (32, 32)
    sets: int = 1
    width: int = 5
    unit_tokens: int = 1
    latent: bool = False
    dtype: torch.dtype = torch.float32
    encoding: Encoding | None = None
    scales: Scales = Scales.NONE
    sinks: bool = False
    dense: bool = False


@dataclass(frozen=True)
class SelectedProblem:
    """The tensors of a SelectedCase. reference and reference_lse are float64, by token; largest: the greatest |V|."""

    case: SelectedCase
    args: SelectedArgs
    scale: float
    reference: Tensor
    reference_lse: Tensor
    largest: float

    def assert_served(self) -> None:
        args = self.args
        assert args.lse is not None
        # The greatest of some thousand normal values is about 4 standard deviations.
        size = max(1.0, self.largest / 4)
        assert_attention_close(args.out.cpu(), self.reference, self.case.dtype, size=size)
        assert_lse_close(args.lse.cpu(), self.reference_lse, self.case.dtype)


def build_selected(case: SelectedCase, device: torch.device) -> SelectedProblem:
    """Builds random rows and entries in any order, some twice, past the context or negative. Unreadable memory is NaN.

    Rows that no entry lists are NaN too. dense: every token selects the last ones that it sees, in order, as many as
    the case is wide
    """
    step, generator = case.step, torch.Generator().manual_seed(case.step.seed + 2)
    (num_heads, num_kv_heads), (head_dim, v_head_dim) = case.heads, case.dims
    q = torch.randn(step.num_tokens, num_heads, head_dim, generator=generator).to(case.dtype)
    units, counts = _random_selection(case, generator)
    pages = _pages(case, units, counts, generator)
    sinks = torch.randn(num_heads, generator=generator) * 2 if case.sinks else None
    scale = head_dim**-0.5
    largest, reference = 0.0, torch.zeros(step.num_tokens, num_heads, v_head_dim, dtype=torch.float64)
    reference_lse = torch.full((step.num_tokens, num_heads), float("-inf"), dtype=torch.float64)

    @cache
    def record(page: int, offset: int) -> Tensor:
        return records_of(case, pages.format).value(pages.lines[0][page].flatten(), offset)

    for token, (seq, position) in enumerate(step.places):
        slots = step.slots(seq, step.page_size)
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            index_set = kv_head if case.sets > 1 else 0
            seen = seen_positions(
                units[token, index_set].tolist()[: int(counts[token, index_set])], case.unit_tokens, position
            )
            if not seen:
                continue
            at = [(*slots[each], kv_head) for each in seen]
            if pages.record is not None:
                rows = [record(page, offset) for page, offset, _ in at]
                k, v = torch.stack(rows), torch.stack(rows)[:, :v_head_dim]
            else:
                k = torch.stack([_value(pages.k, pages.k_scale, place, case.scales) for place in at])
                v = torch.stack([_value(pages.v, pages.v_scale, place, case.scales) for place in at])
            largest = max(largest, float(v.abs().max()))
            logits = k @ q[token, head].double() * scale
            sink = [] if sinks is None else [sinks[head].double()]
            lse = torch.cat([logits, torch.stack(sink)] if sink else [logits]).logsumexp(0)
            reference[token, head] = (logits - lse).exp() @ v
            reference_lse[token, head] = lse
    args = SelectedArgs(
        q=q.to(device),
        pages=moved_pages(pages, device),
        table=step.table.to(device),
        tokens=step.tokens(device),
        selection=SelectedKeys(units.to(device), counts.to(device), case.unit_tokens),
        out=torch.full((step.num_tokens, num_heads, v_head_dim), UNTOUCHED, dtype=case.dtype, device=device),
        lse=torch.full((step.num_tokens, num_heads), UNTOUCHED, dtype=torch.float32, device=device),
        sinks=None if sinks is None else sinks.to(device),
        workspace=torch.empty(0, device=device),
    )
    return SelectedProblem(case, args, scale, reference, reference_lse, largest)


def selected_tiles_of(arch: str, case: SelectedCase) -> SelectedTiles:
    return selected_tiles(
        arch,
        gqa_ratio=case.heads[0] // case.heads[1],
        head_dim=case.dims[0],
        v_head_dim=case.dims[1],
        dtype=case.dtype,
        is_coded=case.encoding is not None and case.encoding.is_fp8,
        is_record=case.scales in (Scales.GROUP, Scales.FOOTER),
    )


def run_attention(arch: str, problem: SelectedProblem, programs: int, *, least_parts: int = 1) -> None:
    """Attends with as many programs, in the tiles of the tuning table, and checks every token."""
    tiles = selected_tiles_of(arch, problem.case)
    args = with_parts(problem.args, tiles, programs, least_parts)
    launch_selected_attention(args, scale=problem.scale, tiles=tiles, programs=programs)
    problem.assert_served()


def with_parts(args: SelectedArgs, tiles: SelectedTiles, programs: int, least_parts: int = 1) -> SelectedArgs:
    """The step with scratch memory of NaN. Asserts that it has this many parts at least."""
    keys = args.selection.width * args.selection.unit_tokens
    cut = selected_cut(len(args.q), keys, heads=args.heads, tiles=tiles, programs=programs)
    assert cut.parts >= least_parts
    words = cut.words(len(args.q), args.out.shape[2])
    return args._replace(workspace=torch.full((words,), float("nan"), device=args.q.device))


def records_of(case: SelectedCase, form: PageFormat) -> RecordPages:
    """Returns the records of a case, by their definition."""
    return RecordPages(case.dims, form.encoding, form.page_size, form.scales)


def moved_pages(pages: LayerPages, device: torch.device) -> LayerPages:
    """Returns a copy of pages on a device, with the memory between a page and the next."""
    form = pages.format
    if form.kind is PoolKind.LATENT:
        scale = None if pages.k_scale is None else pages.k_scale.to(device)
        lines = pages.lines[0].flatten(1).view(torch.uint8)
        memory = torch.full((len(lines), form.line * form.encoding.dtype.itemsize), POISON, dtype=torch.uint8)
        memory[:, : lines.shape[1]] = lines
        return LayerPages.latent(memory.to(device).view(form.encoding.dtype), form, scale)
    scales = (None if scale is None else scale.to(device) for scale in (pages.k_scale, pages.v_scale))
    return LayerPages(pages.k.to(device), pages.v.to(device), form, *scales)


def seen_positions(units: list[int], unit_tokens: int, position: int) -> list[int]:
    """Returns places in the KV that a token at a position attends to, as often as they are listed."""
    listed = [unit * unit_tokens + offset for unit in units for offset in range(unit_tokens)]
    return [each for each in listed if 0 <= each <= position]


def _random_selection(case: SelectedCase, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    step = case.step
    units = torch.full((step.num_tokens, case.sets, case.width), -1, dtype=torch.int32)
    counts = torch.zeros(step.num_tokens, case.sets, dtype=torch.int32)
    for token, (_, position) in enumerate(step.places):
        in_context = position // case.unit_tokens + 1
        for index_set in range(case.sets):
            if case.dense:
                count = min(in_context, case.width)
                units[token, index_set, :count] = torch.arange(in_context - count, in_context)
            else:
                count = int(torch.randint(0, case.width + 1, (), generator=generator))
                low, high = (-1, in_context + 2)
                units[token, index_set, :count] = torch.randint(low, high, (count,), generator=generator).int()
            counts[token, index_set] = count
    return units, counts


def _pages(case: SelectedCase, units: Tensor, counts: Tensor, generator: torch.Generator) -> LayerPages:
    """Returns pages in the case's encoding; NaN where no token of the step sees a row."""
    step, (head_dim, v_head_dim) = case.step, case.dims
    num_kv_heads = case.heads[1]
    encoding = case.encoding or Encoding.of(case.dtype)
    shape = (step.num_pages, step.page_size, num_kv_heads)
    read = torch.zeros(shape, dtype=torch.bool)
    for token, (seq, position) in enumerate(step.places):
        slots = step.slots(seq, step.page_size)
        for kv_head in range(num_kv_heads):
            index_set = kv_head if case.sets > 1 else 0
            listed = units[token, index_set].tolist()[: int(counts[token, index_set])]
            for each in seen_positions(listed, case.unit_tokens, position):
                page, offset = slots[each]
                read[page, offset, kv_head] = True

    def side(dim: int) -> Tensor:
        rows = torch.randn(*shape, dim, generator=generator)
        return rows.masked_fill(~read[..., None], float("nan")).to(encoding.dtype)

    def scale_values() -> Tensor | None:
        if case.scales is Scales.TOKEN:
            return (
                torch.where(read, torch.rand(shape, generator=generator) + 0.5, float("nan"))
                .transpose(1, 2)
                .contiguous()
            )
        return {
            Scales.NONE: None,
            Scales.LAYER: torch.rand(1, generator=generator) + 0.5,
            Scales.HEAD: torch.rand(num_kv_heads, generator=generator) + 0.5,
        }[case.scales]

    kind = PoolKind.LATENT if case.latent else PoolKind.SPLIT
    form = PageFormat(encoding, kind, step.page_size, num_kv_heads, head_dim, v_head_dim, case.scales)
    if form.record is not None:
        memory = records_of(case, form).random(read[..., 0], generator, any_scale=case.dtype == torch.float32)
        return LayerPages.latent(memory.view(encoding.dtype), form)
    k, k_scale = side(head_dim), scale_values()
    if case.latent:
        return LayerPages(k, k[..., :v_head_dim], form, k_scale, k_scale)
    return LayerPages(k, side(v_head_dim), form, k_scale, scale_values())


def _value(rows: Tensor, scale_values: Tensor | None, at: tuple[int, int, int], scales: Scales) -> Tensor:
    """Returns a row as float64: its codes times its scale. at: page, offset, KV head"""
    row = rows[at].double()
    if scale_values is None:
        return row
    index = {Scales.LAYER: (0,), Scales.HEAD: at[2:], Scales.TOKEN: (at[0], at[2], at[1])}[scales]
    return row * scale_values[index].double()
