"""Errors of an engine: each is dropped, cut or refused, reported, and harms no other request."""

import logging
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from rocm_attn.errors import BadTensor, DeviceFault
from rocm_attn.external import LogAndCount
from rocm_attn.paging.adopted import TableSource
from rocm_attn.paging.index_spaces import Space
from tests.amd.external.engines import VLLM, Engine, MakeEngine, SGLang


def assert_unharmed(engine: Engine, *rows: int) -> None:
    requests = [engine.requests[row] for row in rows]
    engine.run(requests, [1] * len(requests))
    engine.run(requests, [2] * len(requests))


def assert_reported(engine: Engine, is_reported: bool) -> None:
    """Checks that the last step met a page that it may not have, or that no step did."""
    with pytest.raises(DeviceFault, match="a page in the table") if is_reported else nullcontext():
        engine.attention.check_device()


@pytest.mark.fast
@pytest.mark.parametrize("make", [SGLang, VLLM])
@pytest.mark.parametrize("page_size", [16, 1])
def test_a_window_that_was_given_back_too_early_is_reported(
    make: MakeEngine, page_size: int, device: torch.device, provider: str
) -> None:
    """The layer with the longest window counts."""
    spaces = (Space.FULL, Space.SWA, Space.SWA)
    engine = make(page_size, (-1, 20, 6), spaces=spaces, device=device, provider=provider, empty=3.0)
    first, second = engine.begun(40, 40)
    engine.evict(first, 32)
    engine.run_unseen([first], [1])
    with pytest.raises(DeviceFault, match="the first key that a new token sees was in a page"):
        engine.attention.check_device()
    engine.run([second], [1])
    engine.attention.check_device()


def test_a_policy_may_log_and_count(device: torch.device, provider: str, caplog: pytest.LogCaptureFixture) -> None:
    """Serving continues, as in a scheduler's loop that an exception would end.

    Pages hold numbers: a sequence with a false length reads pages of its own to which no token was stored.
    """
    policy = LogAndCount()
    engine = VLLM(16, (-1, 5), device=device, provider=provider, empty=3.0, on_fault=policy)
    engine.begun(9, 20)
    third = engine.admit()

    def lie(kv_len: Tensor, slots: Tensor) -> None:
        kv_len[0] = 2**30

    with caplog.at_level(logging.ERROR, logger="rocm_attn.external"):
        engine.run_unseen([third], [1], corrupt=lie)
        for _ in range(3):
            assert_unharmed(engine, 1, 2)
        assert policy.count == 1
        engine.run_unseen([third], [1], corrupt=lie)
        engine.attention.check_device()
    assert policy.count == 2
    assert len(caplog.records) == 2
    assert "a length on the device was outside" in caplog.text


def test_the_layer_with_the_fewest_pages_counts(device: torch.device, provider: str) -> None:
    """Pages that graphs read may also become fewer, at the same addresses."""
    engine = VLLM(16, (-1, -1), device=device, provider=provider, empty=3.0)
    (request,) = engine.begun(5)
    (page,) = request.pages[Space.FULL]
    k, v = engine.pages[1]
    engine.attention.seal()
    graph = engine.capture(4)
    for fewer in (False, True, False):
        count = page + 1 - fewer
        engine.attention.pages.bind(1, k[:count], v[:count])
        engine.run_unseen([request], [1])
        assert_reported(engine, fewer)
        request.kv_len -= fewer
        with pytest.raises(AssertionError) if fewer else nullcontext():
            graph.run([request])
        assert_reported(engine, fewer)
        request.kv_len -= fewer


def test_another_kind_of_table_is_refused(device: torch.device, provider: str) -> None:
    engine = VLLM(16, device=device, provider=provider)
    table = engine.block_tables[Space.FULL]
    source: Any
    for source, why in (
        (TableSource(table.long()), "needs int32 pages in rows without gaps"),
        (TableSource(table, null_page=False), "of another kind than the table before"),
        ([[1]], "is a list; give a tensor, or a TableSource as before"),
        (TableSource(table[:, :3]), "has room for 48 tokens; sequences may have 96"),
    ):
        with pytest.raises(Exception, match=why):
            engine.attention.tables.use(source)
    with pytest.raises(BadTensor, match="no layer lives in the SWA space; the spaces are FULL"):
        engine.attention.tables.use(TableSource(table), Space.SWA)
