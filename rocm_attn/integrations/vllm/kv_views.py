"""Views of a layer's KV cache in vLLM as pages of K and of V, for any layout that vLLM chooses.

vLLM packs K and V of a head and a token into one row. Logically a layer's cache is

    [blocks, kv_heads, block_size, head_size + v_head_size]

with the strides of the layout. An MLA layer's is [blocks, block_size, latent], or the former with one head; latent is
the bytes of a record if the cache is fp8_ds_mla.
"""

from torch import Tensor

from rocm_attn.errors import BadTensor
from rocm_attn.problem import PoolKind, Problem


def pages_of(problem: Problem, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a layer's K and V pages, [blocks, block_size, kv_heads, head_dim | v_head_dim], views of its KV cache.

    Raises BadTensor for a cache of another layout.
    """
    return (_latent if problem.pool is PoolKind.LATENT else _packed)(problem, kv_cache)


def _packed(problem: Problem, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    wanted = (problem.num_kv_heads, problem.page_size, problem.head_dim + problem.v_head_dim)
    if kv_cache.dim() != 4 or tuple(kv_cache.shape[1:]) != wanted:
        raise BadTensor(
            f"a layer's KV cache has shape {list(kv_cache.shape)}; rocm_attn reads [blocks, {wanted[0]} KV heads, "
            f"{wanted[1]} tokens, {wanted[2]} elements of K and V]"
        )
    rows = kv_cache.transpose(1, 2)
    return rows[..., : problem.head_dim], rows[..., problem.head_dim :]


def _latent(problem: Problem, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    rows = kv_cache.squeeze(1) if kv_cache.dim() == 4 and kv_cache.shape[1] == 1 else kv_cache
    wanted = (problem.page_size, problem.page_format.k_row)
    if rows.dim() != 3 or tuple(rows.shape[1:]) != wanted:
        raise BadTensor(
            f"an MLA layer's KV cache has shape {list(kv_cache.shape)}; rocm_attn reads [blocks, {wanted[0]} tokens, "
            f"{wanted[1]} elements]"
        )
    k = rows.unsqueeze(2)
    return k, k[..., : problem.v_head_dim]
