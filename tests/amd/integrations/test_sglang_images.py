"""Tokens of images that see each other, in prompts over a stand-in of SGLang's pools and batches."""

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rocm_attn.errors import BadBatch
from rocm_attn.integrations.sglang import images
from tests.amd.integrations.oracle import Array
from tests.amd.integrations.sglang_stand_in import Engine, Graph, Mode, Request

GEMMA3, GEMMA4 = "Gemma3ForConditionalGeneration", "Gemma4ForConditionalGeneration"

# First and last token of an image, as SGLang counts.
Places = Sequence[tuple[int, int]]
each_pool = pytest.mark.parametrize("with_window_pool", [False, True], ids=["one pool", "two pools"])


def inputs_of(places: Places) -> Any:
    if not places:
        return None
    items = [SimpleNamespace(is_image=lambda: True, offsets=[place]) for place in places]
    audio = SimpleNamespace(is_image=lambda: False, offsets=[(0, 90)])
    return SimpleNamespace(mm_items=[audio, *items])


def cells(kv_len: int, new: int, places: Places) -> Array:
    """Returns [new, kv_len]: 1 where a token sees a key, before its window hides some."""
    tokens, keys = np.arange(kv_len - new, kv_len)[:, None], np.arange(kv_len)[None]
    seen = keys <= tokens
    for first, last in places:
        seen = seen | ((first <= tokens) & (tokens <= last) & (first <= keys) & (keys <= last))
    return seen.astype(np.float64)


def prompt(engine: Engine, requests: Sequence[Request], new: Sequence[int], places: Sequence[Places]) -> None:
    """Runs prompts with images, or parts of them, and compares every layer."""
    batch = engine.batch(Mode.EXTEND, requests, new, mm_inputs=[inputs_of(each) for each in places])
    step = engine.step_of(batch, new)
    engine.hooks.init_forward_metadata(batch)
    engine.forward(step)
    engine.keep(requests, step)
    engine.compare(requests, step, lambda number: cells(requests[number].kv_len, new[number], places[number]))


@pytest.mark.fast
@each_pool
@pytest.mark.parametrize("with_trees", [False, True])
def test_tokens_of_an_image_see_each_other_as_far_as_windows_let(
    with_trees: bool, with_window_pool: bool, provider: str, device: torch.device
) -> None:
    """An image that is longer than the window, two side by side, and requests without images."""
    engine = Engine(
        provider,
        device,
        model_name=GEMMA3,
        windows=(-1, 5),
        with_window_pool=with_window_pool,
        with_trees=with_trees,
    )
    one, two, three = (engine.admit() for _ in range(3))
    prompt(engine, [one, two, three], [17, 9, 4], [[(2, 11), (13, 14)], [(0, 3), (4, 8)], []])
    engine.run(Mode.DECODE, [one, two, three], [1, 1, 1])
    engine.run(Mode.EXTEND, [one], [3])
    engine.hooks.init_cuda_graph_state(3, 3)
    graph = Graph(engine, 3)
    graph.replay([one, three])
    prompt(engine, [two], [9], [[(0, 3), (4, 8), (12, 16)]])
    graph.replay([one, two])
    engine.hooks.attention.check_device()


def test_the_rest_of_an_image_after_a_cached_beginning_sees_all_of_it(provider: str, device: torch.device) -> None:
    """A radix cache keeps whole pages, and an image may end within one."""
    engine = Engine(provider, device, model_name=GEMMA3)
    one = engine.admit()
    prompt(engine, [one], [12], [[(3, 10)]])
    one.kv_len = 8
    prompt(engine, [one], [6], [[(3, 10)]])


def test_an_image_that_is_cut_stays_causal_and_the_log_says_so(
    provider: str, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    images._warn_of_cut_images.cache_clear()
    engine = Engine(provider, device, model_name=GEMMA3)
    one = engine.admit()
    batch = engine.batch(Mode.EXTEND, [one], [8], mm_inputs=[inputs_of([(3, 12)])])
    step = engine.step_of(batch, [8])
    with caplog.at_level(logging.WARNING, "sglang.rocm_attn"):
        engine.hooks.init_forward_metadata(batch)
    assert "an image came in parts" in caplog.text
    engine.forward(step)
    engine.keep([one], step)
    engine.compare([one], step)
    prompt(engine, [one], [7], [[(3, 12)]])


def test_gemma_4_has_spans_in_layers_with_windows_if_its_config_says_so(provider: str, device: torch.device) -> None:
    engine = Engine(provider, device, model_name=GEMMA4, windows=(-1, 5), serve=False)
    for value, masked in (("vision", [False, True]), (None, [False, False])):
        engine.model.config = SimpleNamespace(text_config=SimpleNamespace(use_bidirectional_attention=value))
        assert [images.sees_images(layer, engine.runner) for layer in engine.layers] == masked


def test_a_model_without_such_images_stays_causal(provider: str, device: torch.device) -> None:
    engine = Engine(provider, device)
    one = engine.admit()
    engine.run(Mode.EXTEND, [one], [9], mm_inputs=[inputs_of([(2, 7)])])
    with pytest.raises(AssertionError, match="layer 0"):
        prompt(engine, [engine.admit()], [9], [[(2, 7)]])


def test_images_need_lengths_on_the_host(provider: str, device: torch.device) -> None:
    engine = Engine(provider, device, model_name=GEMMA3)
    batch = engine.batch(Mode.EXTEND, [engine.admit()], [9], mm_inputs=[inputs_of([(2, 7)])])
    batch.extend_prefix_lens_cpu = None
    with pytest.raises(BadBatch, match="a batch with images has no lengths on the host"):
        engine.hooks.init_forward_metadata(batch)
