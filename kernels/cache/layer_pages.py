"""LayerPages: one layer's K and V storage, which the store, attention and all fix-ups take whole."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rocm_attn.kernels.cache.page_format import Encoding, PageFormat, PoolKind
from rocm_attn.kernels.cache.page_rows import PageRows, key_rows, value_rows


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer's storage.

    k:                [pages, page_size, kv_heads, head_dim]
    v:                [pages, page_size, kv_heads, v_head_dim]; of a latent layer the first v_head_dim elements of each
                      row of k
    format:           what they hold
    k_scale, v_scale: float32 factors of K and of V, as format.scales says: [1], [kv_heads] or [pages, page_size,
                      kv_heads]; None where there are none. Of a latent layer v_scale is k_scale
    k and v have another shape in a vectorised pool (page_rows.py); pages come first in any.
    """

    k: Tensor
    v: Tensor
    format: PageFormat
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @classmethod
    def plain(cls, k: Tensor, v: Tensor, *, kind: PoolKind = PoolKind.SPLIT) -> LayerPages:
        """Pages without scales, whose format is what the tensors look like. kind: SPLIT also where they are cut"""
        keys, values = key_rows(k), value_rows(v)
        form = PageFormat(
            Encoding.of(k.dtype),
            PoolKind.VECTORIZED if k.dim() == 5 else kind,
            keys.page_size,
            keys.num_heads,
            keys.dim,
            values.dim,
        )
        return cls(k, v, form)

    @property
    def keys(self) -> PageRows:
        """k, token by token."""
        return key_rows(self.k)

    @property
    def values(self) -> PageRows:
        """v, token by token."""
        return value_rows(self.v)
