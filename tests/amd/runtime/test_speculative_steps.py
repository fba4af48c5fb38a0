"""Steps around drafts: draft-extend over W tokens of which the device knows how many count, and draft models that only
attend to the target's KV. Eagerly and as graphs, on pools with and without a space for windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.batch.inputs import DeviceInputs
from rocm_attn.batch.mask import StepMask
from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch
from rocm_attn.capture.check import NO_CHECK
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.errors import BadBatch, BadTensor
from rocm_attn.oracle.reference import attend_sequence
from rocm_attn.paging.state_slots import require_state_slots
from rocm_attn.step.accepting import select_last_accepted
from rocm_attn.step.step import Part
from tests.amd.runtime.stepping import Request, World, providers, small_problem, take_back
from tests.amd.tolerances import assert_attention_close

each_provider = pytest.mark.parametrize("provider", providers())
both_ways = pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphed"])
each_pool = pytest.mark.parametrize("swa", [False, True], ids=["one space", "hybrid"])
each_page_size = pytest.mark.parametrize("page_size", [2, 1, 16])
NEW = 4


def world_of(
    provider: str, device: torch.device, page_size: int, *, swa: bool = False, custom_mask: bool = False
) -> World:
    """Two layers; the second one may have a window and separate pages."""
    problem = small_problem(page_size, custom_mask=custom_mask)
    return World.build(
        [problem, replace(problem, window_left=6) if swa else problem],
        device,
        provider,
        num_pages=400 // page_size + 1,
        swa_pages=300 // page_size + 1 if swa else 0,
        swa_kept=40 if swa else 0,
        capture_sizes=(4,),
        capture_tokens=(4 * NEW,),
    )


@dataclass
class Extending:
    """Draft-extend steps of NEW tokens, whose q, k and v lie at fixed addresses.

    accepted_of_row: int64 [rows], by row of the request table, as a verify step on the device would leave it
    """

    world: World
    graphs: bool
    qkv: list[list[Tensor]] = field(init=False)
    outs: list[Tensor] = field(init=False)
    accepted_of_row: Tensor = field(init=False)

    def __post_init__(self) -> None:
        world, runtime = self.world, self.world.runtime
        self.qkv = [[world.random(4 * NEW, heads, 16) for heads in (6, 2, 2)] for _ in world.problems]
        self.outs = [torch.zeros_like(q) for q, _, _ in self.qkv]
        self.accepted_of_row = torch.ones(runtime.options.num_rows + 1, dtype=torch.int64, device=runtime.device)
        require_state_slots(runtime.table, accepted_of_row=self.accepted_of_row)
        recorder = recorder_for(runtime.device) if self.graphs else None
        self.runner = StepRunner(runtime, self.forward, recorder, check=NO_CHECK)

    def forward(self, step: Part) -> Tensor:
        num_tokens = step.token_ids.shape[0]
        for layer, (q, k, v) in enumerate(self.qkv):
            out = self.outs[layer]
            step.layers.store_and_attend(layer, q[:num_tokens], k[:num_tokens], v[:num_tokens], out[:num_tokens])
        return select_last_accepted(out[:num_tokens], step, self.accepted_of_row[step.row_of_seq])

    def run(self, requests: Sequence[Request], bounds: Sequence[int], accepted: Sequence[int]) -> None:
        """Runs a step after the stored tokens, of which the host knows bounds; its accepted tokens stay."""
        world, device = self.world, self.world.runtime.device
        num_tokens = len(requests) * NEW
        for of_layer in self.qkv:
            for tensor in of_layer:
                tensor[:num_tokens] = world.random(num_tokens, *tensor.shape[1:])
        rows = np.array([request.row for request in requests], np.int32)
        self.accepted_of_row[torch.from_numpy(rows).long()] = torch.tensor(accepted, device=device)
        prefix = torch.tensor([request.kv_len for request in requests], dtype=torch.int32, device=device)
        kv_bound = np.array(bounds, np.int32) + NEW
        world.runtime.table.reserve_all(rows, kv_bound)
        inputs = DeviceInputs(kv_len=prefix, ahead=NEW)
        batch = StepBatch(rows, kv_bound, np.full(len(rows), NEW, np.int32), NO_TOKEN_IDS, inputs=inputs)
        selected = self.runner.run(batch)
        q_len = [NEW] * len(requests)
        for layer, (q, k, v) in enumerate(self.qkv):
            world.remember(layer, requests, q_len, k[:num_tokens], v[:num_tokens])
            world.check(layer, requests, q_len, q[:num_tokens], self.outs[layer][:num_tokens], None)
        last = [seq * NEW + count - 1 for seq, count in enumerate(accepted)]
        assert torch.equal(selected, self.outs[-1][last])
        for request, count in zip(requests, accepted, strict=True):
            take_back(request, NEW - count)


@pytest.mark.fast(4, interpreted=1)
@both_ways
@each_pool
@each_page_size
@each_provider
def test_draft_extend_goes_on_from_what_only_the_device_has_accepted(
    provider: str, page_size: int, swa: bool, graphs: bool, device: torch.device
) -> None:
    """The host learns no count: its bounds grow by W per step, and rejected tokens' places are written again."""
    world = world_of(provider, device, page_size, swa=swa)
    requests = [world.admit() for _ in range(3)]
    world.step(requests, [5, 1, 8])
    extending = Extending(world, graphs)
    bounds = [request.kv_len for request in requests]
    for accepted in ([1, 4, 2], [3, 1, 4]):
        extending.run(requests, bounds, accepted)
        bounds = [bound + NEW for bound in bounds]
    world.runtime.check_device()
    assert extending.runner.counters.replays == 2 * graphs


def test_the_row_of_the_last_accepted_token_is_the_sequences_own(device: torch.device) -> None:
    """This holds for any counts, and with pads."""
    world = world_of("torch", device, 4)
    requests = [world.admit() for _ in range(2)]
    step = world.runtime.step(world.batch(requests, [3, 2])).parts[0]
    rows = torch.arange(step.token_ids.shape[0], device=device)
    num_seqs = step.row_of_seq.shape[0]
    for counts, wanted in (([2, 2], [1, 4]), ([0, -7], [0, 3]), ([9, 3], [2, 4])):
        given = torch.tensor(counts + [1] * (num_seqs - 2), dtype=torch.int32, device=device)
        assert select_last_accepted(rows, step, given)[:2].tolist() == wanted
    with pytest.raises(BadTensor, match="padded tokens"):
        select_last_accepted(rows[1:], step, given)
    with pytest.raises(BadTensor, match=r"num_accepted is torch\.float32"):
        select_last_accepted(rows, step, given.float())
    world.runtime.end_step()


def test_state_with_too_few_slots_is_refused_before_anything_is_captured(device: torch.device) -> None:
    """recipes#853: state slots fewer than the padded batch abort a capture."""
    runtime = world_of("torch", device, 4).runtime
    rows = runtime.options.num_rows
    conv, scan = torch.zeros(rows + 1, 3, device=device), torch.zeros(rows + 5, device=device)
    require_state_slots(runtime.table, conv=conv, scan=scan)
    with pytest.raises(BadTensor, match=rf"conv has {rows} entries; it must have {rows + 1}"):
        require_state_slots(runtime.table, conv=conv[1:], scan=scan)


def check_alone(
    world: World, layer: int, requests: Sequence[Request], lengths: Sequence[int], q: Tensor, out: Tensor
) -> None:
    """Row i of out is attention of row i of q over the first lengths[i] tokens of request i."""
    weights = world.runtime.head_weights.of(layer)
    for seq, (request, length) in enumerate(zip(requests, lengths, strict=True)):
        row, k, v = slice(seq, seq + 1), request.k[layer][:length], request.v[layer][:length]
        want, _ = attend_sequence(q[row], k, v, world.problems[layer], weights)
        assert_attention_close(out[row], want, q.dtype)


@pytest.mark.fast(4, interpreted=0)
@both_ways
@each_pool
@each_page_size
@each_provider
def test_a_draft_model_reads_the_targets_pool_and_writes_nothing(
    provider: str, page_size: int, swa: bool, graphs: bool, device: torch.device
) -> None:
    """Frozen-KV MTP: all steps of a round attend to the same tokens, in one decode step of the target's runtime."""
    world = world_of(provider, device, page_size, swa=swa)
    runtime = world.runtime
    requests = [world.admit() for _ in range(3)]
    world.step(requests, [5, 1, 8])
    queries = [[world.random(4, 6, 16) for _ in world.problems] for _ in range(3)]
    outs = [[torch.zeros_like(q) for q in of_layers] for of_layers in queries]

    def forward(step: Part) -> Tensor:
        num_seqs = step.token_ids.shape[0]
        for of_layers, to in zip(queries, outs, strict=True):
            for layer, q in enumerate(of_layers):
                step.layers.attend(layer, q[:num_seqs], to[layer][:num_seqs])
        return to[-1][:num_seqs]

    runner = StepRunner(runtime, forward, recorder_for(device) if graphs else None, check=NO_CHECK)
    before = [runtime.pool.layer(layer).k.clone() for layer in range(2)]
    rows = np.array([request.row for request in requests], np.int32)
    lengths = np.array([request.kv_len for request in requests], np.int32)
    for given in (lengths, np.maximum(lengths - 2, 1), lengths):
        runner.run(StepBatch(rows, given, np.ones(3, np.int32), NO_TOKEN_IDS))
        for of_layers, to in zip(queries, outs, strict=True):
            for layer, q in enumerate(of_layers):
                check_alone(world, layer, requests, given.tolist(), q, to[layer])
    after = [runtime.pool.layer(layer).k for layer in range(2)]
    assert all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(before, after, strict=True))
    # It has its own bounds: tokens that the target has not stored are not read.
    runtime.table.reserve_all(rows, lengths + 1)
    with pytest.raises(BadBatch, match="attends to the first"):
        runner.run(StepBatch(rows, lengths + 1, np.ones(3, np.int32), NO_TOKEN_IDS))
    world.step(requests, [1, 1, 1])


@each_provider
def test_branches_that_only_attend_all_see_the_same_tokens(provider: str, device: torch.device) -> None:
    """Frozen-KV MTP with branches: the queries of a sequence share its row, under a mask that hides nothing."""
    world = world_of(provider, device, 4, custom_mask=True)
    requests = [world.admit() for _ in range(2)]
    world.step(requests, [5, 9])
    rows = np.array([request.row for request in requests], np.int32)
    lengths = np.array([request.kv_len for request in requests], np.int32)
    branches = 3
    bits = torch.full((3,), 255, dtype=torch.uint8, device=device)
    positions = torch.tensor([4] * branches + [8] * branches, dtype=torch.int32, device=device)
    batch = StepBatch(rows, lengths, [branches] * 2, NO_TOKEN_IDS, mask=StepMask(bits, positions, keys_before=0))
    step = world.runtime.step(batch).parts[0]
    q = world.random(step.token_ids.shape[0], 6, 16)
    out = torch.zeros_like(q)
    step.layers.attend(0, q, out)
    world.runtime.end_step()
    for branch in range(branches):
        of_branch = slice(branch, 2 * branches, branches)
        check_alone(world, 0, requests, lengths.tolist(), q[of_branch], out[of_branch])


@each_provider
def test_a_fully_masked_split_gives_zeros_and_no_nan(provider: str, device: torch.device) -> None:
    """aiter#4711, in verify: tokens that see only themselves among many keys, and one that sees none."""
    problem = replace(small_problem(custom_mask=True), wants_lse=True)
    world = World.build([problem], device, provider, num_pages=60, max_kv_len=160)
    request = world.admit()
    world.step([request], [130])
    batch = world.batch([request], [4])
    visible = torch.zeros(4, 134, dtype=torch.bool)
    visible[0, 130], visible[1, 131], visible[2, 0] = True, True, True
    cells = torch.from_numpy(np.packbits(visible.flatten().numpy(), bitorder="little")).to(device)
    positions = torch.arange(130, 134, dtype=torch.int32, device=device)
    step = world.runtime.step(replace(batch, mask=StepMask(cells, positions))).parts[0]
    q, k, v = world.qkv(problem, step)
    out, lse = torch.full_like(q, float("nan")), torch.full(q.shape[:2], float("nan"), device=device)
    step.layers.store_and_attend(0, q, k, v, out, lse)
    world.runtime.end_step()
    seen = torch.stack([v[0], v[1], request.v[0][0]]).repeat_interleave(3, 1)
    assert_attention_close(out[:3], seen.double(), q.dtype)
    assert not out[3:].any()
    assert torch.equal(lse[3:], torch.full_like(lse[3:], float("-inf")))
    assert lse[:3].isfinite().all()
