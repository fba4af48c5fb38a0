"""Chunks of recurrent layers for Hopper against the float64 recurrence, with NaN in all that may not be read.

It needs that GPU.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from rocm_attn.kernels.launch import note_launches
from rocm_attn.kernels.states.arguments import Update
from rocm_attn.kernels.states.recur import launch_recur
from rocm_attn.recurrence import Recurrence
from tests.amd.kernels.gpus import OF_HOPPERS_KERNELS
from tests.amd.kernels.state_cases import New, StateRun, assert_states, steps_of
from tests.amd.worlds.recurrent import Drawn

pytestmark = OF_HOPPERS_KERNELS

CHANNELS = Recurrence(2, 2, 128, 128, torch.bfloat16, channel_decay=True, scale=0.3, normalises=True)
DELTA = Recurrence(4, 2, 128, 128, torch.bfloat16, scale=0.3, normalises=True)
SUMS = Recurrence(4, 1, 128, 64, torch.bfloat16, Update.SUM, scale=0.3)
LAYERS = {
    "channels": CHANNELS,
    "not_normalised": replace(CHANNELS, normalises=False),
    "channels_of_fewer_heads": replace(CHANNELS, num_heads=4),
    "bfloat16_states": replace(CHANNELS, state_dtype=torch.bfloat16),
    "delta": DELTA,
    "wider_values": replace(DELTA, v_dim=192),
    "float16": replace(DELTA, dtype=torch.float16),
    "sums": SUMS,
    "sums_of_more_heads": replace(SUMS, num_heads=32, num_k_heads=2),
    "sums_of_one_head": replace(SUMS, num_heads=3, num_k_heads=3, v_dim=128),
    "normalised_sums": replace(SUMS, normalises=True),
}
MOST_KEPT = 3
# Prompts of several chunks, of one, and cut at a chunk's end; one goes on from kept tokens; pads and refused sequences.
STORY = (
    (New(0, 150), New(1, 2), New(None, 70), New(2, 64)),
    (New(0, 3, 2), New(1, 129), New(None, 0), New(2, 2, 1)),
    (New(2, 65), New(0, 63), New(3, 40), New(1, 1)),
    (New(0, 16), New(None, 3), New(3, 200), New(2, 0)),
)
BOTH = {"_hopper_chunk_rows_kernel", "_hopper_chunk_walk_kernel"}
WALK = {"_hopper_chunk_walk_kernel"}


def drawn(layer: Recurrence, num_seqs: int) -> list[Drawn]:
    generator = torch.Generator().manual_seed(0)
    return [Drawn.of(layer, 260, generator) for _ in range(num_seqs)]


def launched(run: Callable[[], object]) -> set[str]:
    """Names of Hopper's kernels that a run launches."""
    with note_launches() as notes:
        run()
    assert notes.is_whole
    return {launch.kernel.__name__ for launch in notes.launches if "hopper" in launch.kernel.__name__}


def run_of(layer: Recurrence, tokens: list[Drawn], device: torch.device, gap: int = 16) -> StateRun:
    return StateRun(len(tokens), MOST_KEPT, device, launch_recur, layer, tokens, gap=gap)


@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_states_equal_the_recurrence(name: str, kernel_device: torch.device) -> None:
    layer = LAYERS[name]
    run = run_of(layer, drawn(layer, 4), kernel_device)
    outs = list[torch.Tensor]()
    names = launched(lambda: outs.extend(steps_of(run, *STORY)))
    has_rows = layer.normalises == (layer.update is Update.DELTA) and layer.dtype == torch.bfloat16
    assert names == (BOTH if has_rows else WALK)
    assert_states(run, outs)


@pytest.mark.parametrize(("gap", "names"), [(3, set[str]()), (8, set[str]()), (16, BOTH)])
def test_rows_that_copies_may_not_begin_at_are_left_to_other_kernels(
    gap: int, names: set[str], kernel_device: torch.device
) -> None:
    run = run_of(CHANNELS, drawn(CHANNELS, 1), kernel_device, gap)
    outs = list[torch.Tensor]()
    assert launched(lambda: outs.extend(steps_of(run, (New(0, 100),)))) == names
    assert_states(run, outs)


each = pytest.mark.parametrize("layer", [CHANNELS, DELTA, SUMS], ids=["channels", "delta", "sums"])


@each
@pytest.mark.parametrize("share", [0.0, 0.02, 0.3])
def test_chunks_with_too_strong_decays_are_left_to_the_plain_kernel(
    layer: Recurrence, share: float, kernel_device: torch.device
) -> None:
    """Some chunks and heads, or all: quarters of chunks with decays of any size follow quarters with weak ones."""
    (tokens,) = drawn(layer, 1)
    generator = torch.Generator().manual_seed(1)
    strength = torch.rand(tokens.decay.shape, generator=generator)
    strength[64:128] += 1
    decay = torch.where(strength < share, -200.0, torch.where(strength < 1.5 * share, -1e5, -0.01))
    run = run_of(layer, [replace(tokens, decay=decay)], kernel_device)
    assert_states(run, steps_of(run, (New(0, 260),)))


@each
def test_decays_just_below_the_limit_lose_no_digits(layer: Recurrence, kernel_device: torch.device) -> None:
    """A quarter of a chunk decays by 2^-115.4, as sixteen tokens that decay by exp(-5) do, the next one hardly."""
    (tokens,) = drawn(layer, 1)
    decay = torch.full_like(tokens.decay, -1e-3)
    for first in range(0, 256, 64):
        quarter = first + 16 * (first // 64)
        decay[quarter : quarter + 16] = -5.0
    run = run_of(layer, [replace(tokens, decay=decay)], kernel_device)
    assert_states(run, steps_of(run, (New(0, 260),)))


@pytest.mark.parametrize("layer", [CHANNELS, DELTA], ids=["channels", "delta"])
def test_strengths_beyond_two_are_left_to_the_plain_kernel(layer: Recurrence, kernel_device: torch.device) -> None:
    """Up to there no entry of the inverse is above 2, which float16 has; beyond, states grow without a bound."""
    (tokens,) = drawn(layer, 1)
    beta = tokens.beta.clone()
    beta[::37] = 2.5
    beta[5::41] = -0.5
    run = run_of(layer, [replace(tokens, beta=beta)], kernel_device)
    assert_states(run, steps_of(run, (New(0, 260),)))
