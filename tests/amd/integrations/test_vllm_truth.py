"""Needles through vLLM's layers before its first step, over pages that are lent for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from rocm_attn.external import ExternalAttention
from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.providers.contract import StepBounds
from rocm_attn.providers.torch_ref import TorchDecode, TorchExtend
from rocm_attn.truth.adopted import probe_adopted
from rocm_attn.truth.verdict import TruthVerdict
from tests.amd.integrations.vllm_runner import HEADS, TERMS, Runner

CPU = torch.device("cpu")
TWO = [TERMS, TERMS]


@pytest.fixture(autouse=True)
def inference_mode() -> Iterator[None]:
    """Runs tests in inference mode, in which vLLM allocates and runs."""
    with torch.inference_mode():
        yield


def found(terms: list[Any], groups: Sequence[int] = (), **options: Any) -> list[TruthVerdict]:
    """The verdicts of a runner's groups. Its steps come afterwards, and equal the oracle."""
    verdicts: list[TruthVerdict] = []

    def tried(attention: ExternalAttention, lend: Callable[[int], None]) -> None:
        before = [layer.kv_cache.clone() for layer in runner.layers]
        verdicts.append(probe_adopted(attention, lend))
        for cache, layer in zip(before, runner.layers, strict=True):
            assert torch.equal(cache.view(torch.uint8), layer.kv_cache.view(torch.uint8)), "vLLM's blocks were written"

    runner = Runner(terms, groups or [0] * len(terms), device=CPU, provider="torch", tried=tried, **options)
    for _ in range(2):
        runner.admit()
    runner.step([9, 40])
    return verdicts


@pytest.mark.parametrize("heads_first", [False, True], ids=["NHD", "HND"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"sliding_window": 20}, {"kv_cache_dtype": "fp8"}, {"sinks": torch.linspace(-1, 1, HEADS)}],
    ids=["plain", "window", "FP8", "sinks"],
)
def test_right_kernels_find_every_needle_and_vllms_blocks_stay_as_they_are(
    changes: dict[str, Any], heads_first: bool
) -> None:
    (verdict,) = found([TERMS, replace(TERMS, **changes)], heads_first=heads_first)
    assert (verdict.word, verdict.not_checked) == ("right", {})
    assert verdict.num_keys > 0


def test_each_group_of_layers_has_a_verdict_and_layers_that_no_needle_tells_have_a_reason() -> None:
    with_slopes = replace(TERMS, alibi_slopes=[0.5, 0.25, 0.125, 0.0625])
    one, other = found([TERMS, with_slopes, replace(TERMS, sliding_window=20)], groups=[0, 0, 1])
    assert (one.word, other.word, other.not_checked) == ("right", "right", {})
    assert list(one.not_checked) == [1]
    (alone,) = found([with_slopes])
    assert (alone.word, alone.num_keys) == ("not checked", 0)


@pytest.mark.parametrize("kernel", [TorchDecode, TorchExtend])
def test_a_kernel_that_reads_a_wrong_page_of_one_layer_is_found(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    attend, places = kernel.attend, list[int]()

    def wrong(self: Any, args: AttendArgs, step: Any, bounds: StepBounds) -> None:
        if args.pages.k.data_ptr() not in places:
            places.append(args.pages.k.data_ptr())
        if args.pages.k.data_ptr() == places[1]:
            table = args.table.clone()
            table[:, 0] = table[:, 1]
            args = args._replace(table=table)
        attend(self, args, step, bounds)

    places.append(0)
    monkeypatch.setattr(kernel, "attend", wrong)
    (verdict,) = found(TWO)
    assert verdict.word == "wrong"
    assert list(verdict.wrong) == [0]
    assert "key " in verdict.sentence
