"""Passports of KV pools: which pools fit each other, the order of a buffer, and passports as text."""

import itertools
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from rocm_attn.errors import BadSetting, BadTensor, Unsupported
from rocm_attn.integrations.compiled import compiled_layers
from rocm_attn.integrations.kv_passport import KVExtent, KVPassport, stretches
from rocm_attn.integrations.kv_transfer import KVExporter, KVImporter
from rocm_attn.kernels.sparse.arguments import Indexing
from rocm_attn.problem import Problem, Scales
from tests.amd.integrations.kv_stories import FN, FNUZ, MODELS, coded, runtime_of
from tests.amd.worlds.problems import indexer, layer, record_layer, small_problem


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ([small_problem()], "the source has 2 layers, and this side has 1"),
        ([small_problem(), small_problem(num_kv_heads=3)], "layer 1: .*heads and dims must be equal"),
        ([small_problem(dtype=torch.bfloat16)] * 2, "layer 0: .*\n.*layer 1: .*only eight-bit encodings are converted"),
        ([small_problem(window_left=4)] * 2, "its window is -1"),
        (coded(FN, Scales.LAYER), "only eight-bit"),
        ([layer(indexer(Indexing(0.25, top=5))), small_problem()], "one side has index pages, the other has none"),
    ],
)
def test_pools_that_differ_are_refused_layer_by_layer(other: list[Problem], reason: str) -> None:
    cpu = torch.device("cpu")
    source = KVPassport.of(runtime_of([small_problem()] * 2, cpu, "torch"))
    with pytest.raises(BadTensor, match=f"(?s)cannot be stored here.*{reason}"):
        KVImporter(runtime_of(other, cpu, "torch"), source)


def test_kv_of_another_model_of_the_same_shape_is_refused() -> None:
    """Weights, ropes and ranks do not show in pages: the caller names them."""
    runtime = runtime_of([small_problem()], torch.device("cpu"), "torch")
    source = KVPassport.from_json(KVExporter(runtime, model="llama, rank 0").passport.to_json())
    assert KVImporter(runtime, source, model="llama, rank 0").is_exact
    for other in ("llama, rank 1", ""):
        with pytest.raises(BadTensor, match=f"of model 'llama, rank 0', and this side of model '{other}'"):
            KVImporter(runtime, source, model=other)
    with pytest.raises(BadSetting, match="model is a int; it must be of type str"):
        KVExporter(runtime, model=7)  # type: ignore[arg-type]


def test_records_of_another_encoding_are_refused() -> None:
    source, target = ([record_layer(encoding=encoding)] for encoding in (FN, FNUZ))
    passport = KVPassport.of(runtime_of(source, torch.device("cpu"), "torch"))
    with pytest.raises(BadTensor, match="records are not converted"):
        KVImporter(runtime_of(target, torch.device("cpu"), "torch"), passport)


def test_records_with_scales_in_the_footer_are_not_sent() -> None:
    runtime = runtime_of([record_layer(scales=Scales.FOOTER)], torch.device("cpu"), "torch")
    with pytest.raises(Unsupported, match="records with scales in the page's footer cannot be sent"):
        KVPassport.of(runtime)


def test_a_passport_is_text_with_a_version() -> None:
    runtime = runtime_of([*MODELS["index keys"], *coded(FN, Scales.LAYER)], torch.device("cpu"), "torch")
    passport = KVPassport.of(runtime)
    assert KVPassport.from_json(passport.to_json()) == passport
    assert passport.layers[2].scale_values == ((1.0,), (1.0,), ())
    for text in ("{}", "nonsense", "[]", '{"version": 5, "layers": [{}]}', "[" * 100_000):
        with pytest.raises(BadSetting, match="not the passport of a KV pool"):
            KVPassport.from_json(text)
    for field, value in (
        ('"window_left": -1', '"window_left": -2'),
        ('"num_kv_heads": 2', '"num_kv_heads": 0'),
        ('"page_size": 4', '"page_size": true'),
        ('"space": "full"', '"space": 7'),
        ('"scale_values": [[1.0], [1.0], []]', '"scale_values": [[1.0], [-1.0], []]'),
        ('"scale_values": [[1.0], [1.0], []]', '"scale_values": [[1.0, 1.0], [1.0], []]'),
        ('"scale_values": [[1.0], [1.0], []]', '"scale_values": [[1.0], [NaN], []]'),
        ('"scale_values": [[1.0], [1.0], []]', f'"scale_values": [[1.0], [{10**400}], []]'),
        ('"key_tokens": 1', '"key_tokens": 3'),
    ):
        assert field in passport.to_json(), field
        with pytest.raises(BadSetting, match="not the passport of a KV pool"):
            KVPassport.from_json(passport.to_json().replace(field, value))
    with pytest.raises(BadSetting, match="version 1, and this release reads 5"):
        KVPassport.from_json(passport.to_json().replace('"version": 5', '"version": 1'))


def test_a_buffer_holds_layers_in_order_each_stretch_at_a_multiple_of_16_bytes() -> None:
    runtime = runtime_of([*MODELS["different layers"], *coded(FN, Scales.TOKEN)], torch.device("cpu"), "torch")
    parts = stretches(KVPassport.of(runtime), KVExtent(7, {"full": 0}), range(4))
    assert [part.layer for part in parts] == [0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    assert all(part.place % 16 == 0 for part in parts)
    assert all(one.end <= other.place < one.end + 16 for one, other in itertools.pairwise(parts))
    assert parts[0].row_bytes == 2 * 16 * 4


def test_an_extent_of_parts_of_tokens_and_a_layer_that_there_is_not_are_refused() -> None:
    runtime = runtime_of([small_problem()], torch.device("cpu"), "torch")
    for kv_len, first in ((7.5, 0), ("7", 0), (7, 1.5)):
        with pytest.raises(BadSetting, match="it must be a whole number"):
            KVExtent(kv_len, {"full": first})  # type: ignore[arg-type,dict-item]
    for kv_len, first, named in ((-1, 0, "kv_len of an extent"), (7, -4, "the first token in 'full'")):
        with pytest.raises(BadSetting, match=f"{named} is -[14]; it must be at least 0"):
            KVExtent(kv_len, {"full": first})
    row, wrong = runtime.table.admit(), cast(list[int], [1.5, "1", None])
    for part in wrong:
        with pytest.raises(BadSetting, match="it must be a whole number"):
            KVExporter(runtime).pages_of(row, part)
    for number in (1, -1):
        with pytest.raises(BadTensor, match=f"layer {number} does not exist; layers are 0 to 0"):
            KVExporter(runtime).num_layer_bytes(KVExtent(7, {"full": 0}), number)


@pytest.mark.parametrize("other", [None, 5, KVExporter], ids=str)
def test_what_is_no_runtime_no_passport_and_no_extent_is_named_with_what_to_give(other: Any) -> None:
    runtime = runtime_of([small_problem()], torch.device("cpu"), "torch")
    passport, buffer = KVPassport.of(runtime), torch.empty(16, dtype=torch.uint8)
    of_owner: list[Callable[[], object]] = [
        lambda: KVExporter(other),
        lambda: KVImporter(other, passport),
        lambda: KVPassport.of(other),
        lambda: compiled_layers(other),
    ]
    for make in of_owner:
        with pytest.raises(BadSetting, match=f"the owner of KV is a {type(other).__name__}; give the AttentionRuntime"):
            make()
    with pytest.raises(BadSetting, match=f"the source is a {type(other).__name__}; give the KVPassport that from_json"):
        KVImporter(runtime, other)
    with pytest.raises(BadSetting, match="give the first token of each space by its name"):
        KVExtent(5, other)
    exporter, importer, row = KVExporter(runtime), KVImporter(runtime, passport), runtime.table.admit()
    of_extent: list[Callable[[], object]] = [
        lambda: exporter.num_bytes(other),
        lambda: exporter.export({}, other, buffer),
        lambda: importer.admit(other),
        lambda: importer.import_row(row, other, buffer),
        lambda: importer.import_layer(0, {}, other, buffer),
    ]
    for call in of_extent:
        with pytest.raises(BadTensor, match=f"the extent is a {type(other).__name__}; give the KVExtent"):
            call()
