"""FlashInfer's signatures, and functions of ours that have them.

flashinfer_signatures.json has the parameters of its functions as its files write them, without types. A function here
that is bound to one takes all of its arguments as one value, by FlashInfer's names. So no parameter is written twice,
and one that is not served is refused in one place.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

from rocm_attn.errors import Unsupported

DATA = Path(__file__).parent.with_name("flashinfer_signatures.json")
NVFP4 = "no kernel here reads NVFP4 pages; keep K and V in 16 bits or in FP8"
_CUDA_SOURCE = "it is CUDA source for FlashInfer's own kernels"
_MULTI_ITEM = "there is no multi-item scoring; pass its mask as custom_mask"
_LATENT_CODES = "no kernel here reads eight-bit latent pages with a scale per call; keep them in 16 bits"
_HEAD_SCALES = "per-head scales belong to eight-bit queries, which no kernel here reads"
_NO_MASK_OF_ONE = "a decode token sees all of its keys; FlashInfer ignores a mask here"
_BLOCKS = "use VariableBlockSparseAttentionWrapper"

# Arguments that FlashInfer takes and no kernel here supports -> the reason.
ALWAYS_REFUSED = {
    "jit_args": _CUDA_SOURCE,
    "jit_kwargs": _CUDA_SOURCE,
    "variant_owns_mask": "it concerns CUDA source for FlashInfer's own kernels",
    "args": "these are arguments of CUDA source for FlashInfer's own kernels",
    **dict.fromkeys(("kv_cache_sf", "v_sf_swizzled"), NVFP4),
    "use_token_head_sf": "scales of tokens lie in a rocm_attn runtime's pages; use one, or scales of the call",
    "skip_softmax_threshold_scale_factor": "every key counts here; leave it None",
    "uses_spcompress": "no kernel here has a compressed softmax; leave it None",
    **dict.fromkeys(("prefix_len_ptr", "token_pos_in_items_ptr", "max_item_len_ptr"), _MULTI_ITEM),
    "v_indptr": "K and V of a token lie at the same place of their tensors; leave it None",
    "o_indptr": "a token's output lies where its query lies; leave it None",
    "scale_q": "no kernel here reads eight-bit queries; pass them in 16 bits",
    **dict.fromkeys(("scale_k", "scale_v"), _HEAD_SCALES),
    "skip_softmax": "every key counts here; leave it False",
    **dict.fromkeys(("ckv_scale", "ckv_scale_arr", "kpe_scale"), _LATENT_CODES),
    "output_scale": "no kernel here writes eight-bit outputs; scale the output",
    "bmm1_scale": "the scale is fixed by the plan; give sm_scale to plan()",
    "bmm2_scale": "scale the output",
    **dict.fromkeys(("kv_len", "page_table"), "lengths and pages are those of the plan; give them to plan()"),
    **dict.fromkeys(("custom_mask_d", "packed_custom_mask_d"), _NO_MASK_OF_ONE),
    **dict.fromkeys(("block_mask", "q2k_indices", "q2k_num"), _BLOCKS),
    "kv_block_lens": "blocks have one size here; use VariableBlockSparseAttentionWrapper",
    "use_profiler": "only FlashInfer's kernels are profiled so, and they do not run here; use torch.profiler",
    "profiler_buffer": "only FlashInfer's kernels write it, and they do not run here",
}
# Arguments that some functions here serve and others do not.
_REFUSED_BY_SOME = {
    **dict.fromkeys(("q_scale", "k_scale", "v_scale"), "scales of blocks belong to eight-bit queries"),
    "o_scale": "no kernel here writes eight-bit outputs; scale the output",
    "scale_mode": _LATENT_CODES,
    **dict.fromkeys(
        ("custom_mask_p", "packed_custom_mask_p"),
        "the step of both is planned without masks; use BatchPrefillWithPagedKVCacheWrapper",
    ),
}

Result = TypeVar("Result")


class Given(SimpleNamespace):
    """The arguments of a call, by FlashInfer's names."""


def refuse(**given: object) -> None:
    """Raises Unsupported with the reason for the first argument that is neither None, False nor empty."""
    for name, value in given.items():
        if value is not None and value is not False and (isinstance(value, Tensor) or value not in ((), {})):
            raise Unsupported(f"{name} is not served: {(ALWAYS_REFUSED | _REFUSED_BY_SOME)[name]}")


@functools.cache
def recorded() -> dict[str, str]:
    """Returns the parameters of each function or Class.method of FlashInfer's."""
    texts: dict[str, str] = json.loads(DATA.read_text("utf-8"))["signatures"]
    return texts


def as_in_flashinfer(function: Callable[[Any, Given], Result]) -> Callable[..., Result]:
    """Gives a function the parameters of FlashInfer's function of its name.

    function: gets the first argument, which may be a wrapper, and the others by their names. Those that are not served
              are refused before. A call raises TypeError as Python does, and Unsupported
    """
    # Python binds arguments by a function that returns them: no other way is as fast, and run() is called per layer.
    bind: Callable[..., dict[str, Any]] = eval(
        f"lambda {recorded()[function.__qualname__]}: locals()", {"torch": torch}
    )
    bind.__qualname__ = function.__qualname__  # in the errors of calls
    signature = inspect.signature(bind)
    first, *others = signature.parameters.values()
    refused = {
        of.name: () if of.kind is of.VAR_POSITIONAL else of.default for of in others if of.name in ALWAYS_REFUSED
    }

    @functools.wraps(function)
    def bound(*args: Any, **named: Any) -> Result:
        given = bind(*args, **named)
        for name, default in refused.items():
            if (value := given[name]) is not default:
                refuse(**{name: None if isinstance(value, str) and value == default else value})
        return function(given.pop(first.name), Given(**given))

    bound.__signature__ = signature  # type: ignore[attr-defined]
    return bound
