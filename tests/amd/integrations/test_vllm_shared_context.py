"""Ranks that share the context of GQA layers: their merged result equals the reference of whole sequences."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
from tests.amd.runner.thread_ranks import ThreadRank, on_threads

HEADS, DIM, BLOCK, SCALE = 4, 16, 16, 0.3
SEQS, MAX_LEN, NUM_BLOCKS, MAX_TOKENS = 4, 128, 40, 64
TOLERANCE = 3e-5


@dataclass
class ContextRank:
    """A rank of a model as vLLM's GroupCoordinator; without a thread it meets no other one."""

    rank_in_group: int
    world_size: int = 2
    meets: ThreadRank | None = None

    def all_gather(self, input_: Tensor, dim: int) -> Tensor:
        assert self.meets is not None
        return torch.cat(self.meets.all_of(input_), dim)

    def reduce_scatter(self, input_: Tensor, dim: int) -> Tensor:
        assert self.meets is not None
        total = torch.stack(self.meets.all_of(input_)).sum(0)
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
        layer = GroupLayer(self.layer, problem, terms.head_weights)
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


# Prompts, of which the first one's single token is on one rank only; decodes; a chunk next to decodes.
STEPS = ([1, 9, 40], [1, 1, 1], [1, 1, 1], [1, 20, 1], [3, 1, 2])


@pytest.mark.parametrize(("stretch", "has_sinks"), [(1, False), (4, True)])
def test_new_tokens_see_the_contexts_of_all_ranks_and_themselves(
    stretch: int, has_sinks: bool, device: torch.device, provider: str
) -> None:
    draw = np.random.default_rng(0)
    sinks = torch.from_numpy(draw.standard_normal(HEADS)).float() if has_sinks else None
    given = [
        [draw.standard_normal((sum(new), heads, DIM)).astype(np.float32) for heads in (HEADS, 1, 1)] for new in STEPS
    ]

    def served(meets: ThreadRank) -> list[Tensor]:
        """Returns a rank's heads of each step's output."""
        number = meets.shard.rank
        rank = Rank(ContextRank(number, meets=meets), stretch, device, provider, sinks)
        before, outs = np.zeros(len(STEPS[0]), np.int64), []
        for new, rows in zip(STEPS, given, strict=True):
            q, k, v = (torch.from_numpy(each).to(device) for each in rows)
            mine = q[:, number * HEADS // 2 :][:, : HEADS // 2]
            outs.append(torch.full_like(mine, 7.0))
            rank.step(before.tolist(), new, mine, k, v, outs[-1])
            before += new
        rank.group.attention.check_device()
        return outs

    found = [torch.cat(outs, 1).double().cpu().numpy() for outs in zip(*on_threads(2, served), strict=True)]
    stored: list[list[tuple[Array, Array]]] = [[], [], []]
    scores = Scores(SCALE, sinks=None if sinks is None else sinks.double().numpy())
    for new, (q, k, v), out in zip(STEPS, given, found, strict=True):
        first = 0
        for seq, count in enumerate(new):
            rows = slice(first, first + count)
            stored[seq].append((k[rows].astype(np.float64), v[rows].astype(np.float64)))
            keys, values = (np.concatenate(side) for side in zip(*stored[seq], strict=True))
            want, _ = attention(q[rows].astype(np.float64), keys, values, scores)
            assert np.allclose(out[rows], want, atol=TOLERANCE, rtol=TOLERANCE), (new, seq)
            first += count


def test_what_a_rank_keeps_of_a_sequence_is_every_nth_stretch_of_it() -> None:
    lengths = torch.arange(0, 50)
    for stretch in (1, 4):
        of_ranks = [ContextSharing(ContextRank(rank, 3), stretch).kept(lengths) for rank in range(3)]
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
    sizes, sharing = GroupSizes(SEQS, MAX_TOKENS, MAX_LEN), ContextSharing(ContextRank(0))
    with pytest.raises(Unsupported, match=sentence):
        SharedContextGroup({"layer": layer}, sizes, torch.device("cpu"), GroupOptions(), sharing)
    assert KVGroup({"layer": layer}, sizes, torch.device("cpu"), GroupOptions())
