"""Publisher: carries what the host decided to the device, before the step's graph or launches run.

Order on the stream: page copies, table updates, the step's inputs. Changes stay pending until their launch
was enqueued.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from rocm_attn.host_ring import Fence, HostRing, wait_for
from rocm_attn.kernels.metadata.slot_layout import HEADER_WORDS, slot_words
from rocm_attn.kv_pool import KVPool
from rocm_attn.plan import StepPlan
from rocm_attn.providers.contract import StepOps
from rocm_attn.request_table import RequestTable
from rocm_attn.split_batch import HALVES
from rocm_attn.step_batch import INT32_MAX, StepBatch
from rocm_attn.step_memory import DeviceStep

# (launch, forget): launches what carries a change to the device, and forgets that the change is pending.
Deliver = Callable[[Callable[[], None], Callable[[], None]], None]


def launch_then_forget(launch: Callable[[], None], forget: Callable[[], None]) -> None:
    """A change whose launch raises stays pending."""
    launch()
    forget()


class Publisher:
    """Writes ring slots and launches the kernels that read them.

    ring_wait: waits for the fence behind a ring slot's readers
    deliver:   launches a pending change of the table or of its pages
    """

    def __init__(
        self,
        ops: StepOps,
        table: RequestTable,
        pool: KVPool,
        *,
        ring_wait: Callable[[Fence], None] = wait_for,
        deliver: Deliver = launch_then_forget,
    ) -> None:
        self._ops = ops
        self._table = table
        self._pool = pool
        self._deliver = deliver
        # One for each child, so that the host may be as many split steps ahead as others.
        self._inputs = tuple(HostRing(pool.device, wait=ring_wait) for _ in range(HALVES))
        self._updates = HostRing(pool.device, wait=ring_wait)
        self._step_number = 0

    def apply_table_changes(self) -> None:
        """Bring the device's pages and table up to date with the host's."""
        pending = self._table.pending
        if pending.copies:
            # Blocking copies of a few ids: sharing a partly filled page is rare.
            target = torch.tensor(list(pending.copies.keys()), device=self._pool.device)
            source = torch.tensor(list(pending.copies.values()), device=self._pool.device)
            self._deliver(partial(self._pool.copy_pages, source, target), pending.copies.clear)
        if pending.cells:
            updates = self._table.pending_updates()
            slot, words = self._updates.acquire(updates.size)
            words[: updates.size] = updates.reshape(-1)
            launch = partial(self._ops.table_update, slot, self._table.entries, num_updates=len(updates))
            self._deliver(launch, pending.cells.clear)
            self._updates.release()

    def publish(self, batch: StepBatch, plan: StepPlan, step: DeviceStep, child: int) -> None:
        """Write the inputs of a child of a step, pads included, to their fixed addresses.

        batch: the sequences of this child; a step that is not split is child 0 of itself
        """
        ring = self._inputs[child]
        num_seqs, num_ids = batch.num_seqs, len(batch.token_ids)
        slot, words = ring.acquire(slot_words(num_seqs, num_ids))
        self._step_number = (self._step_number + 1) & INT32_MAX
        words[0], words[1], words[2], words[3] = num_seqs, batch.num_tokens, self._step_number, num_ids > 0
        at = HEADER_WORDS
        for values in (batch.rows, batch.kv_len, batch.q_len, batch.token_ids):
            words[at : at + len(values)] = values
            at += len(values)
        metadata = step.metadata
        self._ops.publish(
            slot,
            metadata.counts,
            metadata.table.row_of_seq,
            metadata.kv_len,
            metadata.q_len,
            step.token_ids,
            pad_kv_len=plan.pad_kv_len,
            pad_q_len=plan.shape.pad_q_len,
        )
        ring.release()
