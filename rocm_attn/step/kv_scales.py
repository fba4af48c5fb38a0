"""KVScales: the scales of a layer's eight-bit K and V, from a checkpoint or a calibration."""

from dataclasses import dataclass, replace
from numbers import Real

import torch
from torch import Tensor

from rocm_attn.errors import BadTensor
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.machine.settings import require_kind
from rocm_attn.paging.adopted_pages import check_scales
from rocm_attn.paging.convert import KEEPING_BITS
from rocm_attn.problem import KVEncoding, Problem, Scales
from rocm_attn.step.head_weights import NewHeadWeights, finished


@dataclass(frozen=True, slots=True)
class KVScales:
    """One layer's scales of eight-bit K and V: an element of K is its code times k, an element of V its code times v.

    k, v: a number, or a floating-point tensor on any device: [] or [1] if kv_scales is LAYER, [kv_heads] if it is HEAD
    made_for: the encoding that the scales were computed for; LIKE_Q: the layer's. Checkpoints have scales for E4M3FN; a
              layer of E4M3FNUZ doubles them, because the same bits have half the value
    """

    k: Tensor | float
    v: Tensor | float
    made_for: KVEncoding = KVEncoding.LIKE_Q

    def of(self, layer: int, problem: Problem) -> tuple[Tensor, Tensor]:
        """Returns k and v, float32 on the host, converted to the layer's encoding. Raises BadTensor.

        Waits for the device if a scale lies there.
        """
        if problem.kv_scales not in (Scales.LAYER, Scales.HEAD):
            raise BadTensor(
                f"layer {layer} has {problem.kv_scales.value}; scales can be set only by problems with kv_scales "
                "LAYER or HEAD"
            )
        require_kind("made_for", self.made_for, KVEncoding, BadTensor)
        made_for = problem.kv_encoding if self.made_for is KVEncoding.LIKE_Q else self.made_for
        encodings = made_for.over(problem.dtype), problem.kv_encoding.over(problem.dtype)
        if encodings[0] is not encodings[1] and encodings not in KEEPING_BITS:
            raise BadTensor(
                f"the scales of layer {layer} were computed for {encodings[0].value}, and it keeps K and V in "
                f"{encodings[1].value}; only scales of the two E4M3 encodings can be converted"
            )
        count = problem.num_kv_heads if problem.kv_scales is Scales.HEAD else 1
        k, v = (_checked(f"{name} of layer {layer}", given, count) for name, given in (("k", self.k), ("v", self.v)))
        check_scales(f"layer {layer}", problem.pool, k, v)
        by = KEEPING_BITS.get(encodings, 1.0)
        return k * by, v * by


def written_pages(pages: LayerPages, k: Tensor, v: Tensor, renew: NewHeadWeights) -> LayerPages:
    """A layer's pages with new scales. renew: how they are stored; if graphs read them, in the existing memory"""
    k_now, v_now = pages.k_scale, pages.v_scale
    assert k_now is not None
    assert v_now is not None
    k_scale, v_scale = finished(lambda: (renew(k_now, k), renew(v_now, v)))
    if k_scale is pages.k_scale and v_scale is pages.v_scale:
        return pages
    return replace(pages, k_scale=k_scale, v_scale=v_scale)


def _checked(name: str, given: Tensor | float, count: int) -> Tensor:
    is_number = isinstance(given, Real) and not isinstance(given, bool)
    try:
        scale_values = torch.as_tensor(given, dtype=torch.float32 if is_number else None).detach()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise BadTensor(f"the scales of {name} are {given!r}; give a number, or a floating-point tensor") from error
    if scale_values.is_meta:
        raise BadTensor(f"the scales of {name} are on the meta device, whose tensors have no values; load them first")
    if not scale_values.is_floating_point() or scale_values.numel() != count or scale_values.dim() > 1:
        raise BadTensor(
            f"the scales of {name} are {scale_values.dtype} {list(scale_values.shape)}; they must be floating point, "
            f"{count} "
            "of them"
        )
    return scale_values.to("cpu", torch.float32).reshape(count)
