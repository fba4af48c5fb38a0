"""ProductArgs: the tensors of a product of rows with the matrices of their experts, or with one matrix for all rows."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from rocm_attn.kernels.backend import on_hopper
from rocm_attn.kernels.experts.groups import ExpertGroups
from rocm_attn.kernels.model.gate import GateForm


class ProductArgs(NamedTuple):
    """The tensors of a product. The last dimension of each is contiguous.

    x:      [rows, in]
    weight: [experts, out, in]; with a gate [experts, 2 * out, in], the gate's rows first
    bias:   [experts, out] or [experts, 2 * out], contiguous; None: there is none
    out:    [pairs, out], of x's dtype, written; pairs lie by expert
    source: int64 [pairs]: the row of x of each pair; None: the same row
    indptr, drawn: of ExpertGroups; with one expert they are not read
    gate:   combines the two halves of a row; None: a row has one part
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    out: Tensor
    source: Tensor | None
    indptr: Tensor
    drawn: Tensor
    gate: GateForm | None

    @classmethod
    def of_experts(
        cls,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        groups: ExpertGroups,
        source: Tensor | None,
        out: Tensor,
        gate: GateForm | None = None,
    ) -> ProductArgs:
        """The product of each pair's row with the matrix of its expert."""
        assert (len(groups.tokens), groups.num_experts) == (len(out), len(weight))
        return cls(x, weight, bias, out, source, groups.indptr, groups.drawn, gate)

    @classmethod
    def of_all(
        cls, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, gate: GateForm | None = None
    ) -> ProductArgs:
        """The product of all rows with one matrix, weight [out, in], plus bias [out]: that of the only expert."""
        return cls(x, weight[None], None if bias is None else bias[None], out, None, out, out, gate)

    @property
    def sides(self) -> int:
        """Rows of a matrix for each column of out."""
        return 1 if self.gate is None else 2

    def most_blocks(self, rows: int, num_pairs: int) -> int:
        """Blocks of num_pairs pairs, at most: each expert with a pair may have one block that is not full."""
        return num_pairs // rows + min(num_pairs, len(self.weight))

    def check(self) -> None:
        """Asserts that the tensors fit each other."""
        x, weight, bias, out, source = self[:5]
        assert len(x if source is None else source) == len(out)
        assert weight.shape[1:] == (self.sides * out.shape[1], x.shape[1])
        assert bias is None or (bias.shape == weight.shape[:2] and bias.is_contiguous())
        assert x.stride(1) == weight.stride(2) == out.stride(1) == 1

    @property
    def suits_hopper(self) -> bool:
        """True if hopper/expert_product.py may be launched: on such a GPU, with rows that its copies may begin at.

        The number of rows plays no part in it.
        """
        x, weight = self[:2]
        aligned = x.data_ptr(), x.stride(0), x.shape[1], weight.data_ptr(), *weight.stride()[:2]
        return on_hopper() and x.dtype.itemsize == 2 and not any(each % 16 for each in aligned)
