"""Ranks that share the context of GQA layers: their merged result equals the reference of whole sequences."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.errors import Unsupported
from rocm_attn.external import ExternalOptions
from rocm_attn.integrations.vllm.group import GroupLayer, GroupOptions, GroupSizes, KVGroup
from rocm_attn.integrations.vllm.layer_terms import CacheTerms, LayerTerms
from rocm_attn.integrations.vllm.shared_context import ContextRanks, ContextSharing, SharedContextGroup
from rocm_attn.integrations.vllm.steps import CommonMetadata
from tests.amd.integrations.oracle import Array, Scores, attention

HEADS, DIM, BLOCK, SCALE = 4, 16, 16, 0.3
SEQS, MAX_LEN, NUM_BLOCKS, MAX_TOKENS = 4, 128, 40, 64
TOLERANCE = 3e-5


@dataclass
class Meeting:
    """Ranks as threads: each brings a tensor, and all get all of them.

    Between two meetings one thread runs at a time, because Triton's interpreter supports only one.
    """

    ranks: int
    turn: threading.Lock = field(init=False, default_factory=threading.Lock)
    barrier: threading.Barrier = field(init=False)
    brought: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.ranks)
        self.brought = [torch.empty(0)] * self.ranks

    def all_of(self, rank: int, tensor: Tensor) -> list[Tensor]:
        self.brought[rank] = tensor
        self._wait_for_all()
        found = list(self.brought)
        self._wait_for_all()
        return found

    def _wait_for_all(self) -> None:
        self.turn.release()
        try:
            self.barrier.wait()
        finally:
            self.turn.acquire()

    def together(self, run: Callable[[int], None]) -> None:
        """Runs all ranks. The first error is raised, and ends the others."""
        raised: list[BaseException] = []

        def caught(rank: int) -> None:
            with self.turn:
                try:
                    run(rank)
                except BaseException as error:  # raised below
                    raised.append(error)
                    self.barrier.abort()

        threads = [threading.Thread(target=caught, args=(rank,), daemon=True) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if raised:
            raise raised[0]


@dataclass
class ThreadRanks:
    """A rank's view of a meeting, like vLLM's GroupCoordinator."""

    meeting: Meeting
    rank_in_group: int

    @property
    def world_size(self) -> int:
        return self.meeting.ranks

    def all_gather(self, input_: Tensor, dim: int) -> Tensor:
        return torch.cat(self.meeting.all_of(self.rank_in_group, input_), dim)

    def reduce_scatter(self, input_: Tensor, dim: int) -> Tensor:
        total = torch.stack(self.meeting.all_of(self.rank_in_group, input_)).sum(0)
        return total.chunk(self.world_size, dim)[self.rank_in_group].contiguous()


class Cache:
    def __init__(self, kv_heads: int, device: torch.device) -> None:
        self.kv_cache = torch.full((NUM_BLOCKS, BLOCK, kv_heads, 2 * DIM), float("nan"), device=device).transpose(1, 2)
        self.kv_cache[0] = 0
        self._k_scale = self._v_scale = torch.ones((), device=device)


class Rank:
    """One rank: its layer, its blocks of each sequence, and its metadata of a step."""

    def __init__(
        self, ranks: ContextRanks, stretch: int, device: torch.device, provider: str, sinks: Tensor | None
    ) -> None:
        self.device, self.sharing = device, ContextSharing(ranks, stretch)
        heads = HEADS // ranks.world_size
        mine = None if sinks is None else sinks[ranks.rank_in_group * heads :][:heads]
        self.layer = Cache(1, device)
        terms = LayerTerms(heads, DIM, SCALE, 1, sinks=mine)
        problem = terms.problem(CacheTerms(BLOCK, DIM, torch.float32, torch.float8_e4m3fn))
        options = GroupOptions(ExternalOptions(provider=provider, page_strides=True))
        layer = GroupLayer(self.layer, problem, lambda: terms.head_weights(device))
        sizes = GroupSizes(SEQS, MAX_TOKENS, MAX_LEN)
        self.group = SharedContextGroup({"layer": layer}, sizes, device, options, self.sharing)
        blocks = np.random.default_rng(ranks.rank_in_group).permutation(np.arange(1, NUM_BLOCKS))[: SEQS * 8]
        self.table = torch.from_numpy(blocks.reshape(SEQS, 8).astype(np.int32)).to(device)

    def common(self, before: Sequence[int], new: Sequence[int]) -> CommonMetadata:
        """Returns metadata of a step as vLLM's runner makes it on this rank."""
        ranks, stretch = self.sharing.ranks, self.sharing.stretch
        slots = []
        for seq, (length, count) in enumerate(zip(before, new, strict=True)):
            for place in range(length, length + count):
                turn, rest = divmod(place, stretch * ranks.world_size)
                local = turn * stretch + rest % stretch
                is_mine = rest // stretch == ranks.rank_in_group
                block = int(self.table[seq, local // BLOCK])
                slots.append(block * BLOCK + local % BLOCK if is_mine else -1)
        starts = torch.from_numpy(np.cumsum([0, *new]).astype(np.int32)).to(self.device)
        lengths = torch.tensor([a + b for a, b in zip(before, new, strict=True)], dtype=torch.int32)
        return CommonMetadata(
            starts,
            lengths.to(self.device),
            len(new),
            sum(new),
            max(new),
            int(lengths.max()),
            self.table[: len(new)],
            torch.tensor(slots, device=self.device),
            True,
        )

    def step(self, before: Sequence[int], new: Sequence[int], q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        with torch.inference_mode():
            step = self.group.begin(self.common(before, new))
            self.group.store("layer", step, self.layer.kv_cache, k, v)
            self.group.attend("layer", step, self.layer.kv_cache, q, out)


@pytest.mark.parametrize(("stretch", "has_sinks"), [(1, False), (4, True)])
def test_new_tokens_see_the_contexts_of_all_ranks_and_themselves(
    stretch: int, has_sinks: bool, device: torch.device, provider: str
) -> None:
    draw = np.random.default_rng(0)
    sinks = torch.from_numpy(draw.standard_normal(HEADS)).float() if has_sinks else None
    meeting = Meeting(2)
    ranks = [Rank(ThreadRanks(meeting, rank), stretch, device, provider, sinks) for rank in range(2)]
    stored: list[list[tuple[Array, Array]]] = [[], [], []]
    before = [0, 0, 0]
    # Prompts, of which the first one's single token is on one rank only; decodes; a chunk next to decodes.
    for new in ([1, 9, 40], [1, 1, 1], [1, 1, 1], [1, 20, 1], [3, 1, 2]):
        q, k, v = (draw.standard_normal((sum(new), heads, DIM)).astype(np.float32) for heads in (HEADS, 1, 1))
        found = forward(meeting, ranks, before, new, [torch.from_numpy(each).to(device) for each in (q, k, v)])
        first = 0
        for seq, count in enumerate(new):
            rows = slice(first, first + count)
            stored[seq].append((k[rows].astype(np.float64), v[rows].astype(np.float64)))
            keys, values = (np.concatenate(side) for side in zip(*stored[seq], strict=True))
            scores = Scores(SCALE, sinks=None if sinks is None else sinks.double().numpy())
            want, _ = attention(q[rows].astype(np.float64), keys, values, scores)
            assert np.allclose(found[rows], want, atol=TOLERANCE, rtol=TOLERANCE), (new, seq)
            before[seq] += count
            first += count
    for rank in ranks:
        rank.group.attention.check_device()


def forward(
    meeting: Meeting, ranks: Sequence[Rank], before: Sequence[int], new: Sequence[int], given: Sequence[Tensor]
) -> Array:
    """Runs a step of all ranks at once and returns the output of all heads. given: q of all heads, k and v"""
    q, k, v = given
    heads = HEADS // len(ranks)
    outs = [torch.full((len(q), heads, DIM), 7.0, device=q.device) for _ in ranks]
    meeting.together(lambda rank: ranks[rank].step(before, new, q[:, rank * heads :][:, :heads], k, v, outs[rank]))
    found: Array = torch.cat(outs, 1).double().cpu().numpy()
    return found


def test_what_a_rank_keeps_of_a_sequence_is_every_nth_stretch_of_it() -> None:
    lengths = torch.arange(0, 50)
    for stretch in (1, 4):
        of_ranks = [ContextSharing(ThreadRanks(Meeting(3), rank), stretch).kept(lengths) for rank in range(3)]
        for length in range(50):
            want = [sum(place // stretch % 3 == rank for place in range(length)) for rank in range(3)]
            assert [int(each[length]) for each in of_ranks] == want


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"sliding_window": 8}, "does not know how far its keys are"),
        ({"alibi_slopes": [0.5, 0.25]}, "does not know how far its keys are"),
        ({"num_kv_heads": 2}, "2 KV heads on a rank, and ranks can share the contexts of one"),
    ],
)
def test_layers_that_ranks_cannot_share_are_refused(change: dict[str, object], sentence: str) -> None:
    terms = replace(LayerTerms(2, DIM, SCALE, 1), **change)  # type: ignore[arg-type]
    problem = terms.problem(CacheTerms(BLOCK, DIM, torch.float32, torch.float8_e4m3fn))
    layer = GroupLayer(Cache(1, torch.device("cpu")), problem)
    sizes, sharing = GroupSizes(SEQS, MAX_TOKENS, MAX_LEN), ContextSharing(ThreadRanks(Meeting(2), 0))
    with pytest.raises(Unsupported, match=sentence):
        SharedContextGroup({"layer": layer}, sizes, torch.device("cpu"), GroupOptions(), sharing)
    assert KVGroup({"layer": layer}, sizes, torch.device("cpu"), GroupOptions())
