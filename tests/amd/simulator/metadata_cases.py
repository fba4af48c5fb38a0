"""The kernels that publish and derive a step's index tensors, on a simulated arch, word by word against their twins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rocm_attn.kernels.metadata.fill import launch_fill
from rocm_attn.kernels.metadata.page_lists import launch_block_table, launch_page_indptr, launch_page_list
from rocm_attn.kernels.metadata.publish import launch_publish
from rocm_attn.kernels.metadata.table_update import launch_table_update
from rocm_attn.kernels.refs import metadata as twins
from tests.amd.simulator.case import KernelCase
from tests.amd.simulator.driver import Simulation, simulated

GARBAGE = 0x7F7F7F7F
PAGE_SIZE = 4

# Three sequences and two padded ones; rows of the table are 1 to 3, row 0 is all page 0.
KV_LEN, Q_LEN, ROWS = [13, 300, 4, 0, 0], [3, 290, 1, 0, 0], [2, 3, 1, 0, 0]
NUM_SEQS, NUM_TOKENS, PADDED_TOKENS = 3, 294, 300


def _ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _table() -> Tensor:
    table = 1 + torch.randperm(4 * 80, generator=torch.Generator().manual_seed(0)).view(4, 80).int()
    table[0] = 0
    return table


def _slot() -> Tensor:
    """The words of a ring slot, token ids included, and garbage behind them."""
    seqs = [value for values in (ROWS, KV_LEN, Q_LEN) for value in values[:NUM_SEQS]]
    return _ints(NUM_SEQS, NUM_TOKENS, 41, 1, *seqs, *range(1000, 1000 + NUM_TOKENS), *[GARBAGE] * 9)


def _updates() -> Tensor:
    """More cells than a program takes, row 0 among them."""
    cells = torch.randperm(33 * 40, generator=torch.Generator().manual_seed(0))[:300]
    return torch.stack([cells // 40, cells % 40, torch.arange(300)], 1).int().view(-1)


@dataclass(frozen=True, slots=True)
class _Launch:
    """A launcher and its twin, called with inputs, then outputs that hold garbage beforehand.

    outputs:  shapes; int32, but for shapes in int64
    options:  keyword arguments
    """

    launch: Callable[..., None]
    twin: Callable[..., None]
    inputs: Sequence[Tensor]
    outputs: Sequence[tuple[int, ...]]
    options: dict[str, int]
    int64: Sequence[int] = ()


def _launches() -> dict[str, _Launch]:
    seqs, padded = len(KV_LEN), len(KV_LEN)
    rows, kv_len, q_len, table = _ints(*ROWS), _ints(*KV_LEN), _ints(*Q_LEN), _table()
    counts = _ints(NUM_SEQS, NUM_TOKENS, 41, 0)
    by_page = {"page_size": PAGE_SIZE}
    return {
        "publish": _Launch(
            launch_publish,
            twins.publish,
            [_slot()],
            [(4,), *[(padded,)] * 3, (PADDED_TOKENS,)],
            {"pad_kv_len": 1, "pad_q_len": 0},
        ),
        "table_update": _Launch(
            launch_table_update, twins.table_update, [_updates()], [(33, 40)], {"num_updates": 300}
        ),
        "fill": _Launch(
            launch_fill,
            twins.fill,
            [counts, rows, kv_len, q_len, table],
            [(seqs + 1,), (seqs,), (PADDED_TOKENS,), (PADDED_TOKENS,)],
            by_page,
        ),
        "page_indptr": _Launch(
            launch_page_indptr, twins.page_indptr, [kv_len], [(seqs + 1,), (seqs,), (seqs,)], by_page, int64=(2,)
        ),
        "page_list": _Launch(
            launch_page_list, twins.page_list, [rows, kv_len, table], [(90,)], {**by_page, "programs_per_seq": 2}
        ),
        "block_table": _Launch(launch_block_table, twins.block_table, [rows, kv_len, table], [(seqs, 90)], by_page),
    }


def run_launch(arch: str, name: str) -> Simulation:
    """The kernel on arch and its twin, with the same inputs: the same words."""
    case = _launches()[name]
    outputs = [
        [
            torch.full(shape, GARBAGE, dtype=torch.int64 if index in case.int64 else torch.int32)
            for index, shape in enumerate(case.outputs)
        ]
        for _ in range(2)
    ]
    with simulated(arch) as simulation:
        case.launch(*case.inputs, *outputs[0], **case.options)
    case.twin(*case.inputs, *outputs[1], **case.options)
    for index, (written, expected) in enumerate(zip(*outputs, strict=True)):
        assert torch.equal(written, expected), f"output {index} of {name}"
    return simulation


def metadata_cases(arch: str) -> list[KernelCase]:
    """A case for each launcher of kernels/metadata."""
    return [KernelCase(name, arch, partial(run_launch, arch, name)) for name in _launches()]
