"""Needles through SGLang's layers before its first step, over pages that are lent for it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rocm_attn.external import ExternalAttention
from rocm_attn.integrations.sglang.hooks import AttentionHooks
from rocm_attn.truth.adopted import probe_adopted
from rocm_attn.truth.verdict import TruthVerdict
from tests.amd.integrations.sglang_stand_in import Engine, Mode, RadixAttention
from tests.amd.integrations.test_sglang_hooks import POOLS as PLAIN_POOLS
from tests.amd.integrations.test_sglang_sparse import HIDDEN, LORA, Indexer, RecordPool, SparseEngine
from tests.amd.planted import (
    Plant,
    attending_to_a_wrong_page,
    choosing_by_a_wrong_page,
    losing_a_selected_key,
    reading_a_wrong_page,
    reading_by_a_wrong_scale,
)

CPU = torch.device("cpu")
POOLS: list[Any] = [
    *PLAIN_POOLS,
    pytest.param({"kv_dtype": torch.float8_e4m3fn, "k_scale_float": 0.5, "v_scale_float": 0.25}, id="FP8"),
]


class SparseRecords(SparseEngine):
    """An engine whose pool keeps latent rows as records."""

    pool_type = RecordPool


def engine_of(provider: str = "torch", device: torch.device = CPU, **kind: Any) -> Engine:
    return Engine(provider, device, serve=False, **{"dim": 64, "windows": (-1, -1), **kind})


def sparse_engine(provider: str = "torch", device: torch.device = CPU) -> SparseEngine:
    return SparseEngine(provider, device, indexer=Indexer(dim=128, top=32))


def records_engine(provider: str = "torch", device: torch.device = CPU) -> SparseEngine:
    rows: dict[str, Any] = {"qk_head_dim": 576, "v_head_dim": 512, "scaling": 0.05}
    return SparseRecords(provider, device, indexer=Indexer(dim=128, top=32), **rows)


def found(engine: Engine) -> TruthVerdict:
    """The verdict when an engine's hooks are made. SGLang's pool stays as it is."""
    verdicts: list[TruthVerdict] = []

    def tried(attention: ExternalAttention, lend: Callable[[int], None]) -> None:
        verdicts.append(probe_adopted(attention, lend))

    ids = [layer.layer_id for layer in engine.layers]
    before = [engine.pool.get_key_buffer(layer).clone().view(torch.uint8) for layer in ids]
    engine.hooks = AttentionHooks(engine.runner, replace(engine.serving, tried=tried))
    for layer, rows in zip(ids, before, strict=True):
        assert torch.equal(rows, engine.pool.get_key_buffer(layer).view(torch.uint8)), "SGLang's pool was written"
    (verdict,) = verdicts
    return verdict


@pytest.mark.parametrize("kind", POOLS)
def test_right_kernels_find_every_needle_and_then_serve_sglangs_pool(
    kind: dict[str, Any], provider: str, device: torch.device
) -> None:
    engine = engine_of(provider, device, **kind)
    verdict = found(engine)
    assert (verdict.word, verdict.sentence, verdict.not_checked) == ("right", "", {})
    assert verdict.num_keys > 500
    one, two = engine.admit(), engine.admit()
    engine.run(Mode.EXTEND, [one, two], [7, 3])
    engine.run(Mode.DECODE, [two, one], [1, 1])
    engine.hooks.attention.check_device()


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("kind", POOLS)
def test_a_wrong_entry_of_one_layers_table_is_found(
    kind: dict[str, Any], layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading_a_wrong_page(layer)(monkeypatch)
    verdict = found(engine_of(**kind))
    assert (verdict.word, list(verdict.wrong)) == ("wrong", [layer])
    assert "key " in verdict.sentence


@pytest.mark.parametrize("layer", [0, 1])
def test_a_wrong_scale_of_one_layer_is_found(layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reading_by_a_wrong_scale(layer)(monkeypatch)
    verdict = found(engine_of(kv_dtype=torch.float8_e4m3fn))
    assert (verdict.word, list(verdict.wrong)) == ("wrong", [layer])


def test_a_map_of_windowed_layers_that_names_another_slot_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered = ExternalAttention._gather

    def wrong(self: ExternalAttention, tables: Any, run: Any) -> None:
        gathered(self, tables, run)
        tables[-1].entries[:, 0] = tables[-1].entries[:, 1]

    monkeypatch.setattr(ExternalAttention, "_gather", wrong)
    verdict = found(engine_of(windows=(-1, 90), with_window_pool=True))
    assert (verdict.word, list(verdict.wrong)) == ("wrong", [1])


SPARSE = pytest.mark.parametrize("new_engine", [sparse_engine, records_engine])


@SPARSE
def test_selected_keys_are_found_by_the_layers_own_indexer(
    new_engine: Callable[[str, torch.device], SparseEngine], provider: str, device: torch.device
) -> None:
    verdict = found(new_engine(provider, device))
    assert (verdict.word, verdict.sentence, verdict.not_checked) == ("right", "", {})
    assert verdict.num_keys > 500


def test_after_the_needles_a_step_chooses_among_sglangs_own_keys() -> None:
    engine = sparse_engine()
    found(engine)
    request = engine.admit()
    step = engine.step_of(engine.batch(Mode.EXTEND, [request], [5]), [5])
    engine.hooks.init_forward_metadata(step.batch)
    x, q_lora = engine.random_rows(5, HIDDEN), engine.random_rows(5, LORA)
    engine.forward_sparse(step, x, q_lora, step.batch.positions)  # five keys are fewer than are selected
    engine.keep([request], step)
    engine.compare([request], step)
    engine.hooks.attention.check_device()


@SPARSE
@pytest.mark.parametrize(
    ("plant", "wrong"),
    [(choosing_by_a_wrong_page, [0, 1]), (losing_a_selected_key, [0, 1]), (attending_to_a_wrong_page(1), [1])],
    ids=["index keys", "selection", "rows"],
)
def test_a_lost_key_is_found_in_the_layers_that_share_its_choice(
    new_engine: Callable[[], SparseEngine], plant: Plant, wrong: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    verdict = found(new_engine())
    assert (verdict.word, sorted(verdict.wrong)) == ("wrong", wrong)
    assert "was not found" in verdict.sentence


def test_an_indexer_whose_needles_do_not_stand_out_leaves_its_layers_unchecked() -> None:
    verdict = found(SparseEngine("torch", CPU))
    assert (verdict.word, list(verdict.not_checked)) == ("not checked", [0, 1])
    assert "index rows of 16 elements" in verdict.not_checked[0]
    assert "the layer that selects its keys is not checked" in verdict.not_checked[1]


def test_layers_without_attention_are_passed_over() -> None:
    """A hybrid model: SGLang's pool has pages for the layers with attention alone, by their ids."""

    class HybridPool:
        def __init__(self, pool: Any) -> None:
            self.pool = pool

        def get_key_buffer(self, layer_id: int) -> Tensor:
            rows: Tensor = self.pool.k[{1: 0, 3: 1}[layer_id]]
            return rows

        def get_value_buffer(self, layer_id: int) -> Tensor:
            rows: Tensor = self.pool.v[{1: 0, 3: 1}[layer_id]]
            return rows

    engine = engine_of()
    for layer, layer_id in zip(engine.layers, (1, 3), strict=True):
        layer.layer_id = layer_id
    engine.model.add_module("recurrent", nn.Linear(2, 2))
    engine.pool = engine.runner.token_to_kv_pool = HybridPool(engine.pool)
    verdict = found(engine)
    assert (verdict.word, verdict.num_layers, verdict.not_checked) == ("right", 2, {})
    assert isinstance(engine.layers[0], RadixAttention)
