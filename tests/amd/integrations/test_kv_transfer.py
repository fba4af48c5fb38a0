"""KV transfer: a request that moves to another runtime decodes with the bits of one that stays."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.errors import BadBatch, BadTensor, NeverFits, WrongState
from rocm_attn.external import Bounds, ExternalAttention, ExternalOptions, LayerSource
from rocm_attn.integrations.kv_passport import KVExtent, KVPassport
from rocm_attn.integrations.kv_transfer import KVExporter, KVImporter
from rocm_attn.paging.adopted import TableSource
from rocm_attn.paging.index_spaces import Space
from rocm_attn.problem import Scales
from rocm_attn.step.kv_scales import KVScales
from tests.amd.external.engines import VLLM, Engine, SGLang
from tests.amd.integrations.kv_stories import (
    FN,
    FNUZ,
    MODELS,
    POISON,
    Story,
    coded,
    exported,
    moved,
    of_row,
    runtime_of,
    unchanged,
)
from tests.amd.worlds.problems import small_problem

SUM_BYTES = 256  # of the checksum at the end of a buffer


@pytest.mark.fast(6, interpreted=0)
@pytest.mark.parametrize("kv_len", [19, 1, 24])
@pytest.mark.parametrize("model", MODELS)
def test_a_request_that_moved_decodes_with_the_bits_of_one_that_stayed(
    model: str, kv_len: int, provider: str, device: torch.device
) -> None:
    if provider == "triton" and "latent" in model:
        provider = "torch"  # rows of 16 elements are too short for its latent kernels
    problems = MODELS[model]
    story, source = Story(problems, device), runtime_of(problems, device, provider)
    target = runtime_of(problems, device, provider, num_pages=33)
    for _ in range(3):  # the two have other pages
        target.table.reserve(target.table.admit(), 9)
    row = story.prefill(source, kv_len)
    new_row = moved(source, row, kv_len, target)
    assert all(map(torch.equal, story.decode(source, row, kv_len), story.decode(target, new_row, kv_len)))
    target.check_device()


@pytest.mark.fast(2, interpreted=0)
@pytest.mark.parametrize("model", ["codes with scales of tokens", "index keys"])
def test_bytes_that_have_changed_on_their_way_are_refused(model: str, provider: str, device: torch.device) -> None:
    problems = MODELS[model]
    story, source = Story(problems, device), runtime_of(problems, device, provider)
    target = runtime_of(problems, device, provider)
    row = story.prefill(source, 11)
    exporter, extent, good = of_row(source, row, 11)
    importer = KVImporter(target, exporter.passport)
    new_row = importer.admit(extent)
    for place in (0, len(good) // 2, len(good) - SUM_BYTES - 1, len(good) - SUM_BYTES, len(good) - 1):
        changed = good.clone()
        changed[place] ^= 4
        with unchanged(target), pytest.raises(BadTensor, match="bytes are not those that export_row"):
            importer.import_row(new_row, extent, changed)
    importer.import_row(new_row, extent, good)
    assert all(map(torch.equal, story.decode(source, row, 11), story.decode(target, new_row, 11)))


@pytest.mark.fast(interpreted=0)
@pytest.mark.parametrize("sizes", [(4, 8), (16, 4), (1, 4)], ids=str)
def test_pages_may_be_of_other_sizes_on_the_other_side(
    sizes: tuple[int, int], provider: str, device: torch.device
) -> None:
    """The comparison is with a request prefilled there: kernels of the two page sizes may round in other orders."""
    there, here = ([small_problem(size, window_left=window) for window in (-1, 5)] for size in sizes)
    source = runtime_of(there, device, provider, num_pages=80)
    target = runtime_of(here, device, provider, num_pages=80)
    row = Story(there, device).prefill(source, 21)
    story = Story(here, device)
    stayed, new_row = story.prefill(target, 21), moved(source, row, 21, target)
    assert all(map(torch.equal, story.decode(target, stayed, 21), story.decode(target, new_row, 21)))


@pytest.mark.fast(interpreted=0)
@pytest.mark.parametrize("sizes", [(4, 4), (4, 8), (8, 4)], ids=str)
@pytest.mark.parametrize("source_has_swa", [True, False], ids=["windows to windows", "all to windows"])
def test_a_windows_space_takes_the_tokens_that_are_still_seen(
    source_has_swa: bool, sizes: tuple[int, int], provider: str, device: torch.device
) -> None:
    there, here = ([small_problem(size, window_left=window) for window in (6, -1, 3)] for size in sizes)
    swa = {"swa_pages": 40} if source_has_swa else {}
    source = runtime_of(there, device, provider, **swa)
    target = runtime_of(here, device, provider, swa_pages=40)
    row = Story(there, device).prefill(source, 29)
    exporter = KVExporter(source)
    extent = exporter.extent(exporter.pages_of(row, 29), 29)
    # The last step began at 24, and its first token saw the six before it.
    assert extent.first == ({"full": 0, "swa": 16} if source_has_swa else {"full": 0})
    story = Story(here, device)
    stayed, new_row = story.prefill(target, 29), moved(source, row, 29, target)
    assert target.table.num_held(new_row, Space.SWA) < target.table.num_held(new_row)
    last = torch.from_numpy(target.table.pages_of(new_row, Space.SWA)[-1:]).to(device)
    assert not any(side[0, 29 % sizes[1] :].any() for side in target.pool.layer(0).read(last)), (
        "not zero after token 29"
    )
    pages = {space: target.table.pages_of(new_row, space).tolist() for space in (Space.FULL, Space.SWA)}
    pages[Space.SWA][:-1] = [0] * (len(pages[Space.SWA]) - 1)
    with unchanged(target), pytest.raises(BadBatch, match="layer 0 sees tokens from 23 on"):
        KVImporter(target, exporter.passport).import_pages(pages, extent, of_row(source, row, 29)[2])
    assert all(map(torch.equal, story.decode(target, stayed, 29), story.decode(target, new_row, 29)))


def test_whole_pages_are_sent_of_a_window_of_one_key(device: torch.device) -> None:
    """No later token sees them."""
    problems = [small_problem(), small_problem(window_left=0)]
    source, target = (runtime_of(problems, device, "torch", swa_pages=40) for _ in range(2))
    story = Story(problems, device)
    row = story.prefill(source, 8)
    source.table.evict([row], [8])
    new_row = moved(source, row, 8, target)
    assert all(map(torch.equal, story.decode(source, row, 8), story.decode(target, new_row, 8)))


def test_tokens_of_a_page_that_were_not_sent_are_not_gone_back_to(device: torch.device) -> None:
    """The sender's pages are smaller: of the receiver's first page some tokens are 0, as if their K and V were."""
    there, here = ([small_problem(size, window_left=window) for window in (6, -1)] for size in (4, 8))
    source, target = (runtime_of(each, device, "torch", swa_pages=40, num_pages=80) for each in (there, here))
    sender, story, table = Story(there, device), Story(here, device), target.table
    row = sender.prefill(source, 34)
    sender.step(source, row, 35, 1)
    new_row, exporter = moved(source, row, 35, target), KVExporter(target)
    assert table.pages_of(new_row, Space.SWA).astype(bool).tolist() == [False, False, False, True, True]
    assert exporter.extent(exporter.pages_of(new_row, 35), 35).first == {"full": 0, "swa": 28}, "24 to 27 were not sent"
    with pytest.raises(BadBatch, match="share at least 34 tokens"):
        table.fork(new_row, 33)
    with pytest.raises(BadBatch, match="has left the window of the SWA space"):
        table.kept.keep(new_row, 3, 4)
    table.kept.keep(new_row, 3, 4, [Space.FULL])
    table.free(table.fork(new_row, 0))
    child = table.fork(new_row, 34)
    table.truncate(child, 33)
    for each in (new_row, child):
        with pytest.raises(BadBatch, match="holds keys of windows only from 34 on"):
            story.step(target, each, 34, 1)
    stayed, child = story.prefill(target, 34), table.fork(new_row, 34)
    assert all(map(torch.equal, story.decode(target, stayed, 34), story.decode(target, child, 34)))


def test_a_row_whose_tokens_were_sent_may_begin_again(device: torch.device) -> None:
    there, here = ([small_problem(size, window_left=6)] for size in (4, 8))
    source, target = (runtime_of(each, device, "torch", swa_pages=40) for each in (there, here))
    sender, story = Story(there, device), Story(here, device)
    row = sender.prefill(source, 10)
    sender.step(source, row, 11, 1)
    new_row, stayed = moved(source, row, 11, target), story.prefill(target, 11)
    assert int(target.table.space(Space.SWA).first_token[new_row]) == 4
    target.table.truncate(new_row, 0)
    for kv_len, q_len in ((8, 8), (9, 1), (11, 2)):
        story.step(target, new_row, kv_len, q_len)
    assert all(map(torch.equal, story.decode(target, stayed, 11), story.decode(target, new_row, 11)))


@pytest.mark.fast(interpreted=0)
def test_layers_of_one_space_may_come_from_different_ones(provider: str, device: torch.device) -> None:
    """Two windows are equal: the sender has one from its first token on, and the other from where its pages begin."""
    problems = [small_problem(window_left=window) for window in (6, -1, 6)]
    story, target = Story(problems, device), runtime_of(problems, device, provider, swa_pages=40)
    whole, windowed = (runtime_of(problems, device, provider, **swa) for swa in ({}, {"swa_pages": 40}))
    buffers, extents, layers = [], [], []
    for number, source in enumerate((whole, whole, windowed)):
        row, exporter = story.prefill(source, 29), KVExporter(source)
        pages = exporter.pages_of(row, 29)
        extent = exporter.extent(pages, 29)
        buffers.append(torch.empty(exporter.num_layer_bytes(extent, number), dtype=torch.uint8, device=device))
        exporter.export_layer(number, pages, extent, buffers[-1])
        extents.append(extent)
        layers.append(exporter.passport.layers[number])
    importer, extent = KVImporter(target, KVPassport(tuple(layers))), extents[-1]
    assert extent.first == {"full": 0, "swa": 16}
    with pytest.raises(NeverFits, match=str(2**40)):
        importer.admit(replace(extent, kv_len=2**40))
    stayed, new_row = story.prefill(target, 29), importer.admit(extent)
    importer.import_pages(importer.pages_of(new_row, 29), extent, torch.cat(buffers))
    target.table.mark_stored([new_row], [29])
    assert all(map(torch.equal, story.decode(target, stayed, 29), story.decode(target, new_row, 29)))


@pytest.mark.fast(interpreted=0)
def test_tokens_that_a_window_has_given_back_are_no_ones_elsewhere(provider: str, device: torch.device) -> None:
    problems = [small_problem(window_left=6), small_problem()]
    source = runtime_of(problems, device, provider, swa_pages=40)
    with pytest.raises(BadTensor, match="lives in 'swa' at the source"):
        KVImporter(runtime_of(problems, device, provider), KVPassport.of(source))
    back = runtime_of(problems, device, provider, swa_pages=40, swa_kept=6)
    story = Story(problems, device)
    row = story.prefill(source, 40)
    story.decode(source, row, 40)
    with pytest.raises(BadBatch, match="the same swa_kept on both sides"):
        moved(source, row, 45, back)


@pytest.mark.fast(interpreted=0)
@pytest.mark.parametrize("engine_of", [SGLang, VLLM])
def test_an_engines_pages_are_sent_as_a_runtimes_are(
    engine_of: type[Engine], provider: str, device: torch.device
) -> None:
    """The transfer is between two engines of one kind, each with its own strides. The reference is the stored rows."""
    one, other = (engine_of(4, device=device, provider=provider) for _ in range(2))
    request, filler = one.admit(), other.admit()
    other.run([filler], [6])
    one.run([request], [11])
    there = other.admit()
    other.reserve(there, 11)
    exporter, extent, buffer = exported(one.attention, request.pages, 11)
    importer = KVImporter(other.attention, exporter.passport)
    importer.import_pages(there.pages, extent, buffer)
    for number in range(len(one.windows)):
        other.stored[number, there.row] = one.stored[number, request.row]
    there.kv_len = 11
    other.run([there, filler], [1, 1])
    with pytest.raises(WrongState, match="rows of an engine are not known here"):
        importer.admit(extent)
    k, v = one.pages[0]
    one.attention.pages.bind(0, k.clone(memory_format=torch.preserve_format), v)
    with pytest.raises(WrongState, match="pages of layer 0 have moved"):
        exporter.export(request.pages, extent, buffer)


@pytest.mark.fast(interpreted=0)
def test_what_does_not_fit_is_refused_with_every_reason_before_anything_is_written(
    provider: str, device: torch.device
) -> None:
    problems = [small_problem()] * 2
    story, source = Story(problems, device), runtime_of(problems, device, provider)
    target = runtime_of(problems, device, provider)
    row = story.prefill(source, 11)
    exporter, importer = KVExporter(source), KVImporter(target, KVPassport.of(source))
    pages = exporter.pages_of(row, 11)
    extent = exporter.extent(pages, 11)
    buffer = torch.full((exporter.num_bytes(extent),), POISON, dtype=torch.uint8, device=device)
    with pytest.raises(BadTensor, match="bytes that begin at a multiple"):
        exporter.export(pages, extent, buffer[: -SUM_BYTES - 16])
    with pytest.raises(BadTensor, match="8 after a multiple of 16"):
        exporter.export(pages, extent, torch.empty(len(buffer) + 8, dtype=torch.uint8, device=device)[8:])
    if device.type == "cpu":  # torch raised a RuntimeError for the view of words
        odd = np.empty(len(buffer) + 32, np.uint8)
        of_odd = torch.from_numpy(odd[(3 - odd.ctypes.data) % 16 :])
        with pytest.raises(BadTensor, match="begins 5 bytes after a multiple of 8 of the memory that it is a view of"):
            exporter.export_row(row, 11, of_odd[13:])
    sparse = torch.empty(2 * len(buffer), dtype=torch.uint8, device=device)[::2]
    for wrong in (buffer.view(torch.int16), buffer[None], sparse):
        with pytest.raises(BadTensor, match="give contiguous uint8"):
            exporter.export(pages, extent, wrong)
    with pytest.raises(BadTensor, match="the buffer is a NoneType; give a tensor"):
        exporter.export(pages, extent, None)  # type: ignore[arg-type]
    with pytest.raises(BadBatch, match=r"pages is a list; give the pages of each space, as pages_of\(\) returns them"):
        exporter.export(pages[Space.FULL], extent, buffer)  # type: ignore[arg-type]
    with pytest.raises(BadBatch, match="11 stored tokens; 12 of them"):
        exporter.export_row(row, 12, buffer)
    with pytest.raises(BadBatch, match="2 pages are given"):
        exporter.export({Space.FULL: pages[Space.FULL][:2]}, extent, buffer)
    with pytest.raises(BadBatch, match="there are 48"):
        exporter.export({Space.FULL: [*pages[Space.FULL][:2], 48]}, extent, buffer)
    with pytest.raises(BadTensor, match="send the extent that the exporter gave"):
        importer.import_pages(dict(pages), KVExtent(11, {}), buffer)
    with pytest.raises(BadBatch, match="no row has these pages"):
        importer.import_pages(pages, extent, buffer)
    assert (buffer == POISON).all()
    with unchanged(target), pytest.raises(BadBatch, match="or a repeated page"):
        importer.import_pages({Space.FULL: [3, 3, 4]}, extent, buffer)
    with unchanged(target), pytest.raises(BadBatch, match="sees tokens from 0 on"):
        importer.import_pages({Space.FULL: [0, 3, 4]}, extent, buffer)
    exporter.export_row(row, 11, buffer)
    shared = target.table.admit()
    target.table.reserve(shared, 11)
    target.table.mark_stored([shared], [11])
    target.table.fork(shared, 8)
    with unchanged(target), pytest.raises(BadBatch, match="shares pages with others"):
        importer.import_row(shared, extent, buffer)
    source_of_copy = target.table.admit()
    target.table.reserve(source_of_copy, 3)
    child = target.table.fork(source_of_copy, 3)
    target.table.reserve(child, 4)
    assert target.table.kept.num_holders(target.table.pages_of(source_of_copy)[0]) == 1, "the copy is still to be made"
    target.table.reserve(source_of_copy, 11)
    with unchanged(target), pytest.raises(BadBatch, match="shares pages with others"):
        importer.import_row(source_of_copy, extent, buffer)


@pytest.mark.fast(interpreted=0)
def test_scales_that_change_later_are_refused_on_both_sides(provider: str, device: torch.device) -> None:
    problems = coded(FN, Scales.LAYER)
    story, source = Story(problems, device), runtime_of(problems, device, provider)
    target = runtime_of(problems, device, provider)
    importer = KVImporter(target, KVPassport.of(source))
    target.set_kv_scales(1, KVScales(0.5, 0.25))
    row = story.prefill(source, 11)
    exporter, extent, buffer = of_row(source, row, 11)
    pages = exporter.pages_of(row, 11)
    with pytest.raises(WrongState, match="scales of layer 1 have changed"):
        importer.import_pages(dict(pages), extent, buffer)
    source.table.free(row)
    source.set_kv_scales(0, KVScales(0.5, 0.25))
    with pytest.raises(WrongState, match="scales of layer 0 have changed"):
        exporter.export(dict(pages), extent, buffer)


@pytest.mark.fast(interpreted=0)
def test_other_scales_at_the_address_of_those_that_are_gone_are_refused(
    provider: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = coded(FN, Scales.LAYER)
    story, source = Story(problems, device), runtime_of(problems, device, provider)
    # New scales may get the id() of freed old ones.
    monkeypatch.setattr("builtins.id", lambda each: 7)
    row = story.prefill(source, 11)
    exporter, extent, buffer = of_row(source, row, 11)
    pages = exporter.pages_of(row, 11)
    layer = source.pool.layer(0)
    assert layer.k_scale is not None
    other = torch.full_like(layer.k_scale, 3.0)
    assert other._version == layer.k_scale._version
    source.pool.take(0, replace(layer, k_scale=other))
    with pytest.raises(WrongState, match="scales of layer 0 have changed"):
        exporter.export(pages, extent, buffer)


@pytest.mark.fast(interpreted=0)
def test_the_rest_of_a_last_page_becomes_zero_but_in_pages_whose_tails_are_kept(
    provider: str, device: torch.device
) -> None:
    problems = [small_problem()]
    story, source = Story(problems, device), runtime_of(problems, device, provider)
    target = runtime_of(problems, device, provider)
    new_row = moved(source, story.prefill(source, 9), 9, target)
    last = int(target.table.pages_of(new_row)[-1])
    for side in target.pool.layer(0).read(torch.tensor([last], device=device)):
        assert not side[0, 9 % problems[0].page_size :].any()
    one, other = (VLLM(4, device=device, provider=provider) for _ in range(2))
    request, there = one.admit(), other.admit()
    one.run([request], [9])
    other.reserve(there, 9)
    exporter, extent, buffer = exported(one.attention, request.pages, 9)
    importer = KVImporter(other.attention, exporter.passport)
    k, v = other.pages[0]
    page = there.pages[Space.FULL][-1]
    k[page, 1:], v[page, 1:] = 7, 8
    importer.import_pages(there.pages, extent, buffer)
    assert (k[page, 1:] == 7).all()
    assert (v[page, 1:] == 8).all()


def test_page_0_of_an_engine_to_which_it_is_a_page_like_others_is_moved_too(
    provider: str, device: torch.device
) -> None:
    problems, random = [small_problem()], torch.Generator().manual_seed(0)
    attentions = []
    for _ in range(2):
        table = TableSource(torch.zeros(2, 8, dtype=torch.int32, device=device), null_page=False)
        attention = ExternalAttention(
            [LayerSource(problem) for problem in problems],
            table,
            device=device,
            bounds=Bounds(num_seqs=2, num_tokens=8, kv_len=32, num_pages=6),
            options=ExternalOptions(provider=provider),
        )
        k, v = (torch.randn(6, *side, generator=random).to(device) for side in ((4, 2, 16), (4, 2, 16)))
        attention.pages.bind(0, k, v)
        attentions.append((attention, k, v))
    (one, k, v), (other, new_k, new_v) = attentions
    there = {Space.FULL: [0, 2, 1]}
    exporter, extent, buffer = exported(one, {Space.FULL: [3, 0, 5]}, 12)
    assert extent.first == {"full": 0}
    importer = KVImporter(other, exporter.passport)
    importer.import_pages(there, extent, buffer)
    for side, new in ((k, new_k), (v, new_v)):
        assert torch.equal(side[[3, 0, 5]], new[[0, 2, 1]])
    with pytest.raises(BadBatch, match="which means none"):
        exporter.extent({Space.FULL: [3, 0, -1]}, 12)
    assert exporter.extent({Space.FULL: [3, 0] * 16}, np.int8(127)).kv_len == 127  # and not 127 + 3 in 8 bits
    other.pages.bind(0, new_k.view(6, 4, 2, 16), new_v)
    importer.import_pages(there, extent, buffer)  # bound again in the same way


@pytest.mark.gpu
def test_nothing_but_import_row_waits_for_the_device(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    problems = coded(FN, Scales.TOKEN)
    story, source = Story(problems, device), runtime_of(problems, device, "triton")
    target = runtime_of(coded(FNUZ, Scales.TOKEN), device, "triton")
    row = story.prefill(source, 19)
    exporter, importer = KVExporter(source), KVImporter(target, KVPassport.of(source))
    extent = exporter.extent(exporter.pages_of(row, 19), 19)
    buffer = torch.empty(exporter.num_bytes(extent), dtype=torch.uint8, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        exporter.export_row(row, 19, buffer)
        importer.import_pages(importer.pages_of(importer.admit(extent), 19), extent, buffer)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_nothing_is_imported_while_a_step_may_store(device: torch.device) -> None:
    problems = [small_problem()]
    story = Story(problems, device)
    there, here = runtime_of(problems, device, "torch"), runtime_of(problems, device, "torch")
    row = story.prefill(there, 11)
    exporter, extent, buffer = of_row(there, row, 11)
    importer = KVImporter(here, exporter.passport)
    old = here.table.admit()
    here.table.reserve(old, 11)
    with here.step(StepBatch([old], [11], [11])):
        here.table.free(old)
        new = importer.admit(extent)
        with pytest.raises(WrongState, match="KV cannot be imported, because a step is running"):
            importer.import_row(new, extent, buffer)
        with pytest.raises(WrongState, match="KV cannot be imported, because a step is running"):
            importer.import_layer(0, importer.pages_of(new, 11), extent, buffer)
    importer.import_row(new, extent, buffer)
    outs = [story.decode(runtime, at, 11) for runtime, at in ((there, row), (here, new))]
    assert all(torch.equal(one, other) for one, other in zip(*outs, strict=True))


def test_pages_that_are_bound_anew_at_one_address_with_other_strides_are_refused(
    provider: str, device: torch.device
) -> None:
    one = VLLM(4, device=device, provider=provider)
    request = one.admit()
    one.run([request], [5])
    exporter, extent, buffer = exported(one.attention, request.pages, 5)
    k, v = one.pages[0]
    strides = list(k.stride())
    strides[1], strides[2] = k.shape[3], k.shape[1] * k.shape[3]
    one.attention.pages.bind(0, k.as_strided(k.shape, strides), v)
    with pytest.raises(WrongState, match="pages of layer 0 have moved"):
        exporter.export(request.pages, extent, buffer)


def test_pages_may_be_arrays_of_whole_numbers_as_the_table_gives_them(device: torch.device) -> None:
    problems = [small_problem()]
    source, target = runtime_of(problems, device, "torch"), runtime_of(problems, device, "torch")
    row = Story(problems, device).prefill(source, 11)
    exporter, importer = KVExporter(source), KVImporter(target, KVPassport.of(source))
    pages = source.table.pages_of(row)
    extent = exporter.extent({Space.FULL: pages}, 11)
    buffer = torch.empty(exporter.num_bytes(extent), dtype=torch.uint8, device=device)
    exporter.export({Space.FULL: pages}, extent, buffer)
    new_row = importer.admit(extent)
    importer.import_pages({Space.FULL: target.table.pages_of(new_row)}, extent, buffer)
    again = torch.empty_like(buffer)
    target.table.mark_stored([new_row], [11])
    KVExporter(target).export_row(new_row, 11, again)
    assert torch.equal(buffer[:-SUM_BYTES], again[:-SUM_BYTES])
    with pytest.raises(BadBatch, match="the space 'full' holds float64; it must hold integers"):
        exporter.export({Space.FULL: pages + 0.5}, extent, buffer)  # type: ignore[dict-item]


@pytest.mark.fast(interpreted=0)
def test_movers_that_were_made_in_inference_mode_move_tokens_outside_of_it(provider: str, device: torch.device) -> None:
    problems = MODELS["codes with scales of tokens"]
    story, source = Story(problems, device), runtime_of(problems, device, provider)
    target = runtime_of(problems, device, provider)
    row = story.prefill(source, 11)
    with torch.inference_mode():
        exporter, importer = KVExporter(source), KVImporter(target, KVPassport.of(source))
    extent = exporter.extent(exporter.pages_of(row, 11), 11)
    buffer = torch.zeros(exporter.num_bytes(extent), dtype=torch.uint8, device=device)
    exporter.export_row(row, 11, buffer)
    new_row = importer.admit(extent)
    importer.import_row(new_row, extent, buffer)
    assert all(map(torch.equal, story.decode(source, row, 11), story.decode(target, new_row, 11)))
