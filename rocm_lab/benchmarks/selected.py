"""Time of attention to selections of latents, of decodes and prompts, next to FlashMLA's where its library is given.

    python -m rocm_lab.benchmarks.selected --flashmla _flashmla_C.abi3.so \
        --out rocm_lab/benchmarks/results/selected_h200.json

Layers are DeepSeek-V3.2's, whole or on a rank of several: 2,048 of 65,536 tokens are chosen at random for each new
token, in bfloat16 or as records (cache/records.py). vLLM's wheel has the library. FlashMLA gets slots of the pages, as
an engine does, which are made before timing. Exits with 1, after writing the file, if a result is wrong.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.kernels.cache.page_format import PoolKind, Scales
from rocm_attn.kernels.refs.sparse import selected_attention
from rocm_attn.kernels.sparse.arguments import Indexing, SelectedArgs, SelectedKeys, SparseTokens
from rocm_attn.machine.target import detect_target
from rocm_attn.problem import EarlierSelection, KVEncoding, Problem
from rocm_attn.providers.contract import SMALLEST_POOL
from rocm_attn.providers.select import select
from rocm_lab.bench.clocks import GraphClock, median_us
from rocm_lab.bench.step_data import random_pages
from rocm_lab.benchmarks.script import Row, add_library, parser_of, printed, write

# |result - reference| / |reference| in bfloat16.
_MOST_ERROR = 1e-2
_CONTEXT, _TOP, _PAGE_SIZE = 65536, 2048, 64
_DEVICE = torch.device("cuda", 0)
_CLOCK = GraphClock(_DEVICE, 2000.0)
LAYER = Problem(
    128,
    1,
    576,
    torch.bfloat16,
    v_head_dim=512,
    page_size=_PAGE_SIZE,
    pool=PoolKind.LATENT,
    indexer=EarlierSelection(Indexing(128**-0.5, _TOP)),
)


@dataclass(frozen=True, slots=True)
class ChosenCase:
    """num_tokens new tokens of a layer with num_heads query heads. records: whether pages hold records of latents"""

    num_tokens: int
    num_heads: int
    records: bool

    @property
    def problem(self) -> Problem:
        """The layer."""
        problem = replace(LAYER, num_q_heads=self.num_heads)
        if self.records:
            problem = replace(problem, kv_encoding=KVEncoding.E4M3FN, kv_scales=Scales.GROUP)
        return problem


CASES = tuple(
    ChosenCase(num_tokens, num_heads, records)
    for records, num_heads, num_tokens in itertools.product((False, True), (16, 64, 128), (1, 64, 1024))
)


@dataclass(frozen=True, slots=True)
class ChosenTensors:
    """The tensors of a case. slots: of each token's selection, int32 [tokens, 1, top]"""

    args: SelectedArgs
    selection: SelectedKeys
    slots: Tensor

    def of_first_tokens(self) -> SelectedArgs:
        """Two tokens, with a result of their own."""
        args, tokens = self.args, self.args.tokens
        units, counts = self.selection.units[:2], self.selection.counts[:2]
        tokens = tokens._replace(row_of_token=tokens.row_of_token[:2], position_of_token=tokens.position_of_token[:2])
        selection = SelectedKeys(units, counts, 1)
        return args._replace(q=args.q[:2], out=args.out[:2].clone(), tokens=tokens, selection=selection)


def prepared(case: ChosenCase) -> ChosenTensors:
    """Random latents of one sequence in random pages."""
    generator = torch.Generator(_DEVICE).manual_seed(0)
    problem, num_tokens, num_pages = case.problem, case.num_tokens, _CONTEXT // _PAGE_SIZE + 1
    pages = random_pages(problem, num_pages, generator)
    table = (torch.randperm(num_pages - 1, generator=generator, device=_DEVICE) + 1).int()[None]
    units = torch.rand(num_tokens, _CONTEXT, generator=generator, device=_DEVICE).topk(_TOP).indices.sort()[0].int()
    at = torch.zeros(num_tokens, dtype=torch.int32, device=_DEVICE)
    tokens = SparseTokens(at, at + (_CONTEXT - 1), at[:1] + num_tokens, num_tokens, _CONTEXT)
    q = torch.randn(num_tokens, case.num_heads, 576, generator=generator, device=_DEVICE).bfloat16()
    selection = SelectedKeys(units[:, None].contiguous(), (at + _TOP)[:, None].contiguous(), 1)
    args = SelectedArgs(
        q=q,
        pages=pages,
        table=table,
        tokens=tokens,
        selection=selection,
        out=q[..., :512].clone(),
        lse=None,
        sinks=None,
        workspace=torch.empty(0, device=_DEVICE),
    )
    slots = table[0, units // _PAGE_SIZE] * _PAGE_SIZE + units % _PAGE_SIZE
    return ChosenTensors(args, selection, slots.int()[:, None].contiguous())


def flashmla(case: ChosenCase, made: ChosenTensors) -> Callable[[], Tensor]:
    """The same by FlashMLA: its kernel for prompts of bfloat16 latents, and that for decodes of records."""
    ops, scale, state = torch.ops._flashmla_C, case.problem.scale, [None, None]
    args, slots = made.args, made.slots
    if not case.records:
        latents, out = args.pages.k.view(-1, 1, 576), torch.empty_like(args.out)

        def of_latents() -> Tensor:
            ops.sparse_prefill_fwd(args.q, latents, slots, scale, 512, None, None, out)
            return out

        return of_latents
    records, q = args.pages.k.view(-1, _PAGE_SIZE, 1, args.pages.k.shape[-1]), args.q[:, None]
    rest = None, None, None, 512, scale, None, False

    def of_records() -> Tensor:
        result: Tensor
        result, _, *state[:] = ops.sparse_decode_fwd(q, records, slots, None, None, *state, *rest)
        return result[:, 0]

    return of_records


def rows_of(case: ChosenCase, *, with_peer: bool) -> Iterator[Row]:
    """Yields the times of a case."""
    made = prepared(case)
    sparse = select(case.problem, detect_target(_DEVICE), "triton", pool=SMALLEST_POOL).sparse
    assert sparse is not None
    words = sparse.selected.workspace_words(PaddedShape(StepKind.EXTEND, 1, case.num_tokens))
    args = made.args._replace(workspace=torch.empty(words, device=_DEVICE))
    first = made.of_first_tokens()
    selected_attention(first, scale=case.problem.scale)

    def error(out: Tensor) -> float:
        return float((out[:2] - first.out).float().norm() / first.out.float().norm())

    sparse.selected.attend(args)
    row: Row = {
        "pages": "records" if case.records else "bfloat16",
        "heads": case.num_heads,
        "tokens": case.num_tokens,
        "error": error(args.out),
        "us": median_us(_CLOCK, lambda: sparse.selected.attend(args)),
        "products": 2 * case.num_tokens * case.num_heads * _TOP * (576 + 512),
    }
    if with_peer:
        peer = flashmla(case, made)
        try:
            row["flashmla_error"] = error(peer())
            row["flashmla_us"] = median_us(_CLOCK, peer)
        except RuntimeError as refusal:
            row["flashmla_refusal"] = str(refusal).rpartition(", ")[2]
    yield row


def main() -> None:
    """Measures, prints, and writes the result."""
    parser = parser_of(__doc__)
    add_library(parser, "--flashmla", "_flashmla_C.abi3.so")
    options = parser.parse_args()
    rows = []
    for case in CASES:
        rows += printed(rows_of(case, with_peer=bool(options.flashmla)))
        torch.cuda.empty_cache()
    write(options.out, rows=rows)
    sys.exit(any(row["error"] > _MOST_ERROR for row in rows))


if __name__ == "__main__":
    main()
