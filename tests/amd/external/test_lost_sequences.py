"""A sequence without its page, row or KV becomes padding, and harms no other one."""

from dataclasses import replace
from functools import partial
from itertools import accumulate

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.errors import (
    DeviceFault,
)
from rocm_attn.paging.adopted import CsrSource, TableSource
from rocm_attn.step.external_step import (
    NO_CELLS,
    BoolCells,
    Boundaries,
    ExternalStep,
)
from tests.amd.external.engines import DIM, KV_HEADS, Q_HEADS, V_DIM
from tests.amd.external.filled import BOUNDS, PAGE, Filled, near
from tests.amd.guards.csr_kernels import put_in_stand_ins


@pytest.mark.fast(interpreted=1)
def test_cells_of_a_sequence_whose_page_does_not_exist_stay_its_own(device: torch.device, provider: str) -> None:
    """It becomes padding without keys, and the sequences after it had its cells. A second fill changes nothing."""
    filled = Filled(device, provider, custom_mask=True)
    assert isinstance(filled.source.entries, Tensor)
    filled.source.entries[1, 0] = -1
    q_len, q = [3, 4, 2, 1], filled.rows(10, Q_HEADS, DIM)
    shown = filled.cells(q_len, lambda at, keys: filled.random.random((len(at), len(keys))) < 0.4)
    cells = torch.from_numpy(np.concatenate([cell.reshape(-1) for cell in shown])).to(device)
    found = filled.attend(q_len, filled.step(q_len, mask=BoolCells(cells, torch.zeros(10, device=device).long())), q)
    shown[1] = np.zeros_like(shown[1])
    filled.assert_right(q_len, found, q, shown=shown)
    filled.attention.fill()
    filled.attention.layers.attend(0, q, *found)
    filled.assert_right(q_len, found, q, shown=shown)
    with pytest.raises(DeviceFault, match="a page in the table"):
        filled.attention.check_device()


@pytest.mark.fast(interpreted=1)
@pytest.mark.parametrize("has_cells", [False, True])
@pytest.mark.parametrize(
    ("lie", "why"),
    [
        ("no row", "a row that was given lies outside of the table"),
        ("no KV", "a length on the device was outside"),
        ("short list", "a length on the device was outside"),
        ("few keys", "a length on the device was outside"),
        ("too many keys", "a length on the device was outside"),
        ("too many tokens", "a length on the device was outside"),
    ],
)
def test_a_lost_sequence_moves_no_token_and_no_cell_of_others(
    lie: str, why: str, has_cells: bool, device: torch.device, provider: str
) -> None:
    """Later sequences took its tokens, or its cells, for their own; a policy that only logs went on with their KV."""
    filled = Filled(device, provider, custom_mask=True)
    q_len, q = [3, 4, 2, 1], filled.rows(10, Q_HEADS, DIM)
    if lie == "too many tokens":
        q_len, q = [3, 20, 2, 1], filled.rows(26, Q_HEADS, DIM)
    shown = filled.cells(q_len, partial(near, 64, 0))
    if has_cells:
        shown = [filled.random.random(each.shape) < 0.4 for each in shown]
    kv_len, rows, bounds, given = list(filled.kv_len), [0, 1, 2, 3], {}, list(shown)
    if lie == "no row":
        rows[1] = 77
    elif lie in (keys := {"no KV": 0, "few keys": 2, "too many keys": 67}):
        kv_len[1] = keys[lie]
        given[1] = np.zeros((4, keys[lie]), bool)
    elif lie == "too many tokens":
        bounds = {"max_q_len": 4}
    elif lie == "short list":
        pages = [-(-length // PAGE) for length in kv_len]
        pages[1] = 1
        indices = np.concatenate([row[:count] for row, count in zip(filled.table, pages, strict=True)])
        lists = CsrSource(torch.tensor([0, *accumulate(pages)], device=device), torch.from_numpy(indices).to(device))
        filled.attention = filled.build(lists)
    cells = torch.from_numpy(np.concatenate([cell.reshape(-1) for cell in given])).to(device)
    mask = BoolCells(cells, torch.zeros(len(q), device=device).long()) if has_cells else NO_CELLS
    step = replace(filled.step(q_len, kv_len, mask=mask, **bounds), rows=torch.tensor(rows, device=device))
    found = filled.attend(q_len, step, q)
    shown[1] = np.zeros_like(shown[1])
    filled.assert_right(q_len, found, q, shown=shown)
    before = filled.k.nan_to_num()
    filled.attention.layers.store(0, filled.rows(len(q), KV_HEADS, DIM), filled.rows(len(q), KV_HEADS, V_DIM))
    written = (filled.k.nan_to_num() != before).flatten(1).any(1).nonzero().flatten().tolist()
    assert written
    assert not {*written} & {*filled.table[1]}, "a cut sequence stored over tokens that others may share"
    with pytest.raises(DeviceFault, match=why):
        filled.attention.check_device()


@pytest.mark.fast(interpreted=1)
@pytest.mark.parametrize("wrong", [-7, 11])
def test_a_wrong_boundary_harms_the_sequences_around_it_alone(wrong: int, device: torch.device, provider: str) -> None:
    filled, q_len = Filled(device, provider), [3, 4, 2, 1]
    q = filled.rows(10, Q_HEADS, DIM)
    boundaries = torch.tensor([0, wrong, 7, 9, 10], device=device)
    found = filled.attend(q_len, replace(filled.step(q_len), q=Boundaries(boundaries)), q)
    shown = filled.cells(q_len, partial(near, 64, 0))
    filled.assert_right(q_len, found, q, shown=[np.zeros_like(each) for each in shown[:2]] + shown[2:])
    with pytest.raises(DeviceFault, match="a length on the device was outside"):
        filled.attention.check_device()


@pytest.mark.parametrize("null_page", [False, True])
@pytest.mark.parametrize("has_lost", [False, True], ids=["no KV", "lost"])
def test_a_pad_with_kv_for_its_kernels_stores_nothing_and_receives_zeros(
    has_lost: bool, null_page: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that need a key for each sequence read one of row 0. New rows of pads before others went there."""
    put_in_stand_ins(monkeypatch.setattr)
    filled, kv_len = Filled(device, "csr_min_1"), list(Filled.kv_len)
    if has_lost:
        filled.table[2, 1] = -1
    else:
        kv_len[2] = 0
    source = TableSource(torch.from_numpy(filled.table).to(device, torch.int32), null_page=null_page)
    filled.attention = attention = filled.build(source)
    before = filled.k.nan_to_num()
    step = ExternalStep.decode(torch.tensor(kv_len, device=device), num_seqs=4, max_kv_len=64)
    out, lse = filled.attend([1] * 4, step, filled.rows(4, Q_HEADS, DIM))
    assert not out[2].any()
    assert (lse[2] == -torch.inf).all()
    attention.layers.store(0, filled.rows(4, KV_HEADS, DIM), filled.rows(4, KV_HEADS, V_DIM))
    written = (filled.k.nan_to_num() != before).any(3).any(2).nonzero()
    own = [(length - 1, filled.table[seq, (length - 1) // PAGE]) for seq, length in enumerate(kv_len) if seq != 2]
    assert sorted(written.tolist()) == sorted([page, place % PAGE] for place, page in own)


@pytest.mark.fast(interpreted=1)
def test_no_key_before_a_sequence_that_lost_its_pages_is_read(device: torch.device, provider: str) -> None:
    """Its cells begin below key 0."""
    filled = Filled(device, provider, custom_mask=True)
    assert isinstance(filled.source.entries, Tensor)
    filled.source.entries[2, 0] = -1
    filled.v.fill_(float("nan"))
    q_len, q = [3, 30, 25, 1], filled.rows(59, Q_HEADS, DIM)
    num_cells = sum(new * length for new, length in zip(q_len, filled.kv_len, strict=True))
    mask = BoolCells(torch.ones(num_cells, dtype=torch.bool, device=device), torch.zeros(59, device=device).long())
    out, lse = filled.attend(q_len, filled.step(q_len, mask=mask), q)
    assert not out[33:58].any()
    assert (lse[33:58] == -torch.inf).all()


@pytest.mark.fast(interpreted=1)
@pytest.mark.parametrize("limits", [{}, {"window_left": 20}, {"chunk": 16}], ids=str)
def test_a_prompt_over_a_page_that_does_not_exist_harms_no_other_sequence(
    limits: dict[str, int], device: torch.device, provider: str
) -> None:
    """It becomes padding of 40 tokens: its places are all below 0, and others' rows were given to no program."""
    filled = Filled(device, provider, **limits)
    assert isinstance(filled.source.entries, Tensor)
    filled.source.entries[2, 3] = BOUNDS.num_pages
    q_len, q = [3, 20, 40, 1], filled.rows(64, Q_HEADS, DIM)
    found = filled.attend(q_len, filled.step(q_len), q)
    chunk, left = limits.get("chunk", 64), limits.get("window_left", 64)
    shown = filled.cells(q_len, lambda at, keys: near(left, 0, at, keys) & (keys >= at - at % chunk))
    shown[2] = np.zeros_like(shown[2])
    filled.assert_right(q_len, found, q, shown=shown)
    with pytest.raises(DeviceFault, match="a page in the table"):
        filled.attention.check_device()
