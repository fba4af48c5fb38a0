"""Data-parallel attention: ranks serve their own requests in lockstep, with collectives over all tokens."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed
from torch import Tensor

from rocm_attn.batch.drafts import Drafts
from rocm_attn.batch.mask import random_mask
from rocm_attn.batch.padding import PaddedShape, PaddingPolicy, PadTo, fits
from rocm_attn.batch.prefixes import PrefixGroup, SharedPrefixes
from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.errors import BadBatch, CapacityExceeded, NeverFits
from rocm_attn.hip_graphs.size_ladder import SizeLadder
from rocm_attn.machine.agreement import found_by_any
from rocm_attn.step.outputs import PerToken
from rocm_attn.step.step import Part
from tests.amd.graphs.small_models import Lazy, Requests, Tiny
from tests.amd.ranks import among_all, on_every_rank
from tests.amd.tolerances import assert_same_but_for_rounding

CPU = torch.device("cpu")
NUM_RANKS = 2
# New tokens of each rank's requests, step by step: a rank is idle during the other one's first decode and extend steps,
# one decodes while the other extends, both do the same, and one sequence is alone.
OF_RANK = (
    [[5, 2, 7], [1, 1, 1], [1, 1, 1], [1, 1, 1], [], [], [1, 1], [3, 2], [1, 4, 1], [1], [1, 1, 1], []],
    [[], [], [], [6, 3], [1, 1], [8, 1], [1, 1], [4, 4], [], [2], [], [1, 1]],
)


def experts() -> list[Tensor]:
    """Returns [96, 96], one per rank."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(96, 96, generator=generator) / 10 for _ in range(NUM_RANKS)]


class Moe:
    """Attention over a rank's own requests, then experts: each rank has one, which computes the tokens of all ranks."""

    def __init__(self, rank: int, tiny: Tiny) -> None:
        self._rank = rank
        self._tiny = tiny
        self._expert = experts()[rank]
        self.runs = 0

    def forward(self, step: Part) -> tuple[Tensor, PerToken]:
        self.runs += 1  # counted on the host: a replayed graph does not run this
        rows = self._tiny.forward(step)
        hidden = rows[step.seq_of_token] * (1 + step.positions[:, None] / 64)
        everyones = hidden.new_empty(NUM_RANKS * len(hidden), 96)
        torch.distributed.all_gather_into_tensor(everyones, hidden)
        mixed = everyones @ self._expert
        torch.distributed.all_reduce(mixed)
        own = mixed[self._rank * len(hidden) : (self._rank + 1) * len(hidden)]
        return own[step.last_token_of_seq], PerToken(own)


def alone(tiny: Tiny) -> Callable[[Part], tuple[Tensor, PerToken]]:
    """Returns the same model on one rank."""

    def forward(step: Part) -> tuple[Tensor, PerToken]:
        rows = tiny.forward(step)
        hidden = rows[step.seq_of_token] * (1 + step.positions[:, None] / 64)
        mixed = sum((hidden @ expert for expert in experts()), torch.zeros(()))
        return mixed[step.last_token_of_seq], PerToken(mixed)

    return forward


def common(batch: StepBatch, tiny: Tiny) -> PadTo:
    """Returns the sizes that all ranks pad to, from three numbers of each rank."""
    padding = tiny.runtime.padding
    needs = [torch.empty(3, dtype=torch.int64) for _ in range(NUM_RANKS)]
    torch.distributed.all_gather(needs, torch.tensor(PadTo.of(batch, padding)))
    return PadTo.all_of((PadTo(*need.tolist()) for need in needs), padding)


HOW = ("eager", "graphs when they are needed", "graphs made ahead")


def served_in_step(rank: int) -> list[str]:
    """Returns for each of HOW: graphs captured while serving, replays, why graphs are off, and the calls of forward.

    Raises an error if a row differs from that on one rank.
    """
    return [what for how in HOW for what in _served_in_step(rank, how)]


def _served_in_step(rank: int, how: str) -> list[str]:
    tiny = Tiny.build(CPU, "torch", [2, 4], [8, 16])
    tiny.runtime.agree = among_all()
    moe = Moe(rank, tiny)
    runner = StepRunner(tiny.runtime, moe.forward, None if how == "eager" else recorder_for(CPU))
    if how == "graphs made ahead":
        runner.capture_all()
    captures = runner.counters.captures
    by_itself = Tiny.build(CPU, "torch", [2, 4], [8, 16])
    single = StepRunner(by_itself.runtime, alone(by_itself), None)
    requests, same_requests = Requests(tiny.runtime), Requests(by_itself.runtime)
    requests.admit(3)
    same_requests.admit(3)
    for q_len in OF_RANK[rank]:
        batch = requests.batch(q_len)
        rows, tokens = runner.run(batch, common(batch, tiny))
        wanted_rows, wanted_tokens = single.run(same_requests.batch(q_len))
        assert_same_but_for_rounding(rows, wanted_rows)
        assert_same_but_for_rounding(tokens.tensor, wanted_tokens.tensor)
    tiny.runtime.check_device()
    counters = runner.counters
    return [str(counters.captures - captures), str(counters.replays), counters.graphs_off, str(moe.runs)]


def test_ranks_that_decode_extend_or_idle_run_in_step(tmp_path: Path) -> None:
    first, second = on_every_rank(served_in_step, tmp_path)
    assert first == second
    steps = str(len(OF_RANK[0]))
    eager, needed, ahead = first[:4], first[4:8], first[8:]
    assert eager == ["0", "0", "", steps]
    assert needed[1:3] == [steps, ""]
    assert int(needed[0]) > 3
    assert ahead[:3] == ["0", steps, ""]


# Values that ranks agree on.


def batch_of(q_len: Sequence[int], kv_len: int = 20) -> StepBatch:
    return StepBatch(list(range(1, len(q_len) + 1)), [kv_len] * len(q_len), list(q_len), NO_TOKEN_IDS)


POLICY = PaddingPolicy(SizeLadder((1, 2, 4, 8)), SizeLadder((8, 16, 32)), max_children=2)


@pytest.mark.parametrize(
    ("q_lens", "whole", "halves"),
    [
        ([[1] * 3, [1]], (4, 0, 20), (4, 0, 20)),
        ([[1] * 3, []], (4, 0, 20), (4, 0, 20)),
        ([[], []], (1, 0, 0), (2, 0, 0)),
        ([[1] * 3, [5]], (4, 8, 20), (4, 16, 20)),
        ([[], [1]], (1, 0, 20), (2, 0, 20)),
        ([[], [9]], (2, 16, 20), (4, 32, 20)),
        ([[1] * 8, [2]], (8, 8, 20), (8, 8, 20)),
        ([[1] * 12, [5, 9]], (12, 16, 20), (12, 32, 20)),
        ([[40], [1]], (2, 40, 20), (4, 80, 20)),
    ],
    ids=str,
)
def test_what_all_ranks_pad_to_holds_every_ranks_step_and_is_of_the_ladders(
    q_lens: list[list[int]], whole: tuple[int, int, int], halves: tuple[int, int, int]
) -> None:
    """Sequences and tokens are rungs of a ladder, as far as it goes. Mixed kinds have two sequences or more."""
    for num_children, wanted, shape_of in (((), whole, POLICY.shape), ((2,), halves, POLICY.split_shape)):
        batches = [batch_of(q_len, kv_len=max(20, *q_len, 0)) for q_len in q_lens]
        needs = [PadTo.of(batch, POLICY, *num_children) for batch in batches]
        found = PadTo.all_of(needs, POLICY, *num_children)
        assert found == (*wanted[:2], max(batch.max_kv_len for batch in batches))
        assert found == PadTo.all_of(reversed(needs), POLICY, *num_children)
        shapes = {shape_of(batch, found) for batch in batches}
        if POLICY.captures(next(iter(shapes))):
            assert len(shapes) == 1
        assert {(shape.num_seqs, shape.num_tokens) for shape in shapes} == {(found.seqs, found.tokens or found.seqs)}


def test_sizes_of_no_rank_are_refused() -> None:
    with pytest.raises(BadBatch, match="no rank has sizes"):
        PadTo.all_of((), POLICY)


def test_a_step_above_the_ladders_keeps_the_kernels_of_its_kind_and_a_decode_step_mixes() -> None:
    assert POLICY.shape(batch_of([20, 20]), PadTo(2, 40)) == PaddedShape(StepKind.EXTEND, 2, 40)
    assert POLICY.shape(batch_of([1, 1]), PadTo(2, 40)) == PaddedShape(StepKind.MIXED, 2, 40)
    assert POLICY.shape(batch_of([20, 5]), PadTo(2, 32)) == PaddedShape(StepKind.MIXED, 2, 32)
    assert POLICY.shape(batch_of([20, 5]), PadTo(2)) == PaddedShape(StepKind.EXTEND, 2, 32)


@pytest.mark.parametrize(
    ("q_len", "kind", "num_seqs", "num_tokens"),
    [
        ([20, 13], StepKind.MIXED, 8, 48),
        ([20, 1, 28], StepKind.MIXED, 8, 64),
        ([20, 12], StepKind.EXTEND, 2, 32),
        ([20, 45], StepKind.EXTEND, 2, 65),
        ([4] * 9, StepKind.EXTEND, 9, 36),
    ],
)
def test_prompts_above_the_token_ladder_are_padded_to_their_own_sizes(
    q_len: list[int], kind: StepKind, num_seqs: int, num_tokens: int
) -> None:
    policy = replace(POLICY, prompts=(48, 64))
    shape = policy.shape(batch_of(q_len, 100))
    assert shape == PaddedShape(kind, num_seqs, num_tokens)
    assert policy.fixed_q_len(shape) == (num_tokens if num_seqs == 8 else 0), "of any sequence"


@pytest.mark.parametrize(
    ("q_len", "pad_to", "says"),
    [
        ([2, 1, 1], PadTo(2), "3 sequences cannot be padded to 2; pad to at least 3"),
        ([], PadTo(0), "0 sequences cannot be padded to 0; pad to at least 1"),
        ([9, 1], PadTo(2, 8), "10 tokens cannot be padded to 8; pad to at least 10"),
        ([1, 1, 1], PadTo(4, 2), "3 tokens cannot be padded to 2; pad to at least 3"),
    ],
)
def test_what_does_not_fit_is_refused(q_len: list[int], pad_to: PadTo, says: str) -> None:
    with pytest.raises(CapacityExceeded, match=says):
        POLICY.shape(batch_of(q_len), pad_to)


def test_halves_of_one_size_are_asked_for() -> None:
    for pad_to in (PadTo(3), PadTo(4, 9)):
        with pytest.raises(CapacityExceeded, match="pad to an even number"):
            POLICY.split_shape(batch_of([1, 1]), pad_to)
    with pytest.raises(CapacityExceeded, match="pad to at least 3"):
        POLICY.split_shape(batch_of([1, 1, 1]), PadTo(2))
    with pytest.raises(CapacityExceeded, match="12 tokens cannot be padded to 16; pad to at least 18"):
        POLICY.split_shape(batch_of([9, 3]), PadTo(2, 16))


def test_no_step_is_staged_at_a_shape_that_it_does_not_fit() -> None:
    tiny = Tiny.build(CPU, "torch", [4], [16], split_steps=True)
    requests = tiny.admitted(3)
    for q_len, shape in (
        ([1, 1, 1], PaddedShape(StepKind.DECODE, 2, 2)),
        ([1, 2], PaddedShape(StepKind.DECODE, 4, 4)),
        ([9, 3], PaddedShape(StepKind.EXTEND, 4, 8)),
        ([9, 3], PaddedShape(StepKind.EXTEND, 4, 16, 2)),
    ):
        batch = requests.batch(q_len)
        with pytest.raises(NeverFits, match=f"{len(q_len)} sequences with {sum(q_len)} new tokens do not fit"):
            tiny.runtime.plan(batch, shape)


def test_a_step_that_shares_prefixes_runs_beside_decode_steps_alone() -> None:
    batch = replace(batch_of([1, 1]), prefixes=SharedPrefixes([PrefixGroup(2, 4)]))
    assert POLICY.shape(batch, PadTo(4)).kind is StepKind.SHARED
    with pytest.raises(BadBatch, match="leave the prefixes out while another rank does not decode"):
        POLICY.shape(batch, PadTo(4, 8))


def test_a_round_of_drafts_has_the_tokens_of_its_sequences() -> None:
    """Padded to those of a rank that does not decode, it would run other launches than that rank."""
    batch = replace(batch_of([3, 3]), drafts=Drafts(1, 3))
    shape = POLICY.shape(batch, PadTo(4))
    assert shape == PaddedShape.of_drafts(Drafts(1, 3), 4, 1)
    assert fits(batch, shape)
    for sizes in ((Drafts(1, 2), 4, 1), (Drafts(3, 1), 4, 1), (Drafts(1, 3), 1, 1)):
        assert not fits(batch, PaddedShape.of_drafts(*sizes))
    with pytest.raises(BadBatch, match=r"its sequences determine it; use PadTo\(4\)"):
        POLICY.shape(batch, PadTo(4, 8))


def test_ranks_share_the_bucket_of_the_longest_sequence_of_any() -> None:
    """Torch kernels freeze it."""
    tiny = Tiny.build(CPU, "torch")
    requests = tiny.admitted(1)
    runner = tiny.runner(graphs=False)
    batch = requests.batch([5])
    plans = [
        tiny.runtime.step(batch, tiny.runtime.plan(batch, pad_to)).plan
        for pad_to in _ended(tiny, (None, PadTo(1, 8, 100)))
    ]
    assert [plan.key.max_kv_len for plan in plans] == [64, 128]
    with pytest.raises(CapacityExceeded, match="pad_to allows 4"):
        runner.run(batch, PadTo(1, 8, 4))


def test_plans_do_not_grow_in_number_with_the_lengths_of_other_ranks() -> None:
    tiny = Tiny.build(CPU, "torch", [2])
    requests = tiny.admitted(1)
    batch = requests.batch([1])
    plans = [
        tiny.runtime.step(batch, tiny.runtime.plan(batch, pad_to)).plan
        for pad_to in _ended(tiny, [PadTo(2, 0, n) for n in (9, 64)])
    ]
    assert plans[0] is plans[1]
    assert len(tiny.runtime.gate.planner._plan_of_sizes) == 1


def _ended(tiny: Tiny, pad_tos: Sequence[PadTo | None]) -> Iterator[PadTo | None]:
    """Yields each, and ends the step that was begun with it."""
    for pad_to in pad_tos:
        yield pad_to
        tiny.runtime.end_step()


# Number of forward calls per graph, which must be equal on all ranks.


class Ranks:
    """This rank's agreement with others that find what is given, and the number of forward calls at each agreement."""

    def __init__(self, moe: list[int], others: Mapping[str, str]) -> None:
        self._runs = moe
        self._others = others
        self.at: list[int] = []
        self.sent: list[dict[str, str]] = []

    def __call__(self, findings: Mapping[str, str]) -> Mapping[str, str]:
        self.at.append(self._runs[0])
        self.sent.append(dict(findings))
        return found_by_any([findings, self._others])


def decoding(num_live: int, *, free: bool, others: Mapping[str, str], wrong: bool = False) -> tuple[Ranks, StepRunner]:
    """Runs a decode step of num_live sequences, padded to two.

    free: whether other rows are free; wrong: whether its graph is wrong
    """
    tiny, runs = Tiny.build(CPU, "torch", [2], max_num_seqs=2), [0]

    def forward(step: Part) -> Tensor:
        runs[0] += 1
        return tiny.forward(step)

    inner = recorder_for(CPU)
    runner = StepRunner(tiny.runtime, forward, Lazy(inner) if wrong else inner)
    requests = tiny.admitted(num_live if free else 2)
    ranks = tiny.runtime.agree = Ranks(runs, others)
    if num_live:
        requests.run(runner, [3] * num_live)
    runner.run(requests.batch([1] * num_live), PadTo(2))
    return ranks, runner


@pytest.mark.parametrize(
    ("num_live", "free", "wrong"),
    [(1, True, False), (0, True, False), (2, False, False), (1, False, False), (0, False, False), (1, True, True)],
    ids=["free rows", "idle", "two of its own", "one of its own", "idle and no free row", "a wrong graph"],
)
def test_forward_runs_equally_often_for_a_graph_whatever_a_rank_has(num_live: int, free: bool, wrong: bool) -> None:
    ranks, runner = decoding(num_live, free=free, others={}, wrong=wrong)
    requested, recorded, judged = ranks.at
    # The recorder makes two runs, and each of three replays has one eager run.
    assert (recorded - requested, judged - recorded) == (2, 3)
    assert ranks.sent[0] == {}
    assert runner.counters.replays == (not wrong)


def test_no_rank_makes_a_graph_that_another_one_has_no_room_to_check() -> None:
    ranks, runner = decoding(1, free=True, others={"not tried": "too few free pages to check it"})
    assert len(ranks.at) == 1
    assert (runner.counters.replays, runner.counters.captures, runner.counters.graphs_off) == (0, 0, "")


def test_a_rank_without_room_says_so_before_any_rank_records() -> None:
    """Its rows are all taken, and the mask of its step is packed for that step only, so no other step can use it."""
    tiny, runs = Tiny.build(CPU, "torch", [2], [4], max_num_seqs=2, custom_mask=True), [0]
    requests = tiny.admitted(2)
    runner = tiny.runner()
    requests.run(runner, [3, 3])
    ranks = tiny.runtime.agree = Ranks(runs, {})
    for _ in range(3):
        batch = requests.batch([2, 2])
        mask = random_mask(batch.kv_len, batch.q_len, torch.Generator())
        runner.run(replace(batch, mask=mask), PadTo(2))
    assert ranks.sent == [{"not tried": "too few free pages to check it"}]  # sent once, not at each step
    assert next(iter(runner.capture_all().skipped.values())) == "on rank 0: no request row is free"
