"""Faults in the states of SGLang's own steps, planted where its pool clears, copies and names them.

REQUESTED has the name of the fault to plant. The first step that can have it gets it, and the file is emptied.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# The first decode step of a round that a fault may be planted in.
_FIRST_STEP = 3
# Gated delta nets read a slot where a sequence begins, and Mamba2 does not.
UNCLEARED = "uncleared_slot"
STALE_HIT, LOST_TOKEN = "stale_hit", "lost_token"
SWAPPED, SHARED = "swapped_slots", "shared_slot"
# With drafts: sequences get another one's accepted counts (vllm#53919); no state is kept (sglang#26351).
SWAPPED_COUNTS, LOST_DRAFTS = "swapped_counts", "lost_drafts"
STATE_FAULTS = (UNCLEARED, SWAPPED, SHARED, LOST_TOKEN, STALE_HIT, SWAPPED_COUNTS, LOST_DRAFTS)


class StatePlanter:
    """Plants faults in this process, and notes what our attention reports.

    requested: the file with a name of STATE_FAULTS, or with nothing
    write:     called with planted (a fault) and step (its number), or reported (words) and begun (a step's number)
    """

    def __init__(self, requested: Path, write: Callable[..., None]) -> None:
        self._requested, self._write = requested, write
        self._pending = self._lasting = ""
        self._used = set[int]()
        self._decodes = self._number = 0
        self._behind: tuple[Tensor, Any] | None = None

    def plant(self) -> None:
        """Hooks SGLang's pools, and our begin of a step."""
        from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, MambaPool
        from sglang.srt.speculative import eagle_worker_common, spec_utils

        from rocm_attn.integrations.sglang.hooks import AttentionHooks

        clear, copy, named = MambaPool.clear_slots, MambaPool.copy_from, HybridReqToTokenPool.get_mamba_indices

        def cleared(pool: Any, indices: Tensor) -> None:
            """UNCLEARED: a slot is handed to a request with the state of one before."""
            before = self._used - {*indices.tolist()}
            self._used.update(indices.tolist())
            if before and self._takes(UNCLEARED):
                self._pending = UNCLEARED
                copy(pool, torch.tensor([min(before)]), indices[:1].long())
                indices = indices[1:]
            clear(pool, indices)

        def copied(pool: Any, source: Tensor, target: Tensor) -> None:
            """STALE_HIT: a prefix is found, and its state is not copied."""
            if self._takes(STALE_HIT):
                self._pending = STALE_HIT
                source, target = source[1:], target[1:]
            copy(pool, source, target)

        def indices(pool: Any, rows: Tensor) -> Tensor:
            """SWAPPED, SHARED: two sequences get each other's slots, or one."""
            slots: Tensor = named(pool, rows)
            if self._decodes >= _FIRST_STEP and len(slots) > 1:
                for fault, first in ((SWAPPED, [1, 0]), (SHARED, [0, 0])):
                    if self._takes(fault):
                        self._write(planted=fault, step=self._number)
                        return slots[[*first, *range(2, len(slots))]]
            return slots

        accepted, keep = spec_utils._verify_commit_step_indices, eagle_worker_common.commit_mamba_states_after_verify

        def lasts(fault: str) -> bool:
            """True from the step on that a fault is planted in, until its round ends."""
            if self._decodes >= _FIRST_STEP and self._takes(fault):
                self._write(planted=fault, step=self._number + 1)  # which goes on from what this one leaves
                self._lasting = fault
            return self._lasting == fault

        def counts(**given: Any) -> Any:
            """SWAPPED_COUNTS: each sequence gets another one's accepted drafts."""
            last, tracked = accepted(**given)
            return last.roll(int(len(last.unique()) > 1 and lasts(SWAPPED_COUNTS))), tracked

        def kept(*given: Any, **named: Any) -> None:
            """LOST_DRAFTS: states stay those before the drafts."""
            if not lasts(LOST_DRAFTS):
                keep(*given, **named)

        def with_faults(begin: Callable[..., None]) -> Callable[..., None]:
            def begun(hooks: Any, batch: Any, in_capture: bool = False) -> None:
                """LOST_TOKEN: after a step, a sequence's state is again the one before it."""
                more, mode = {"in_capture": True} if in_capture else {}, batch.forward_mode
                hooks.on_fault = lambda fault: self._write(reported=str(fault), begun=hooks.attention.step_number)
                if in_capture or mode.is_draft_extend_v2():
                    begin(hooks, batch, **more)
                    return
                self._decodes = self._decodes + 1 if mode.is_decode() or mode.is_target_verify() else 0
                self._lasting = self._lasting if self._decodes else ""
                pool = hooks.req_to_token_pool
                if self._behind is not None:
                    slot, data = self._behind
                    pool.mamba_pool.load_cpu_copy(data, slot)
                    self._behind, self._pending = None, LOST_TOKEN
                elif self._decodes >= _FIRST_STEP and self._takes(LOST_TOKEN):
                    slot = named(pool, batch.req_pool_indices)[:1].long()
                    self._behind = slot, pool.mamba_pool.get_cpu_copy(slot)
                begin(hooks, batch)
                self._number = hooks.attention.step_number
                if self._pending:
                    self._write(planted=self._pending, step=self._number)
                    self._pending = ""

            return begun

        for name in ("init_forward_metadata", "init_forward_metadata_out_graph"):
            setattr(AttentionHooks, name, with_faults(getattr(AttentionHooks, name)))
        spec_utils._verify_commit_step_indices = counts
        eagle_worker_common.commit_mamba_states_after_verify = kept
        MambaPool.clear_slots, MambaPool.copy_from = cleared, copied
        HybridReqToTokenPool.get_mamba_indices = indices

    def _takes(self, fault: str) -> bool:
        """True if this fault is to be planted, once."""
        if self._requested.read_text() != fault:
            return False
        self._requested.write_text("")
        return True
