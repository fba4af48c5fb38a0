"""SampledCheck: runs one step in many once more and compares it, while serving (EngineOptions.check_every).

The second run is eager. Forward's rows must be those of the first run, which may have been a graph. In one layer the
attention of a few sequences must agree with the reference over copies of their pages. The second run stores the same K
and V again. Reserved memory must be zero: row 0 of the table, and page 0 of that layer. A step with lengths, ids or a
mask on the device gets only the check of reserved memory, because these may have changed since it ran.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Generic

import numpy as np
import torch
from torch import Tensor

from rocm_attn.batch.inputs import HOST_INPUTS
from rocm_attn.batch.mask import NO_MASK
from rocm_attn.batch.padding import PadTo
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.capture.check import rows_beyond_bounds, tensors_of
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.paging.canary import what_was_written
from rocm_attn.problem import UNLIMITED_WINDOW, Problem
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.metrics import Metrics, Reason
from rocm_attn.step.outputs import Outputs
from rocm_attn.step.protocols import LayerCalls, WrappedLayers
from rocm_attn.watch.few_sequences import MOST_SEQS, LayerOfStep


class LayerTap(WrappedLayers):
    """Wraps the layers of a step, and copies the inputs and outputs of one layer's attention on request.

    around() is called before every step's first layer.
    """

    _layers: LayerCalls

    def __init__(self) -> None:
        self._layer = -1
        self._taken: tuple[Tensor, Tensor] | None = None

    def around(self, layers: LayerCalls) -> LayerTap:
        """Wraps the layers of the step that is about to run."""
        self._layers = layers
        return self

    def expect(self, layer: int) -> None:
        """Copies q and out of this layer from the next step on, until take()."""
        self._layer, self._taken = layer, None

    def take(self) -> tuple[Tensor, Tensor] | None:
        """(q, out) of the layer, [T, q_heads, head_dim | v_head_dim]; None if it was not called."""
        taken, self._layer, self._taken = self._taken, -1, None
        return taken

    def _call(self, name: str, layer: int, *given: Any, **named: Any) -> None:
        getattr(self._layers, name)(layer, *given, **named)
        # Attention to a selection is not compared, because the reference attends to all keys.
        if name == "attend" and layer == self._layer:
            q, out, _ = given
            self._taken = q.clone(), out.clone()


class SampledCheck(Generic[Outputs]):
    """Runs steps, and compares one in `every`. Differences are logged, and counted in the runner's metrics.

    problems: the runtime's, one for each layer
    tap:      the layers that the runner's model calls
    seed:     for the choice of layers and sequences
    """

    def __init__(
        self,
        runner: StepRunner[Outputs],
        runtime: AttentionRuntime,
        problems: Sequence[Problem],
        tap: LayerTap,
        *,
        every: int,
        seed: int = 0,
    ) -> None:
        assert every >= 1
        self._runner = runner
        self._runtime = runtime
        self._problems = tuple(problems)
        self._tap = tap
        self._every = every
        self._random = np.random.default_rng(seed)
        self._until_next = every

    @property
    def counters(self) -> Metrics:
        """See `StepRunner.counters`."""
        return self._runner.counters

    def run(self, batch: StepBatch, pad_to: PadTo | None = None) -> Outputs:
        """See `StepRunner.run`. The comparison does not change the outputs that are returned."""
        outputs = self._runner.run(batch, pad_to)
        self._until_next -= 1
        if self._until_next == 0:
            self._until_next = self._every
            layer = int(self._random.integers(len(self._problems)))
            self._runner.metrics.samples += 1
            self._look_at_reserved(layer)
            if batch.inputs is HOST_INPUTS and batch.mask is NO_MASK:
                self._compare(batch, pad_to, outputs, layer)
        return outputs

    def _look_at_reserved(self, layer: int) -> None:
        written = what_was_written(self._runtime.table, self._runtime.pool, [layer])
        if written:
            self._runner.metrics.reserved_written += 1
            self._note(written, "reserved")

    def _compare(self, batch: StepBatch, pad_to: PadTo | None, outputs: Outputs, layer: int) -> None:
        self._tap.expect(layer)
        try:
            again = self._runner.run_eagerly(batch, pad_to)
        finally:
            taken = self._tap.take()
        given, eager = tensors_of(outputs), tensors_of(again)
        wrong_rows = {path: rows for path in eager if (rows := rows_beyond_bounds(given[path], eager[path]))}
        self._runner.metrics.rows_differ += bool(wrong_rows)
        for path, rows in wrong_rows.items():
            what = f"rows {rows[:8]}{f' of {path}' if path else ''} of a step of {batch.num_seqs} sequences"
            self._note(f"{what} differ from the eager run's", "rows")
        # The reference attends to rows of single tokens.
        is_single = self._problems[layer].row.tokens == 1
        wrong_seqs = self._wrong_seqs(batch, layer, *taken) if taken is not None and is_single else []
        if wrong_seqs:
            self._runner.metrics.attention_differs += 1
            differs = f"layer {layer} of sequences {wrong_seqs} of {batch.num_seqs} differs from the reference"
            self._note(differs, "attention")

    def _note(self, finding: str, word: str) -> None:
        self._runner.metrics.finding = Reason(finding, word)
        logging.getLogger(__name__).warning("sampled check: %s", finding)

    def _wrong_seqs(self, batch: StepBatch, layer: int, q: Tensor, out: Tensor) -> list[int]:
        """Sequences, among a few, whose last new tokens in a layer differ from the reference."""
        runtime, table = self._runtime, self._runtime.table
        space = runtime.pool.space_of_layer(layer)
        of_step = LayerOfStep(
            self._problems[layer],
            runtime.pool.layer(layer),
            runtime.head_weights.of(layer),
            batch.q_len.tolist(),
            batch.kv_len.tolist(),
            lambda seq: torch.tensor(table.pages_of(int(batch.rows[seq]), space).tolist(), device=q.device),
            UNLIMITED_WINDOW,
            runtime.selections[runtime.core.kinds.of_layer[layer]].eight_bit_products,
        )
        return of_step.wrong_seqs(q, out, self._random.permutation(batch.num_seqs)[:MOST_SEQS].tolist())
