"""Layers whose pages are cut into vectors: stored and attended as those of linear pools."""

from dataclasses import replace

import pytest
import torch

from rocm_attn.guards.registry import Guards
from rocm_attn.paging.kv_pool import KVPool
from rocm_attn.problem import PoolKind
from tests.amd.vectorised import linear_keys, linear_values
from tests.amd.worlds.problems import small_problem
from tests.amd.worlds.world import World, page_zero_is_zero

CPU = torch.device("cpu")
VECTORISED = replace(small_problem(8, head_dim=24, v_head_dim=16), pool=PoolKind.VECTORIZED)


def test_pages_have_the_shapes_that_kernels_read() -> None:
    for dtype, x in ((torch.float32, 4), (torch.bfloat16, 8)):
        problem = replace(VECTORISED, dtype=dtype)
        pages = KVPool([problem], num_pages=5, page_size=8, device=CPU).layers[0]
        assert pages.k.shape == (5, 2, 24 // x, 8, x)
        assert pages.v.shape == (5, 2, 8 // x, 16, x)
        assert pages.k.is_contiguous()
        assert pages.v.is_contiguous()
        assert not pages.k[0].any()
        assert not pages.v[0].any()


def test_what_is_stored_lies_where_kernels_look_for_it() -> None:
    world = World.build([VECTORISED], CPU, "torch")
    (request,) = world.begun(19)
    pages, held = world.runtime.pool.layer(0), world.runtime.table.pages_of(request.row).tolist()
    assert torch.equal(linear_keys(pages.k)[held].flatten(0, 1)[:19], request.k[0])
    assert torch.equal(linear_values(pages.v)[held].flatten(0, 1)[:19], request.v[0])


@pytest.mark.parametrize("page_size", [4, pytest.param(8, marks=pytest.mark.nightly), 16])
@pytest.mark.parametrize("window_left", [-1, 5])
def test_every_kind_of_step_equals_dense_attention(page_size: int, window_left: int) -> None:
    problem = replace(VECTORISED, page_size=page_size, window_left=window_left, has_sinks=True)
    world = World.build([problem], CPU, "torch", num_pages=200)
    world.served([1, page_size, page_size + 1], [1, 1, 1], [2, 9, 3], [1, 0, 4], [1, 1, 1], pad_to=4)
    assert page_zero_is_zero(world)


def test_layers_of_both_layouts_share_pages() -> None:
    linear = small_problem(8)
    world = World.build([linear, VECTORISED, linear], CPU, "torch")
    world.served([6, 3], [1, 1], [1, 4])


def test_layers_with_a_window_live_in_a_pool_of_their_own() -> None:
    windowed = replace(VECTORISED, window_left=7)
    world = World.build([windowed, VECTORISED], CPU, "torch", num_pages=33, swa_pages=12)
    world.served([9, 3], *[[1, 1]] * 20, [3, 2], *[[1, 1]] * 20)
    assert page_zero_is_zero(world)


@pytest.mark.parametrize("guards", [Guards(), Guards().without("v_mask")], ids=["on", "off"])
def test_what_lies_after_a_sequence_in_its_page_is_not_read(guards: Guards) -> None:
    serving = World.one_layer(CPU, guards, graphs=False, problem=VECTORISED)
    serving.run(serving.admit_all(2), [5, 8])
    assert bool(serving.out[:5].isnan().all()) == (guards != Guards())
    # The second sequence fills its page: nothing lies after it.
    assert torch.isfinite(serving.out[5:13]).all()
