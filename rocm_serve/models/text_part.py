"""TextWeights: the decoder of a model that also takes images, as a model of its own."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from rocm_attn.models.tensors import Shape, TensorSource

# transformers' prefixes of the decoder's part of such a file, by release, and its prefix in a text model
_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
}


class TextWeights:
    """A TensorSource over another: only the decoder's tensors, under their names in a text model's file."""

    def __init__(self, whole: TensorSource) -> None:
        self.name = whole.name
        self._whole = whole
        self._names = {_text_name(name): name for name in whole.shapes() if _text_name(name)}

    def shapes(self) -> Mapping[str, Shape]:
        """name -> shape of the decoder's tensors."""
        shapes = self._whole.shapes()
        return {text_name: shapes[name] for text_name, name in self._names.items()}

    def read(self, name: str, *where: slice) -> Tensor:
        """Like TensorSource.read. Raises BadModel."""
        return self._whole.read(self._names[name], *where)


def _text_name(name: str) -> str:
    """The name in a text model's file; "" if the tensor belongs to another part."""
    for prefix, text_prefix in _PREFIXES.items():
        if name.startswith(prefix):
            return text_prefix + name.removeprefix(prefix)
    return ""
