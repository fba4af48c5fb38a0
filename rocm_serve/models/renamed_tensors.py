"""RenamedTensors: a model's file whose tensors have other names, or also hold parts that are no text model."""

from collections.abc import Callable, Mapping

from torch import Tensor

from rocm_attn.errors import BadModel
from rocm_attn.models.fields import shown
from rocm_attn.models.tensors import Shape, TensorSource

# transformers' prefixes of the decoder's part of a model that also takes images, by release, and its prefix in a text
# model
_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
}


class RenamedTensors:
    """A TensorSource over another. name_of: its name of a tensor for the other's; "" leaves the tensor out

    Raises BadModel for two tensors of one name.
    """

    def __init__(self, whole: TensorSource, name_of: Callable[[str], str]) -> None:
        self.name = whole.name
        self._whole = whole
        self._names: dict[str, str] = {}
        for name in whole.shapes():
            ours = name_of(name)
            if ours and self._names.setdefault(ours, name) != name:
                raise BadModel(
                    f"{whole.name} holds one weight twice, as {shown(self._names[ours])} and as {shown(name)}; leave "
                    "one of them out"
                )

    def shapes(self) -> Mapping[str, Shape]:
        """name -> shape of the tensors that are not left out."""
        shapes = self._whole.shapes()
        return {name: shapes[theirs] for name, theirs in self._names.items()}

    def read(self, name: str, *where: slice) -> Tensor:
        """Like TensorSource.read. Raises BadModel."""
        return self._whole.read(self._names[name], *where)


def text_name(name: str) -> str:
    """The name in a text model's file; "" if the tensor belongs to another part."""
    for prefix, text_prefix in _PREFIXES.items():
        if name.startswith(prefix):
            return text_prefix + name.removeprefix(prefix)
    return ""


def replaced_name(renamed: Mapping[str, str], name: str) -> str:
    """The name with each part that `renamed` has replaced."""
    for theirs, ours in renamed.items():
        name = name.replace(theirs, ours)
    return name
