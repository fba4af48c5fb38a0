"""A mixed step that forks a stream in a capture is not made by launches alone there, and is never a joined call."""

from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from rocm_attn.providers.mixed import MixedAtOnce
from rocm_attn.step import layers as of_step
from rocm_attn.step.layers import Layers

LAYER = 0


class Mixed:
    """A prepared layer of mixed steps. forks: its calls, which are not prepared"""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, captures: bool) -> None:
        self.forks, self.forms = Mock(), Mock()
        self.forms.attend.return_value = None  # made again by its launches
        self.layers = cast(Any, object.__new__(Layers))
        self.layers._kind_of_layer, self.layers._device, self.layers.forms = [0], torch.device("cpu"), self.forms
        self.layers._attend_args = self.layers._read_by = lambda *_: None
        monkeypatch.setattr(MixedAtOnce, "attend", self.forks)
        monkeypatch.setattr(Layers, "prepares", lambda _: True)
        monkeypatch.setattr(of_step, "is_capturing", lambda _: captures)
        bound = MixedAtOnce(Mock(), Mock())
        kernel = SimpleNamespace(bound=bound, entry=SimpleNamespace(clears_pads=True))
        self.plan = SimpleNamespace(kernels=(kernel,), prepared_of_kind=(True,), bounds=None)
        self.step = SimpleNamespace(prepared=None)


def test_it_is_made_again_by_its_launches_in_an_eager_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for captures in (False, True):
        mixed = Mixed(monkeypatch, captures=captures)
        mixed.layers.attend(mixed.step, mixed.plan, LAYER, None, None, None)
        assert mixed.forks.call_count == captures
        assert mixed.forms.attend.call_count == (not captures)


def test_it_is_not_joined_with_the_store_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A joined call is launched without checking whether a graph is being captured."""
    mixed = Mixed(monkeypatch, captures=False)
    mixed.layers.join(mixed.step, mixed.plan, LAYER)
    assert not mixed.forms.join.called
