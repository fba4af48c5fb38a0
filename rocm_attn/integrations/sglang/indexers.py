"""DSA, the sparse attention of DeepSeek-V3.2 and GLM-5: SGLang's indexer modules and index pages, over our indexer.

A module's own projections compute index queries, keys and head gates. Our kernels store the keys, select, and attend to
the selected keys. Keys are in SGLang's index pages, in its format: each page has all codes first, then all scales.

SGLang computes a scale per token. Ours is one per layer, a power of two, computed from the bound that a norm sets on
its rows. It is not in SGLang's pages, whose scales nothing reads: while weights are new, these may be without memory.
The rows are not rotated by a Hadamard matrix, because the products of queries and keys are the same without it.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rocm_attn.errors import Unsupported
from rocm_attn.integrations.sglang.seen import IndexerModule, KVPoolView
from rocm_attn.kernels.cache.page_format import Encoding, PageFormat, PoolKind, Scales
from rocm_attn.kernels.sparse.arguments import Indexing
from rocm_attn.problem import Indexer, KVEncoding


@dataclass(frozen=True, slots=True)
class IndexerInputs:
    """The inputs of a layer's indexer, for T tokens.

    q:     [T, index_heads, index_dim], rotated
    k:     [T, index_dim], rotated
    gates: float32 [T, index_heads], multipliers of the heads' scores
    """

    q: Tensor
    k: Tensor
    gates: Tensor


def indexer_of(module: IndexerModule, encoding: KVEncoding) -> Indexer:
    """Returns our kernels' Indexer for a module. encoding: of index keys in SGLang's pages"""
    indexing = Indexing(
        scale=module.head_dim**-0.5,
        top=module.index_topk,
        first=module.num_init_tokens,
        last=module.num_local_tokens,
    )
    return Indexer(module.n_heads, module.head_dim, indexing, encoding, Scales.LAYER)


def project(module: IndexerModule, x: Tensor | tuple[Tensor, ...], q_lora: Tensor, positions: Tensor) -> IndexerInputs:
    """Returns index queries, keys and gates of new tokens, computed with a module's weights.

    x:      [T, hidden]; or a tuple of its eight-bit form, the scales, and x itself, as SGLang passes it on MI300
    q_lora: [T, q_lora_rank]
    Raises Unsupported for x in eight bits alone.
    """
    plain = _plain(x)
    q = module.wq_b(q_lora)[0].view(-1, module.n_heads, module.head_dim)
    if hasattr(module, "wk_weights_proj"):
        k, gates = module.wk_weights_proj(plain)[0].split([module.head_dim, module.n_heads], -1)
    else:
        k, gates = module.wk(plain)[0], _gates(module.weights_proj, plain)
    k = module.k_norm(k)
    rotated = module.rope_head_dim
    # The key gets a dimension of heads, like in attention. Some of SGLang's kernels rotate in place.
    q_rope, k_rope = module.rotary_emb(positions, q[..., :rotated].clone(), k[:, None, :rotated].clone())
    q = torch.cat((q_rope.view(*q.shape[:-1], rotated), q[..., rotated:]), -1)
    k = torch.cat((k_rope.view(-1, rotated), k[..., rotated:]), -1)
    return IndexerInputs(q.to(plain.dtype), k.to(plain.dtype), gates.float() * module.n_heads**-0.5)


def _key_scale(module: IndexerModule, encoding: KVEncoding) -> float:
    """Returns the scale of a module's index keys: the smallest power of two with which every key fits the encoding.

    A row that a norm has scaled is no longer than the root of its elements times the norm's weight. Rotation combines
    two elements into one that is larger by at most the root of 2.
    """
    norm = module.k_norm
    bias = getattr(norm, "bias", None)
    largest = float(norm.weight.detach().abs().max()) * math.sqrt(module.head_dim)
    largest += 0.0 if bias is None else float(bias.detach().abs().max())
    most = float(torch.finfo(encoding.over(torch.float32).dtype).max)
    return 2.0 ** math.ceil(math.log2(max(largest, torch.finfo(torch.float32).tiny) * math.sqrt(2) / most))


@dataclass(frozen=True, slots=True)
class IndexPages:
    """The index keys of a layer in SGLang's pools. encoding: of the keys that `module` makes"""

    layer_id: int
    module: IndexerModule
    page_size: int
    encoding: KVEncoding

    def rows(self, pool: KVPoolView) -> Tensor:
        """Returns them in a pool: uint8 [pages, bytes of a page], in each the codes, then scales."""
        rows: Tensor = pool.get_index_k_with_scale_buffer(self.layer_id)  # type: ignore[attr-defined]  # of pools of DSA
        return rows

    def keys(self, pool: KVPoolView) -> Tensor:
        """Returns them in a pool: [pages, page_size, index_dim], codes, with gaps between pages."""
        rows, dim = self.rows(pool), self.module.head_dim
        codes = rows.as_strided((rows.shape[0], self.page_size, dim), (rows.stride(0), dim, 1))
        return codes.view(self.encoding.over(torch.float32).dtype)

    def scale(self) -> Tensor:
        """Returns their scale, float32 [1]."""
        weight = self.module.k_norm.weight
        return torch.tensor([_key_scale(self.module, self.encoding)], dtype=torch.float32, device=weight.device)


def index_format(keys: Tensor) -> PageFormat:
    """Returns the format of the keys of IndexPages: rows of codes in order, with one scale per layer."""
    _, page_keys, dim = keys.shape
    return PageFormat(Encoding.of(keys.dtype), PoolKind.LATENT, page_keys, 1, dim, dim, Scales.LAYER)


def refusals(pool: KVPoolView, modules: list[IndexerModule], page_size: int, *, with_masks: bool) -> list[str]:
    """Returns the reasons why a model with indexers, or its pool, is not served."""
    found: list[Any] = list(modules)
    requested = (
        (getattr(pool, "index_kpool", 1) > 1, "index keys that stand for several tokens each are not served"),
        (
            hasattr(pool, "get_broadcastable_index_k_with_scale_buffer"),
            "index keys that ranks share out are not served; leave --enable-dsa-cache-layer-split out",
        ),
        (
            hasattr(pool, "shard_spec"),
            "index keys that ranks share out are not served; leave KV sharding out",
        ),
        (
            not hasattr(pool, "get_index_k_with_scale_buffer"),
            f"the model selects keys, and the pool {type(pool).__name__} has no index pages",
        ),
        (
            getattr(pool, "index_page_size", page_size) != page_size,
            f"index pages have {getattr(pool, 'index_page_size', page_size)} keys, and tables have page size "
            f"{page_size}, which drafts of several branches need; use --speculative-eagle-topk 1",
        ),
        (with_masks, "trees of drafts are not served by models that select keys; use --speculative-eagle-topk 1"),
        (
            any(not hasattr(each, "k_norm") or not hasattr(each, "wq_b") for each in found),
            "only indexers with the projections of DeepSeek-V3.2's are served",
        ),
    )
    return [why for is_requested, why in requested if is_requested]


def _plain(x: Tensor | tuple[Tensor, ...]) -> Tensor:
    if isinstance(x, Tensor):
        return x
    if len(x) < 3:
        raise Unsupported(
            "an indexer was given a layer's input only in eight bits, and needs it in 16 bits too; set "
            "SGLANG_USE_AITER=0"
        )
    return x[2]


def _gates(project_gates: Any, x: Tensor) -> Tensor:
    """Returns the gates of heads, whose weights SGLang keeps in bfloat16."""
    weight: Tensor = project_gates.weight
    gates: Tensor = project_gates(x)[0] if weight.dtype == x.dtype else functional.linear(x, weight.to(x.dtype))
    return gates
