"""Steps of a world of which the host knows bounds alone; the device knows the lengths."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from rocm_attn.batch.inputs import DeviceInputs, Inputs
from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch
from tests.amd.worlds.world import Request, World


def run_within_bounds(
    world: World,
    requests: Sequence[Request],
    q_len: Sequence[int],
    *,
    kv_room: Sequence[int] | None = None,
    q_room: Sequence[int] | None = None,
    inputs: Callable[[list[int]], Inputs] | None = None,
) -> None:
    """Runs world.run(requests, q_len), but the host knows only bounds.

    kv_room, q_room: distance of the bounds above kv_len and q_len, at least as much for kv_len; 0 if not given
    inputs:          kv_len -> the device's inputs; not given: the lengths. No graph takes such inputs by itself
    """
    none = [0] * len(requests)
    kv_len = [request.kv_len + new for request, new in zip(requests, q_len, strict=True)]
    rows = np.array([request.row for request in requests], np.int32)
    kv_bound = np.array(kv_len, np.int32) + np.array(kv_room or none, np.int32)
    q_bound = np.array(q_len, np.int32) + np.array(q_room or none, np.int32)
    world.runtime.table.reserve_all(rows, kv_bound)
    given = lengths_on_device(world, kv_len) if inputs is None else inputs(kv_len)
    world.run_batch(requests, q_len, StepBatch(rows, kv_bound, q_bound, NO_TOKEN_IDS, inputs=given))


def lengths_on_device(world: World, kv_len: Sequence[int]) -> DeviceInputs:
    return DeviceInputs(kv_len=torch.tensor(list(kv_len), dtype=torch.int32, device=world.runtime.device))
