"""The torch provider's sparse kernels: the torch twins, for CPUs and tests. Work is proportional to the longest KV."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.kernels.attention import limits
from rocm_attn.kernels.refs import sparse
from rocm_attn.kernels.sparse.arguments import IndexArgs, Indexing, SelectedArgs, SelectedKeys
from rocm_attn.problem import KVEncoding, PoolKind, Problem, Scales
from rocm_attn.providers.contract import Baked, Limits
from rocm_attn.providers.sparse import IndexerEntry, IndexLimits, SelectedKeysEntry

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class TorchIndexer:
    """Scores every index key and selects the best."""

    indexing: Indexing

    def describe(self) -> str:
        return f"torch.indexer({self.indexing})"

    def workspace_words(self, shape: PaddedShape) -> int:
        return 0

    def select(self, args: IndexArgs, selection: SelectedKeys, workspace: Tensor) -> None:
        sparse.select(args, selection, indexing=self.indexing)


@dataclass(frozen=True, slots=True)
class TorchSelected:
    """Attention over gathered rows."""

    problem: Problem

    def describe(self) -> str:
        return f"torch.selected({self.problem})"

    def workspace_words(self, shape: PaddedShape) -> int:
        return 0

    def attend(self, args: SelectedArgs) -> None:
        sparse.selected_attention(args, scale=self.problem.scale)


INDEXER_ENTRIES = (
    IndexerEntry(
        name="torch.indexer",
        limits=IndexLimits(
            archs=("*",),
            dtypes=_DTYPES,
            head_dim=(1, 4096),
            num_heads=4096,
            encodings=tuple(KVEncoding),
            scales=(Scales.NONE, Scales.LAYER, Scales.TOKEN),
        ),
        bakes=frozenset({Baked.MAX_KV_LEN}),
        bind=lambda indexer, problem, target, pool: TorchIndexer(indexer.indexing),
    ),
)

SELECTED_ENTRIES = (
    SelectedKeysEntry(
        name="torch.selected",
        limits=Limits(
            archs=("*",),
            dtypes=_DTYPES,
            head_dim=(1, 4096),
            v_head_dim=(1, 4096),
            page_size=(1, 4096),
            max_gqa_ratio=4096,
            sinks=True,
            pools=(PoolKind.SPLIT, PoolKind.LATENT),
            encodings=tuple(KVEncoding),
            scales=tuple(Scales),
            page_strides=True,
            row_tokens=(1, limits.MAX_PAGE_SIZE),
        ),
        bind=lambda problem, target, pool: TorchSelected(problem),
    ),
)
