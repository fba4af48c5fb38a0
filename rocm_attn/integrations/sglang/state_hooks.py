"""The lineage of SGLang's own recurrent states: the hooks by which StateWatch checks them before a step's layers run.

A pool of states gets headers, which say which tokens are in each slot. SGLang clears and copies them with the slots, as
it does with other state that belongs to a slot. Nothing is hooked unless it is requested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
from sglang.srt.runtime_context import get_disagg, get_exec, get_memory, get_parallel, get_spec
from torch import Tensor

from rocm_attn.integrations.hooked import hook_once
from rocm_attn.integrations.sglang.hooks import AttentionHooks
from rocm_attn.integrations.sglang.state_slots import slots_of
from rocm_attn.integrations.state_watch import StateWatch, cleared_headers, refused

# Backends of recurrent layers whose slots are followed.
_KINDS = ("GDNAttnBackend", "Mamba2AttnBackend")


class StateHeaders:
    """The headers of a pool's slots, with the methods of SGLang's SlotIndexedState.

    headers: int32 [num_slots, HEADER_WORDS]
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self._cleared = cleared_headers(2, device)[1]
            self.headers = cleared_headers(num_slots, device)

    def reset_slots(self, indices: Tensor) -> None:
        """Notes that slots are cleared."""
        self.headers[indices.long()] = self._cleared

    def copy_slots(self, src_index: Tensor, dst_index: Tensor) -> None:
        """Notes that slots are copied."""
        self.headers[dst_index.long()] = self.headers[src_index.long()]

    def get_cpu_slots(self, indices: Tensor) -> Tensor:
        """Returns what goes to the host with slots."""
        return self.headers[indices.long()].cpu()

    def load_cpu_slots(self, data: Tensor, indices: Tensor) -> None:
        """Takes what came back from the host with slots."""
        self.headers[indices.long()] = data.to(self.headers.device)

    def iter_transfer_state_entries(self) -> Iterator[tuple[Any, ...]]:
        """Yields nothing: headers are not sent to other servers, which is refused."""
        yield from ()


class _Watched:
    """The states of a backend's layers. Raises Unsupported for a model or options that are not followed."""

    def __init__(self, backend: Any) -> None:
        attending, recurrent = backend.full_attn_backend, backend.linear_attn_backend
        if type(recurrent).__name__ not in _KINDS:
            raise refused(f"the model's recurrent layers run on {type(recurrent).__name__}")
        if not isinstance(attending, AttentionHooks):
            raise refused(f"its attention runs on {type(attending).__name__}")
        pool = backend.req_to_token_pool
        for words, is_used in (
            ("pipeline parallelism", get_parallel().pp_size > 1),
            ("two halves of a batch that overlap", get_exec().overlap.enable_two_batch_overlap),
            ("drafts", bool(get_spec().speculative_num_draft_tokens)),
            ("a hierarchical cache", get_memory().enable_hierarchical_cache),
            ("disaggregation", get_disagg().disaggregation_mode != "null"),
            ("several items scored in a prompt", get_exec().features.enable_mis),
            ("states of eight bits in its cache", pool.mamba_ckpt_pool is not None),
            ("ReplaySSM", pool.mamba_pool.mamba_cache.replayssm_d is not None),
        ):
            if is_used:
                raise refused(f"SGLang runs with {words}")
        attention = attending.attention
        self._attending, self._recurrent = attending, recurrent
        self._states = StateHeaders(pool.mamba_pool.mamba_cache.temporal.shape[1], attention.device)
        pool.mamba_pool.register_slot_state(self._states)
        self._page_size = attention.tables.page_size
        with torch.inference_mode(False):
            self._watch = StateWatch(attention.bounds.num_pages * self._page_size, attention.device)

    def check(self, batch: Any) -> None:
        """Checks the states of a step that was begun and filled."""
        if batch.forward_mode.is_idle() or batch.batch_size == 0:
            return
        step = self._attending.attention.gate.begun().step.spaces[0]
        with torch.inference_mode():
            tokens = self._watch.begin(step, self._page_size, batch.input_ids)
            slots = slots_of(self._recurrent.forward_metadata, batch, len(tokens.live))
            self._watch.check(tokens, self._states.headers, slots)


_watched: WeakKeyDictionary[Any, _Watched] = WeakKeyDictionary()


def watch() -> None:
    """Checks the states of all steps from now on. Call it before SGLang makes backends of recurrent layers."""
    for name, hook in (
        ("__init__", _with_headers),
        ("init_forward_metadata", _then_checked),
        ("init_cuda_graph_state", _refuse_graphs),
        ("init_cpu_graph_state", _refuse_graphs),
        ("init_forward_metadata_for_breakable_cuda_graph_capture", _refuse_graphs),
    ):
        hook_once(HybridLinearAttnBackend, name, hook)


def _with_headers(make: Callable[..., None]) -> Callable[..., None]:
    def made(backend: Any, *given: Any, **named: Any) -> None:
        make(backend, *given, **named)
        _watched[backend] = _Watched(backend)

    return made


def _then_checked(begin: Callable[..., None]) -> Callable[..., None]:
    def checked(backend: Any, forward_batch: Any) -> None:
        begin(backend, forward_batch)
        _watched[backend].check(forward_batch)

    return checked


def _refuse_graphs(prepare: Callable[..., None]) -> Callable[..., None]:
    def refuse(backend: Any, *given: Any, **named: Any) -> None:
        raise refused("SGLang captures graphs (--disable-cuda-graph)")

    return refuse
