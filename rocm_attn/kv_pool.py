"""KVPool: K and V storage of all layers, cut into pages. Page 0 is reserved and zero for ever."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.errors import BadProblem, CapacityExceeded
from rocm_attn.index_spaces import RESERVED_PAGE
from rocm_attn.problem import PoolKind, Problem
from rocm_attn.step_batch import INT32_MAX


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer's storage.

    k: [pages, page_size, kv_heads, head_dim]
    v: [pages, page_size, kv_heads, v_head_dim]; of a latent layer the first v_head_dim elements of each row of k
    """

    k: Tensor
    v: Tensor


class KVPool:
    """K and V pages for every layer.

    A page id means the same page in every layer, so a sequence needs one row of one table. Each layer has allocations
    of its own: Triton uses AMD's buffer loads only on storages of up to 2 GiB, which all layers together exceed.
    """

    def __init__(self, problems: Sequence[Problem], *, num_pages: int, device: torch.device) -> None:
        if not problems:
            raise BadProblem("no layers: pass one Problem for each attention layer of the model")
        sizes = sorted({problem.page_size for problem in problems})
        if len(sizes) != 1:
            raise BadProblem(f"layers disagree on the page size ({sizes}); one pool has one page size")
        self.page_size = sizes[0]
        if num_pages < 2:
            raise CapacityExceeded(f"num_pages is {num_pages}; at least 2 are needed, because page 0 is reserved")
        if num_pages * self.page_size > INT32_MAX:
            raise CapacityExceeded(
                f"{num_pages} pages of {self.page_size} tokens overflow an int32 slot id; use at most "
                f"{INT32_MAX // self.page_size} pages"
            )
        self.num_pages = num_pages
        self.device = device
        self._pools = tuple(problem.pool for problem in problems)
        self._layers = tuple(self._allocate(problem) for problem in problems)

    def layer(self, layer: int) -> LayerPages:
        """The pages of one layer."""
        return self._layers[layer]

    @property
    def num_bytes(self) -> int:
        """Bytes of all layers."""
        return sum(tensor.nbytes for tensor in self._storages())

    def copy_pages(self, source: Tensor, target: Tensor) -> None:
        """Copy whole pages in every layer: target[i] becomes what source[i] was before the call.

        source, target: int64 [n] page ids on the pool's device; targets are distinct and never page 0
        """
        for pages in self._storages():
            pages.index_copy_(0, target, pages.index_select(0, source))

    def _storages(self) -> Iterator[Tensor]:
        """The tensors that own memory: a latent layer's v is part of its k."""
        for layer, pool in zip(self._layers, self._pools, strict=True):
            yield layer.k
            if pool is not PoolKind.LATENT:
                yield layer.v

    def _allocate(self, problem: Problem) -> LayerPages:
        # Not torch.zeros: nothing may depend on the content of a page that no token was stored to.
        shape = (self.num_pages, self.page_size, problem.num_kv_heads)
        k = torch.empty(*shape, problem.head_dim, dtype=problem.dtype, device=self.device)
        k[RESERVED_PAGE].zero_()
        if problem.pool is PoolKind.LATENT:
            return LayerPages(k=k, v=k[..., : problem.v_head_dim])
        v = torch.empty(*shape, problem.v_head_dim, dtype=problem.dtype, device=self.device)
        v[RESERVED_PAGE].zero_()
        return LayerPages(k=k, v=v)


def page_bytes(problems: Sequence[Problem]) -> int:
    """Bytes that one page takes over all layers."""
    return sum(p.page_size * p.num_kv_heads * _row_elements(p) * p.dtype.itemsize for p in problems)


def _row_elements(problem: Problem) -> int:
    """Elements that a token takes in one KV head of a layer."""
    return problem.head_dim + (0 if problem.pool is PoolKind.LATENT else problem.v_head_dim)
