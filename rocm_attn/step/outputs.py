"""Outputs of a forward: a tensor, PerToken, None, or lists, tuples, dicts and dataclasses of these.

A plain tensor has one row per sequence, [S, ...]; PerToken wraps one with a row per token, [T, ...]. Shapes alone do
not distinguish them: in a decode step S and T are equal.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor
from typing_extensions import TypeVar

from rocm_attn.errors import BadTensor
from rocm_attn.hip_graphs.tensor_trees import branches_of, is_tree, with_branches

# Outputs of a forward; by default one tensor [S, ...].
Outputs = TypeVar("Outputs", default=Tensor)


@dataclass(frozen=True, slots=True, eq=False)
class PerToken:
    """Marks a tensor in a forward's outputs that has one row per padded token of its step, [T, ...].

    StepRunner.run() returns it with one row per real token, [num_tokens, ...], in the order of the batch.
    """

    tensor: Tensor


Leaf = Tensor | PerToken | None


def leaves_of(outputs: object, path: str = "") -> Iterator[tuple[str, Leaf]]:
    """(path, leaf) for each leaf, in order; the path is the expression after forward's result that reaches it.

    Raises BadTensor for a leaf of another type than Leaf.
    """
    if outputs is None or isinstance(outputs, (Tensor, PerToken)):
        yield path, outputs
    elif is_tree(outputs):
        for name, branch in branches_of(outputs):
            yield from leaves_of(branch, path + name)
    else:
        raise BadTensor(f"forward returned {_article(type(outputs).__name__)}{_at(path)}; {_ALLOWED}")


def real_rows(outputs: Outputs, num_seqs: int, num_tokens: int) -> Outputs:
    """The outputs without the rows of pads: [num_seqs, ...], and [num_tokens, ...] for PerToken. No copies."""
    if isinstance(outputs, Tensor):  # true for most forwards
        return outputs if outputs.shape[0] == num_seqs else outputs[:num_seqs]  # type: ignore[return-value]
    return cast(Outputs, _cut(outputs, num_seqs, num_tokens))


def _cut(tree: Any, num_seqs: int, num_tokens: int) -> Any:
    if tree is None:
        return None
    if isinstance(tree, Tensor):
        return tree[:num_seqs]
    if isinstance(tree, PerToken):
        return PerToken(tree.tensor[:num_tokens])
    return with_branches(tree, [_cut(branch, num_seqs, num_tokens) for _, branch in branches_of(tree)])


def require_rows(outputs: object, num_seqs: int, num_tokens: int) -> None:
    """Raises BadTensor unless each leaf has a row for each padded sequence, or for each padded token."""
    for path, leaf in leaves_of(outputs):
        if leaf is None:
            continue
        tensor, wanted, of = (
            (leaf.tensor, num_tokens, "tokens") if isinstance(leaf, PerToken) else (leaf, num_seqs, "sequences")
        )
        if not isinstance(tensor, Tensor):
            raise BadTensor(f"forward returned a PerToken of {_article(type(tensor).__name__)}{_at(path)}; {_ALLOWED}")
        if tensor.dim() == 0:
            raise BadTensor(f"forward returned a tensor without dimensions{_at(path)}; {_ALLOWED}")
        if tensor.shape[0] != wanted:
            is_per_token = of == "sequences" and tensor.shape[0] == num_tokens
            hint = "; wrap a tensor that has a row for each token in PerToken" if is_per_token else ""
            raise BadTensor(f"forward returned {tensor.shape[0]} rows{_at(path)} for {wanted} padded {of}{hint}")


def structure_of(outputs: object) -> str:
    """The tree in words, without sizes; equal for outputs that have their leaves at the same places."""
    if isinstance(outputs, Tensor):
        return "Tensor"
    if outputs is None or isinstance(outputs, PerToken) or not is_tree(outputs):
        return type(outputs).__name__
    return f"{type(outputs).__name__}({', '.join(f'{at}: {structure_of(leaf)}' for at, leaf in branches_of(outputs))})"


_ALLOWED = (
    "it must return tensors [S, ...] with a row for each padded sequence of its step, PerToken of tensors [T, "
    "...] with a row for each padded token, None, or lists, tuples, dicts and dataclasses of these"
)


def _article(name: str) -> str:
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _at(path: str) -> str:
    return f" at {path}" if path else ""
