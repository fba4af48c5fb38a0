"""SampledCheck: while serving, repeats one step in many and compares the results (EngineOptions.check_every).

The second run is eager. The forward's rows must equal those of the first run, which may have been a graph. In one layer
the attention of a few sequences must agree with the reference, computed over copies of their pages. The second run
stores the same K and V again. Reserved memory must be zero: row 0 of the table, and page 0 of that layer. If a step has
lengths, ids or a mask on the device, only reserved memory is checked, because the others may have changed since.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Generic

import numpy as np

from rocm_attn.batch.inputs import HOST_INPUTS
from rocm_attn.batch.mask import NO_MASK
from rocm_attn.batch.padding import PadTo
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.capture.check import rows_beyond_bounds, tensors_of
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.errors import WrongState
from rocm_attn.machine.settings import whole_number
from rocm_attn.paging.canary import what_was_written
from rocm_attn.problem import Problem
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.metrics import Metrics, Reason
from rocm_attn.step.outputs import Outputs
from rocm_attn.step.protocols import NO_EVIDENCE, Attended, Evidence, LayerCalls, WrappedLayers, WrongLayer
from rocm_attn.watch.evidence import layer_of_step
from rocm_attn.watch.few_sequences import MOST_SEQS


class LayerTap(WrappedLayers):
    """Wraps the layers of a step, and copies the inputs and outputs of one layer's attention on request.

    around() is called before every step's first layer.
    """

    _layers: LayerCalls

    def __init__(self) -> None:
        self.is_used, self._layer = False, -1
        self._taken: Attended | None = None
        self._context: Callable[[], AbstractContextManager[None]] = nullcontext

    def around(self, layers: LayerCalls) -> LayerTap:
        """Wraps the layers of the step that is about to run."""
        self._layers, self.is_used = layers, True
        return self

    def expect(self, layer: int, context: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """Copies q and out of this layer from the next step on, until take(). context: entered around its attention"""
        self._layer, self._taken, self._context = layer, None, context

    def take(self) -> Attended | None:
        """The layer's attention; None if it was not called."""
        taken, self._layer, self._taken = self._taken, -1, None
        return taken

    def _call(self, name: str, layer: int, *given: Any, **named: Any) -> None:
        call = partial(getattr(self._layers, name), layer, *given, **named)
        # Attention to a selection is not compared, because the reference attends to all keys.
        if name != "attend" or layer != self._layer:
            call()
            return
        with self._context():
            call()
        q, out, _ = given
        self._taken = Attended(q.clone(), out.clone(), out)


class SampledCheck(Generic[Outputs]):
    """Runs steps, and checks one in `every` by a second run and by a reference. Differences are logged and counted.

    problems: the runtime's, one for each layer
    tap:      LayerTap() of rocm_attn/watch/sampled_check.py; the runner's forward calls the layers of
              tap.around(part.layers) in place of part.layers
    seed:     for the choice of layers and sequences
    evidence: keeps the inputs and the machine code of a layer that was found wrong

    Raises BadSetting, and run() raises WrongState for a forward that leaves the tap out.
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
        evidence: Evidence = NO_EVIDENCE,
    ) -> None:
        self._runner = runner
        self._runtime = runtime
        self._problems = tuple(problems)
        self._tap = tap
        self._every = self._until_next = whole_number("every", every, least=1)
        self._random = np.random.default_rng(whole_number("seed", seed, least=0))
        self._evidence = evidence

    @property
    def counters(self) -> Metrics:
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
        if not self._tap.is_used:
            raise WrongState("the forward leaves the tap out; let it call the layers of tap.around(part.layers)")
        given, eager = tensors_of(outputs), tensors_of(again)
        wrong_rows = {path: rows for path in eager if (rows := rows_beyond_bounds(given[path], eager[path]))}
        self._runner.metrics.rows_differ += bool(wrong_rows)
        for path, rows in wrong_rows.items():
            what = f"rows {rows[:8]}{f' of {path}' if path else ''} of a step of {batch.num_seqs} sequences"
            self._note(f"{what} differ from the eager run's", "rows")
        # The reference attends to rows of single tokens.
        is_single = self._problems[layer].row.tokens == 1
        if taken is None or not is_single:
            return
        of_step = layer_of_step(self._runtime, layer, self._problems[layer], batch)
        some = self._random.permutation(batch.num_seqs)[:MOST_SEQS].tolist()
        wrong_seqs = of_step.wrong_seqs(taken.q, taken.out, some)
        if wrong_seqs:
            self._runner.metrics.attention_differs += 1
            differs = f"layer {layer} of sequences {wrong_seqs} of {batch.num_seqs} differs from the reference"
            self._note(differs, "attention")
            attend = partial(self._attend_again, batch, pad_to, layer)
            self._evidence.keep(WrongLayer(differs, layer, self._problems[layer], batch, wrong_seqs, taken, attend))

    def _attend_again(
        self, batch: StepBatch, pad_to: PadTo | None, layer: int, context: Callable[[], AbstractContextManager[None]]
    ) -> Attended | None:
        """Runs the step eagerly once more; the context is around the layer's attention alone."""
        self._tap.expect(layer, context)
        try:
            self._runner.run_eagerly(batch, pad_to)
        finally:
            taken = self._tap.take()
        return taken

    def _note(self, finding: str, word: str) -> None:
        self._runner.metrics.finding = Reason(finding, word)
        logging.getLogger(__name__).warning("sampled check: %s", finding)
