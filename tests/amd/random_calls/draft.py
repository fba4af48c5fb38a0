"""Draft: a step that the tester wants to run, as the host sees it and as the device does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from rocm_attn.batch.inputs import HOST_INPUTS, ON_HOST, DeviceInputs, Inputs
from rocm_attn.batch.mask import NO_MASK, StepMask
from rocm_attn.batch.prefixes import NO_PREFIXES, Prefixes
from rocm_attn.batch.step_batch import StepBatch
from tests.amd.random_calls.model import NOT_FINITE_ID
from tests.amd.random_calls.oracle import Bools
from tests.amd.random_calls.seq import Seq


@dataclass(slots=True)
class Draft:
    """A step.

    on_device:   which of kv_len, q_len and token_ids the device alone knows
    is_plain:    whether nothing may refuse it
    may_be_reported: whether the device may report it, although what the step gives must be right
    is_beyond:   whether lengths on the device are out of bounds: its outcome is not compared; it must be reported
    is_bad:      whether every runtime must refuse it
    """

    seqs: list[Seq]
    on_device: frozenset[str] = frozenset()
    has_mask: bool = False
    prefixes: Prefixes = NO_PREFIXES
    pad_to: int | None = None
    is_plain: bool = False
    may_be_reported: bool = False
    is_beyond: bool = False
    is_bad: bool = False
    extra_mask_bytes: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """New tokens."""
        return sum(len(seq.ids) for seq in self.seqs)

    @property
    def must_be_reported(self) -> bool:
        """True if the device must report the step."""
        return self.is_beyond or any(NOT_FINITE_ID in seq.ids for seq in self.seqs)

    def batch(self, device: torch.device) -> StepBatch:
        """For the runtime. Raises BadBatch, BadTensor."""
        ids = [token_id for seq in self.seqs for token_id in seq.ids]
        room = sum(seq.q_bound for seq in self.seqs)
        inputs: Inputs = HOST_INPUTS
        if self.on_device:
            given = {
                "kv_len": [seq.kv_on_device for seq in self.seqs],
                "q_len": [seq.q_on_device for seq in self.seqs],
                "token_ids": ids + [1] * (room - len(ids)),
            }
            tensors = {name: _int32(given[name], device) for name in sorted(self.on_device)}
            kv_len, q_len, on_device = (tensors.get(name, ON_HOST) for name in given)
            inputs = DeviceInputs(kv_len, q_len, on_device)
        token_ids = [] if "token_ids" in self.on_device else ids + [1] * (room - len(ids))
        return StepBatch(
            np.array([seq.row for seq in self.seqs], np.int32),
            np.array([seq.kv_bound for seq in self.seqs], np.int32),
            np.array([seq.q_bound for seq in self.seqs], np.int32),
            np.array(token_ids, np.int32),
            inputs=inputs,
            mask=self._mask(device, room) if self.has_mask else NO_MASK,
            prefixes=self.prefixes,
        )

    def _mask(self, device: torch.device, room: int) -> StepMask:
        cells: list[Bools] = [seq.shows.ravel() for seq in self.seqs if seq.shows is not None]
        packed = np.packbits(np.concatenate([*cells, np.zeros(0, np.bool_)]), bitorder="little")
        most = -(-sum(seq.q_bound * seq.kv_bound for seq in self.seqs) // 8)
        bits = np.full(max(most, len(packed)) + self.extra_mask_bytes, 255, np.uint8)
        bits[: len(packed)] = packed
        # Bits after the last cell are no one's.
        positions = [position for seq in self.seqs for position in seq.positions]
        return StepMask(torch.from_numpy(bits).to(device), _int32(positions + [0] * (room - len(positions)), device))

    def words(self) -> str:
        """For the log."""
        seqs = ", ".join(
            f"row {seq.row} [{seq.begin}, {seq.end})"
            + (f" of {seq.kv_bound}/{seq.q_bound}" if (seq.kv_bound, seq.q_bound) != (seq.end, len(seq.ids)) else "")
            for seq in self.seqs
        )
        notes = [*self.notes, *sorted(self.on_device), *(["mask"] if self.has_mask else [])]
        notes += [] if self.pad_to is None else [f"padded to {self.pad_to}"]
        return f"{seqs or 'no sequence'}{' (' + ', '.join(notes) + ')' if notes else ''}"


def _int32(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=device)
