"""Decodes for CDNA, for the simulator and for a GPU. Memory that no sequence sees is NaN."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from rocm_attn.kernels.attention.cuts import DecodeCut
from rocm_attn.kernels.cache.page_format import Encoding, Scales
from rocm_attn.kernels.tuning.cdna_tiles import EXTEND_CODES, cdna_tiles
from rocm_attn.kernels.tuning.tiles import CdnaTiles
from rocm_attn.problem import UNLIMITED_WINDOW
from rocm_attn.providers.triton_later import cdna_launches
from tests.amd.kernels.attention_cases import UNTOUCHED, Case, Tensors, build
from tests.amd.tolerances import assert_attention_close, assert_lse_close

BF16, FP16 = torch.bfloat16, torch.float16

# Rows of several blocks that several programs share, a row with one program, one key, no key, and sequences that decode
# does not serve.
PLAIN = Case(
    [470, 20, 17, 0, 0, 49, 1], [1, 9, 1, 0, 1, 1, 1], heads=(8, 2), dims=(128, 128), dtype=BF16, tail=2, spread=True
)
# Windows that begin within a chunk, and at a page's edge; each row has one program.
WINDOW = replace(PLAIN, heads=(6, 2), window_left=30, sinks=True, page_size=32, dtype=FP16)
# Windows with shared rows: there are too many for one round of the programs, and too few for two.
SHARED_WINDOW = replace(PLAIN, kv_len=[700, 300], q_len=[1, 1], heads=(6, 2), window_left=280, sinks=True)
CAPPED = replace(PLAIN, soft_cap=3.0, page_size=64, heads=(16, 1))
# Two KV heads per row; each has fewer query heads than lines.
PAIRED = replace(PLAIN, heads=(12, 4), dims=(64, 64), sinks=True)
WIDE = replace(PLAIN, kv_len=[50, 3], q_len=[1, 1], dims=(256, 256), dtype=FP16, page_size=128)
# The suffixes after a shared prefix, which decode computes.
SUFFIXES = replace(PLAIN, kv_len=[70, 33], q_len=[1, 1], first_page=[2, 0], tail=0)
# Pages next to each other, at the end of large pools.
LARGE = replace(PLAIN, kv_len=[70, 33], q_len=[1, 1], spread=False)
NUM_PROGRAMS = 3
_LARGE_SCALE = 512.0
# So far from every page that a load from it shows.
NO_PAGE = -99


def tiles_of_case(arch: str, case: Case) -> CdnaTiles:
    """Those that serve a case. Raises NoTiles."""
    (q_heads, kv_heads), (dim, _) = case.heads, case.dims
    return cdna_tiles(
        arch,
        num_kv_heads=kv_heads,
        gqa_ratio=q_heads // kv_heads,
        head_dim=dim,
        encoding=case.kv or Encoding.of(case.dtype),
        scales=case.scales,
        windowed=case.window_left != UNLIMITED_WINDOW,
    )


def cdna_cut(arch: str, case: Case, num_programs: int = NUM_PROGRAMS) -> DecodeCut:
    tiles = tiles_of_case(arch, case)
    return DecodeCut.of(tiles, num_kv_heads=case.heads[1], programs=num_programs, window_left=case.window_left)


def launch_cdna(arch: str, tensors: Tensors, cut: DecodeCut) -> None:
    """Runs schedule, decode and merge, with scratch memory of NaN or garbage, and no page before windows."""
    case, tensors = tensors.case, _without_pages_before_windows(tensors)
    tiles = tiles_of_case(arch, case)
    words = cut.partials_words(gqa_ratio=tensors.gqa_ratio, v_head_dim=case.dims[1], tiles=tiles)
    args = tensors.decode_args(cut, words)
    cdna_launches.launch_cdna_decode(args, arch=arch, scores=tensors.scores, cut=cut, tiles=tiles)


def _without_pages_before_windows(tensors: Tensors) -> Tensors:
    """Removes pages from the table that no sequence of decode sees."""
    case, table = tensors.case, tensors.table.clone()
    if tensors.scores.visibility.windowed:
        for row, length, new in zip(tensors.row_of_seq.tolist(), case.kv_len, case.q_len, strict=True):
            first_key = max(length - 1 - case.window_left, 0)
            table[row, : first_key // case.page_size if new == 1 else 0] = NO_PAGE
    return replace(tensors, table=table)


def assert_decoded(tensors: Tensors) -> None:
    """Checks that tokens of sequences with one new token equal the reference, and that all others are unchanged.

    NaN equals NaN.
    """
    case, is_decodes = tensors.case, torch.zeros(tensors.q.shape[0], dtype=torch.bool, device=tensors.q.device)
    is_decodes[tensors.q_indptr[:-1][tensors.q_len == 1].long()] = True
    assert (tensors.out[~is_decodes] == UNTOUCHED).all(), "decode wrote to tokens that are not its own"
    assert (tensors.lse[~is_decodes] == UNTOUCHED).all()
    outs, lses = (tensors.out, tensors.reference), (tensors.lse, tensors.reference_lse)
    for (results, references), assert_close in ((outs, assert_attention_close), (lses, assert_lse_close)):
        result, reference = results[is_decodes], references[is_decodes]
        is_nan = reference.isnan()
        assert torch.equal(result.isnan(), is_nan), "nan"
        assert_close(result[~is_nan], reference[~is_nan], case.dtype)


def after_a_large_weight(arch: str, device: torch.device, code: float = 2.25) -> Tensors:
    """A row over codes whose first key has nearly all weight, and a value of 0 like other keys of its block.

    The others have 2^-18 of that weight each, and values of 224: E4M3 has no such small numbers next to 1. Half of q
    are negative numbers that become a zero in E4M3, whose sign is NaN in E4M3FNUZ.
    code: of the first key; with 32 the ratio of weights is no float32
    """
    length, first_with_value, value = 300, 128, 224.0
    case = replace(PLAIN, kv_len=[length], q_len=[1], heads=(4, 2), tail=0, kv=EXTEND_CODES[arch])
    tensors = build(case, device)
    tensors.q[..., :64], tensors.q[..., 64:96], tensors.q[..., 96:] = 1.0, -0.0, -1e-30
    for key in range(length):
        place = int(tensors.table[tensors.row_of_seq[0], key // case.page_size]), key % case.page_size
        tensors.k_pages[place] = 0.0
        tensors.k_pages[place][..., :64] = code if key == 0 else 0.0
        tensors.v_pages[place] = value if key >= first_with_value else 0.0
    total = math.exp(64 * code / 128**0.5) + length - 1
    tensors.reference.fill_((length - first_with_value) * value / total)
    tensors.reference_lse.fill_(math.log(total))
    return tensors


def with_nan(arch: str, device: torch.device) -> Tensors:
    """A row over codes of which one of K and one of V is NaN, and a query head with an infinite element."""
    tensors = build(replace(PLAIN, kv_len=[130], q_len=[1], tail=0, kv=EXTEND_CODES[arch]), device)
    page, nan = int(tensors.table[tensors.row_of_seq[0], 4]), float("nan")
    tensors.k_pages[page, 3, 0, 5] = tensors.v_pages[page, 9, 1, 7] = nan
    tensors.q[0, 6, 100] = float("inf")
    for head in (0, 1, 2, 3, 6):
        tensors.reference[0, head] = tensors.reference_lse[0, head] = nan
    tensors.reference[0, 4:, 7] = nan
    return tensors


def with_scale_of_nan(arch: str, device: torch.device) -> Tensors:
    """A row over codes of which one token's scale of V is NaN for one head: outputs are NaN, but no sum of weights."""
    case = replace(PLAIN, kv_len=[130], q_len=[1], tail=0, kv=EXTEND_CODES[arch], scales=Scales.TOKEN)
    tensors = build(case, device)
    assert tensors.pages.v_scale is not None
    tensors.pages.v_scale[int(tensors.table[tensors.row_of_seq[0], 4]), 0, 9] = float("nan")
    tensors.reference[0, :4] = float("nan")
    return tensors


def with_scales_far_apart(arch: str, device: torch.device, change: float = 2.0**-75) -> Tensors:
    """A row over codes of which every second block of pages has scales of V so small that its values are 0 in effect.

    The codes of the others are small, and their scales large: times a large weight they would be no codes.
    """
    case = replace(PLAIN, kv_len=[700], q_len=[1], heads=(4, 2), tail=0, kv=EXTEND_CODES[arch], scales=Scales.TOKEN)
    tensors = build(case, device)
    assert tensors.pages.v_scale is not None
    line = tensors.table[tensors.row_of_seq[0], : -(-case.kv_len[0] // case.page_size)].long()
    small = line[torch.arange(len(line), device=device) // 6 % 2 == 0]
    tensors.pages.v_scale.mul_(_LARGE_SCALE)
    tensors.v_pages.copy_((tensors.v_pages.float() / _LARGE_SCALE).to(tensors.v_pages.dtype))
    tensors.pages.v_scale[small] *= change
    keys, values, q = _numbers(tensors, line)
    scores = torch.einsum("hd,khd->hk", q, keys) * case.dims[0] ** -0.5
    weights = torch.softmax(scores, 1)
    tensors.reference[0] = torch.einsum("hk,khd->hd", weights, values)
    return tensors


def _numbers(tensors: Tensors, line: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K, V and q of the only row in float64, [keys or nothing, query heads, dim]."""
    case, sides = tensors.case, []
    for held, scale in ((tensors.k_pages, tensors.pages.k_scale), (tensors.v_pages, tensors.pages.v_scale)):
        assert scale is not None
        numbers = held[line].double() * scale[line].transpose(1, 2)[..., None].double()
        rows = numbers.reshape(-1, *numbers.shape[2:])[: case.kv_len[0]]
        sides.append(rows.repeat_interleave(tensors.gqa_ratio, 1))
    return sides[0], sides[1], tensors.q[0].double()


# Name -> steps over codes that no random ones show.
CHOSEN_CODES: dict[str, Callable[[str, torch.device], Tensors]] = {
    "weights": after_a_large_weight,
    "steep": partial(after_a_large_weight, code=32.0),
    "nan": with_nan,
    "nan_scale": with_scale_of_nan,
    "far_scales": with_scales_far_apart,
}


def served_cases(arch: str) -> dict[str, Case]:
    """Returns name -> a case of the kernel on an arch."""
    cases = {"plain": PLAIN, "window": WINDOW, "shared_window": SHARED_WINDOW, "capped": CAPPED, "paired": PAIRED}
    cases |= {"suffixes": SUFFIXES, "float16": replace(PLAIN, dtype=FP16)}
    cases |= {"paired_window": replace(WINDOW, heads=(8, 2), dims=(64, 64))}
    codes = EXTEND_CODES[arch]
    cases |= {"codes": replace(PLAIN, kv=codes, scales=Scales.HEAD)}
    cases |= {"codes_window": replace(SHARED_WINDOW, kv=codes, scales=Scales.LAYER)}
    cases |= {"codes_float16": replace(CAPPED, kv=codes, scales=Scales.HEAD, dtype=FP16)}
    by_token = replace(PLAIN, kv=codes, scales=Scales.TOKEN)
    cases |= {"tokens": by_token, "tokens_window": replace(by_token, kv_len=[700, 300], q_len=[1, 1], window_left=280)}
    cases |= {"tokens_float16": replace(by_token, soft_cap=3.0, page_size=64, heads=(16, 1), dtype=FP16)}
    cases |= {"tokens_suffixes": replace(SUFFIXES, kv=codes, scales=Scales.TOKEN)}
    if arch == "gfx942":
        cases |= {"wide": WIDE, "wide_window": replace(WIDE, window_left=20, soft_cap=5.0, dtype=BF16)}
    return cases
