"""MoE matrix products: each token with the matrices of its experts, on a GPU and on a CPU."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from rocm_attn.kernels.experts.groups import ExpertGroups
from rocm_attn.kernels.launch import run_as_launch
from rocm_attn.kernels.refs.experts import expert_product
from rocm_attn.kernels.tuning.expert_tiles import expert_tiles
from rocm_attn.machine.target import detect_target


def expert_products(
    x: Tensor, weight: Tensor, bias: Tensor | None, groups: ExpertGroups, *, rows: int, fixed: bool
) -> Tensor:
    """[pairs, out]: each pair's row of x times the matrix of its expert; see launch_expert_product.

    rows:  of a block; if they are not fixed, a GPU takes blocks by the mean size of a group, a CPU whole groups
    fixed: whether a row's bits must not depend on the number of rows
    """
    num_pairs = groups.order.shape[0]
    out = torch.empty(num_pairs, weight.shape[1], dtype=x.dtype, device=x.device)
    if x.device.type == "cpu":
        run_as_launch(expert_product, x, weight, bias, groups, out, rows=rows if fixed else 0)
        return out
    from rocm_attn.kernels.experts.product import launch_expert_product

    group_rows = rows if fixed else -(-num_pairs // groups.num_experts)
    tiles = expert_tiles(_arch(x.device), x.dtype, group_rows)
    launch_expert_product(x, weight, bias, groups, out, tiles=tiles)
    return out


@cache
def _arch(device: torch.device) -> str:
    return detect_target(device).arch
