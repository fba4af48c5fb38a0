"""The stand-in's get_pa_metadata_v1 and pa_persistent_fwd: decode over 8-bit vectorised caches, by a schedule.

A share is [sequence, row of its partial result or -1, first token, end, first entry of the page list, end, nothing,
first query head and end, 16 bits each]. All KV heads have the same shares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.amd.aiter.checks import (
    Scores,
    attend,
    linear,
    require,
    require_tensor,
    require_vectorised,
    rows_of,
    run,
    spans,
    times_zero,
)
from tests.amd.aiter.latent_schedule import COMPUTE_UNITS
from tests.amd.aiter.signatures import Release

BLOCK = 1024
# Head counts for which mla_reduce_v1 has an instance, at 128 elements, in every release that takes strides of scales.
REDUCED_HEADS = (1, 2, 4, 8, 10, 16, 32, 40, 64, 128)
WORK_BUFFERS = ("work_indptr", "work_info", "reduce_indptr", "reduce_final_map", "reduce_partial_map")


def _require_buffers(call: Mapping[str, Any], num_seqs: int, num_kv_heads: int) -> list[Tensor]:
    """Checks the shapes that get_pa_metadata_info_v1 gives."""
    shares = num_seqs + COMPUTE_UNITS - 1
    shapes = (
        (COMPUTE_UNITS + 1,),
        (shares * num_kv_heads, 8),
        (num_seqs + 1,),
        (num_seqs, 2),
        (min(shares, 2 * (COMPUTE_UNITS - 1)),),
    )
    return [
        require_tensor(name, call[name], torch.int32, shape) for name, shape in zip(WORK_BUFFERS, shapes, strict=True)
    ]


def get_pa_metadata_v1(call: Mapping[str, Any]) -> None:
    num_seqs, num_kv_heads = len(call["context_lens"]), call["num_heads_k"]
    for name in ("seqlens_qo_indptr", "pages_kv_indptr"):
        require_tensor(name, call[name], torch.int32, (num_seqs + 1,))
    require_tensor("context_lens", call["context_lens"], torch.int32, (num_seqs,))
    require_tensor("work_metadata_ptrs", call["work_metadata_ptrs"], torch.uint64, (2,))
    require(COMPUTE_UNITS % num_kv_heads == 0, "as many shares for each KV head")
    require((call["kv_granularity"], call["block_size"]) == (BLOCK, BLOCK), "shares of whole pages")
    require((call["max_seqlen_qo"], call["uni_seqlen_qo"]) == (1, 1), "one new token in each sequence")
    require(call["topk"] == -1 and call["max_split_per_batch"] == -1, "all keys, in any number of shares")
    run(_run_schedule, call, _require_buffers(call, num_seqs, num_kv_heads))


def _run_schedule(call: Mapping[str, Any], buffers: Sequence[Tensor]) -> None:
    qo_indptr, pages_indptr, addresses = (
        call[name] for name in ("seqlens_qo_indptr", "pages_kv_indptr", "work_metadata_ptrs")
    )
    num_kv_heads, gqa_ratio = call["num_heads_k"], call["num_heads_per_head_k"]
    indptr, work, reduce_indptr, final_map, partial_map = buffers
    for buffer in buffers:
        buffer.fill_(-(2**31))
    addresses.view(torch.int64).copy_(torch.tensor([indptr.data_ptr(), work.data_ptr()]))
    blocks = [-(-length // BLOCK) for length in call["context_lens"].tolist()]
    require(blocks == pages_indptr.diff().tolist(), "lengths and pages disagree")
    share = -(-sum(blocks) // (COMPUTE_UNITS // num_kv_heads))
    shares: list[list[int]] = []
    for head in range(num_kv_heads):
        heads = head * gqa_ratio | (head + 1) * gqa_ratio << 16
        num_partials, ends, tiles = 0, [0], []
        for seq, (first, end) in enumerate(spans(pages_indptr, 2**31 - 1, "pages_kv_indptr")):
            require(end > first, f"sequence {seq} has no key")
            token = int(qo_indptr[seq].item())
            cuts = [*range(first, end, share), end]
            for begin, stop in pairwise(cuts):
                partial = -1 if len(cuts) == 2 else num_partials
                num_partials += partial != -1
                shares.append([seq, partial, token, token + 1, begin, stop, 0, heads])
            if len(cuts) > 2:  # a sequence with one share is written to its place, without a reduction
                tiles.append([token, token + 1])
                ends.append(num_partials)
    require(len(shares) <= len(work) and num_partials <= len(partial_map), "more shares than there is room for")
    work[: len(shares)] = torch.tensor(shares, dtype=torch.int32)
    partial_map[:num_partials] = torch.arange(num_partials, dtype=torch.int32)
    final_map[: len(tiles)] = torch.tensor(tiles, dtype=torch.int32).view(-1, 2)
    reduce_indptr.fill_(ends[-1])
    reduce_indptr[: len(ends)] = torch.tensor(ends, dtype=torch.int32)
    indptr.copy_(torch.arange(COMPUTE_UNITS + 1).clamp(max=len(shares)))
    indptr[-1] = len(shares)


def pa_persistent_fwd(release: Release, eight_bits: torch.dtype, call: Mapping[str, Any]) -> None:
    q, out = call["Q"], call["output"]
    num_seqs, num_heads, dim = q.shape
    require_tensor("Q", q, torch.bfloat16, (None, None, 128), contiguous=False)
    require(q.stride(1) == dim, "only the stride between rows of Q is read")
    require_tensor("output", out, torch.bfloat16, q.shape)
    k_cache, _ = require_vectorised(call["K"], call["V"], eight_bits)
    num_pages, num_kv_heads, _, block, _ = k_cache.shape
    require(block == BLOCK, f"no kernel with a factor a token for blocks of {block}")
    require(k_cache.nbytes < 2**32, f"byte offsets wrap at 4 GiB, and a cache takes {k_cache.nbytes}")
    require(num_heads in REDUCED_HEADS, f"parts of {num_heads} heads are not put together")
    require(num_heads // num_kv_heads <= 64, "the largest tile has 64 rows")
    require(math.isclose(call["softmax_scale"], dim**-0.5, rel_tol=2**-24), "the scale is that of the head size")
    require(call["mask"] == 1, "no kernel without a mask")
    require(call["max_qlen"] == 1, "one token a sequence")
    scale_values = [
        require_tensor(name, call[name], torch.float32, (num_pages, num_kv_heads, block), contiguous=False)
        for name in ("K_QScale", "V_QScale")
    ]
    require(scale_values[0].stride() == scale_values[1].stride(), "scales of V are found by the strides of those of K")
    if release.is_before(0, 1, 13):
        require(scale_values[0].is_contiguous(), "scales are stored per page")
    for name in ("qo_indptr", "kv_indptr"):
        require_tensor(name, call[name], torch.int32, (num_seqs + 1,))
    require_tensor("kv_indices", call["kv_indices"], torch.int32, (None,))
    require_tensor("context_lens", call["context_lens"], torch.int32, (num_seqs,))
    run(_run_persistent, call, _require_buffers(call, num_seqs, num_kv_heads))


def _run_persistent(call: Mapping[str, Any], buffers: Sequence[Tensor]) -> None:
    q, out, k_cache, kv_indices = call["Q"], call["output"], call["K"], call["kv_indices"]
    indptr, work, reduce_indptr, final_map, partial_map = buffers
    keys, values = linear(k_cache, call["V"])
    pages = spans(call["kv_indptr"], len(kv_indices), "kv_indptr")
    gqa_ratio, lengths = q.shape[1] // k_cache.shape[1], call["context_lens"].tolist()
    partials: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    for seq, partial, token, _, first, end, _, heads in work[: int(indptr[-1].item())].tolist():
        require(pages[seq][0] <= first < end <= pages[seq][1], "a schedule of other lengths")
        some = slice(heads & 0xFFFF, heads >> 16)
        head, entries = some.start // gqa_ratio, kv_indices[first:end]
        num_keys = min(lengths[seq] - (first - pages[seq][0]) * BLOCK, (end - first) * BLOCK)
        k, v = (
            rows_of(side, entries, "kv_indices")[:, head].double()
            * scale_values[entries.long(), head].flatten()[:, None]
            for side, scale_values in ((keys, call["K_QScale"]), (values, call["V_QScale"]))
        )
        visible = torch.ones(1, num_keys).bool()
        scores = Scores(q.shape[2] ** -0.5, visible)
        result, lse = attend(q[token : token + 1, some], k[:num_keys, None], v[:num_keys, None], scores)
        loaded = v[num_keys : -(-num_keys // 256) * 256]
        result = result[0] + times_zero(loaded)
        if partial == -1:
            out[token, some] = result.to(out.dtype)
        else:
            partials[partial, head] = (result, lse[0])
    for head in range(k_cache.shape[1]):
        for tile, (first, end) in enumerate(spans(reduce_indptr, len(partial_map), "reduce_indptr")):
            if end > first:
                results, lses = zip(*(partials[row, head] for row in partial_map[first:end].tolist()), strict=True)
                shares = torch.stack(lses).softmax(0)
                merged = (shares[..., None] * torch.stack(results)).sum(0)
                out[final_map[tile, 0], head * gqa_ratio : (head + 1) * gqa_ratio] = merged.to(out.dtype)
