"""LayerPages: one layer's K and V storage, which the store, attention and all fix-ups take whole."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rocm_attn.kernels.cache.page_rows import PageRows, key_rows, value_rows


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer's storage.

    k: [pages, page_size, kv_heads, head_dim]
    v: [pages, page_size, kv_heads, v_head_dim]; of a latent layer the first v_head_dim elements of each row of k
    Both have another shape in a vectorised pool (page_rows.py); pages come first in any.
    """

    k: Tensor
    v: Tensor

    @property
    def keys(self) -> PageRows:
        """k, token by token."""
        return key_rows(self.k)

    @property
    def values(self) -> PageRows:
        """v, token by token."""
        return value_rows(self.v)
