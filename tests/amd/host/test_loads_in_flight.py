"""Key blocks whose loads are in flight in extend, in the loop that masks keys."""

from typing import Any

import pytest
import torch

from rocm_attn.kernels.attention.extend import block_geometry
from rocm_attn.kernels.cache.page_format import Encoding, Scales
from rocm_attn.kernels.tuning.tiles import ExtendTiles
from tests.amd.kernels.attention_cases import ALL_SHARED, Case, build, extend_cut, garbage

OF_TOKENS: dict[str, Any] = {"kv": Encoding.E4M3FN, "scales": Scales.TOKEN, "dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("more", "in_flight"),
    [({}, 1), ({"window_left": 100}, 3), ({"window_left": 15, "chunk": 16}, 1), ({"window_left": 100, **OF_TOKENS}, 1)],
    ids=str,
)
def test_a_loop_that_masks_all_blocks_of_a_window_has_as_many_in_flight_as_one_without_masks(
    more: dict[str, Any], in_flight: int
) -> None:
    """Elsewhere it has few blocks, at the end of a row. Scales of tokens take too many registers."""
    cpu = torch.device("cpu")
    tensors = build(Case([300], [40], **more), cpu)
    tiles = ExtendTiles(query_rows=64, key_block=64, num_warps=4, num_stages=3)
    cut = extend_cut(tensors, tiles, ALL_SHARED)
    args = tensors.args(garbage(cut.words(40, 1), cpu), None)
    geometry = block_geometry(args, tensors.scores, cut, tiles, tensors.mask, exact=False)
    assert (3, in_flight) == (geometry.STAGES, geometry.EDGE_STAGES)
