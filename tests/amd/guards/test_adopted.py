"""Storage that an engine owns: its slots, its page 0, and the tables that its graphs read."""

import pytest
import torch
from torch import Tensor

from rocm_attn.errors import DeviceFault, WrongState
from rocm_attn.guards.registry import Guards
from rocm_attn.paging.adopted import TableSource
from rocm_attn.paging.index_spaces import Space
from tests.amd.external.engines import VLLM, Engine, FlashInfer, Replay, SGLang
from tests.amd.worlds.world import ALL_ON


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_slot_that_the_table_does_not_give_is_not_written(
    provider: str, page_size: int, device: torch.device
) -> None:
    """One request's new token gets the slot of another's first one."""

    def first_key_after(guards: Guards) -> tuple[Engine, Tensor]:
        engine = SGLang(page_size, device=device, provider=provider, guards=guards)
        first, second = engine.begun(5, 3)
        of_first = engine.req_to_token[first.row, :1].long()

        def give_the_others(kv_len: Tensor, slots: Tensor) -> None:
            slots[0] = of_first[0]

        engine.run_unseen([second], [1], corrupt=give_the_others)
        k, _ = engine.pages[0]
        stored = engine.stored[0, first.row][0][0]
        return engine, k.flatten(0, 1)[of_first[0]].cpu().double() - torch.from_numpy(stored)

    engine, change = first_key_after(ALL_ON)
    assert not change.any()
    with pytest.raises(DeviceFault, match="a slot given for a new token differs from the table's"):
        engine.attention.check_device()

    engine, change = first_key_after(Guards().without("slots_in_table"))
    assert change.abs().max() > 0.01
    engine.attention.check_device()


def test_what_an_engine_keeps_in_page_0_is_stored(provider: str, device: torch.device) -> None:
    """Page 0 is a normal page in FlashInfer's engine, and a request gets it first."""

    def request_of_page_0(guards: Guards) -> FlashInfer:
        engine = FlashInfer(16, device=device, provider=provider, guards=guards)
        free = engine.free[Space.FULL]
        free.append(free.pop(free.index(0)))
        return engine

    engine = request_of_page_0(ALL_ON)
    (request,) = engine.begun(5)
    assert request.pages[Space.FULL] == [0]
    engine.attention.check_device()

    engine = request_of_page_0(Guards().without("null_page"))
    engine.run_unseen([engine.admit()], [5])
    k, _ = engine.pages[0]
    assert k[0].isnan().all(), "the new tokens were lost"
    with pytest.raises(DeviceFault, match="a new token had no page of its own"):
        engine.attention.check_device()


def test_a_table_is_not_replaced_under_a_graph(provider: str, device: torch.device) -> None:
    def with_another_table(guards: Guards) -> tuple[VLLM, Replay]:
        """Returns an engine whose graph was captured over one table, and which continues with a copy."""
        engine = VLLM(16, device=device, provider=provider, guards=guards)
        engine.attention.seal()
        graph, request = engine.capture(4), engine.admit()
        engine.run([request], [5])
        graph.run([request])
        engine.block_tables[Space.FULL] = engine.block_tables[Space.FULL].clone()
        engine.attention.tables.use(TableSource(engine.block_tables[Space.FULL]))
        return engine, graph

    with pytest.raises(WrongState, match="the table of the FULL space has moved, and graphs read the old one"):
        with_another_table(ALL_ON)

    engine, graph = with_another_table(Guards().without("table_moved"))
    (other,) = engine.begun(20)
    with pytest.raises(AssertionError, match="layer 0, row 2"):
        graph.run([other])
