"""The model of a soak, and the reference that it is compared with.

SoakModel is two layers of attention, and in some soaks recurrent ones. Their q, k and v are rows of fixed tables,
looked up by token id and position. It is a pure function of the step's token ids, so it can be captured, and a
request's expected outputs depend only on the ids of its tokens. Token id 0, which padding has, looks up NaN.
Checker computes the same with rocm_attn.oracle.reference, from dense K and V.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_batch import Int32Array
from rocm_attn.kernels.metadata.step_tensors import NO_PARENT
from rocm_attn.oracle.numerics import BOUNDS, error_parts
from rocm_attn.oracle.reference import attend_sequence
from rocm_attn.problem import UNLIMITED_WINDOW, Problem
from rocm_attn.step.head_weights import HeadWeights
from rocm_attn.step.step import Part
from rocm_lab.soak.recurrent import RecurrentReference, RecurrentTables


def soak_problems(dtype: torch.dtype, page_size: int, *, custom_mask: bool) -> tuple[Problem, Problem]:
    """Returns two layers that share only the page size, so that a step has two kernels and two schedules.

    The second has a window that sequences outgrow, and so a pool of its own, a soft cap and sinks.
    custom_mask: of both layers, which then see trees as trees
    """
    return (
        Problem(
            num_q_heads=4,
            num_kv_heads=2,
            head_dim=16,
            v_head_dim=16,
            dtype=dtype,
            page_size=page_size,
            scale=0.25,
            custom_mask=custom_mask,
        ),
        Problem(
            num_q_heads=3,
            num_kv_heads=1,
            head_dim=24,
            v_head_dim=8,
            dtype=dtype,
            page_size=page_size,
            scale=0.2,
            window_left=13,
            logits_soft_cap=2.0,
            has_sinks=True,
            custom_mask=custom_mask,
        ),
    )


@dataclass(frozen=True, slots=True)
class LayerTables:
    """A layer's q, k and v for every token id and position, [vocabulary * max_kv_len, heads, dim]; id 0 is NaN."""

    q: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def random(cls, problem: Problem, vocabulary: int, max_kv_len: int, generator: torch.Generator) -> LayerTables:
        """Returns normally distributed rows, on the CPU."""

        def rows(heads: int, dim: int) -> Tensor:
            values = torch.randn(vocabulary, max_kv_len, heads, dim, generator=generator).to(problem.dtype)
            values[0] = float("nan")
            return values.flatten(0, 1)

        return cls(
            rows(problem.num_q_heads, problem.head_dim),
            rows(problem.num_kv_heads, problem.head_dim),
            rows(problem.num_kv_heads, problem.v_head_dim),
        )

    def to(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> LayerTables:
        """Returns the same rows on another device or in another dtype."""
        return LayerTables(*(rows.to(device=device, dtype=dtype) for rows in (self.q, self.k, self.v)))


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """The outputs of a step, on any device; T padded tokens.

    out:  per layer, [T, q_heads, v_head_dim], recurrent layers last
    lse:  per layer that attends, float32 [T, q_heads]
    rows: [num_seqs, sum of q_heads * v_head_dim], the layers' outputs at each sequence's last new token
    """

    out: tuple[Tensor, ...]
    lse: tuple[Tensor, ...]
    rows: Tensor

    def on_cpu(self) -> StepOutputs:
        """Returns a copy on the host."""
        return StepOutputs(tuple(o.cpu() for o in self.out), tuple(x.cpu() for x in self.lse), self.rows.cpu())


class SoakModel:
    """The forward function of a soak. It leaves the outputs of all tokens in buffers of its own.

    tables:     per layer, on the device that steps run on
    recurrent:  likewise, per recurrent layer
    max_kv_len: positions of the tables
    max_tokens: most padded tokens of a step
    """

    def __init__(
        self,
        tables: Sequence[LayerTables],
        recurrent: Sequence[RecurrentTables],
        *,
        max_kv_len: int,
        max_tokens: int,
    ) -> None:
        self._tables, self._recurrent = tables, recurrent
        self._max_kv_len = max_kv_len
        self._out = [rows.q.new_empty(max_tokens, rows.q.shape[1], rows.v.shape[2]) for rows in tables]
        self._lse = [rows.q.new_empty(max_tokens, rows.q.shape[1], dtype=torch.float32) for rows in tables]
        self._out += [each.x.new_empty(max_tokens, each.form.num_heads, each.form.v_dim) for each in recurrent]

    def forward(self, step: Part) -> Tensor:
        """Computes attention of every layer, and returns StepOutputs.rows of the padded sequences."""
        entry = step.token_ids * self._max_kv_len + step.positions
        rows = []
        for layer, tables in enumerate(self._tables):
            out, lse = self._out[layer][step.tokens], self._lse[layer][step.tokens]
            step.layers.store_and_attend(layer, tables.q[entry], tables.k[entry], tables.v[entry], out, lse)
            rows.append(out[step.last_token_of_seq].flatten(1))
        for layer, each in enumerate(self._recurrent):
            out = self._out[len(self._tables) + layer][step.tokens]
            each.recur(step, layer, entry, each.convolve(step, layer, entry), out)
            rows.append(out[step.last_token_of_seq].flatten(1))
        return torch.cat(rows, 1)

    def poison(self) -> None:
        """Overwrites all outputs with NaN, so that a missing write shows."""
        for tensor in (*self._out, *self._lse):
            tensor.fill_(float("nan"))

    def outputs(self, places: npt.NDArray[np.int64], rows: Tensor) -> StepOutputs:
        """Returns a copy of the last step's outputs, on the device.

        places: of the step's tokens among the padded ones, real tokens first
        rows:   the result of forward, real sequences only
        """
        order = torch.from_numpy(places).to(rows.device)
        return StepOutputs(tuple(out[order] for out in self._out), tuple(lse[order] for lse in self._lse), rows.clone())


@dataclass(frozen=True, slots=True)
class SequenceTruth:
    """A sequence of a step.

    token_ids: of all tokens of its KV
    q_len:     the number of new ones among them
    parents:   int32 [q_len]  new token -> its parent's place among them, as in TreeMask; chain() if they are no tree
    """

    row: int
    token_ids: Int32Array
    q_len: int
    parents: Int32Array

    def visible(self) -> tuple[Tensor, Tensor]:
        """Returns what new tokens see if trees are seen as trees, bool [q_len, kv_len]; and positions, int64 [kv_len].

        The position of a new token is the number of tokens that it sees in addition to itself.
        """
        prefix = len(self.token_ids) - self.q_len
        visible = np.zeros((self.q_len, prefix + self.q_len), np.bool_)
        visible[:, :prefix] = True
        for token, parent in enumerate(self.parents.tolist()):
            if parent != NO_PARENT:
                visible[token] = visible[parent]
            visible[token, prefix + token] = True
        positions = np.concatenate((np.arange(prefix), visible.sum(1) - 1))
        return torch.from_numpy(visible), torch.from_numpy(positions)

    def __str__(self) -> str:
        return f"row {self.row}, kv_len {len(self.token_ids)}, q_len {self.q_len}"


def chain(q_len: int) -> Int32Array:
    """Returns the parents of new tokens that follow each other."""
    return np.arange(-1, q_len - 1, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class PlayedStep:
    """A step that was run.

    number:  counted from 1
    action:  the action that was drawn for it
    way:     how it ran: "eager", "captured" or "replayed"
    history: the actions up to it
    """

    number: int
    action: str
    shape: PaddedShape
    way: str
    sequences: tuple[SequenceTruth, ...]
    outputs: StepOutputs
    history: tuple[str, ...]

    def __str__(self) -> str:
        shape, sequences = self.shape, self.sequences
        return (
            f"step {self.number} ({self.action}: {shape.kind.value}, {len(sequences)} sequences padded to "
            f"{shape.num_seqs}, {sum(s.q_len for s in sequences)} tokens padded to {shape.num_tokens}, "
            f"{'whole' if shape.num_children == 1 else 'in two halves'}, longest q_len "
            f"{max((s.q_len for s in sequences), default=0)} and kv_len "
            f"{max((len(s.token_ids) for s in sequences), default=0)}, {self.way})"
        )


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first difference of a step.

    what:          the difference, in words
    layer, seq:    its place; None if it does not apply
    largest_error: the largest of the tensor; inf if a value is NaN
    """

    what: str
    layer: int | None
    seq: int | None
    largest_error: float


class Checker:
    """Compares steps with the float64 reference.

    tables:     per layer, float64 on the CPU
    weights:    per layer, on the CPU
    recurrent:  per recurrent layer
    worst:      the largest error so far, as a fraction of the allowed one
    num_tokens: tokens that were compared
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        tables: Sequence[LayerTables],
        weights: Sequence[HeadWeights],
        recurrent: Sequence[RecurrentReference],
        max_kv_len: int,
    ) -> None:
        self.worst = 0.0
        self.num_tokens = 0
        self._problems = problems
        self._tables = tables
        self._weights = weights
        self._recurrent = recurrent
        self._max_kv_len = max_kv_len

    def check(self, step: PlayedStep) -> Mismatch | None:
        """Returns the first mismatch of a step, or None."""
        outputs = step.outputs.on_cpu()
        self.num_tokens += sum(sequence.q_len for sequence in step.sequences)
        seen = [sequence.visible() for sequence in step.sequences]
        for layer in range(len(self._problems)):
            mismatch = self._check_layer(layer, step, outputs, seen)
            if mismatch is not None:
                return mismatch
        for number, reference in enumerate(self._recurrent, len(self._problems)):
            mismatch = self._check_recurrent(number, reference, step, outputs.out[number])
            if mismatch is not None:
                return mismatch
        return _check_rows(step, outputs)

    def _check_recurrent(
        self, number: int, reference: RecurrentReference, step: PlayedStep, out: Tensor
    ) -> Mismatch | None:
        begin = 0
        for seq, sequence in enumerate(step.sequences):
            got = out[begin : begin + sequence.q_len]
            begin += sequence.q_len
            if not sequence.q_len:
                continue
            wanted = reference.outputs(sequence.token_ids, sequence.q_len)
            # A state is a sum over all tokens, so an output is that of values as large as the largest one.
            size = max(1.0, float(wanted.abs().max()))
            part = float(error_parts(got, wanted, BOUNDS[got.dtype].out, size=size).max())
            if part > 1:
                error = _largest_error(got, wanted)
                what = f"out differs from the reference by up to {error:g}, {part:g} times the tolerance"
                return Mismatch(what, number, seq, error)
            self.worst = max(self.worst, part)
        if bool(out[begin:].any()):
            return Mismatch("out of a padded token is not 0", number, None, math.inf)
        return None

    def _check_layer(
        self, layer: int, step: PlayedStep, outputs: StepOutputs, seen: Sequence[tuple[Tensor, Tensor]]
    ) -> Mismatch | None:
        bounds = BOUNDS[self._problems[layer].dtype]
        q_lens = [sequence.q_len for sequence in step.sequences]
        num_tokens = sum(q_lens)
        wanted = [
            self._attend(layer, sequence, *of_sequence)
            for sequence, of_sequence in zip(step.sequences, seen, strict=True)
            if sequence.q_len
        ]
        for name, tensors, references, bound in (
            ("out", outputs.out, [out for out, _ in wanted], bounds.out),
            ("lse", outputs.lse, [lse for _, lse in wanted], bounds.lse),
        ):
            if not num_tokens:
                break
            got, reference = tensors[layer][:num_tokens], torch.cat(references)
            parts = error_parts(got, reference, bound)
            part = float(parts.max())
            if part > 1:
                token = int((parts.flatten(1).amax(1) > 1).int().argmax())
                seq = int(np.searchsorted(np.cumsum(q_lens), token, side="right"))
                error = _largest_error(got, reference)
                what = f"{name} differs from the reference by up to {error:g}, {part:g} times the tolerance"
                return Mismatch(what, layer, seq, error)
            self.worst = max(self.worst, part)
        for name, pads, value in (
            ("out", outputs.out[layer][num_tokens:], 0.0),
            ("lse", outputs.lse[layer][num_tokens:], -math.inf),
        ):
            if not bool((pads == value).all()):
                return Mismatch(f"{name} of a padded token is not {value:g}", layer, None, math.inf)
        return None

    def _attend(self, layer: int, sequence: SequenceTruth, visible: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the reference's out and lse. visible, positions: the results of SequenceTruth.visible()"""
        problem, tables = self._problems[layer], self._tables[layer]
        entry = torch.from_numpy(sequence.token_ids) * self._max_kv_len + positions
        new = slice(len(entry) - sequence.q_len, None)
        seen: tuple[Tensor, ...] = ()
        if problem.custom_mask:
            if problem.window_left != UNLIMITED_WINDOW:
                # Positions are depths, not places. The mask has the window; the reference's own reaches further back.
                visible = visible & (positions >= positions[new, None] - problem.window_left)
            seen = visible, positions[new]
        q, k, v = tables.q[entry[new]], tables.k[entry], tables.v[entry]
        return attend_sequence(q, k, v, problem, self._weights[layer], *seen)


def _check_rows(step: PlayedStep, outputs: StepOutputs) -> Mismatch | None:
    """Compares forward's rows bitwise with the outputs of the last new tokens, which were checked before."""
    last = -1
    for seq, sequence in enumerate(step.sequences):
        last += sequence.q_len
        if sequence.q_len and not torch.equal(
            outputs.rows[seq], torch.cat([out[last].flatten() for out in outputs.out])
        ):
            return Mismatch("the row that the runner returned is not that of the last new token", None, seq, math.inf)
    return None


def _largest_error(got: Tensor, reference: Tensor) -> float:
    """Returns the largest |got - reference|, or inf if a value is NaN."""
    error = torch.where(got == reference, 0.0, (got.double() - reference).abs())
    return float(error.nan_to_num(math.inf, math.inf).max())
