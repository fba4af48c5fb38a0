"""Memory that is made for a shape holds every smaller one: graphs of all sizes share it, and it must not grow.

A kernel that cuts few tokens into more parts may need more memory for them than for many, on a GPU with enough compute
units. So each kernel is asked here for each GPU, none of which has to be there.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.errors import RocmAttnError
from rocm_attn.kernels.sparse.arguments import Indexing, LastUnit
from rocm_attn.machine.target import known_target
from rocm_attn.paging.state_pool import RecurrentLayers, StatePool
from rocm_attn.problem import EarlierSelection, Indexer, KVEncoding, PoolKind, Problem, Row, Scales
from rocm_attn.providers.contract import PoolSize
from rocm_attn.providers.select import select
from rocm_attn.recurrence import Recurrence

pytestmark = pytest.mark.fast

DENSE = Problem(32, 8, 128, torch.bfloat16, 16, scale=1.0)
LATENT = Problem(16, 1, 576, torch.bfloat16, 16, v_head_dim=512, scale=1.0, pool=PoolKind.LATENT)
TOP = Indexing(0.125, top=2048)
CODED: dict[str, Any] = {"kv_encoding": KVEncoding.E4M3FN, "kv_scales": Scales.LAYER}
POOL = PoolSize(num_pages=100, max_kv_len=4096, max_num_seqs=256)
HEADS = [(32, 8, 128), (12, 4, 64), (32, 32, 96), (16, 1, 128), (40, 4, 128), (24, 2, 256), (96, 1, 64)]
VARIANTS: list[dict[str, Any]] = [
    {},
    {"window_left": 127},
    {"custom_mask": True},
    CODED,
    {**CODED, "kv_scales": Scales.TOKEN},
]


def dense() -> Iterator[Problem]:
    for (q_heads, kv_heads, dim), variant in itertools.product(HEADS, VARIANTS):
        yield replace(DENSE, num_q_heads=q_heads, num_kv_heads=kv_heads, head_dim=dim, v_head_dim=dim, **variant)
    yield replace(DENSE, head_dim=192, v_head_dim=128)
    yield replace(DENSE, indexer=Indexer(4, 128, replace(TOP, top=16, unit_keys=64)))


def latents() -> Iterator[Problem]:
    records: dict[str, Any] = {"kv_encoding": KVEncoding.E4M3FN, "kv_scales": Scales.GROUP}
    coded_keys = Indexer(64, 128, TOP, key_encoding=KVEncoding.E4M3FN, key_scales=Scales.TOKEN)
    for num_heads in (5, 16, 64, 128):
        latent = replace(LATENT, num_q_heads=num_heads)
        yield replace(latent, page_size=1)
        yield from (latent, replace(latent, custom_mask=True), replace(latent, **CODED), replace(latent, **records))
        yield replace(latent, indexer=Indexer(64, 128, TOP))
        yield replace(latent, **records, indexer=coded_keys)
        yield replace(latent, **records, indexer=EarlierSelection(TOP))
    rows = Indexing(0.125, top=512, key_tokens=4, last_unit=LastUnit.LEFT_OUT)
    yield replace(LATENT, row=Row(4, overlaps=True, also=128), indexer=Indexer(64, 128, rows))
    yield replace(LATENT, row=Row(8))


def shapes(kind: StepKind) -> Iterator[PaddedShape]:
    """Yields shapes of a kind of step: around the numbers of tokens at which cuts change."""
    tokens = (1, 2, 3, 5, 8, 16, 17, 33, 52, 64, 91, 128, 192, 256, 320, 512, 1000, 4096)
    for num_seqs in (1, 2, 7, 16, 17, 64, 256):
        numbers = (num_seqs,) if kind.decodes else tokens
        yield from (PaddedShape(kind, num_seqs, number) for number in numbers if number >= num_seqs)


def assert_smaller_shapes_fit(words: Callable[[PaddedShape], int], kind: StepKind) -> None:
    """Checks each shape against the ones before it with as many tokens, and with as many sequences."""
    largest_with: dict[tuple[str, int], PaddedShape] = {}
    needed: dict[PaddedShape, int] = {}
    for shape in shapes(kind):
        needed[shape] = words(shape)
        for line in (("seqs", 0 if kind.decodes else shape.num_seqs), ("tokens", shape.num_tokens)):
            before = largest_with.get(line, shape)
            assert needed[before] <= needed[shape], f"{before} needs more than {shape}"
            largest_with[line] = shape


PLACES = [(arch, "triton") for arch in ("gfx942", "gfx950", "sm_90", "sm_80")]
PLACES += [(arch, provider) for provider in ("aiter", "auto") for arch in ("gfx942", "gfx950")]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("arch", "provider"), PLACES)
def test_memory_for_a_shape_holds_every_smaller_one(arch: str, provider: str, deterministic: bool) -> None:
    asked = set()
    for problem in (*dense(), *latents()):
        try:
            selection = select(problem, known_target(arch), provider, pool=POOL, deterministic=deterministic)
        except (RocmAttnError, LookupError):  # no kernel serves the layer there
            continue
        for kind, kernel in selection.kernels.items():
            asked.add(kernel.entry.name)
            assert_smaller_shapes_fit(kernel.bound.workspace_words, kind)
            assert_smaller_shapes_fit(kernel.bound.schedule.words, kind)
    assert len(asked) > 2 or deterministic


def test_memory_for_states_holds_every_smaller_shape() -> None:
    layer = Recurrence(4, 2, 16, 16, torch.bfloat16)
    pool = StatePool(RecurrentLayers([layer], kept=2), num_rows=2, device=torch.device("cpu"))
    assert_smaller_shapes_fit(pool.workspace_words, StepKind.MIXED)
