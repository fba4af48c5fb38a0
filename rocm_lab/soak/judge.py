"""Judge: whether what a step gave is what the oracle says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rocm_attn.batch.padding import PaddedShape
from rocm_lab.soak.model import LayerTables
from rocm_lab.soak.oracle import Answer
from rocm_lab.soak.scene import Scene
from rocm_lab.soak.seq import Seq

Ints = npt.NDArray[np.int64]


def judge(scene: Scene, seqs: Sequence[Seq], rows: Tensor, shape: PaddedShape) -> str:
    """Returns the error of a step that was run and whose tokens the oracle has, or an empty string.

    rows:  what the forward returned, [num_seqs, ...]
    shape: what the step was padded to
    """
    wrong = _places(scene, seqs, shape)
    if isinstance(wrong, str):
        return wrong
    place_of_token = wrong
    last = np.cumsum([0, *(len(seq.ids) for seq in seqs)])
    for number, (tables, layer) in enumerate(zip(scene.model.outputs, scene.oracle.layers, strict=True)):
        out = _host(tables.out[: shape.num_tokens])
        lse = _host(tables.lse[: shape.num_tokens]) if isinstance(tables, LayerTables) and tables.wants_lse else None
        failure = _pads(out, lse, place_of_token)
        for seq, begin, end in zip(seqs, last[:-1], last[1:], strict=True):
            if failure or begin == end:
                continue
            at = place_of_token[begin:end]
            answer = scene.oracle.answer(layer, seq.row, seq.tokens())
            failure = _values(answer, out[at], None if lse is None else lse[at])
            failure = failure and f"row {seq.row}: {failure}"
            scene.counts["compared"] += int(end - begin)
        if failure:
            return f"layer {number}: {failure}"
    return _returned(scene, seqs, rows, place_of_token)


def _places(scene: Scene, seqs: Sequence[Seq], shape: PaddedShape) -> Ints | str:
    """Where the step has its tokens, in order; or what is wrong with what it says of them."""
    model, num_seqs, num_padded, num_children = scene.model, shape.num_seqs, shape.num_tokens, shape.num_children
    ids, positions = _host(model.token_ids[:num_padded]), _host(model.positions[:num_padded])
    each = num_padded // num_children
    places, tokens = [], sum(len(seq.ids) for seq in seqs)
    for child in range(num_children):
        taken = int((ids[child * each : (child + 1) * each] != 0).sum())
        places += list(range(child * each, child * each + taken))
    if len(places) != tokens:
        return f"{len(places)} tokens reached the forward of {tokens}"
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
        last = _host(model.last_token_of_seq[:num_seqs]).tolist()
        ends = np.cumsum([len(seq.ids) for seq in seqs], dtype=np.int64).tolist()
        real = zip(seqs, ends, last, strict=False)
        # A padded sequence's is a padded token, or 0 where it has none.
        of_pads = all(token == 0 or (0 < token < num_padded and pads[int(token)]) for token in last[len(ends) :])
        if not of_pads or any(seq.ids and token != end - 1 for seq, end, token in real):
            return f"last tokens {last} of sequences that end at {ends}"
    return at


def _pads(out: npt.NDArray[np.float64], lse: npt.NDArray[np.float64] | None, real: Ints) -> str:
    pads = np.ones(len(out), np.bool_)
    pads[real] = False
    if (out[pads] != 0).any():
        return "a padded token's output is not zero"
    if lse is not None and (lse[pads] != -np.inf).any():
        return "a padded token's LSE is not -inf"
    return ""


def _values(answer: Answer, out: npt.NDArray[np.float64], lse: npt.NDArray[np.float64] | None) -> str:
    usable = answer.known & answer.sound
    with np.errstate(invalid="ignore"):
        off = ~(np.abs(out - answer.out) <= answer.out_bound)[usable]
    if off.any():
        token = int(np.argmax(off.any((1, 2))))
        if not np.isfinite(out[usable][token]).all():
            return f"token {token} is not finite"
        worst = np.abs(out - answer.out)[usable][token].max()
        return f"token {token} is off by {worst:.2g}, allowed {answer.out_bound[usable][token].max():.2g}"
    if lse is None:
        return ""
    with np.errstate(invalid="ignore"):
        same = (lse == answer.lse) | (np.abs(lse - answer.lse) <= answer.lse_bound)
    return "" if same[usable].all() else f"the LSE of token {int(np.argmin(same[usable].all(1)))} is wrong"


def _returned(scene: Scene, seqs: Sequence[Seq], rows: Tensor, place_of_token: Ints) -> str:
    """The forward's rows are those of each sequence's last token, in the order of the batch."""
    ends = np.cumsum([len(seq.ids) for seq in seqs], dtype=np.int64)
    with_tokens = [number for number, seq in enumerate(seqs) if seq.ids]
    if rows.shape[0] != len(seqs):
        return f"{rows.shape[0]} rows came back of {len(seqs)} sequences"
    if not with_tokens:
        return ""
    places = torch.from_numpy(place_of_token[ends[with_tokens] - 1]).to(rows.device)
    wanted = torch.cat([layer.out[places].flatten(1).float() for layer in scene.model.outputs], 1)
    if not torch.equal(rows[with_tokens].nan_to_num(), wanted.nan_to_num()):
        return "the rows that came back are not those of the sequences' last tokens"
    return ""


def _host(tensor: Tensor) -> npt.NDArray[np.float64]:
    return tensor.double().cpu().numpy()
