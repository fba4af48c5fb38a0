"""Whether what a layer does to its rows fits the layer: looked at when it is first used, early and in words."""

from __future__ import annotations

import torch

from rocm_attn.errors import BadTensor
from rocm_attn.kernels.cache.row_work import QkvWork, RopeTable, RowNorm
from rocm_attn.problem import PoolKind, Problem


def check_work(problem: Problem, work: QkvWork, device: torch.device) -> None:
    """Raises BadTensor for a rope or norms that are not for the problem's rows, or elsewhere."""
    is_latent = problem.pool is PoolKind.LATENT
    if work.rope is not None:
        check_rope("rope", work.rope, problem.head_dim, device)
        if is_latent and not work.rope.at_end:
            raise BadTensor(
                "rope turns the first elements of a latent layer's rows, which end with those that turn; "
                "make the table with at_end=True"
            )
    _check_norm("q_norm", work.q_norm, (problem.head_dim, is_latent), device)
    _check_norm("k_norm", work.k_norm, (problem.head_dim, is_latent), device)
    if is_latent and work.v_norm is not None:
        raise BadTensor("v_norm was given for a latent layer, whose V is part of K; normalise it by k_norm")
    _check_norm("v_norm", work.v_norm, (problem.v_head_dim, False), device)


def check_rope(name: str, rope: RopeTable, dim: int, device: torch.device) -> None:
    """Raises BadTensor for a table of more elements than a row has, or elsewhere."""
    if rope.dim > dim:
        raise BadTensor(f"{name} turns {rope.dim} elements; rows have {dim}")
    _check_device(name, rope.cos_sin, device)


def _check_norm(name: str, norm: RowNorm | None, rows: tuple[int, bool], device: torch.device) -> None:
    """rows: their elements, and whether the first of them alone may be normalised."""
    if norm is None:
        return
    dim, may_be_first = rows
    if norm.dim > dim or (norm.dim < dim and not may_be_first):
        raise BadTensor(f"{name} has {norm.dim} weights; rows have {dim} elements")
    _check_device(name, norm.weight, device)


def _check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise BadTensor(f"{name} is on {tensor.device}; the runtime is on {device}")
