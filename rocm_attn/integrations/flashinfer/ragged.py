"""Prefill whose K and V are two tensors, token after token. Names and arguments are FlashInfer's.

Kernels treat each token as a page of its own.
"""

import functools

import numpy as np
from torch import Tensor

from rocm_attn.errors import BadTensor, Unsupported
from rocm_attn.integrations.flashinfer.batch import token_batch
from rocm_attn.integrations.flashinfer.calls import Result, RunArguments
from rocm_attn.integrations.flashinfer.cells import Masks
from rocm_attn.integrations.flashinfer.lengths import BatchLengths, on_host
from rocm_attn.integrations.flashinfer.requests import as_dtype, geometry_of
from rocm_attn.integrations.flashinfer.signatures import Given, as_in_flashinfer, refuse
from rocm_attn.integrations.flashinfer.wrapped import PlannedWrapper, as_plan, deprecated
from rocm_attn.machine.devices import require_tensor


def _nearest(indptr: Tensor, name: str, on_cpu: Tensor | None) -> Tensor:
    """Returns the copy on the host if there is one."""
    if on_cpu is None:
        return indptr
    require_tensor(name, on_cpu)
    if on_cpu.shape != indptr.shape or on_cpu.dtype != indptr.dtype or on_cpu.device.type != "cpu":
        raise BadTensor(
            f"{name} is {on_cpu.dtype} {list(on_cpu.shape)} on {on_cpu.device}; it must be the indptr on the CPU, "
            f"{indptr.dtype} {list(indptr.shape)}"
        )
    return on_cpu


class BatchPrefillWithRaggedKVCacheWrapper(PlannedWrapper):
    """Prefill of sequences whose K and V are concatenated.

    kv_layout: NHD: k and v are [tokens, kv_heads, dim]; HND: [kv_heads, tokens, dim]
    Raises Unsupported, also for use_cuda_graph, because the lengths of K and V have no bound.
    """

    @as_in_flashinfer
    def __init__(self, given: Given) -> None:
        if given.use_cuda_graph:
            raise Unsupported(
                "the ragged wrapper does not serve use_cuda_graph, because no buffer bounds K and V; capture the "
                "paged one"
            )
        super().__init__(given)

    @as_plan
    def plan(self, given: Given) -> None:
        """Plans a batch for later calls of run().

        qo_indptr, kv_indptr: int [S + 1], the first new token of each sequence, and its first row of K and V
        qo_indptr_cpu, kv_indptr_cpu: the same on the host, which are then not copied from the device
        Other arguments: see BatchPrefillWithPagedKVCacheWrapper.plan. Raises Unsupported, BadBatch, BadTensor.
        """
        geometry = geometry_of(given)
        q, kv = on_host(
            _nearest(given.qo_indptr, "qo_indptr_cpu", given.qo_indptr_cpu),
            _nearest(given.kv_indptr, "kv_indptr_cpu", given.kv_indptr_cpu),
        )
        lengths = BatchLengths(q, kv[:-1], np.diff(kv))
        batch = token_batch(lengths, kv, Masks(given.custom_mask, given.packed_custom_mask), self.device)
        self._plan(batch, geometry, as_dtype(given.o_data_type or geometry.dtype))

    begin_forward = plan

    @as_in_flashinfer
    def run(self, given: Given) -> Result:
        """Returns the attention of the planned batch over a layer's K and V: [tokens, q_heads, v_head_dim], and LSE.

        Raises Unsupported, BadTensor, BadSetting, WrongState.
        """
        refuse(o_scale=None if given.o_scale == 1.0 else given.o_scale)
        k, v = given.k, given.v
        if self._kv_layout == "HND":
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        if k.dim() != 3 or v.dim() != 3:
            raise BadTensor(f"k is {list(k.shape)} and v {list(v.shape)}; each must have 3 dimensions")
        return self._attend(given.q, (k.unsqueeze(1), v.unsqueeze(1)), RunArguments.of(given))

    run_return_lse = functools.partialmethod(run, return_lse=True)

    forward = deprecated("BatchPrefillWithRaggedKVCacheWrapper.forward")
    forward_return_lse = deprecated("BatchPrefillWithRaggedKVCacheWrapper.forward_return_lse")
