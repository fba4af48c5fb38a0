"""RowNeedles: needles of one row, in all layers of a model that serves, and what they found."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from rocm_attn.errors import BadProblem
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.problem import Problem, Scales
from rocm_attn.step.head_weights import HeadWeights
from rocm_attn.truth.needle_layer import NeedleLayer, Tally
from rocm_attn.truth.needles import Sizes, sharpness_of

# Tokens of the sequence when it decodes: several pages, and cheap.
LONGEST = 320
_SHORTEST = 8
_DECODE_STEPS = 3
# A sink above this logit would take weight from a needle, whose logit is at least 5 above all others together.
_HIGHEST_SINK = 2.0


class RowNeedles:
    """The needles, and what they found.

    problems:   of the layers
    weights, pages: layer -> its head weights; its pages
    max_kv_len: the most tokens of the row

    prompt_len:  tokens of the row when it decodes
    kv_len:      of the row at its end
    not_checked: layer -> why no needle can tell, found by why_none()
    wrong:       layer -> what was missed or seen there
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        weights: Callable[[int], HeadWeights],
        pages: Callable[[int], LayerPages],
        device: torch.device,
        max_kv_len: int,
    ) -> None:
        self._problems, self._weights, self._pages, self._device = problems, weights, pages, device
        self.prompt_len = self._longest(max_kv_len)
        self.kv_len = self.prompt_len + _DECODE_STEPS
        self.not_checked: dict[int, str] = {}
        self.wrong: dict[int, str] = {}
        self._tallies: dict[int, Tally] = {}

    @property
    def num_keys(self) -> int:
        """Keys that were asked for so far, in all layers."""
        return sum(tally.requested + tally.hidden for tally in self._tallies.values())

    def steps(self, chunk: int) -> list[int]:
        """New tokens of each step: of a prompt, in two steps or more of up to chunk tokens, and then one each."""
        most, length = self.most_new(chunk), self.prompt_len
        return [min(most, length - done) for done in range(0, length, most)] + [1] * _DECODE_STEPS

    def most_new(self, chunk: int) -> int:
        """New tokens of the largest of these steps."""
        return max(1, min(chunk, -(-2 * self.prompt_len // 3)))

    def why_none(self) -> str:
        """Returns why no layer can be checked; empty if one can."""
        for layer in range(len(self._problems)):
            if reason := self._why_blind(layer):
                self.not_checked[layer] = reason
        if len(self.not_checked) == len(self._problems):
            return f"no layer can be checked: {self.not_checked[0]}"
        return ""

    def layers(self, num_tokens: int, seed: int) -> list[NeedleLayer]:
        """Returns new needles. num_tokens: padded tokens of the largest step"""
        made: list[NeedleLayer] = []
        for number, problem in enumerate(self._problems):
            generator = torch.Generator(self._device).manual_seed(seed * 1009 + number)
            earlier = made[-1].source if made else None
            made.append(NeedleLayer(problem, [self.kv_len], num_tokens, generator, earlier, self._sizes(number)))
        return made

    def judge(self, layers: Sequence[NeedleLayer], kind: str) -> None:
        """Judges the outputs of a step. kind: of the step, in a word"""
        for number, layer in enumerate(layers):
            if number not in self.not_checked:
                for wrong in layer.judge([self._tallies.setdefault(number, Tally())]):
                    what = "was not found" if wrong.visible else "was seen although it is hidden"
                    sentence = (
                        f"key {wrong.key} {what} by head {wrong.head} in a {kind} step (its value is off by "
                        f"{wrong.distance:.3g})"
                    )
                    self.wrong.setdefault(number, sentence)

    def _longest(self, max_kv_len: int) -> int:
        """Returns as many tokens as all heads can tell apart, up to LONGEST."""
        length, kinds = min(LONGEST, max_kv_len - _DECODE_STEPS), set(self._problems)
        while length > _SHORTEST and not all(_tells_apart(each, length + _DECODE_STEPS) for each in kinds):
            length = max(_SHORTEST, length // 2)
        return length

    def _why_blind(self, layer: int) -> str:
        problem, weights = self._problems[layer], self._weights(layer)
        if problem.has_alibi_slopes:
            return "its slopes take the weight from distant keys"
        try:
            sharpness = sharpness_of(problem, self.kv_len)
        except BadProblem as error:
            return str(error)
        logit = sharpness * math.sqrt(problem.head_dim)
        if weights.sinks is not None and float(weights.sinks.max()) > logit - _HIGHEST_SINK - math.log(self.kv_len):
            return "its sinks take the weight from every key"
        return ""

    def _sizes(self, layer: int) -> Sizes:
        """Returns the layer's own scales, where K and V have fixed ones: larger elements would not fit their codes."""
        pages, problem = self._pages(layer), self._problems[layer]
        ones = Sizes.ones(problem, self._device)
        if pages.format.scales not in (Scales.LAYER, Scales.HEAD) or pages.k_scale is None or pages.v_scale is None:
            return ones
        return Sizes(ones.k * pages.k_scale[:, None], ones.v * pages.v_scale[:, None])


def _tells_apart(problem: Problem, kv_len: int) -> bool:
    try:
        sharpness_of(problem, kv_len)
    except BadProblem:
        return False
    return True
