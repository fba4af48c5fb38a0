"""Places of states: each sequence reads the slot that its tokens follow from, and one that has none is refused."""

from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rocm_attn.kernels.metadata.error_word import ERROR_WORD, WRONG_STATE
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.kernels.refs.state_places import state_places
from rocm_attn.kernels.states.arguments import BEGINS, LEFT_OUT, StatePlaces
from rocm_attn.kernels.states.places import launch_state_places
from rocm_attn.machine.target import detect_target

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

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

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
            ints([]),
            counts=ints([len(seqs), 0, 1, 0]),
            row_of_seq=ints([row for row, _, _ in seqs] + garbage),
            kv_len=ints([start + new for _, start, new in seqs] + garbage),
            q_len=ints([new for _, _, new in seqs] + garbage),
        )
        source, target, pending = (ints([GARBAGE] * padded) for _ in range(3))
        places = StatePlaces(source, target, pending, ints([0] * (padded + 1)), 1, 1)
        made = ints([word for slot in headers for word in _words(slot)]).view(-1, 4)
        launch(step, ints(tags)[:, None], made, places, kept=kept)
        found = list(zip(places.source.tolist(), places.target.tolist(), places.pending.tolist(), strict=True))
        assert found == places_wanted
        assert made.tolist() == [_words(slot) for slot in after]
        assert int(step.counts[ERROR_WORD]) == error
