"""Small sums over ranks are tried before they are used; test_ranks_on_gpus.py runs them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from rocm_serve import peer_sums
from rocm_serve.peer_sums import NoSmallSums, PeerSums, small_sums

MISFIT = "no GPU can read another's memory"


class Group:
    """A group of two ranks over NCCL."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 1


class Doubling:
    """A sum of two ranks with the same values. wrong_at: size of the sums whose last element is wrong; 0: none"""

    def __init__(self, wrong_at: int = 0) -> None:
        self.wrong_at, self.most = wrong_at, 0

    def try_to_add_up(self, x: Tensor) -> None:
        x *= 2
        self.most = max(self.most, x.numel())
        if x.numel() == self.wrong_at:
            x[-1] *= 1 + 2**-7


def doubled(x: Tensor) -> Tensor:
    return 2 * x


@pytest.mark.parametrize("wrong_at", [0, *peer_sums._TRIED])
def test_a_wrong_bit_is_noticed(wrong_at: int) -> None:
    sums: Any = Doubling(wrong_at)
    assert peer_sums._adds_up(sums, doubled, int, 1, torch.device("cpu")) == (not wrong_at)
    assert sums.most == peer_sums._TRIED[-1]


@pytest.mark.parametrize(
    ("least_of_others", "adds_up", "why"),
    [
        (2**40, True, ""),
        (0, True, ""),
        (2**40, False, "its sums are not those of the collectives"),
        (2**40, RuntimeError(f"{MISFIT}\nmore"), MISFIT),
    ],
    ids=["right", "wrong on another rank", "wrong", "raises"],
)
def test_all_ranks_use_them_or_none(
    least_of_others: int,
    adds_up: bool | RuntimeError,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def tried(*_: object) -> bool:
        if isinstance(adds_up, RuntimeError):
            raise adds_up
        return adds_up

    monkeypatch.setattr(torch.distributed, "get_backend", lambda _: "nccl")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(peer_sums, "_shared", lambda *_: None)
    monkeypatch.setattr(peer_sums, "_is_one_host", lambda _: True)
    monkeypatch.setattr(peer_sums, "_adds_up", tried)
    group: Any = Group()
    asked: list[int] = []

    def least(number: int) -> int:
        asked.append(number)
        return number if len(asked) == 1 else min(number, least_of_others)

    with caplog.at_level(logging.WARNING):
        sums = small_sums(group, doubled, least)
    assert isinstance(sums, PeerSums) == (adds_up is True and bool(least_of_others))
    assert asked == [True, adds_up is True]
    assert [record.message.rpartition(": ")[2] for record in caplog.records] == ([why] if why else [])


@pytest.mark.parametrize("hash_of_other", [0, 2**32])
def test_ranks_of_several_hosts_use_collectives(hash_of_other: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_backend", lambda _: "nccl")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    group: Any = Group()
    of_other = iter([hash_of_other, -hash_of_other, 0])
    assert isinstance(small_sums(group, doubled, lambda number: min(number, next(of_other))), NoSmallSums)
    assert not list(of_other)
