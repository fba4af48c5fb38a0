"""Small sums over ranks are tried before they are used; test_ranks_on_gpus.py runs them."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from rocm_serve import peer_sums
from rocm_serve.peer_sums import NoSmallSums, small_sums

MISFIT, SUMS = "no GPU can read another's memory", object()


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
    group: Any = Group()
    trial = peer_sums._Trial(group, doubled, torch.device("cpu"))
    sums: Any = Doubling(wrong_at)
    trial.sums = sums
    assert bool(trial.compare()) == bool(wrong_at)
    assert sums.most == peer_sums._TRIED[-1]


STAGES = ("share", "compile", "compare")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", ["another rank", "says", RuntimeError(f"{MISFIT}\nmore"), TypeError(MISFIT), OSError()])
def test_all_ranks_use_them_or_none(
    stage: str, how: str | Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All ranks agree after each stage, so none goes on alone. how: another rank says no, or this one, or it raises"""
    done: list[str] = []

    def run(name: str) -> str:
        done.append(name)
        if name == stage and isinstance(how, Exception):
            raise how
        return MISFIT if name == stage and how == "says" else ""

    of_trial = {name: (lambda _, name=name: run(name)) for name in STAGES}
    use(monkeypatch, lambda _: True, type("Trial", (), {"__init__": lambda *_: None, "sums": SUMS, **of_trial}))
    group: Any = Group()

    def least(number: int) -> int:
        return min(number, int(how != "another rank" or not done or done[-1] != stage))

    with caplog.at_level(logging.WARNING):
        assert isinstance(small_sums(group, doubled, least), NoSmallSums)
    assert done == list(STAGES[: STAGES.index(stage) + 1])
    said = [record.message.rpartition(": ")[2] for record in caplog.records]
    assert said == ([] if how == "another rank" else ["OSError"] if isinstance(how, OSError) else [MISFIT])


def test_they_are_used_if_every_stage_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    right = {name: lambda _: "" for name in STAGES}
    use(monkeypatch, lambda _: True, type("Trial", (), {"__init__": lambda *_: None, "sums": SUMS, **right}))
    group: Any = Group()
    assert small_sums(group, doubled, int) is SUMS


def use(monkeypatch: pytest.MonkeyPatch, is_one_host: object, trial: object) -> None:
    """Gives ranks NCCL and a GPU."""
    monkeypatch.setattr(torch.distributed, "get_backend", lambda _: "nccl")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(peer_sums, "_is_one_host", is_one_host)
    monkeypatch.setattr(peer_sums, "_Trial", trial)


@pytest.mark.parametrize("hash_of_other", [0, 2**32])
def test_ranks_of_several_hosts_use_collectives(hash_of_other: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, peer_sums._is_one_host, lambda *_: None)
    group: Any = Group()
    of_other = iter([hash_of_other, -hash_of_other, 0])
    assert isinstance(small_sums(group, doubled, lambda number: min(number, next(of_other))), NoSmallSums)
    assert not list(of_other)
