"""The cost of sparse attention in a decode step: index scores, top-k, attention over the selection, and all of them.

    python -m rocm_lab.benchmarks.sparse_decode --out rocm_lab/benchmarks/results/sparse_decode_h200.json

The kernels are those that serve such a layer here. Each time is reported with its lower bound, a plain streaming read
of the bytes that have to be read once: index keys and their scales, and the selected rows. Exits with 1, after writing
the file, if a result is wrong or the first case takes longer than allowed.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.kernels.cache.page_format import PoolKind, Scales
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
from rocm_attn.kernels.sparse.cuts import select_chunk, top_k_cut
from rocm_attn.kernels.sparse.index_scores import launch_index_scores
from rocm_attn.kernels.sparse.top_k import launch_top_k
from rocm_attn.machine.target import Target, detect_target
from rocm_attn.problem import Indexer, KVEncoding, Problem
from rocm_attn.providers.contract import PoolSize
from rocm_attn.providers.select import select
from rocm_attn.providers.sparse import BoundSelected
from rocm_attn.providers.triton_sparse import TritonIndexer
from rocm_lab.bench.ceilings import read_us
from rocm_lab.bench.clocks import GraphClock, median_us
from rocm_lab.bench.step_data import random_pages
from rocm_lab.benchmarks.script import Row, parser_of, printed, write

TIMES_ALLOWED = 1.5
# |result - reference| / |reference| in bfloat16.
_MOST_ERROR = 2e-2
_DEVICE = torch.device("cuda", 0)
_CLOCK = GraphClock(_DEVICE, 2000.0)
LATENTS = Problem(16, 1, 576, torch.bfloat16, 64, v_head_dim=512, pool=PoolKind.LATENT)
SPLIT = Problem(64, 4, 128, torch.bfloat16, 128)


@dataclass(frozen=True, slots=True)
class SparseCase:
    """num_seqs sequences of one length, one new token each. layer: but for its indexer"""

    name: str
    num_seqs: int
    kv_len: int
    indexing: Indexing
    index_heads: int
    layer: Problem = LATENTS
    coded_q: bool = False

    @property
    def problem(self) -> Problem:
        """The layer."""
        indexer = Indexer(self.index_heads, 128, self.indexing, KVEncoding.E4M3FN, Scales.TOKEN)
        return replace(self.layer, indexer=indexer)

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
        sides = 1 if self.layer.pool is PoolKind.LATENT else 2 * self.layer.num_kv_heads
        return self.num_seqs * self.selected * sides * self.layer.head_dim * 2


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
    SparseCase("blocks of 128, 64 x 64k", 64, 65536, M3, 4, SPLIT),
)


@dataclass(frozen=True, slots=True)
class SparseTensors:
    """The kernels and the tensors of a case. workspace: of the indexer"""

    case: SparseCase
    indexer: TritonIndexer
    selected: BoundSelected
    index: IndexArgs
    selection: SelectedKeys
    workspace: Tensor
    attention: SelectedArgs

    def select(self) -> None:
        """Selects keys."""
        self.indexer.select(self.index, self.selection, self.workspace)

    def attend(self) -> None:
        """Attends to the selection."""
        self.selected.attend(self.attention)


def prepared(case: SparseCase, target: Target) -> SparseTensors:
    """Random keys in random pages, and the kernels that serve them on a target."""
    generator = torch.Generator(_DEVICE).manual_seed(0)
    problem, indexing = case.problem, case.indexing
    page_size = problem.page_size
    pages_of_seq = -(-case.kv_len // page_size)
    num_pages = case.num_seqs * pages_of_seq + 1

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=_DEVICE, dtype=problem.dtype)

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
    sparse = select(problem, target, "triton", pool=PoolSize(num_pages, case.kv_len, case.num_seqs)).sparse
    assert sparse is not None
    assert sparse.selecting is not None
    indexer = sparse.selecting.keys
    assert isinstance(indexer, TritonIndexer)
    shape = PaddedShape(StepKind.DECODE, case.num_seqs, case.num_seqs)
    units = torch.empty(case.num_seqs, indexing.sets, indexing.width, dtype=torch.int32, device=_DEVICE)
    selection = SelectedKeys(units, torch.empty_like(units[:, :, 0]), indexing.unit_tokens)
    q = random(case.num_seqs, problem.num_q_heads, problem.head_dim)
    attention = SelectedArgs(
        q=q,
        pages=random_pages(problem, num_pages, generator),
        table=table,
        tokens=tokens,
        selection=selection,
        out=torch.empty_like(q[..., : problem.v_head_dim]),
        lse=None,
        sinks=None,
        workspace=torch.empty(sparse.selected.workspace_words(shape), device=_DEVICE),
    )
    workspace = torch.empty(indexer.workspace_words(shape), device=_DEVICE)
    return SparseTensors(case, indexer, sparse.selected, index, selection, workspace, attention)


def pieces(made: SparseTensors) -> dict[str, tuple[Callable[[], None], int]]:
    """Returns the timed parts, and the bytes that each has to read."""
    case, indexing, indexer = made.case, made.case.indexing, made.indexer
    cut = top_k_cut(indexing.max_units(case.kv_len), indexing)
    chunk = select_chunk(case.num_seqs, case.kv_len, indexing)
    words = chunk * indexing.sets * cut.stride
    scores = made.workspace[:words].view(chunk, indexing.sets, cut.stride)
    scratch = made.workspace[words:].view(torch.int32)
    tiles = indexer.coded_q_tiles if case.coded_q else indexer.tiles
    programs = indexer.compute_units * tiles.programs_per_cu

    def score() -> None:
        for first in range(0, case.num_seqs, chunk):
            part = scores[: min(chunk, case.num_seqs - first)]
            launch_index_scores(made.index, part, indexing=indexing, tiles=tiles, programs=programs, first_token=first)

    def choose() -> None:
        launch_top_k(scores, scratch, made.index.tokens, made.selection, indexing=indexing, cut=cut)

    def everything() -> None:
        made.select()
        made.attend()

    result = {"scores": (score, case.index_bytes), "attention": (made.attend, case.row_bytes)}
    if chunk >= case.num_seqs:
        result["top-k"] = choose, 0
    result["all"] = everything, case.index_bytes + case.row_bytes
    return result


def error_of(made: SparseTensors) -> float:
    """Returns the worst relative error of the first token: wrongly chosen scores, and its output."""
    made.select()
    made.attend()
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
    selected_attention(
        args._replace(q=args.q[:1], tokens=one, selection=selection, out=out, lse=None), scale=case.problem.scale
    )
    return max(wrong, float((out - args.out[:1]).float().norm() / out.float().norm()))


def rows_of(case: SparseCase, target: Target) -> Iterator[Row]:
    """Yields times of the parts of a case."""
    made = prepared(case, target)
    error = error_of(made)
    for piece, (run, num_bytes) in pieces(made).items():
        lower_bound, us = read_us(num_bytes, _DEVICE, _CLOCK), median_us(_CLOCK, run)
        yield {"case": case.name, "piece": piece, "us": us, "lower_bound_us": lower_bound, "error": error}


def main() -> None:
    """Measures, prints, and writes the result."""
    options = parser_of(__doc__).parse_args()
    target = detect_target(_DEVICE)
    rows = []
    for case in CASES:
        rows += printed(rows_of(case, target))
        torch.cuda.empty_cache()
    write(options.out, times_allowed=TIMES_ALLOWED, rows=rows)
    first = next(row for row in rows if row["piece"] == "all")
    sys.exit(any(row["error"] > _MOST_ERROR for row in rows) or first["us"] > TIMES_ALLOWED * first["lower_bound_us"])


if __name__ == "__main__":
    main()
