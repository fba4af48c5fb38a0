"""Extends for CDNA, for the simulator and for a GPU. Memory that no sequence sees is NaN."""

from dataclasses import replace

import torch

from rocm_attn.kernels.attention.cuts import ExtendCut
from rocm_attn.kernels.cache.page_format import Scales
from rocm_attn.kernels.tuning.cdna_tiles import EXTEND_ARCHS, EXTEND_CODES, EXTEND_TILES
from rocm_attn.problem import UNLIMITED_WINDOW
from rocm_attn.providers.triton_later import cdna_launches
from tests.amd.kernels.attention_cases import UNTOUCHED, Case, Tensors
from tests.amd.tolerances import assert_attention_close, assert_lse_close

# Six whole blocks, of which the loop takes four; the first new tokens of a sequence; a tail that no sequence owns.
PLAIN = Case([470, 33], [70, 33], heads=(8, 2), dims=(128, 128), dtype=torch.bfloat16, tail=2)
# One whole block, two of them, and none; sequences that extend leaves to decode; blocks of all sixteen heads.
SHORT = replace(PLAIN, kv_len=[80, 140, 63, 90, 0], q_len=[3, 2, 9, 1, 0], heads=(16, 1), page_size=64, spread=True)
# Maxima rise by more than the lag, so that waves rescale what they hold.
STEEP = replace(PLAIN, kv_len=[400], q_len=[10], heads=(4, 1), steep=20.0, tail=0)
# Heads whose scores take two rounds of products; the loop takes four whole blocks of a sequence, two, and none.
WIDE = replace(PLAIN, kv_len=[330, 200, 80, 33], q_len=[5, 8, 9, 33], heads=(2, 2), dims=(192, 128), tail=0)
CASES = {
    "plain": PLAIN,
    "steep": STEEP,
    "short": SHORT,
    "float16": replace(PLAIN, kv_len=[330], q_len=[5], dtype=torch.float16, heads=(6, 2), page_size=32, tail=0),
    "large_pages": replace(PLAIN, kv_len=[460], q_len=[40], heads=(4, 2), page_size=128, spread=True),
    "heads_64": replace(PLAIN, dims=(64, 64)),
    "wide": WIDE,
    "wide_large_pages": replace(
        WIDE, kv_len=[460, 200], q_len=[70, 9], dtype=torch.float16, page_size=128, spread=True
    ),
    # Blocks before the whole ones, which begin within a page of several blocks; and windows shorter than a block.
    "window": replace(PLAIN, kv_len=[470, 333, 33], q_len=[70, 9, 33], window_left=200),
    "window_large_pages": replace(PLAIN, kv_len=[620], q_len=[40], heads=(4, 2), page_size=128, window_left=391),
    "window_64": replace(PLAIN, dims=(64, 64), heads=(6, 2), page_size=32, window_left=20, dtype=torch.float16),
    "window_wide": replace(WIDE, kv_len=[430, 200], q_len=[5, 9], window_left=290, spread=True),
    "every_key": replace(PLAIN, kv_len=[200, 70], q_len=[9, 70], heads=(4, 1), window_right=UNLIMITED_WINDOW),
}
# Cases of eight-bit pages, in the encoding that the arch reads.
CODED = {
    "codes": replace(PLAIN, scales=Scales.HEAD),
    "codes_window": replace(PLAIN, scales=Scales.HEAD, window_left=200),
    "codes_64": replace(PLAIN, dims=(64, 64), scales=Scales.HEAD),
    "codes_wide": replace(WIDE, scales=Scales.LAYER),
    "codes_float16": replace(CASES["float16"], scales=Scales.HEAD),
}
NAMES = (*CASES, *CODED)
# Pages next to each other, at the end of large pools.
LARGE = replace(PLAIN, kv_len=[200], q_len=[3], heads=(4, 1), tail=0)
LEAST_Q_LEN = 2
ARCHS = EXTEND_ARCHS


def case_of(name: str, arch: str) -> Case:
    return CASES[name] if name in CASES else replace(CODED[name], kv=EXTEND_CODES[arch])


def cdna_extend_cut(tensors: Tensors) -> ExtendCut:
    """The cut of a step's layer."""
    causal = tensors.scores.visibility.causal
    return ExtendCut.of(EXTEND_TILES, gqa_ratio=tensors.gqa_ratio, causal=causal, min_q_len=LEAST_Q_LEN)


def run_cdna_extend(arch: str, tensors: Tensors) -> None:
    """Runs schedule and extend; the schedule's memory is garbage before."""
    cut = cdna_extend_cut(tensors)
    cdna_launches.launch_cdna_extend(tensors.extend_args(cut), arch=arch, scores=tensors.scores, cut=cut)


def assert_extended(tensors: Tensors) -> None:
    """Checks that tokens of sequences with more than one equal the reference, and that decode's are unchanged."""
    case = tensors.case
    served = torch.ones(tensors.q.shape[0], dtype=torch.bool, device=tensors.q.device)
    served[tensors.q_indptr[:-1][tensors.q_len == 1].long()] = False
    assert (tensors.out[~served] == UNTOUCHED).all(), "extend wrote to tokens that are decode's"
    assert_attention_close(tensors.out[served], tensors.reference[served], case.dtype)
    assert_lse_close(tensors.lse[served], tensors.reference_lse[served], case.dtype)
