"""The model's forward in verify steps: it returns logits of several last tokens of each sequence."""

import torch
from torch import Tensor

from rocm_attn.capture.split_forward import Forward
from rocm_attn.step.step import Part
from rocm_serve.models.model import Model
from rocm_serve.options import EngineOptions


class HandingOver:
    """A model that leaves rows of each token of a step for a head that drafts.

    layers:   whose inputs are left, side by side; none: the input of the output matrix is
    features: [most_tokens, hidden, or hidden times layers]; the first rows are those of the last step
    """

    def __init__(self, model: Model, most_tokens: int, layers: tuple[int, ...] = ()) -> None:
        self.model, self.weights, self._layers = model, model.weights, layers
        with torch.inference_mode(False):
            shape = most_tokens, model.config.hidden_size * max(1, len(layers))
            self.features = torch.zeros(shape, dtype=model.weights.dtype, device=model.weights.device)

    def hidden(self, step: Part) -> Tensor:
        hidden, inputs = self.model.hidden_and_inputs(step, self._layers)
        left = torch.cat(inputs, 1) if self._layers else self.model.normed(hidden)
        self.features[: hidden.shape[0]].copy_(left)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)


def forward_of(model: Model | HandingOver, options: EngineOptions) -> Forward:
    """The model's forward, with logits of as many tokens of each sequence as the options need."""
    return (
        model.forward if isinstance(model, Model) and not options.speculates else LastRows(model, options.rows_of_each)
    )


class LastRows:
    """A forward that returns [S, num_rows, vocab]: logits of the last num_rows new tokens of each sequence, in order.

    If there is one row, [S, vocab]. In a decode step of more there is one too: [S, 1, vocab]. If a sequence has fewer
    new tokens, the rows before its own are those of others and have no meaning.
    """

    def __init__(self, model: Model | HandingOver, num_rows: int) -> None:
        self._model, self._num_rows = model, num_rows
        self._back = torch.arange(1 - num_rows, 1, device=model.weights.device)

    def __call__(self, step: Part) -> Tensor:
        """Runs the forward; see the class."""
        return self.logits_of(step, self._model.hidden(step))

    def logits_of(self, step: Part, hidden: Tensor) -> Tensor:
        """The logits, of rows that the model's hidden() returned."""
        last = step.last_token_of_seq
        if self._num_rows == 1 or step.plan.shape.kind.decodes:
            logits = self._model.logits(hidden.index_select(0, last))
            return logits if self._num_rows == 1 else logits.unsqueeze(1)
        rows = (last[:, None] + self._back).clamp_(min=0).flatten()
        logits = self._model.logits(hidden.index_select(0, rows))
        return logits.view(len(last), self._num_rows, logits.shape[-1])
