"""Recurrent states and convolutions: kernels and twins equal float64, however tokens are cut into steps."""

from dataclasses import replace

import pytest
import torch

from rocm_attn.kernels.refs import states as twins
from rocm_attn.kernels.states.arguments import ConvolutionWeights, Update
from rocm_attn.kernels.states.convolve import launch_convolve
from rocm_attn.kernels.states.recur import launch_recur
from rocm_attn.recurrence import Recurrence
from tests.amd.kernels.state_cases import ConvolutionRun, Launch, New, StateRun, assert_states, steps_of
from tests.amd.tolerances import BOUNDS, assert_attention_close
from tests.amd.worlds.recurrent import Drawn, convolved, recurrent

DELTA = Recurrence(2, 1, 16, 24, torch.float32, scale=0.5)
CHANNELS = Recurrence(2, 2, 20, 16, torch.float32, channel_decay=True, scale=0.5, normalises=True)
PLAIN = Recurrence(2, 1, 8, 70, torch.float32, update=Update.SUM, scale=0.5)
LAYERS = [pytest.param(layer, id=name) for name, layer in (("delta", DELTA), ("channels", CHANNELS), ("plain", PLAIN))]
MOST_KEPT = 3

both = pytest.mark.parametrize("recur", [launch_recur, twins.recur], ids=["kernel", "twin"])

# Prompts that begin, drafts of which some are rejected, a sequence without new tokens, pads and refused sequences.
STORY = (
    (New(0, 5), New(1, 2), New(None, 3), New(2, 17)),
    (New(0, 3, 2), New(1, 1), New(None, 0), New(2, 3, 1)),
    (New(0, 1), New(1, 3, 0), New(2, 0), New(3, 1)),
    (New(1, 1), New(0, 2, 1), New(None, 9), New(2, 66), New(3, 4)),
    (New(2, 1), New(3, 2), New(0, 1)),
)


def drawn(layer: Recurrence, num_seqs: int, num_tokens: int) -> list[Drawn]:
    generator = torch.Generator().manual_seed(0)
    return [Drawn.of(layer, num_tokens, generator) for _ in range(num_seqs)]


@pytest.mark.fast(4, interpreted=4)
@both
@pytest.mark.parametrize("layer", LAYERS)
def test_outputs_and_states_equal_the_recurrence(recur: Launch, layer: Recurrence, kernel_device: torch.device) -> None:
    run = StateRun.of(recur, layer, drawn(layer, 4, 150), MOST_KEPT, kernel_device)
    assert_states(run, steps_of(run, *STORY))


@both
def test_slots_may_keep_no_tokens(recur: Launch, kernel_device: torch.device) -> None:
    run = StateRun.of(recur, DELTA, drawn(DELTA, 2, 30), 0, kernel_device)
    assert_states(run, steps_of(run, (New(0, 2), New(1, 1)), (New(1, 1), New(0, 0)), (New(0, 17), New(1, 1))))


@both
def test_rejected_tokens_leave_no_trace(recur: Launch, kernel_device: torch.device) -> None:
    """After none, some or all of the drafts the next ones give the bits that plain decoding gives them."""
    tokens = drawn(CHANNELS, 1, 8)
    run = StateRun.of(recur, CHANNELS, tokens, MOST_KEPT, kernel_device)
    plain = steps_of(run, *((New(0, 1),) for _ in range(8)))[0]
    for accepted in (0, 1, MOST_KEPT):
        run = StateRun.of(recur, CHANNELS, tokens, MOST_KEPT, kernel_device)
        outs = steps_of(run, (New(0, 2),), (New(0, MOST_KEPT, accepted),), (New(0, 2),), (New(0, 1),))[0]
        assert torch.equal(outs, plain[: len(outs)])


@both
def test_bits_of_deterministic_mode_depend_on_the_sequence_alone(recur: Launch, kernel_device: torch.device) -> None:
    """They depend neither on how it is cut into steps, nor on other sequences, nor on the step's bound on tokens."""
    tokens = drawn(CHANNELS, 2, 20)
    runs = [
        StateRun.of(recur, CHANNELS, mine, MOST_KEPT, kernel_device, deterministic=True)
        for mine in (tokens[:1], tokens)
    ]
    whole = steps_of(runs[0], (New(0, 20),))[0]
    cut = steps_of(runs[1], (New(1, 9), New(0, 4)), (New(0, 1), New(None, 2)), (New(0, 0), New(1, 2)), (New(0, 15),))[0]
    assert torch.equal(whole, cut)
    assert torch.equal(runs[0].state_of(0), runs[1].state_of(0))


@pytest.mark.parametrize("layer", LAYERS)
def test_prompts_cut_anywhere_give_the_state_of_whole_ones(layer: Recurrence, kernel_device: torch.device) -> None:
    tokens = drawn(layer, 1, 152)
    run = StateRun.of(launch_recur, layer, tokens, MOST_KEPT, kernel_device)
    assert_states(run, steps_of(run, (New(0, 20),), (New(0, 2),), (New(0, 130),)))


@pytest.mark.parametrize("layer", [DELTA, replace(CHANNELS, normalises=False)], ids=["delta", "channels"])
def test_a_key_that_repeats_costs_no_digits(layer: Recurrence, kernel_device: torch.device) -> None:
    """The keys are all the same and nothing decays: powers of the matrix that a chunk inverts have entries of 10^17."""
    (tokens,) = drawn(layer, 1, 64)
    tokens = replace(
        tokens,
        k=tokens.k[:1].expand_as(tokens.k),
        decay=-torch.zeros_like(tokens.decay),
        beta=torch.ones_like(tokens.beta),
    )
    run = StateRun.of(launch_recur, layer, [tokens], MOST_KEPT, kernel_device)
    assert_states(run, steps_of(run, (New(0, 64),)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("layer", [DELTA, CHANNELS], ids=["delta", "channels"])
def test_decays_of_any_size_give_numbers(layer: Recurrence, dtype: torch.dtype, kernel_device: torch.device) -> None:
    """The inverse of exp(-200) is no float32, -100,000 is no float16, and the sum of a chunk's decays is less yet."""
    layer = replace(layer, dtype=dtype)
    (tokens,) = drawn(layer, 1, 64)
    strength = torch.rand(tokens.decay.shape, generator=torch.Generator().manual_seed(1))
    decay = torch.where(strength < 0.2, -200.0, torch.where(strength < 0.25, -1e5, -0.01))
    run = StateRun.of(launch_recur, layer, [replace(tokens, decay=decay)], MOST_KEPT, kernel_device)
    assert_states(run, steps_of(run, (New(0, 64),)))


@both
def test_half_precision_stays_within_its_bounds(recur: Launch, kernel_device: torch.device) -> None:
    layer = replace(CHANNELS, dtype=torch.float16)
    run = StateRun.of(recur, layer, drawn(layer, 2, 70), MOST_KEPT, kernel_device)
    assert_states(run, steps_of(run, (New(0, 66), New(1, 2)), (New(0, 2), New(1, 2))))


@both
def test_states_in_bfloat16_are_rounded_once_a_step(recur: Launch, kernel_device: torch.device) -> None:
    """The step's own outputs are those of the rounded state, and have no other error."""
    tokens = drawn(DELTA, 1, 30)
    run = StateRun.of(recur, replace(DELTA, state_dtype=torch.bfloat16), tokens, 0, kernel_device)
    run.step(New(0, 3))
    rounded = run.state_of(0)
    assert rounded.dtype == torch.bfloat16
    (rows,) = run.step(New(0, 2))
    want, states = recurrent(DELTA, tokens[0].cut(3, 5), rounded)
    assert_attention_close(rows, want, torch.float32)
    assert_attention_close(run.state_of(0), states[-1], torch.bfloat16)


CONVOLUTION_STORY = (
    (New(0, 5), New(1, 2), New(None, 3), New(2, 20)),
    (New(0, 3, 2), New(1, 1), New(2, 15), New(None, 0)),
    (New(0, 1), New(1, 3, 0), New(2, 0), New(3, 1)),
    (New(1, 1), New(0, 3, 3), New(None, 17), New(3, 17)),
    (New(1, 1), New(0, 1), New(2, 1)),
)


@pytest.mark.parametrize("convolve", [launch_convolve, twins.convolve], ids=["kernel", "twin"])
@pytest.mark.parametrize(("width", "has_bias", "silu"), [(4, True, True), (2, False, False)])
def test_convolutions_equal_those_of_whole_sequences(
    convolve: Launch, width: int, has_bias: bool, silu: bool, kernel_device: torch.device
) -> None:
    generator, channels = torch.Generator().manual_seed(0), 130
    rows = [torch.randn(50, channels, generator=generator) for _ in range(4)]
    weight = torch.randn(channels, width, generator=generator) / 2
    bias = torch.randn(channels, generator=generator) if has_bias else None
    on_device = None if bias is None else bias.to(kernel_device)
    convolution = ConvolutionWeights(weight.to(kernel_device), on_device, silu)
    run = ConvolutionRun(4, MOST_KEPT, kernel_device, convolve, convolution, rows)
    bound = BOUNDS[torch.float32]
    for x, found in zip(rows, steps_of(run, *CONVOLUTION_STORY), strict=True):
        want = convolved(x[: len(found)], weight, bias, silu=silu)
        torch.testing.assert_close(found.double(), want, atol=bound.atol, rtol=bound.rtol)
