"""Arguments of launches: at any alignment a kernel has one variant, and strides are counted in 8 elements."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.any_alignment import at_any_alignment, is_far
from rocm_attn.kernels.attention.arguments import AttendArgs, Queries
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.metadata import check_pages, fill, gather_table
from rocm_attn.kernels.metadata.engine_tensors import GatherSource


@triton.jit(do_not_specialize=["num"])  # type: ignore[untyped-decorator]
def _kernel(to, given, num, other, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    pass


def test_no_argument_is_specialised_on_its_alignment_and_numbers_stay_as_they_were() -> None:
    """Triton refuses constants among the names, and takes a number in both lists for one whose value does not count."""
    before, after = _kernel.params, at_any_alignment(_kernel).params
    assert [each.name for each in after if each.do_not_specialize_on_alignment] == ["to", "given", "num", "other"]
    assert [each.name for each in after if each.do_not_specialize] == ["num"]
    assert [each.name for each in after if each.is_constexpr] == ["BLOCK"]
    assert not any(each.do_not_specialize_on_alignment for each in before)


# Rows of a table of slots for 2048 requests of 256k tokens, and one row that stands for all of them.
ROWS, WIDTH = 2049, 2**18
TABLE, ROW = (torch.empty(rows, WIDTH, dtype=torch.int32, device="meta") for rows in (ROWS, 1))


def test_elements_that_lie_2_gib_apart_are_far_whatever_the_tensor_holds() -> None:
    assert is_far(TABLE)
    assert is_far(TABLE[:, :1])
    assert not is_far(TABLE[:-2])
    assert not is_far(ROW.expand(ROWS, -1))
    assert not is_far(TABLE[:0])


NONE, OF_SEQ, PAGES = (torch.empty(size, dtype=torch.int32, device="meta") for size in ((0,), (1,), (2, WIDTH)))


def step_over(table: Tensor) -> Any:
    """Returns the fields of a step that launches of metadata look at."""
    of_seq = dict.fromkeys(
        ("counts", "row_of_seq", "kv_len", "q_len", "slot_of_token", "span_begin", "span_end"), OF_SEQ
    )
    lists = dict.fromkeys(("page_indptr", "kv_len_int64", "mask_indptr", "group_indptr"), NONE)
    terms, pads = SimpleNamespace(null_page=0, short_kv=False), SimpleNamespace(kv_len=0)
    return SimpleNamespace(table=table, block_table=PAGES, page_list=OF_SEQ, terms=terms, pads=pads, **of_seq, **lists)


LAUNCHES: dict[ModuleType, Callable[[Tensor], None]] = {
    gather_table: lambda table: gather_table.launch_gather_table(
        GatherSource(table, has_slots=True), OF_SEQ, OF_SEQ, PAGES, page_size=64
    ),
    fill: lambda table: fill.launch_fill(step_over(table), page_size=64),
    check_pages: lambda table: check_pages.launch_check_pages(
        step_over(table), OF_SEQ, page_size=64, window_left=0, spans_pass=True
    ),
}


@pytest.mark.parametrize("module", LAUNCHES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_a_large_table_is_not_read_by_the_kept_launch_of_a_small_one(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On AMD GPUs Triton's variant for a storage below 2 GiB computes places in 32 bits."""
    kept: list[tuple[object, ...]] = []

    def variant(*of: object) -> Callable[..., None]:
        kept.append(of)
        return lambda *arguments, **options: None

    monkeypatch.setattr(module, "_variant", variant)
    monkeypatch.setattr(fill, "_tensors", lambda step: ())
    for table in (ROW, ROW.expand(ROWS, -1), TABLE, TABLE[:, :64]):
        LAUNCHES[module](table)
    assert kept[0] == kept[1] != kept[2] == kept[3]


def args_of(head_dim: int, *, pages: Tensor | None = None, out: Tensor | None = None) -> AttendArgs:
    """Returns three tokens of four heads over pages of two heads."""
    nothing = torch.zeros(1, dtype=torch.int32)
    q = torch.zeros(3, 4, head_dim)
    k = torch.zeros(5, 4, 2, head_dim) if pages is None else pages
    queries = Queries(nothing, nothing, nothing, 3, 1, 1)
    out = torch.zeros_like(q) if out is None else out
    table = torch.zeros(2, 7, dtype=torch.int32)
    lse = torch.zeros(3, 4)
    return AttendArgs(q, LayerPages.plain(k, k), table, queries, out, lse, None, None, nothing, lse)


@pytest.mark.parametrize(("head_dim", "unit"), [(16, 1), (64, 1), (8, 8), (24, 8), (40, 8), (72, 8), (20, 1), (7, 1)])
def test_strides_of_odd_multiples_of_8_are_counted_in_8(head_dim: int, unit: int) -> None:
    assert args_of(head_dim).stride_unit == unit


def test_one_stride_that_is_no_multiple_of_8_leaves_all_as_they_are() -> None:
    assert args_of(40, out=torch.zeros(3, 4, 44)[..., :40]).stride_unit == 1
    assert args_of(40, out=torch.zeros(3, 4, 48)[..., :40]).stride_unit == 8
    assert args_of(64, out=torch.zeros(3, 4, 72)[..., :64]).stride_unit == 8


def test_a_stride_that_needs_64_bits_is_not_divided() -> None:
    memory = torch.empty(1, device="meta")
    far = memory.as_strided((1, 4, 2, 40), (1 << 31, 80, 40, 1))
    assert args_of(40, pages=far).stride_unit == 1
    near = memory.as_strided((1, 4, 2, 40), ((1 << 31) - 8, 80, 40, 1))
    assert args_of(40, pages=near).stride_unit == 8
