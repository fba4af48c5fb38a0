"""Index scores and top-k: every token gets the units that a plain reading of Indexing gives it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rocm_attn.kernels.cache.page_format import Scales
from rocm_attn.kernels.refs.sparse import select
from rocm_attn.kernels.sparse.arguments import Indexing, LastUnit, Pooling
from tests.amd.kernels.sparse_cases import IndexCase, Step, build_index

STEP = Step([50, 1, 33, 90], [3, 1, 1, 20], tail=2)
INDEXINGS = {
    "tokens": Indexing(0.125, 7),
    "all_of_them": Indexing(0.125, 200),
    "forced": Indexing(0.125, 7, first=1, last=2),
    "nothing_but_forced": Indexing(0.25, 3, first=1, last=2),
    "blocks": Indexing(0.25, 3, sets=2, rectified=False, unit_keys=8, last=1),
    "means": Indexing(0.25, 3, unit_keys=4, pooling=Pooling.MEAN),
    "pools_and_tail": Indexing(0.25, 3, key_tokens=4, last_unit=LastUnit.ADDED),
    "pools": Indexing(0.25, 3, key_tokens=4, last_unit=LastUnit.LEFT_OUT),
    "blocks_of_pools": Indexing(0.25, 3, key_tokens=2, unit_keys=2, last_unit=LastUnit.ADDED),
}
every_indexing = pytest.mark.parametrize("indexing", INDEXINGS.values(), ids=INDEXINGS)


@every_indexing
def test_the_twin_selects_what_the_words_say(indexing: Indexing, kernel_device: torch.device) -> None:
    case = IndexCase(STEP, indexing)
    for scaled in (case, replace(case, scales=Scales.TOKEN, weighted=False), replace(case, scales=Scales.LAYER)):
        problem = build_index(scaled, kernel_device)
        select(problem.args, problem.selection, indexing=indexing)
        problem.assert_selected()
