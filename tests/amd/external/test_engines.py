"""Engines that own everything: eager steps and their own graphs equal the reference, with any engine's conventions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rocm_attn.paging.index_spaces import Space
from tests.amd.external.engines import ENGINES, NAN, Engine, SGLang

GROUPS = Space("group0"), Space("group1"), Space("group2")
# Name of the engine, windows of its layers, their spaces.
LAYOUTS: dict[str, tuple[str, tuple[int, ...], tuple[Space, ...] | None]] = {
    "vllm three groups": ("vllm", (5, -1, 9), GROUPS),
    "sglang": ("sglang", (-1, 5), None),
    "sglang two pools": ("sglang", (-1, 5, 9), (Space.FULL, Space.SWA, Space.SWA)),
    "vllm": ("vllm", (-1, 5), None),
    "flashinfer": ("flashinfer", (-1, 5), None),
}
each_page_size = pytest.mark.parametrize("page_size", [16, 1, pytest.param(32, marks=pytest.mark.nightly)])
each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)

Layout = tuple[str, tuple[int, ...], tuple[Space, ...] | None]
Build = Callable[[Layout, int], Engine]


@pytest.fixture
def build(device: torch.device, provider: str) -> Build:
    def of(layout: Layout, page_size: int) -> Engine:
        name, windows, spaces = layout
        engine = ENGINES[name](page_size, windows, spaces=spaces, device=device, provider=provider)
        if isinstance(engine, SGLang):
            for k, v in engine.pages:
                k[0, 0] = v[0, 0] = NAN  # its own writers put pads there
        return engine

    return of


def evict(engine: Engine) -> None:
    """Frees the pages that no layer with a window needs for the next token."""
    furthest = max(engine.windows)
    for request in engine.requests.values():
        engine.evict(request, max(0, request.kv_len - furthest))


@pytest.mark.fast(4)
@each_layout
@each_page_size
def test_eager_steps_of_an_engine_are_right(build: Build, layout: Layout, page_size: int) -> None:
    """Covers prompts, chunks next to decodes, and decodes, padded by the engine and not."""
    engine = build(layout, page_size)
    first, second, third = (engine.admit() for _ in range(3))
    engine.run([first, second], [17, 3])
    engine.run([second, third, first], [1, 9, 2], pads=3)
    for step in range(5):
        evict(engine)
        engine.run([third, first, second], [1, 1, 1], pads=step % 3)
    engine.run([second, first], [33, 2], pads=1)
    engine.attention.check_device()


@pytest.mark.fast(4)
@each_layout
@pytest.mark.parametrize(
    ("page_size", "width"),
    [
        (16, 1),
        (1, 3),
        *(pytest.param(*both, marks=pytest.mark.nightly) for both in ((1, 1), (16, 3), (32, 1), (32, 3))),
    ],
)
def test_an_engines_own_graphs_serve_any_length_and_number(
    build: Build, layout: Layout, page_size: int, width: int
) -> None:
    """Graphs of 8 and of 4 sequences take turns, with eager steps in between; pads of q, k and v are NaN."""
    engine = build(layout, page_size)
    engine.attention.seal()
    big, small = engine.capture(8, width), engine.capture(4, width)
    requests = [engine.admit() for _ in range(6)]
    engine.run(requests[:3], [5, 20, 2])
    a, b, c, d, e, f = requests
    for replay, of_step in ((small, [a, b, c]), (small, [c]), (big, [b, c, a, d, e, f]), (small, [f, a]), (big, [e])):
        replay.run(of_step)
        evict(engine)
        engine.run([a, b], [1, 2], pads=1)
    engine.attention.check_device()
