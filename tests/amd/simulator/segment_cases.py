"""Runs of the deterministic kernels on a simulated arch: decode and extend give a token the same bits."""

from dataclasses import replace
from functools import partial

import torch

from rocm_attn.kernels.tuning.segment_tiles import segment_tiles
from tests.amd.kernels.attention_cases import Case, assert_served, build
from tests.amd.kernels.segment_cases import all_shared, assert_same_bits, last_tokens, run_decode, run_extend
from tests.amd.simulator.case import KernelCase

# Whole segments of 64 keys and parts of some; cuts and diagonals at several places of a tile of 32 keys.
PLAIN = Case([150, 65, 33], [3, 2, 9], heads=(8, 2), dims=(128, 128), dtype=torch.bfloat16, tail=2)
WINDOW = replace(PLAIN, heads=(8, 1), dims=(64, 64), window_left=40, sinks=True, page_size=8)
CAPPED = replace(PLAIN, heads=(6, 2), dims=(80, 48), soft_cap=3.0, slopes=True, dtype=torch.float16, page_size=5)


def run_segments(arch: str, case: Case) -> None:
    """Extend over all new tokens, then decode of the last ones."""
    extended = build(case, torch.device("cpu"))
    tiles = segment_tiles(arch, head_dim=case.dims[0], v_head_dim=case.dims[1], dtype=case.dtype, codes=case.codes)
    tiles = replace(tiles, segment_len=64)
    decoded = last_tokens(extended)
    run_extend(extended, tiles=tiles)
    run_decode(decoded, num_programs=5, tiles=tiles)
    assert_served(extended)
    assert_served(decoded)
    assert_same_bits(decoded, extended)


def run_shared_segments(arch: str, case: Case) -> None:
    """Extend whose rows are shared out by whole segments, and extend whose rows are not."""
    shared, whole = (build(case, torch.device("cpu")) for _ in range(2))
    tiles = segment_tiles(arch, head_dim=case.dims[0], v_head_dim=case.dims[1], dtype=case.dtype, codes=case.codes)
    tiles = replace(tiles, segment_len=64)
    assert run_extend(shared, tiles=tiles, sharing=all_shared(tiles, 5)) > 0
    run_extend(whole, tiles=tiles)
    assert_served(shared)
    assert torch.equal(shared.out, whole.out)
    assert torch.equal(shared.lse, whole.lse)


def segment_cases(arch: str) -> list[KernelCase]:
    """The deterministic kernels: with a cap, slopes and odd dims; rows that are shared."""
    shared = KernelCase("segments-shared", arch, partial(run_shared_segments, arch, WINDOW))
    return [*_named(arch, {"capped": CAPPED}), shared]


def more_segment_cases(arch: str) -> list[KernelCase]:
    """Plain layers and those with a window and sinks, of which the others have all launches."""
    return _named(arch, {"plain": PLAIN, "window": WINDOW})


def _named(arch: str, cases: dict[str, Case]) -> list[KernelCase]:
    return [KernelCase(f"segments-{name}", arch, partial(run_segments, arch, case)) for name, case in cases.items()]
