"""Needles through vLLM's layers before its first step, over pages that are lent for it."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from rocm_attn.external import ExternalAttention
from rocm_attn.integrations.vllm.group import Lend, give_chosen
from rocm_attn.integrations.vllm.latent_probe import LatentProbe
from rocm_attn.integrations.vllm.layer_terms import MaskTerms
from rocm_attn.kernels.refs import sparse
from rocm_attn.kernels.sparse.arguments import LastTokens, SelectedArgs
from rocm_attn.truth.adopted import log_truth, probe_adopted
from rocm_attn.truth.choosers import BY_INDEXERS, ByEngines
from rocm_attn.truth.verdict import TruthVerdict
from tests.amd.integrations import vllm_runner
from tests.amd.integrations.test_vllm_latent import MAX_LEN, Rank, rows_of, store_rows
from tests.amd.integrations.vllm_runner import TERMS, Runner
from tests.amd.planted import Plant, attending_to_a_wrong_page, losing_a_selected_key, reading_a_wrong_page

pytestmark = pytest.mark.usefixtures("inference_mode")

CPU = torch.device("cpu")
LOST = "ERROR: needles through 1 layers: wrong; the truth probe found 1 of 1 layers wrong; layer 0: key "


def found(terms: list[Any], groups: Sequence[int] = (), *, compares: bool = True, **options: Any) -> list[TruthVerdict]:
    """The verdicts of a runner's groups. Its steps come afterwards. compares: whether these must equal the oracle's"""
    verdicts: list[TruthVerdict] = []

    def tried(attention: ExternalAttention, lend: Lend) -> None:
        before = [layer.kv_cache.clone() for layer in runner.layers]
        verdicts.append(probe_adopted(attention, lend))
        for cache, layer in zip(before, runner.layers, strict=True):
            assert torch.equal(cache.view(torch.uint8), layer.kv_cache.view(torch.uint8)), "vLLM's blocks were written"

    runner = Runner(terms, groups or [0] * len(terms), device=CPU, provider="torch", tried=tried, **options)
    for _ in range(2):
        runner.admit()
    (runner.step if compares else runner.step_unseen)([9, 40])
    return verdicts


@pytest.mark.parametrize(("name", "most", "room"), [("NUM_BLOCKS", 1, 0), ("MAX_LEN", 3, 3)], ids=["block", "tokens"])
def test_a_row_without_room_for_needles_is_not_checked(
    name: str, most: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM measures its graphs over one block, the null block, if it serves one sequence at a time."""
    monkeypatch.setattr(vllm_runner, name, most)
    verdicts: list[TruthVerdict] = []
    runner = Runner(device=CPU, provider="torch", tried=lambda *lent: verdicts.append(probe_adopted(*lent)))
    runner.capture(1, 1, 1)
    (verdict,) = verdicts
    assert verdict.word == "not checked"
    assert verdict.sentence.startswith(f"a row has room for {room} tokens")


@pytest.mark.parametrize("mask", [MaskTerms(chunk=16), MaskTerms(spans=True, spans_pass_window=True)], ids=str)
def test_layers_with_chunks_and_spans_find_every_needle_that_they_see(mask: MaskTerms) -> None:
    (verdict,) = found([TERMS, replace(TERMS, sliding_window=20)], mask=mask)
    assert (verdict.word, verdict.not_checked) == ("right", {})


def test_each_group_of_layers_has_a_verdict_and_layers_that_no_needle_tells_have_a_reason() -> None:
    with_slopes = replace(TERMS, alibi_slopes=[0.5, 0.25, 0.125, 0.0625])
    one, other = found([TERMS, with_slopes, replace(TERMS, sliding_window=20)], groups=[0, 0, 1])
    assert (one.word, other.word, other.not_checked) == ("right", "right", {})
    assert list(one.not_checked) == [1]
    (alone,) = found([with_slopes])
    assert (alone.word, alone.num_keys) == ("not checked", 0)


def latent_of(top: int = 0, store: Callable[..., None] = store_rows) -> str:
    """The line about an MLA layer, and its level. top: keys that vLLM's indexer selects for a token; 0: all

    store: of vLLM's rows
    """
    log, lines = logging.Logger("vllm.rocm_attn"), Lines()
    log.addHandler(lines)
    choosers = ByEngines(give_chosen) if top else BY_INDEXERS

    def tried(attention: ExternalAttention, lend: Lend) -> None:
        LatentProbe([rank.layer], log, choosers=choosers)(attention, lend)

    rank = Rank(0, 1, CPU, "torch", top, tried=tried)
    rank.layer.impl.do_kv_cache_update = store
    (rows,) = rows_of([5])
    rank.slots[0] = rank.store(0, rows)[-1]
    stored = rank.layer.kv_cache.clone()
    rank.group.begin(rank.common(1, 1))
    assert torch.equal(rank.layer.kv_cache.view(torch.uint8), stored.view(torch.uint8)), "vLLM's blocks were written"
    (line,) = lines.written
    return line


class Lines(logging.Handler):
    """Keeps the lines of a log, each after its level."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.written.append(f"{record.levelname}: {record.getMessage()}")


@pytest.mark.parametrize("top", [0, 12, 2048], ids=["all keys", "few keys", "more keys than there are"])
def test_latent_rows_are_found_also_of_keys_that_vllm_selects(top: int) -> None:
    assert latent_of(top) == "INFO: needles through 1 layers: right; "


def test_an_engine_that_leaves_no_memory_for_needles_serves_without_them() -> None:
    log, lines = logging.Logger("vllm.rocm_attn"), Lines()
    log.addHandler(lines)

    def refuse(attention: ExternalAttention, lend: Lend) -> None:
        log_truth(log, attention, Mock(side_effect=torch.OutOfMemoryError("tried to allocate 2.00 MiB")))

    runner = Runner([TERMS], [0], device=CPU, provider="torch", tried=refuse)
    runner.admit()
    runner.step([9])
    assert lines.written == ["WARNING: no needles were sent through the layers: tried to allocate 2.00 MiB"]


@pytest.mark.parametrize("top", [12, 2048])
@pytest.mark.parametrize("plant", [attending_to_a_wrong_page(0), losing_a_selected_key], ids=["page", "selection"])
def test_a_selected_row_that_is_lost_is_found(plant: Plant, top: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert latent_of(top).startswith(LOST)


def test_a_latent_row_of_a_wrong_page_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    reading_a_wrong_page(0)(monkeypatch)
    assert latent_of().startswith(LOST)


def by_a_wrong_scale(kv_c: Tensor, *given: Any) -> None:
    store_rows(kv_c * 2, *given)


def to_the_next_slot(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slots: Tensor, *given: Any) -> None:
    store_rows(kv_c, k_pe, kv_cache, slots ^ 1, *given)


@pytest.mark.parametrize("store", [by_a_wrong_scale, to_the_next_slot])
@pytest.mark.parametrize("top", [0, 2048])
def test_rows_that_vllm_stores_otherwise_than_kernels_read_them_are_found(store: Callable[..., None], top: int) -> None:
    assert latent_of(top, store).startswith(LOST)


def test_a_layer_that_attends_to_what_vllm_did_not_select_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = sparse.selected_attention

    def of_all(args: SelectedArgs, **named: Any) -> None:
        attend(args._replace(selection=LastTokens(MAX_LEN)), **named)

    monkeypatch.setattr(sparse, "selected_attention", of_all)
    assert "was seen although it is hidden" in latent_of(2048)
