"""LiveTruth: needles through the layers of a runtime that serves, in one row and a few pages that no request has.

The steps are staged, published, stored and attended as the steps of requests are: with the same table, the same pools
and the same kernels, and with the model's own scales and sinks. The needles take the place of q, k and v alone. They
run eagerly: the graphs of requests hold the model's projections, which no needle can pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch
from rocm_attn.errors import BadProblem, DeviceFault
from rocm_attn.problem import Scales
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.truth.needle_layer import NeedleLayer, Tally
from rocm_attn.truth.needles import Sizes, sharpness_of
from rocm_attn.truth.verdict import TruthVerdict

# Tokens of the sequence when it decodes: several pages, and cheap.
LONGEST = 320
_SHORTEST = 8
_DECODE_STEPS = 3
# A sink above this logit would take weight from a needle, whose logit is at least 5 above all others together.
_HIGHEST_SINK = 2.0


class LiveTruth:
    """Runs needles over a runtime.

    make_room: tokens of a row, new tokens of its steps -> whether there are pages for it that no request needs
    chunk:     most new tokens of a step
    """

    def __init__(self, runtime: AttentionRuntime, make_room: Callable[[int, int], bool], chunk: int) -> None:
        self._runtime, self._make_room, self._chunk = runtime, make_room, chunk
        self._kv_len = self._longest()
        self._not_checked: dict[int, str] = {}
        self._tallies: dict[int, Tally] = {}
        self._wrong: dict[int, str] = {}

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

    def _longest(self) -> int:
        """Returns the tokens of the sequence when it decodes: as many as all heads can tell apart, up to LONGEST."""
        length = min(LONGEST, self._runtime.max_kv_len - _DECODE_STEPS)
        while length > _SHORTEST and not self._tells_apart(length + _DECODE_STEPS):
            length = max(_SHORTEST, length // 2)
        return length

    def _tells_apart(self, kv_len: int) -> bool:
        for problem in set(self._runtime.kinds.problems):
            try:
                sharpness_of(problem, kv_len)
            except BadProblem:
                return False
        return True

    def _why_not(self) -> str:
        """Returns why nothing can be run now; empty if it can. Finds the layers that no needle can check."""
        runtime, problems = self._runtime, self._runtime.kinds.problems
        kv_len = self._kv_len + _DECODE_STEPS
        for layer in range(len(problems)):
            reason = self._why_blind(layer, kv_len)
            if reason:
                self._not_checked[layer] = reason
        if len(self._not_checked) == len(problems):
            return f"no layer can be checked: {self._not_checked[0]}"
        if not runtime.table.num_free_rows:
            return "every row of the request table is in use; ask again"
        if not self._make_room(kv_len, self._most_new):
            return f"too few pages are free for {kv_len} tokens; ask again"
        return ""

    @property
    def _most_new(self) -> int:
        """New tokens of the largest step: a prompt takes two steps or more."""
        return max(1, min(self._chunk, -(-2 * self._kv_len // 3)))

    def _why_blind(self, layer: int, kv_len: int) -> str:
        runtime = self._runtime
        problem, weights = runtime.kinds.problems[layer], runtime.head_weights.of(layer)
        if problem.has_alibi_slopes:
            return "its slopes take the weight from distant keys"
        try:
            sharpness = sharpness_of(problem, kv_len)
        except BadProblem as error:
            return str(error)
        logit = sharpness * math.sqrt(problem.head_dim)
        if weights.sinks is not None and float(weights.sinks.max()) > logit - _HIGHEST_SINK - math.log(kv_len):
            return "its sinks take the weight from every key"
        return ""

    def _serve(self, row: int, seed: int) -> None:
        """Stores a prompt in two chunks or more, decodes, and judges each step."""
        runtime, table = self._runtime, self._runtime.table
        length = self._kv_len
        most = self._most_new
        steps = [min(most, length - done) for done in range(0, length, most)] + [1] * _DECODE_STEPS
        done, batches = 0, list[StepBatch]()
        for new in steps:
            batches.append(StepBatch([row], [done + new], [new], NO_TOKEN_IDS))
            done += new
        num_tokens = max(runtime.plan(batch).shape.num_tokens for batch in batches)
        layers = self._layers(done, num_tokens, seed)
        done = 0
        for new, batch in zip(steps, batches, strict=True):
            for layer in layers:
                layer.prepare([done], [new])
            table.evict([row], [done])
            table.reserve(row, done + new)
            with runtime.step(batch) as step:
                part = step.parts[0]
                for number, layer in enumerate(layers):
                    layer.run(part.layers, number, part.token_ids.shape[0])
            for number, layer in enumerate(layers):
                if number not in self._not_checked:
                    self._judge(number, layer, "decode" if new == 1 else "prompt")
            done += new

    def _layers(self, kv_len: int, num_tokens: int, seed: int) -> list[NeedleLayer]:
        runtime = self._runtime
        made: list[NeedleLayer] = []
        for number, problem in enumerate(runtime.kinds.problems):
            generator = torch.Generator(runtime.device).manual_seed(seed * 1009 + number)
            earlier = made[-1].source if made else None
            made.append(NeedleLayer(problem, [kv_len], num_tokens, generator, earlier, self._sizes(number)))
        return made

    def _sizes(self, layer: int) -> Sizes:
        """Returns the layer's own scales, where K and V have fixed ones: larger elements would not fit their codes."""
        pages, problem = self._runtime.pool.layer(layer), self._runtime.kinds.problems[layer]
        ones = Sizes.ones(problem, self._runtime.device)
        if pages.format.scales not in (Scales.LAYER, Scales.HEAD) or pages.k_scale is None or pages.v_scale is None:
            return ones
        return Sizes(ones.k * pages.k_scale[:, None], ones.v * pages.v_scale[:, None])

    def _judge(self, number: int, layer: NeedleLayer, kind: str) -> None:
        tally = self._tallies.setdefault(number, Tally())
        for wrong in layer.judge([tally]):
            what = "was not found" if wrong.visible else "was seen although it is hidden"
            sentence = (
                f"key {wrong.key} {what} by head {wrong.head} in a {kind} step (its value is off by "
                f"{wrong.distance:.3g})"
            )
            self._wrong.setdefault(number, sentence)

    def _verdict(self, reason: str, *, is_fault: bool) -> TruthVerdict:
        """Returns the verdict of all ranks."""
        found = self._runtime.agree({str(layer): sentence for layer, sentence in self._wrong.items()})
        return TruthVerdict(
            {int(layer): sentence for layer, sentence in found.items()},
            dict(self._not_checked),
            reason,
            is_fault,
            len(self._runtime.kinds.problems),
            sum(tally.requested + tally.hidden for tally in self._tallies.values()),
        )
