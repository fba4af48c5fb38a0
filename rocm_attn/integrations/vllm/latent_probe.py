"""LatentProbe: steps before vLLM's own through MLA layers, whose latent rows vLLM's code stores. Imports no vLLM."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from rocm_attn.capture.engine_kernels import StepsAhead, log_run_ahead
from rocm_attn.capture.prewarm import MOST_TOKENS
from rocm_attn.external import ExternalAttention
from rocm_attn.integrations.vllm.group import CachedLayer, Lend, give_none
from rocm_attn.step.protocols import LayerCalls, WrappedLayers
from rocm_attn.truth.adopted import log_truth
from rocm_attn.truth.choosers import BY_INDEXERS, Choosers


class LatentLayer(CachedLayer, Protocol):
    """The part that is read of vLLM's MLA layers.

    impl: stores rows by do_kv_cache_update(kv_c, k_pe, kv_cache, slots, kv_cache_dtype, k_scale)
    """

    impl: Any
    kv_cache_dtype: str


class LatentProbe:
    """Sends needles through MLA layers and logs the finding: GroupOptions.tried. Its ahead() is ran_ahead.
    layers:   of the group, in order
    most_new: new tokens of a sequence in steps of the group, at most
    choosers: of the layers with an indexer
    """

    def __init__(
        self,
        layers: Sequence[LatentLayer],
        log: logging.Logger,
        most_new: int = MOST_TOKENS,
        choosers: Choosers = BY_INDEXERS,
    ) -> None:
        self._layers, self._log, self._most_new, self._choosers = layers, log, most_new, choosers

    def __call__(self, attention: ExternalAttention, lend: Lend) -> None:
        lent: list[Tensor] = []

        def keep(count: int) -> None:
            lent.extend(lend(count).values())

        log_truth(self._log, attention, keep, self._choosers, partial(StoredByEngine, self._layers, lent))

    def ahead(self, attention: ExternalAttention, ahead: StepsAhead) -> None:
        """Runs the kernels of attention ahead. vLLM stores, and its indexer chooses keys."""
        by_vllm = replace(ahead, most_new=self._most_new, stores=False, choose=give_none)
        log_run_ahead(self._log, attention, by_vllm)


class StoredByEngine(WrappedLayers):
    """The calls of a step in which vLLM's code stores the rows.

    caches:  of the layers
    of_step: the calls that it makes otherwise
    slots:   of the step's tokens
    """

    def __init__(
        self, layers: Sequence[LatentLayer], caches: Sequence[Tensor], of_step: LayerCalls, slots: Tensor
    ) -> None:
        self._of_step, self._layers, self._caches, self._slots = of_step, layers, caches, slots

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        own, latent = self._layers[layer], v.shape[-1]
        rows, turned = k[:, 0, :latent].contiguous(), k[:, :, latent:].contiguous()
        own.impl.do_kv_cache_update(rows, turned, self._caches[layer], self._slots, own.kv_cache_dtype, own._k_scale)

    def _call(self, name: str, layer: int, *given: Any, **named: Any) -> None:
        getattr(self._of_step, name)(layer, *given, **named)
