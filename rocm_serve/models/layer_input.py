"""LayerInput: the normalised rows that a layer multiplies with its matrices. ComingInput: one row, not made yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from rocm_attn.models.gates import Gate, ReluSquared
from rocm_serve.models.gated import lie_right, multiplied_as_normed
from rocm_serve.models.linears import Linears

if TYPE_CHECKING:
    from rocm_attn.kernels.model.add_norm import NormedSum


class LayerInput:
    """The input of a layer for a step's tokens. rows: [tokens, hidden], normalised"""

    def __init__(self, linears: Linears, rows: Tensor) -> None:
        self._linears, self._rows = linears, rows

    def make(self) -> None:
        """Makes the rows, and the sum whose norm they are, unless they are made."""

    @property
    def rows(self) -> Tensor:
        self.make()
        return self._rows

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """[tokens, out], in the dtype of the weight: see Linears.linear."""
        rows = self._rows
        return self._linears.linear(rows if rows.dtype == weight.dtype else rows.to(weight.dtype), weight, bias)

    def gated(self, weight: Tensor, bias: Tensor | None, gate: Gate) -> Tensor:
        """[tokens, inner]: see Linears.gated."""
        return self._linears.gated(self._rows, weight, bias, gate)


class ComingInput(LayerInput):
    """The input for one token on a GPU. Its first product makes it, or the first reader of the row or the sum."""

    def __init__(self, linears: Linears, row: NormedSum) -> None:
        super().__init__(linears, row.normed)
        self._row, self._is_made = row, False

    def make(self) -> None:
        if not self._is_made:
            from rocm_attn.kernels.model.add_norm import launch_add_norm

            self._is_made = True
            launch_add_norm(self._row)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if self._makes(weight):
            return self._made_by(weight, bias, None)
        self.make()
        return super().linear(weight, bias)

    def gated(self, weight: Tensor, bias: Tensor | None, gate: Gate) -> Tensor:
        if not isinstance(gate, ReluSquared) and self._makes(weight):
            return self._made_by(weight, bias, gate)
        self.make()
        return super().gated(weight, bias, gate)

    def _makes(self, weight: Tensor) -> bool:
        """True if the product with a matrix can make the row."""
        return not self._is_made and lie_right(self._rows, weight)

    def _made_by(self, weight: Tensor, bias: Tensor | None, gate: Gate | None) -> Tensor:
        self._is_made = True
        return multiplied_as_normed(self._row, weight, bias, gate)


def input_of(linears: Linears, made: NormedSum) -> LayerInput:
    """The input of a layer for tokens of a GPU; its sum is in made.summed once the input is made."""
    from rocm_attn.kernels.model.add_norm import launch_add_norm
    from rocm_attn.kernels.model.normed_product import pays_off

    rows, width = made.residual.shape
    if rows == 1 and not linears.is_fixed and pays_off(width, made.residual.device):
        return ComingInput(linears, made)
    launch_add_norm(made)
    # It holds neither the output nor the residual before: those of a long prompt are large.
    return LayerInput(linears, made.normed)
