"""Paged attention problems with poison around everything that may not be read, and a float64 reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rocm_attn.kernels.attention import decode
from rocm_attn.kernels.attention.arguments import AttendArgs, Queries
from rocm_attn.kernels.attention.cuts import WHOLE_ROWS, DecodeCut, ExtendCut, RowSharing
from rocm_attn.kernels.attention.decode import launch_paged_decode
from rocm_attn.kernels.attention.decode_schedule import launch_decode_schedule
from rocm_attn.kernels.attention.extend import launch_paged_extend
from rocm_attn.kernels.attention.extend_schedule import launch_extend_schedule
from rocm_attn.kernels.attention.scores import UNLIMITED_WINDOW, Scores, Visibility
from rocm_attn.kernels.attention.visible_keys import PackedMask, VisibleKeys
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.page_format import Encoding, PoolKind, Scales
from rocm_attn.kernels.metadata.step_tensors import ALL_KEYS
from rocm_attn.kernels.refs.attention import paged_decode, paged_extend
from rocm_attn.kernels.tuning.decode_tiles import decode_tiles
from rocm_attn.kernels.tuning.extend_tiles import extend_tiles
from rocm_attn.kernels.tuning.tiles import CodeKind, DecodeTiles, ExtendTiles
from rocm_attn.machine.target import detect_target
from tests.amd.tolerances import assert_attention_close, assert_lse_close

# The initial value of every tensor that a kernel must overwrite or leave unchanged.
UNTOUCHED = -77.0
# A word of memory that nothing has filled.
GARBAGE = 0x7F7F7F7F
# The place of a padded token: a kernel that reads it is far from every key.
NO_KEY = 1 << 30
# A function that places scratch memory before a launch.
Put = Callable[[Tensor], Tensor]


def as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def dtypes() -> list[torch.dtype]:
    """Returns the dtypes that can be tested here: Triton's interpreter computes bf16 wrongly without an error."""
    gpu_only = [torch.bfloat16] if torch.cuda.is_available() else []
    return [torch.float32, torch.float16, *gpu_only]


def in_each_way(name: str, cases: Mapping[str, object], runs: Sequence[Callable[..., None]]) -> pytest.MarkDecorator:
    """Parametrizes run, name and dtype: every case in every dtype, by each kernel and by their twin, the last of runs.

    Every run has one of a case's dtypes, by the twin and by one of the kernels; the night has the others. The choice
    changes from case to case.
    """
    number_of_kernels = len(runs) - 1

    def is_nights(at: int, number: int, place: int) -> bool:
        is_its_run = place in (number_of_kernels, at // len(dtypes()) % number_of_kernels)
        return at % len(dtypes()) != number or not is_its_run

    return pytest.mark.parametrize(
        ("run", name, "dtype"),
        [
            pytest.param(
                run,
                case,
                dtype,
                id=f"{key}-{dtype}-{run.__name__}",
                marks=[pytest.mark.nightly] * is_nights(at, number, place),
            )
            for at, (key, case) in enumerate(cases.items())
            for number, dtype in enumerate(dtypes())
            for place, run in enumerate(runs)
        ],
    )


@dataclass(frozen=True, slots=True)
class Case:
    """The shape of a step.

    heads:           query heads, KV heads
    dims:            head_dim, v_head_dim
    kv_len, q_len:   one number per sequence
    tail:            padded tokens after the last sequence's
    spread:          true if q, out and the pages are views with gaps, in an order of dimensions of their own
    window_left, window_right, soft_cap: see Scores
    sinks, slopes:   true if the heads have them
    chunk, spans:    see Visibility; a span is a sequence, its first key and its end. Tokens see them by ranges
    spans_pass:      see Visibility
    ranged:          true if each token sees a random range of keys: few, all, or none
    masked:          true if a random packed mask gives each token's position and visible keys: few, all, or none
    mask_keys:       keys before a sequence's new ones that the mask covers, at most; all tokens see those before them
    first_page:      pages of each sequence's row before its keys; nothing: none
    latent:          true if V is the first part of K
    steep:           a factor of all scores: with large ones, maxima rise by much from block to block
    kv, scales:      the encoding of 8-bit pages, and the granularity of scales; None: pages are in dtype
    """

    kv_len: Sequence[int]
    q_len: Sequence[int]
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (64, 64)
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    tail: int = 0
    spread: bool = False
    window_left: int = UNLIMITED_WINDOW
    window_right: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    slopes: bool = False
    chunk: int = 0
    spans: Sequence[tuple[int, int, int]] = ()
    spans_pass: bool = False
    ranged: bool = False
    masked: bool = False
    mask_keys: int = ALL_KEYS
    first_page: Sequence[int] = ()
    kv: Encoding | None = None
    scales: Scales = Scales.NONE
    latent: bool = False
    steep: float = 1.0

    @property
    def codes(self) -> CodeKind:
        """Codes by which tiles are chosen."""
        if self.kv is None:
            return CodeKind.NONE
        return CodeKind.BY_TOKEN if self.scales is Scales.TOKEN else CodeKind.BY_ROW

    @property
    def has_ranges(self) -> bool:
        """True if tokens see ranges of keys that a kernel is given."""
        return self.ranged or self.chunk > 0 or len(self.spans) > 0

    def decodes(self) -> Case:
        """The same sequences with one new token each."""
        return replace(self, q_len=[1] * len(self.kv_len))


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors of a step; see AttendArgs. reference and reference_lse are float64, by token."""

    case: Case
    scores: Scores
    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    table: Tensor
    row_of_seq: Tensor
    kv_len: Tensor
    q_len: Tensor
    q_indptr: Tensor
    out: Tensor
    lse: Tensor
    sinks: Tensor | None
    slopes: Tensor | None
    mask: VisibleKeys | None
    first_page: Tensor | None
    reference: Tensor
    reference_lse: Tensor

    @property
    def num_seqs(self) -> int:
        return len(self.case.kv_len)

    @property
    def arch(self) -> str:
        """This device's name in tuning tables."""
        return detect_target(self.q.device).arch

    @property
    def gqa_ratio(self) -> int:
        return self.case.heads[0] // self.case.heads[1]

    @property
    def queries(self) -> Queries:
        """The step's sequences; they may read every entry of the table."""
        return Queries(
            self.row_of_seq,
            self.kv_len,
            self.q_indptr,
            num_tokens=self.q.shape[0],
            max_q_len=max([*self.case.q_len, 0]),
            max_kv_len=self.table.shape[1] * self.case.page_size,
            first_page=self.first_page,
        )

    @property
    def pages(self) -> LayerPages:
        """K and V pages, with their scales."""
        kind = PoolKind.LATENT if self.case.latent else PoolKind.SPLIT
        plain = LayerPages.plain(self.k_pages, self.v_pages, kind=kind)
        return LayerPages(plain.k, plain.v, replace(plain.format, scales=self.case.scales), self.k_scale, self.v_scale)

    def args(self, schedule: Tensor | None = None, workspace: Tensor | None = None) -> AttendArgs:
        """Returns the arguments of a launcher, or of a twin, which reads neither schedule nor workspace."""
        return AttendArgs(
            q=self.q,
            pages=self.pages,
            table=self.table,
            queries=self.queries,
            out=self.out,
            lse=self.lse,
            sinks=self.sinks,
            slopes=self.slopes,
            schedule=self.q.new_empty(0, dtype=torch.int32) if schedule is None else schedule,
            workspace=self.q.new_empty(0, dtype=torch.float32) if workspace is None else workspace,
        )

    def decode_args(self, cut: DecodeCut, words: int, put: Put = as_it_is) -> AttendArgs:
        """Returns the arguments of decode, over a schedule made in garbage. words: of scratch memory, which is NaN"""
        schedule = put(garbage(cut.words(self.num_seqs), self.q.device))
        launch_decode_schedule(self.queries, schedule, cut)
        return self.args(schedule, put(_nan(words, dtype=torch.float32).to(self.q.device)))

    def extend_args(self, cut: ExtendCut, words: int = 0, put: Put = as_it_is) -> AttendArgs:
        """Returns the same of extend."""
        schedule = put(garbage(cut.words(self.q.shape[0], self.num_seqs), self.q.device))
        launch_extend_schedule(self.queries, schedule, cut)
        return self.args(schedule, put(_nan(words, dtype=torch.float32).to(self.q.device)) if words else None)


# Windows, soft caps, slopes, sinks and attention to later keys; rows of K and V of different lengths.
FEATURES: Mapping[str, dict[str, Any]] = {
    "window_0": {"window_left": 0},
    "window_1": {"window_left": 1},
    "window_a_tile_less_one": {"window_left": 15},
    "window_a_tile": {"window_left": 16},
    "window_longer_than_any": {"window_left": 500},
    "cap": {"soft_cap": 0.7},
    "slopes": {"slopes": True},
    "sinks": {"sinks": True},
    "gptoss": {"window_left": 20, "sinks": True, "heads": (16, 2)},
    "gemma2": {"window_left": 18, "soft_cap": 0.5},
    "all": {"window_left": 9, "soft_cap": 1.5, "slopes": True, "sinks": True, "heads": (6, 2)},
    "padded_dims": {"window_left": 9, "sinks": True, "dims": (40, 24)},
    "narrow_v": {"dims": (64, 32)},
    "wide_v": {"dims": (16, 64)},
    "not_causal": {"window_right": UNLIMITED_WINDOW},
    "not_causal_all": {"window_right": UNLIMITED_WINDOW, "soft_cap": 1.5, "slopes": True, "sinks": True},
}


def with_features(case: Case) -> dict[str, Case]:
    return {name: replace(case, **feature) for name, feature in FEATURES.items()}


# A kernel, or its twin, over the tensors of a step.
Run = Callable[..., object]


def build(case: Case, device: torch.device, seed: int = 0) -> Tensors:
    """Returns random q, K and V. Pages of no sequence, page tails, gaps, and K and V that no token sees are NaN.

    So is q of padded tokens, and of sequences without keys, as those that pad a decode step.
    """
    generator = torch.Generator().manual_seed(seed)
    num_q_heads, (head_dim, v_head_dim) = case.heads[0], case.dims
    page_size, num_seqs = case.page_size, len(case.kv_len)
    pages_of_seq = [-(-length // page_size) for length in case.kv_len]
    num_pages = sum(pages_of_seq) + 4
    num_tokens = sum(case.q_len) + case.tail
    scores = Scores(
        head_dim**-0.5 * case.steep, Visibility(case.window_left, case.window_right, case.chunk), case.soft_cap
    )
    sinks = torch.randn(num_q_heads, generator=generator) * 2 if case.sinks else None
    slopes = torch.rand(num_q_heads, generator=generator) if case.slopes else None

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(case.dtype)

    q = random(num_tokens, num_q_heads, head_dim)
    k_side, v_side = (_Side.of(case, num_pages, dim, generator) for dim in case.dims)
    if case.latent:
        v_side = replace(k_side, held=k_side.held[..., :v_head_dim])
    # Table entries after a sequence's pages, and rows of no sequence, point to a page that is NaN.
    first_page = case.first_page or [0] * num_seqs
    width = max([before + pages for before, pages in zip(first_page, pages_of_seq, strict=True)] + [1]) + 1
    table = torch.full((num_seqs + 2, width), num_pages - 1, dtype=torch.int32)
    row_of_seq = torch.randperm(num_seqs + 2, generator=generator)[:num_seqs].int()
    free = (torch.randperm(num_pages - 2, generator=generator) + 1).tolist()
    reference = torch.zeros(num_tokens, num_q_heads, v_head_dim, dtype=torch.float64)
    reference_lse = torch.full((num_tokens, num_q_heads), float("-inf"), dtype=torch.float64)
    token = 0
    drawn: list[bool] = []
    ranges: list[tuple[int, int]] = []
    for seq, (length, new) in enumerate(zip(case.kv_len, case.q_len, strict=True)):
        k = k_side.drawn(length, generator)
        v = k.first_columns(v_head_dim) if case.latent else v_side.drawn(length, generator)
        seen: list[Sequence[int]]
        if case.masked:
            start = max(length - new - case.mask_keys, 0)
            covered = [[start + key for key in _random_keys(length - start, generator)] for _ in range(new)]
            drawn += [key in keys for keys in covered for key in range(start, length)]
            shown = [[*range(start), *keys] for keys in covered]
            # Starts before the window of the first new token, like windows of drafts.
            first = length - new - max(case.window_left, 0) - 9
            given = torch.randint(first, length, (new,), generator=generator).tolist() if new else []
            ranges += [(start, length) for start in given]
            seen = [
                [key for key in keys if case.window_left == UNLIMITED_WINDOW or key >= start]
                for start, keys in zip(given, shown, strict=True)
            ]
        elif case.has_ranges:
            drawn_ranges = [
                _random_range(case, length, kv_index, generator)
                if case.ranged
                else _range_of(case, seq, length, kv_index)
                for kv_index in range(length - new, length)
            ]
            ranges += drawn_ranges
            seen = [range(*each) for each in drawn_ranges]
        else:
            seen = [_visible(case, length, kv_index) for kv_index in range(length - new, length)]
        if not length:
            q[token : token + new] = float("nan")
        unseen = set(range(length)).difference(*seen)
        for page_no in range(pages_of_seq[seq]):
            page, first = free.pop(), page_no * page_size
            table[row_of_seq[seq], first_page[seq] + page_no] = page
            in_page = min(page_size, length - first)
            k.place(first, k_side, page, in_page)
            v.place(first, v_side, page, in_page)
        for key in unseen:
            page = int(table[row_of_seq[seq], first_page[seq] + key // page_size])
            k_side.poison(page, key % page_size)
            v_side.poison(page, key % page_size)
        for kv_index, keys in zip(range(length - new, length), map(list, seen), strict=True):
            if keys:
                distance = torch.tensor(keys) - kv_index
                reference[token], reference_lse[token] = _attend_one(
                    q[token], k.values[keys], v.values[keys], distance, scores, sinks, slopes
                )
            token += 1

    q[token:] = float("nan")
    out = torch.full((num_tokens, num_q_heads, v_head_dim), UNTOUCHED, dtype=case.dtype)
    lse = torch.full((num_tokens, num_q_heads), UNTOUCHED)
    q_len = torch.tensor(case.q_len, dtype=torch.int32)
    spread = _spread if case.spread else lambda values, order: values
    k_pages = k_side.pages(device, (2, 0, 1, 3))
    v_pages = k_pages[..., :v_head_dim] if case.latent else v_side.pages(device, (1, 0, 2, 3))
    return Tensors(
        case=case,
        scores=scores,
        q=spread(q.to(device), (1, 0, 2)),
        k_pages=k_pages,
        v_pages=v_pages,
        k_scale=None if k_side.scale is None else k_side.scale.to(device),
        v_scale=None if v_side.scale is None else v_side.scale.to(device),
        table=table.to(device),
        row_of_seq=row_of_seq.to(device),
        kv_len=torch.tensor(case.kv_len, dtype=torch.int32).to(device),
        q_len=q_len.to(device),
        q_indptr=torch.cat([torch.zeros(1), q_len.cumsum(0)]).int().to(device),
        out=spread(out.to(device), (1, 0, 2)),
        lse=spread(lse.to(device), (1, 0)),
        sinks=None if sinks is None else sinks.to(device),
        slopes=None if slopes is None else slopes.to(device),
        mask=_visible_keys(case, ranges, drawn, device),
        first_page=torch.tensor(case.first_page, dtype=torch.int32).to(device) if case.first_page else None,
        reference=reference.to(device),
        reference_lse=reference_lse.to(device),
    )


@dataclass(frozen=True, slots=True)
class _Drawn:
    """K or V of a sequence: the stored values, the scales of its tokens, and the decoded values in float64.

    held:   [tokens, kv_heads, dim]
    scale_value: [tokens, kv_heads]
    """

    held: Tensor
    scale_value: Tensor
    values: Tensor

    def first_columns(self, dim: int) -> _Drawn:
        """Returns the first elements of each row, where latent rows hold V."""
        return replace(self, held=self.held[..., :dim], values=self.values[..., :dim])

    def place(self, first: int, side: _Side, page: int, tokens: int) -> None:
        """Puts tokens [first, first + tokens) at the beginning of a page."""
        side.held[page, :tokens] = self.held[first : first + tokens]
        if side.case.scales is Scales.TOKEN and side.scale is not None:
            side.scale[page, :, :tokens] = self.scale_value[first : first + tokens].T


@dataclass(frozen=True, slots=True)
class _Side:
    """K pages or V pages, NaN at first; codes as uint8.

    scale: their scales, or None
    nan:   the value that is NaN in them
    """

    case: Case
    held: Tensor
    scale: Tensor | None
    nan: float

    @classmethod
    def of(cls, case: Case, num_pages: int, dim: int, generator: torch.Generator) -> _Side:
        shape, heads = (num_pages, case.page_size, case.heads[1]), case.heads[1]
        if case.kv is None:
            return cls(case, _nan(*shape, dim, dtype=case.dtype), None, float("nan"))
        nan = 0x80 if case.kv is Encoding.E4M3FNUZ else 0x7F
        scale = {
            Scales.NONE: None,
            Scales.LAYER: _scale_values(1, generator=generator),
            Scales.HEAD: _scale_values(heads, generator=generator),
            Scales.TOKEN: _nan(num_pages, heads, case.page_size, dtype=torch.float32),
        }[case.scales]
        return cls(case, torch.full((*shape, dim), nan, dtype=torch.uint8), scale, nan)

    def drawn(self, tokens: int, generator: torch.Generator) -> _Drawn:
        case, heads = self.case, self.case.heads[1]
        values = torch.randn(tokens, heads, self.held.shape[3], generator=generator)
        scale_value = torch.ones(tokens, heads)
        if case.kv is None:
            held = values.to(case.dtype)
            return _Drawn(held, scale_value, held.double())
        if case.scales is Scales.TOKEN:
            scale_value = _scale_values(tokens, heads, generator=generator)
        elif self.scale is not None:
            scale_value = scale_value * self.scale
        codes = (values / scale_value[..., None]).clamp(-case.kv.largest, case.kv.largest).to(case.kv.dtype)
        return _Drawn(codes.view(torch.uint8), scale_value, codes.double() * scale_value[..., None].double())

    def poison(self, page: int, offset: int) -> None:
        """Makes a token NaN, and its scales."""
        self.held[page, offset] = self.nan
        if self.case.scales is Scales.TOKEN and self.scale is not None:
            self.scale[page, :, offset] = float("nan")

    def pages(self, device: torch.device, order: tuple[int, ...]) -> Tensor:
        """Returns the pages in a launcher's form. If the case is spread, they have gaps and another dimension order."""
        held = self.held.to(device)
        held = _spread(held, order, self.nan) if self.case.spread else held
        return held if self.case.kv is None else held.view(self.case.kv.dtype)


def _scale_values(*shape: int, generator: torch.Generator) -> Tensor:
    """Returns scales with which a standard deviation of 1 fills most of an encoding."""
    return 0.01 + 0.03 * torch.rand(shape, generator=generator)


def _visible(case: Case, length: int, kv_index: int) -> range:
    """Returns the keys that the token at kv_index sees."""
    first = 0 if case.window_left == UNLIMITED_WINDOW else max(0, kv_index - case.window_left)
    last = length - 1 if case.window_right == UNLIMITED_WINDOW else min(length - 1, kv_index + case.window_right)
    return range(first, last + 1)


def _random_range(case: Case, length: int, kv_index: int, generator: torch.Generator) -> tuple[int, int]:
    """Returns the range of keys of a token: of the window, if there is one, and up to its place if it is causal."""
    most = kv_index + 1 if case.window_right == 0 else length
    least = 0 if case.window_left == UNLIMITED_WINDOW else max(0, kv_index - case.window_left)
    end = [0, most, most, int(torch.randint(least, most + 1, (), generator=generator))][
        int(torch.randint(4, (), generator=generator))
    ]
    # Without a window the first keys are not read; half of the chunks of a window begin where a key block does.
    first = least + int(torch.randint(max(most - least, 1), (), generator=generator))
    first = first if torch.rand((), generator=generator) < 0.5 else max(least, most // 64 * 64)
    return (min(first, end) if case.window_left != UNLIMITED_WINDOW else 0), end


def _range_of(case: Case, seq: int, length: int, kv_index: int) -> tuple[int, int]:
    """Returns the range of keys of a token, by its window, its chunk and the spans of its sequence."""
    first = 0 if case.window_left == UNLIMITED_WINDOW else max(kv_index - case.window_left, 0)
    if case.chunk:
        first = max(first, kv_index // case.chunk * case.chunk)
    end = kv_index + 1 if case.window_right == 0 else length
    for of, begin, last in case.spans:
        if of == seq and begin <= kv_index < last:
            end = max(end, last)
            first = min(first, begin) if case.spans_pass else first
    return first, end


def _random_keys(length: int, generator: torch.Generator) -> list[int]:
    """Returns the keys that a token of a masked step sees: none, some of the first half only, some of all, or all."""
    share, end = [(0.0, 0), (0.3, length // 2), (0.5, length), (1.0, length)][
        int(torch.randint(4, (), generator=generator))
    ]
    keys: list[int] = (torch.rand(end, generator=generator) < share).nonzero().flatten().tolist()
    return keys


def _visible_keys(
    case: Case, ranges: Sequence[tuple[int, int]], cells: Sequence[bool], device: torch.device
) -> VisibleKeys | None:
    """Returns what a case gives a launcher. Tokens of no sequence see nothing."""
    if not case.masked and not case.has_ranges:
        return None
    first, end = torch.tensor([*ranges, *[(NO_KEY, 0)] * case.tail], dtype=torch.int32).view(-1, 2).T.contiguous()
    return _packed(cells, first, end, case, device) if case.masked else VisibleKeys(first.to(device), end.to(device))


def _packed(cells: Sequence[bool], first: Tensor, end: Tensor, case: Case, device: torch.device) -> PackedMask:
    """Returns ranges, and cells of all sequences as words.

    Bits after the last are set: a kernel that reads them sees too much.
    """
    bits = [*cells, *[True] * (-len(cells) % 32)]
    words = [sum(bit << place for place, bit in enumerate(bits[at : at + 32])) for at in range(0, len(bits), 32)]
    start = [max(length - new - case.mask_keys, 0) for length, new in zip(case.kv_len, case.q_len, strict=True)]
    sizes = [(end - first) * new for first, end, new in zip(start, case.kv_len, case.q_len, strict=True)]
    return PackedMask(
        first.to(device),
        end.to(device),
        torch.tensor([word - (word >> 31 << 32) for word in words], dtype=torch.int32).to(device),
        torch.tensor([sum(sizes[:seq]) for seq in range(len(sizes) + 1)]).to(device),
        torch.tensor(start, dtype=torch.int32).to(device),
    )


def _attend_one(
    q: Tensor, k: Tensor, v: Tensor, distance: Tensor, scores: Scores, sinks: Tensor | None, slopes: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attends for a token: q [q_heads, dim], k and v [visible, kv_heads, dim], distance [visible] to keys; float64."""
    ratio = q.shape[0] // k.shape[1]
    k, v = (x.double().repeat_interleave(ratio, 1) for x in (k, v))
    logits = torch.einsum("hd,khd->hk", q.double() * scores.scale, k)
    if scores.soft_cap:
        logits = scores.soft_cap * torch.tanh(logits / scores.soft_cap)
    if slopes is not None:
        logits = logits + slopes.double()[:, None] * distance
    if sinks is not None:
        logits = torch.cat([logits, sinks.double()[:, None]], 1)
        v = torch.cat([v, torch.zeros_like(v[:1])])
    return torch.einsum("hk,khd->hd", logits.softmax(-1), v), logits.logsumexp(-1)


def _nan(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def _spread(values: Tensor, order: tuple[int, ...], nan: float = float("nan")) -> Tensor:
    """Returns values in memory of another order of dimensions, with NaN after each row of the last."""
    ordered = values.permute(order)
    rows, columns = ordered.shape[:-1], ordered.shape[-1]
    memory = torch.full((*rows, columns + 8), nan, dtype=values.dtype, device=values.device)[..., :columns]
    return memory.copy_(ordered).permute([order.index(i) for i in range(len(order))])


def tiles_of(arch: str, case: Case) -> tuple[DecodeTiles, ExtendTiles]:
    shape: dict[str, Any] = {
        "gqa_ratio": case.heads[0] // case.heads[1],
        "num_kv_heads": case.heads[1],
        "head_dim": case.dims[0],
        "v_head_dim": case.dims[1],
    }
    shape |= {"dtype": case.dtype, "codes": case.codes}
    return decode_tiles(arch, **shape), extend_tiles(arch, **shape)


def run_decode(
    tensors: Tensors,
    *,
    num_programs: int = 5,
    tiles: DecodeTiles | None = None,
    put: Put = as_it_is,
) -> None:
    """Runs schedule, decode and merge, with scratch memory that is NaN or garbage before."""
    case = tensors.case
    tiles = tiles or tiles_of(tensors.arch, case)[0]
    cut = DecodeCut.of(tiles, num_kv_heads=case.heads[1], programs=num_programs, window_left=case.window_left)
    words = cut.partials_words(gqa_ratio=tensors.gqa_ratio, v_head_dim=case.dims[1], tiles=tiles)
    launch_paged_decode(tensors.decode_args(cut, words, put), scores=tensors.scores, cut=cut, tiles=tiles)


def run_shared_decode(tensors: Tensors, *, num_programs: int = 5, tiles: DecodeTiles | None = None) -> None:
    """Like run_decode, but rows of windows are shared out and merged too, however short they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "has_whole_rows", lambda *sizes, **more: False)
        run_decode(tensors, num_programs=num_programs, tiles=tiles)


def run_decode_twin(tensors: Tensors) -> None:
    paged_decode(tensors.args(), scores=tensors.scores)


def run_extend(
    tensors: Tensors,
    *,
    min_q_len: int = 1,
    tiles: ExtendTiles | None = None,
    sharing: RowSharing = WHOLE_ROWS,
    put: Put = as_it_is,
) -> None:
    """Runs schedule, extend and merge, with scratch memory that is NaN or garbage before.

    sharing: rows, causality and window are replaced by those of the tensors
    """
    case = tensors.case
    if tiles is None:
        tiles = tiles_of(tensors.arch, case)[1]
        if isinstance(tensors.mask, PackedMask):
            tiles = tiles.of_masked_steps(tensors.gqa_ratio, case.codes)
    cut = extend_cut(tensors, tiles, sharing, min_q_len=min_q_len)
    args = tensors.extend_args(cut, cut.partials_words(query_rows=tiles.query_rows, v_head_dim=case.dims[1]), put)
    launch_paged_extend(args, scores=tensors.scores, cut=cut, tiles=tiles, mask=tensors.mask)


def extend_cut(tensors: Tensors, tiles: ExtendTiles, sharing: RowSharing, *, min_q_len: int = 1) -> ExtendCut:
    """Returns the cut of a step's layer. sharing: rows, causality and window are replaced by those of the tensors"""
    causal = tensors.scores.visibility.causal and not isinstance(tensors.mask, PackedMask)
    cut = ExtendCut.of(tiles, gqa_ratio=tensors.gqa_ratio, causal=causal, min_q_len=min_q_len)
    if not sharing.programs:
        return cut
    of_layer = sharing._replace(
        rows=tensors.case.heads[1] // tiles.heads_per_row * tiles.head_blocks(tensors.gqa_ratio),
        causal=causal,
        window_left=tensors.case.window_left,
    )
    return replace(cut, sharing=of_layer)


# Every row of a step is shared out, in parts of a few key blocks.
ALL_SHARED = RowSharing(programs=5, row_keys=24, split_keys=-(1 << 20), gain=0, least_keys=1)


def run_shared_extend(tensors: Tensors, *, tiles: ExtendTiles | None = None) -> None:
    """Like run_extend, but every row is shared out among several programs."""
    run_extend(tensors, tiles=tiles, sharing=ALL_SHARED)


def run_extend_twin(tensors: Tensors) -> None:
    """Runs the torch twin of run_extend; it has no min_q_len."""
    paged_extend(tensors.args(), scores=tensors.scores, mask=tensors.mask)


def queries_of(kv_len: Sequence[int], q_len: Sequence[int], num_tokens: int, device: torch.device) -> Queries:
    """Returns sequences for a schedule, which reads only their lengths."""
    lengths = torch.tensor(kv_len, dtype=torch.int32, device=device)
    indptr = torch.tensor([0, *q_len], device=device).cumsum(0).int()
    return Queries(torch.zeros_like(lengths), lengths, indptr, num_tokens, max([*q_len, 0]), max([*kv_len, 0]))


def assert_served(tensors: Tensors) -> None:
    """Checks that every token of out and lse equals the reference."""
    assert_attention_close(tensors.out, tensors.reference, tensors.case.dtype)
    assert_lse_close(tensors.lse, tensors.reference_lse, tensors.case.dtype)


def assert_serves(run: Run, case: Case, device: torch.device, seed: int = 0, **options: Any) -> None:
    """Runs a kernel on the tensors of a case, and checks that every token equals the reference."""
    tensors = build(case, device, seed)
    run(tensors, **options)
    assert_served(tensors)


def garbage(words: int, device: torch.device) -> Tensor:
    """Returns int32 memory that nothing has filled."""
    return torch.full((words,), GARBAGE, dtype=torch.int32, device=device)


def ints(values: Sequence[int] | Sequence[list[int]], device: torch.device) -> Tensor:
    """Returns int32."""
    return torch.tensor(values, dtype=torch.int32, device=device)
