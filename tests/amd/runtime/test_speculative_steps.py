"""Steps around drafts: draft models over the target's KV, draft-extend, and trees whose accepted paths are moved."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.batch.inputs import DeviceInputs
from rocm_attn.batch.mask import StepMask, TreeMask
from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch
from rocm_attn.capture.check import NO_CHECK
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.errors import BadBatch, BadTensor, OutOfRows, Unsupported, WrongState
from rocm_attn.kernels.cache.page_format import RECORDS
from rocm_attn.kernels.metadata.step_tensors import NO_PARENT
from rocm_attn.kernels.sparse.arguments import Indexing, LastUnit
from rocm_attn.kernels.speculative.arguments import Accepted, Probabilities
from rocm_attn.paging.state_slots import require_state_slots
from rocm_attn.problem import KVEncoding, PoolKind, Problem, Scales
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.accepting import accept_drawn, accept_sampled, select_last_accepted, verified
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.step import Part
from tests.amd.host.test_stream_order import Streams
from tests.amd.tolerances import assert_attention_close
from tests.amd.worlds.compressed import layers
from tests.amd.worlds.problems import indexer, record_layer, small_problem
from tests.amd.worlds.problems import layer as indexed
from tests.amd.worlds.world import Request, World, page_zero_is_zero, take_back

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


@pytest.mark.fast(4, interpreted=0)
@each_pool
@each_page_size
def test_draft_extend_goes_on_from_what_only_the_device_has_accepted(
    provider: str, page_size: int, swa: bool, graphs: bool, device: torch.device
) -> None:
    """The host learns no count: its bounds grow by W per step, and rejected tokens' places are written again."""
    world = world_of(provider, device, page_size, swa=swa)
    requests = world.begun(5, 1, 8)
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
    for wrong in (given.float(), given[:1]):
        with pytest.raises(BadTensor, match=r"num_accepted is torch\.\w+ of shape"):
            select_last_accepted(rows, step, wrong)
    with pytest.raises(BadTensor, match="rows is a list; give a tensor"):
        select_last_accepted(rows.tolist(), step, given)  # type: ignore[arg-type]
    with pytest.raises(BadTensor, match="num_accepted is a list; give a tensor"):
        select_last_accepted(rows, step, given.tolist())  # type: ignore[arg-type]
    world.runtime.end_step()


def test_state_with_too_few_slots_is_refused_before_anything_is_captured(device: torch.device) -> None:
    """recipes#853: state slots fewer than the padded batch abort a capture."""
    runtime = world_of("torch", device, 4).runtime
    rows = runtime.options.num_rows
    conv, scan = torch.zeros(rows + 1, 3, device=device), torch.zeros(rows + 5, device=device)
    require_state_slots(runtime.table, conv=conv, scan=scan)
    with pytest.raises(BadTensor, match=rf"conv has {rows} entries; it must have {rows + 1}"):
        require_state_slots(runtime.table, conv=conv[1:], scan=scan)
    with pytest.raises(BadTensor, match="scan is a ndarray; give a tensor"):
        require_state_slots(runtime.table, conv=conv, scan=scan.cpu().numpy())  # type: ignore[arg-type]


def test_a_fully_masked_split_gives_zeros_and_no_nan(provider: str, device: torch.device) -> None:
    """aiter#4711, in verify: tokens that see only themselves among many keys, and one that sees none."""
    problem = replace(small_problem(custom_mask=True), wants_lse=True)
    world = World.build([problem], device, provider, num_pages=60, max_kv_len=160)
    (request,) = world.begun(130)
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


MASKED = small_problem(custom_mask=True)
LATENT = replace(MASKED, num_kv_heads=1, v_head_dim=8, pool=PoolKind.LATENT)
EIGHT_BITS = {
    scales: replace(MASKED, kv_encoding=KVEncoding.E4M3FN, kv_scales=scales) for scales in (Scales.LAYER, Scales.TOKEN)
}
POOLS: dict[str, tuple[list[Problem], int]] = {
    "hybrid": ([MASKED, replace(MASKED, window_left=6)], 40),
    "plain": ([MASKED, small_problem()], 0),
    "eight bits, by layer": ([EIGHT_BITS[Scales.LAYER]], 0),
    "eight bits, by token": ([EIGHT_BITS[Scales.TOKEN], MASKED], 0),
    "latent": ([LATENT], 0),
}
# Node -> parent; node 0 is the last token. The ids of nodes are 100 plus their number.
TREES = [[NO_PARENT, 0, 0, 1, 2, 2, 4], [NO_PARENT, 0, 1, 2, 3, 4, 5], [NO_PARENT, 0, 0, 0, 0, 0, 3]]
# The nodes of each accepted path, and the token that the model draws after its last node, which is no draft's.
PATHS = [[0, 2, 4, 6], [0, 1], [0]]
NEXT = [7, 8, 9]


def verify(world: World, requests: list[Request]) -> Accepted:
    """Stores random K and V of all nodes in every layer, accepts the paths, moves, and records the kept tokens."""
    device = world.runtime.device
    parents = torch.tensor(TREES, dtype=torch.int32, device=device)
    batch = world.batch(requests, [7] * 3)
    ids = torch.arange(100, 107, dtype=torch.int32).repeat(3).numpy()
    batch = replace(batch, token_ids=ids, mask=TreeMask(parents))
    step = world.runtime.step(batch).parts[0]
    drawn = torch.full_like(step.token_ids, -5)
    for seq, (path, last) in enumerate(zip(PATHS, NEXT, strict=True)):
        for node, after in zip(path, [*(100 + node for node in path[1:]), last], strict=True):
            drawn[7 * seq + node] = after
    olds = [request.kv_len for request in requests]
    for layer, problem in enumerate(world.problems):
        q, k, v = world.qkv(problem, step)
        world.remember(layer, requests, [7] * 3, k, v)
        step.layers.store_and_attend(layer, q, k, v, torch.empty_like(q[..., : problem.v_head_dim]))
    accepted = accept_drawn(drawn, verified(step, parents))
    world.runtime.move_accepted(accepted)
    world.runtime.end_step()
    for request, older, path in zip(requests, olds, PATHS, strict=True):
        keep = [*range(older), *(older + node for node in path)]
        request.k, request.v = [k[keep] for k in request.k], [v[keep] for v in request.v]
    return accepted


@pytest.mark.fast(interpreted=0)
@pytest.mark.parametrize(("problems", "swa_pages"), POOLS.values(), ids=POOLS)
def test_steps_after_a_tree_read_the_accepted_path_as_a_plain_row(
    problems: list[Problem], swa_pages: int, provider: str, device: torch.device
) -> None:
    """Every step is compared with attention over the kept tokens, in their order."""
    world = World.build(problems, device, provider, num_pages=80, swa_pages=swa_pages, swa_kept=8 if swa_pages else 0)
    serve_trees(world)


@pytest.mark.parametrize("scales", RECORDS, ids=lambda scales: scales.name)
def test_records_of_accepted_drafts_move_with_their_scales(scales: Scales, device: torch.device) -> None:
    """Masks over records are torch's alone."""
    problem = replace(record_layer(scales=scales), custom_mask=True)
    serve_trees(UnevenWorld.build([problem], device, "torch", num_pages=80))


class UnevenWorld(World):
    """A world whose tokens differ in size, so that the scales of neighbours differ."""

    def random(self, *shape: int) -> torch.Tensor:
        rows = super().random(*shape)
        return rows * 2.0 ** torch.randint(-3, 2, (shape[0], 1, 1), generator=self.generator).to(rows)


def serve_trees(world: World) -> None:
    """Serves trees of drafts, and steps after them."""
    requests = world.begun(9, 14, 1)
    older = [request.kv_len for request in requests]
    accepted = verify(world, requests)
    assert accepted.num_accepted[:3].tolist() == [len(path) - 1 for path in PATHS]
    assert accepted.next_token[:3].tolist() == NEXT
    assert accepted.kv_len[:3].tolist() == [a + len(path) for a, path in zip(older, PATHS, strict=True)]
    world.step(requests, [1, 1, 1])
    verify(world, requests)
    world.step(requests, [2, 3, 1])
    world.runtime.check_device()
    assert page_zero_is_zero(world)


def test_what_cannot_be_accepted_is_refused(provider: str, device: torch.device) -> None:
    world = World.build([MASKED], device, provider)
    requests = [world.admit()]
    batch = replace(world.batch(requests, [3]), mask=TreeMask(torch.tensor([[-1, 0, 0]]).int().to(device)))
    step = world.runtime.step(batch).parts[0]
    parents = torch.tensor([[-1, 0, 0]], device=device)
    with pytest.raises(BadTensor, match=r"parents is torch.int64 of shape \[1, 3\]"):
        verified(step, parents)
    with pytest.raises(BadTensor, match="trees have up to 0 nodes"):
        verified(step, parents.int()[:, :0])
    with pytest.raises(BadTensor, match="parents is on meta and the step on"):
        verified(step, parents.int().to("meta"))
    given = verified(step, parents.int())
    with pytest.raises(BadTensor, match=r"drawn is torch.int64 .* it must be torch.int32 \[\d+\], contiguous"):
        accept_drawn(torch.zeros(len(step.token_ids), dtype=torch.int64, device=device), given)
    rows = torch.zeros(len(step.token_ids), 9, device=device)
    uniform = torch.zeros(len(step.token_ids), device=device)
    with pytest.raises(
        BadTensor, match=r"draft is torch.float32 of shape \[\d+, 8\]; it must be torch.float32 \[\d+, 9"
    ):
        accept_sampled(Probabilities(rows, rows[:, :8], uniform, uniform), given)
    world.runtime.end_step()


def step_with_mask(world: World, request: Request, tokens: int) -> None:
    """Runs a step of one request that may be a verify step: it has a mask, in which every token sees all."""
    world.step([request], [tokens], visible=[torch.ones(tokens, request.kv_len + tokens, dtype=torch.bool)])


def one_path(world: World, request: Request) -> Accepted:
    """Returns the path 0, 2 of a tree of three nodes, which are the last tokens of a request."""

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=world.runtime.device)

    return Accepted.empty(1, 3, world.runtime.device)._replace(
        path=ints([0, 2, -1])[None], num_accepted=ints([1]), kv_len=ints([request.kv_len - 1])
    )


def test_paths_that_a_move_would_read_past_the_end_of_are_refused(device: torch.device) -> None:
    world = World.build([MASKED], device, "torch")
    request = world.admit()
    step_with_mask(world, request, 5)
    accepted = one_path(world, request)
    counts = accepted.num_accepted
    for wrong, named in (
        (accepted._replace(kv_len=counts[:0]), r"kv_len of a move is torch.int32 of shape \[0\]"),
        (accepted._replace(kv_len=counts.long()), "kv_len of a move is torch.int64"),
        (accepted._replace(num_accepted=counts.to("meta")), "num_accepted of a move is .* on meta"),
        (accepted._replace(path=accepted.path[0]), r"path of a move .* must be .* \[3, nodes\]"),
        (accepted._replace(path=accepted.path.repeat(1, 2)[:, ::2]), "path of a move .* must be .* contiguous"),
    ):
        with pytest.raises(BadTensor, match=named):
            world.runtime.move_accepted(wrong)
    world.runtime.move_accepted(accepted)


@pytest.mark.parametrize(
    ("problems", "what"),
    [
        ([indexed(indexer(Indexing(0.25, top=3, key_tokens=4, last_unit=LastUnit.ADDED)))], "an index key of layer 0"),
        (layers(), "a row of layer 1"),
    ],
)
def test_what_stands_for_several_tokens_does_not_move(problems: list[Problem], what: str, device: torch.device) -> None:
    options = RuntimeOptions(num_pages=20, max_num_seqs=2, max_kv_len=32, provider="torch")
    runtime = build_runtime(problems, options, device=device)
    with pytest.raises(Unsupported, match=f"{what} stands for several tokens, so it cannot follow one that moves"):
        runtime.core.moves.move(Accepted.empty(1, 3, device), torch.ones(1, dtype=torch.int32, device=device))


def test_paths_are_moved_in_the_rows_of_their_step_alone(device: torch.device) -> None:
    """A caller names places in the batch, never rows: no path leads to the K and V of another request."""
    world = World.build([MASKED], device, "torch")
    request, other = world.admit(), world.admit()
    world.step([other], [9])
    step_with_mask(world, request, 5)
    accepted = one_path(world, request)
    twice = Accepted(*(tensor.repeat_interleave(2, 0) for tensor in accepted))
    for seqs, given, named in (
        ([1], accepted, "sequences of the step"),
        ([-1], accepted, "sequences of the step"),
        ([0, 0], twice, "sequences of the step"),
        ([0, 1], accepted, "1 accepted paths for 2 sequences; give one each"),
        ([0.0], accepted, "seqs holds float64; it must hold integers"),
    ):
        with pytest.raises(BadBatch, match=named):
            world.runtime.move_accepted(given, seqs)  # type: ignore[arg-type]
    world.runtime.move_accepted(accepted, [0])


def test_the_moves_of_no_sequences_move_nothing(provider: str, device: torch.device) -> None:
    """All requests of a step may have ended by their texts, or it may be the step of an idle rank."""
    world = World.build([MASKED], device, provider)
    (request,) = world.begun(4)
    world.step([request], [3], visible=[torch.ones(3, 7, dtype=torch.bool)])
    world.runtime.move_accepted(Accepted.empty(0, 3, device), [])
    world.runtime.table.truncate(request.row, 5)
    request.k, request.v = [k[:5] for k in request.k], [v[:5] for v in request.v]
    world.step([request], [2])


def test_paths_of_both_halves_are_moved(device: torch.device) -> None:
    """They are as many as the sequences of a half, pads included."""
    world = World.build([MASKED], device, "torch")
    requests = world.begun(4, 4)
    parents = torch.tensor([[NO_PARENT, 0, 0]] * 2, dtype=torch.int32, device=device)
    batch = replace(world.batch(requests, [3, 3]), mask=TreeMask(parents))
    world.run_batch(requests, [3, 3], batch, 4, halves=True)
    paths = [one_path(world, request) for request in requests]
    world.runtime.move_accepted(Accepted(*(torch.cat(its) for its in zip(*paths, strict=True))))
    path = [0, 1, 2, 3, 4, 6]
    for request in requests:
        world.runtime.table.truncate(request.row, 6)
        request.k, request.v = [k[path] for k in request.k], [v[path] for v in request.v]
    world.step(requests, [2, 2])


def test_a_step_that_may_not_store_moves_nothing(device: torch.device) -> None:
    """Its new tokens lie in pages that another row reads too."""
    world = World.build([MASKED], device, "torch")
    (request,) = world.begun(7)
    child = world.fork(request, 7)
    rows = torch.tensor([child.row], dtype=torch.int32).numpy()
    before = world.runtime.pool.layer(0).k.clone()
    mask = TreeMask(torch.tensor([[NO_PARENT, 0, 0]], dtype=torch.int32, device=device))
    step = world.runtime.step(StepBatch(rows, [7], [3], mask=mask)).parts[0]
    q = world.random(step.token_ids.shape[0], 6, 16)
    step.layers.attend(0, q, torch.empty_like(q))
    for _ in range(2):
        with pytest.raises(BadBatch, match=f"would store token 4 of row {child.row} in a page that another row"):
            world.runtime.move_accepted(one_path(world, child))
        world.runtime.end_step()
    assert torch.equal(before.nan_to_num(), world.runtime.pool.layer(0).k.nan_to_num())


def test_nothing_is_moved_before_the_step_has_stored_in_every_layer(device: torch.device) -> None:
    """The other layers stored the drafts over what was moved."""
    world = World.build([MASKED, MASKED], device, "torch")
    (request,) = world.begun(5)
    world.runtime.table.reserve(request.row, 8)
    mask = TreeMask(torch.tensor([[NO_PARENT, 0, 0]], dtype=torch.int32, device=device))
    with world.runtime.step(StepBatch([request.row], [8], [3], mask=mask)) as step:
        for layer in range(2):
            with pytest.raises(WrongState, match="has not stored in every layer; move them once it has"):
                world.runtime.move_accepted(one_path(world, request))
            k = world.random(len(step.parts[0].token_ids), 2, 16)
            step.parts[0].layers.store(layer, k, k)
        world.runtime.move_accepted(one_path(world, request))


def test_a_move_on_another_stream_comes_between_its_step_and_the_next_one() -> None:
    world = World.build([MASKED], torch.device("cpu"), "torch")
    streams = world.runtime.gate._streams._streams = Streams()
    request = world.admit()
    step_with_mask(world, request, 5)
    streams.now = 7
    accepted = one_path(world, request)
    world.runtime.move_accepted(accepted._replace(num_accepted=torch.zeros_like(accepted.num_accepted)))
    assert streams.take_log() == ["7 waits for 0"]
    streams.now = 0
    world.step([request], [1])
    assert streams.take_log() == ["0 waits for 7"]


def test_what_was_accepted_is_moved_once_and_while_its_rows_are_its_own(device: torch.device) -> None:
    world = World.build([MASKED], device, "torch")
    request, runtime = world.admit(), world.runtime
    step_with_mask(world, request, 8)
    runtime.move_accepted(one_path(world, request))
    with pytest.raises(WrongState, match="they were moved already"):
        runtime.move_accepted(one_path(world, request))
    for change in (runtime.table.free, lambda row: runtime.table.fork(row, 2)):  # it would write to the fork's pages
        request = world.admit()
        step_with_mask(world, request, 3)
        change(request.row)
        with pytest.raises(WrongState, match=f"row {request.row} was freed, cut, forked or kept since"):
            runtime.move_accepted(one_path(world, request))


def test_a_fork_that_is_refused_leaves_what_was_accepted_to_be_moved(device: torch.device) -> None:
    """Its tokens were lost if only the device knows the lengths: the row counted as forked."""
    world = World.build([MASKED], device, "torch", max_num_seqs=1)
    (request,) = world.begun(5)
    table = world.runtime.table
    table.reserve(request.row, 8)
    inputs = DeviceInputs(kv_len=torch.tensor([8], dtype=torch.int32, device=device))
    mask = TreeMask(torch.tensor([[NO_PARENT, 0, 0]], dtype=torch.int32, device=device))
    with world.runtime.step(StepBatch([request.row], [8], [3], inputs=inputs, mask=mask)) as step:
        k = world.random(len(step.parts[0].token_ids), 2, 16)
        step.parts[0].layers.store(0, k, k)
    with pytest.raises(OutOfRows):
        table.fork(request.row, 5)
    world.runtime.move_accepted(one_path(world, request))


def test_what_was_accepted_is_not_moved_after_the_row_has_another_request(device: torch.device) -> None:
    """The last step is the other request's prompt by then, whose tokens must not move."""
    world = World.build([MASKED], device, "torch")
    (request,) = world.begun(5)
    step_with_mask(world, request, 5)
    stale = one_path(world, request)
    world.free(request)
    other = world.admit()
    assert other.row == request.row
    world.step([other], [11])
    with pytest.raises(WrongState, match="the last step has stored no trees of drafts"):
        world.runtime.move_accepted(stale)
    world.step([other], [1])


def test_rows_that_go_or_are_kept_meanwhile_leave_the_moves_of_others_alone(device: torch.device) -> None:
    """An engine does this: a prefix cache keeps known pages, and one of the step's requests has ended by its text."""
    world = World.build([MASKED], device, "torch")
    requests = world.begun(4, 4)
    world.step(requests, [3, 3], visible=[torch.ones(3, 7, dtype=torch.bool)] * 2)
    stays, goes = requests
    accepted = one_path(world, stays)
    world.runtime.table.kept.keep(stays.row, 0, 1)
    world.free(goes)
    with pytest.raises(WrongState, match=f"row {goes.row} was freed, cut, forked or kept since"):
        world.runtime.move_accepted(Accepted(*(tensor.repeat_interleave(2, 0) for tensor in accepted)))
    world.runtime.move_accepted(accepted, [0])
    world.runtime.table.truncate(stays.row, 6)
    path = [0, 1, 2, 3, 4, 6]
    stays.k, stays.v = [k[path] for k in stays.k], [v[path] for v in stays.v]
    world.step([stays], [2])
