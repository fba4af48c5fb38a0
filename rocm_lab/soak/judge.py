"""Judge: whether what a step gave is what the oracle says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rocm_attn.batch.padding import PaddedShape
from rocm_lab.soak.finding import Finding
from rocm_lab.soak.model import LayerTables, Model
from rocm_lab.soak.oracle import Answer, Oracle, OracleLayer
from rocm_lab.soak.seq import Seq

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Played:
    """A step that was run: later ones change nothing of what is here, so that it can be judged after them.

    turn:   in which the scene ran it; history: the last calls before it; what: the step, in words
    stored: what each token of its sequences looks up, the new ones included
    rows:   what its forward returned, [num_seqs, ...]
    shape:  what it was padded to
    layers: as the oracle knew them
    outs:   per layer [padded tokens, heads, dim]; lses: per layer [padded tokens, heads], of those that give one
    token_ids, positions, last_token_of_seq: int32, as it gave them to the forward, pads included
    """

    turn: int
    history: tuple[str, ...]
    what: str
    seqs: tuple[Seq, ...]
    stored: tuple[list[int], ...]
    rows: Tensor
    shape: PaddedShape
    layers: tuple[OracleLayer, ...]
    outs: tuple[Tensor, ...]
    lses: dict[int, Tensor]
    token_ids: Tensor
    positions: Tensor
    last_token_of_seq: Tensor

    @classmethod
    def of(
        cls,
        turn: int,
        history: Sequence[str],
        model: Model,
        oracle: Oracle,
        what: str,
        seqs: Sequence[Seq],
        rows: Tensor,
        shape: PaddedShape,
    ) -> Played:
        """A step that the model has just run, and whose tokens the oracle has."""
        tokens = slice(0, shape.num_tokens)
        return cls(
            turn,
            tuple(history),
            what,
            tuple(seqs),
            tuple(oracle.kv[seq.row][: seq.end] if seq.ids else [] for seq in seqs),
            rows.clone(),
            shape,
            tuple(oracle.layers),
            tuple(layer.out[tokens].clone() for layer in model.outputs),
            {
                number: layer.lse[tokens].clone()
                for number, layer in enumerate(model.outputs)
                if isinstance(layer, LayerTables) and layer.wants_lse
            },
            model.token_ids[tokens].clone(),
            model.positions[tokens].clone(),
            model.last_token_of_seq[: shape.num_seqs].clone(),
        )

    @property
    def num_new(self) -> int:
        """New tokens of all sequences."""
        return sum(len(seq.ids) for seq in self.seqs)


class WrongStep(Finding):
    """A step gave something else than the oracle says."""

    def __init__(self, step: Played, wrong: str) -> None:
        super().__init__(f"{step.what}: {wrong}")
        self.step = step


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of judging a step.

    wrong: the first difference from the oracle, in words; empty if there is none
    worst: the largest error, as a fraction of the allowed one
    """

    wrong: str
    worst: float = 0.0


def judge(step: Played) -> Verdict:
    """Compares every new token of a step with the oracle, and every pad with what a pad must be."""
    place_of_token = place_of_tokens(step)
    if isinstance(place_of_token, str):
        return Verdict(place_of_token)
    ends, worst = np.cumsum([0, *(len(seq.ids) for seq in step.seqs)]), 0.0
    for number, (layer, given) in enumerate(zip(step.layers, step.outs, strict=True)):
        out, lse = _host(given), _host(step.lses[number]) if number in step.lses else None
        wrong = _pads(out, lse, place_of_token)
        for seq, stored, begin, end in zip(step.seqs, step.stored, ends[:-1], ends[1:], strict=True):
            if wrong or begin == end:
                continue
            at = place_of_token[begin:end]
            verdict = _values(layer.answer(stored, seq.tokens()), out[at], None if lse is None else lse[at])
            wrong = verdict.wrong and f"row {seq.row}: {verdict.wrong}"
            worst = max(worst, verdict.worst)
        if wrong:
            return Verdict(f"layer {number}: {wrong}", worst)
    return Verdict(_returned(step, place_of_token), worst)


def place_of_tokens(step: Played) -> Ints | str:
    """Where the step has its tokens, in order; or what is wrong with what it says of them."""
    seqs, num_padded, num_children = step.seqs, step.shape.num_tokens, step.shape.num_children
    ids, positions = _host(step.token_ids), _host(step.positions)
    each, places = num_padded // num_children, []
    for child in range(num_children):
        taken = int((ids[child * each : (child + 1) * each] != 0).sum())
        places += list(range(child * each, child * each + taken))
    if len(places) != step.num_new:
        return f"{len(places)} tokens reached the forward of {step.num_new}"
    at = np.array(places, np.int64)
    pads = np.ones(num_padded, np.bool_)
    pads[at] = False
    wanted_ids = [token_id for seq in seqs for token_id in seq.ids]
    wanted_positions = [position for seq in seqs for position in seq.positions]
    if ids[at].tolist() != wanted_ids or ids[pads].any():
        return f"token ids {ids.tolist()} reached the forward of {wanted_ids}"
    if positions[at].tolist() != wanted_positions or positions[pads].any():
        return f"positions {positions.tolist()} reached the forward of {wanted_positions}"
    if num_children == 1:
        last = _host(step.last_token_of_seq).tolist()
        ends = np.cumsum([len(seq.ids) for seq in seqs], dtype=np.int64).tolist()
        real = zip(seqs, ends, last, strict=False)
        # A padded sequence's is a padded token, or 0 where it has none.
        of_pads = all(token == 0 or (0 < token < num_padded and pads[int(token)]) for token in last[len(ends) :])
        if not of_pads or any(seq.ids and token != end - 1 for seq, end, token in real):
            return f"last tokens {last} of sequences that end at {ends}"
    return at


def _pads(out: Floats, lse: Floats | None, real: Ints) -> str:
    pads = np.ones(len(out), np.bool_)
    pads[real] = False
    if (out[pads] != 0).any():
        return "a padded token's output is not zero"
    if lse is not None and (lse[pads] != -np.inf).any():
        return "a padded token's LSE is not -inf"
    return ""


def _values(answer: Answer, out: Floats, lse: Floats | None) -> Verdict:
    usable = answer.known & answer.sound
    out, wanted, allowed = out[usable], answer.out[usable], answer.out_bound[usable]
    with np.errstate(invalid="ignore"):
        error = np.abs(out - wanted)
        off = ~(error <= allowed)
    if off.any():
        token = int(np.argmax(off.any((1, 2))))
        if not np.isfinite(out[token]).all():
            return Verdict(f"token {token} is not finite")
        return Verdict(f"token {token} is off by {error[token].max():.2g}, allowed {allowed[token].max():.2g}")
    worst = float((error / np.maximum(allowed, np.finfo(np.float64).tiny)).max(initial=0.0))
    if lse is None:
        return Verdict("", worst)
    with np.errstate(invalid="ignore"):
        same = (lse == answer.lse) | (np.abs(lse - answer.lse) <= answer.lse_bound)
    if same[usable].all():
        return Verdict("", worst)
    return Verdict(f"the LSE of token {int(np.argmin(same[usable].all(1)))} is wrong", worst)


def _returned(step: Played, place_of_token: Ints) -> str:
    """The forward's rows are those of each sequence's last token, in the order of the batch."""
    ends = np.cumsum([len(seq.ids) for seq in step.seqs], dtype=np.int64)
    with_tokens = [number for number, seq in enumerate(step.seqs) if seq.ids]
    if step.rows.shape[0] != len(step.seqs):
        return f"{step.rows.shape[0]} rows came back of {len(step.seqs)} sequences"
    if not with_tokens:
        return ""
    places = torch.from_numpy(place_of_token[ends[with_tokens] - 1]).to(step.rows.device)
    wanted = torch.cat([out[places].flatten(1).float() for out in step.outs], 1)
    if not torch.equal(step.rows[with_tokens].nan_to_num(), wanted.nan_to_num()):
        return "the rows that came back are not those of the sequences' last tokens"
    return ""


def _host(tensor: Tensor) -> Floats:
    return tensor.double().cpu().numpy()
