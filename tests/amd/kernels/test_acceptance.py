"""Acceptance of drafts, against walks and rejection sampling in plain Python, and against the target's distribution."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rocm_attn.kernels.refs import speculative as twins
from rocm_attn.kernels.speculative.accept_drawn import launch_accept_drawn
from rocm_attn.kernels.speculative.accept_sampled import launch_accept_sampled
from rocm_attn.kernels.speculative.arguments import Accepted, Probabilities, Verified
from tests.amd.kernels.attention_cases import GARBAGE, ints

Accept = Callable[..., None]

by_drawn = pytest.mark.parametrize("accept", [launch_accept_drawn, twins.accept_drawn], ids=["kernel", "twin"])
by_sampled = pytest.mark.parametrize("accept", [launch_accept_sampled, twins.accept_sampled], ids=["kernel", "twin"])


@dataclass(frozen=True)
class Tree:
    """A sequence: the number of tokens before its nodes, and each node's parent and id. May be empty."""

    older: int
    parents: Sequence[int]
    token_ids: Sequence[int]

    def children(self, node: int) -> list[int]:
        return [child for child in range(node + 1, len(self.parents)) if self.parents[child] == node]


def verified(trees: Sequence[Tree], device: torch.device, more_seqs: int = 0) -> tuple[Verified, Accepted]:
    """Returns the trees as tensors: parents with a stride and garbage after the nodes, then sequences without nodes."""

    most = max([len(tree.parents) for tree in trees] + [1])
    parents = torch.full((len(trees), most + 2), GARBAGE, dtype=torch.int32)
    for line, tree in zip(parents, trees, strict=True):
        line[: len(tree.parents)] = ints(tree.parents, device)
    q_len = [len(tree.parents) for tree in trees] + [0] * more_seqs
    to = Accepted.empty(len(q_len), most, device)
    for each in to:
        each.fill_(GARBAGE)
    return (
        Verified(
            token_ids=ints([token for tree in trees for token in tree.token_ids] or [0], device),
            q_indptr=ints([sum(q_len[:seq]) for seq in range(len(q_len) + 1)], device),
            kv_len=ints([tree.older + len(tree.parents) for tree in trees] + [0] * more_seqs, device),
            parents=parents.to(device)[:, :most],
        ),
        to,
    )


def check(to: Accepted, trees: Sequence[Tree], paths: Sequence[Sequence[int]], next_tokens: Sequence[int]) -> None:
    """Checks that the accepted paths, without their roots, and the tokens after them equal these."""
    width = to.path.shape[1]
    for seq, (tree, path, token) in enumerate(zip(trees, paths, next_tokens, strict=True)):
        root = [0] if tree.parents else []
        after = [*(tree.token_ids[node] for node in path), *([token] if root else [])]
        assert to.num_accepted[seq] == len(path)
        assert to.path[seq].tolist() == [*root, *path, *[-1] * (width - len(path) - len(root))]
        assert to.token_ids[seq].tolist() == [*after, *[-1] * (width - len(after))]
        assert to.next_token[seq] == (token if root else -1)
        assert to.kv_len[seq] == (tree.older + 1 + len(path) if root else tree.older)
    for seq in range(len(trees), len(to.num_accepted)):
        assert [int(each[seq]) for each in (to.num_accepted, to.next_token, to.kv_len)] == [0, -1, 0]
        assert (to.path[seq] == -1).all()


def tree_of(most: int, vocab: int) -> st.SearchStrategy[Tree]:
    """Draws trees. Node 0 has no parent; some others do not descend from it."""
    node = st.integers(0, most).flatmap(
        lambda n: st.tuples(
            st.tuples(*(st.just(-1) if at == 0 else st.integers(-1, at) for at in range(n))),
            st.tuples(*(st.integers(0, vocab - 1) for _ in range(n))),
        )
    )
    return st.builds(lambda older, drawn: Tree(older, *drawn), st.integers(0, 90), node)


def followed(tree: Tree, drawn: Sequence[int]) -> tuple[list[int], int]:
    """Returns the path by the drawn tokens, and the token after it."""
    path: list[int] = []
    node = 0
    while tree.parents:
        found = [child for child in tree.children(node) if tree.token_ids[child] == drawn[node]]
        if not found:
            return path, drawn[node]
        node = found[0]
        path.append(node)
    return [], -1


@pytest.mark.fast(1)
@by_drawn
@settings(max_examples=20)
@given(trees=st.lists(tree_of(9, 3), max_size=4), seed=st.integers(0, 999))
def test_a_path_goes_on_as_long_as_a_child_has_the_token_that_was_drawn(
    accept: Accept, trees: list[Tree], seed: int, kernel_device: torch.device
) -> None:
    given, to = verified(trees, kernel_device, more_seqs=2)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-1, 3, (len(given.token_ids),), generator=generator, dtype=torch.int32)
    accept(drawn.to(kernel_device), given, to)
    first, walks = 0, []
    for tree in trees:
        walks.append(followed(tree, drawn[first : first + len(tree.parents)].tolist()))
        first += len(tree.parents)
    check(to, trees, [path for path, _ in walks], [token for _, token in walks])


@pytest.mark.parametrize(
    "accept", [launch_accept_drawn, twins.accept_drawn, launch_accept_sampled, twins.accept_sampled]
)
def test_a_prompt_in_the_same_step_is_no_tree(accept: Accept, kernel_device: torch.device) -> None:
    """A tree lies between a prompt with more tokens than a tree and one with fewer.

    Each token is followed by the next larger one, so that prompts would be accepted as drafts. They are stored whole,
    and the tokens chosen after their last tokens come next.
    """
    trees = [Tree(3, [-1, *range(8)], range(9)), Tree(5, [-1, 0, 1], [4, 5, 6]), Tree(0, [-2, 0], [0, 1])]
    given, _ = verified(trees, kernel_device, more_seqs=1)
    given = given._replace(parents=given.parents[:, :4])
    to, following = Accepted.empty(given.num_seqs, 4, kernel_device), given.token_ids + 1
    if accept in (launch_accept_drawn, twins.accept_drawn):
        accept(following, given, to)
    else:
        rows = torch.eye(11, device=kernel_device)[following.long()]
        half = torch.full_like(following, 0.5, dtype=torch.float32)
        accept(Probabilities(rows, rows, half, half), given, to)
    assert to.num_accepted.tolist() == [0, 2, 0, 0]
    assert to.next_token.tolist() == [9, 7, 2, -1]
    assert to.kv_len.tolist() == [12, 8, 2, 0]
    assert to.path.tolist() == [[0, -1, -1, -1], [0, 1, 2, -1], [0, -1, -1, -1], [-1] * 4]
    assert to.token_ids[:3].tolist() == [[9, -1, -1, -1], [5, 6, 7, -1], [2, -1, -1, -1]]


@by_drawn
def test_a_chain_that_is_drawn_to_its_end_is_accepted_whole(accept: Accept, kernel_device: torch.device) -> None:
    chain = Tree(5, [-1, *range(69)], list(range(100, 170)))
    given, to = verified([chain], kernel_device)
    drawn = torch.tensor([*range(101, 170), 7], dtype=torch.int32, device=kernel_device)
    accept(drawn, given, to)
    check(to, [chain], [range(1, 70)], [7])


def rejected(
    tree: Tree, target: Tensor, draft: Tensor, accept_uniform: Sequence[float], draw_uniform: Sequence[float]
) -> tuple[list[int], int]:
    """Returns path and next token by the definition of rejection sampling, with normalised residuals, in float64."""
    path: list[int] = []
    node, r, q = 0, target[0].double(), draft[0].double()
    untried = tree.children(0)
    while untried:
        child = untried.pop(0)
        token = tree.token_ids[child]
        if accept_uniform[child] < r[token] / q[token]:
            path.append(child)
            node, r, q, untried = child, target[child].double(), draft[child].double(), tree.children(child)
        else:
            r = (r - q).clamp(min=0)
            r = r / r.sum()
            # The next draft was drawn from the distribution without this one.
            q[token] = 0.0
            q = q / q.sum()
    sums = (r / r.sum()).cumsum(0)
    return path, int((sums <= draw_uniform[node]).sum())


def probabilities(num_tokens: int, vocab: int, seed: int, device: torch.device) -> Probabilities:
    """Returns random probabilities, some of them 0, in rows with a stride; the draft's are never 0."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.rand(num_tokens, vocab, generator=generator)
    target = torch.where(torch.rand(target.shape, generator=generator) < 0.3, 0, target)
    target[:, 0] += 0.1
    draft = torch.rand(num_tokens, vocab + 3, generator=generator) + 0.05
    draft[:, :vocab] /= draft[:, :vocab].sum(1, keepdim=True)
    uniforms = torch.rand(2, num_tokens, generator=generator)
    target = target / target.sum(1, keepdim=True)
    return Probabilities(target.to(device), draft.to(device)[:, :vocab], *uniforms.to(device))


@by_sampled
@pytest.mark.parametrize("seed", range(3))
def test_trees_are_accepted_as_rejection_sampling_has_it(
    accept: Accept, seed: int, kernel_device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(seed)
    sizes = [7, 1, 0, 9, 4]
    trees = []
    for size in sizes:
        parents = [-1 if at == 0 else int(torch.randint(at, (), generator=generator)) for at in range(size)]
        # No two drafts of a node are the same token.
        trees.append(Tree(size + 3, parents, torch.randperm(12, generator=generator)[:size].tolist()))
    given, to = verified(trees, kernel_device, more_seqs=1)
    rows = probabilities(sum(sizes), 12, seed, kernel_device)
    accept(rows, given, to)
    walks, first = [], 0
    for tree in trees:
        part = slice(first, first + len(tree.parents))
        target, draft, accept_uniform, draw_uniform = (each.cpu()[part] for each in rows)
        walks.append(
            rejected(tree, target, draft, accept_uniform.tolist(), draw_uniform.tolist()) if tree.parents else ([], -1)
        )
        first += len(tree.parents)
    check(to, trees, [path for path, _ in walks], [token for _, token in walks])


# 99.9 % quantile of chi-square by degrees of freedom; NIST/SEMATECH e-Handbook, 1.3.6.7.4.
CHI_SQUARE = {4: 18.467}


def emitted_by(accept: Accept, num_seqs: int, children: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the first token of each of many equal sequences with drafts drawn from q, and p."""
    generator = torch.Generator().manual_seed(children)
    p, q = torch.tensor([0.05, 0.4, 0.3, 0.0, 0.25]), torch.tensor([0.3, 0.1, 0.2, 0.35, 0.05])
    width = 1 + children
    drafts = torch.multinomial(q.expand(num_seqs, -1), children, generator=generator)
    ids = torch.cat([torch.zeros(num_seqs, 1), drafts], 1).int()
    parents = torch.tensor([-1, *[0] * children], dtype=torch.int32).expand(num_seqs, width).contiguous()
    given = Verified(
        ids.flatten().to(device),
        torch.arange(0, width * num_seqs + 1, width, dtype=torch.int32, device=device),
        torch.full((num_seqs,), 9, dtype=torch.int32, device=device),
        parents.to(device),
    )
    rows = (each.expand(num_seqs * width, 5).contiguous().to(device) for each in (p, q))
    uniforms = torch.rand(2, num_seqs * width, generator=generator).to(device)
    to = Accepted.empty(num_seqs, width, device)
    accept(Probabilities(*rows, *uniforms), given, to)
    return to.token_ids[:, 0].cpu(), p


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    "children", [pytest.param(1, marks=pytest.mark.nightly), 2, pytest.param(4, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize(
    ("accept", "num_seqs"),
    [(launch_accept_sampled, 60), (twins.accept_sampled, 50_000)],
    ids=["kernel", "twin"],
)
def test_what_a_sequence_gets_is_distributed_as_the_target_has_it(
    accept: Accept, num_seqs: int, children: int, kernel_device: torch.device
) -> None:
    """A chi-square test over the tokens that p allows; the seed is fixed, and so is the result."""
    tokens, p = emitted_by(accept, num_seqs, children, kernel_device)
    counts = torch.bincount(tokens, minlength=5).double()
    assert counts[p == 0].sum() == 0
    wanted = (p[p > 0] * num_seqs).double()
    assert ((counts[p > 0] - wanted) ** 2 / wanted).sum() < CHI_SQUARE[4]


@by_sampled
def test_a_node_without_drafts_does_not_look_at_the_draft_rows(accept: Accept, kernel_device: torch.device) -> None:
    tree = Tree(0, [-1], [3])
    given, to = verified([tree], kernel_device)
    rows = probabilities(1, 5, 0, kernel_device)
    accept(rows._replace(draft=torch.full_like(rows.draft, float("nan"))), given, to)
    assert to.next_token[0] >= 0


@by_sampled
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
def test_rows_that_are_no_distribution_give_no_token(accept: Accept, bad: float, kernel_device: torch.device) -> None:
    """Other sequences are not affected."""
    trees = [Tree(4, [-1, 0], [1, 2]), Tree(2, [-1], [1])]
    given, to = verified(trees, kernel_device)
    rows = probabilities(3, 5, 0, kernel_device)
    rows.target[:2] = bad
    rows.accept_uniform.fill_(0.999)
    accept(rows, given, to)
    assert to.next_token[0] == -1
    assert 0 <= to.next_token[1] < 5


@by_sampled
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_probability_that_is_no_number_gives_no_token(
    accept: Accept, bad: float, kernel_device: torch.device
) -> None:
    """The path ends at a node without drafts in one tree, and the other one's only draft is rejected."""
    given, to = verified([Tree(2, [-1], [1]), Tree(4, [-1, 0], [1, 2])], kernel_device)
    rows = probabilities(3, 5, 0, kernel_device)
    rows.target[:, 3] = bad
    rows.target[1, 2] = 0
    accept(rows, given, to)
    assert to.num_accepted.tolist() == [0, 0]
    assert to.next_token.tolist() == [-1, -1]


@by_sampled
def test_the_same_numbers_give_the_same_tokens_in_any_batch(accept: Accept, kernel_device: torch.device) -> None:
    trees = [Tree(4, [-1, 0, 0, 1], [1, 2, 3, 0]), Tree(2, [-1, 0, 1], [1, 4, 2])]
    given, to = verified(trees, kernel_device)
    rows = probabilities(7, 5, 3, kernel_device)
    accept(rows, given, to)
    alone, alone_to = verified(trees[1:], kernel_device)
    accept(Probabilities(*(each[4:] for each in rows)), alone, alone_to)
    assert to.token_ids[1, :3].tolist() == alone_to.token_ids[0].tolist()
