"""LiveTruth: a needle test of a serving runtime's layers, in one free row and a few free pages.

Its steps are staged, published, stored and attended like those of requests: with the same block table, pools and
kernels, and with the model's own scales and sinks. Only q, k and v are replaced by needles. The steps run eagerly,
because the graphs of requests contain the model's projections.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch
from rocm_attn.capture.probe_requests import give_states
from rocm_attn.errors import DeviceFault
from rocm_attn.problem import AllKeys
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.protocols import NO_EVIDENCE, Evidence, WrongLayer
from rocm_attn.step.step import Part
from rocm_attn.truth.needle_layer import NeedleLayer
from rocm_attn.truth.row_needles import RowNeedles
from rocm_attn.truth.verdict import TruthVerdict


class LiveTruth:
    """Runs needles over a runtime.

    make_room: tokens of a row, new tokens of its steps -> whether there are pages for it that no request needs
    chunk:     most new tokens of a step
    evidence:  keeps the inputs and the code of a layer that was found wrong
    """

    def __init__(
        self,
        runtime: AttentionRuntime,
        make_room: Callable[[int, int], bool],
        chunk: int,
        evidence: Evidence = NO_EVIDENCE,
    ) -> None:
        self._runtime, self._make_room, self._chunk, self._evidence = runtime, make_room, chunk, evidence
        self._needles = RowNeedles(
            runtime.kinds.problems, runtime.head_weights.of, runtime.pool, runtime.device, runtime.max_kv_len
        )

    def run(self, seed: int) -> TruthVerdict:
        """Runs the steps, and returns the verdict. Its row and its pages are free afterwards.

        Call it between two steps, when no fault is unreported. Ranks that share the layers call it together, and
        return the same verdict.
        """
        runtime = self._runtime
        reason = self._why_not()
        found = runtime.agree({"reason": reason} if reason else {})
        if "reason" in found:
            return self._verdict(found["reason"], is_fault=False)
        fault = ""
        row = runtime.table.admit()
        try:
            self._serve(row, seed)
            runtime.check_device()
        except DeviceFault as error:
            fault = f"the truth probe met a fault of the device: {error}"
        finally:
            runtime.table.free(row)
        return self._verdict(fault, is_fault=bool(fault))

    def _why_not(self) -> str:
        """Returns why nothing can be run now; empty if it can."""
        needles = self._needles
        if reason := needles.why_none():
            return reason
        if not self._runtime.table.num_free_rows:
            return "every row of the request table is in use; ask again"
        if not self._make_room(needles.kv_len, needles.most_new(self._chunk)):
            return f"too few pages are free for {needles.kv_len} tokens; ask again"
        return ""

    def _serve(self, row: int, seed: int) -> None:
        """Stores a prompt in two chunks or more, decodes, and judges each step."""
        runtime, table, needles = self._runtime, self._runtime.table, self._needles
        steps = needles.steps(self._chunk)
        done, batches = 0, list[StepBatch]()
        for new in steps:
            batches.append(StepBatch([row], [done + new], [new], NO_TOKEN_IDS))
            done += new
        layers = needles.layers(max(runtime.plan(batch).shape.num_tokens for batch in batches), seed)
        done = 0
        for new, batch in zip(steps, batches, strict=True):
            for layer in layers.values():
                layer.prepare([done], [new])
            table.evict([row], [done])
            table.reserve(row, done + new)
            with runtime.step(batch) as step:
                part = step.parts[0]
                for number, layer in layers.items():
                    layer.run(part.layers, number, part.token_ids.shape[0])
                earlier = set(needles.wrong)
                needles.judge(layers, "decode" if new == 1 else "prompt")
                for number in needles.wrong.keys() - earlier:
                    self._keep(number, layers[number], part, batch)
            done += new
            # Needles pass no recurrent layer, so a step of a model with such layers counts as unfinished.
            table.mark_stored([row], [done])
            give_states(runtime, np.array([row], np.int32), np.array([done], np.int32))

    def _keep(self, number: int, layer: NeedleLayer, part: Part, batch: StepBatch) -> None:
        """Hands over a layer with wrong needles, while its step can attend again."""
        if not isinstance(layer.problem.indexer, AllKeys) or layer.problem.row.tokens != 1:
            return  # the reference attends to all keys, in rows of single tokens
        tokens = part.token_ids.shape[0]
        sentence = f"layer {number}: {self._needles.wrong[number]}"
        again = partial(layer.attend_again, part.layers, number, tokens)
        self._evidence.keep(WrongLayer(sentence, number, layer.problem, batch, [0], layer.attended(tokens), again))

    def _verdict(self, reason: str, *, is_fault: bool) -> TruthVerdict:
        """Returns the verdict of all ranks."""
        needles = self._needles
        found = self._runtime.agree({str(layer): sentence for layer, sentence in needles.wrong.items()})
        return TruthVerdict(
            {int(layer): sentence for layer, sentence in found.items()},
            dict(needles.not_checked),
            reason,
            is_fault,
            len(self._runtime.kinds.problems),
            needles.num_keys,
        )
