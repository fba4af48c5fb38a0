"""Torch twins of kernels/states: same signatures, same results, fixed shapes, no host synchronisation.

They take one token of every sequence at a time, and as many as the padded shape allows.
"""

import torch
from torch import Tensor

from rocm_attn.kernels.states.arguments import (
    BEGINS,
    NORM_EPSILON,
    ConvolutionSlots,
    ConvolutionWeights,
    RecurArgs,
    RecurrenceRule,
    StatePlaces,
)


def convolve(
    x: Tensor, out: Tensor, convolution: ConvolutionWeights, slots: ConvolutionSlots, places: StatePlaces
) -> None:
    """Twin of launch_convolve. All tokens are summed at once, place by place of the width."""
    slots.check(x, out, convolution, places)
    weight, inputs = convolution.weight, slots.inputs
    before = weight.shape[1] - 1
    token = torch.arange(places.num_tokens, device=x.device)
    seq, is_token = _seq_of_token(places)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    if convolution.bias is not None:
        total += convolution.bias.float()
    for back in range(before, -1, -1):
        row = token - places.q_indptr.long()[seq] - back
        total += weight[:, before - back].float() * _stream_rows(x, inputs, places, seq, row, before).float()
    # In float32 torch's sigmoid gives other bits in its vectors than in the elements that are left after them.
    result = total * total.double().sigmoid().float() if convolution.silu else total
    out.copy_(torch.where(is_token[:, None], result, 0))
    q_len, is_kept = _lengths(places, slots.most_kept(before + 1))
    # [S, W - 1 + D]: rows before the first new token, and then it and the next ones.
    row = torch.arange(inputs.shape[1], device=x.device) - before + torch.where(is_kept, 0, q_len)[:, None]
    all_seqs = torch.arange(places.num_seqs, device=x.device)[:, None].expand(row.shape)
    written = _stream_rows(x, inputs, places, all_seqs, row, before)
    _write(inputs, places, written, row < q_len[:, None])


def recur(args: RecurArgs, *, deterministic: bool) -> None:
    """Twin of launch_recur. It takes tokens one by one in any case, and needs no workspace."""
    tokens, recurrence, slots, places, _ = args
    slots.check(tokens, places)
    most_kept, source = slots.most_kept, places.source.clamp(min=0).long()
    q_len, is_kept = _lengths(places, most_kept)
    pending = _pending(places)
    state = torch.where(_of_seqs(places.source != BEGINS, 4), slots.state[source].float(), 0)
    first_state = state
    groups = slots.state.shape[1] // slots.k.shape[2]
    # Rows of the kept tokens of all sequences, then of the new tokens, and a last one of zeros. Kept ones have changes
    # in place of v, and no beta.
    first_new = places.num_seqs * most_kept
    q, k, v, decay, beta = (
        torch.cat([kept[source].flatten(0, 1).float(), given.float(), given.new_zeros(1, *given.shape[1:])])
        for given, kept in (
            (tokens.q, torch.zeros_like(slots.k)),
            (tokens.k, slots.k),
            (tokens.v, slots.change),
            (tokens.decay, slots.decay),
            (tokens.beta, torch.zeros_like(slots.change[..., 0])),
        )
    )
    q, k = (rows.repeat_interleave(groups, 1) for rows in (q, k))
    q, of_k = q * _scale(q, recurrence), _scale(k, recurrence)
    factor = (decay if slots.has_channels else decay[..., None]).exp()[..., None]
    # [steps, S]: the row that a step of the loop takes of each sequence, and the token whose result it makes.
    step = torch.arange(most_kept + places.max_q_len, device=q.device)[:, None]
    new = step - pending
    is_old, is_new = new < 0, (new >= 0) & (new < q_len) & (places.source >= BEGINS)
    at = torch.where(is_new, places.q_indptr[:-1].long() + new, places.num_tokens)
    kept_row = torch.arange(places.num_seqs, device=q.device) * most_kept + step
    row = torch.where(is_old, kept_row, first_new + at)
    # The last row takes the results of steps of the loop that are no token's.
    results, changes = torch.zeros(2, places.num_tokens + 1, *tokens.out.shape[1:], device=tokens.out.device)
    steps = zip(row, at, is_old[..., None, None], _of_seqs(is_old | is_new, 5), _of_seqs(new == 0, 5), strict=True)
    for of_seq, token, is_kept_change, is_taken, is_first in steps:
        first_state = torch.where(is_first, state, first_state)
        decayed, column = state * factor[of_seq], k[of_seq][..., None]
        change = v[of_seq] - of_k[of_seq] * (column * decayed).sum(2) if recurrence.corrects else v[of_seq]
        change = torch.where(is_kept_change, v[of_seq], beta[of_seq][..., None] * of_k[of_seq] * change)
        state = torch.where(is_taken, decayed + column * change[..., None, :], state)
        results[token] = recurrence.scale * (q[of_seq][..., None] * state).sum(2)
        changes[token] = change
    tokens.out.copy_(results[:-1])
    kept_state = torch.where(_of_seqs(is_kept, 4), first_state, state)
    _write(slots.state, places, kept_state.to(slots.state.dtype), torch.ones_like(is_kept))
    if most_kept and places.num_tokens:
        row = torch.arange(most_kept, device=q_len.device)
        at = (places.q_indptr[:-1, None].long() + row).clamp(max=places.num_tokens - 1)
        is_written = is_kept[:, None] & (row < q_len[:, None])
        for side, given in (
            (slots.k, tokens.k),
            (slots.change, changes),
            (slots.decay, tokens.decay),
        ):
            _write(side, places, given[at], is_written)


def _of_seqs(values: Tensor, dims: int) -> Tensor:
    """Values of sequences, followed by dimensions of 1 up to `dims` of them."""
    return values.view(*values.shape, *(1,) * (dims - values.dim()))


def _lengths(places: StatePlaces, most_kept: int) -> tuple[Tensor, Tensor]:
    """New tokens of each sequence, and whether they are kept, int64 and bool [S]."""
    q_len = places.q_indptr.diff().long()
    return q_len, q_len <= most_kept


def _pending(places: StatePlaces) -> Tensor:
    """Kept tokens that are folded in, int64 [S]."""
    return torch.where(places.source >= 0, places.pending, 0).long()


def _seq_of_token(places: StatePlaces) -> tuple[Tensor, Tensor]:
    """The sequence of each token, int64 [T], and whether it belongs to one that is not left out, bool [T]."""
    token = torch.arange(places.num_tokens, device=places.source.device)
    seq = torch.searchsorted(places.q_indptr[1:].long(), token, right=True)
    is_token = seq < places.num_seqs
    seq = seq.clamp(max=places.num_seqs - 1)
    return seq, is_token & (places.source[seq] >= BEGINS)


def _stream_rows(x: Tensor, inputs: Tensor, places: StatePlaces, seq: Tensor, row: Tensor, before: int) -> Tensor:
    """Inputs of sequences: rows from 0 are new tokens, earlier ones are in the source slot, or 0 before it begins."""
    at = (places.q_indptr.long()[seq] + row).clamp(0, max(places.num_tokens - 1, 0))
    old = (before + _pending(places)[seq] + row).clamp(0, inputs.shape[1] - 1)
    from_slot = torch.where(
        (places.source[seq] >= 0)[..., None], inputs[places.source.clamp(min=0).long()[seq], old], 0
    )
    return torch.where((row >= 0)[..., None], x[at] if len(x) else torch.zeros_like(from_slot), from_slot)


def _scale(rows: Tensor, recurrence: RecurrenceRule) -> Tensor:
    """The factor of each row [..., 1]: by its norm, or 1."""
    if not recurrence.normalises:
        return torch.ones_like(rows[..., :1])
    return (rows.square().sum(-1, keepdim=True) + NORM_EPSILON).rsqrt()


def _write(side: Tensor, places: StatePlaces, values: Tensor, is_written: Tensor) -> None:
    """Writes rows of sequences to their target slots. values: [S, ...]; is_written: bool [S] or [S, rows]

    Shapes stay fixed: a sequence that is left out repeats the write of one that is not, or, if all are, writes the
    content of slot 0 again. Rows that are not written keep their content.
    """
    live = places.source >= BEGINS
    any_live = live.any()
    seq = torch.where(live, torch.arange(len(live), device=live.device), live.int().argmax())
    slot = torch.where(any_live, places.target[seq].long(), 0)
    mask = (any_live & is_written[seq]).view(*is_written.shape, *(1,) * (side.dim() - is_written.dim()))
    side[slot] = torch.where(mask, values[seq], side[slot])
