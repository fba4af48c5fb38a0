"""StateWatch against a record of every slot's tokens, and the slots that vLLM's metadata names."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rocm_attn.errors import BadTensor
from rocm_attn.integrations.state_watch import ALL_NEW, HEADER_WORDS, StateSlots, StateWatch, cleared_headers
from rocm_attn.integrations.vllm.state_slots import slots_of
from rocm_attn.kernels.metadata.error_word import ERROR_WORD, WRONG_ENGINE_STATE
from rocm_attn.kernels.metadata.step_tensors import StepTensors

PAGE_SIZE, NUM_PAGES = 4, 8
NUM_SLOTS = 9
NUM_REQUESTS = 4
GARBAGE = 7


@dataclass
class Sequence:
    """A sequence of a step.

    request: its number
    new:     its tokens
    read, written, folded: see StateSlots
    misread: whether layers read a state where it begins, which is right if it was cleared, or none where it goes on
    """

    request: int
    new: list[int]
    read: int
    written: list[int]
    folded: list[int]
    misread: bool = False


@dataclass
class World:
    """Requests, and the tokens that are folded into each slot; None: no tokens of one request.

    tokens: of each request
    """

    tokens: list[list[int]] = field(default_factory=lambda: [[] for _ in range(NUM_REQUESTS)])
    held: dict[int, tuple[int, ...] | None] = field(default_factory=dict)
    headers: torch.Tensor = field(
        default_factory=lambda: torch.zeros(NUM_SLOTS, 8, dtype=torch.int32)[:, :HEADER_WORDS]
    )
    watch: StateWatch = field(
        default_factory=lambda: StateWatch(NUM_PAGES * NUM_REQUESTS * PAGE_SIZE * 2, torch.device("cpu"))
    )

    def run(self, seqs: list[Sequence], num_pads: int = 1) -> bool:
        width = max(len(seq.written) for seq in seqs)
        starts = [len(self.tokens[seq.request]) for seq in seqs]
        step = self._step(seqs, starts, num_pads)
        ids = torch.tensor([token for seq in seqs for token in seq.new] + [GARBAGE] * num_pads)
        slots = StateSlots(
            torch.tensor([seq.read for seq in seqs] + [1] * num_pads, dtype=torch.int32),
            torch.tensor(
                [(start > 0) != seq.misread for seq, start in zip(seqs, starts, strict=True)] + [True] * num_pads
            ),
            torch.tensor(
                [seq.written + [0] * (width - len(seq.written)) for seq in seqs] + [[1] * width] * num_pads,
                dtype=torch.int32,
            ),
            torch.tensor([seq.folded + [0] * (width - len(seq.folded)) for seq in seqs] + [[1] * width] * num_pads),
        )
        self.watch.check(self.watch.begin(step, PAGE_SIZE, ids), self.headers, slots)
        for seq in seqs:
            self.tokens[seq.request] += seq.new
        assert int(step.counts[ERROR_WORD]) in (0, WRONG_ENGINE_STATE)
        return bool(step.counts[ERROR_WORD])

    def expected(self, seqs: list[Sequence]) -> bool:
        """True if the step is wrong by the record, which it brings up to date. Call it before run()."""
        users: dict[int, set[int]] = {}
        is_wrong = False
        for place, seq in enumerate(seqs):
            before = tuple(self.tokens[seq.request])
            end = len(seq.new)
            writes = [
                (slot, end if folded == ALL_NEW else folded)
                for slot, folded in zip(seq.written, seq.folded, strict=True)
                if folded == ALL_NEW or 0 < folded <= end
            ]
            reads = bool(before) != seq.misread
            wrong = any(not 0 < slot < NUM_SLOTS for slot, _ in writes) or (bool(before) and not reads)
            if reads:
                users.setdefault(seq.read, set()).add(place)
                wrong |= not 0 < seq.read < NUM_SLOTS or self.held.get(seq.read) != before
            for slot, _ in writes:
                users.setdefault(slot, set()).add(place)
            for slot, folded in writes:
                self.held[slot] = None if wrong else (*before, *seq.new[:folded])
            is_wrong |= wrong
        return is_wrong or any(slot > 0 and len(places) > 1 for slot, places in users.items())

    def clear(self, slot: int) -> None:
        """The engine clears a slot: it has the state of no tokens."""
        self.held[slot] = ()
        self.headers[slot] = cleared_headers(2, torch.device("cpu"))[1]

    def _step(self, seqs: list[Sequence], starts: list[int], num_pads: int) -> StepTensors:
        rows = [seq.request + 1 for seq in seqs] + [0] * num_pads
        q_len = [len(seq.new) for seq in seqs]
        indptr = [0]
        for length in q_len + [0] * num_pads:
            indptr.append(indptr[-1] + length)
        # A request's pages are its own, in an order of their own.
        table = torch.arange(NUM_REQUESTS * NUM_PAGES).view(NUM_REQUESTS, NUM_PAGES).flip(1) + 1
        table = torch.cat([torch.zeros(1, NUM_PAGES, dtype=torch.int64), table]).int()
        seq_of_token = [place for place, length in enumerate(q_len) for _ in range(length)]
        positions = [start + token for start, length in zip(starts, q_len, strict=True) for token in range(length)]
        slots = [
            int(table[rows[seq], at // PAGE_SIZE]) * PAGE_SIZE + at % PAGE_SIZE
            for seq, at in zip(seq_of_token, positions, strict=True)
        ]
        pads = [0] * num_pads

        def ints(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32)

        return StepTensors.of(
            ints([]),
            counts=ints([len(seqs), len(seq_of_token), 1, 0]),
            row_of_seq=ints(rows),
            kv_len=ints([start + length for start, length in zip(starts, q_len, strict=True)] + pads),
            q_len=ints(q_len + pads),
            q_indptr=ints(indptr),
            seq_of_token=ints([*seq_of_token, *(len(rows) - 1 for _ in pads)]),
            position_of_token=ints(positions + pads),
            slot_of_token=ints(slots + pads),
            table=table,
        )


# A step of up to three requests: new tokens of few kinds, so that requests are often alike; which slot is read, and
# which are written, 0: the right one, or a free one; whether they are drafts, how many of them are accepted; whether
# the slot of a request that begins is cleared and then read.
steps = st.lists(
    st.lists(
        st.tuples(
            st.integers(0, NUM_REQUESTS - 1),
            st.lists(st.integers(0, 1), min_size=1, max_size=3),
            st.sampled_from([0, 0, 0, 0, 1, 2, 3, NUM_SLOTS]),
            st.sampled_from([0, 0, 0, 0, 1, 2, NUM_SLOTS]),
            st.booleans(),
            st.integers(1, 3),
            st.booleans(),
        ),
        min_size=1,
        max_size=3,
        unique_by=lambda seq: seq[0],
    ),
    min_size=1,
    max_size=5,
)


@given(steps)
def test_a_step_is_reported_if_and_only_if_a_slot_holds_other_tokens_or_two_sequences_have_it(
    planned: list[list[tuple[int, list[int], int, int, bool, int, bool]]],
) -> None:
    world = World()
    for step in planned:
        free = list(range(NUM_SLOTS - 1, 0, -1))
        seqs = []
        for request, new, read, write, drafts, _, clears in step:
            before = tuple(world.tokens[request])
            right = [slot for slot, held in world.held.items() if held == before and slot in free]
            source = read or (right[0] if right else free[-1])
            if source in free:
                free.remove(source)
            begins_from_cleared = clears and not before
            if begins_from_cleared and not read:
                world.clear(source)
            written = [source if not drafts else free.pop() if len(free) > 3 else free[-1]]
            if drafts and len(free) > 3:
                written += [free.pop() for _ in new[1:]]
            written[0] = write or written[0]
            folded = list(range(1, len(written) + 1)) if drafts else [ALL_NEW]
            seqs.append(Sequence(request, new, source, written, folded, misread=begins_from_cleared))
        wrong = world.expected(seqs)
        assert world.run(seqs) == wrong
        if wrong:
            return
        for request, new, _, _, drafts, accepted, _ in step:
            if drafts and accepted < len(new):
                del world.tokens[request][accepted - len(new) :]


def test_an_error_bit_is_set_for_each_kind_of_wrong_slot() -> None:
    """Never written, another request's, older and rejected tokens, another sequence's, outside of the memory, none."""
    for read, written in ((5, 8), (2, 8), (3, 8), (4, 8), (8, 2), (NUM_SLOTS, 8), (8, NUM_SLOTS), (0, 8), (8, 0)):
        world = World()
        assert not world.run([Sequence(0, [1, 0, 1], 0, [3], [ALL_NEW]), Sequence(1, [0, 0], 0, [2, 3], [ALL_NEW, 3])])
        assert not world.run([Sequence(0, [1, 1, 0], 3, [6, 8, 4], [1, 2, 3])])
        del world.tokens[0][-1]
        others = [Sequence(1, [1], 2, [2], [ALL_NEW])]
        assert world.run([Sequence(0, [1], read, [written], [ALL_NEW]), *others]), (read, written)


def test_a_state_that_layers_read_where_a_sequence_begins_is_wrong_and_so_is_one_that_they_do_not_read() -> None:
    world = World()
    assert world.run([Sequence(0, [1, 0], 3, [3], [ALL_NEW], misread=True)])
    assert not world.run([Sequence(1, [1, 0], 4, [4], [ALL_NEW])])
    assert world.run([Sequence(1, [1, 0], 4, [4], [ALL_NEW], misread=True)])


def test_a_slot_is_cleared_for_one_sequence_and_stays_so_until_it_is_written() -> None:
    world = World()
    world.clear(3)
    assert not world.run([Sequence(0, [1, 0], 3, [3], [ALL_NEW], misread=True)])
    assert world.run([Sequence(1, [1, 0], 3, [3], [ALL_NEW], misread=True)])
    world.clear(4)
    assert world.run([Sequence(0, [1], 4, [4], [ALL_NEW])])


def test_a_header_moves_with_its_state_and_what_follows_a_wrong_state_is_wrong_too() -> None:
    world = World()
    assert not world.run([Sequence(0, [1, 0], 0, [1], [ALL_NEW])])
    world.headers[4] = world.headers[1]
    assert not world.run([Sequence(0, [1], 4, [4], [ALL_NEW])])
    assert world.run([Sequence(0, [1], 1, [1], [ALL_NEW])])
    assert world.run([Sequence(0, [1], 1, [1], [ALL_NEW])])


def test_pads_use_no_slot_and_too_few_token_ids_are_refused() -> None:
    world = World()
    assert not world.run([Sequence(0, [1, 0], 0, [2], [ALL_NEW])], num_pads=3)
    assert not world.headers[1].any()
    step = world._step([Sequence(0, [1], 2, [2], [ALL_NEW])], [2], 2)
    with pytest.raises(BadTensor, match="2 token ids for a step padded to 3"):
        world.watch.begin(step, PAGE_SIZE, torch.tensor([1, 1]))


def ints(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_slots_of_mamba_layers_are_those_of_decodes_and_then_of_prompts() -> None:
    plain = SimpleNamespace(
        state_indices_tensor_d=ints([3], [4]),
        state_indices_tensor_p=ints(7),
        num_accepted_tokens=None,
        num_decodes=2,
        has_initial_states_p=torch.tensor([False]),
    )
    found = slots_of(plain, 4)
    assert found.read.tolist() == [3, 4, 7, 0]
    assert found.is_read.tolist() == [True, True, False, False]
    assert found.written.tolist() == [[3], [4], [7], [0]]
    assert found.folded.tolist() == [[ALL_NEW]] * 4
    drafting = SimpleNamespace(
        state_indices_tensor_d=ints([3, 4], [5, 6]),
        state_indices_tensor_p=ints(7),
        num_accepted_tokens=ints(2, 1),
        num_decodes=2,
        has_initial_states_p=torch.tensor([True]),
        checkpoint_meta=SimpleNamespace(
            request_rows=torch.tensor([2]), state_indices=ints(8), checkpoint_offsets=ints(16)
        ),
    )
    found = slots_of(drafting, 3)
    assert found.read.tolist() == [4, 5, 7]
    assert found.is_read.all()
    assert found.written.tolist() == [[3, 4, 0], [5, 6, 0], [7, 0, 8]]
    assert found.folded.tolist() == [[1, 2, 0], [1, 2, 0], [ALL_NEW, 0, 16]]


def test_slots_of_delta_nets_are_put_back_into_the_order_of_the_batch() -> None:
    plain = SimpleNamespace(
        non_spec_state_indices_tensor=ints(3, 4),
        spec_sequence_masks=None,
        spec_state_indices_tensor=None,
        num_decodes=1,
        has_initial_state=torch.tensor([True, False]),
    )
    assert slots_of(plain, 3).written.tolist() == [[3], [4], [0]]
    assert slots_of(plain, 3).is_read.tolist() == [True, False, False]
    mixed = SimpleNamespace(
        non_spec_state_indices_tensor=ints(3, 4),
        spec_sequence_masks=torch.tensor([False, True, False, True]),
        spec_state_indices_tensor=ints([5, 6], [7, 8]),
        num_accepted_tokens=ints(2, 1),
        has_initial_state=torch.tensor([False, True]),
    )
    found = slots_of(mixed, 5)
    assert found.is_read.tolist()[:4] == [False, True, True, True]
    assert found.read.tolist()[:4] == [3, 6, 4, 7]
    assert found.written.tolist()[:4] == [[3, 0], [5, 6], [4, 0], [7, 8]]
    assert found.folded.tolist()[:4] == [[ALL_NEW, 0], [1, 2], [ALL_NEW, 0], [1, 2]]
    alone = SimpleNamespace(
        non_spec_state_indices_tensor=None,
        spec_sequence_masks=torch.tensor([True, True, False]),
        spec_state_indices_tensor=ints([5, 6], [7, 8], [0, 0]),
        num_accepted_tokens=ints(2, 1, 1),
        has_initial_state=None,
    )
    assert slots_of(alone, 3).read.tolist()[:2] == [6, 7]
