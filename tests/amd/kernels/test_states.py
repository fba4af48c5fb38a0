"""Recurrent states, their places, and convolutions: kernels and twins equal float64, however steps cut the tokens."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rocm_attn.kernels.metadata.error_word import ERROR_WORD, WRONG_STATE
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.kernels.refs import states as twins
from rocm_attn.kernels.refs.state_places import state_places
from rocm_attn.kernels.states.arguments import BEGINS, LEFT_OUT, ConvolutionWeights, StatePlaces, Update
from rocm_attn.kernels.states.convolve import launch_convolve
from rocm_attn.kernels.states.places import launch_state_places
from rocm_attn.kernels.states.recur import launch_recur
from rocm_attn.machine.target import detect_target
from rocm_attn.recurrence import Recurrence
from tests.amd.kernels.attention_cases import ints
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


NUM_ROWS = 6
GARBAGE = 77


@dataclass(frozen=True)
class Slot:
    tag: int
    start: int
    first: int
    end: int


slots = st.builds(Slot, st.integers(0, 3), st.integers(-1, 8), st.integers(0, 8), st.integers(0, 10))
# A sequence: its row, tokens before the step, new ones.
sequences = st.lists(
    st.tuples(st.integers(1, NUM_ROWS - 1), st.integers(0, 9), st.integers(0, 4)),
    min_size=1,
    max_size=4,
    unique_by=lambda seq: seq[0],
)


def wanted(
    tag: int, of_row: list[Slot], row: int, start: int, new: int, kept: int
) -> tuple[int, int, int, list[Slot] | None]:
    """Source, target, pending, and the headers after it, None if they stay: the rule in words, for one sequence."""
    if new == 0:
        return LEFT_OUT, 0, 0, None
    made = Slot(tag, start, start if new <= kept else start + new, start + new)
    if start == 0:
        return (BEGINS, 2 * row, 0, [made, Slot(0, *_words(of_row[1])[1:])]) if tag else (LEFT_OUT, 0, 0, None)
    earlier = [number for number, slot in enumerate(of_row) if tag and slot.tag == tag and slot.start < start]
    last = max((of_row[number].start for number in earlier), default=0)
    # Tokens after the last of these starts are those of the slot that was written then.
    serving = [
        number
        for number in earlier
        if of_row[number].start == last and of_row[number].first <= start <= of_row[number].end
    ]
    if not serving:
        return LEFT_OUT, 0, 0, None
    newest = serving[0]
    after = list(of_row)
    after[1 - newest] = made
    return 2 * row + newest, 2 * row + 1 - newest, start - of_row[newest].first, after


def _words(slot: Slot) -> list[int]:
    return [slot.tag, slot.start, slot.first, slot.end]


@settings(max_examples=40)
@given(
    tags=st.lists(st.integers(0, 3), min_size=NUM_ROWS, max_size=NUM_ROWS),
    headers=st.lists(slots, min_size=2 * NUM_ROWS + 1, max_size=2 * NUM_ROWS + 1),  # and one of a checkpoint
    seqs=sequences,
    kept=st.integers(1, 4),
    num_pads=st.integers(0, 3),
)
def test_each_sequence_reads_the_slot_that_its_tokens_follow_from(
    tags: list[int], headers: list[Slot], seqs: list[tuple[int, int, int]], kept: int, num_pads: int
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_kernels = [state_places]
    if detect_target(device).is_gpu or detect_target(device).is_interpreted:
        on_kernels.append(launch_state_places)

    padded = len(seqs) + num_pads
    garbage = [GARBAGE] * num_pads
    error, places_wanted = 0, list[tuple[int, int, int]]()
    after = list(headers)
    for row, start, new in seqs:
        reads, writes, folds, of_row = wanted(tags[row], headers[2 * row : 2 * row + 2], row, start, new, kept)
        places_wanted.append((reads, writes, folds))
        error |= WRONG_STATE * (reads == LEFT_OUT and new > 0)
        if of_row is not None:
            after[2 * row : 2 * row + 2] = of_row
    places_wanted += [(LEFT_OUT, 0, 0)] * num_pads
    for launch in on_kernels:
        step = StepTensors.of(
            ints([], device),
            counts=ints([len(seqs), 0, 1, 0], device),
            row_of_seq=ints([row for row, _, _ in seqs] + garbage, device),
            kv_len=ints([start + new for _, start, new in seqs] + garbage, device),
            q_len=ints([new for _, _, new in seqs] + garbage, device),
        )
        source, target, pending = (ints([GARBAGE] * padded, device) for _ in range(3))
        places = StatePlaces(source, target, pending, ints([0] * (padded + 1), device), 1, 1)
        made = ints([word for slot in headers for word in _words(slot)], device).view(-1, 4)
        launch(step, ints(tags, device)[:, None], made, places, kept=kept)
        found = list(zip(places.source.tolist(), places.target.tolist(), places.pending.tolist(), strict=True))
        assert found == places_wanted
        assert made.tolist() == [_words(slot) for slot in after]
        assert int(step.counts[ERROR_WORD]) == error
