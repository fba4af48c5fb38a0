"""The mask of drafts that are verified, in memory of our backend for SGLang; replays allocate none."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.errors import NeverFits
from rocm_attn.external import ExternalAttention
from rocm_attn.integrations.sglang.drafts import DraftSteps
from rocm_attn.integrations.sglang.hooks import AttentionHooks
from tests.amd.integrations.oracle import Array
from tests.amd.integrations.sglang_stand_in import Engine, Graph, Mode, Request

DRAFTS = 3


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # as torch has it
    """Records names of operations whose results are in new memory, which none of their arguments has."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as torch has it
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known, new = (
            {each.untyped_storage().data_ptr() for each in tree_leaves(tree) if isinstance(each, torch.Tensor)}
            for tree in ((args, kwargs), out)
        )
        self.made += [str(func)] * len(new - known)
        return out


@contextmanager
def no_allocation(device: torch.device) -> Iterator[None]:
    """Checks that a GPU allocates nothing, and other devices only in torch twins of kernels, which begin() launches."""
    if device.type == "cuda":
        name = "allocation.all.allocated"
        before = torch.cuda.memory_stats(device)[name]
        yield
        assert torch.cuda.memory_stats(device)[name] == before
        return
    with patch.object(ExternalAttention, "begin"), Allocations() as found:
        yield
    assert found.made == []


def chains_and_branches(requests: Sequence[Request]) -> Callable[[int], Array]:
    """Returns the keys that drafts see: all earlier ones, the first draft, and themselves."""
    before = [request.kv_len for request in requests]

    def cells(number: int) -> Array:
        seen = np.zeros((DRAFTS, before[number] + DRAFTS))
        seen[:, : before[number] + 1] = 1
        seen[np.arange(DRAFTS), before[number] + np.arange(DRAFTS)] = 1
        return seen

    return cells


@pytest.fixture
def engine(provider: str, device: torch.device) -> Engine:
    """Returns an engine with graphs of up to 4 sequences whose drafts are trees."""
    made = Engine(provider, device, with_trees=True, draft_tokens=DRAFTS)
    made.hooks.init_cuda_graph_state(4, 4 * DRAFTS)
    return made


def test_a_mask_that_is_written_in_place_is_read_there_in_every_replay(engine: Engine) -> None:
    requests = [engine.admit() for _ in range(3)]
    engine.run(Mode.EXTEND, requests, [9, 2, 5])
    memory = engine.hooks.mask_cells
    assert memory is not None
    graph = Graph(engine, 4, width=DRAFTS, mode=Mode.TARGET_VERIFY, topk=2)
    for batch in (requests[:2], requests, requests[2:]):
        memory.fill_(True)  # left by SGLang's kernel in an earlier step
        graph.replay(batch, mask=chains_and_branches(batch), into=memory)
    graph.replay(requests[:1], mask=chains_and_branches(requests[:1]))  # drafts of n-grams, in memory of their own
    engine.hooks.attention.check_device()


def test_halves_of_an_overlapped_batch_read_their_parts_of_its_mask_in_graphs_of_their_own(engine: Engine) -> None:
    """SGLang writes the mask to the memory of the whole batch's backend, and passes each half a part of it."""
    whole, requests = engine.hooks, [engine.admit() for _ in range(3)]
    engine.run(Mode.EXTEND, requests, [9, 2, 5])
    graphs = []
    for _ in range(2):
        engine.hooks = AttentionHooks(engine.runner, engine.serving)
        engine.hooks.init_cuda_graph_state(4, 4 * DRAFTS)
        graphs.append((engine.hooks, Graph(engine, 2, width=DRAFTS, mode=Mode.TARGET_VERIFY, topk=2)))
    cells, first = whole.mask_cells, 0
    assert cells is not None
    for (engine.hooks, graph), half in zip(graphs, (requests[:1], requests[1:]), strict=True):
        mask, count = chains_and_branches(half), sum(DRAFTS * (each.kv_len + DRAFTS) for each in half)
        graph.replay(half, mask=mask, into=cells[first:], says_padding=False)
        engine.hooks.attention.check_device()
        first += count


def test_a_mask_without_room_is_refused(engine: Engine, device: torch.device) -> None:
    one = engine.admit()
    engine.run(Mode.EXTEND, [one], [3])
    batch = engine.batch(Mode.TARGET_VERIFY, [one], [DRAFTS], num_padding=0)
    cells = engine.hooks.mask_cells
    assert cells is not None
    batch.spec_info.topk = 2
    batch.spec_info.custom_mask = torch.ones(cells.numel() + 1, dtype=torch.bool, device=device)
    with pytest.raises(NeverFits, match=f"has {cells.numel() + 1} cells, and graphs have {cells.numel()}"):
        engine.hooks.init_forward_metadata_out_graph(batch)


@pytest.mark.fast
@pytest.mark.parametrize("says_padding", [True, False])
@pytest.mark.parametrize("mode", [Mode.DECODE, Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND_V2])
def test_a_replay_allocates_nothing(mode: Mode, says_padding: bool, engine: Engine, device: torch.device) -> None:
    requests = [engine.admit() for _ in range(3)]
    engine.run(Mode.EXTEND, requests, [9, 2, 5])
    is_tree = mode is Mode.TARGET_VERIFY
    graph = Graph(engine, 4, width=1 if mode is Mode.DECODE else DRAFTS, mode=mode, topk=2 if is_tree else 1)
    mask: dict[str, Any] = {"mask": chains_and_branches(requests), "into": engine.hooks.mask_cells} if is_tree else {}
    graph.replay(requests, says_padding=says_padding, **mask)
    with no_allocation(device):
        engine.hooks.init_forward_metadata_out_graph(graph.view)


@pytest.mark.parametrize("topk", [1, 2])
def test_a_replay_of_draft_steps_allocates_nothing(topk: int, engine: Engine, device: torch.device) -> None:
    steps = DraftSteps(engine.runner, topk, 3, engine.serving, AttentionHooks)
    steps.init_cuda_graph_state(2, 2 * topk)
    batch = engine.batch(Mode.DECODE, [engine.admit(), engine.admit()], [4, 2])
    steps.init_forward_metadata_out_graph(batch, in_capture=True)
    with no_allocation(device):
        steps.init_forward_metadata_out_graph(batch)


def test_a_step_of_more_sequences_than_were_built_for_is_refused(engine: Engine) -> None:
    one = engine.admit()
    batch = engine.batch(Mode.TARGET_VERIFY, [one], [DRAFTS])
    batch.batch_size = 99
    batch.req_pool_indices = batch.req_pool_indices.repeat(99)
    batch.seq_lens = batch.seq_lens.repeat(99)
    with pytest.raises(NeverFits, match="99 sequences and the most is"):
        engine.hooks.init_forward_metadata(batch)


def test_chains_of_drafts_are_verified_by_kernels_for_verify_steps(
    kinds: list[StepKind], provider: str, device: torch.device
) -> None:
    engine = Engine(provider, device, draft_tokens=4)
    requests = [engine.admit() for _ in range(3)]
    engine.run(Mode.EXTEND, requests, [9, 2, 5])
    engine.run(Mode.TARGET_VERIFY, requests[:2], [3, 3])
    engine.run(Mode.DRAFT_EXTEND_V2, requests, [2, 2, 2])
    engine.run(Mode.MIXED, requests, [1, 4, 1])
    engine.hooks.init_cuda_graph_state(4, 16)
    verify = Graph(engine, 4, width=4, mode=Mode.TARGET_VERIFY)
    for batch in (requests, requests[2:], requests[:2]):
        verify.replay(batch)
    assert kinds == [StepKind.EXTEND, *[StepKind.VERIFY] * 7]
    engine.run(Mode.TARGET_VERIFY, requests, [5, 5, 5])
    engine.run(Mode.DECODE, requests, [1, 1, 1])
    assert kinds[8:] == [StepKind.EXTEND, StepKind.DECODE]
    engine.hooks.attention.check_device()


@pytest.mark.parametrize("padded", [7, 9])
def test_sequences_may_verify_different_numbers_of_drafts(padded: int, device: torch.device, provider: str) -> None:
    """DSpark's compact mode verifies as many drafts of a sequence as are likely to be accepted, eagerly."""
    engine = Engine(provider, device, draft_tokens=4, windows=(-1, 4))
    requests = [engine.admit() for _ in range(3)]
    engine.run(Mode.EXTEND, requests, [5, 9, 2])
    for new in ([2, 4, 1], [1, 2, 4]):
        batch = engine.batch(Mode.TARGET_VERIFY, requests, new)
        batch.spec_info.ragged_verify_layout = SimpleNamespace(verify_lens=engine.ints(new).int())
        step = engine.step_of(batch, new, padded)
        engine.hooks.init_forward_metadata(step.batch)
        engine.finish(requests, step)
        engine.hooks.attention.check_device()
        requests[1].kv_len -= 1
