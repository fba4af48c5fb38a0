"""The keys that a layer with an indexer attends to, computed again from the definition."""

import torch
from torch import Tensor

from rocm_attn.problem import Indexing, Pooling
from tests.amd.kernels.sparse_cases import best_units


def chosen_cells(q: Tensor, weights: Tensor, keys: Tensor, indexing: Indexing) -> Tensor:
    """bool [n, sets, kv_len]: the keys that each of a sequence's last n tokens attends to, as Indexing defines."""
    num_new, kv_len, sets = len(q), len(keys), indexing.sets
    ends = torch.arange(indexing.key_tokens - 1, kv_len, indexing.key_tokens)
    pooled = keys[ends.to(keys.device)].double()
    products = torch.einsum("nhd,kd->nhk", q.double(), pooled) * indexing.scale
    products = products.clamp(min=0) if indexing.rectified else products
    # A context that is shorter than a pool has no keys.
    by_set = (products * weights.double()[..., None]).reshape(num_new, sets, q.shape[1] // sets, len(pooled))
    scores = by_set.sum(2).cpu()
    cells = torch.zeros(num_new, sets, kv_len, dtype=torch.bool)
    for token in range(num_new):
        visible = kv_len - num_new + token + 1
        for index_set in range(sets):
            seen = scores[token, index_set, : visible // indexing.key_tokens]
            parts = torch.split(seen, indexing.unit_keys) if len(seen) else ()
            of_units = [float(part.max() if indexing.pooling is Pooling.MAX else part.mean()) for part in parts]
            for unit in best_units(of_units, visible, indexing):
                first = unit * indexing.unit_tokens
                cells[token, index_set, first : min(first + indexing.unit_tokens, visible)] = True
    return cells.to(q.device)
