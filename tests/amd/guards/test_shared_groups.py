"""Groups of sequences that share prefixes: a step has its own, whatever an earlier step has left in memory."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rocm_attn.batch.prefixes import PrefixGroup, SharedPrefixes
from rocm_attn.guards.registry import GUARDS, Guards
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.providers.launches import StepOps
from tests.amd.guards.test_poisoned_memory import fill_with_nan
from tests.amd.guards.ways import both_ways
from tests.amd.worlds.world import ALL_ON, Request, World, is_right

# Groups of five requests that share 12 tokens in pages of 4; large steps come before small ones.
GROUPS = (
    [PrefixGroup(5, 12)],
    [PrefixGroup(1, 0), PrefixGroup(2, 8)],
    [PrefixGroup(2, 4), PrefixGroup(3, 12)],
    [PrefixGroup(1, 12)],
    [PrefixGroup(2, 12), PrefixGroup(1, 0), PrefixGroup(1, 12), PrefixGroup(1, 8)],
)


def family(device: torch.device, provider: str, graphs: bool, guards: Guards = ALL_ON) -> tuple[World, list[Request]]:
    """Returns five requests that share 12 tokens and have more of their own."""
    serving = World.one_layer(device, guards, graphs=graphs, provider=provider, shared_prefixes=True)
    (root,) = serving.begun(12)
    requests = [root, *(serving.fork(root, 12) for _ in range(4))]
    serving.step(requests, [2, 1, 3, 1, 4])
    return serving, requests


def groups_once(ops: StepOps) -> StepOps:
    """Derives starts of groups and the lengths after their prefixes once per size, and keeps them."""
    kept: dict[int, list[Tensor]] = {}

    def fill(step: StepTensors, *, page_size: int, window_left: int, chunk: int) -> None:
        ops.fill(step, page_size=page_size, window_left=window_left, chunk=chunk)
        derived = [step.group_indptr, step.suffix_kv_len, step.suffix_page]
        if step.group_indptr.numel():
            first = kept.setdefault(len(step.kv_len), [tensor.clone() for tensor in derived])
            for tensor, value in zip(derived, first, strict=True):
                tensor.copy_(value)

    return replace(ops, fill=fill)


@both_ways
def test_the_groups_of_an_earlier_step_do_not_stay(graphs: bool, provider: str, device: torch.device) -> None:
    def regrouped(guards: Guards) -> tuple[World, list[Request]]:
        serving, requests = family(device, provider, graphs, guards)
        run_shared(serving, requests[:3], GROUPS[1])
        run_shared(serving, requests[:3], [PrefixGroup(3, 12)])
        return serving, requests[:3]

    (full_refresh,) = (guard for guard in GUARDS if guard.id == "full_refresh")
    serving, requests = regrouped(ALL_ON)
    serving.check_step(requests, [1, 1, 1])
    serving, requests = regrouped(full_refresh.put_in(ALL_ON, groups_once))
    assert not is_right(serving, requests, [1, 1, 1])


def run_shared(serving: World, requests: Sequence[Request], groups: Sequence[PrefixGroup]) -> None:
    """Runs one decode step by shared prefixes."""
    new = [1] * len(requests)
    serving.run_batch(requests, new, replace(serving.batch(requests, new), prefixes=SharedPrefixes(groups)))


def serve(device: torch.device, provider: str, graphs: bool, before: Callable[[World], None]) -> list[Tensor]:
    """Returns outputs and log-sum-exps of steps in GROUPS, and the first again. before: called ahead of each step"""
    serving, requests = family(device, provider, graphs)
    results = []
    for groups in (*GROUPS, GROUPS[0]):
        before(serving)
        members = requests[: sum(group.num_seqs for group in groups)]
        run_shared(serving, members, groups)
        serving.check_step(members, [1] * len(members))
        results += [tensor[: len(serving.places)].clone() for tensor in (serving.out, serving.lse)]
    assert serving.runner.counters.replays == (len(GROUPS) + 1 if graphs else 0)
    serving.runtime.check_device()
    return results


@both_ways
def test_a_step_that_shares_writes_all_that_it_reads(graphs: bool, provider: str, device: torch.device) -> None:
    """Covers index buffers, schedules and workspace, prefix outputs included, of graphs and of eager steps."""

    def poison(serving: World) -> None:
        for part in (serving.runtime.core.memory._sealed, serving.runtime.core.memory._open):
            for name, tensor in part.tensors().items():
                if name != "counts":
                    fill_with_nan(tensor)

    clean = serve(device, provider, graphs, lambda serving: None)
    poisoned = serve(device, provider, graphs, poison)
    assert all(torch.equal(one, other) for one, other in zip(clean, poisoned, strict=True))
