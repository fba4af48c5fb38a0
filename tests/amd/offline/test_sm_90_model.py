"""Kernels of a model on sm_90 start early, and wait before they read what an earlier launch writes."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from rocm_attn.kernels.model.add_norm import launch_add_norm
from rocm_attn.kernels.model.gate import SILU, GateForm, launch_gate
from rocm_attn.kernels.model.gated_rows import launch_gated_rows
from rocm_attn.kernels.model.row_product import launch_row_product
from tests.amd.offline.early_launches import assert_waits
from tests.amd.offline.matrix import Row, launch_all
from tests.amd.offline.offline_driver import compiled_by, last_compiled_by


def _launch_all() -> None:
    rows, matrix = torch.empty(2, 2048, dtype=torch.bfloat16), torch.empty(4096, 4096, dtype=torch.bfloat16)
    launch_add_norm(rows, rows, rows[0], rows, rows, factor=1.0, eps=1e-5)
    launch_gate(rows, torch.empty(2, 1024, dtype=rows.dtype), GateForm(SILU))
    launch_gated_rows(matrix[:2], matrix, rows, GateForm(SILU))
    launch_row_product(matrix[:1], matrix, None, matrix[1:2])


@pytest.mark.fast
def test_kernels_of_a_model_wait() -> None:
    """Norms and products of one row load weights before they wait, which no launch of a step writes."""
    kernels = {kernel.metadata.name: kernel for kernel in compiled_by(_launch_all, "sm_90")}
    assert kernels.keys() == {"_add_norm_kernel", "_gate_kernel", "_gated_rows_kernel", "_row_product_kernel"}
    for name, kernel in kernels.items():
        assert_waits(kernel, reads_before=name in ("_add_norm_kernel", "_row_product_kernel"))
        ptx = kernel.asm["ptx"]
        assert ptx.index("griddepcontrol.wait") < ptx.index("griddepcontrol.launch_dependents")


def test_the_store_of_keys_reads_nothing_before_it_waits() -> None:
    row, name = Row("sm_90", (8, 2), (64, 64), torch.bfloat16, 16), "_rope_store_kernel"
    assert_waits(last_compiled_by(partial(launch_all, row), row.arch, {name})[name], reads_before=False)


def test_no_launch_starts_early_elsewhere() -> None:
    for arch in ("sm_80", "gfx942"):
        for kernel in compiled_by(_launch_all, arch):
            assert not getattr(kernel.metadata, "launch_pdl", False)
