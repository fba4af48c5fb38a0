"""Ranks: the collectives of ranks that share a model by tensor parallelism.

Each rank holds a Shard of the model, and runs the same steps as all others, at the same time and in the same order.
Sums and gathered values are bitwise the same on all of them, so they sample the same tokens without further exchange.
"""

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

from rocm_attn.errors import BadSetting
from rocm_attn.machine.agreement import Agreement, OnWait, all_gather_into, alone, among, say_who_waits
from rocm_attn.models.shards import WHOLE, Shard
from rocm_serve.peer_sums import small_sums


class Ranks:
    """The ranks that share a model, as one of them sees them. These are of a model that is not shared.

    shard: this rank's part
    agree: how they agree on kernels, graphs and faults
    """

    shard: Shard = WHOLE
    agree: Agreement = alone

    def sum(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, in place (all-reduce). The order of summation may depend on the size of x.

        Sums of one rank must not run on two streams at the same time.
        """
        return x

    def sum_in_order(self, x: Tensor) -> Tensor:
        """The same in the order of ranks, from 0 up, in float32: an element's result depends on no other element."""
        return x

    def gathered(self, x: Tensor) -> Tensor:
        """[rows, num_ranks * columns]: every rank's x [rows, columns], from rank 0 up (all-gather)."""
        return x

    def least(self, number: int) -> int:
        """The smallest of every rank's number, on the host."""
        return self.least_of_each([number])[0]

    def least_of_each(self, numbers: list[int]) -> list[int]:
        """In each place the smallest of every rank's number, on the host."""
        return numbers


ONE_RANK = Ranks()


class RanksOfGroup(Ranks):
    """Ranks over a process group of torch.distributed. All ranks of the group must construct it at the same time.

    Agreement uses another group, over Gloo, so that a rank that hangs in a collective of the model is not mistaken for
    one that agrees.
    group:   exactly the ranks that share the model, with a backend for the model's device: NCCL (RCCL on ROCm) or Gloo
    on_wait: see agreement.among

    Raises BadSetting for a group that this rank is not in, or that was destroyed.
    """

    def __init__(self, group: dist.ProcessGroup, on_wait: OnWait = say_who_waits) -> None:
        if not isinstance(group, dist.ProcessGroup) or group not in dist.distributed_c10d._world.pg_map:
            raise BadSetting(
                f"group is {group!r:.80}, and no process group that this rank is in; give the result of "
                "dist.new_group(), or dist.group.WORLD, after dist.init_process_group()"
            )
        self.shard = Shard(group.rank(), group.size())
        self._host = _host_group(group)
        self.agree = among(self._host, on_wait)
        self._group = group
        self._small = small_sums(group, self._collected, self.least)

    def sum(self, x: Tensor) -> Tensor:
        if self._small.serves(x):
            self._small.add_up(x)
        else:
            dist.all_reduce(x, group=self._group)
        return x

    def sum_in_order(self, x: Tensor) -> Tensor:
        if not self._small.serves(x):
            return self._collected(x)
        self._small.add_up(x)
        return x

    def _collected(self, x: Tensor) -> Tensor:
        """The sum in order, of values that a collective has sent."""
        first, *others = self._all(x)
        total = first.float() if x.element_size() < 4 else first
        for other in others:
            total += other
        return total.to(x.dtype)

    def gathered(self, x: Tensor) -> Tensor:
        return torch.cat(self._all(x), -1)

    def least_of_each(self, numbers: list[int]) -> list[int]:
        least = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self._host)
        found: list[int] = least.tolist()
        return found

    def _all(self, x: Tensor) -> list[Tensor]:
        """Every rank's x."""
        x = x.contiguous()
        rows = x.shape[0]
        everything = torch.empty((self.shard.num_ranks * rows, *x.shape[1:]), dtype=x.dtype, device=x.device)
        all_gather_into(everything, x, group=self._group)
        return list(torch.split(everything, rows))


# Name of a group -> how often _host_group() was called for it.
_CALLS = Counter[str]()


def _host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group over Gloo of the same ranks.

    torch names it by its ranks and by how many groups a rank is in, and a rank waits for others with the same name. So
    that the names are equal, ranks in fewer groups join groups of themselves alone.
    """
    groups = dist.distributed_c10d._world.pg_names
    store, call = dist.distributed_c10d._get_process_group_store(group), _CALLS[group.group_name]
    store.set(f"groups of {group.rank()} at {call}", str(len(groups)))
    most = max(int(store.get(f"groups of {rank} at {call}")) for rank in range(group.size()))
    while len(groups) < most:
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    host: dist.ProcessGroup = dist.new_group(
        dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True
    )
    _CALLS[group.group_name] += 1
    return host
