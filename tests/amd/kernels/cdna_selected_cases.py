"""Attention over a selection by CDNA's own kernel, for the simulator and a GPU. Memory that no token sees is NaN."""

from dataclasses import replace

import torch

from rocm_attn.kernels.cache.page_format import Scales
from rocm_attn.kernels.sparse.arguments import SelectedKeys
from rocm_attn.kernels.tuning.cdna_tiles import EXTEND_CODES
from rocm_attn.kernels.tuning.sparse_tiles import cdna_selected_tiles
from rocm_attn.providers.triton_later import cdna_launches
from tests.amd.kernels.sparse_cases import SelectedCase, SelectedProblem, Step, build_selected, with_parts

STEP = Step([170, 1, 35], [2, 1, 1], page_size=16, tail=1)
# Entries come in any order, some twice, and some give no key.
PLAIN = SelectedCase(STEP, (64, 1), (576, 512), latent=True, width=150, dtype=torch.bfloat16)
# Parts of five blocks, or one of nine.
_LONG = Step([600], [2], page_size=64)
CASES = {
    "4_tiles": PLAIN,
    "2_tiles": replace(PLAIN, step=replace(STEP, page_size=7), heads=(20, 1), dtype=torch.float16),
    "1_tile": replace(PLAIN, step=replace(STEP, page_size=1), heads=(10, 1), dtype=torch.float16, sinks=True),
    "blocks_of_heads": replace(PLAIN, heads=(100, 1), sinks=True),
    "long_4_tiles": replace(PLAIN, step=_LONG, heads=(37, 1), width=570, dense=True),
    "long_1_tile": replace(PLAIN, step=_LONG, heads=(16, 1), width=570, dense=True),
}
# Over records of the codes that an arch reads.
RECORDS = {
    "records": replace(PLAIN, step=replace(STEP, page_size=7), heads=(20, 1), scales=Scales.GROUP),
    "records_4_tiles": replace(PLAIN, heads=(100, 1), scales=Scales.GROUP, sinks=True),
    "long_records": replace(PLAIN, step=_LONG, heads=(16, 1), width=570, dense=True, scales=Scales.GROUP),
}
# Programs that a device is to have: rows are whole, or have some parts.
PROGRAMS = (1, 4, 60)


def cases_of(arch: str) -> dict[str, SelectedCase]:
    return CASES | {name: replace(case, encoding=EXTEND_CODES[arch]) for name, case in RECORDS.items()}


def run_cdna_selected(arch: str, problem: SelectedProblem, programs: int) -> None:
    """Attends, with scratch memory of NaN."""
    tiles = cdna_selected_tiles(arch, problem.args.heads[1], is_record=problem.args.pages.record is not None)
    given = with_parts(problem.args, tiles, programs)
    cdna_launches.launch_cdna_selected(given, arch=arch, scale=problem.scale, tiles=tiles, programs=programs)


def after_unseen(case: SelectedCase, device: torch.device) -> SelectedProblem:
    """A step whose selections begin with two blocks of entries that give no key; its second token has no others.

    Padded tokens select something, and see nothing. The first token sees a key that stands past its count.
    """
    problem = build_selected(case, device)
    listed = problem.args.selection
    assert isinstance(listed, SelectedKeys)
    units, counts = listed.units, listed.counts + 128
    unseen = torch.tensor([-1, -(2**31), 2**31 - 1, 10**6], dtype=torch.int32, device=device)
    units = torch.cat([unseen.repeat(32).expand(len(units), 1, -1), units], 2).contiguous()
    counts[1] = 128
    units[len(case.step.places) :, :, :2] = 0
    units[0, 0, int(counts[0, 0]) :] = 0
    selection = listed._replace(units=units, counts=counts)
    problem.reference[1], problem.reference_lse[1] = 0.0, float("-inf")
    return replace(problem, args=problem.args._replace(selection=selection))
