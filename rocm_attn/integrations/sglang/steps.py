"""Converts steps of SGLang to ExternalStep."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rocm_attn.errors import BadBatch, NeverFits
from rocm_attn.integrations.sglang.images import CausalImages
from rocm_attn.integrations.sglang.seen import PAD_ROW, ForwardBatchView, on_host, real_sequences
from rocm_attn.step.external_step import NO_CELLS, ONE_EACH, BoolCells, Boundaries, ExternalStep, NewLengths, NoCells


class KvLengths:
    """Lengths that differ from SGLang's own tensor, in fixed memory: a replay allocates nothing."""

    def __init__(self, most: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self._lengths = torch.zeros(most, dtype=torch.int64, device=device)
            self._is_pad = torch.zeros(most, dtype=torch.bool, device=device)

    def of(self, batch: ForwardBatchView, *, more: int, copies: int = 1, hides_pads: bool) -> Tensor:
        """Returns int64 [batch_size * copies]: each sequence's tokens plus `more`. The next call overwrites it.

        hides_pads: whether sequences in row 0, which SGLang keeps for padding, get length 0
        Raises NeverFits.
        """
        count, most = batch.batch_size, len(self._lengths)
        if count * copies > most:
            raise NeverFits(
                f"a step has {count * copies} sequences and the most is {most}; raise --max-running-requests"
            )
        lengths = self._lengths[: count * copies].view(count, copies)
        torch.add(batch.seq_lens[:count, None].expand(-1, copies), more, out=lengths)
        if hides_pads:
            is_pad = torch.eq(batch.req_pool_indices[:count], PAD_ROW, out=self._is_pad[:count])
            lengths.masked_fill_(is_pad[:, None], 0)
        return lengths.view(-1)


@dataclass(slots=True)
class StepMaker:
    """Makes the steps of one attention backend.

    num_seqs:   the most sequences of a step
    max_kv_len: tokens of the longest sequence
    images:     of prompts
    """

    num_seqs: int
    max_kv_len: int
    device: torch.device
    images: CausalImages = field(default_factory=CausalImages)
    _same: dict[int, Tensor] = field(default_factory=dict)
    _kv_len: KvLengths = field(init=False)

    def __post_init__(self) -> None:
        self._kv_len = KvLengths(self.num_seqs, self.device)

    def eager(self, batch: ForwardBatchView) -> ExternalStep | None:
        """Returns a step that is run at once, or None if there is nothing to attend to."""
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

    def graphed(self, batch: ForwardBatchView, cells: BoolCells | NoCells, *, in_capture: bool) -> ExternalStep:
        """Returns a step that is captured or replayed: one token per sequence, or the same number of drafts for each.

        At a capture all of its sequences count as padding, whatever the runner's tensors hold.
        cells: the mask of a captured step
        """
        mode, real = batch.forward_mode, 0 if in_capture else real_sequences(batch)
        num_seqs = batch.batch_size if real is None else real
        if mode.is_target_verify() or mode.is_draft_extend_v2():
            return self._drafts(batch, num_seqs, cells, captured=True, hides_pads=real is None)
        if mode.is_decode() or mode.is_idle():
            return self._decode(batch, num_seqs, captured=True, hides_pads=real is None)
        raise BadBatch(f"{mode} steps cannot be captured; only decode, verified drafts and extended drafts can")

    def branches(self, batch: ForwardBatchView, number: int, branches: int, *, captured: bool) -> ExternalStep:
        """Returns the number-th step of drafts after a batch's tokens: one new token per branch of a sequence.

        With one branch, sequences use their rows of SGLang's table. Otherwise each branch has a row in a table of
        branches.
        """
        kv_len = self._kv_len.of(batch, more=number + 1, copies=branches, hides_pads=True)
        count, rows = kv_len.shape[0], batch.req_pool_indices[: batch.batch_size] if branches == 1 else None
        return ExternalStep(count, count, count, kv_len, ONE_EACH, rows, 1, 1, self.max_kv_len, captured)

    def _decode(
        self, batch: ForwardBatchView, num_seqs: int, *, captured: bool, hides_pads: bool = False
    ) -> ExternalStep:
        count, rows = batch.batch_size, batch.req_pool_indices
        kv_len = self._kv_len.of(batch, more=0, hides_pads=True) if hides_pads else batch.seq_lens
        longest = self.max_kv_len if captured else self._longest(batch)
        return ExternalStep(num_seqs, count, count, kv_len, ONE_EACH, rows, 1, 1, longest, captured)

    def _drafts(
        self,
        batch: ForwardBatchView,
        num_seqs: int,
        cells: BoolCells | NoCells,
        *,
        captured: bool,
        hides_pads: bool = False,
    ) -> ExternalStep:
        """Returns a step with the same number of new tokens in each sequence, unless the batch says how many each has.

        SGLang captures none of the latter (DSpark's compact mode) with this backend.
        """
        verifies, count, rows = batch.forward_mode.is_target_verify(), batch.batch_size, batch.req_pool_indices
        width = draft_width(batch)
        ragged = getattr(batch.spec_info, "ragged_verify_layout", None) if verifies else None
        if ragged is not None:
            lens, tokens = ragged.verify_lens[:count], max(1, len(batch.positions))
            kv_len, new = batch.seq_lens[:count] + lens, NewLengths(lens)
            return ExternalStep(num_seqs, count, tokens, kv_len, new, rows, 1, width, self.max_kv_len, mask=cells)
        more = width if verifies else 0
        kv_len = self._kv_len.of(batch, more=more, hides_pads=hides_pads) if more or hides_pads else batch.seq_lens
        has_one = width == 1 and isinstance(cells, NoCells)
        q = ONE_EACH if has_one else NewLengths(self._of_width(width, count))
        # The host's lengths may be out of date here: the device is the first to know how many drafts were accepted.
        return ExternalStep(
            num_seqs, count, count * width, kv_len, q, rows, width, width, self.max_kv_len, captured, mask=cells
        )

    def _extend(self, batch: ForwardBatchView, num_seqs: int) -> ExternalStep:
        lens = on_host(batch.extend_seq_lens_cpu)
        if lens is None:
            raise BadBatch("a batch that extends has no extend_seq_lens_cpu; its number of tokens must be known")
        lens, mask = lens[: batch.batch_size], self.images.of(batch)
        most = max(lens)
        has_one = lens == [1] * batch.batch_size and isinstance(mask, NoCells)
        return ExternalStep(
            num_seqs,
            batch.batch_size,
            max(1, sum(lens)),
            batch.seq_lens,
            ONE_EACH if has_one else NewLengths(batch.extend_seq_lens),
            batch.req_pool_indices,
            min(lens),
            max(1, most),
            self._longest(batch),
            mask=mask,
        )

    def _longest(self, batch: ForwardBatchView) -> int:
        on_cpu = batch.seq_lens_cpu
        if on_cpu is None:
            return self.max_kv_len
        return max(1, min(self.max_kv_len, int(on_cpu[: batch.batch_size].max())))

    def _of_width(self, width: int, count: int) -> Tensor:
        """Returns int32 [count], all equal to width. Graphs read it in place, so it is made once for all counts."""
        same = self._same.get(width)
        if same is None or same.shape[0] < count:
            with torch.inference_mode(False):
                same = torch.full((max(count, self.num_seqs),), width, dtype=torch.int32, device=self.device)
            self._same[width] = same
        return same


def draft_width(batch: ForwardBatchView) -> int:
    """Returns the tokens per sequence of a batch that verifies or extends drafts."""
    spec = batch.spec_info
    return int(spec.draft_token_num if batch.forward_mode.is_target_verify() else spec.num_tokens_per_req)


def has_tree(batch: ForwardBatchView) -> bool:
    """True if drafts are verified with a mask and are not known to be a chain, which is causal."""
    spec = batch.spec_info
    if not batch.forward_mode.is_target_verify() or getattr(spec, "custom_mask", None) is None:
        return False
    branches = getattr(spec, "tree_topk", getattr(spec, "topk", None))
    return branches != 1


def _cells(batch: ForwardBatchView) -> BoolCells | NoCells:
    if not has_tree(batch):
        return NO_CELLS
    return BoolCells(batch.spec_info.custom_mask, batch.positions)


def as_sglang_makes_it(step: ExternalStep) -> ExternalStep:
    """Returns a step in the form of StepMaker.eager(): int64 lengths and rows, and new tokens as lengths."""
    q = NewLengths(step.q.of_seq.diff()) if isinstance(step.q, Boundaries) else step.q
    rows = torch.arange(step.num_seqs, device=step.kv_len.device)
    return replace(step, kv_len=step.kv_len.long(), q=q, rows=rows)
