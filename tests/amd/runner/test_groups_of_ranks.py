"""Ranks over process groups that are not all ranks, and what is no group of this rank."""

from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from rocm_attn.errors import BadSetting
from rocm_serve.ranks import RanksOfGroup
from tests.amd.ranks import on_every_rank


def of_unequal_groups(rank: int) -> list[str]:
    """Rank 0 is in a group more than rank 1, as the first rank of each replica is in a group of these."""
    others = dist.new_group([0])
    world, said = dist.group.WORLD, []
    assert world is not None
    # Ranks that do not find each other fail, instead of waiting for half an hour.
    with mock.patch.object(dist.distributed_c10d, "default_pg_timeout", timedelta(seconds=20)):
        for _ in range(2):
            ranks = RanksOfGroup(world)
            said.append(f"{ranks.shard.rank} {ranks.least(5 + rank)} {ranks.sum(torch.ones(1)).item():g}")
    if rank == 0:
        ranks = RanksOfGroup(others)
        said.append(f"{ranks.shard.rank} of {ranks.shard.num_ranks}: {ranks.least(7)}")
        gone = dist.new_group([0], use_local_synchronization=True)
        dist.destroy_process_group(gone)
        others = gone
    with pytest.raises(BadSetting, match=r"this rank is in; give the result of dist\.new_group"):
        RanksOfGroup(others)
    return said


def test_ranks_in_unequal_numbers_of_groups_share_a_model(tmp_path: Path) -> None:
    assert on_every_rank(of_unequal_groups, tmp_path) == [["0 5 2", "0 5 2", "0 of 1: 7"], ["1 5 2", "1 5 2"]]


def test_what_is_no_group_is_refused() -> None:
    """So is the group of all ranks before there are any."""
    for none in (dist.group.WORLD, [0, 1]):
        with pytest.raises(BadSetting, match=r"after dist.init_process_group\(\)"):
            RanksOfGroup(none)  # type: ignore[arg-type]
