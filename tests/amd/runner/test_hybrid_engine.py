"""Engines of models with windows: the pool of the windows changes its size, and never a token."""

from dataclasses import replace

import pytest
import torch

from rocm_attn.errors import BadSetting, CapacityExceeded
from rocm_attn.paging.kv_pool import page_bytes
from rocm_attn.problem import Problem
from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel
from rocm_serve.pool_size import PoolPages, pool_pages, swa_pages_for
from tests.amd.runner.serving import BASE
from tests.amd.runner.tiny_model import CONFIG, tiny_model, with_windows

WINDOW = 9


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    """Every other layer has a window, as in Gemma."""
    return tiny_model(base=with_windows(CONFIG, WINDOW, -1))


def test_a_pool_that_holds_no_window_and_chunk_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(
        CapacityExceeded, match="in steps of up to 16, needs 8 pages of the SWA space and there are 5; "
    ):
        Engine(loaded, replace(BASE, swa_pages=6))


@pytest.mark.parametrize("max_kv_len", [10, 64])
def test_pages_for_windows_that_no_sequence_outgrows_are_refused(max_kv_len: int, loaded: LoadedModel) -> None:
    without = tiny_model() if max_kv_len == 64 else loaded
    with pytest.raises(BadSetting, match=f"no layer .* has a window shorter than max_kv_len, {max_kv_len}"):
        Engine(without, replace(BASE, swa_pages=9, max_kv_len=max_kv_len))
    assert Engine(without, replace(BASE, swa_pages=0, max_kv_len=max_kv_len)).report().swa_pages == 0


def problems(*windows: int) -> list[Problem]:
    return [
        Problem(4, 2, 8, torch.float32, v_head_dim=8, page_size=4, scale=1.0, window_left=window_left)
        for window_left in windows
    ]


def test_windows_take_what_they_need_and_leave_the_rest_to_the_full_space() -> None:
    layers = problems(15, -1, 15)
    sizes = {"max_num_seqs": 4, "chunk": 8}
    needed = swa_pages_for([layers[0]], **sizes)
    assert needed == 1 + 4 * (4 + 2) + 2
    roomy = pool_pages(layers, max_kv_len=400, kv_bytes=1 << 30, **sizes)
    assert roomy == PoolPages(401, needed)
    per_page = page_bytes(layers[:1])
    tight = pool_pages(layers, max_kv_len=400, kv_bytes=200 * per_page, **sizes)
    assert tight == PoolPages(200 - 2 * needed, needed)
    tiny = pool_pages(layers, max_kv_len=400, kv_bytes=30 * per_page, **sizes)
    assert tiny == PoolPages(10, 10)
    assert pool_pages(problems(-1), max_kv_len=400, kv_bytes=1 << 30, **sizes) == PoolPages(401, 0)
    # Nothing lies in the full space, so its pages cost nothing.
    assert pool_pages(problems(15), max_kv_len=400, kv_bytes=30 * per_page, **sizes) == PoolPages(401, needed)
    with pytest.raises(CapacityExceeded, match="at least 2 are needed; raise kv_bytes"):
        pool_pages(layers, max_kv_len=400, kv_bytes=5 * per_page, **sizes)
