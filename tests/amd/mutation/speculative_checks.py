"""Checks of the masks of the kernels that accept drafts."""

import torch
from torch import Tensor

from rocm_attn.kernels.cache.moved_rows import AlikePages
from rocm_attn.kernels.metadata.error_word import LENGTH_BEYOND_BOUND
from rocm_attn.kernels.refs import speculative as twins
from rocm_attn.kernels.speculative.accept_drawn import launch_accept_drawn
from rocm_attn.kernels.speculative.accept_sampled import launch_accept_sampled
from rocm_attn.kernels.speculative.arguments import EMITTED_WORDS, Accepted, Probabilities, SpeculativeStep, Verified
from rocm_attn.kernels.speculative.move_paths import launch_move_paths
from rocm_attn.kernels.speculative.next_step import launch_next_step
from rocm_attn.kernels.speculative.paths import AcceptedPaths
from tests.amd.mutation.arguments import assert_same
from tests.amd.mutation.memory import Memory, ints

# Trees of up to five nodes; the third sequence has none, and later ones have no line of parents.
PARENTS = [[-1, 0, 0, 1, 2], [-1, 0, 7, 2, 3], [5, 5, 5, 5, 5]]
Q_LEN, KV_LEN = [5, 3, 0, 2, 0], [17, 9, 4, 6, 3]
# An id outside every vocabulary.
_NO_TOKEN = 1 << 28
VOCAB = 11


# Three picked tokens of each of four sequences.
PICKED = (4, 5, 6, 1, 2, 1, 7, 8, 9, 3, 3, 3)


def speculative_step(last_limit: int, garbage: int, error: int = 64) -> SpeculativeStep:
    """Returns a step with an error word. last_limit: of the last sequence, which must be 9

    The first text is one token long, the second wraps around, the third repeats itself once, the last one never.
    """
    texts = torch.full((5, 1060), garbage, dtype=torch.int32)
    texts[2, :1] = ints([4])
    texts[4, :1032] = ints([1, 2]).repeat(516)
    texts[0, :6] = ints([7, 8, 9, 5, 8, 6])
    texts[3, :4] = ints([9, 8, 7, 6])
    ids = ints([4, 4, 5, 2, 1, 2, 6, 7, 8, 6, 3, 3, garbage])
    emitted = torch.full((4, EMITTED_WORDS), garbage, dtype=torch.int32)
    counts, kv_len = ints([4, 12, 7, error]), ints([3, 1034, 8, 6])
    rows, limits = ints([2, 4, 0, 3]), ints([40, 1050, 11, last_limit])
    return SpeculativeStep(counts, rows, kv_len, ids, texts, limits, emitted)


def trees() -> Verified:
    """Returns trees; rows of parents have a stride."""
    parents = torch.full((3, 7), 1 << 20, dtype=torch.int32)
    parents[:, :5] = torch.tensor(PARENTS)
    q_indptr = ints([sum(Q_LEN[:seq]) for seq in range(6)])
    return Verified(ints([9, _NO_TOKEN, 2, 3, 4, 9, 5, 6, 9, 7]), q_indptr, ints(KV_LEN), parents[:, :5])


def drawn() -> Tensor:
    """Returns drawn tokens: the path 0, 2, 4 of the first tree, and the whole second one except its strays."""
    return ints([2, 0, 4, 0, 8, 5, 3, 0, 7, 10])


def probabilities() -> Probabilities:
    """Returns random probabilities in rows with gaps, and uniform numbers that accept some drafts and refuse others."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.rand(2, sum(Q_LEN), VOCAB + 2, generator=generator)[..., :VOCAB]
    rows = rows / rows.sum(2, keepdim=True)
    target = torch.zeros(sum(Q_LEN), VOCAB + 2)[:, :VOCAB].copy_(rows[0])
    draft = torch.zeros(sum(Q_LEN), VOCAB + 2)[:, :VOCAB].copy_(rows[1])
    uniform = torch.rand(2, sum(Q_LEN), generator=generator)
    return Probabilities(target, draft, uniform[0].clone(), uniform[1].clone())


def room(garbage: int) -> Accepted:
    """Returns room for what is accepted, filled with garbage."""
    accepted = Accepted.empty(5, 5, torch.device("cpu"))
    return Accepted(*(each.fill_(garbage) for each in accepted))


def paths(no_page: int) -> AcceptedPaths:
    """Returns paths over a table of pages of two tokens, one entry of which is no page.

    The third sequence reaches past its line, and the last one to the last token of the last page.
    """
    path = torch.tensor([[0, 2, 3, 5, -1, -1], [0, 3, 4, -1, -1, -1], [0, 4, -1, -1, -1, -1], [0, 1, 2, 3, 5, 7]])
    table = torch.zeros(5, 6, dtype=torch.int32)
    table[1:, :4] = torch.tensor([[3, 1, 4, 2], [5, 9, 0, 6], [7, 8, 10, 11], [12, 13, 14, 15]])
    return AcceptedPaths(path.int(), ints([3, 2, 1, 5]), ints([5, 4, 6, 6]), ints([2, 1, 3, 4]), table[:, :4], no_page)


def layers_of_pages() -> Tensor:
    """Returns K of two layers: pages of two tokens of two heads, in one memory with gaps."""
    memory = torch.arange(2 * 16 * 2 * 2 * 7, dtype=torch.int32).view(2, 16, 2, 1, 2, 7)
    return memory[..., :5]


_GARBAGE = 0x5A5A5A5A


def accept_drawn(memory: Memory) -> None:
    """Checks trees of five nodes, of three, of none, and one without a line of parents."""
    assert_same(memory, launch_accept_drawn, twins.accept_drawn, drawn(), trees(), room(_GARBAGE))


def accept_sampled(memory: Memory) -> None:
    """Checks the same trees, and rows of a few tokens with gaps after them."""
    assert_same(memory, launch_accept_sampled, twins.accept_sampled, probabilities(), trees(), room(_GARBAGE))


def move_paths(memory: Memory) -> None:
    """Checks paths within rows of the table, at an invalid page, and past a row's end."""
    launch, twin = (
        lambda layers, given, move=move: move(AlikePages.of(layers.unbind()), given)
        for move in (launch_move_paths, twins.move_paths)
    )
    for no_page in (0, -1):
        assert_same(memory, launch, twin, layers_of_pages(), paths(no_page))


def next_step(memory: Memory) -> None:
    """Checks texts of one token and of more than a block, some with repetitions, and a length that is cut or kept."""
    # Programs run in any order: the reports of a program are there before, or none are.
    for last_limit, error in ((8, 64 | LENGTH_BEYOND_BOUND), (9, 64)):
        step = speculative_step(last_limit, _GARBAGE, error)
        assert_same(memory, launch_next_step, twins.next_step, ints([*PICKED]), step, width=3)
