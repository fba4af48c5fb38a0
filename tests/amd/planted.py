"""Faults that are planted into the kernels over torch, by pytest's monkeypatch; tests check that they are found.

Layers are known by the address of their pages, in the order of their first call.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.refs import sparse
from rocm_attn.kernels.sparse.arguments import IndexArgs, SelectedArgs, SelectedKeys
from rocm_attn.providers.contract import StepBounds
from rocm_attn.providers.torch_ref import TorchDecode, TorchExtend

Plant = Callable[[pytest.MonkeyPatch], None]
KERNELS: tuple[type, ...] = (TorchDecode, TorchExtend)


def reading(layer: int, change: Callable[[AttendArgs], AttendArgs], kernels: Sequence[type] = KERNELS) -> Plant:
    """A layer's kernels read other arguments than they are given."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        is_layer = _Layer(layer)
        for kernel in kernels:
            monkeypatch.setattr(kernel, "attend", _changed(kernel.attend, change, is_layer))  # type: ignore[attr-defined]

    return plant


def reading_a_wrong_page(layer: int, kernels: Sequence[type] = KERNELS) -> Plant:
    """A layer takes the second page of each row for the first one."""
    return reading(layer, lambda args: args._replace(table=_with_a_wrong_page(args.table)), kernels)


def reading_by_a_wrong_scale(layer: int) -> Plant:
    """A layer's V is twice as large as its codes say."""

    def change(args: AttendArgs) -> AttendArgs:
        assert args.pages.v_scale is not None
        return args._replace(pages=replace(args.pages, v_scale=args.pages.v_scale * 2))

    return reading(layer, change)


def choosing_by_a_wrong_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Indexers take the second page of each row for the first one."""
    select = sparse.select

    def wrong(args: IndexArgs, selection: SelectedKeys, **named: Any) -> None:
        select(args._replace(table=_with_a_wrong_page(args.table)), selection, **named)

    monkeypatch.setattr(sparse, "select", wrong)


def losing_a_selected_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first selected key of each token is left out."""
    attend = sparse.selected_attention

    def wrong(args: SelectedArgs, **named: Any) -> None:
        selection = args.selection
        assert isinstance(selection, SelectedKeys)
        units = selection.units.roll(-1, 2)
        attend(args._replace(selection=selection._replace(units=units, counts=selection.counts - 1)), **named)

    monkeypatch.setattr(sparse, "selected_attention", wrong)


def attending_to_a_wrong_page(layer: int) -> Plant:
    """A layer with selected keys takes the second page of each row for the first one."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        attend, is_layer = sparse.selected_attention, _Layer(layer)

        def wrong(args: SelectedArgs, **named: Any) -> None:
            table = _with_a_wrong_page(args.table) if is_layer(args.pages.k) else args.table
            attend(args._replace(table=table), **named)

        monkeypatch.setattr(sparse, "selected_attention", wrong)

    return plant


class _Layer:
    """Tells one layer from the others by its pages."""

    def __init__(self, layer: int) -> None:
        self._layer, self._places = layer, list[int]()

    def __call__(self, k: Tensor) -> bool:
        if k.data_ptr() not in self._places:
            self._places.append(k.data_ptr())
        return self._places.index(k.data_ptr()) == self._layer


def _changed(attend: Any, change: Callable[[AttendArgs], AttendArgs], is_layer: _Layer) -> Any:
    def wrong(self: Any, args: AttendArgs, step: Any, bounds: StepBounds) -> None:
        attend(self, change(args) if is_layer(args.pages.k) else args, step, bounds)

    return wrong


def _with_a_wrong_page(table: Tensor) -> Tensor:
    changed = table.clone()
    changed[:, 0] = changed[:, 1]
    return changed
