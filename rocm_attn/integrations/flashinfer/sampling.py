"""Sampling of tokens from probabilities or logits. Names and arguments are FlashInfer's.

A token is drawn once, from what the filters leave; FlashInfer draws until a token passes them. Distributions are equal,
and tokens of one seed are not. Ties at a filter's limit stay in. Nothing waits for a device but check_nan. Arguments
`deterministic`, `is_deterministic` and `enable_pdl` choose kernels there, and are ignored: equal calls give
equal results here.

probs, logits: [rows, vocab]; indices: int [samples], the row of each sample, else one sample for each row
generator:     of torch; seed, offset: int, or int64 [1 or samples] on the device, the numbers of philox.py in place of
               generator; give both or neither
Results are int32 [samples], or of the dtype of indices. return_valid: also bool [samples], False for a row whose
probabilities sum to 0 or to no number, and for one that does not exist; its token is 0.
"""

from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from rocm_attn.errors import BadSetting, BadTensor
from rocm_attn.integrations.flashinfer.philox import uniforms
from rocm_attn.integrations.flashinfer.signatures import Given, as_in_flashinfer
from rocm_attn.machine.devices import require_tensor

Limit = Tensor | float
Seed = Tensor | int | None
Samples = Tensor | tuple[Tensor, Tensor]


class _Draws(NamedTuple):
    """The source of uniform numbers, by FlashInfer's arguments."""

    generator: torch.Generator | None
    seed: Seed
    offset: Seed

    def of(self, rows: int, draws: int, device: torch.device) -> Tensor:
        """Returns float32 [rows, draws], from 0 to 1. Raises BadSetting, BadTensor."""
        if (self.seed is None) != (self.offset is None) or type(self.seed) is not type(self.offset):
            raise BadSetting("seed and offset are not of one kind; give both as int, both as tensors, or neither")
        if self.seed is None or self.offset is None:
            return torch.rand((rows, draws), generator=self.generator, device=device)
        return uniforms(_each_row(self.seed, rows, device), _each_row(self.offset, rows, device), draws)


def _each_row(given: Tensor | int, rows: int, device: torch.device) -> Tensor:
    """Returns int64 [rows]. Raises BadTensor."""
    if not isinstance(given, Tensor):
        # An unsigned number of 64 bits, as CURAND takes it.
        return torch.full((rows,), (given + (1 << 63)) % (1 << 64) - (1 << 63), dtype=torch.int64, device=device)
    if given.dtype not in (torch.int64, torch.uint64) or given.shape not in ((1,), (rows,)) or given.device != device:
        raise BadTensor(
            f"seed or offset is {given.dtype} {list(given.shape)} on {given.device}; it must be torch.int64 [1] or "
            f"[{rows}] on {device}"
        )
    return given.view(torch.int64).expand(rows)


def _rows(name: str, values: Tensor, *, check_nan: bool = False) -> Tensor:
    """Returns probabilities or logits as float32. Raises BadTensor."""
    require_tensor(name, values)
    if values.dim() != 2 or not values.is_floating_point() or not values.shape[1]:
        raise BadTensor(f"{name} is {values.dtype} {list(values.shape)}; it must be floats of [rows, vocab]")
    if check_nan and values.isnan().any():
        raise BadTensor(f"{name} has NaN; look for it in the model, or leave check_nan out")
    return values.float()


def _limits(name: str, given: Limit, rows: int, least: float) -> Tensor | float:
    """Returns a filter's limit, one for each row as [rows, 1]. Raises BadSetting, BadTensor."""
    if isinstance(given, Tensor):
        if given.shape != (rows,):
            raise BadTensor(f"{name} is {list(given.shape)}; it must be a number, or [{rows}], one for each row")
        return given[:, None]
    if not isinstance(given, Real):
        raise BadSetting(f"{name} is {given!r}; it must be a number, or a tensor of one for each row")
    if not given >= least:
        raise BadSetting(f"{name} is {given}; it must be at least {least:g}")
    return given


def _in_top_k(values: Tensor, top_k: Limit) -> Tensor:
    """True for the values of each row that fewer than top_k others exceed."""
    k, most = _limits("top_k", top_k, len(values), 1), values.shape[1]
    if not isinstance(k, Tensor):
        return values >= values.topk(min(int(k), most), -1).values[:, -1:]
    return values >= values.sort(-1, descending=True).values.gather(1, k.long().clamp(1, most) - 1)


def _in_top_p(probs: Tensor, top_p: Limit) -> Tensor:
    """True for the values of each row that others exceed whose sum is less than top_p. The largest ones are always."""
    p, ordered = _limits("top_p", top_p, len(probs), 0), probs.sort(-1, descending=True).values
    larger = ordered.cumsum(-1, dtype=torch.float64) - ordered
    last = (larger < p).sum(-1, keepdim=True).clamp(min=1) - 1
    return probs >= ordered.gather(1, last)


def _renormed(probs: Tensor, kept: Tensor) -> Tensor:
    probs = probs.where(kept, 0)
    return probs / probs.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)


def _drawn(weights: Tensor, row: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Returns int64 [samples], the first token whose sum exceeds a part of its row's, and validity, bool [samples].

    weights: float32 [rows, vocab]; row: int64 [samples]; uniform: float32 [samples], the part, from 0 to 1
    """
    is_row = (row >= 0) & (row < len(weights))
    row = row.where(is_row, 0)
    so_far = weights.cumsum(-1, dtype=torch.float64)
    total = so_far[:, -1:].contiguous()
    # A part of 1 exceeds all: then the last token with a weight.
    last = torch.searchsorted(so_far, total)[row, 0]
    is_number = (total > 0) & total.isfinite()
    # Row r's sums are in (r, r + 1] of one increasing list, so that samples may share rows without a copy of them.
    number = torch.arange(len(weights), device=weights.device)[:, None]
    sums = (so_far / total).where(is_number, 1) + number
    token = torch.searchsorted(sums.flatten(), row + uniform.double(), right=True) - row * weights.shape[1]
    valid = is_row & is_number[row, 0]
    return torch.minimum(token, last).where(valid, 0), valid


def _sampled(weights: Tensor, given: Given) -> Samples:
    """Returns a sample for each row of weights, or for the rows of given.indices. Raises BadTensor, BadSetting."""
    indices, draws = given.indices, _Draws(given.generator, given.seed, given.offset)
    if indices is not None and (indices.dim() != 1 or indices.is_floating_point() or indices.dtype == torch.bool):
        raise BadTensor(f"indices are {indices.dtype} {list(indices.shape)}; they must be integers of one dimension")
    row = torch.arange(len(weights), device=weights.device) if indices is None else indices.long()
    token, valid = _drawn(weights, row, draws.of(len(row), 1, weights.device)[:, 0])
    token = token.to(torch.int32 if indices is None else indices.dtype)
    return (token, valid) if getattr(given, "return_valid", False) else token


def softmax(logits: Tensor, temperature: Tensor | float | None = None, enable_pdl: bool | None = None) -> Tensor:
    """Returns float32 probabilities of logits / temperature, a number or [rows]. A tensor's 0 leaves the largest alone.

    Raises BadTensor, BadSetting.
    """
    rows = _rows("logits", logits)
    tiny = torch.finfo(torch.float32).tiny
    limit = _limits("temperature", 1.0 if temperature is None else temperature, len(rows), tiny)
    divisor = limit.float().clamp(min=tiny) if isinstance(limit, Tensor) else limit
    return torch.softmax((rows - rows.amax(-1, keepdim=True)) / divisor, -1)


@as_in_flashinfer
def sampling_from_logits(logits: Tensor, given: Given) -> Samples:
    """Returns samples of softmax(logits). Raises BadTensor, BadSetting."""
    return _sampled(torch.softmax(_rows("logits", logits, check_nan=given.check_nan), -1), given)


@as_in_flashinfer
def sampling_from_probs(probs: Tensor, given: Given) -> Samples:
    """Returns samples. Raises BadTensor, BadSetting."""
    return _sampled(_rows("probs", probs, check_nan=given.check_nan), given)


@as_in_flashinfer
def top_p_sampling_from_probs(probs: Tensor, given: Given) -> Samples:
    """Returns samples of the likeliest tokens whose sum reaches top_p, a number or [rows]. Raises BadTensor."""
    rows = _rows("probs", probs, check_nan=given.check_nan)
    return _sampled(rows.where(_in_top_p(rows, given.top_p), 0), given)


@as_in_flashinfer
def top_k_sampling_from_probs(probs: Tensor, given: Given) -> Samples:
    """Returns samples of the top_k likeliest tokens, a number or [rows]. Raises BadTensor, BadSetting.

    Limits are of rows, also with indices, as of release 0.7.2 (sampling.cuh). In 0.6 they were of samples.
    """
    rows = _rows("probs", probs, check_nan=given.check_nan)
    return _sampled(rows.where(_in_top_k(rows, given.top_k), 0), given)


@as_in_flashinfer
def min_p_sampling_from_probs(probs: Tensor, given: Given) -> Samples:
    """Returns samples of tokens with at least min_p of the largest one, a number or [rows]. Raises BadTensor."""
    rows = _rows("probs", probs, check_nan=given.check_nan)
    least = rows.amax(-1, keepdim=True) * _limits("min_p", given.min_p, len(rows), 0)
    return _sampled(rows.where(rows >= least, 0), given)


@as_in_flashinfer
def top_k_top_p_sampling_from_logits(logits: Tensor, given: Given) -> Samples:
    """Returns top_k_top_p_sampling_from_probs of softmax(logits). Raises BadTensor, BadSetting."""
    probs = torch.softmax(_rows("logits", logits, check_nan=given.check_nan), -1)
    return top_k_top_p_sampling_from_probs(probs, **vars(given) | {"check_nan": False})


@as_in_flashinfer
def top_k_top_p_sampling_from_probs(probs: Tensor, given: Given) -> Samples:
    """Returns samples of tokens that both filters leave; limits are numbers or [rows]. Raises BadTensor, BadSetting.

    filter_apply_order: top_k_first: top_p is of the sum of the top_k tokens; joint: of the whole
    top_k_max: a bound of top_k, ignored; FlashInfer has a faster kernel with it
    """
    order = given.filter_apply_order
    if order not in ("top_k_first", "joint"):
        raise BadSetting(f"filter_apply_order is {order!r}; it must be top_k_first or joint")
    rows = _rows("probs", probs, check_nan=given.check_nan)
    in_top_k = _in_top_k(rows, given.top_k)
    over = rows if order == "joint" else _renormed(rows, in_top_k)
    return _sampled(rows.where(in_top_k & _in_top_p(over, given.top_p), 0), given)


def top_p_renorm_probs(probs: Tensor, top_p: Limit, is_deterministic: bool = False) -> Tensor:
    """Returns float32 probabilities of the likeliest tokens whose sum reaches top_p. Raises BadTensor, BadSetting."""
    rows = _rows("probs", probs)
    return _renormed(rows, _in_top_p(rows, top_p))


def top_k_renorm_probs(probs: Tensor, top_k: Limit, is_deterministic: bool = False) -> Tensor:
    """Returns probabilities of the top_k likeliest tokens, in the dtype of probs. Raises BadTensor, BadSetting."""
    rows = _rows("probs", probs)
    return _renormed(rows, _in_top_k(rows, top_k)).to(probs.dtype)


def top_k_mask_logits(logits: Tensor, top_k: Limit) -> Tensor:
    """Returns the logits of the top_k likeliest tokens, and -inf for others. Raises BadTensor, BadSetting."""
    rows = _rows("logits", logits)
    return logits.where(_in_top_k(rows, top_k), float("-inf"))


@as_in_flashinfer
def chain_speculative_sampling(draft_probs: Tensor, given: Given) -> tuple[Tensor, Tensor, Tensor]:
    """Verifies chains of n drafts by rejection sampling. Returns int32 [B, n + 1], -1 after the last, and two counts.

    draft_probs: [B, n, vocab]; draft_token_ids: int [B, n]; target_probs: [B, n + 1, vocab]
    The counts are int32 [B], added to those that are given: drafts that would be accepted each by itself, where the
    first rejected one is tried twice as in FlashInfer; and accepted drafts before the first rejected one.
    Source: Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", 2023.
    Raises BadTensor, BadSetting.
    """
    draft_token_ids, target_probs = given.draft_token_ids, given.target_probs
    if draft_probs.dim() != 3 or draft_token_ids.shape != draft_probs.shape[:2]:
        raise BadTensor(f"draft_probs are {list(draft_probs.shape)} for draft_token_ids {list(draft_token_ids.shape)}")
    rows, drafts, vocab = draft_probs.shape
    if target_probs.shape != (rows, drafts + 1, vocab):
        raise BadTensor(f"target_probs are {list(target_probs.shape)}; they must be {[rows, drafts + 1, vocab]}")
    target, draft, device = target_probs.float(), draft_probs.float(), draft_probs.device
    # A rejected draft's numbers are followed by those of a second try, and the last one draws the next token.
    uniform = _Draws(given.generator, given.seed, given.offset).of(rows, drafts + 2, device)
    token = draft_token_ids.long()
    is_token = (token >= 0) & (token < vocab)
    at = token.clamp(0, vocab - 1)[..., None]
    wanted, drafted = (side.gather(2, at)[..., 0] for side in (target[:, :drafts], draft))
    first, again = (is_token & (uniform[:, begin : begin + drafts] * drafted < wanted) for begin in (0, 1))
    emitted = first.int().cumprod(1).sum(1)
    place = torch.arange(drafts, device=device)
    accepted = emitted + (again & (place >= emitted[:, None])).sum(1)
    row, is_bonus = torch.arange(rows, device=device), emitted == drafts
    missing = torch.cat((draft, torch.zeros_like(target[:, :1])), 1)[row, emitted]
    rest = (target[row, emitted] - missing).clamp(min=0)
    # Rounding may leave nothing.
    rest = rest.where(rest.sum(1, keepdim=True) > 0, target[row, emitted])
    last = uniform[:, -1].where(~is_bonus, uniform[:, -2])
    drawn, _ = _drawn(rest, row, last)
    step = torch.arange(drafts + 1, device=device)
    tokens = torch.cat((token, drawn[:, None]), 1).where(step < emitted[:, None], -1)
    tokens = tokens.where(step != emitted[:, None], drawn[:, None]).to(torch.int32)
    names = "maybe_output_accepted_token_num", "maybe_output_emitted_draft_token_num"
    counters = zip((getattr(given, name) for name in names), (accepted, emitted), strict=True)
    totals = [count.to(torch.int32) if counter is None else counter.add_(count) for counter, count in counters]
    return tokens, totals[0], totals[1]
