"""Publisher: carries what the host decided to the device, before the step's graph or launches run.

Order on the stream: page copies, table updates, the step's inputs. Changes stay pending until their launch
was enqueued. How a step went comes back in the ring slot of the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rocm_attn.errors import DeviceFault
from rocm_attn.host_ring import Fence, HostRing, wait_for
from rocm_attn.kernels.metadata.error_word import ERROR_WORD
from rocm_attn.kernels.metadata.slot_layout import ECHO, HEADER_WORDS, NO_ECHO, STEP, STEP_BEFORE, slot_words
from rocm_attn.kv_pool import HybridKVPool
from rocm_attn.page_table import PageTable
from rocm_attn.providers.contract import StepOps
from rocm_attn.request_table import RequestTable
from rocm_attn.split_batch import HALVES
from rocm_attn.step_batch import INT32_MAX, Int32Array, StepBatch
from rocm_attn.step_echo import EchoCheck, fault_of
from rocm_attn.step_inputs import ON_HOST, DeviceInputs
from rocm_attn.step_mask import StepMask, mask_bytes
from rocm_attn.step_memory import DeviceStep
from rocm_attn.step_prefixes import SharedPrefixes

# (launch, forget): launches what carries a change to the device, and forgets that the change is pending.
Deliver = Callable[[Callable[[], None], Callable[[], None]], None]


def launch_then_forget(launch: Callable[[], None], forget: Callable[[], None]) -> None:
    """A change whose launch raises stays pending."""
    launch()
    forget()


@dataclass(slots=True)
class _Line:
    """A line of steps, each of which is published from a ring slot and echoes the step before it there.

    counts: of the step that was published last
    number: its number
    """

    ring: HostRing
    check_echo: Callable[[Int32Array], None]
    counts: Tensor | None = None
    number: int = 0

    def check(self) -> None:
        """As Publisher.check_device."""
        for words in self.ring.written():
            if words[ECHO]:
                self.check_echo(words)
        if self.counts is None:
            return
        _, _, number, error_word = self.counts.tolist()
        self.counts[STEP], self.counts[ERROR_WORD] = self.number, 0
        if number != self.number:
            raise DeviceFault(
                f"the device has the counts of step {number} where step {self.number} was published last; "
                "look for what wrote to the step's counts, or for a kernel launch that was lost",
                self.number,
            )
        if error_word:
            raise fault_of(number, error_word)


class Publisher:
    """Writes ring slots and launches the kernels that read them.

    ring_wait: waits for the fence behind a ring slot's readers
    deliver:   launches a pending change of the table or of its pages
    new_echo_check: makes what looks at the echo of a step when its ring slot comes back
    """

    def __init__(
        self,
        ops: StepOps,
        table: RequestTable,
        pool: HybridKVPool,
        *,
        ring_wait: Callable[[Fence], None] = wait_for,
        deliver: Deliver = launch_then_forget,
        new_echo_check: Callable[[], Callable[[Int32Array], None]] = EchoCheck,
    ) -> None:
        self._ops = ops
        self._table = table
        self._pool = pool
        self._deliver = deliver
        # One for each child, so that the host may be as many split steps ahead as others.
        self._lines = tuple(_Line(HostRing(pool.device, wait=ring_wait), new_echo_check()) for _ in range(HALVES))
        # A step takes up to two slots a space: of copies and of cells.
        self._updates = HostRing(pool.device, depth=2 * 2 * len(table.spaces), wait=ring_wait)
        self.step_number = 0

    def apply_table_changes(self) -> None:
        """Bring the device's pages and table up to date with the host's."""
        for table in self._table.spaces:
            pending = table.pending
            if pending.copies:
                self._copy_pages(table)
            if pending.cells:
                updates = table.pending_updates()
                slot, words = self._updates.acquire(updates.size)
                words[: updates.size] = updates.reshape(-1)
                launch = partial(self._ops.table_update, slot, table.entries, num_updates=len(updates))
                self._deliver(launch, pending.cells.clear)
                self._updates.release()

    def _copy_pages(self, table: PageTable) -> None:
        """Launch a space's pending copies. No target is a source, so a launch that failed half way may run again."""
        copies = table.pending.copies
        slot, words = self._updates.acquire(2 * len(copies))
        words[: len(copies)], words[len(copies) : 2 * len(copies)] = list(copies), list(copies.values())
        try:
            # int64 on the device: a copy that converts would do so on the host, and wait.
            ids = slot[: 2 * len(copies)].to(self._pool.device, non_blocking=True).to(torch.int64)
            target, source = ids[: len(copies)], ids[len(copies) :]
            copy_pages = self._pool.in_space(table.space).copy_pages
            self._deliver(partial(copy_pages, source, target), table.copies_made)
        finally:
            self._updates.release()

    def publish(self, batch: StepBatch, step: DeviceStep, child: int) -> None:
        """Write the inputs of a child of a step, pads included, to their fixed addresses.

        batch: the sequences of this child; a step that is not split is child 0 of itself
        Raises DeviceFault for an earlier step.
        """
        num_seqs, num_ids = batch.num_seqs, len(batch.token_ids)
        line = self._lines[child]
        end = slot_words(num_seqs, num_ids)
        # With room for prefixes and floors, whether there are any or not.
        slot, words = line.ring.acquire(end + 3 * num_seqs)
        if words[ECHO]:
            line.check_echo(words)
        number = (self.step_number + 1) & INT32_MAX
        words[0], words[1], words[STEP], words[3] = num_seqs, batch.num_tokens, number, num_ids > 0
        words[STEP_BEFORE], words[ECHO] = line.number, NO_ECHO
        kv_at, q_at, ids_at = HEADER_WORDS + num_seqs, HEADER_WORDS + 2 * num_seqs, HEADER_WORDS + 3 * num_seqs
        words[HEADER_WORDS:kv_at], words[kv_at:q_at], words[q_at:ids_at] = batch.rows, batch.kv_len, batch.q_len
        words[ids_at:end] = batch.token_ids
        if isinstance(batch.prefixes, SharedPrefixes):
            words[end : end + num_seqs] = batch.prefixes.prefix_len
            words[end + num_seqs : end + 2 * num_seqs] = batch.prefixes.group_end
        if isinstance(batch.inputs, DeviceInputs):
            on_host = batch.inputs.lengths_on_host
            words[end + 2 * num_seqs : end + 3 * num_seqs] = 0 if on_host else self._table.floors(batch.rows)
        try:
            counts = step.inputs.counts
            self._ops.publish(slot, counts if line.counts is None else line.counts, step.inputs)
            # Only what was launched is expected to be echoed.
            line.counts, line.number, self.step_number = counts, number, number
            if isinstance(batch.inputs, DeviceInputs):
                self._place(batch.inputs, slot, num_seqs, num_ids, step)
            if isinstance(batch.mask, StepMask):
                bits = batch.mask.bits[: mask_bytes(batch.kv_len, batch.q_len)]
                self._ops.place_mask(
                    bits, batch.mask.positions, step.inputs.counts, step.metadata.mask_words, step.positions
                )
        except BaseException:
            words[ECHO] = 0
            raise
        finally:
            line.ring.release()

    def let_go(self) -> None:
        """Hold no memory of steps: it is given up. What the last step has left there is kept for its echo."""
        for line in self._lines:
            if line.counts is not None:
                with torch.inference_mode(False):  # check_device() writes to it outside of that mode too
                    line.counts = line.counts.clone()

    def check_device(self) -> None:
        """Raise DeviceFault for a step that went wrong and was not told of yet. The device has nothing left to do."""
        for line in self._lines:
            line.check()

    def _place(self, inputs: DeviceInputs, slot: Tensor, num_seqs: int, num_ids: int, step: DeviceStep) -> None:
        """Put the caller's tensors in the place of what the host has published; it stays where there is no tensor."""
        kv_at, q_at = HEADER_WORDS + num_seqs, HEADER_WORDS + 2 * num_seqs
        ids_at, end = HEADER_WORDS + 3 * num_seqs, slot_words(num_seqs, num_ids)
        self._ops.device_inputs(
            slot,
            slot[kv_at:q_at] if inputs.kv_len is ON_HOST else inputs.kv_len,
            slot[q_at:ids_at] if inputs.q_len is ON_HOST else inputs.q_len,
            slot[ids_at:end] if inputs.token_ids is ON_HOST else inputs.token_ids,
            slot[end + 2 * num_seqs : end + 3 * num_seqs],
            step.inputs.counts,
            step.inputs.kv_len,
            step.inputs.q_len,
            step.inputs.token_ids,
        )
