"""Steps of SGLang as ExternalStep says them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rocm_attn.errors import BadBatch
from rocm_attn.integrations.sglang.seen import PAD_ROW, Batch, on_host, real_sequences
from rocm_attn.step.external_step import NO_CELLS, ONE_EACH, BoolCells, ExternalStep, Lengths, NoCells


@dataclass(slots=True)
class StepMaker:
    """Makes the steps of one attention backend.

    num_seqs:   most sequences of a step
    max_kv_len: tokens of the longest sequence
    """

    num_seqs: int
    max_kv_len: int
    device: torch.device
    _same: dict[int, Tensor] = field(default_factory=dict)

    def eager(self, batch: Batch) -> ExternalStep | None:
        """A step that is run at once; None where there is nothing to attend to."""
        mode = batch.forward_mode
        if mode.is_idle() or batch.batch_size == 0:
            return None
        real = real_sequences(batch)
        num_seqs = batch.batch_size if real is None else real
        if mode.is_decode():
            return self._decode(batch, num_seqs, captured=False)
        if mode.is_target_verify() or mode.is_draft_extend_v2():
            return self._drafts(batch, num_seqs, _cells(batch), captured=False)
        return self._extend(batch, num_seqs)

    def graphed(self, batch: Batch, cells: BoolCells | NoCells, *, in_capture: bool) -> ExternalStep:
        """A step that is captured or replayed: of one token each, or of as many drafts each.

        At a capture all of its sequences are pads, whatever the runner's tensors hold.
        cells: where a captured step's mask lies
        """
        mode, real = batch.forward_mode, 0 if in_capture else real_sequences(batch)
        num_seqs = batch.batch_size if real is None else real
        if mode.is_target_verify() or mode.is_draft_extend_v2():
            return self._drafts(batch, num_seqs, cells, captured=True, hides_pads=real is None)
        if mode.is_decode() or mode.is_idle():
            return self._decode(batch, num_seqs, captured=True, hides_pads=real is None)
        raise BadBatch(f"{mode} cannot be captured; only decode, verified drafts and extended drafts can")

    def branches(self, kv_len: Tensor, rows: Tensor | None, *, captured: bool) -> ExternalStep:
        """One new token for each branch of drafts. kv_len: int64 [branches], 0 for pads"""
        count = kv_len.shape[0]
        return ExternalStep(count, count, count, kv_len, ONE_EACH, rows, 1, 1, self.max_kv_len, captured)

    def _decode(self, batch: Batch, num_seqs: int, *, captured: bool, hides_pads: bool = False) -> ExternalStep:
        count, rows = batch.batch_size, batch.req_pool_indices
        kv_len = without_pads(batch.seq_lens, rows) if hides_pads else batch.seq_lens
        longest = self.max_kv_len if captured else self._longest(batch)
        return ExternalStep(num_seqs, count, count, kv_len, ONE_EACH, rows, 1, 1, longest, captured)

    def _drafts(
        self, batch: Batch, num_seqs: int, cells: BoolCells | NoCells, *, captured: bool, hides_pads: bool = False
    ) -> ExternalStep:
        """As many new tokens in each sequence."""
        verifies, count, rows = batch.forward_mode.is_target_verify(), batch.batch_size, batch.req_pool_indices
        width = draft_width(batch)
        kv_len = batch.seq_lens + width if verifies else batch.seq_lens
        if hides_pads:
            kv_len = without_pads(kv_len, rows)
        new = Lengths(self._of_width(width, count))
        # The host's lengths may lag here: how many drafts were accepted is known on the device first.
        return ExternalStep(
            num_seqs, count, count * width, kv_len, new, rows, width, width, self.max_kv_len, captured, mask=cells
        )

    def _extend(self, batch: Batch, num_seqs: int) -> ExternalStep:
        lens = on_host(batch.extend_seq_lens_cpu)
        if lens is None:
            raise BadBatch("a batch that extends has no extend_seq_lens_cpu; its number of tokens must be known")
        lens = lens[: batch.batch_size]
        most = max(lens)
        return ExternalStep(
            num_seqs,
            batch.batch_size,
            max(1, sum(lens)),
            batch.seq_lens,
            Lengths(batch.extend_seq_lens),
            batch.req_pool_indices,
            min(lens),
            max(1, most),
            self._longest(batch),
        )

    def _longest(self, batch: Batch) -> int:
        on_cpu = batch.seq_lens_cpu
        if on_cpu is None:
            return self.max_kv_len
        return max(1, min(self.max_kv_len, int(on_cpu[: batch.batch_size].max())))

    def _of_width(self, width: int, count: int) -> Tensor:
        """int32 [count] of a width; graphs read it where it is, so it is made once for all counts."""
        same = self._same.get(width)
        if same is None or same.shape[0] < count:
            with torch.inference_mode(False):
                same = torch.full((max(count, self.num_seqs),), width, dtype=torch.int32, device=self.device)
            self._same[width] = same
        return same


def draft_width(batch: Batch) -> int:
    """Tokens of each sequence of a batch that verifies or extends drafts."""
    spec = batch.spec_info
    return int(spec.draft_token_num if batch.forward_mode.is_target_verify() else spec.num_tokens_per_req)


def has_tree(batch: Batch) -> bool:
    """Whether what is verified has a mask, and is not known to be a chain, which is causal."""
    spec = batch.spec_info
    if not batch.forward_mode.is_target_verify() or getattr(spec, "custom_mask", None) is None:
        return False
    branches = getattr(spec, "tree_topk", getattr(spec, "topk", None))
    return branches != 1


def without_pads(kv_len: Tensor, rows: Tensor) -> Tensor:
    """Lengths that are 0 in row 0, which SGLang keeps for pads."""
    return kv_len * (rows[: kv_len.shape[0]] != PAD_ROW)


def _cells(batch: Batch) -> BoolCells | NoCells:
    if not has_tree(batch):
        return NO_CELLS
    return BoolCells(batch.spec_info.custom_mask, batch.positions)
