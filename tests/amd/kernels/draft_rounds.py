"""The launch over a round of drafts as a function of tensors: those of its steps follow each other in one memory."""

from collections.abc import Callable

from torch import Tensor

from rocm_attn.kernels.metadata.step_tensors import NO_PADS, Pads, StepTensors

Launch = Callable[..., None]


def of_draft_steps(derive: Launch, pads: Pads = NO_PADS) -> Launch:
    """Returns derive(counts, kv_len, token_ids, mask_start, parents, num_seqs=, branches=, steps=).

    Tensors of the steps follow each other, each with a gap after it; parents has a line per sequence.
    """

    def of_tensors(counts: Tensor, *tensors: Tensor, num_seqs: int, branches: int, steps: int) -> None:
        *of_steps, parents = tensors
        names = ("kv_len", "token_ids", "mask_start")
        sizes = (num_seqs, num_seqs * branches, num_seqs if parents.numel() else 0)
        children = []
        for step in range(steps):
            views = {
                name: tensor.view(steps, -1)[step, :size]
                for name, tensor, size in zip(names, of_steps, sizes, strict=True)
            }
            children.append(StepTensors.of(counts[:0], pads, counts=counts, **views))
        derive(children, parents.view(num_seqs, -1), branches)

    return of_tensors
