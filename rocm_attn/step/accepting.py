"""Acceptance of draft tokens after a verify step, and the move of their K and V to their final slots.

The new tokens of a sequence in a verify step are the nodes of a tree. Node 0 is its last token, which no step has
stored before; the others are drafts. The result is all that the next step needs: its KV lengths are Accepted.kv_len
plus its new tokens, and Accepted.next_token is the first of these. This is device work of fixed shape: it never waits,
and may be captured with the forward.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rocm_attn.batch.mask import TreeMask
from rocm_attn.errors import BadTensor, Unsupported
from rocm_attn.kernels.attention.arguments import rows_are_contiguous
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.moved_rows import AlikePages, page_words, word_dtype
from rocm_attn.kernels.cache.page_format import PoolKind, Scales
from rocm_attn.kernels.cache.page_rows import key_rows, value_rows
from rocm_attn.kernels.speculative.arguments import Accepted, Probabilities, Verified
from rocm_attn.kernels.speculative.limits import MOST_NODES
from rocm_attn.kernels.speculative.paths import AcceptedPaths
from rocm_attn.machine.devices import on_device, require_tensor
from rocm_attn.paging.storage import PagePool, RowTable, SpaceTable
from rocm_attn.providers.launches import StepOps
from rocm_attn.providers.torch_ref import TORCH
from rocm_attn.providers.triton import TRITON
from rocm_attn.step.layer_kinds import LayerKinds
from rocm_attn.step.step import Part

_ELEMENTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def verified(step: Part, parents: Tensor) -> Verified:
    """A verify step's tokens and their tree. parents: of its TreeMask; for chains -1, 0, 1, ... in each row

    Raises BadTensor.
    """
    TreeMask(parents)  # refuses other tensors
    if not 1 <= parents.shape[1] <= MOST_NODES:
        raise BadTensor(f"trees have up to {parents.shape[1]} nodes; 1 to {MOST_NODES} are allowed")
    if parents.device != step.kv_len.device:
        raise BadTensor(
            f"parents is on {parents.device} and the step on {step.kv_len.device}; move it to the step's device"
        )
    return Verified(step.token_ids, step.q_indptr, step.kv_len, parents)


def accept_drawn(drawn: Tensor, given: Verified) -> Accepted:
    """Accepts the drafts that the model itself would have chosen: kernels/speculative/accept_drawn.py.

    drawn: int32 [T], token -> the token that the model chooses after it, by argmax or by a draw of its place
    Raises BadTensor.
    """
    num_tokens = given.token_ids.shape[0]
    if drawn.dtype != torch.int32 or drawn.shape != (num_tokens,) or not drawn.is_contiguous():
        raise BadTensor(
            f"drawn is {drawn.dtype} of shape {list(drawn.shape)}; it must be torch.int32 [{num_tokens}], contiguous"
        )
    return _accept(given, lambda ops, to: ops.accept_drawn(drawn, given, to))


def accept_sampled(probabilities: Probabilities, given: Verified) -> Accepted:
    """Accepts drafts that were drawn from probabilities of their own: kernels/speculative/accept_sampled.py.

    Raises BadTensor.
    """
    num_tokens, vocab = given.token_ids.shape[0], probabilities.target.shape[-1]
    for name, tensor in probabilities._asdict().items():
        shape = (num_tokens,) if name.endswith("uniform") else (num_tokens, vocab)
        if tensor.dtype != torch.float32 or tensor.shape != shape or not rows_are_contiguous(tensor):
            raise BadTensor(
                f"{name} is {tensor.dtype} of shape {list(tensor.shape)}; it must be torch.float32 {list(shape)} with "
                "contiguous rows"
            )
    return _accept(given, lambda ops, to: ops.accept_sampled(probabilities, given, to))


def _accept(given: Verified, launch: Callable[[StepOps, Accepted], None]) -> Accepted:
    device = given.kv_len.device
    to = Accepted.empty(given.num_seqs, given.parents.shape[1], device)
    with on_device(device):
        launch((TRITON if device.type == "cuda" else TORCH).ops(), to)
    return to


def select_last_accepted(rows: Tensor, step: Part, num_accepted: Tensor) -> Tensor:
    """Returns for each sequence the row of its last accepted token, the num_accepted-th new one: [S, ...].

    rows:         [T, ...], one row per token of the step, for instance hidden states
    num_accepted: int32 or int64 [S], on the device: how many of its new tokens, from the first one on, a sequence
                  keeps. If you store it by table row, pass num_accepted_of_row[step.row_of_seq]. A number outside of
                  1 .. new tokens is clipped, so that a row of another sequence is never selected

    Use it if a draft model's step runs over W tokens of each sequence, while only the device knows how many of them
    were accepted: DeviceInputs(kv_len=..., ahead=W). It picks the rows that the next drafts start from, and never waits
    for the device. Padding, and a sequence without new tokens, get a row that must not be used. Raises BadTensor.
    """
    num_tokens = step.token_ids.shape[0]
    require_tensor("rows", rows)
    if rows.dim() == 0 or rows.shape[0] != num_tokens:
        raise BadTensor(f"rows have shape {list(rows.shape)}; this step has {num_tokens} padded tokens")
    return rows.index_select(0, last_accepted(step, num_accepted))


def last_accepted(step: Part, num_accepted: Tensor) -> Tensor:
    """int32 or int64 [S]: the token of each sequence that select_last_accepted selects the row of. Raises BadTensor."""
    num_tokens, num_seqs = step.token_ids.shape[0], step.row_of_seq.shape[0]
    require_tensor("num_accepted", num_accepted)
    if tuple(num_accepted.shape) != (num_seqs,) or num_accepted.dtype not in (torch.int32, torch.int64):
        raise BadTensor(
            f"num_accepted is {num_accepted.dtype} of shape {list(num_accepted.shape)}; it must be torch.int32 or "
            f"torch.int64 [{num_seqs}]"
        )
    first = step.q_indptr[:-1]
    new_tokens = step.q_indptr[1:] - first
    place = torch.minimum(num_accepted, new_tokens).clamp(min=1) - 1
    return (first + place).clamp(max=num_tokens - 1)


class AcceptedMoves:
    """Moves K and V of accepted draft tokens to their final slots, in all layers of a model.

    Scales per token and index keys move with them. There is one launch per space and kind of memory.
    """

    def __init__(self, kinds: LayerKinds, table: RowTable, pool: PagePool, ops: StepOps) -> None:
        self._kinds, self._table, self._pool, self._ops = kinds, table, pool, ops
        self._alike: list[tuple[SpaceTable, AlikePages]] | None = None

    def check(self, accepted: Accepted) -> None:
        """Raises BadTensor for paths that a move would read past the end of."""
        num_seqs, device = accepted.path.shape[0], self._pool.device
        for name, tensor, dims in (
            ("path", accepted.path, 2),
            ("num_accepted", accepted.num_accepted, 1),
            ("kv_len", accepted.kv_len, 1),
        ):
            is_shaped = tensor.dim() == dims and tensor.shape[0] == num_seqs and tensor.is_contiguous()
            if tensor.dtype != torch.int32 or not is_shaped or tensor.device != device:
                shape = f"[{num_seqs}]" if dims == 1 else f"[{num_seqs}, nodes]"
                raise BadTensor(
                    f"{name} of a move is {tensor.dtype} of shape {list(tensor.shape)} on {tensor.device}; it must be "
                    f"torch.int32 {shape}, contiguous, on {device}"
                )

    def move(self, accepted: Accepted, row_of_seq: Tensor) -> None:
        """Moves K and V of the accepted drafts, once per verify step.

        row_of_seq: int32, the row of the request table of each path, as the verify step has it
        Raises Unsupported for layers whose index keys stand for several tokens.
        """
        if self._alike is None:
            # This never runs in a capture, because a step runs eagerly before it is captured.
            with torch.inference_mode(False):
                self._alike = self._put_together()
        with on_device(self._pool.device):
            for table, pages in self._alike:
                of_rows = row_of_seq, table.entries, 0 if table.terms.null_page else -1
                paths = AcceptedPaths(accepted.path, accepted.num_accepted, accepted.kv_len, *of_rows)
                self._ops.move_paths(pages, paths)

    def _put_together(self) -> list[tuple[SpaceTable, AlikePages]]:
        """The memory of all layers, grouped by equal layout within a space into as few groups as possible."""
        tables = {table.space: table for table in self._table.spaces}
        found: dict[object, tuple[SpaceTable, list[Tensor]]] = {}
        for layer, kind in enumerate(self._kinds.of_layer):
            space = self._kinds.spaces[kind]
            for side in self._sides_of(layer):
                key = space, side.dtype, side.shape[1:], side.stride()
                found.setdefault(key, (tables[space], []))[1].append(side)
        return [(table, AlikePages.of(sides)) for table, sides in found.values()]

    def _sides_of(self, layer: int) -> Sequence[Tensor]:
        """All tensors in which a layer keeps data of a token, in the form of AlikePages."""
        pages = self._pool.layer(layer)
        if pages.format.page_size != self._pool.page_size:
            raise Unsupported(
                f"a row of layer {layer} stands for several tokens, so it cannot follow one that moves; verify chains, "
                "whose tokens do not move",
                [],
            )
        sides = _sides(pages)
        if layer in self._kinds.selecting.indexed:
            index = self._pool.index(layer)
            if index.format.page_size != pages.format.page_size:
                raise Unsupported(
                    f"an index key of layer {layer} stands for several tokens, so it cannot follow one that moves; "
                    "verify chains, whose tokens do not move",
                    [],
                )
            sides = [*sides, *_sides(index, is_index=True)]
        return sides


def _sides(pages: LayerPages, *, is_index: bool = False) -> list[Tensor]:
    """K, V and scales of tokens of some pages; in latent pages and index pages V is part of K."""
    rows: list[tuple[Tensor, Tensor | None, Callable[..., object]]] = [(pages.raw_k, pages.k_scale, key_rows)]
    if pages.format.kind is not PoolKind.LATENT and not is_index:
        rows.append((pages.raw_v, pages.v_scale, value_rows))
    sides = []
    for memory, scale, of in rows:
        is_cut = pages.format.kind is PoolKind.VECTORIZED
        words = memory.view(_ELEMENTS[memory.element_size()] if is_cut else word_dtype(memory))
        sides.append(page_words(of(words)))  # type: ignore[arg-type]
        if pages.format.scales is Scales.TOKEN:
            assert scale is not None
            sides.append(scale.view(torch.int32).transpose(1, 2)[:, :, None, None])
    if pages.record is not None and pages.format.record is not None and pages.format.record.footer:
        sides.append(page_words(key_rows(pages.record.scales)))
    return sides
