"""Hooks in SGLang by which StateWatch checks SGLang's own recurrent states before a step's layers run.

A pool of states gets headers, which identify the tokens in each slot. SGLang clears and copies them with the
slots, like other data of a slot. Nothing is hooked unless it is requested.
"""

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
from sglang.srt.runtime_context import get_disagg, get_exec, get_memory, get_parallel
from torch import Tensor

from rocm_attn.integrations.hooked import hook_once
from rocm_attn.integrations.sglang.hooks import AttentionHooks
from rocm_attn.integrations.sglang.state_slots import slots_of
from rocm_attn.integrations.state_watch import StateWatch, cleared_headers, refused, require_followed

# Backends of recurrent layers whose slots are followed.
_KINDS = ("GDNAttnBackend", "Mamba2AttnBackend")


class StateHeaders:
    """The headers of a pool's slots, with the methods of SGLang's SlotIndexedState.

    rows, drafts: of SGLang's memory for the states after each draft of a step; 0 without drafts
    headers:   int32 [num_slots + rows * drafts, HEADER_WORDS], those of states after drafts last
    of_drafts: int64 [rows, drafts], their places
    """

    def __init__(self, num_slots: int, rows: int, drafts: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self._cleared = cleared_headers(2, device)[1]
            self.headers = cleared_headers(num_slots + rows * drafts, device)
            self.of_drafts = num_slots + torch.arange(rows * drafts, device=device).view(rows, drafts)

    def keep_accepted(self, slots: Tensor, last: Tensor) -> None:
        """Notes that each sequence's slot got its state after a draft. last: the draft; -1: the slot stays"""
        row = torch.arange(len(last), device=last.device)
        source = self.of_drafts[row, last.long().clamp(min=0)]
        target = torch.where((last >= 0) & (slots > 0), slots.long(), 0)
        self.headers[target] = self.headers[source]

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
        cache = pool.mamba_pool.mamba_cache
        used = {
            "pipeline parallelism": get_parallel().pp_size > 1,
            "two halves of a batch that overlap": get_exec().overlap.enable_two_batch_overlap,
            # SGLang moves K and V of accepted ones to other slots, where no hash goes with them.
            "trees of drafts": attending.verifies_trees,
            "a hierarchical cache": get_memory().enable_hierarchical_cache,
            "disaggregation": get_disagg().disaggregation_mode != "null",
            "several items scored in a prompt": get_exec().features.enable_mis,
            "states of eight bits in its cache": pool.mamba_ckpt_pool is not None,
            "ReplaySSM": cache.replayssm_d is not None,
        }
        require_followed("SGLang", used)
        attention = attending.attention
        self._attending, self._recurrent = attending, recurrent
        after_drafts = getattr(cache, "intermediate_ssm", None)
        rows, drafts = (0, 0) if after_drafts is None else after_drafts.shape[1:3]
        self._states = StateHeaders(cache.temporal.shape[1], rows, drafts, attention.device)
        pool.mamba_pool.register_slot_state(self._states)
        self._page_size = attention.tables.page_size
        self._watch = StateWatch(attention.bounds.num_pages * self._page_size, attention.device)

    def check(self, batch: Any) -> None:
        """Checks the states of a step that was begun and filled. A graph that captures this checks each replay."""
        if batch.forward_mode.is_idle() or batch.batch_size == 0:
            return
        step = self._attending.attention.gate.begun().step.spaces[0]
        tokens = self._watch.begin(step, self._page_size, batch.input_ids)
        slots = slots_of(self._recurrent.forward_metadata, batch, len(tokens.live), self._states.of_drafts)
        self._watch.check(tokens, self._states.headers, slots)

    def keep_accepted(self, last: Tensor, tracked: Tensor | None, tracked_at: Tensor | None) -> None:
        """Notes the states that SGLang keeps of a step's drafts: in the sequences' slots, and for the radix cache."""
        self._states.keep_accepted(self._recurrent.forward_metadata.mamba_cache_indices[: len(last)], last)
        if tracked is not None and tracked_at is not None:
            self._states.keep_accepted(tracked, tracked_at)


_watched: WeakKeyDictionary[Any, _Watched] = WeakKeyDictionary()


def watch() -> None:
    """Checks the states of all steps from now on. Call it before SGLang makes backends of recurrent layers."""
    for name, hook in (
        ("__init__", _with_headers),
        ("init_forward_metadata", _then_checked),
        ("init_forward_metadata_in_graph", _then_checked),
        ("update_mamba_state_after_mtp_verify", _then_kept),
        ("init_cpu_graph_state", _refuse_graphs),
        ("init_forward_metadata_for_breakable_cuda_graph_capture", _refuse_graphs),
    ):
        hook_once(HybridLinearAttnBackend, name, hook)


def _with_headers(make: Callable[..., None]) -> Callable[..., None]:
    def made(backend: Any, *given: Any, **named: Any) -> None:
        make(backend, *given, **named)
        if not backend.linear_attn_backend.is_draft_worker:  # its attention alone is a layer of drafts
            _watched[backend] = _Watched(backend)

    return made


def _then_checked(begin: Callable[..., None]) -> Callable[..., None]:
    def checked(backend: Any, forward_batch: Any) -> None:
        begin(backend, forward_batch)
        if backend in _watched:
            _watched[backend].check(forward_batch)

    return checked


def _then_kept(keep: Callable[..., None]) -> Callable[..., None]:
    def kept(
        backend: Any,
        last_correct_step_indices: Tensor,
        mamba_track_indices: Tensor | None,
        mamba_steps_to_track: Tensor | None,
        *given: Any,
        **named: Any,
    ) -> None:
        states = last_correct_step_indices, mamba_track_indices, mamba_steps_to_track
        keep(backend, *states, *given, **named)
        if backend in _watched:
            _watched[backend].keep_accepted(*states)

    return kept


def _refuse_graphs(prepare: Callable[..., None]) -> Callable[..., None]:
    def refuse(backend: Any, *given: Any, **named: Any) -> None:
        raise refused("SGLang captures graphs of prompts, or on a CPU (--disable-prefill-cuda-graph)")

    return refuse
