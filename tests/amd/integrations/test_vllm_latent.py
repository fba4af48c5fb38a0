"""Decodes of MLA layers as vLLM runs them: it stores latent rows itself, and ranks may share a sequence's rows."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.capture.graphs import recorder_for
from rocm_attn.errors import DeviceFault
from rocm_attn.external import ExternalAttention, ExternalOptions
from rocm_attn.integrations.vllm.group import (
    GroupLayer,
    GroupOptions,
    GroupSizes,
    KVGroup,
    Lend,
    StepOfGroup,
    forget_empty_parts,
)
from rocm_attn.integrations.vllm.layer_terms import CacheTerms, LayerTerms
from rocm_attn.integrations.vllm.steps import MLA_GRAPHS, CommonMetadata
from rocm_attn.kernels.cache.page_format import Encoding
from rocm_attn.kernels.sparse.arguments import Indexing
from rocm_attn.problem import Indexer
from rocm_attn.truth.adopted import try_nothing
from tests.amd.integrations.oracle import Scores, attention
from tests.amd.kernels.record_cases import POISON, RecordPages

pytestmark = pytest.mark.usefixtures("inference_mode")

HEADS, LATENT, V_DIM, BLOCK = 4, 80, 64, 16
SEQS, MAX_LEN, NUM_BLOCKS = 4, 128, 40
SCALE = 0.2
TOLERANCE = 3e-5


def store_rows(
    kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slots: Tensor, kv_cache_dtype: str, k_scale: Tensor
) -> None:
    """Stores as vLLM's concat_and_cache_mla does in a cache that is not FP8."""
    assert kv_cache_dtype == "auto"
    kv_cache.view(-1, LATENT)[slots] = torch.cat([kv_c, k_pe.squeeze(1)], 1)


class Layer:
    """vLLM's MLA layer. impl: stores its rows"""

    kv_cache_dtype = "auto"

    def __init__(self, device: torch.device) -> None:
        self.impl: Any = SimpleNamespace(do_kv_cache_update=store_rows)
        self.kv_cache = torch.full((NUM_BLOCKS, BLOCK, LATENT), float("nan"), device=device)
        self.kv_cache[0] = 0
        self._k_scale = self._v_scale = torch.ones((), device=device)


class Rank:
    """A rank's part of every sequence: its rows `rank`, `rank + ranks`, ..., in blocks of its own."""

    def __init__(
        self,
        rank: int,
        ranks: int,
        device: torch.device,
        provider: str,
        top: int = 0,
        tried: Callable[[ExternalAttention, Lend], None] = try_nothing,
        **needles: Any,
    ) -> None:
        """Builds the rank. top: keys selected per token; 0: it attends to all; tried, needles: see GroupOptions"""
        self.rank, self.ranks, self.device = rank, ranks, device
        self.layer = Layer(device)
        cache = CacheTerms(BLOCK, 0, torch.float32, torch.float8_e4m3fn, ranks)
        # Query heads of all ranks are gathered, so a rank's layer has its share of them.
        problem = LayerTerms(HEADS // ranks, LATENT, SCALE, 1).latent_problem(cache, V_DIM)
        if top:
            problem = replace(problem, indexer=Indexer(4, 32, Indexing(scale=1.0, top=top)))
        external = ExternalOptions(provider=provider, page_strides=True, short_kv=ranks > 1)
        options = GroupOptions(external, has_slots=ranks == 1, tried=tried, **needles)
        self.group = KVGroup({"layer": GroupLayer(self.layer, problem)}, GroupSizes(SEQS, 32, MAX_LEN), device, options)
        blocks = np.random.default_rng(rank).permutation(np.arange(1, NUM_BLOCKS))[: SEQS * 8].reshape(SEQS, 8)
        self.table = torch.from_numpy(blocks.astype(np.int32)).to(device)
        self.seq_lens = torch.zeros(SEQS, dtype=torch.int32, device=device)
        self.query_start_loc = torch.zeros(SEQS + 1, dtype=torch.int32, device=device)
        self.slots = torch.full((32,), -1, dtype=torch.int64, device=device)

    def store(self, seq: int, rows: Tensor) -> list[int]:
        """Writes this rank's rows of a sequence, as vLLM does, and returns all of their slots."""
        mine = rows[self.rank :: self.ranks]
        place = torch.arange(len(mine))
        slots = self.table[seq].cpu().long()[place // BLOCK] * BLOCK + place % BLOCK
        self.layer.kv_cache.view(-1, LATENT)[slots.to(self.device)] = mine.to(self.device)
        self.seq_lens[seq] = len(mine)
        return [int(slot) for slot in slots]

    def common(self, num_reqs: int, width: int) -> CommonMetadata:
        """Returns metadata of decodes of `width` new tokens each."""
        self.query_start_loc.copy_((torch.arange(SEQS + 1) * width).int())
        tokens = num_reqs * width
        return CommonMetadata(
            self.query_start_loc[: num_reqs + 1],
            self.seq_lens[:num_reqs],
            num_reqs,
            tokens,
            width,
            MAX_LEN,
            self.table[:num_reqs],
            self.slots[:tokens],
            True,
        )


def rows_of(lengths: Sequence[int]) -> list[Tensor]:
    draw = np.random.default_rng(7)
    return [torch.from_numpy(draw.standard_normal((length, LATENT))).float() for length in lengths]


def wanted(q: Tensor, rows: Tensor) -> Tensor:
    k = rows.double().numpy()[:, None]
    out, _ = attention(q.double().cpu().numpy(), k, k[..., :V_DIM], Scores(SCALE))
    return torch.from_numpy(out)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_that_share_a_sequence_merge_to_the_oracles_by_their_log_sum_exps(
    ranks: int, device: torch.device, provider: str
) -> None:
    of_seq = rows_of([1, 33, 80])  # the second rank has nothing of the first one
    parts = [Rank(rank, ranks, device, provider) for rank in range(ranks)]
    q = torch.from_numpy(np.random.default_rng(1).standard_normal((3, HEADS, LATENT))).float().to(device)
    outs, lses = [], []
    for part in parts:
        for seq, rows in enumerate(of_seq):
            slots = part.store(seq, rows)
            part.slots[seq] = slots[-1] if ranks == 1 else -1
        step = part.group.begin(part.common(3, 1))
        outs.append(torch.full((3, HEADS, V_DIM), 7.0, device=device))
        lse = torch.full((3, HEADS), 7.0, device=device)
        part.group.attend("layer", step, part.layer.kv_cache, q, outs[-1], lse if ranks > 1 else None)
        if ranks > 1:
            forget_empty_parts(part.seq_lens[:3], outs[-1], lse)
        lses.append(lse)
        part.group.attention.check_device()
    merged = outs[0]
    if ranks > 1:
        weights = torch.stack(lses).softmax(0)
        assert (weights[1, 0] == 0).all()
        merged = (torch.stack(outs) * weights[..., None]).sum(0)
    for seq, rows in enumerate(of_seq):
        want = wanted(q[seq : seq + 1], rows)[0]
        torch.testing.assert_close(merged[seq].double().cpu(), want, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_part_without_tokens_weighs_nothing_whatever_a_kernel_has_written() -> None:
    out, lse = torch.full((3, HEADS, V_DIM), float("nan")), torch.full((3, HEADS), 4.0)
    out[1:] = 1.0
    forget_empty_parts(torch.tensor([0, 5, 1]), out, lse)
    assert (out[0] == 0).all()
    assert (lse[0] == float("-inf")).all()
    assert (out[1:] == 1).all()
    assert (lse[1:] == 4).all()


@pytest.mark.parametrize("width", [1, 3])
def test_graphs_of_decodes_and_of_verification_are_what_mla_layers_declare(
    width: int, device: torch.device, provider: str
) -> None:
    assert MLA_GRAPHS == "UNIFORM_BATCH"
    part = Rank(0, 1, device, provider)
    q = torch.zeros(SEQS * width, HEADS, LATENT, device=device)
    out = torch.full((SEQS * width, HEADS, V_DIM), 7.0, device=device)
    captured = part.group.begin_capture(part.common(SEQS, width))
    recording, _ = recorder_for(device).record(
        lambda: part.group.attend("layer", captured, part.layer.kv_cache, q, out)
    )
    for lengths in ((5, 16, 40), (3, 100)):
        of_seq = rows_of(lengths)
        part.seq_lens.zero_()
        part.slots.fill_(-1)
        for seq, rows in enumerate(of_seq):
            slots = part.store(seq, rows)[-width:]
            part.slots[seq * width : (seq + 1) * width] = torch.tensor(slots, device=device)
        q.copy_(torch.from_numpy(np.random.default_rng(2).standard_normal(q.shape)))
        q[len(of_seq) * width :] = float("nan")
        common = part.common(SEQS, width)
        part.query_start_loc.clamp_(max=len(of_seq) * width)  # vLLM's pads have no token
        part.group.begin(common)
        recording.replay()
        for seq, rows in enumerate(of_seq):
            tokens = slice(seq * width, (seq + 1) * width)
            want = wanted(q[tokens], rows)
            torch.testing.assert_close(out[tokens].double().cpu(), want, atol=TOLERANCE, rtol=TOLERANCE)
    part.group.attention.check_device()


TOP = 12


def chosen_for(lengths: Sequence[int], draw: np.random.Generator) -> Tensor:
    """Returns [tokens, TOP] keys as vLLM's indexer leaves them: in any order, -1 if a token sees fewer than TOP.

    lengths: number of keys that each token sees
    """
    rows = torch.full((len(lengths), TOP), -1, dtype=torch.int32)
    for row, length in enumerate(lengths):
        count = min(TOP, length)
        rows[row, draw.permutation(TOP)[:count]] = torch.from_numpy(draw.permutation(length)[:count].astype(np.int32))
    return rows


def compare_chosen(out: Tensor, q: Tensor, of_seq: Sequence[Tensor], chosen: Tensor, width: int) -> None:
    """Checks that each of the last `width` tokens of the sequences has attended to its selected keys."""
    for token in range(len(of_seq) * width):
        places = chosen[token][chosen[token] >= 0].long()
        want = wanted(q[token : token + 1], of_seq[token // width][places])[0]
        torch.testing.assert_close(out[token].double().cpu(), want, atol=TOLERANCE, rtol=TOLERANCE)


def place(part: Rank, of_seq: Sequence[Tensor], width: int) -> list[int]:
    """Stores rows of sequences, the last `width` as new ones. Returns the number of keys that each new token sees."""
    part.slots.fill_(-1)
    for seq, rows in enumerate(of_seq):
        slots = part.store(seq, rows)[-width:]
        part.slots[seq * width : (seq + 1) * width] = torch.tensor(slots, device=part.device)
    return [len(rows) - width + 1 + at for rows in of_seq for at in range(width)]


@pytest.mark.parametrize("width", [1, 3])
def test_sparse_layers_attend_to_what_was_chosen_in_any_order(width: int, device: torch.device, provider: str) -> None:
    part = Rank(0, 1, device, provider, TOP)
    draw = np.random.default_rng(3)
    q = torch.from_numpy(draw.standard_normal((3 * width, HEADS, LATENT))).float().to(device)
    for lengths in ((5, 33, 80), (7, 34, 90)):
        of_seq = rows_of(lengths)
        chosen = chosen_for(place(part, of_seq, width), draw)
        out = torch.full((3 * width, HEADS, V_DIM), 7.0, device=device)
        step = part.group.begin(part.common(3, width))
        part.group.attend_chosen("layer", step, part.layer.kv_cache, chosen.to(device), q, out)
        compare_chosen(out, q, of_seq, chosen, width)
    part.group.attention.check_device()


@pytest.mark.fast(1)
@pytest.mark.parametrize("platform", [torch.float8_e4m3fnuz, torch.float8_e4m3fn], ids=str)
def test_sparse_layers_read_the_records_that_vllm_stores(
    platform: torch.dtype, device: torch.device, provider: str
) -> None:
    """In a graph too. Bytes that no token has stored are poison."""
    cache, one = CacheTerms(BLOCK, 0, torch.float32, platform), RecordPages((576, 512), Encoding.of(platform), 1)
    stored = torch.full((NUM_BLOCKS, BLOCK, one.page_bytes), POISON, dtype=torch.uint8, device=device)
    stored[0] = 0
    terms = LayerTerms(HEADS, 576, SCALE / 8, 1, kv_cache_dtype="fp8_ds_mla")
    problem = replace(terms.latent_problem(cache, 512), indexer=Indexer(4, 32, Indexing(scale=1.0, top=TOP)))
    layer = SimpleNamespace(kv_cache=stored)
    external = ExternalOptions(provider=provider, page_strides=True)
    sizes, options = GroupSizes(SEQS, 32, MAX_LEN), GroupOptions(external)
    group = KVGroup({"layer": GroupLayer(layer, problem)}, sizes, device, options)
    draw, lengths = np.random.default_rng(5), (5, 17, 33)
    table = torch.from_numpy(draw.permutation(np.arange(1, NUM_BLOCKS))[: SEQS * 8].reshape(SEQS, 8).astype(np.int32))
    q = torch.from_numpy(draw.standard_normal((SEQS, HEADS, 576))).float().to(device)
    out, chosen = torch.empty(SEQS, HEADS, 512, device=device), chosen_for(lengths, draw)
    buffer = torch.full((SEQS, TOP), -1, dtype=torch.int32, device=device)
    kv_len, slots = (torch.zeros(SEQS, dtype=dtype, device=device) for dtype in (torch.int32, torch.int64))
    starts = torch.arange(SEQS + 1, dtype=torch.int32, device=device)
    common = CommonMetadata(starts, kv_len, SEQS, SEQS, 1, MAX_LEN, table.to(device), slots, True)
    group.begin(common)
    captured = group.begin_capture(common)
    recording, _ = recorder_for(device).record(lambda: group.attend_chosen("layer", captured, stored, buffer, q, out))
    values = []
    for seq, length in enumerate(lengths):
        rows = torch.from_numpy(draw.standard_normal((length, 576)) * 0.3).bfloat16()
        records = torch.stack([one.of_row(row) for row in rows])
        place = torch.arange(length)
        at = table[seq].long()[place // BLOCK] * BLOCK + place % BLOCK
        stored.view(-1, stored.shape[-1])[at.to(device)] = records.to(device)
        values.append([one.value(record, 0) for record in records])
        kv_len[seq], slots[seq] = length, int(at[-1])
    slots[len(lengths) :] = -1
    buffer[: len(lengths)] = chosen.to(device)
    starts.clamp_(max=len(lengths))
    group.begin(common)
    recording.replay()
    for seq, rows_of_seq in enumerate(values):
        k = torch.stack([rows_of_seq[place] for place in chosen[seq].tolist() if place >= 0]).numpy()[:, None]
        want, _ = attention(q[seq : seq + 1].double().cpu().numpy(), k, k[..., :512], Scores(SCALE / 8))
        torch.testing.assert_close(out[seq].double().cpu(), torch.from_numpy(want)[0], atol=3e-5, rtol=3e-5)
    group.attention.check_device()


def test_graphs_of_sparse_layers_and_steps_that_vllm_runs_for_its_own_sake(device: torch.device, provider: str) -> None:
    """The buffer of selected keys is meaningless in such steps, and is no fault. Nor are the entries of pads."""
    part = Rank(0, 1, device, provider, TOP)
    draw = np.random.default_rng(4)
    q = torch.zeros(SEQS, HEADS, LATENT, device=device)
    out = torch.full((SEQS, HEADS, V_DIM), 7.0, device=device)
    buffer = torch.full((32, TOP), 99, dtype=torch.int32, device=device)

    def attend(step: StepOfGroup) -> None:
        part.group.attend_chosen("layer", step, part.layer.kv_cache, buffer, q, out)

    part.seq_lens.fill_(9)
    attend(part.group.begin(part.common(SEQS, 1)))
    captured = part.group.begin_capture(part.common(SEQS, 1))
    recording, _ = recorder_for(device).record(lambda: attend(captured))
    for lengths in ((5, 16, 40), (3, 100)):
        of_seq = rows_of(lengths)
        part.seq_lens.zero_()
        seen = place(part, of_seq, 1)
        buffer.fill_(99)
        buffer[: len(seen)] = chosen_for(seen, draw).to(device)
        q.copy_(torch.from_numpy(draw.standard_normal(q.shape)))
        q[len(of_seq) :] = float("nan")
        common = part.common(SEQS, 1)
        part.query_start_loc.clamp_(max=len(of_seq))  # vLLM's pads have no token
        part.group.begin(common)
        recording.replay()
        compare_chosen(out, q, of_seq, buffer.cpu(), 1)
    part.group.attention.check_device()


def test_a_key_that_a_token_does_not_see_is_reported(device: torch.device, provider: str) -> None:
    part = Rank(0, 1, device, provider, TOP)
    draw = np.random.default_rng(5)
    of_seq = rows_of([5, 33])
    chosen = chosen_for(place(part, of_seq, 1), draw)
    chosen[1, 0] = 33
    q = torch.from_numpy(draw.standard_normal((2, HEADS, LATENT))).float().to(device)
    out = torch.empty(2, HEADS, V_DIM, device=device)
    step = part.group.begin(part.common(2, 1))
    part.group.attend_chosen("layer", step, part.layer.kv_cache, chosen.to(device), q, out)
    with pytest.raises(DeviceFault, match="the selected units of a token"):
        part.group.attention.check_device()
