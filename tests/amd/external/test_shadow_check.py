"""The shadow check: it reports nothing for a right step, and names the sequences of a wrong one."""

from typing import Any

import pytest
import torch

from rocm_attn.errors import BadSetting, BadTensor, WrongState
from rocm_attn.paging.index_spaces import Space
from rocm_attn.watch.shadow_check import shadow_check
from tests.amd.external.engines import ENGINES, VLLM, Engine, MakeEngine, SGLang

WINDOWS = (-1, 5)


def step_of(engine: Engine) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns q and out, per layer, of a step of three sequences, the first of which has three new tokens."""
    requests = engine.begun(20, 9, 5)
    given, outs = engine.run_unseen(requests, [3, 1, 1], pads=2)
    return given.q, outs


def test_a_page_that_left_the_window_is_not_looked_at(device: torch.device, provider: str) -> None:
    engine = SGLang(16, WINDOWS, spaces=(Space.FULL, Space.SWA), device=device, provider=provider)
    (request,) = engine.begun(40)
    engine.evict(request, 32)
    given, outs = engine.run_unseen([request], [1])
    assert [shadow_check(engine.attention, layer, given.q[layer], outs[layer]) for layer in range(2)] == [[], []]


@pytest.mark.parametrize("make", ENGINES.values(), ids=ENGINES)
def test_a_wrong_row_is_found(make: MakeEngine, device: torch.device, provider: str) -> None:
    engine = make(16, WINDOWS, device=device, provider=provider)
    q, outs = step_of(engine)
    outs[1][3] += 0.01
    assert shadow_check(engine.attention, 0, q[0], outs[0]) == []
    assert shadow_check(engine.attention, 1, q[1], outs[1]) == [1]
    assert shadow_check(engine.attention, 1, q[1], outs[1], most_seqs=0) == []


def test_kv_that_was_overwritten_is_found(device: torch.device, provider: str) -> None:
    engine = VLLM(16, WINDOWS, device=device, provider=provider)
    q, outs = step_of(engine)
    page = engine.requests[2].pages[Space.FULL][0]
    engine.pages[0][1][page, 3] += 1
    assert shadow_check(engine.attention, 0, q[0], outs[0]) == [1]


def test_a_check_needs_a_step_and_a_layer(device: torch.device, provider: str) -> None:
    engine = VLLM(16, device=device, provider=provider)
    nothing = torch.zeros(1, 4, 16, device=device)
    with pytest.raises(WrongState, match="need a running step"):
        shadow_check(engine.attention, 0, nothing, nothing)
    engine.run([engine.admit()], [3])
    with pytest.raises(BadTensor, match="layer 1 does not exist; the runtime has layers 0 to 0"):
        shadow_check(engine.attention, 1, nothing, nothing)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"most_seqs": -1}, "most_seqs is -1; it must be at least 0"),
        ({"most_tokens": 1.5}, "most_tokens is 1.5; it must be a whole number"),
        ({"seed": -1}, "seed is -1; it must be at least 0"),
        ({"attention": None}, "attention is a NoneType; it must be of type ExternalAttention"),
        ({"q": None}, "q is a NoneType; give a tensor"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    given: dict[str, Any], words: str, device: torch.device, provider: str
) -> None:
    engine = VLLM(16, device=device, provider=provider)
    (q, *_), (out, *_) = step_of(engine)
    with pytest.raises((BadSetting, BadTensor), match=words):
        shadow_check(**{"attention": engine.attention, "layer": 0, "q": q, "out": out, **given})


def test_rows_of_another_step_are_refused(device: torch.device, provider: str) -> None:
    """A token too many counted as right, and one too few was compared with another sequence's."""
    engine = VLLM(16, device=device, provider=provider)
    (q, *_), (out, *_) = step_of(engine)
    for wrong in (out[:-1], torch.cat((out, out[:1])), out.double()):
        with pytest.raises(BadTensor, match="out "):
            shadow_check(engine.attention, 0, q, wrong)
    assert shadow_check(engine.attention, 0, q, out) == []
