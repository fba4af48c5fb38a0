"""A world over 8-bit pages. Its rows are exactly representable in them, so that only attention is compared."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rocm_attn.kernels.cache.page_format import Scales
from rocm_attn.problem import KVEncoding, Problem
from rocm_attn.providers.contract import KernelEntry
from rocm_attn.step.step import Part
from tests.amd.tolerances import assert_attention_close
from tests.amd.worlds.world import Request, World

# Scales of K, of V, and per head. They are powers of two, so that a code times a scale is an element of bfloat16.
_K_FACTOR, _V_FACTOR, _BY_HEAD = 2.0**-5, 2.0**-4, 2.0
# Scale per token. The store computes it from the row, whose largest element is the encoding's largest times this.
_TOKEN_FACTOR = 2.0**-6


@dataclass
class EightBitWorld(World):
    """A world over 8-bit pages. row: the row of the kernel that served the last step"""

    entry: KernelEntry | None = field(default=None, init=False)

    def _lse_rows(self, layer: int, step: Part, q: Tensor) -> Tensor | None:
        self.entry = step.plan.kernels[list(dict.fromkeys(self.problems)).index(self.problems[layer])].entry
        return super()._lse_rows(layer, step, q)

    def set_scales(self) -> None:
        """Sets scales for every layer's K and V that differ from 1 and from each other."""
        for layer, problem in enumerate(self.problems):
            pages = self.runtime.pool.layer(layer)
            if problem.kv_scales in (Scales.LAYER, Scales.HEAD):
                assert pages.k_scale is not None
                assert pages.v_scale is not None
                by_head = _BY_HEAD ** (torch.arange(len(pages.k_scale), device=pages.k_scale.device) % 3)
                pages.v_scale.copy_(_V_FACTOR * by_head)
                pages.k_scale.copy_(_K_FACTOR * by_head)

    def _held(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, and the k and v nearest to the given ones that pages hold exactly."""
        (layer,) = (layer for layer, each in enumerate(self.problems) if each is problem)
        pages = self.runtime.pool.layer(layer)
        v_is_k = v.data_ptr() == k.data_ptr()
        k = held_exactly(k, problem, pages.k_scale)
        return q, k, k[..., : problem.v_head_dim] if v_is_k else held_exactly(v, problem, pages.v_scale)

    def _reference(
        self, layer: int, request: Request, q: Tensor, visible: Tensor | None, positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        encoding = self.problems[layer].page_format.encoding
        if self.entry is not None and self.entry.rounds_queries:
            q = q.clamp(-encoding.largest, encoding.largest).to(encoding.dtype).to(q.dtype)
        return super()._reference(layer, request, q, visible, positions)

    def _assert_close(self, out: Tensor, want: Tensor, problem: Problem) -> None:
        assert_attention_close(
            out, want, problem.dtype, eight_bit_products=self.entry is not None and self.entry.rounds_products
        )


def held_exactly(rows: Tensor, problem: Problem, scale_values: Tensor | None) -> Tensor:
    """Returns the nearest rows [T, kv_heads, dim] that pages hold exactly; NaN stays NaN."""
    if problem.kv_encoding is KVEncoding.LIKE_Q:
        return rows
    encoding = problem.page_format.encoding
    scale_value = torch.tensor(_TOKEN_FACTOR) if problem.kv_scales is Scales.TOKEN else scale_values
    assert scale_value is not None
    codes = (rows.float() / scale_value.to(rows.device)[..., None]).clamp(-encoding.largest, encoding.largest)
    if problem.kv_scales is Scales.TOKEN:
        codes[..., 0] = encoding.largest
    exact: Tensor = codes.to(encoding.dtype).float() * scale_value.to(rows.device)[..., None]
    return torch.where(rows.isnan(), float("nan"), exact).to(rows.dtype)


def eight_bit_kinds(kinds: Sequence[KVEncoding], arch: str) -> Sequence[KVEncoding]:
    """Returns those of a kernel's encodings that it reads on `arch`."""
    other = KVEncoding.E4M3FN if arch == "gfx942" else KVEncoding.E4M3FNUZ
    return [kind for kind in kinds if kind not in (other, KVEncoding.LIKE_Q)]
