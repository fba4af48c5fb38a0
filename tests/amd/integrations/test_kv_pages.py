"""Exports and imports by pages refuse the same calls as those by rows."""

from functools import partial

import pytest
import torch

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.errors import BadBatch
from rocm_attn.integrations.kv_transfer import KVExporter, KVImporter
from rocm_attn.paging.index_spaces import Space
from tests.amd.integrations.kv_stories import Story, of_row, runtime_of, unchanged
from tests.amd.worlds.problems import small_problem


def test_pages_are_sent_only_with_the_tokens_that_are_stored_in_them(device: torch.device) -> None:
    """export() and export_layer() by pages equal export_row(), and refuse the same calls."""
    problems = [small_problem()] * 2
    story, source = Story(problems, device), runtime_of(problems, device, "torch")
    row, exporter, table = story.prefill(source, 10), KVExporter(source), source.table
    extent = exporter.extent(exporter.pages_of(row, 10), 10)
    wanted, found = (torch.zeros(exporter.num_bytes(extent), dtype=torch.uint8, device=device) for _ in range(2))
    exporter.export_row(row, 10, wanted)
    child = table.fork(row, 10)
    table.reserve(child, 12)
    pages = exporter.pages_of(child, 10)
    assert table.full.pending.copies[pages[Space.FULL][-1]], "the last page is still to be copied"
    exporter.export(pages, extent, found)
    assert torch.equal(found[:-256], wanted[:-256])  # the checksum is at the end

    empty = table.admit()
    table.reserve(empty, 10)
    for export in (exporter.export, partial(exporter.export_layer, 0)):
        with pytest.raises(BadBatch, match=f"row {empty} has 0 stored tokens; 10 of them cannot be sent"):
            export(exporter.pages_of(empty, 10), extent, found)
        with pytest.raises(BadBatch, match="no row has these pages, and not all of them are kept"):
            export({Space.FULL: [40, 41, 42]}, extent, found)

    pages = exporter.pages_of(row, 8)
    ids = table.kept.keep(row, 0, 2)
    shorter = table.kept.admit_over(ids, 7)
    exporter.export(pages, exporter.extent(pages, 8), found)
    with pytest.raises(BadBatch, match=f"row {shorter} has 7 stored tokens; 8 of them cannot be sent"):
        exporter.export_row(shorter, 8, found)
    for held in (row, child, shorter):
        table.free(held)
    extent = exporter.extent(pages, 8)
    exporter.export(pages, extent, found)
    table.kept.drop(ids)
    with pytest.raises(BadBatch, match="no row has these pages"):
        exporter.export(pages, extent, found)


def test_a_layer_is_sent_while_later_ones_still_compute(device: torch.device) -> None:
    """The export has the rows that the running step has stored in its layer; later layers lack them."""
    problems = [small_problem()] * 2
    story, source = Story(problems, device), runtime_of(problems, device, "torch")
    row, exporter = source.table.admit(), KVExporter(source)
    source.table.reserve(row, 6)
    pages = exporter.pages_of(row, 6)
    extent = exporter.extent(pages, 6)
    buffer = torch.zeros(exporter.num_layer_bytes(extent, 0), dtype=torch.uint8, device=device)
    with source.step(StepBatch([row], [6], [6])) as step:
        k, v = (story.rows(0, 0, 6, problems[0].num_kv_heads, problems[0].head_dim, side) for side in (1, 2))
        step.parts[0].layers.store(0, k, v)
        exporter.export_layer(0, pages, extent, buffer)
        with pytest.raises(BadBatch, match=f"row {row} has 0 stored tokens; 6 of them cannot be sent"):
            exporter.export_layer(1, pages, extent, buffer)
    assert torch.equal(buffer[: k.nbytes].view(k.dtype).view_as(k), k)


def test_pages_are_imported_into_an_empty_row_alone(device: torch.device) -> None:
    """import_pages() and import_layer() refuse the pages that import_row() refuses."""
    problems = [small_problem()]
    story, there, here = Story(problems, device), *(runtime_of(problems, device, "torch") for _ in range(2))
    exporter, extent, buffer = of_row(there, story.prefill(there, 10), 10)
    importer, other = KVImporter(here, exporter.passport), story.prefill(here, 10)
    gone = importer.admit(extent)
    pages = importer.pages_of(gone, 10)
    here.table.free(gone)
    with unchanged(here):
        for send in (importer.import_pages, partial(importer.import_layer, 0)):
            with pytest.raises(BadBatch, match=f"row {other} has 10 stored tokens already"):
                send(importer.pages_of(other, 10), extent, buffer)
            with pytest.raises(BadBatch, match="no row has these pages"):
                send(pages, extent, buffer)
        with pytest.raises(BadBatch, match=f"row {other} has 10 stored tokens already"):
            importer.import_row(other, extent, buffer)


def test_tokens_that_a_row_has_no_room_for_are_refused_before_they_are_written(
    provider: str, device: torch.device
) -> None:
    problems = [small_problem()]
    story, source = Story(problems, device), runtime_of(problems, device, provider)
    exporter, extent, buffer = of_row(source, story.prefill(source, 11), 11)
    importer, short = KVImporter(source, exporter.passport), source.table.admit()
    source.table.reserve(short, 10)
    with unchanged(source), pytest.raises(BadBatch, match=f"row {short} has room for 10 tokens"):
        importer.import_row(short, extent, buffer)
    for kv_len in (13, 0):  # 10 tokens have 3 pages of 4
        with pytest.raises(BadBatch, match=f"which do not hold {kv_len} tokens"):
            importer.pages_of(short, kv_len)
