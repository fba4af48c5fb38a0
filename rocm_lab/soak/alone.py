"""ServedAlone: checks the promise of deterministic mode, in addition to the reference's bounds.

Some sequences are served again, each alone, unpadded and eagerly, with all tokens of their KV in one step and one pool
for all layers. Their new tokens must get the same bits as in the step, whatever other sequences and steps there were.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.capture.check import bitwise_equal
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.paging.index_spaces import num_pages
from rocm_attn.paging.state_pool import RecurrentLayers
from rocm_attn.problem import Problem
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.head_weights import HeadWeights
from rocm_attn.step.options import RuntimeOptions
from rocm_lab.soak.checker import LayerTables, Mismatch, PlayedStep, SequenceTruth, SoakModel, StepOutputs
from rocm_lab.soak.recurrent import RecurrentTables


class SoloCheck(Protocol):
    """Checks steps that passed the comparison with the reference. num_seqs: sequences that were checked."""

    num_seqs: int

    def check(self, step: PlayedStep) -> Mismatch | None:
        """Returns the first mismatch of a step, or None."""
        ...


class NoAloneCheck:
    """Checks nothing in addition to the reference."""

    num_seqs = 0

    def check(self, step: PlayedStep) -> Mismatch | None:
        """Returns None."""
        return None


class ServedAlone:
    """Serves one sequence of every `every`-th step alone: the first, then the second and so on.

    tables:  per layer, on the device that steps run on
    weights: per layer
    recurrent: per recurrent layer, on that device too
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        tables: Sequence[LayerTables],
        weights: Sequence[HeadWeights],
        recurrent: Sequence[RecurrentTables],
        *,
        device: torch.device,
        provider: str,
        max_kv_len: int,
        every: int,
    ) -> None:
        self.num_seqs = 0
        self._every = every
        self._runtime = build_runtime(
            problems,
            RuntimeOptions(
                num_pages=1 + int(num_pages(max_kv_len, problems[0].page_size)),
                max_num_seqs=1,
                max_kv_len=max_kv_len,
                provider=provider,
                deterministic=True,
            ),
            RecurrentLayers([each.form for each in recurrent]),
            device=device,
        )
        for layer, given in enumerate(weights):
            self._runtime.head_weights.set(layer, given.to(self._runtime.device))
        self._model = SoakModel(tables, recurrent, max_kv_len=max_kv_len, max_tokens=max_kv_len)
        self._runner = StepRunner(self._runtime, self._model.forward, None)

    def check(self, step: PlayedStep) -> Mismatch | None:
        """Does the same as SoloCheck.check."""
        turn, rest = divmod(step.number, self._every)
        if rest or not step.sequences:
            return None
        seq = turn % len(step.sequences)
        sequence = step.sequences[seq]
        if not sequence.q_len:
            return None
        self.num_seqs += 1
        first = sum(earlier.q_len for earlier in step.sequences[:seq])
        alone, new = self._serve(sequence), slice(len(sequence.token_ids) - sequence.q_len, None)
        for name, tensors, of_alone in (("out", step.outputs.out, alone.out), ("lse", step.outputs.lse, alone.lse)):
            for layer, (of_step, wanted) in enumerate(zip(tensors, of_alone, strict=True)):
                got, want = of_step[first : first + sequence.q_len], wanted[new]
                if not bitwise_equal(got, want):
                    error = float((got.double() - want.double()).abs().max())
                    what = f"{name} differs bitwise from the same request run alone, by up to {error:g}"
                    return Mismatch(what, layer, seq, error)
        return None

    def _serve(self, sequence: SequenceTruth) -> StepOutputs:
        """Returns the outputs of all tokens of a sequence in one step."""
        table, kv_len = self._runtime.table, len(sequence.token_ids)
        row = table.admit()
        try:
            table.reserve(row, kv_len)
            lengths = np.array([kv_len], np.int32)
            rows = self._runner.run(StepBatch(np.array([row], np.int32), lengths, lengths, sequence.token_ids))
            return self._model.outputs(np.arange(kv_len), rows)
        finally:
            table.free(row)
