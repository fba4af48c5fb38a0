"""RowNeedles: the needle test of one row in all layers of a serving model, and its findings."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from rocm_attn.errors import BadProblem
from rocm_attn.problem import EarlierSelection, Indexer, Problem, Scales
from rocm_attn.step.head_weights import HeadWeights
from rocm_attn.truth.choosers import BY_INDEXERS, ByIndexer, Choosers, PagesOfLayers
from rocm_attn.truth.needle_layer import NeedleLayer, Tally
from rocm_attn.truth.needles import Sizes, sharpness_of

# Tokens of the sequence when it decodes: several pages, and cheap.
LONGEST = 320
_SHORTEST = 8
_DECODE_STEPS = 3
# Tokens of the longest row at its end.
MOST_TOKENS = LONGEST + _DECODE_STEPS
# A sink above this logit would take weight from a needle, whose logit is at least 5 above all others together.
_HIGHEST_SINK = 2.0


class RowNeedles:
    """The needles, and what they found.

    problems:   of the layers
    weights:    layer -> its head weights
    pages:      of the layers
    max_kv_len: the most tokens of the row
    choosers:   of the layers with an indexer

    prompt_len:  tokens of the row when it decodes
    kv_len:      of the row at its end
    not_checked: layer -> why no needle can tell, found by why_none()
    wrong:       layer -> what was missed or seen there
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        weights: Callable[[int], HeadWeights],
        pages: PagesOfLayers,
        device: torch.device,
        max_kv_len: int,
        choosers: Choosers = BY_INDEXERS,
    ) -> None:
        self._problems, self._weights, self._pages, self._device = problems, weights, pages, device
        self._choosers = choosers
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
        if self.prompt_len < 1:
            return f"a row has room for {self.kv_len} tokens, and its needles take {1 + _DECODE_STEPS} or more"
        for layer in range(len(self._problems)):
            if reason := self._why_blind(layer):
                self.not_checked[layer] = reason
        if len(self.not_checked) == len(self._problems):
            return f"no layer can be checked: {self.not_checked[0]}"
        return ""

    def layers(self, num_tokens: int, seed: int) -> Mapping[int, NeedleLayer]:
        """Returns new needles of the layers that can be checked. num_tokens: padded tokens of the largest step"""
        made: dict[int, NeedleLayer] = {}
        earlier: NeedleLayer | None = None
        for number, problem in enumerate(self._problems):
            if number in self.not_checked:
                continue
            generator = torch.Generator(self._device).manual_seed(seed * 1009 + number)
            chooser = self._choosers.of(self._pages, number) if isinstance(problem.indexer, Indexer) else ByIndexer
            layer = NeedleLayer(problem, [self.kv_len], num_tokens, generator, earlier, self._sizes(number), chooser)
            made[number], earlier = layer, layer.source
        return made

    def judge(self, layers: Mapping[int, NeedleLayer], kind: str) -> None:
        """Judges the outputs of a step. kind: of the step, in a word"""
        for number, layer in layers.items():
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
        if isinstance(problem.indexer, EarlierSelection) and (first := self._source_of(layer)) in self.not_checked:
            return f"the layer that selects its keys is not checked: {self.not_checked[first]}"
        try:
            if isinstance(problem.indexer, Indexer):
                self._choosers.check(problem.indexer, self.kv_len)
            sharpness = sharpness_of(problem, self.kv_len)
        except BadProblem as error:
            return str(error)
        logit = sharpness * math.sqrt(problem.head_dim)
        if weights.sinks is not None and float(weights.sinks.max()) > logit - _HIGHEST_SINK - math.log(self.kv_len):
            return "its sinks take the weight from every key"
        return ""

    def _source_of(self, layer: int) -> int:
        """Returns the nearest layer before a layer that has an indexer."""
        return max(each for each in range(layer) if isinstance(self._problems[each].indexer, Indexer))

    def _sizes(self, layer: int) -> Sizes:
        """Returns the layer's own scales, where K and V have fixed ones: larger elements would not fit their codes."""
        pages, problem = self._pages.layer(layer), self._problems[layer]
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
