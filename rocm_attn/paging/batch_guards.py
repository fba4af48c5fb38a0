"""BatchGuards: what a batch must keep to, and what it gives back, before it becomes a step of a request table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.paging.request_table import RequestTable

ForBatch = Callable[[StepBatch], None]
# (a change of the table, a batch, new tokens of a sequence that stay as they are): the rows that have changed since.
ChangedRows = Callable[[int, StepBatch, int], list[int]]


def checked_batch(table: RequestTable) -> ForBatch:
    """Batches that the table has no rows or no room for are refused."""
    return table.checks.check


def stored_before_it_is_read(table: RequestTable) -> tuple[ForBatch, ForBatch]:
    """What refuses a step that begins after what is stored, and one that stores nothing and needs more than that."""
    return table.checks.check_stored, table.checks.require_stored


def before_the_steps_windows(table: RequestTable) -> ForBatch:
    """What a step's first new tokens do not see any more is given back, and nothing else.

    A length that only the device knows may be shorter than its bound: such a step gives nothing back by itself.
    """

    def evict(batch: StepBatch) -> None:
        if batch.inputs.kv_len_on_host:
            table.evict(batch.rows, batch.kv_len - batch.q_len)

    return evict


def changed_rows(table: RequestTable) -> ChangedRows:
    """Rows that were freed or cut are others than an earlier step's; so are those whose new tokens others hold too."""
    generations = table.generations

    def changed(change: int, batch: StepBatch, num_staying: int) -> list[int]:
        if change == generations.last_change:
            return []
        rows = batch.rows
        changed = generations.changed_since(change, rows)
        if num_staying < batch.max_q_len:
            shared = generations.shared_since(change, rows)
            # Where a length that only the device knows begins is not known: any page may hold new tokens.
            if batch.inputs.lengths_on_host and shared[shared.argmax()]:
                first = batch.kv_len - batch.q_len + num_staying
                shared &= (first < table.checks.floors(rows)) & (first < batch.kv_len)
            changed |= shared
        found: list[int] = rows[changed].tolist()
        return found

    return changed


def one_draft_step_after_the_other(steps: int) -> int:
    """A draft step stores in a layer after the draft step before it has."""
    return steps


@dataclass(frozen=True, slots=True)
class BatchGuards:
    """The safeguards of a batch over a request table.

    check:  the table -> what refuses a batch that cannot be a step
    stored: the table -> see stored_before_it_is_read
    evict:  the table -> what gives back the pages that a step does not need any more
    changed: the table -> the rows that are no longer those of an earlier step, which runs again or moves its tokens
    in_turn: draft steps of a round -> those that must store one after the other
    """

    check: Callable[[RequestTable], ForBatch] = checked_batch
    stored: Callable[[RequestTable], tuple[ForBatch, ForBatch]] = stored_before_it_is_read
    evict: Callable[[RequestTable], ForBatch] = before_the_steps_windows
    changed: Callable[[RequestTable], ChangedRows] = changed_rows
    in_turn: Callable[[int], int] = one_draft_step_after_the_other
