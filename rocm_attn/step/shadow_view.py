"""What a check of a running step against a reference reads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.problem import Problem
from rocm_attn.step.head_weights import HeadWeights


@dataclass(frozen=True, slots=True)
class ShadowView:
    """What a check against a reference needs of the step that is running, on the device.

    row_of_seq, kv_len, q_len: int32 [S]; the first num_seqs are those of the step
    table:                     int32 [rows, width], of the layer's space
    eight_bit_products:        whether the layer's kernel may round what it multiplies to eight bits
    """

    problem: Problem
    pages: LayerPages
    weights: HeadWeights
    num_seqs: int
    row_of_seq: Tensor
    kv_len: Tensor
    q_len: Tensor
    table: Tensor
    eight_bit_products: bool
