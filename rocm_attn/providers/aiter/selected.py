"""aiter.unified_attention_sparse_mla: attention of latent layers over a selection, a second opinion to Triton's.

It takes the places of selected tokens in the pool, -1 for none: page * tokens of a page + offset. Its indexes are
multiplied by strides of 64 bits. A program computes 16 heads of one token over all of its keys, a page's number of them
at a time, so that few tokens do not fill a device; AITER's source calls it not optimised, and `auto` prefers Triton's.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.hip_graphs.size_ladder import round_up
from rocm_attn.kernels.sparse.arguments import Indexing, SelectedArgs, SelectedKeys
from rocm_attn.machine.target import Target
from rocm_attn.problem import PoolKind, Problem
from rocm_attn.providers.aiter import library
from rocm_attn.providers.contract import Limits, PoolSize
from rocm_attn.providers.scratch import ScratchTensor, cut, keep_rows, num_words, room_for, rows_of_heads, whole_rows
from rocm_attn.providers.sparse import SelectedKeysEntry

# Query heads of a program; others past a multiple of them are not computed.
_HEADS = 16

# A tile has as many keys as a page has tokens, and the matrix units take 16 at least.
_LEAST_TILE = 16


@dataclass(frozen=True, slots=True)
class AiterSelected:
    """Attention over a selection of single tokens.

    The selection is rewritten in some fifteen launches of torch's, which allocate a few int64 [T, width].
    """

    problem: Problem

    def describe(self) -> str:
        return f"aiter.unified_attention_sparse_mla({self.problem})"

    def workspace_words(self, shape: PaddedShape) -> int:
        return num_words(self._parts(shape.num_tokens))

    def attend(self, args: SelectedArgs) -> None:
        q, out = args.q, args.out
        parts = cut(args.workspace, self._parts(len(q)))
        if parts:
            q, out = whole_rows(q, parts[0]), room_for(out, parts[1])
        page_slots = slots_of_page(self.problem)
        slots = slots_of(args, page_slots)
        library.unified_attention_sparse_mla()(
            q=q,
            # A page of one token is read as 16 times the same row, of which the first is selected.
            kv=args.pages.k.expand(-1, page_slots, -1, -1),
            out=out,
            # All tokens are one sequence's: slots name keys of any. Padded tokens are past its end, and not computed.
            cu_seqlens_q=functional.pad(args.tokens.num_tokens, (1, 0)),
            # One new token selects how rows are cached, and nothing else.
            max_seqlen_q=args.tokens.max_q_len,
            # No release reads the next three; the first has as many elements as there are sequences.
            seqused_k=args.tokens.num_tokens,
            max_seqlen_k=args.tokens.max_kv_len,
            block_table=args.table,
            softmax_scale=self.problem.scale,
            topk_indices=slots,
            kv_lora_rank=self.problem.v_head_dim,
        )
        keep_rows(args.out, out)
        # It writes nothing for a padded token, and 0 / 0 for a token without keys.
        args.out.masked_fill_((slots < 0).all(1)[:, None, None], 0)

    def _parts(self, num_tokens: int) -> tuple[ScratchTensor, ...]:
        """Room for q and out with a multiple of 16 heads; none if they have it."""
        num_heads = round_up(self.problem.num_q_heads, _HEADS)
        return rows_of_heads(self.problem, num_tokens, num_heads) if num_heads != self.problem.num_q_heads else ()


def slots_of_page(problem: Problem) -> int:
    """The tokens that the function counts in a page."""
    return _LEAST_TILE if problem.page_size == 1 else problem.page_size


def slots_of(args: SelectedArgs, page_slots: int) -> Tensor:
    """int32 [T, width]: page * page_slots + offset of each selected token; -1 for entries that give no key."""
    selection, tokens, page_size = args.selection, args.tokens, args.pages.keys.page_size
    assert isinstance(selection, SelectedKeys)
    units = selection.units[:, 0]
    token, entry = (torch.arange(num, device=units.device) for num in units.shape)
    visible = torch.where(token < tokens.num_tokens, tokens.position_of_token + 1, 0)[:, None]
    gives_key = (entry < selection.counts) & (units >= 0) & (units < visible)
    page_no = (units // page_size).clamp(0, args.table.shape[1] - 1)
    page = args.table[tokens.row_of_token.long()[:, None], page_no.long()]
    # The keys come first: after a tile without any, the function would take 0 for the largest logit so far.
    return torch.where(gives_key, page * page_slots + units % page_size, -1)


def _bind(problem: Problem, target: Target, pool: PoolSize) -> AiterSelected:
    num_slots = pool.num_pages * slots_of_page(problem)
    if num_slots > 2**31:
        raise LookupError(f"it counts {num_slots} places in {pool.num_pages} pages, and numbers 2**31 of them")
    return AiterSelected(problem)


def _serves(indexing: Indexing) -> tuple[str, ...]:
    tokens = indexing.unit_tokens
    return (f"a unit has {tokens} tokens, and it takes single ones",) if tokens > 1 else ()


SELECTED_ENTRIES = (
    SelectedKeysEntry(
        name="aiter.unified_attention_sparse_mla",
        limits=Limits(
            archs=("gfx942", "gfx950"),
            dtypes=(torch.bfloat16, torch.float16),
            head_dim=(576, 576),
            v_head_dim=(512, 512),
            page_size=(1, 64),
            # Tiles of 128 keys take 128 KiB of LDS, twice gfx942's.
            page_sizes=(1, 16, 32, 64),
            max_gqa_ratio=128,
            pools=(PoolKind.LATENT,),
            lse=False,
            page_strides=True,
        ),
        bind=_bind,
        serves=_serves,
        is_probed=True,
    ),
)
