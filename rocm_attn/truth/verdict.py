"""TruthVerdict: the finding of a run of LiveTruth. Imports no torch: a server's front reads verdicts."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TruthVerdict:
    """The finding of one run.

    wrong:       layer -> what was missed or seen there; on any rank that shares the layers
    not_checked: layer -> why no needle can tell, such as heads that are too small
    reason:      why nothing was run, or the fault that ended the run; empty if all steps ran
    is_fault:    whether the reason is a fault of the device
    num_layers:  of the runtime
    num_keys:    keys that were asked for, in all layers
    """

    wrong: Mapping[int, str]
    not_checked: Mapping[int, str]
    reason: str
    is_fault: bool
    num_layers: int
    num_keys: int

    @property
    def word(self) -> str:
        """Returns "wrong", "right", or "not checked" if nothing was asked for."""
        if self.wrong or self.is_fault:
            return "wrong"
        return "not checked" if self.reason or len(self.not_checked) == self.num_layers else "right"

    @property
    def sentence(self) -> str:
        """The finding in a sentence; empty if all was right."""
        if self.wrong:
            layer, first = min(self.wrong.items())
            return f"the truth probe found {len(self.wrong)} of {self.num_layers} layers wrong; layer {layer}: {first}"
        if self.reason:
            return self.reason
        return next(iter(self.not_checked.values()), "") if self.word == "not checked" else ""

    def as_dict(self) -> dict[str, object]:
        """The verdict for JSON, with a word for each layer."""
        layers = [{"layer": layer, **self._of_layer(layer)} for layer in range(self.num_layers)]
        return {"verdict": self.word, "reason": self.sentence, "keys": self.num_keys, "layers": layers}

    def _of_layer(self, layer: int) -> dict[str, str]:
        if layer in self.wrong:
            return {"verdict": "wrong", "reason": self.wrong[layer]}
        blind = self.not_checked.get(layer, self.reason)
        return {"verdict": "not checked", "reason": blind} if blind else {"verdict": "right"}
