"""Fill: every index tensor of a step, by the kernel and by its torch twin, against plain Python."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from rocm_attn.kernels.metadata.error_word import ERROR_WORD, TOKEN_WITHOUT_PAGE, WINDOW_WITHOUT_PAGE
from rocm_attn.kernels.metadata.fill import launch_fill
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.kernels.refs import metadata as refs
from tests.amd.kernels.fill_cases import (
    DERIVED,
    GROUPS,
    PAGE_LIST,
    REQUIRED,
    Case,
    cases,
    derived_by_hand,
    is_untouched_after,
    random_pages,
    tensors,
    written,
)

Fill = Callable[..., None]
both = pytest.mark.parametrize("fill", [launch_fill, refs.fill], ids=["kernel", "twin"])


def fill_once(fill: Fill, case: Case, device: torch.device) -> StepTensors:
    """Returns the step's tensors after one fill."""
    step = tensors(case, device)
    fill(step, page_size=case.page_size)
    return step


def check(fill: Fill, case: Case, device: torch.device) -> None:
    """Checks that one fill writes what plain Python derives, and changes no input and no memory after its outputs."""
    step = fill_once(fill, case, device)
    assert written(step) == {**written(tensors(case, device)), **derived_by_hand(case)}
    assert [name for name in DERIVED if not is_untouched_after(getattr(step, name))] == []


def one_sequence(length: int, new: int, *, width: int, page_size: int = 4) -> Case:
    """Returns one live sequence in a row of `width` pages, and one pad."""
    seqs = [(length, new)]
    return Case(seqs, (0, 0), 2, new + 3, 20, page_size, random_pages(seqs, width, 0))


@pytest.mark.fast(1)
@both
@settings(max_examples=4)
@given(case=cases())
def test_fill_derives_what_plain_python_derives(fill: Fill, kernel_device: torch.device, case: Case) -> None:
    check(fill, case, kernel_device)


CHOSEN = {
    "more new tokens than tokens": one_sequence(3, 5, width=2),
    "room after all sequences": replace(one_sequence(3, 1, width=1), num_tokens_padded=3000, list_len=9000),
    "pads and empty sequences": Case([(0, 0), (7, 0), (5, 1)], (1, 1), 6, 9, 30, 4, random_pages([(0, 0)] * 3, 2, 4)),
}


@both
@pytest.mark.parametrize("case", CHOSEN.values(), ids=CHOSEN)
def test_fill_derives_it_of_chosen_steps(fill: Fill, kernel_device: torch.device, case: Case) -> None:
    check(fill, case, kernel_device)


@pytest.mark.nightly
@settings(max_examples=200)
@given(case=cases())
def test_fill_derives_it_in_any_case(kernel_device: torch.device, case: Case) -> None:
    check(launch_fill, case, kernel_device)


@pytest.mark.fast
@both
@pytest.mark.parametrize("wanted", [(), PAGE_LIST, ("block_table",), ("kv_len_int64",), ("mask_indptr",), GROUPS])
@settings(max_examples=2)
@given(case=cases())
def test_only_what_has_elements_is_written(
    fill: Fill, wanted: tuple[str, ...], kernel_device: torch.device, case: Case
) -> None:
    check(fill, replace(case, wanted=(*REQUIRED, *wanted)), kernel_device)


@pytest.mark.fast
@both
@pytest.mark.parametrize(
    ("num_seqs", "longest"),
    [(20, 60), (1, 1000), *(pytest.param(*sizes, marks=pytest.mark.nightly) for sizes in ((256, 60), (513, 1000)))],
)
def test_any_number_of_sequences_and_long_prompts(
    fill: Fill, num_seqs: int, longest: int, kernel_device: torch.device
) -> None:
    generator = random.Random(num_seqs)
    seqs = [(length := generator.randint(0, 20), min(length, generator.randint(0, 6) // 6)) for _ in range(num_seqs)]
    seqs[num_seqs // 2] = (longest, 40)
    pages, num_tokens = random_pages(seqs, longest // 2, 1), sum(new for _, new in seqs) + 5
    case = Case(seqs, (1, 0), num_seqs + 3, num_tokens, 5000 + longest, 2, pages, wanted=(*REQUIRED, *PAGE_LIST))
    check(fill, case, kernel_device)


@pytest.mark.fast
@both
@pytest.mark.parametrize("past", [1, 4, 5, 4000])
def test_a_length_beyond_its_row_meets_page_zero_and_no_other_rows_page(
    fill: Fill, past: int, kernel_device: torch.device
) -> None:
    """Lengths that only the device knows may be wrong."""
    seqs = [(8, 1), (8 + past, past + 2), (8, 2)]
    case = Case(seqs, (0, 1), 4, past + 9, 2000, 4, random_pages(seqs, 2, 3))
    check(fill, case, kernel_device)
    step = fill_once(fill, case, kernel_device)
    others = {page for seq in (0, 2) for page in case.pages[seq]}
    own = slice(int(step.page_indptr[1]), int(step.page_indptr[2]))
    tokens = slice(int(step.q_indptr[1]), int(step.q_indptr[2]))
    assert not others & set(step.page_list[own].tolist())
    assert not others & set((step.slot_of_token[tokens] // 4).tolist())
    assert step.counts[ERROR_WORD] == TOKEN_WITHOUT_PAGE


@both
@pytest.mark.parametrize(
    ("lost_page", "new", "is_lost"),
    [(0, 12, True), (0, 8, False), (1, 8, True), (1, 5, True), (1, 4, False), (2, 1, True)],
)
def test_the_error_word_says_that_a_live_token_has_no_page(
    fill: Fill, lost_page: int, new: int, is_lost: bool, kernel_device: torch.device
) -> None:
    """Three pages of four tokens; a missing page matters to tokens that are stored to it, not to earlier ones."""
    case = one_sequence(12, new, width=3)
    case.pages[0][lost_page] = 0
    step = fill_once(fill, case, kernel_device)
    blind = WINDOW_WITHOUT_PAGE if lost_page == 0 else 0
    assert step.counts.tolist() == [1, new, 41, blind | (TOKEN_WITHOUT_PAGE if is_lost else 0)]


@both
@pytest.mark.parametrize(
    ("given_back", "new", "window_left", "is_blind"),
    [(1, 1, 7, False), (1, 1, 8, True), (2, 1, 3, False), (2, 1, 4, True), (1, 3, 5, False), (1, 3, 6, True)],
)
def test_the_error_word_says_that_a_window_begins_in_a_page_that_was_given_back(
    fill: Fill, given_back: int, new: int, window_left: int, is_blind: bool, kernel_device: torch.device
) -> None:
    """Three pages of four tokens, the last one at 11: the first new one sees 12 - new - window_left and later ones."""
    case = one_sequence(12, new, width=3)
    case.pages[0][:given_back] = [0] * given_back
    step = tensors(case, kernel_device)
    fill(step, page_size=4, window_left=window_left)
    assert step.counts[ERROR_WORD] == (WINDOW_WITHOUT_PAGE if is_blind else 0)


@both
@pytest.mark.parametrize(
    ("given_back", "new", "chunk", "is_blind"), [(2, 4, 8, False), (2, 5, 8, True), (1, 8, 4, False)]
)
def test_pages_before_a_chunk_may_be_given_back(
    fill: Fill, given_back: int, new: int, chunk: int, is_blind: bool, kernel_device: torch.device
) -> None:
    """Three pages of four tokens, the last one at 11, in windows of 7 keys before a token: chunks end some earlier."""
    case = one_sequence(12, new, width=3)
    case.pages[0][:given_back] = [0] * given_back
    step = tensors(case, kernel_device)
    fill(step, page_size=4, window_left=7, chunk=chunk)
    assert step.counts[ERROR_WORD] & WINDOW_WITHOUT_PAGE == (WINDOW_WITHOUT_PAGE if is_blind else 0)


@both
def test_fill_leaves_the_other_bits_of_the_error_word(fill: Fill, kernel_device: torch.device) -> None:
    step = tensors(one_sequence(9, 2, width=1), kernel_device)
    step.counts[ERROR_WORD] = 64
    fill(step, page_size=4)
    assert step.counts[ERROR_WORD] == 64 | TOKEN_WITHOUT_PAGE


@pytest.mark.fast(1)
@both
def test_mask_cells_are_counted_in_64_bits(fill: Fill, kernel_device: torch.device) -> None:
    seqs = [(1_100_000, 4096)]
    case = Case(seqs, (1, 1), 2, 1, 1, 128, random_pages(seqs, 1, 5), wanted=(*REQUIRED, "mask_indptr"))
    step = fill_once(fill, case, kernel_device)
    cells = (1_100_000 - (1_100_000 - 4096) // 2) * 4096
    assert cells > 2**31
    assert step.mask_indptr.tolist() == [0, cells, cells + 1]


@pytest.mark.nightly
def test_the_twin_agrees_at_256_sequences_of_32k_tokens(kernel_device: torch.device) -> None:
    seqs = [(32_768 - seq, 1) for seq in range(256)]
    case = Case(seqs, (0, 1), 256, 256, 256 * 256, 128, random_pages(seqs, 256, 6))
    kernel, twin = (fill_once(fill, case, kernel_device) for fill in (launch_fill, refs.fill))
    for name in (*DERIVED, "counts"):
        assert torch.equal(getattr(kernel, name), getattr(twin, name)), name
