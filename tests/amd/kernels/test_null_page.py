"""Page 0 as a normal page, and as a page of no sequence that is not zero: fill, the store and tails of both."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.store import launch_store_kv
from rocm_attn.kernels.cache.tails import launch_zero_tails
from rocm_attn.kernels.metadata.error_word import ERROR_WORD, TOKEN_WITHOUT_PAGE, WINDOW_WITHOUT_PAGE
from rocm_attn.kernels.metadata.fill import launch_fill
from rocm_attn.kernels.metadata.step_tensors import NO_PADS, Pads, StepTensors, TableTerms
from rocm_attn.kernels.refs import cache as cache_twins
from rocm_attn.kernels.refs import metadata as twins
from tests.amd.kernels.fill_cases import Case, tensors

Launch = Callable[..., None]
fills = pytest.mark.parametrize("fill", [launch_fill, twins.fill], ids=["kernel", "twin"])
stores = pytest.mark.parametrize("store", [launch_store_kv, cache_twins.store_kv], ids=["kernel", "twin"])
REAL, SHORT = TableTerms(null_page=False), TableTerms(null_page=False, short_kv=True)


def filled(
    fill: Launch, case: Case, terms: TableTerms, device: torch.device, window_left: int = 2**31 - 1
) -> StepTensors:
    step = replace(tensors(case, device), terms=terms, pads=Pads(*case.pad))
    fill(step, page_size=case.page_size, window_left=window_left)
    return step


@fills
def test_a_real_page_0_is_no_fault(fill: Launch, kernel_device: torch.device) -> None:
    """Two sequences have pages 0 and 5, and 7; there are two padded tokens."""
    case = Case([(6, 3), (2, 1)], (0, 0), 3, 6, 9, 4, [[0, 5], [7, 0]])
    step = filled(fill, case, REAL, kernel_device, window_left=3)
    assert step.slot_of_token.tolist() == [3, 20, 21, 29, -1, -1]
    assert step.page_list.tolist()[:3] == [0, 5, 7]
    assert step.counts.tolist() == [2, 4, 41, 0]
    assert filled(fill, case, TableTerms(), kernel_device, 3).counts[ERROR_WORD] == (
        TOKEN_WITHOUT_PAGE | WINDOW_WITHOUT_PAGE
    )


@fills
def test_no_kernel_that_reads_ahead_or_reads_pads_meets_a_real_page_0(
    fill: Launch, kernel_device: torch.device
) -> None:
    """Nothing may be stored there yet, and 0 * NaN is NaN. Pads have two tokens."""
    case = Case([(6, 3), (2, 1)], (2, 0), 3, 6, 6, 4, [[0, 5], [7, 0]])
    step = filled(fill, case, REAL, kernel_device)
    assert step.page_list.tolist() == [0, 5, 7, 7, 7, 7]
    assert step.block_table[:2].tolist() == [[0, 5, 7, 7], [7, 7, 7, 7]]
    assert filled(fill, case, TableTerms(), kernel_device).page_list.tolist() == [0, 5, 7, 0, 0, 0]
    empty = filled(fill, replace(case, seqs=[(0, 0), (0, 0)]), REAL, kernel_device)
    assert empty.page_list.tolist() == [0] * 6


@fills
def test_no_kernel_reads_ahead_into_the_page_of_a_last_sequence_that_is_lost(
    fill: Launch, kernel_device: torch.device
) -> None:
    """The check of pages makes a pad of it after the step's sequences were counted. Another has no key yet."""
    case = Case([(6, 3), (2, 1), (0, 2)], (2, 0), 4, 6, 6, 4, [[0, 5], [0, 0], [7, 0]])
    step = filled(lambda *_, **__: None, case, REAL, kernel_device)
    step.row_of_seq[1] = 0
    fill(step, page_size=case.page_size, window_left=2**31 - 1)
    assert step.page_list.tolist() == [0, 5, 5, 5, 5, 5]
    assert step.block_table[0].tolist() == [0, 5, 5, 5]


@fills
@pytest.mark.parametrize("chunk", [2**31 - 1, 8])
def test_no_kernel_meets_a_page_that_no_new_token_sees_a_key_of(
    fill: Launch, chunk: int, kernel_device: torch.device
) -> None:
    """It may have been given back, as -1 or any other number: windows of AITER begin within a tile of keys."""
    case = Case([(11, 2), (4, 1)], (0, 0), 3, 4, 9, 4, [[-1, 5, 6], [7, 0, 0]])
    step = replace(tensors(case, kernel_device), terms=REAL)
    fill(step, page_size=4, window_left=4 if chunk > 8 else 2**31 - 1, chunk=chunk)
    unseen = [7, 5] if chunk > 8 else [7, 7]
    assert step.page_list.tolist()[:4] == [*unseen, 6, 7]
    assert step.block_table[:, :3].tolist()[:2] == [[*unseen, 6], [7, 7, 7]]
    assert step.counts[ERROR_WORD] == 0


@fills
def test_a_token_past_its_row_has_no_slot_where_page_0_is_real(fill: Launch, kernel_device: torch.device) -> None:
    case = Case([(9, 3), (3, 1)], (0, 0), 2, 4, 9, 4, [[3, 5], [0, 1]])
    step = filled(fill, case, REAL, kernel_device)
    assert step.slot_of_token.tolist() == [22, 23, -1, 2]
    assert step.counts[ERROR_WORD] == TOKEN_WITHOUT_PAGE


@fills
def test_an_entry_below_zero_is_no_page(fill: Launch, kernel_device: torch.device) -> None:
    case = Case([(6, 2)], (0, 0), 1, 2, 9, 4, [[-1, 5]])
    step = filled(fill, case, REAL, kernel_device, window_left=3)
    assert step.slot_of_token.tolist() == [20, 21]
    assert step.counts[ERROR_WORD] == WINDOW_WITHOUT_PAGE
    assert filled(fill, replace(case, seqs=[(6, 3)]), REAL, kernel_device, 1).counts[ERROR_WORD] == (
        TOKEN_WITHOUT_PAGE | WINDOW_WITHOUT_PAGE
    )


@pytest.mark.fast
@fills
@pytest.mark.parametrize("null_page", [True, False])
def test_new_tokens_before_the_kv_have_no_slot(fill: Launch, null_page: bool, kernel_device: torch.device) -> None:
    """There are five new tokens over two of KV, and three over none, as in non-causal attention."""
    case = Case([(2, 5), (0, 3), (9, 1)], (0, 0), 4, 11, 9, 4, [[6, 7, 8], [1, 2, 3], [9, 8, 7]])
    none = 0 if null_page else -1
    step = filled(fill, case, TableTerms(null_page, short_kv=True), kernel_device)
    slots = step.slot_of_token.tolist()
    assert slots[3:5] == [24, 25]
    assert slots[8] == 28
    assert [slot for slot in slots if slot not in (24, 25, 28)] == [none] * 8
    assert step.q_indptr.tolist() == [0, 5, 8, 9, 9]
    assert step.counts.tolist() == [3, 9, 41, 0]
    assert filled(fill, case, TableTerms(null_page), kernel_device).counts[ERROR_WORD] == TOKEN_WITHOUT_PAGE


def pages_and_rows(device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """Returns pages without zeros, and five new tokens, the last one NaN."""
    pages = [torch.full((4, 4, 2, dim), 7.0, device=device) for dim in (16, 24)]
    rows = [torch.randn(5, 2, dim, device=device) for dim in (16, 24)]
    for side in rows:
        side[4] = float("nan")
    return pages, rows


@pytest.mark.fast
@stores
@pytest.mark.parametrize(("null_page", "stored"), [(True, [0, 3]), (False, [0, 1, 3])])
def test_the_store_writes_a_real_page_0_and_leaves_any_other_alone(
    store: Launch, null_page: bool, stored: list[int], kernel_device: torch.device
) -> None:
    pages, rows = pages_and_rows(kernel_device)
    slots = [5, 2, -1, 12, 0]
    wanted = [side.clone() for side in pages]
    for side, values in zip(wanted, rows, strict=True):
        for token in stored:
            side[slots[token] // 4, slots[token] % 4] = values[token]
    counts = torch.tensor([1, 4, 1, 0], dtype=torch.int32, device=kernel_device)
    given = torch.tensor(slots, dtype=torch.int32, device=kernel_device)
    store(*rows, given, counts, LayerPages.plain(*pages), null_page=null_page)
    assert all(torch.equal(side, want) for side, want in zip(pages, wanted, strict=True))
    assert counts.tolist() == [1, 4, 1, 0]


@pytest.mark.fast
@stores
@pytest.mark.parametrize("null_page", [True, False])
@pytest.mark.parametrize("num_tokens", [0, 2])
def test_a_store_of_nothing_leaves_every_page_as_it_is(
    store: Launch, null_page: bool, num_tokens: int, kernel_device: torch.device
) -> None:
    pages, rows = pages_and_rows(kernel_device)
    counts = torch.tensor([1, num_tokens, 1, 0], dtype=torch.int32, device=kernel_device)
    given = torch.tensor([-1, -1, 5, 6, 0], dtype=torch.int32, device=kernel_device)
    store(*rows, given, counts, LayerPages.plain(*pages), null_page=null_page)
    assert all((side == 7).all() for side in pages)


@pytest.mark.fast
@pytest.mark.parametrize("zero_tails", [launch_zero_tails, cache_twins.zero_tails], ids=["kernel", "twin"])
@pytest.mark.parametrize(
    ("null_page", "pads", "q_len", "zeroed"),
    [
        (True, NO_PADS, [1, 2], {2: 3}),
        (False, NO_PADS, [1, 2], {0: 1, 2: 3}),
        (False, NO_PADS, [1, 0], {0: 1}),
        (False, NO_PADS, [0, 0], {}),
        (False, Pads(kv_len=5, q_len=1), [1, 2], {2: 3}),
    ],
)
def test_tails_of_a_real_page_0_are_zeroed_and_no_other_page_0_is_written(
    zero_tails: Launch,
    null_page: bool,
    pads: Pads,
    q_len: list[int],
    zeroed: dict[int, int],
    kernel_device: torch.device,
) -> None:
    """Two sequences end in page 0 after one token, and in page 2 after three. The first is a pad if pads have KV."""
    pages, _ = pages_and_rows(kernel_device)
    wanted = [side.clone() for side in pages]
    for page, used in zeroed.items():
        for side in wanted:
            side[page, used:] = 0
    table = torch.tensor([[1, 0], [3, 2]], dtype=torch.int32, device=kernel_device)
    of_seq = {"row_of_seq": [0, 1], "kv_len": [5, 7], "q_len": q_len}
    named = {name: torch.tensor(x, dtype=torch.int32, device=kernel_device) for name, x in of_seq.items()}
    step = StepTensors.of(table[:0], pads, TableTerms(null_page=null_page), table=table, **named)
    zero_tails(step, LayerPages.plain(*pages))
    assert all(torch.equal(side, want) for side, want in zip(pages, wanted, strict=True))
