"""Latent attention on the cases of attention_cases.py."""

import torch

from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.attention.cuts import DecodeCut
from rocm_attn.kernels.attention.decode_schedule import launch_decode_schedule
from rocm_attn.kernels.latent.cuts import latent_decode_cut, latent_extend_cut, latent_partials_words
from rocm_attn.kernels.latent.decode import launch_latent_decode
from rocm_attn.kernels.latent.extend import launch_latent_extend
from rocm_attn.kernels.latent.segment_decode import launch_latent_segment_decode
from rocm_attn.kernels.latent.segment_extend import launch_latent_segment_extend
from rocm_attn.kernels.tuning.latent_tiles import (
    LatentSegmentTiles,
    LatentTiles,
    latent_decode_tiles,
    latent_extend_tiles,
    latent_segment_tiles,
)
from tests.amd.kernels.attention_cases import Put, Tensors, as_it_is, garbage


def run_latent_decode(
    tensors: Tensors,
    *,
    compute_units: int = 5,
    fewest: int = 1,
    most: int = 1,
    tiles: LatentTiles | None = None,
    put: Put = as_it_is,
) -> None:
    """Runs schedule, decode and merge, with scratch memory that is NaN or garbage before."""
    case = tensors.case
    if tiles is None:
        tiles = latent_decode_tiles(
            tensors.arch,
            num_rows=case.heads[0] * most,
            dims=case.dims,
            dtype=case.dtype,
            is_coded=case.kv is not None,
        )
    args, cut = latent_decode_args(tensors, tiles, compute_units=compute_units, fewest=fewest, most=most, put=put)
    launch_decode_schedule(tensors.queries, args.schedule, cut)
    launch_latent_decode(args, scores=tensors.scores, cut=cut, tiles=tiles, mask=tensors.mask)


def latent_decode_args(
    tensors: Tensors, tiles: LatentTiles, *, compute_units: int, fewest: int = 1, most: int = 1, put: Put = as_it_is
) -> tuple[AttendArgs, DecodeCut]:
    """Returns decode's arguments, with scratch memory that is NaN or garbage, and its cut."""
    num_heads, v_head_dim = tensors.case.heads[0], tensors.case.dims[1]
    cut = latent_decode_cut(
        tiles,
        num_heads=num_heads,
        compute_units=compute_units,
        window_left=tensors.case.window_left,
        fewest=fewest,
        most=most,
    )
    schedule = put(garbage(cut.words(tensors.num_seqs), tensors.q.device))
    words = latent_partials_words(cut, num_heads=num_heads, v_head_dim=v_head_dim)
    partials = put(torch.full((words,), float("nan"), device=tensors.q.device))
    return tensors.args(schedule, partials), cut


def run_latent_extend(
    tensors: Tensors, *, min_q_len: int = 1, tiles: LatentTiles | None = None, put: Put = as_it_is
) -> None:
    """Runs schedule and extend, with a schedule that is garbage before."""
    case = tensors.case
    if tiles is None:
        tiles = latent_extend_tiles(tensors.arch, dims=case.dims, dtype=case.dtype, is_coded=case.kv is not None)
    causal = tensors.scores.visibility.causal
    cut = latent_extend_cut(tiles, num_heads=case.heads[0], causal=causal, min_q_len=min_q_len)
    args = tensors.extend_args(cut, put=put)
    launch_latent_extend(args, scores=tensors.scores, cut=cut, tiles=tiles, mask=tensors.mask)


def run_latent_segment_decode(
    tensors: Tensors, *, compute_units: int = 5, tiles: LatentSegmentTiles | None = None, put: Put = as_it_is
) -> None:
    """Runs schedule, deterministic decode and merge, with scratch memory that is NaN or garbage before."""
    case = tensors.case
    tiles = tiles or latent_segment_tiles(tensors.arch, dims=case.dims, dtype=case.dtype)
    cut = latent_decode_cut(
        tiles.decode(case.heads[0]), num_heads=case.heads[0], compute_units=compute_units, window_left=case.window_left
    )
    most = tiles.most_segments(max(case.kv_len), case.window_left)
    words = sum(cut.segment_words(tensors.num_seqs, most, q_rows=case.heads[0], v_head_dim=case.dims[1]))
    args = tensors.decode_args(cut, words, put)
    launch_latent_segment_decode(args, scores=tensors.scores, most_segments=most, cut=cut, tiles=tiles)


def run_latent_segment_extend(
    tensors: Tensors, *, min_q_len: int = 1, tiles: LatentSegmentTiles | None = None, put: Put = as_it_is
) -> None:
    """Runs schedule and deterministic extend, with a schedule that is garbage before."""
    case = tensors.case
    tiles = tiles or latent_segment_tiles(tensors.arch, dims=case.dims, dtype=case.dtype)
    causal = tensors.scores.visibility.causal
    cut = latent_extend_cut(tiles.block, num_heads=case.heads[0], causal=causal, min_q_len=min_q_len)
    args = tensors.extend_args(cut, put=put)
    launch_latent_segment_extend(args, scores=tensors.scores, cut=cut, tiles=tiles, mask=tensors.mask)
