"""A page that is written while another row still names it is reported. Pages that rows only read are not."""

import random
from collections.abc import Mapping

import pytest
import torch

from rocm_attn.batch.step_batch import INT32_MAX
from rocm_attn.errors import BadTensor, DeviceFault
from rocm_attn.external import Bounds, ExternalAttention, ExternalOptions, LayerSource
from rocm_attn.paging.adopted import Source, TableSource
from rocm_attn.paging.index_spaces import Space
from rocm_attn.step.external_step import ExternalStep, NewLengths
from tests.amd.external.engines import VLLM, Engine, FlashInfer, MakeEngine, Request, SGLang
from tests.amd.guards.csr_kernels import put_in_stand_ins
from tests.amd.worlds.problems import small_problem

TAKEN = "a page that a row still names was written through another entry"

each_page_size = pytest.mark.parametrize("page_size", [1, 16])
each_engine = pytest.mark.parametrize("make", [SGLang, VLLM, FlashInfer])


class InPlace(SGLang):
    """An engine whose table of pages is read in place, with a row for each request."""

    def make_tables(self) -> None:
        super().make_tables()
        self.page_table = torch.zeros(len(self.req_to_token), self.req_to_token.shape[1], dtype=torch.int32)
        self.page_table = self.page_table.to(self.device)

    def sources(self) -> Mapping[Space, Source]:
        return {Space.FULL: TableSource(self.page_table)}

    def put_pages(self, request: Request) -> None:
        super().put_pages(request)
        pages = request.pages[Space.FULL]
        self.page_table[request.row, : len(pages)] = self.ints(pages)


each_table = pytest.mark.parametrize("make", [SGLang, InPlace])


def watched(
    make: MakeEngine, page_size: int, device: torch.device, provider: str, windows: tuple[int, ...] = (-1,)
) -> Engine:
    return make(page_size, device=device, provider=provider, empty=3.0, watches_pages=True, windows=windows)


def share(engine: Engine, one: Request, pages: int) -> Request:
    """Adds a request whose first pages are another one's and stay in both."""
    other = engine.admit()
    for space, its in one.pages.items():
        other.pages[space] = its[:pages]
    other.kv_len = pages * engine.page_size
    for layer in range(len(engine.windows)):
        k, v = engine.stored[layer, one.row]
        engine.stored[layer, other.row] = k[: other.kv_len].copy(), v[: other.kv_len].copy()
    return other


def assert_reported(engine: Engine) -> None:
    with pytest.raises(DeviceFault, match=TAKEN):
        engine.attention.check_device()
    engine.attention.check_device()


@pytest.mark.fast(4)
@each_table
@each_page_size
@pytest.mark.parametrize("graphed", [False, True])
def test_a_scheduler_that_frees_slots_which_their_row_still_names_is_reported(
    make: MakeEngine, page_size: int, graphed: bool, device: torch.device, provider: str
) -> None:
    """A cache frees a prompt's pages while its request continues, and gives them to the next request."""
    engine = watched(make, page_size, device, provider)
    engine.attention.seal()
    graph = engine.capture(4) if graphed else None
    first, second = engine.begun(40, 20)
    engine.run([first, second], [1, 1])
    freed = first.pages[Space.FULL][: 32 // page_size]
    engine.free[Space.FULL].extend(reversed(freed))
    (third,) = engine.begun(20)
    engine.attention.check_device()
    if graph is None:
        engine.run_unseen([first, second], [1, 1])
    else:
        with pytest.raises(AssertionError, match="row 1"):
            graph.run([first, second])
    assert_reported(engine)
    engine.run([second, third], [1, 1])
    engine.attention.check_device()


def test_step_numbers_that_begin_again_hide_no_taken_page(device: torch.device, provider: str) -> None:
    """Each write seemed older than the entries that named its page."""
    engine = watched(SGLang, 16, device, provider)
    engine.begun(5)
    line = engine.attention._publisher.line
    assert line.counts is not None
    line.counts[2] = line.number = INT32_MAX - 2
    first, second = engine.begun(40, 20)
    for _ in range(3):
        engine.run([first, second], [1, 1])
    assert line.number < 4
    engine.free[Space.FULL].extend(reversed(first.pages[Space.FULL][:2]))
    engine.begun(20)
    engine.attention.check_device()
    engine.run_unseen([first, second], [1, 1])
    assert_reported(engine)


@pytest.mark.fast(interpreted=1)
@pytest.mark.parametrize("pads_have_kv", [False, True])
def test_a_pad_before_others_does_not_hide_a_taken_page_of_row_0(
    pads_have_kv: bool, provider: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has row 0 too, and each step began that row anew."""
    put_in_stand_ins(monkeypatch.setattr)
    table = torch.tensor([[1, 2, 3, 4, 9], [5, 6, 7, 8, 9]], dtype=torch.int32, device=device)
    attention = ExternalAttention(
        [LayerSource(small_problem())],
        TableSource(table),
        device=device,
        bounds=Bounds(num_seqs=3, num_tokens=8, kv_len=20, num_pages=10),
        options=ExternalOptions(provider="csr_min_1" if pads_have_kv else provider, watches_pages=True),
    )
    attention.pages.bind(0, *torch.zeros(2, 10, 4, 2, 16, device=device))
    for one, other in ((10, 12), (11, 14), (12, 16), (13, 18)):
        attention.check_device()
        if other == 18:
            table[1, 4] = 1
        lengths, new = (torch.tensor(each, device=device) for each in ([one, 0, other], [1, 0, 2]))
        rows = torch.tensor([0, 0, 1], device=device)
        attention.begin(ExternalStep(3, 3, 3, lengths, NewLengths(new), rows, 0, 2, 20))
        attention.fill()
    attention.fill()  # a page that is written in this very step may be reported by the row's next fill
    with pytest.raises(DeviceFault, match=TAKEN):
        attention.check_device()


@each_page_size
@pytest.mark.parametrize("zeroes", [True, False])
def test_a_page_before_a_window_is_reported_unless_its_entry_was_zeroed_when_it_was_freed(
    zeroes: bool, page_size: int, device: torch.device, provider: str
) -> None:
    engine = watched(InPlace, page_size, device, provider, windows=(8,))
    (first,) = engine.begun(40)
    stale = list(first.pages[Space.FULL])
    engine.evict(first, 32)
    if not zeroes:
        first.pages[Space.FULL][:] = stale
    engine.free[Space.FULL].sort(key=stale.__contains__)  # the freed ones are the next to be allocated
    (second,) = engine.begun(20)
    engine.attention.check_device()
    engine.run_unseen([first, second], [1, 1])
    if zeroes:
        engine.attention.check_device()
    else:
        assert_reported(engine)


@pytest.mark.fast
@each_engine
@each_page_size
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_requests_that_come_and_go_and_share_what_none_of_them_writes_are_no_fault(
    make: MakeEngine, page_size: int, seed: int, device: torch.device, provider: str
) -> None:
    """Covers prefixes in many rows, forks, immediate reuse of rows and pages, rejected drafts, and chunks."""
    engine, choice = watched(make, page_size, device, provider), random.Random(seed)
    (root,) = engine.begun(32)
    shared = {root.row: 0}
    for _ in range(40):
        others = [request for request in engine.requests.values() if request is not root]
        if len(engine.requests) < 5 and choice.random() < 0.6:
            of = choice.choice(list(engine.requests.values()))
            pages = choice.randint(0, of.kv_len // page_size)
            new = share(engine, of, pages)
            shared[new.row] = pages
            engine.run([new], [choice.randint(1, 20)])
        elif others and choice.random() < 0.3:
            leaves = [each for each in others if not any(is_shared(each, other) for other in others)]
            if leaves:
                gone = choice.choice(leaves)
                end(engine, gone, shared.pop(gone.row))
        else:
            running = [each for each in engine.requests.values() if each.kv_len < 80]
            news = [choice.choice([1, 1, 3]) for _ in running]
            if running:
                engine.run(running, news)
                for going, count in zip(running, news, strict=True):
                    going.kv_len -= choice.randint(0, count - 1)  # drafts that are rejected
        engine.attention.check_device()


def is_shared(one: Request, other: Request) -> bool:
    return one is not other and bool(set(one.pages[Space.FULL]) & set(other.pages[Space.FULL]))


def end(engine: Engine, request: Request, shared: int) -> None:
    """Ends a request; its own pages are the next to be allocated."""
    request.pages[Space.FULL] = request.pages[Space.FULL][shared:]
    own = len(request.pages[Space.FULL])
    engine.free_request(request)
    free = engine.free[Space.FULL]
    engine.free[Space.FULL] = free[own:] + free[:own]


@each_page_size
def test_a_row_whose_pages_are_replaced_by_those_of_a_cache_is_no_fault(
    page_size: int, device: torch.device, provider: str
) -> None:
    """Two requests have one prompt, in chunks. The second's pages are freed and replaced by the first's."""
    engine = watched(SGLang, page_size, device, provider)
    first, second = engine.admit(), engine.admit()
    engine.run([second], [16])
    engine.run([first, second], [32, 16])
    engine.attention.check_device()
    for layer in range(len(engine.windows)):
        k, v = engine.stored[layer, first.row]
        engine.stored[layer, second.row] = k.copy(), v.copy()
    count = 32 // page_size
    given_back, second.pages[Space.FULL][:count] = (
        second.pages[Space.FULL][:count],
        first.pages[Space.FULL][:count],
    )
    engine.free[Space.FULL].extend(given_back)
    third = engine.admit()
    engine.run([first, second, third], [1, 1, 20])
    engine.run([first, second, third], [1, 1, 1])
    engine.attention.check_device()


@pytest.mark.parametrize("is_said", [False, True])
def test_a_row_that_goes_to_a_request_of_the_same_length_may_be_said_to(
    is_said: bool, device: torch.device, provider: str
) -> None:
    """A prompt was computed again in the pages that its row once had, and is that row's prefix now."""
    engine = watched(SGLang, 16, device, provider)
    first, writer = engine.admit(), engine.admit()
    engine.run([first], [32])
    pages = list(first.pages[Space.FULL])
    engine.free_request(first)
    engine.free[Space.FULL] = [page for page in engine.free[Space.FULL] if page not in pages] + pages[::-1]
    engine.run([writer], [32])
    assert writer.pages[Space.FULL] == pages
    cached = share(engine, writer, 2)
    assert cached.row == first.row
    if is_said:
        engine.attention.forget(engine.ints([cached.row]))
        engine.run([cached], [1])
        engine.attention.check_device()
    else:
        engine.run([cached], [1])
        assert_reported(engine)


def test_only_rows_of_the_table_are_forgotten(device: torch.device, provider: str) -> None:
    engine = watched(SGLang, 16, device, provider)
    attention, request = engine.attention, engine.admit()
    engine.run([request], [32])
    (watch,) = attention._watches
    num_rows = len(watch.rows)
    before = watch.rows.clone()
    attention.forget(engine.ints([-1, request.row - num_rows, num_rows, 2**31 - 1]))
    attention.forget(engine.ints([]))
    assert torch.equal(watch.rows, before)
    attention.forget(engine.ints([num_rows, request.row]).long())
    assert before[request.row].any()
    assert not watch.rows[request.row].any()
    for wrong in (engine.ints([1]).float(), engine.ints([1])[None], torch.ones(1, dtype=torch.int32, device="meta")):
        with pytest.raises(BadTensor, match="rows are"):
            attention.forget(wrong)


def test_a_larger_table_than_the_one_that_is_watched_is_refused(device: torch.device, provider: str) -> None:
    engine = watched(SGLang, 16, device, provider)
    source = engine.sources()[Space.FULL]
    assert isinstance(source, TableSource)
    larger = torch.cat([source.entries, source.entries])
    with pytest.raises(Exception, match="are watched; build with the largest table"):
        engine.attention.tables.use(larger)
