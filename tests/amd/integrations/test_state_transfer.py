"""Transfer of recurrent states: a request that moves to another runtime goes on as the recurrence over its tokens."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rocm_attn.batch.inputs import DeviceInputs
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.errors import BadBatch, BadSetting, BadTensor, WrongState
from rocm_attn.integrations.kv_passport import KVPassport
from rocm_attn.integrations.kv_transfer import KVExporter, KVImporter
from rocm_attn.kernels.states.arguments import Update
from rocm_attn.paging.row_states import RowStates
from rocm_attn.paging.state_pool import RecurrentLayers, StateCopy, StatePool, StateSource
from rocm_attn.paging.state_record import RecordHead, must_be_after, num_record_bytes, read_head, write_record
from rocm_attn.recurrence import Recurrence
from tests.amd.integrations.kv_stories import of_row
from tests.amd.worlds.hybrid import ALL_KINDS, CHANNELS, GATED_DELTA, KEPT, PAGE_SIZE, SUMS, Hybrid, Told
from tests.amd.worlds.problems import providers

each_provider = pytest.mark.parametrize("provider", providers())
POISON = 173


class Sent:
    """Tokens of a request in a buffer with poison around it, which export_row() has not touched."""

    def __init__(self, world: Hybrid, request: Told, kv_len: int) -> None:
        exporter = KVExporter(world.runtime)
        self.text, self.ids = exporter.passport.to_json(), request.ids[:kv_len]
        self.extent = exporter.extent(exporter.pages_of(request.row, kv_len), kv_len)
        end = 32 + exporter.num_bytes(self.extent)
        memory = torch.full((end + 32,), POISON, dtype=torch.uint8, device=world.runtime.device)
        self.buffer = memory[32:end]
        assert exporter.export_row(request.row, kv_len, self.buffer) == self.extent
        assert (memory[:32] == POISON).all()
        assert (memory[end:] == POISON).all()

    def record(self, world: Hybrid) -> Tensor:
        """int64: the words of the state, at the end of the buffer."""
        return self.buffer[-(256 + world.runtime.states.memory.shape[1]) :].view(torch.int64)

    def to(self, world: Hybrid) -> Told:
        """The request in another world. Other pages stay as they are, and other slots but for copies that are due."""
        importer, pages = KVImporter(world.runtime, KVPassport.from_json(self.text)), world.runtime.pool.layer(0)
        row, states = importer.admit(self.extent), world.runtime.states
        memory = (states.memory, states.headers, pages.k, pages.v)
        before = [each.clone() for each in memory]
        written = {row, *(copy.target // 2 for copy in world.runtime.table.states.copies)}
        importer.import_row(row, self.extent, self.buffer)
        own = world.runtime.table.pages_of(row).tolist()
        others = [slot for slot in range(len(states.memory)) if slot // 2 not in written]
        other_pages = [page for page in range(len(pages.k)) if page not in own]
        for now, was, kept in zip(memory, before, (others, others, other_pages, other_pages), strict=True):
            assert torch.equal(now[kept].view(torch.uint8), was[kept].view(torch.uint8))
        return Told(row, list(self.ids))


def whole(world: Hybrid) -> Told:
    """A prompt: all tokens are folded."""
    (one,) = world.begun(7)
    return one


def drafts(world: Hybrid) -> Told:
    """A verify step, of whose tokens the last one is rejected: some tokens are kept next to the state."""
    one = whole(world)
    world.step([one], [world.ids(KEPT)])
    world.back(one, 7 + KEPT - 1)
    return one


def none_accepted(world: Hybrid) -> Told:
    """All tokens of the last step are taken back, so the state is in the older slot."""
    one = drafts(world)
    tokens = len(one.ids)
    world.step([one], [world.ids(5)])
    world.back(one, tokens)
    return one


def forked(world: Hybrid) -> Told:
    """A child of a child. Neither copy was launched."""
    one = drafts(world)
    for _ in range(2):
        one = Told(world.runtime.table.fork(one.row, len(one.ids)), list(one.ids))
    assert len(world.runtime.table.states.copies) == 2
    return one


def begun_over_kept_pages(world: Hybrid) -> Told:
    """A row over another one's pages. The copy from the checkpoint was not launched, and the other row is gone."""
    one, kept = world.admit(), world.runtime.table.kept
    world.step([one], [world.ids(2 * PAGE_SIZE)])
    ids = kept.keep(one.row, 0, 2)
    world.runtime.table.free(one.row)
    over = Told(kept.admit_over(ids, 2 * PAGE_SIZE), list(one.ids))
    assert world.runtime.table.states.copies
    return over


LIVES = [whole, drafts, none_accepted, forked, begun_over_kept_pages]


@pytest.mark.fast(5)
@pytest.mark.parametrize("life", LIVES, ids=lambda life: life.__name__)
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphed"])
@each_provider
def test_a_request_that_moved_goes_on_with_its_state(
    provider: str, graphs: bool, life: Callable[[Hybrid], Told], device: torch.device
) -> None:
    source, target = Hybrid(device, provider), Hybrid(device, provider, graphs=graphs)
    others = target.begun(5, 2)
    stays = life(source)
    moved = Sent(source, stays, len(stays.ids)).to(target)
    for count in (1, KEPT, 6, 1):
        target.step([others[0], moved], [target.ids(1), target.ids(count)])
    source.step([stays], [source.ids(2)])
    back = Sent(target, moved, len(moved.ids)).to(source)
    source.step([back, stays], [source.ids(1), source.ids(1)])
    for world in (source, target):
        world.runtime.check_device()


@pytest.mark.parametrize("life", LIVES, ids=lambda life: life.__name__)
def test_a_round_trip_between_pools_of_other_sizes_keeps_every_bit(
    life: Callable[[Hybrid], Told], device: torch.device
) -> None:
    """Pages, rows, slots and checkpoints have other numbers there, and the memory around them is NaN."""
    source = Hybrid(device, "torch")
    target = Hybrid(device, "torch", page_size=2 * PAGE_SIZE, num_rows=5, checkpoints=0)
    for world, layer in ((source, source.runtime.pool.layer(0)), (target, target.runtime.pool.layer(0))):
        layer.k[1:], layer.v[1:] = float("nan"), float("nan")
        assert world.runtime.states.memory[2:].view(torch.float32).isnan().all()
    occupied = target.begun(3, 1, 2)
    stays = life(source)
    there = Sent(source, stays, len(stays.ids))
    moved = there.to(target)
    assert moved.row != stays.row
    again = Sent(target, moved, len(moved.ids))
    assert torch.equal(again.buffer, there.buffer)
    back = again.to(source)
    source.step([back, stays], [source.ids(2), source.ids(1)])
    target.step([moved, *occupied], [target.ids(1)] * 4)
    for world in (source, target):
        world.runtime.check_device()


@pytest.mark.fast(2)
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphed"])
@each_provider
def test_rows_and_kept_pages_go_on_with_their_states_after_a_reopen(
    provider: str, graphs: bool, device: torch.device
) -> None:
    """Graphs and their memory are new, and states stay: also those whose copies were not launched."""
    world = Hybrid(device, provider, graphs=graphs)
    one = drafts(world)
    moved = Sent(world, one, len(one.ids)).to(world)
    over, child = begun_over_kept_pages(world), Told(world.runtime.table.fork(one.row, len(one.ids)), list(one.ids))
    kept, late = world.runtime.table.kept, Sent(world, over, len(over.ids))
    ids = sorted(kept.ids(), key=lambda id_: bool(kept.have_states([id_])))  # the state is that after the last page
    assert len(world.runtime.table.states.copies) == 3
    world.runner.reopen((1, 4), (1, 4, 16))
    assert len(world.runtime.table.states.copies) == 3
    world.step([one, child, over, moved], [world.ids(1), world.ids(KEPT), world.ids(5), world.ids(2)])
    assert kept.have_states(ids).tolist() == [False, True]
    again = Told(kept.admit_over(ids, 2 * PAGE_SIZE), late.ids)
    world.step([again, late.to(world)], [world.ids(1), world.ids(1)])
    world.runtime.check_device()


@pytest.mark.parametrize("on_host", [True, False], ids=["the host", "only the device"])
def test_a_row_that_pages_come_into_has_no_state(on_host: bool, device: torch.device) -> None:
    """Its slots have that of as many tokens, which were taken back, and the host may not know of how many."""
    world = Hybrid(device, "torch")
    one, other = world.begun(5, 6)
    batch = world.batch([one], [world.ids(1)])
    lengths = torch.tensor(batch.kv_len, device=device)
    world.runner.run(batch if on_host else replace(batch, inputs=DeviceInputs(kv_len=lengths, ahead=0)))
    exporter, extent, buffer = of_row(world.runtime, other.row, 6)
    importer = KVImporter(world.runtime, exporter.passport)
    world.runtime.table.mark_stored([one.row], [0])
    importer.import_pages(importer.pages_of(one.row, 6), extent, buffer)
    world.runtime.table.mark_stored([one.row], [6])
    with pytest.raises(BadBatch, match="after 6 tokens of row 1, whose state is there for no token"):
        world.run([Told(one.row, list(other.ids))], [world.ids(1)])


@each_provider
def test_tokens_without_a_state_are_not_sent(provider: str, device: torch.device) -> None:
    world = Hybrid(device, provider)
    one = whole(world)
    world.step([one], [world.ids(2)])
    with pytest.raises(
        BadBatch, match=r"state of row 1 is there after 7 tokens or 8 to 9 tokens, and 6 tokens are to be sent"
    ):
        Sent(world, one, 6)
    filled = world.runtime.table.admit()
    world.runtime.table.reserve(filled, 6)
    world.runtime.table.mark_stored([filled], [6])
    with pytest.raises(BadBatch, match=r"state of row 2 is there for no token, and 6 tokens are to be sent"):
        Sent(world, Told(filled, world.ids(6)), 6)
    with (
        world.runtime.step(world.batch([one], [world.ids(1)])),
        pytest.raises(WrongState, match="states cannot be exported, because a step is running"),
    ):
        Sent(world, one, 9)


@each_provider
def test_lengths_that_only_the_device_knows_are_compared_there(provider: str, device: torch.device) -> None:
    source, target = Hybrid(device, provider), Hybrid(device, provider)
    one = whole(source)
    new = source.ids(1)
    batch = source.batch([one], [new])
    lengths = torch.tensor(batch.kv_len, device=device)
    source.runner.run(replace(batch, inputs=DeviceInputs(kv_len=lengths, ahead=0)))
    one.ids += new
    source.runtime.table.mark_stored([one.row], [8])
    early = Sent(source, one, 5)
    with pytest.raises(BadTensor, match=r"holds no state, because the sender's device had none after 5 tokens"):
        early.to(target)
    moved = Sent(source, one, 8).to(target)
    target.step([moved], [target.ids(3)])


def test_bytes_of_a_state_that_changed_on_their_way_are_refused_and_nothing_is_written(device: torch.device) -> None:
    source, target = Hybrid(device, "torch"), Hybrid(device, "torch")
    sent = Sent(source, drafts(source), 7 + KEPT - 1)
    good, states, pages = sent.buffer.clone(), target.runtime.states, target.runtime.pool.layer(0)
    sent.record(source)[70] ^= 1 << 40
    before = [tensor.clone() for tensor in (states.memory, states.headers, pages.k, pages.v)]
    importer = KVImporter(target.runtime, KVPassport.from_json(sent.text))
    row = importer.admit(sent.extent)
    with pytest.raises(BadTensor, match=r"are not those that export_row\(\) wrote, because their checksum differs"):
        importer.import_row(row, sent.extent, sent.buffer)
    for now, was in zip((states.memory, states.headers, pages.k, pages.v), before, strict=True):
        assert torch.equal(now.view(torch.uint8), was.view(torch.uint8))
    assert not target.runtime.table.tokens.stored_len[row]
    importer.import_row(row, sent.extent, good)
    target.step([Told(row, sent.ids)], [target.ids(2)])


@pytest.mark.parametrize("folded", [-1, 3])
def test_a_state_into_which_no_such_number_of_tokens_can_be_folded_is_refused(folded: int) -> None:
    """With -1, from which 2 is not more than KEPT tokens away, the next step gave NaN."""
    must_be_after(RecordHead(2, 0, 0), 2, KEPT)
    with pytest.raises(BadTensor, match=f"the state after 2 tokens, {folded} of them folded"):
        must_be_after(RecordHead(2, folded, 0), 2, KEPT)


@pytest.mark.parametrize("num_words", [0, 1, 31, 32, 37, 96])
def test_any_word_of_a_buffer_of_any_length_counts(num_words: int, device: torch.device) -> None:
    """Bytes of tokens need not fill whole lines, as of 16-bit K and V."""
    states = StatePool(RecurrentLayers([replace(SUMS, num_heads=1, k_dim=4, v_dim=4)]), num_rows=2, device=device)
    states.memory.random_(generator=torch.Generator(device).manual_seed(0))
    states.headers[2] = torch.tensor([7, -1, 5, 5], device=device)
    buffer = torch.zeros(8 * num_words + num_record_bytes(states), dtype=torch.uint8, device=device)
    words = buffer.view(torch.int64)
    words[:num_words].random_(generator=torch.Generator(device).manual_seed(1))
    write_record(states, StateSource(2, 2, 7, 5), buffer)
    assert read_head(states, buffer) == RecordHead(5, 5, 0)
    for place in range(len(words)):
        words[place] ^= 1 << place % 63
        assert read_head(states, buffer).checksum, place
        words[place] ^= 1 << place % 63
    assert read_head(states, buffer).checksum == 0


def test_a_slot_has_the_states_from_its_folded_to_its_last_tokens_and_a_copy_has_one(device: torch.device) -> None:
    states = StatePool(RecurrentLayers([SUMS], kept=2), num_rows=3, device=device)
    states.headers[2] = torch.tensor([7, 2, 3, 5], device=device)
    found = [int(states.slot_with(StateSource(2, 2, 7, tokens))) for tokens in range(8)]
    assert found == [-1, -1, -1, 2, 2, 2, -1, -1]
    states.copy(StateCopy(4, 9, StateSource(2, 2, 7, 4)))
    assert states.headers[4].tolist() == [9, -1, 3, 4]


def test_a_state_is_sent_from_where_the_copy_of_its_own_row_reads_it() -> None:
    """Copies of two forks are pending, as no step has run since."""
    states = RowStates(RecurrentLayers([SUMS]), num_rows=5, page_size=4)
    for row in (1, 2, 3, 4):
        states.begin(row)
    states.note(StepBatch([1, 2], [4, 4], [4, 4]))
    states.fork(1, 3, 4)
    states.fork(2, 4, 4)
    assert [states.source_of(row, 4).slot for row in (1, 2, 3, 4)] == [2, 4, 2, 4]


def test_a_buffer_without_a_state_is_refused(device: torch.device) -> None:
    """States of other tokens: tests/amd/guards/test_sent_states.py."""
    source, target = Hybrid(device, "torch"), Hybrid(device, "torch")
    one = whole(source)
    source.step([one], [source.ids(1)])
    sent = Sent(source, one, 8)
    exporter = KVExporter(source.runtime)
    pages = exporter.pages_of(one.row, 8)
    sent.buffer.fill_(POISON)
    exporter.export(pages, sent.extent, sent.buffer)  # K and V alone
    with pytest.raises(BadTensor, match="checksum differs"):
        sent.to(target)
    with pytest.raises(BadTensor, match=r"the buffer has \d+ bytes"):
        KVImporter(target.runtime, exporter.passport).import_row(
            KVImporter(target.runtime, exporter.passport).admit(sent.extent), sent.extent, sent.buffer[:-16]
        )


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ((), "the source has 3 recurrent layers, and this side has 0"),
        ((GATED_DELTA, CHANNELS, replace(SUMS, state_dtype=torch.bfloat16)), "recurrent layer 2: .*must be equal"),
        ((replace(GATED_DELTA, v_dim=32, num_heads=2), CHANNELS, SUMS), "recurrent layer 0: .*must be equal"),
        # Slots with other parts, and slots of the same bytes that mean something else.
        ((replace(GATED_DELTA, convolution=replace(GATED_DELTA.convolution, width=3)), CHANNELS, SUMS), "layer 0: .*"),
        ((GATED_DELTA, replace(CHANNELS, update=Update.SUM), SUMS), "recurrent layer 1: .*must be equal"),
        ((CHANNELS, GATED_DELTA, SUMS), "recurrent layer 0: .*must be equal"),
    ],
)
def test_other_recurrent_layers_are_refused(layers: Sequence[Recurrence], reason: str, device: torch.device) -> None:
    passport = KVPassport.of(Hybrid(device, "torch").runtime)
    other = Hybrid(device, "torch", layers=layers).runtime
    with pytest.raises(BadTensor, match=f"(?s)cannot be stored here.*{reason}"):
        KVImporter(other, passport)


def test_a_passport_names_the_recurrent_layers(device: torch.device) -> None:
    runtime = Hybrid(device, "torch").runtime
    passport = KVPassport.of(runtime)
    text = passport.to_json()
    assert KVPassport.from_json(text) == passport
    assert (passport.recurrent.layers, passport.recurrent.kept) == (ALL_KINDS, KEPT)
    with pytest.raises(BadTensor, match="the source keeps 4 tokens next to a state, and this side keeps 3"):
        KVImporter(runtime, KVPassport.from_json(text.replace(f'"kept": {KEPT}', '"kept": 4')))
    for field, value in (
        ('"num_k_heads": 2', '"num_k_heads": 3'),
        ('"dtype": "float32"', '"dtype": "int32"'),
        (f'"update": "{Update.SUM.name}"', '"update": "products"'),
        (f'"kept": {KEPT}', '"kept": 0'),
        ('"width": 4', '"width": 1'),
        ('"recurrent": ', '"others": '),
    ):
        assert field in text, field
        with pytest.raises(BadSetting, match="not the passport of a KV pool"):
            KVPassport.from_json(text.replace(field, value))


@pytest.mark.gpu
def test_an_export_does_not_wait_for_the_device(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    source = Hybrid(device, "triton")
    one = whole(source)
    exporter = KVExporter(source.runtime)
    extent = exporter.extent(exporter.pages_of(one.row, 7), 7)
    buffer = torch.empty(exporter.num_bytes(extent), dtype=torch.uint8, device=device)
    exporter.export_row(one.row, 7, buffer)  # its kernels are compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        exporter.export_row(one.row, 7, buffer)
    finally:
        torch.cuda.set_sync_debug_mode("default")
