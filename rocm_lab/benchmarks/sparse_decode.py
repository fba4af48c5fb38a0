"""The cost of sparse attention in a decode step: index scores, top-k, attention over the selection, and all of them.

    python -m rocm_lab.benchmarks.sparse_decode --out rocm_lab/benchmarks/results/sparse_decode_h200.json

Each time is reported with its lower bound, a plain streaming read of the bytes that have to be read once: index keys
and their scales, and the selected rows. Exits with 1, after writing the file, if a result is wrong or the first case
takes longer than allowed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.page_format import PoolKind
from rocm_attn.kernels.refs.sparse import index_scores, selected_attention
from rocm_attn.kernels.sparse.arguments import (
    IndexArgs,
    Indexing,
    IndexPages,
    LastUnit,
    SelectedArgs,
    SelectedKeys,
    SparseTokens,
)
from rocm_attn.kernels.sparse.attention import launch_selected_attention
from rocm_attn.kernels.sparse.cuts import select_chunk, select_words, top_k_cut
from rocm_attn.kernels.sparse.index_scores import launch_index_scores, launch_select
from rocm_attn.kernels.sparse.top_k import launch_top_k
from rocm_attn.kernels.tuning.sparse_tiles import IndexTiles, SelectedTiles, index_tiles, selected_tiles
from rocm_attn.machine.target import detect_target
from rocm_lab.bench.ceilings import read_us
from rocm_lab.bench.clocks import GraphClock, median_us
from rocm_lab.benchmarks.script import Row, parser_of, printed, write

TIMES_ALLOWED = 1.5
# |result - reference| / |reference| in bfloat16.
_MOST_ERROR = 2e-2
_DEVICE = torch.device("cuda", 0)
_CLOCK = GraphClock(_DEVICE, 2000.0)


@dataclass(frozen=True, slots=True)
class SparseCase:
    """num_seqs sequences of one length, one new token each. heads: query, KV heads; dims: head_dim, v_head_dim."""

    name: str
    num_seqs: int
    kv_len: int
    indexing: Indexing
    index_heads: int
    heads: tuple[int, int] = (16, 1)
    dims: tuple[int, int] = (576, 512)
    page_size: int = 64
    coded_q: bool = False

    @property
    def selected(self) -> int:
        """Tokens that a sequence's new token attends to."""
        return min(self.indexing.top * self.indexing.unit_tokens, self.kv_len)

    @property
    def index_bytes(self) -> int:
        """Index keys of 128 codes, with a scale each."""
        return self.num_seqs * (self.kv_len // self.indexing.key_tokens) * (128 + 4)

    @property
    def row_bytes(self) -> int:
        """Selected rows; every KV head has its own selection, or shares it."""
        is_latent = self.heads[1] == 1 and self.dims[0] > self.dims[1]
        elements = self.dims[0] if is_latent else sum(self.dims) * self.heads[1]
        return self.num_seqs * self.selected * elements * 2


V32 = Indexing(128**-0.5, 2048)
M3 = Indexing(128**-0.5, 16, sets=4, rectified=False, unit_keys=128, last=1)
POOLED = Indexing(128**-0.5, 512, key_tokens=4, last_unit=LastUnit.ADDED)
CASES = (
    SparseCase("32 index heads, 64 x 64k", 64, 65536, V32, 32),
    SparseCase("64 index heads, 64 x 64k", 64, 65536, V32, 64),
    SparseCase("64 index heads, eight-bit queries, 64 x 64k", 64, 65536, V32, 64, coded_q=True),
    SparseCase("64 index heads, 1 x 128k", 1, 131072, V32, 64),
    SparseCase("32 index heads, 256 x 8k", 256, 8192, V32, 32),
    SparseCase("32 index heads pooled by 4, 64 x 64k", 64, 65536, POOLED, 32),
    SparseCase("blocks of 128, 64 x 64k", 64, 65536, M3, 4, (64, 4), (128, 128), 128),
)


@dataclass(frozen=True, slots=True)
class SparseTensors:
    """The tensors of a case."""

    case: SparseCase
    index: IndexArgs
    selection: SelectedKeys
    workspace: Tensor
    attention: SelectedArgs


def prepared(case: SparseCase) -> SparseTensors:
    """Random keys in random pages."""
    generator = torch.Generator(_DEVICE).manual_seed(0)
    indexing, page_size = case.indexing, case.page_size
    pages_of_seq = -(-case.kv_len // page_size)
    num_pages = case.num_seqs * pages_of_seq + 1

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=_DEVICE, dtype=torch.bfloat16)

    def ints(values: Tensor) -> Tensor:
        return values.to(torch.int32)

    table = ints(torch.randperm(num_pages - 1, generator=generator, device=_DEVICE) + 1).view(case.num_seqs, -1)
    seqs = torch.arange(case.num_seqs, device=_DEVICE)
    tokens = SparseTokens(
        ints(seqs), ints(torch.full_like(seqs, case.kv_len - 1)), ints(seqs[:1] * 0 + case.num_seqs), 1, case.kv_len
    )
    page_keys = page_size // indexing.key_tokens
    keys = torch.empty(num_pages, page_keys, 128, dtype=torch.float8_e4m3fn, device=_DEVICE)
    for first in range(0, num_pages, 4096):
        part = keys[first : first + 4096]
        part.copy_(random(*part.shape))
    scale = torch.rand(num_pages, page_keys, generator=generator, device=_DEVICE) + 0.5
    index_q = random(case.num_seqs, case.index_heads, 128)
    index = IndexArgs(
        index_q.to(torch.float8_e4m3fn) if case.coded_q else index_q,
        None if indexing.sets > 1 else random(case.num_seqs, case.index_heads).float(),
        IndexPages(keys, scale),
        table,
        tokens,
    )
    (num_heads, num_kv_heads), (head_dim, v_head_dim) = case.heads, case.dims
    k = random(num_pages, page_size, num_kv_heads, head_dim)
    is_latent = num_kv_heads == 1
    v = k[..., :v_head_dim] if is_latent else random(num_pages, page_size, num_kv_heads, v_head_dim)
    units = torch.empty(case.num_seqs, indexing.sets, indexing.width, dtype=torch.int32, device=_DEVICE)
    selection = SelectedKeys(units, torch.empty_like(units[:, :, 0]), indexing.unit_tokens)
    q = random(case.num_seqs, num_heads, head_dim)
    attention = SelectedArgs(
        q=q,
        pages=LayerPages.plain(k, v, kind=PoolKind.LATENT if is_latent else PoolKind.SPLIT),
        table=table,
        tokens=tokens,
        selection=selection,
        out=torch.empty(case.num_seqs, num_heads, v_head_dim, dtype=q.dtype, device=_DEVICE),
        lse=None,
        sinks=None,
        workspace=torch.empty(64 << 20, device=_DEVICE),
    )
    words = select_words(case.num_seqs, case.kv_len, indexing)
    return SparseTensors(case, index, selection, torch.empty(words, device=_DEVICE), attention)


def pieces(
    made: SparseTensors, tiles: IndexTiles, selected: SelectedTiles
) -> dict[str, tuple[Callable[[], None], int]]:
    """Returns the timed parts, and the bytes that each has to read."""
    case, indexing = made.case, made.case.indexing
    units = torch.cuda.get_device_properties(_DEVICE).multi_processor_count
    cut = top_k_cut(indexing.max_units(case.kv_len), indexing)
    chunk = select_chunk(case.num_seqs, case.kv_len, indexing)
    words = chunk * indexing.sets * cut.stride
    scores = made.workspace[:words].view(chunk, indexing.sets, cut.stride)
    scratch = made.workspace[words:].view(torch.int32)
    programs = units * tiles.programs_per_cu

    def score() -> None:
        for first in range(0, case.num_seqs, chunk):
            part = scores[: min(chunk, case.num_seqs - first)]
            launch_index_scores(made.index, part, indexing=indexing, tiles=tiles, programs=programs, first_token=first)

    def choose() -> None:
        launch_top_k(scores, scratch, made.index.tokens, made.selection, indexing=indexing, cut=cut)

    def attend() -> None:
        launch_selected_attention(made.attention, scale=0.05, tiles=selected, programs=units * selected.programs_per_cu)

    def everything() -> None:
        launch_select(made.index, made.selection, made.workspace, indexing=indexing, tiles=tiles, programs=programs)
        attend()

    result = {"scores": (score, case.index_bytes), "attention": (attend, case.row_bytes)}
    if chunk >= case.num_seqs:
        result["top-k"] = choose, 0
    result["all"] = everything, case.index_bytes + case.row_bytes
    return result


def error_of(made: SparseTensors, tiles: IndexTiles, selected: SelectedTiles) -> float:
    """Returns the worst relative error of the first token: wrongly chosen scores, and its output."""
    everything, _ = pieces(made, tiles, selected)["all"]
    everything()
    case, args = made.case, made.attention
    tokens = args.tokens
    one = tokens._replace(row_of_token=tokens.row_of_token[:1], position_of_token=tokens.position_of_token[:1])
    weights = made.index.weights
    index = made.index._replace(q=made.index.q[:1], weights=None if weights is None else weights[:1], tokens=one)
    units = case.indexing.max_units(case.kv_len)
    scores = torch.empty(1, case.indexing.sets, units, device=_DEVICE)
    index_scores(index, scores, indexing=case.indexing)
    selection = made.selection._replace(units=made.selection.units[:1], counts=made.selection.counts[:1])
    best = scores.sort(dim=2, descending=True)[0][:, :, : case.indexing.top]
    chosen = scores.gather(2, selection.units[:, :, : case.indexing.top].long().clamp(min=0))
    if case.indexing.first + case.indexing.last:
        wrong = 0.0
    else:
        wrong = float((best.sum(2) - chosen.sum(2)).abs().max() / best.abs().sum(2).max())
    out = torch.empty_like(args.out[:1])
    selected_attention(args._replace(q=args.q[:1], tokens=one, selection=selection, out=out, lse=None), scale=0.05)
    return max(wrong, float((out - args.out[:1]).float().norm() / out.float().norm()))


def rows_of(case: SparseCase, arch: str) -> Iterator[Row]:
    """Yields times of the parts of a case."""
    made = prepared(case)
    tiles = index_tiles(arch, heads=case.index_heads, dim=128, key_dtype=torch.float8_e4m3fn, coded_q=case.coded_q)
    selected = selected_tiles(
        arch,
        gqa_ratio=case.heads[0] // case.heads[1],
        head_dim=case.dims[0],
        v_head_dim=case.dims[1],
        dtype=torch.bfloat16,
        is_coded=False,
    )
    error = error_of(made, tiles, selected)
    for piece, (run, num_bytes) in pieces(made, tiles, selected).items():
        lower_bound, us = read_us(num_bytes, _DEVICE, _CLOCK), median_us(_CLOCK, run)
        yield {"case": case.name, "piece": piece, "us": us, "lower_bound_us": lower_bound, "error": error}


def main() -> None:
    """Measures, prints, and writes the result."""
    options = parser_of(__doc__).parse_args()
    arch = detect_target(_DEVICE).arch
    rows = []
    for case in CASES:
        rows += printed(rows_of(case, arch))
        torch.cuda.empty_cache()
    write(options.out, times_allowed=TIMES_ALLOWED, rows=rows)
    first = next(row for row in rows if row["piece"] == "all")
    sys.exit(any(row["error"] > _MOST_ERROR for row in rows) or first["us"] > TIMES_ALLOWED * first["lower_bound_us"])


if __name__ == "__main__":
    main()
