"""split_batch: cuts a step's batch into two halves, for two-batch overlap. Host values only."""

import numpy as np

from rocm_attn.batch.mask import Mask, StepMask, TokenSpans, TreeMask
from rocm_attn.batch.prefixes import NO_PREFIXES
from rocm_attn.batch.step_batch import Int32Array, StepBatch
from rocm_attn.errors import BadBatch

# Children of a split step.
HALVES = 2


def split_point(q_len: Int32Array, most: int) -> int:
    """Returns the number of sequences that go into the first half.

    q_len: int32 [num_seqs], new tokens; the halves get as equal a share of them as a cut between sequences can give. If
           two cuts are equally good, the first half gets the larger share
    most:  sequences that a half has room for; at least half of them
    """
    num_seqs = len(q_len)
    ends = np.concatenate(([0], np.cumsum(q_len, dtype=np.int64)))
    first = np.arange(max(0, num_seqs - most), min(num_seqs, most) + 1)[::-1]
    larger = np.maximum(ends[first], ends[-1] - ends[first])
    # Cuts that are equally good for the tokens: the one with the most equal counts of sequences.
    best = np.lexsort((np.maximum(first, num_seqs - first), larger))
    return int(first[best[0]])


def split_batch(batch: StepBatch, most: int) -> tuple[StepBatch, StepBatch]:
    """The sequences before and after the cut, in order; either may be empty.

    most: see split_point
    Raises BadBatch for new tokens that only the device counts, because the cut depends on their numbers; for the bits
    of a mask, whose second part would begin within a byte; and for shared prefixes, which both halves would read.
    """
    if isinstance(batch.mask, StepMask):
        raise BadBatch(
            "a step with a packed mask cannot be split, because its bits are packed for the whole step; run it whole"
        )
    if batch.prefixes is not NO_PREFIXES:
        raise BadBatch("a step with shared prefixes cannot be split, because both halves would read them; run it whole")
    first = (batch.num_seqs + 1) // 2 if batch.min_q_len == batch.max_q_len else split_point(batch.q_len, most)
    drafts = batch.drafts
    tokens, ids = int(batch.q_len[:first].sum()) // drafts.steps, batch.token_ids
    rows, kv_len, q_len = batch.rows, batch.kv_len, batch.q_len
    parts = slice(None, first), slice(first, None)
    whole = batch.mask
    masks: list[Mask] = [whole, whole]
    if isinstance(whole, TreeMask):
        masks = [TreeMask(whole.parents[part]) for part in parts]
    elif isinstance(whole, TokenSpans):
        masks = [whole.select(np.arange(batch.num_seqs)[part]) for part in parts]
    first_part, second_part = (
        StepBatch(rows[part], kv_len[part], q_len[part], of_half, inputs=inputs, mask=mask, drafts=drafts)
        for part, of_half, inputs, mask in zip(
            parts, (ids[:tokens], ids[tokens:]), batch.inputs.cut(first, tokens), masks, strict=True
        )
    )
    return first_part, second_part
