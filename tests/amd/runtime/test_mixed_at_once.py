"""Mixed steps whose decode and extend run at the same time in a graph."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.machine.target import known_target
from rocm_attn.providers import mixed
from rocm_attn.providers.contract import NO_SCHEDULE, BoundKernel, StepBounds
from rocm_attn.providers.mixed import MixedAtOnce
from rocm_attn.providers.select import select
from tests.amd.worlds.problems import small_problem

SHAPE = PaddedShape(StepKind.MIXED, 4, 64)


@dataclass
class Noting:
    """A kernel that records its arguments, and fills its workspace. words: of workspace that it requests"""

    words: int
    given: list[torch.Tensor] = field(default_factory=list)
    schedule = NO_SCHEDULE

    def describe(self) -> str:
        return "noting"

    def workspace_words(self, shape: PaddedShape) -> int:
        return self.words

    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        self.given.append(args.workspace)


class Aside:
    """In place of a forked stream: notes that it was used."""

    def __init__(self) -> None:
        self.uses = 0

    def run_both(self, here: Callable[[], object], aside: Callable[[], object]) -> None:
        self.uses += 1
        aside()
        here()


def addresses(words: torch.Tensor) -> range:
    return range(words.data_ptr(), words.data_ptr() + 4 * words.numel(), 4)


def attended(monkeypatch: pytest.MonkeyPatch, *, is_capturing: bool) -> tuple[Noting, Noting, Aside]:
    """Decode and extend after one attend(), and the stream."""
    side, decode, extend = Aside(), Noting(40), Noting(27)
    kernels: Any = (decode, extend)
    monkeypatch.setattr(mixed, "is_capturing", lambda device: is_capturing)
    monkeypatch.setattr(mixed, "_side_stream", lambda device: side)
    kernel: BoundKernel = MixedAtOnce(*kernels)
    nothing: Any = torch.empty(0)
    args: Any = AttendArgs(*[nothing] * len(AttendArgs._fields))
    words = torch.zeros(kernel.workspace_words(SHAPE))
    step: Any = None
    kernel.attend(args._replace(workspace=words, schedule=torch.empty(0)), step, StepBounds(SHAPE, 64, 64))
    return decode, extend, side


def test_kernels_that_run_at_once_share_no_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    decode, extend, side = attended(monkeypatch, is_capturing=True)
    assert side.uses == 1
    assert decode.given[0].numel() >= 40
    assert extend.given[0].numel() >= 27
    assert not set(addresses(decode.given[0])) & set(addresses(extend.given[0]))


def test_an_eager_step_forks_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    decode, extend, side = attended(monkeypatch, is_capturing=False)
    assert side.uses == 0
    assert len(decode.given) == len(extend.given) == 1


@pytest.mark.parametrize(("arch", "is_at_once"), [("sm_90", True), ("sm_80", False), ("gfx942", False)])
def test_kernels_run_at_once_where_that_was_measured(arch: str, is_at_once: bool) -> None:
    problem = replace(small_problem(dtype=torch.bfloat16), page_size=16)
    kernel = select(problem, known_target(arch), "triton").kernel(StepKind.MIXED).bound
    assert isinstance(kernel, MixedAtOnce) == is_at_once
