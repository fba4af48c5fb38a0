"""The compiles of sparse attention: the indexers and the layers of published models, on an arch.

Index keys and rows lie in pools below 2 GiB, or above.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.capture.zero_inputs import ZeroInputs
from rocm_attn.kernels.sparse.arguments import (
    IndexArgs,
    Indexing,
    IndexPages,
    LastTokens,
    LastUnit,
    Pooling,
    SelectedArgs,
    SelectedKeys,
    SparseTokens,
)
from rocm_attn.kernels.sparse.check import launch_check_selection
from rocm_attn.kernels.sparse.cuts import select_words
from rocm_attn.kernels.sparse.index_scores import launch_select
from rocm_attn.kernels.tuning.sparse_tiles import index_tiles
from rocm_attn.machine.target import known_target
from rocm_attn.paging.kv_pool import KVPool
from rocm_attn.problem import KVEncoding, PoolKind, Problem, Scales
from rocm_attn.providers import triton_sparse
from rocm_attn.providers.sparse import BoundSelected
from tests.amd.offline.matrix import CPU, LARGE_POOL_BYTES, SMALL_POOL_BYTES
from tests.amd.simulator.case import own_encoding

BF16, FP32 = torch.bfloat16, torch.float32
MAX_KV_LEN, NUM_TOKENS = 65536, 64
SHAPE = PaddedShape(StepKind.DECODE, NUM_TOKENS, NUM_TOKENS)


@dataclass(frozen=True, slots=True)
class IndexRow:
    """An indexer.

    dtype:     of q, and of keys without codes
    coded:     true if keys and q are in the arch's eight-bit encoding
    on_oldest: as in Row
    """

    arch: str
    name: str
    indexing: Indexing
    heads: int
    dtype: torch.dtype = BF16
    coded_keys: bool = True
    coded_q: bool = False
    max_q_len: int = 1
    is_large: bool = False
    on_oldest: bool = False

    def __str__(self) -> str:
        return f"{self.arch}-{self.name}{'-above_2gib' * self.is_large}"

    def launch(self) -> None:
        """Launches scores, top-k, and the check of a selection; among blocks if the indexing leaves some."""
        indexing, page_size, dim = self.indexing, 64, 128
        key_dtype = own_encoding(self.arch).dtype if self.coded_keys else self.dtype
        page_keys = page_size // indexing.key_tokens
        pool_bytes = LARGE_POOL_BYTES if self.is_large else SMALL_POOL_BYTES
        num_pages = pool_bytes // (page_keys * dim * key_dtype.itemsize) + 1
        args = IndexArgs(
            torch.empty(NUM_TOKENS, self.heads, dim, dtype=key_dtype if self.coded_q else self.dtype),
            None if indexing.sets > 1 else torch.empty(NUM_TOKENS, self.heads),
            IndexPages(
                torch.empty(num_pages, page_keys, dim, dtype=key_dtype),
                torch.empty(num_pages, page_keys) if self.coded_keys else None,
            ),
            _table(page_size),
            _tokens(self.max_q_len),
        )
        selection = _selection(indexing.sets, indexing.width, indexing.unit_tokens)
        tiles = index_tiles(self.arch, heads=self.heads, dim=dim, key_dtype=key_dtype, coded_q=self.coded_q)
        if blocks := indexing.candidate_blocks:
            args = args._replace(among=_selection(indexing.sets, blocks, indexing.block_keys))
        launch_select(
            args,
            selection,
            torch.empty(select_words(NUM_TOKENS, MAX_KV_LEN, indexing)),
            indexing=indexing,
            tiles=tiles,
            programs=known_target(self.arch).compute_units * tiles.programs_per_cu,
        )
        launch_check_selection(selection, args.tokens, torch.empty(1, dtype=torch.int32))


@dataclass(frozen=True, slots=True)
class LayerRow:
    """A layer that attends over a selection.

    heads:     query heads, KV heads
    exact:     true if it is deterministic
    is_dense:  true if tokens attend to all that they see
    on_oldest: as in Row
    """

    arch: str
    name: str
    heads: tuple[int, int]
    dims: tuple[int, int]
    kind: PoolKind = PoolKind.SPLIT
    sets: int = 1
    width: int = 2048
    unit_tokens: int = 1
    dtype: torch.dtype = BF16
    scales: Scales = Scales.NONE
    exact: bool = False
    is_dense: bool = False
    is_large: bool = False
    on_oldest: bool = False

    def __str__(self) -> str:
        return f"{self.arch}-{self.name}{'-above_2gib' * self.is_large}"

    def launch(self) -> None:
        """Launches attention in several parts, with sinks and LSE."""
        problem, target = self._problem(), known_target(self.arch)
        row_bytes = problem.num_kv_heads * min(self.dims) * problem.page_format.encoding.dtype.itemsize
        num_pages = (LARGE_POOL_BYTES if self.is_large else SMALL_POOL_BYTES) // (64 * row_bytes) + 1
        q, _, _, out = ZeroInputs(CPU).of(problem, NUM_TOKENS)
        selection = LastTokens(MAX_KV_LEN) if self.is_dense else _selection(self.sets, self.width, self.unit_tokens)
        keys = selection.width * selection.unit_tokens
        if self.exact:
            bound: BoundSelected = triton_sparse._segments(problem, target, keys)
        else:
            # With 16 programs for each token, every row is cut in several parts.
            bound = replace(triton_sparse._selected(problem, target, keys), programs=16 * NUM_TOKENS)
        args = SelectedArgs(
            q=q,
            pages=KVPool([problem], num_pages=num_pages, page_size=64, device=CPU).layers[0],
            table=_table(64),
            tokens=_tokens(1),
            selection=selection,
            out=out,
            lse=torch.empty(q.shape[:2]),
            sinks=torch.empty(problem.num_q_heads),
            workspace=torch.empty(bound.workspace_words(SHAPE)),
        )
        bound.attend(args)

    def _problem(self) -> Problem:
        is_coded = self.scales is not Scales.NONE
        return Problem(
            *self.heads,
            self.dims[0],
            self.dtype,
            64,
            v_head_dim=self.dims[1],
            scale=0.1,
            pool=self.kind,
            kv_encoding=KVEncoding[own_encoding(self.arch).name] if is_coded else KVEncoding.LIKE_Q,
            kv_scales=self.scales,
        )


def _table(page_size: int) -> Tensor:
    return torch.empty(NUM_TOKENS + 1, MAX_KV_LEN // page_size, dtype=torch.int32)


def _tokens(max_q_len: int) -> SparseTokens:
    of_token = torch.empty(NUM_TOKENS, dtype=torch.int32)
    return SparseTokens(of_token, of_token, torch.empty(1, dtype=torch.int32), max_q_len, MAX_KV_LEN)


def _selection(sets: int, width: int, unit_tokens: int) -> SelectedKeys:
    units = torch.empty(NUM_TOKENS, sets, width, dtype=torch.int32)
    return SelectedKeys(units, torch.empty(NUM_TOKENS, sets, dtype=torch.int32), unit_tokens)


# The arch for which the oldest supported Triton compiles every kernel of sparse attention.
_OLDEST_ARCH = "gfx942"
# DeepSeek-V3.2, GLM-5, GLM-5.3, MiniMax-M3, and blocks of means.
TOKENS = Indexing(128**-0.5, 2048)
POOLED = Indexing(128**-0.5, 512, key_tokens=4, last_unit=LastUnit.ADDED)
BLOCKS = Indexing(128**-0.5, 16, sets=4, rectified=False, unit_keys=128, last=1)
MEANS = Indexing(128**-0.5, 64, unit_keys=64, pooling=Pooling.MEAN, first=1, last=2)
LEAVES = Indexing(128**-0.5, 512, candidate_blocks=2048, block_keys=8)
_INDEXERS: tuple[Callable[[str], IndexRow], ...] = (
    lambda arch: IndexRow(arch, "64_heads", TOKENS, 64),
    lambda arch: IndexRow(arch, "coded_queries", TOKENS, 64, coded_q=True, on_oldest=arch == _OLDEST_ARCH),
    lambda arch: IndexRow(arch, "extend", TOKENS, 32, coded_keys=False, max_q_len=64),
    lambda arch: IndexRow(arch, "pools", POOLED, 32),
    lambda arch: IndexRow(arch, "blocks", BLOCKS, 4, coded_keys=False),
    lambda arch: IndexRow(arch, "means", MEANS, 8),
    lambda arch: IndexRow(arch, "candidates", LEAVES, 32),
    lambda arch: IndexRow(arch, "float32", TOKENS, 16, dtype=FP32, coded_keys=False),
    lambda arch: IndexRow(arch, "64_heads", TOKENS, 64, is_large=True),
)
_LATENT = PoolKind.LATENT
_LAYERS: tuple[Callable[[str], LayerRow], ...] = (
    lambda arch: LayerRow(arch, "latent_16", (16, 1), (576, 512), _LATENT, on_oldest=arch == _OLDEST_ARCH),
    lambda arch: LayerRow(arch, "latent_32", (32, 1), (576, 512), _LATENT),
    lambda arch: LayerRow(arch, "latent_128", (128, 1), (576, 512), _LATENT),
    lambda arch: LayerRow(arch, "latent_codes", (16, 1), (576, 512), _LATENT, scales=Scales.TOKEN),
    lambda arch: LayerRow(arch, "records_16", (16, 1), (576, 512), _LATENT, scales=Scales.GROUP),
    lambda arch: LayerRow(arch, "records_128", (128, 1), (576, 512), _LATENT, scales=Scales.GROUP),
    lambda arch: LayerRow(arch, "all_records", (16, 1), (576, 512), _LATENT, scales=Scales.GROUP, is_dense=True),
    # DeepSeek-V4's records: rows of several tokens that were chosen, all of them, and a window.
    lambda arch: LayerRow(arch, "footers_8", (8, 1), (512, 512), _LATENT, width=512, scales=Scales.FOOTER),
    lambda arch: LayerRow(arch, "footers_64", (64, 1), (512, 512), _LATENT, width=512, scales=Scales.FOOTER),
    lambda arch: LayerRow(arch, "all_footers", (64, 1), (512, 512), _LATENT, scales=Scales.FOOTER, is_dense=True),
    lambda arch: LayerRow(arch, "latent_pools", (16, 1), (512, 512), _LATENT, width=513, unit_tokens=4),
    # DeepSeek-V4's rows of several tokens, on one of eight ranks and on one of one.
    lambda arch: LayerRow(arch, "chosen_rows", (8, 1), (512, 512), _LATENT, width=512),
    lambda arch: LayerRow(arch, "all_rows", (8, 1), (512, 512), _LATENT, is_dense=True),
    lambda arch: LayerRow(arch, "all_rows_64", (64, 1), (512, 512), _LATENT, is_dense=True),
    lambda arch: LayerRow(arch, "segments_all_rows", (64, 1), (512, 512), _LATENT, exact=True, is_dense=True),
    lambda arch: LayerRow(arch, "attended_blocks", (64, 4), (128, 128), sets=4, width=16, unit_tokens=128),
    lambda arch: LayerRow(
        arch, "blocks_codes", (64, 4), (128, 128), sets=4, width=16, unit_tokens=128, scales=Scales.TOKEN
    ),
    lambda arch: LayerRow(arch, "ratio_12", (24, 2), (256, 256), width=513, unit_tokens=4),
    lambda arch: LayerRow(
        arch,
        "segments_128",
        (64, 4),
        (128, 128),
        sets=4,
        width=16,
        unit_tokens=128,
        exact=True,
        on_oldest=arch == _OLDEST_ARCH,
    ),
    lambda arch: LayerRow(arch, "segments_latent_16", (16, 1), (576, 512), _LATENT, exact=True),
    lambda arch: LayerRow(arch, "segments_latent_128", (128, 1), (576, 512), _LATENT, exact=True),
    lambda arch: LayerRow(arch, "segments_latent_codes", (16, 1), (576, 512), _LATENT, scales=Scales.TOKEN, exact=True),
    lambda arch: LayerRow(arch, "segments_codes", (64, 4), (128, 128), scales=Scales.TOKEN, exact=True),
    lambda arch: LayerRow(arch, "segments_256", (24, 2), (256, 256), exact=True),
    lambda arch: LayerRow(arch, "attended_float32", (8, 2), (128, 96), dtype=FP32),
    lambda arch: LayerRow(arch, "latent_16", (16, 1), (576, 512), _LATENT, is_large=True),
)
ARCHS = ("gfx942", "gfx950", "sm_90")
SparseRow = IndexRow | LayerRow
_ALL: tuple[Callable[[str], SparseRow], ...] = (*_INDEXERS, *_LAYERS)
ROWS: tuple[SparseRow, ...] = tuple(
    row(arch) for arch in ARCHS for row in _ALL if arch != "sm_90" or not row(arch).is_large
)
