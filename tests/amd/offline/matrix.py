"""The compiles that a change must pass: layers on an arch, over a pool of a size. Every tuning choice is among them.

A row is driven through the runtime, so the compiled kernels are those that it would launch: the metadata kernels, the
store, and the attention of a decode, an extend and a mixed step, specialised on the arguments that they would get.
"""

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from rocm_attn.batch.inputs import DeviceInputs
from rocm_attn.batch.mask import random_mask
from rocm_attn.batch.prefixes import PrefixGroup, SharedPrefixes
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.capture.zero_inputs import ZeroInputs
from rocm_attn.guards.registry import Guards
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.page_format import Encoding, PageFormat
from rocm_attn.kernels.cache.page_rows import empty_vectorised_pages
from rocm_attn.kernels.cache.row_work import Projected, QkvWork, RopePairs, RopeTable, RowNorm, TokenPlaces
from rocm_attn.kernels.experts.arguments import ProductArgs
from rocm_attn.kernels.experts.choose import SHARED, SHARED_BY_LOGIT, ChoiceRule, launch_choose
from rocm_attn.kernels.experts.combine import launch_combine
from rocm_attn.kernels.experts.few_tokens import launch_expert_sums, launch_inner_products
from rocm_attn.kernels.experts.groups import ExpertGroups
from rocm_attn.kernels.experts.product import launch_expert_product
from rocm_attn.kernels.experts.sort_pairs import launch_sort_pairs
from rocm_attn.kernels.metadata.step_tensors import NO_PADS, Pads, StepTensors, TableTerms
from rocm_attn.kernels.model.add_norm import NormedSum, launch_add_norm
from rocm_attn.kernels.model.few_rows import launch_few_rows
from rocm_attn.kernels.model.gate import CLAMPED, GELU, SILU, GateForm, launch_gate
from rocm_attn.kernels.model.normed_product import launch_normed_product
from rocm_attn.kernels.model.peer_sum import PeerMemory, launch_peer_sum, memory_bytes
from rocm_attn.kernels.model.row_product import launch_row_product
from rocm_attn.kernels.tuning.expert_tiles import expert_tiles, tiles_of_fixed_bits
from rocm_attn.kernels.tuning.extend_tiles import extend_choices
from rocm_attn.kernels.tuning.segment_tiles import SegmentTiles, segment_tiles
from rocm_attn.kernels.tuning.tiles import NoTiles
from rocm_attn.machine.target import known_target
from rocm_attn.problem import UNLIMITED_WINDOW, KVEncoding, PoolKind, Problem, Scales
from rocm_attn.providers.tiles import codes_of, decode_cut_of, decode_tiles_of
from rocm_attn.providers.triton import TRITON
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.head_weights import HeadWeights
from rocm_attn.step.options import RuntimeOptions
from tests.amd.kernels.fold_cases import step_of_state
from tests.amd.offline.other_launches import (
    KV_LEN,
    launch_head_of_graph,
    launch_merges,
    launch_of_engines,
    launch_whole_fill,
)
from tests.amd.worlds.world import padded_to

CPU = torch.device("cpu")

SMALL_POOL_BYTES = 64 << 20
# Above this Triton can no longer assume that an offset fits 32 bits, and generates other code.
LARGE_POOL_BYTES = 2 << 30

# Tokens of the longest sequence of a runtime.
MAX_KV_LEN = 4096

# Mean rows of an expert: for each tuning choice.
EXPERT_ROWS = (1, 16, 128, 256)

# More new tokens than any tuning choice for short sequences serves.
LONG_Q_LEN = 128
# With 8 KV heads these are more rows than a grid has programs, which cuts the merge in another way.
MANY_SEQS = 1024


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the matrix.

    heads:     query heads, KV heads
    dims:      head_dim, v_head_dim
    is_large:  true if K and V lie in more than 2 GiB each
    on_oldest: true if the row also runs with the oldest supported Triton
    kv:        the encoding of K and V; rows of eight-bit ones launch only kernels that read or write pages
    scales:    the extent of a scale
    pool:      how K and V are kept
    """

    arch: str
    heads: tuple[int, int]
    dims: tuple[int, int]
    dtype: torch.dtype
    page_size: int
    is_large: bool = False
    on_oldest: bool = False
    kv: KVEncoding = KVEncoding.LIKE_Q
    scales: Scales = Scales.NONE
    pool: PoolKind = PoolKind.SPLIT

    def __str__(self) -> str:
        (q_heads, kv_heads), (head_dim, v_head_dim) = self.heads, self.dims
        dtype = str(self.dtype).removeprefix("torch.")
        size = "above" if self.is_large else "below"
        kind = "-latent" * (self.pool is PoolKind.LATENT)
        dims = f"{head_dim}-{v_head_dim}{kind}"
        kv = "" if self.kv is KVEncoding.LIKE_Q else f"-{self.kv.name}_{self.scales.name}".lower()
        return f"{self.arch}-{q_heads}x{kv_heads}-{dims}-{dtype}{kv}-page{self.page_size}-{size}_2gib"

    @property
    def problems(self) -> list[Problem]:
        """The layers of the row: plain, and with the score options of models of its head_dim."""
        plain = Problem(
            num_q_heads=self.heads[0],
            num_kv_heads=self.heads[1],
            head_dim=self.dims[0],
            v_head_dim=self.dims[1],
            dtype=self.dtype,
            page_size=self.page_size,
            scale=self.dims[0] ** -0.5,
            kv_encoding=self.kv,
            kv_scales=self.scales,
            pool=self.pool,
        )
        if self.pool is PoolKind.LATENT:  # DeepSeek-V3; a window and sinks, and codes
            scored = replace(plain, logits_soft_cap=50.0, window_left=4095, has_sinks=True)
            encoding = KVEncoding.E4M3FNUZ if self.arch == "gfx942" else KVEncoding.E4M3FN
            return [plain, replace(scored, kv_encoding=encoding, kv_scales=Scales.LAYER)]
        if self.dims[0] == 64:  # gpt-oss, ModernBERT
            both_sides = replace(plain, window_left=64, window_right=64)
            return [plain, replace(plain, window_left=127, has_sinks=True), both_sides]
        if self.dims[0] == 80:
            return [plain, replace(plain, has_alibi_slopes=True), replace(plain, window_right=UNLIMITED_WINDOW)]
        if self.dims[0] == 96:  # which rows of windows serve
            return [plain, replace(plain, window_left=1023)]
        # Gemma 2; in float32, which no model is served in, a window costs sm_90 8 bytes of spilled registers. Rows of
        # short windows serve some heads.
        of_heads = {128: 1023, 256: 511}.get(self.dims[0], 4095)
        window_left = UNLIMITED_WINDOW if self.dtype == torch.float32 else of_heads
        return [plain, replace(plain, logits_soft_cap=50.0, window_left=window_left)]


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# One layer for each row of tuning/decode.json, with the most query heads it serves; they meet every extend row too.
_AMD_LAYERS = (
    ((64, 8), (64, 64), BF16, 16),
    ((32, 8), (128, 128), BF16, 16),
    ((32, 1), (80, 96), FP16, 1),
    ((8, 4), (256, 256), BF16, 16),
    ((32, 1), (192, 128), BF16, 128),
    ((32, 1), (128, 128), FP32, 16),
    ((32, 1), (256, 256), FP32, 64),
    ((32, 1), (512, 512), BF16, 16),
)
_SM_90_LAYERS = (
    ((64, 8), (64, 64), BF16, 16),
    ((32, 8), (128, 128), BF16, 16),
    ((64, 1), (80, 96), FP16, 1),
    ((8, 4), (256, 256), BF16, 16),
    ((64, 1), (192, 128), BF16, 128),
    ((16, 1), (128, 128), FP32, 16),
    ((16, 1), (256, 256), FP32, 64),
    ((16, 2), (512, 512), BF16, 16),
    ((32, 1), (512, 512), BF16, 16),
    ((16, 1), (512, 512), FP32, 16),
)
_SM_80_LAYERS = (
    ((32, 8), (128, 128), BF16, 16),
    ((8, 4), (256, 256), BF16, 16),
    ((16, 1), (128, 128), FP32, 16),
    ((16, 1), (256, 256), FP32, 64),
    ((16, 1), (512, 512), BF16, 16),
)

ROWS = (
    *(
        Row(arch, *layer, is_large=is_large, on_oldest=layer is _AMD_LAYERS[1] and not is_large)
        for arch in ("gfx942", "gfx950")
        for is_large in (False, True)
        for layer in _AMD_LAYERS
    ),
    # Codes that each target reads by itself, and one that it does not; with scales per row and per token.
    *(
        Row(arch, *layer, kv=kv, scales=scales, on_oldest=arch == "gfx942" and layer is _AMD_LAYERS[1])
        for arch, kv in (("gfx942", KVEncoding.E4M3FNUZ), ("gfx950", KVEncoding.E4M3FN), ("sm_90", KVEncoding.E4M3FN))
        for layer in (_SM_90_LAYERS if arch == "sm_90" else _AMD_LAYERS)
        for scales in (Scales.HEAD, Scales.TOKEN)
        if layer[2] != FP32 and not (arch == "gfx942" and scales is Scales.TOKEN and max(layer[1]) > 256)
    ),
    Row("gfx942", *_AMD_LAYERS[2], kv=KVEncoding.E5M2, scales=Scales.HEAD),
    # More query heads on a KV head than any row serves at once: they are cut into blocks.
    Row("gfx942", (128, 1), (128, 128), BF16, 16),
    *(Row("sm_90", *layer) for layer in _SM_90_LAYERS),
    # Heads with tiles for decode or for short sequences, of fewer query heads a KV head than those above, or of more.
    *(Row("sm_90", (heads, 4), (dim, dim), BF16, 16) for heads, dim in ((16, 24), (16, 96), (32, 192))),
    *(Row("sm_90", (heads, 1), (dim, dim), BF16, 16) for heads, dim in ((32, 64), (32, 80), (64, 128), (64, 256))),
    # More blocks of columns than in heads of 256, and rows of K whose V is no whole block.
    *(Row("sm_90", (16, 2), dims, BF16, 16) for dims in ((320, 320), (384, 384), (512, 32))),
    *(Row("sm_90", heads, (16, 16), BF16, 16) for heads in ((12, 3), (8, 4))),
    # Small heads that are read as one, and those that are not.
    *(
        Row("sm_90", heads, (dim, dim), BF16, 16)
        for heads, dim in (((10, 5), 24), ((20, 2), 24), ((30, 3), 40), ((20, 2), 40), ((16, 1), 16), ((16, 1), 24))
    ),
    *(Row("sm_90", heads, (16, 16), BF16, 16) for heads in ((20, 4), (40, 4))),
    *(Row("sm_90", heads, (40, 40), BF16, 16) for heads in ((6, 3), (8, 2))),
    Row("sm_90", (16, 2), (24, 24), BF16, 16),
    # Heads whose rows are no whole lines of memory, one by one and two at a time, with few query heads and with many.
    *(Row("sm_90", heads, (dim, dim), BF16, 16) for heads in ((16, 2), (8, 1)) for dim in (48, 72, 80)),
    Row("sm_90", (40, 2), (80, 80), BF16, 16),
    *(Row("sm_90", (16, kv_heads), (dim, dim), BF16, 16) for kv_heads, dim in ((1, 64), (2, 160))),
    *(Row("sm_80", *layer) for layer in _SM_80_LAYERS),
    *(
        Row(
            arch,
            (heads, 1),
            (576, 512),
            BF16,
            64,
            is_large=is_large,
            on_oldest=arch.startswith("gfx") and heads == 16 and not is_large,
            pool=PoolKind.LATENT,
        )
        for arch in ("gfx942", "gfx950", "sm_90", "sm_80")
        for is_large in ((False, True) if arch.startswith("gfx") else (False,))
        # One for each row of tuning/latent.json.
        for heads in (16, 32, 128)
        if heads <= 32 or arch != "sm_80"
    ),
    Row("sm_90", (16, 1), (576, 512), FP32, 64, pool=PoolKind.LATENT),
)


def launch_all(row: Row) -> None:
    """Launches every kernel that the runtime launches for the row's layers; an offline driver only compiles them.

    Rows of eight-bit codes launch only kernels that read or write pages: the others are those of other rows.

    The pool's size changes only kernels that read or write pages, so rows above 2 GiB launch those alone. So do rows
    for NVIDIA, where tests run the others.
    """
    if row.pool is PoolKind.LATENT:
        _launch_latent(row)
        return
    runtime, rows = _runtime(row, row.problems)
    _launch_step(runtime, _batch(rows, [1] * 16))
    for num_seqs in _numbers_of_decodes(row):
        _launch_step(runtime, _batch(rows[: min(num_seqs, 16)], [1] * min(num_seqs, 16)), pad_to=num_seqs)
    _launch_step(runtime, _batch(rows, [32] * 16))
    short = _short_q_lens(row)
    for q_len in (*short, LONG_Q_LEN) if max(short, default=0) >= 32 else short:
        _launch_step(runtime, _batch(rows, [q_len] * 16))
    _launch_row_work(runtime, _batch(rows, [1] * 16))
    _launch_masked_step(row)
    if row.kv is not KVEncoding.LIKE_Q:
        if _has_segments(row):
            launch_mixed_step(row, row.problems, deterministic=True)
        return
    if not row.is_large:
        _launch_experts(row)
        _launch_model(row)
    if runtime.target.is_amd:
        launch_rest(row)
    runtime, rows = _runtime(row, row.problems, deterministic=True)
    _launch_step(runtime, _batch(rows, [1, 32] * 8), with_lse=True)
    if _has_short_segment_tiles(row):
        _launch_step(runtime, _batch(rows, [2] * 16))
    # In float32, which no model is served in, extend that is not causal costs sm_90 24 bytes of spilled registers.
    if runtime.target.is_amd or row.dtype != torch.float32:
        _launch_shared_step(row)


def launch_mixed_step(row: Row, problems: list[Problem], *, deterministic: bool) -> None:
    """Launches a step of decode and extend of these layers, with LSE, over a pool of the row's size."""
    runtime, rows = _runtime(row, problems, deterministic=deterministic)
    _launch_step(runtime, _batch(rows, [1, 32] * 8), with_lse=True)


def _numbers_of_decodes(row: Row) -> list[int]:
    """Returns other numbers of sequences than 16 for which decode's tiles, or where parts are added up, are others."""
    problem, target = row.problems[0], known_target(row.arch)
    cut = decode_cut_of(problem, target, decode_tiles_of(problem, target))
    numbers = {1, MANY_SEQS, max(1, -(-cut.merge_rows // cut.rows))} if cut.merge_group or cut.others else set[int]()
    numbers |= {max(1, math.ceil(other.least / other.cut.rows)) for other in cut.others}
    return sorted(numbers - {16})


def _segment_tiles(row: Row) -> SegmentTiles:
    """Returns the segment tiles of the row's layers. Raises NoTiles."""
    codes = codes_of(row.problems[0])
    return segment_tiles(row.arch, head_dim=row.dims[0], v_head_dim=row.dims[1], dtype=row.dtype, codes=codes)


def _has_short_segment_tiles(row: Row) -> bool:
    """True if deterministic steps of few new tokens per sequence have their own tiles, which two tokens take."""
    tiles = _segment_tiles(row)
    return any(short != tiles.extend and 2 * row.problems[0].gqa_ratio <= short.query_rows for short in tiles.short)


def shares_segments(row: Row) -> bool:
    """True if programs of the row's deterministic layers share rows: by tiles, and if blocks of heads are equal."""
    extend = _segment_tiles(row).extend
    return extend.programs_per_cu > 0 and extend.has_equal_blocks(row.problems[0].gqa_ratio)


def _has_segments(row: Row) -> bool:
    """True if deterministic kernels serve the row's layers."""
    try:
        _segment_tiles(row)
    except NoTiles:
        return False
    return True


def _short_q_lens(row: Row) -> list[int]:
    """New tokens per sequence for which the tuning choices of short sequences are chosen.

    One token is a decode step.
    """
    problem = row.problems[0]
    tuned = extend_choices(
        row.arch,
        gqa_ratio=problem.gqa_ratio,
        num_kv_heads=problem.num_kv_heads,
        head_dim=problem.head_dim,
        v_head_dim=problem.v_head_dim,
        dtype=problem.dtype,
        codes=codes_of(problem),
    )
    q_lens = [short.max_rows // problem.gqa_ratio for short in tuned[:-1]]
    return [q_len for q_len in q_lens if q_len > 1]


def launch_rest(row: Row) -> None:
    """Launches the rest of launch_all for NVIDIA: fix-ups, and below 2 GiB the kernels of metadata and of engines."""
    runtime, rows = _runtime(row, row.problems)
    _launch_fix_ups(runtime)
    if row.dtype.itemsize == 2 and row.page_size % 8 == 0:
        _launch_vectorised(row)
    _launch_record_stores(row)
    _launch_fold_rows(row)
    if row.is_large:
        return
    _launch_step(runtime, _batch(rows[:1], [1]))
    _launch_step(runtime, _batch(rows, [1] * 16), pad_to=MANY_SEQS)
    lengths = torch.full((16,), KV_LEN, dtype=torch.int32)
    _launch_step(runtime, replace(_batch(rows, [1, 32] * 8), inputs=DeviceInputs(kv_len=lengths)), with_lse=True)
    launch_whole_fill(row.page_size)
    launch_head_of_graph()
    launch_of_engines(row.page_size)
    launch_merges(row.problems[0])


def _launch_latent(row: Row) -> None:
    """Launches every kernel over latent pages."""
    runtime, rows = _runtime(row, row.problems)
    _launch_step(runtime, _batch(rows, [1] * 16))
    _launch_step(runtime, _batch(rows, [32] * 16))
    launch_mixed_step(row, row.problems[:1], deterministic=True)
    masked = replace(row.problems[0], custom_mask=True)
    for deterministic in (False, True):
        runtime, rows = _runtime(row, [masked], deterministic=deterministic)
        _launch_step(runtime, _with_random_mask(_batch(rows, [8] * 16)))
    _launch_shared_step(row)


def _launch_shared_step(row: Row) -> None:
    """Launches a step with a prefix in each sequence; layers that cannot share it decode."""
    runtime, rows = _runtime(row, row.problems)
    prefixes = SharedPrefixes([PrefixGroup(1, KV_LEN // 2)] * 16)
    _launch_step(runtime, replace(_batch(rows, [1] * 16), prefixes=prefixes))


def _launch_masked_step(row: Row) -> None:
    """Launches steps with a mask, in a separate runtime: with masked layers every fill derives where masks begin."""
    runtime, rows = _runtime(row, [replace(problem, custom_mask=True) for problem in row.problems])
    for q_len in (*_short_q_lens(row), LONG_Q_LEN):
        _launch_step(runtime, _with_random_mask(_batch(rows, [q_len] * 16)))
    if _has_segments(row):
        runtime, rows = _runtime(row, [replace(row.problems[0], custom_mask=True)], deterministic=True)
        _launch_step(runtime, _with_random_mask(_batch(rows, [8] * 16)))


def _runtime(row: Row, problems: list[Problem], *, deterministic: bool = False) -> tuple[AttentionRuntime, list[int]]:
    """Returns a runtime of these layers over a pool of the row's size, and rows of 16 requests."""
    page_bytes = row.page_size * row.heads[1] * min(row.dims) * row.dtype.itemsize
    pool_bytes = LARGE_POOL_BYTES if row.is_large else SMALL_POOL_BYTES
    runtime = build_runtime(
        problems,
        RuntimeOptions(
            # One more than fit, so that a large pool is above the limit and not at it.
            num_pages=pool_bytes // page_bytes + 1,
            max_num_seqs=MANY_SEQS,
            max_kv_len=MAX_KV_LEN,
            provider="triton",
            deterministic=deterministic,
        ),
        device=CPU,
        target=known_target(row.arch),
        guards=Guards().without("echo_check"),  # kernels that are only compiled compute no answer
    )
    for layer, problem in enumerate(problems):
        runtime.head_weights.set(layer, HeadWeights.random(problem, torch.Generator()))
    rows = [runtime.table.admit() for _ in range(16)]
    for table_row in rows:
        runtime.table.reserve(table_row, KV_LEN)
    runtime.table.mark_stored(np.array(rows), np.full(len(rows), KV_LEN))
    return runtime, rows


def _batch(rows: list[int], q_lens: list[int]) -> StepBatch:
    """The first sequences of the table, all KV_LEN tokens long, with these numbers of new tokens."""
    return StepBatch(
        rows=np.array(rows, np.int32),
        kv_len=np.full(len(rows), KV_LEN, np.int32),
        q_len=np.array(q_lens, np.int32),
    )


def _with_random_mask(batch: StepBatch) -> StepBatch:
    """Returns the step with a mask of its new keys alone, for which all masked steps have room."""
    return replace(batch, mask=random_mask(batch.kv_len, batch.q_len, torch.Generator(), keys_before=0))


def _launch_step(
    runtime: AttentionRuntime, batch: StepBatch, *, pad_to: int | None = None, with_lse: bool = False
) -> None:
    step = runtime.step(batch, runtime.plan(batch, padded_to(pad_to))).parts[0]
    num_tokens, inputs = len(step.token_ids), ZeroInputs(CPU)
    for layer, problem in enumerate(selection.problem for selection in runtime.selections):
        q, k, v, out = inputs.of(problem, num_tokens)
        lse = inputs.of_lse(problem, num_tokens) if with_lse else None
        # A kernel that stores K and V itself is another variant of it.
        step.layers.store_and_attend(layer, q, k, v, out, lse)
        step.layers.store(layer, k, v)
        step.layers.attend(layer, q, out, lse)
    runtime.end_step()


def _launch_row_work(runtime: AttentionRuntime, batch: StepBatch) -> None:
    """Launches the kernels around attention: rotation of whole and partial rows before it, and the finish after it."""
    step, problem = runtime.step(batch).parts[0], runtime.selections[0].problem
    q, k, v, out = ZeroInputs(CPU).of(problem, len(step.token_ids))
    dim, norm = problem.head_dim, RowNorm(q[0, 0], 1e-6, 1.0)
    whole = RopeTable(torch.empty(MAX_KV_LEN, dim))
    part = RopeTable(torch.empty(MAX_KV_LEN, min(dim, 32)), RopePairs.NEIGHBOURS, at_end=True)
    step.layers.rope_and_store(0, q, k, v, q, QkvWork(whole, norm, norm))
    step.layers.rope_and_store(0, q, k, v, q, QkvWork(part, v_norm=RowNorm(v[0, 0], 1e-6)))
    step.layers.rope_queries(0, q, q, QkvWork(whole, norm))
    for gate in (None, out[..., 0].contiguous(), torch.empty_like(out)):
        step.layers.finish(0, out, gate=gate, undo=part)
    runtime.end_step()


def _launch_fix_ups(runtime: AttentionRuntime) -> None:
    """Launches the fix-ups around kernels that do not clear pads and that multiply V after a sequence's end."""
    ops, pages, problem = TRITON.ops(), runtime.pool.layer(0), runtime.selections[0].problem
    seqs, counts = (torch.empty(size, dtype=torch.int32) for size in (16, 4))
    out = torch.empty(16, problem.num_q_heads, problem.v_head_dim, dtype=problem.dtype)
    # In some engines page 0 is an ordinary page; elsewhere it belongs to no sequence.
    for pads, null_page in ((NO_PADS, True), (Pads(1), False)):
        of_table = {"table": runtime.table.full.entries, "row_of_seq": seqs, "kv_len": seqs, "q_len": seqs}
        ops.zero_tails(StepTensors.of(seqs[:0], pads, TableTerms(null_page=null_page), **of_table), pages)
    ops.clear_pads(counts, out, None, None)
    ops.clear_pads(counts, out, torch.empty(16, problem.num_q_heads), torch.empty(16, dtype=torch.int32))


def _launch_vectorised(row: Row) -> None:
    """Launches the store and the zeroing of tails after it, over the vectorised pages that AITER's kernels read."""
    (_, heads), ops, tokens = row.heads, TRITON.ops(), 16
    page_bytes = row.page_size * heads * min(row.dims) * row.dtype.itemsize
    num_pages = (LARGE_POOL_BYTES if row.is_large else SMALL_POOL_BYTES) // page_bytes + 1
    pages = empty_vectorised_pages(num_pages, row.page_size, heads, row.dims, 8, dtype=row.dtype, device=CPU)
    k, v = (torch.empty(tokens, heads, dim, dtype=row.dtype) for dim in row.dims)
    of_token, counts = (torch.empty(size, dtype=torch.int32) for size in (tokens, 4))
    table = torch.empty(tokens, 64, dtype=torch.int32)
    ops.store_kv(k, v, of_token, counts, LayerPages.plain(*pages), null_page=True)
    step = StepTensors.of(table[:0], table=table, row_of_seq=of_token, kv_len=of_token, q_len=of_token)
    ops.zero_tails(step, LayerPages.plain(*pages))


def _launch_record_stores(row: Row) -> None:
    """Launches the stores of DeepSeek-V3.2's and V4's rows as records, in both encodings."""
    kinds = (576, Scales.GROUP), (512, Scales.FOOTER)
    for encoding, (dim, scales) in itertools.product((Encoding.E4M3FN, Encoding.E4M3FNUZ), kinds):
        form = PageFormat(encoding, PoolKind.LATENT, row.page_size, 1, dim, 512, scales)
        num_pages = (LARGE_POOL_BYTES if row.is_large else SMALL_POOL_BYTES) // (row.page_size * 512) + 1
        records = LayerPages.latent(torch.empty(num_pages, form.line, dtype=encoding.dtype), form)
        q, k = (torch.empty(16, heads, dim, dtype=torch.bfloat16) for heads in (16, 1))
        of_token, counts = (torch.empty(size, dtype=torch.int32) for size in (16, 4))
        work = QkvWork(RopeTable(torch.empty(KV_LEN, 64), at_end=True), k_norm=RowNorm(k[0, 0, : form.coded], 1e-6))
        ops = TRITON.ops()
        ops.store_kv(k, k[..., :512], of_token, counts, records, null_page=True)
        given = Projected(q, k, k[..., :512], q)
        ops.rope_store(given, TokenPlaces(of_token, of_token, counts), work, records, null_page=True)


def _launch_fold_rows(row: Row) -> None:
    """Launches what makes DeepSeek-V4's rows of 4 tokens, with their index keys, and of 128, also from bfloat16."""
    for tokens, columns, dtype in ((4, 640, torch.float32), (128, 512, torch.float32), (4, 640, torch.bfloat16)):
        width = columns * (1 + (tokens == 4))
        num_pages = (LARGE_POOL_BYTES if row.is_large else SMALL_POOL_BYTES) // (128 * width * dtype.itemsize) + 1
        state = LayerPages.plain(*(torch.empty(num_pages, 128, 1, width, dtype=dtype) for _ in range(2)))
        of_token, counts = (torch.empty(size, dtype=torch.int32) for size in (16, 4))
        table, rows = torch.empty(16, 64, dtype=torch.int32), torch.empty(16, columns)
        step = step_of_state(table, of_token, of_token, counts)
        TRITON.ops().fold_rows(state, step, rows, tokens=tokens, overlaps=tokens == 4)


def _launch_experts(row: Row) -> None:
    """Launches experts for few tokens and many, with biases and without, and what chooses and sums them."""
    experts, width = 8, 256
    weight = torch.empty(experts, width, width, dtype=row.dtype)
    for rows in EXPERT_ROWS:
        bias, num_tokens = weight[:, 0].contiguous() if rows == 1 else None, rows * experts // 2
        expert = torch.arange(2 * num_tokens).view(num_tokens, 2) % experts
        x, out = (torch.empty(size, width, dtype=row.dtype) for size in (num_tokens, 2 * num_tokens))
        tiles = expert_tiles(row.arch, row.dtype, rows)
        groups = ExpertGroups.of(expert, experts)
        launch_sort_pairs(expert.int(), groups)
        gated = torch.empty(2 * num_tokens, width // 2, dtype=row.dtype)
        args = ProductArgs.of_experts(x, weight, bias, groups, groups.tokens, gated, GateForm(SILU))
        launch_expert_product(args, tiles=tiles)
        args = ProductArgs.of_experts(out.clone(), weight, bias, groups, None, out)
        launch_expert_product(args, tiles=tiles)
    for rows in EXPERT_ROWS:
        x, tiles = torch.empty(rows, width, dtype=row.dtype), tiles_of_fixed_bits(row.arch, row.dtype, rows)
        launch_expert_product(ProductArgs.of_all(x, weight[0], weight[0, 0], x.clone()), tiles=tiles)
        launch_expert_product(
            ProductArgs.of_all(x, weight[0], None, x[:, : width // 2].clone(), GateForm(SILU)), tiles=tiles
        )
    x, out = (torch.empty(size, width, dtype=row.dtype) for size in (num_tokens, 2 * num_tokens))
    share = torch.empty(num_tokens, 2)
    launch_combine(out, None, share, None, None, x)
    launch_combine(out, groups.places, share, x, x[:, :1].contiguous(), x)
    rules = (
        ChoiceRule(1, 1, 1, True, True, 1.0),
        ChoiceRule(8, 4, 2, False, True, 2.5, SHARED),
        ChoiceRule(1, 1, 1, True, True, 1.0, SHARED_BY_LOGIT),
    )
    for rule in rules:
        expert, share = (torch.empty(4, 8, dtype=dtype) for dtype in (torch.int32, torch.float32))
        correction = None if rule.softmax else torch.empty(256)
        logits = torch.empty(4, 320, dtype=row.dtype)[:, : 256 + (rule.shared == SHARED_BY_LOGIT)]
        launch_choose(logits, correction, expert, share, rule)
    expert, share = torch.empty(2, 8, dtype=torch.int32), torch.empty(2, 8)
    for x in (torch.empty(2, dim, dtype=row.dtype) for dim in (2048, 7168)):
        inner, wide = torch.empty(16, 768, dtype=row.dtype), torch.empty(4, 1536, x.shape[1], dtype=row.dtype)
        down = torch.empty(4, x.shape[1], 768, dtype=row.dtype)
        launch_inner_products(x, wide, wide[:, :, 0].contiguous(), expert, inner, 132, GateForm(SILU))
        launch_inner_products(x, wide[:, :768].contiguous(), None, expert, inner, 132)
        launch_expert_sums(inner, down, None, expert, share, None, None, x, 132)
        launch_expert_sums(inner, down, down[:, :, 0].contiguous(), expert, share, x, x[:, :1].contiguous(), x, 132)


def _launch_model(row: Row) -> None:
    """Launches sums with norms, gates of each form, products of one row and of a few, and sums over ranks."""
    rows, matrix = torch.empty(4, 2048, dtype=row.dtype), torch.empty(2048, 2048, dtype=row.dtype)
    for terms in (rows[None], torch.empty(4, 4, 2048)):
        launch_add_norm(NormedSum(rows, terms, rows[0], rows, rows, 1.0, 1e-5))
        launch_few_rows(rows, matrix, rows[0], terms, 132)
    for form in (GateForm(SILU), GateForm(GELU), GateForm(CLAMPED, 7.0, 1.702)):
        launch_gate(rows, torch.empty(4, 1024, dtype=row.dtype), form)
        launch_few_rows(rows, matrix, None, torch.empty(1, 4, 1024, dtype=row.dtype), 132, form)
    wide = torch.empty(64, 8192, dtype=row.dtype)
    normed = NormedSum(wide[:1], wide[:1], wide[0], wide[:1], wide[:1], 1.0, 1e-5)
    launch_normed_product(normed, wide, None, rows[:1, :64].clone(), 132)
    normed = NormedSum(rows[:1], rows[:1], rows[0], rows[:1], rows[:1], 1.0, 1e-5)
    launch_normed_product(normed, matrix, None, rows[1:2, :1024].clone(), 132, GateForm(SILU))
    for bias in (None, rows[0]):
        launch_row_product(rows[:1], matrix, bias, rows[1:2])
        launch_normed_product(normed, matrix, bias, rows[1:2], 132)
    for ranks in (2, 8):
        memory = PeerMemory.of(torch.zeros(memory_bytes(ranks), dtype=torch.uint8), [0] * ranks, 0)
        for num in (512, 1 << 19):
            launch_peer_sum(torch.empty(num, dtype=row.dtype), memory)
