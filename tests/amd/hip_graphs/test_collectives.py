"""Collectives among recorded operations: a replay repeats them with the other ranks, and waits for them."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from rocm_attn.hip_graphs.fake_recorder import FakeRecorder
from rocm_attn.kernels.launch import observe_launches
from tests.amd.ranks import NUM_RANKS, on_every_rank


def _all() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def all_reduce(x: Tensor) -> Tensor:
    y = x * 2
    dist.all_reduce(y)
    return y + 1


def all_reduce_that_is_waited_for_later(x: Tensor) -> Tensor:
    y = x * 2
    work = dist.all_reduce(y, async_op=True)
    z = x + 5
    assert work is not None
    work.wait()
    return y + z


def all_gather(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(NUM_RANKS)]
    dist.all_gather(parts, x * 3)
    return torch.cat(parts)


def broadcast(x: Tensor) -> Tensor:
    y = x * 3
    dist.broadcast(y, 1)
    return y


def send_and_receive(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    if dist.get_rank() == 0:
        dist.send(x * 7, 1)
        dist.recv(y, 1)
    else:
        dist.recv(y, 0)
        dist.send(x * 9, 0)
    return y


def functional_all_reduce(x: Tensor) -> Tensor:
    y = functional.all_reduce(x * 2, "sum", _all())
    result: Tensor = y + 1
    return result


def functional_all_reduce_that_is_returned(x: Tensor) -> Tensor:
    result: Tensor = functional.all_reduce(x * 2, "sum", _all())
    return result


def functional_all_gather(x: Tensor) -> Tensor:
    ops = torch.ops._c10d_functional
    y = ops.wait_tensor(ops.all_gather_into_tensor(x * 2, NUM_RANKS, _all().group_name))
    result: Tensor = y * 2
    return result


BODIES: tuple[Callable[[Tensor], Tensor], ...] = (
    all_reduce,
    all_reduce_that_is_waited_for_later,
    all_gather,
    broadcast,
    send_and_receive,
    functional_all_reduce,
    functional_all_reduce_that_is_returned,
    functional_all_gather,
)


def replayed(rank: int) -> list[str]:
    """Returns names of the bodies whose replays equal eager runs, with other values than the recorded ones."""
    right = []
    for body in BODIES:
        x = torch.arange(4.0) + rank
        recording, out = FakeRecorder(observe_launches).record(lambda body=body, x=x: body(x))  # type: ignore[misc]
        same = True
        for values in (torch.arange(4.0) * 5 + 10 * rank, torch.ones(4) * (rank + 1)):
            x.copy_(values)
            recording.replay()
            same &= torch.equal(out, body(x + 0) + 0)
        right += [body.__name__] * same
    return right


def test_a_replay_does_collectives_again(tmp_path: Path) -> None:
    names = [body.__name__ for body in BODIES]
    assert on_every_rank(replayed, tmp_path) == [names, names]
