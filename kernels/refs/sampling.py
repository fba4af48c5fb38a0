"""Torch twin of kernels/sampling: the same tokens except for rounding; sums are in float64 here."""

import torch
from torch import Tensor

from rocm_attn.kernels.sampling.parameter_columns import DEPTH, IN_PROMPT, NONE, REPETITION, TOP_K
from rocm_attn.kernels.sampling.row_results import ALL_ZERO

# Rows are drawn from this many logits at a time, in float64: about 4 MB.
_LOGITS_AT_ONCE = 1 << 16


def pick_rows(logits: Tensor, terms: Tensor, tokens: Tensor, found: Tensor, *, num_drawing: int) -> None:
    """Twin of launch_pick_rows; runs outside of recordings. Tensors may be on any device."""
    best, ids = logits.max(-1)
    if num_drawing:
        here = terms.to(logits.device)
        for row in (here[:, 0] > 0).nonzero().flatten().split(max(1, _LOGITS_AT_ONCE // logits.shape[-1])):
            ids[row] = draw_rows(logits[row], here[row].double())
    tokens.copy_(ids)
    found[:, 0].copy_(torch.where(logits.any(-1), ids, ALL_ZERO))
    found[:, 1].copy_(best.float().view(torch.int32))


def draw_rows(logits: Tensor, terms: Tensor) -> Tensor:
    """int64 [rows]: a token for each row; for a row that holds NaN, or nothing but -inf, some token.

    terms: float64 [rows, 3], as in launch_pick_rows
    """
    temperature, top_p, uniform = (terms[:, column : column + 1].contiguous() for column in range(3))
    exact = logits.double()
    # The best one is 0 after any division; if the temperature is tiny, all others are -inf.
    weights = exact.sub_(exact.amax(-1, keepdim=True)).div_(temperature).exp_()
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    mass, last = ordered.cumsum(-1), logits.shape[-1] - 1
    needed = torch.searchsorted(mass, top_p * mass[:, -1:]).clamp_(max=last)  # the one that reaches the sum is still in
    is_kept = torch.zeros_like(weights, dtype=torch.bool)
    is_kept.scatter_(-1, order, torch.arange(last + 1, device=logits.device) <= needed)
    so_far = torch.where(is_kept, weights, 0.0).cumsum(-1)
    drawn = torch.searchsorted(so_far, uniform * so_far[:, -1:], right=True).squeeze(-1)
    # Rounding may leave the sum below a uniform number next to 1.
    last_kept = (is_kept & (weights > 0)).int().mul_(torch.arange(last + 1, device=logits.device)).amax(-1)
    return torch.minimum(drawn, last_kept)


def shape_rows(logits: Tensor, parameters: Tensor, counts: Tensor, masks: Tensor, shaped: Tensor) -> None:
    """Twin of launch_shape_rows, also in float32. Tensors may be on any device."""
    for place, (row, counted, masked, repetition, presence, frequency, *_) in enumerate(_asked(parameters)):
        x = logits[row].float()
        if counted != NONE:
            count = counts[counted].to(x.device)
            x = torch.where(count != 0, torch.where(x > 0, x / repetition, x * repetition), x)
            times = (count & (IN_PROMPT - 1)).float()
            x = x - (torch.where(times > 0, presence, 0.0) + times * frequency)
        if masked != NONE:
            bits = masks[masked].to(x.device)[:, None].bitwise_right_shift(torch.arange(32, device=x.device)) & 1
            x = torch.where(bits.flatten()[: len(x)] != 0, x, -torch.inf)
        shaped[place] = x


def cut_rows(parameters: Tensor, shaped: Tensor) -> None:
    """Twin of launch_cut_rows. Tensors may be on any device."""
    for place, (*_, top_k, depth) in enumerate(_asked(parameters)):
        x = shaped[place]
        if 0 < top_k < len(x):
            order = x.sort(descending=True, stable=True).indices
            x[order[top_k:]] = -torch.inf
        x[x < x.max() + depth] = -torch.inf


def likeliest(logits: Tensor, parameters: Tensor, tokens: Tensor, likeliest: Tensor) -> None:
    """Twin of launch_likeliest; sums are in float64 here. Tensors may be on any device."""
    for place, (row, num) in enumerate(parameters.tolist()):
        logprobs = logits[row].double().log_softmax(-1).float()
        order = logits[row].sort(descending=True, stable=True).indices[:num]
        likeliest[place, 0] = logprobs[tokens[row]].view(torch.int32)
        likeliest[place, 1 : 1 + 2 * len(order) : 2] = order.int()
        likeliest[place, 2 : 2 + 2 * len(order) : 2] = logprobs[order].view(torch.int32)


def _asked(parameters: Tensor) -> list[tuple[int, int, int, float, float, float, int, float]]:
    """The rows of a table of parameter_columns.py."""
    words, numbers = parameters.tolist(), parameters.view(torch.float32).tolist()
    return [
        (*word[:REPETITION], *number[REPETITION:TOP_K], word[TOP_K], number[DEPTH])
        for word, number in zip(words, numbers, strict=True)
    ]
