"""Torch twins of kernels/speculative: same signatures, same results, fixed shapes, no host synchronisation."""

import torch
from torch import Tensor

from rocm_attn.kernels.cache.moved_rows import AlikePages
from rocm_attn.kernels.metadata.error_word import ERROR_WORD, LENGTH_BEYOND_BOUND
from rocm_attn.kernels.metadata.step_tensors import BRINGS_PROMPT
from rocm_attn.kernels.speculative.arguments import Accepted, Probabilities, SpeculativeStep, Verified
from rocm_attn.kernels.speculative.paths import AcceptedPaths

# The same as in kernels/speculative/accept_sampled.py.
_LEAST_REST = 2.0**-24


def accept_drawn(drawn: Tensor, given: Verified, to: Accepted) -> None:
    """Twin of launch_accept_drawn; may be recorded."""
    walk = _Walk(given, to)
    is_alive = walk.has_nodes
    next_token = torch.full_like(to.next_token, -1)
    for _ in range(walk.width):
        next_token = torch.where(is_alive, drawn[walk.row()], next_token)
        is_next = walk.children(walk.node) & (walk.token_ids == next_token[:, None])
        child = walk.first_of(is_next)
        is_alive = is_alive & (child < walk.width)
        walk.accept(child, is_alive)
    walk.finish(next_token, given, to)


def accept_sampled(probabilities: Probabilities, given: Verified, to: Accepted) -> None:
    """Twin of launch_accept_sampled; may be recorded."""
    target, draft, accept_uniform, draw_uniform = probabilities
    walk, vocab = _Walk(given, to), target.shape[1]
    tried, taken = torch.zeros_like(walk.node), torch.zeros(len(walk.node), device=target.device)
    left, rest = torch.ones_like(taken), torch.ones_like(taken)
    for _ in range(walk.width - 1):
        is_open = walk.children(walk.node) & (walk.places > tried[:, None])
        child = walk.first_of(is_open)
        is_tried = child < walk.width
        place = child.clamp(max=walk.width - 1)
        token = walk.token_ids.gather(1, place[:, None])[:, 0].long()
        is_token, row = (token >= 0) & (token < vocab), walk.row()
        token = token.clamp(0, vocab - 1)
        p, q = (torch.where(is_token, side[row, token], 0) for side in (target, draft))
        uniform = accept_uniform[walk.row(place)]
        is_accepted = is_tried & (q > 0) & (uniform * left * q / rest < p - taken * q)
        is_refused = is_tried & ~is_accepted
        taken = torch.where(is_accepted, 0, torch.where(is_refused, taken + left / rest, taken))
        not_drawn = (rest - q).clamp(min=_LEAST_REST)
        rest = torch.where(is_accepted, 1, torch.where(is_refused, not_drawn, rest))
        left_now = _left(target[row], draft[row], taken).sum(1)
        left = torch.where(is_accepted, 1, torch.where(is_refused, left_now, left))
        walk.accept(child, is_accepted)
        tried = torch.where(is_tried, child, tried)
    row = walk.row()
    total = _left(target[row], draft[row], taken).sum(1)
    taken = torch.where(total > 0, taken, 0)
    share = _left(target[row], draft[row], taken)
    total = share.sum(1)
    reached, tokens = share.cumsum(1), torch.arange(vocab, device=target.device)
    drawn = torch.where((reached > (draw_uniform[row] * total)[:, None]) & (share > 0), tokens, vocab).amin(1)
    last = torch.where(share > 0, tokens, -1).amax(1)
    is_number = (total > 0) & total.isfinite() & walk.has_nodes
    next_token = torch.where(is_number, torch.where(drawn < vocab, drawn, last), -1)
    walk.finish(next_token.to(torch.int32), given, to)


def next_step(picked: Tensor, given: SpeculativeStep, width: int) -> None:
    """Twin of launch_next_step."""
    num_seqs, device = len(given.limit), given.kv_len.device
    lane = torch.arange(width, device=device)
    ids = given.token_ids[: num_seqs * width].view(num_seqs, width)
    pick, length = picked[: num_seqs * width].view(num_seqs, width), given.kv_len[:num_seqs]
    right = ids[:, 1:] == pick[:, :-1]
    taken = 1 + right.int().cumprod(1).sum(1).int()
    rows, most = given.row_of_seq[:num_seqs].long(), given.texts.shape[1]
    known = (length - width + 1).clamp(1, most - width).long()
    num_tokens = known + taken
    text = given.texts[rows]
    at = known[:, None] + lane
    is_taken = lane < taken[:, None]
    text.scatter_(1, at, torch.where(is_taken, pick, text.gather(1, at)))
    given.texts[rows] = text
    found, num_same = _place_before(text, num_tokens)
    place = torch.where(num_same > 0, found, num_tokens - 1)[:, None]
    place = place + lane[: width - 1] % (num_tokens[:, None] - place)
    new_ids = torch.cat([text.gather(1, num_tokens[:, None] - 1), text.gather(1, place)], 1)
    beyond = length + taken > given.limit
    error = given.counts[ERROR_WORD] | torch.where(beyond, LENGTH_BEYOND_BOUND, 0)
    given.counts[ERROR_WORD] |= torch.where(beyond.any(), LENGTH_BEYOND_BOUND, 0)
    given.token_ids[: num_seqs * width] = new_ids.flatten()
    given.kv_len[:num_seqs] = torch.minimum(length + taken, given.limit).clamp(min=width)
    given.emitted.copy_(torch.stack([taken.int(), num_same.int(), error.int()], 1))


def _place_before(text: Tensor, num_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """int64 [S] each: the place after an earlier occurrence of the last tokens, and the number that match."""
    places = torch.arange(text.shape[1], device=text.device)
    same = (places >= 2) & (places < num_tokens[:, None])
    num_same = torch.zeros_like(text, dtype=torch.int64)
    for back in range(1, 5):
        before = text.roll(back, 1)
        last = text.gather(1, (num_tokens[:, None] - back).clamp(min=0))
        same = same & (places >= back) & (before == last)
        num_same = torch.where(same, back if back > 1 else 0, num_same)
    best = (num_same * text.shape[1] + places).amax(1)
    most = best // text.shape[1]
    return torch.where(most > 0, best % text.shape[1], 0), most


def _left(target: Tensor, draft: Tensor, taken: Tensor) -> Tensor:
    """The rest of rows of the target's probabilities; the draft's are not used for rows in which nothing is taken."""
    taken = taken[:, None]
    return (target - torch.where(taken > 0, taken * draft, 0)).clamp(min=0)


class _Walk:
    """The progress of a path in each sequence's tree; nodes of W are a column each."""

    def __init__(self, given: Verified, to: Accepted) -> None:
        num_seqs, self.width = to.path.shape
        num_trees, device = given.parents.shape[0], to.path.device
        seq = torch.arange(num_seqs, device=device)
        new = torch.where(seq < num_trees, given.q_indptr.diff(), 0)
        # A shape is known on the host: without trees there are no lines to read.
        lines = given.parents[seq.clamp(max=num_trees - 1), : self.width] if num_trees else new[:, None]
        is_prompt = (new > self.width) | ((new > 0) & (lines[:, 0] == BRINGS_PROMPT))
        self.first = torch.where(is_prompt, given.q_indptr[1:] - 1, given.q_indptr[:-1]).long()
        self.nodes = torch.where(is_prompt, 1, new)
        self.has_nodes = self.nodes > 0
        self.places = torch.arange(self.width, device=device)
        is_node = self.places < self.nodes[:, None]
        self._last_row = max(len(given.token_ids) - 1, 0)
        ids = given.token_ids[(self.first[:, None] + self.places).clamp(max=self._last_row)]
        self.token_ids = torch.where(is_node, ids, -1)
        self._parent = torch.where(is_node, lines, -1)
        self._is_node = is_node
        self.node = torch.zeros(num_seqs, dtype=torch.int64, device=device)
        self.count = torch.zeros_like(self.node)
        self.path = torch.where((self.places == 0) & self.has_nodes[:, None], 0, -1)

    def row(self, node: Tensor | None = None) -> Tensor:
        """The token of each sequence's node; without a node, that of the path's end."""
        return (self.first + (self.node if node is None else node)).clamp(max=self._last_row)

    def children(self, node: Tensor) -> Tensor:
        """The children of a node, bool [S, W]."""
        return (self._parent == node[:, None]) & (self.places > node[:, None]) & self._is_node

    def first_of(self, which: Tensor) -> Tensor:
        """The first node of some, W if there is none."""
        return torch.where(which, self.places, self.width).amin(1)

    def accept(self, child: Tensor, is_accepted: Tensor) -> None:
        """Goes on to a child."""
        self.count = self.count + is_accepted
        here = (self.places == self.count[:, None]) & is_accepted[:, None]
        self.path = torch.where(here, child[:, None], self.path)
        self.node = torch.where(is_accepted, child, self.node)

    def finish(self, next_token: Tensor, given: Verified, to: Accepted) -> None:
        """Writes the results of the sequences."""
        to.num_accepted.copy_(self.count)
        to.path.copy_(self.path)
        to.next_token.copy_(next_token)
        after = self.path.roll(-1, 1)
        ids = self.token_ids.gather(1, after.clamp(min=0))
        count = self.count[:, None]
        ids = torch.where(self.places < count, ids, torch.where(self.places == count, next_token[:, None], -1))
        to.token_ids.copy_(torch.where(self.has_nodes[:, None], ids, -1))
        kept = given.kv_len - self.nodes + 1 + self.count
        to.kv_len.copy_(torch.where(self.has_nodes, kept, given.kv_len))


def move_paths(pages: AlikePages, paths: AcceptedPaths) -> None:
    """Twin of launch_move_paths; may be recorded."""
    num_seqs, width = paths.path.shape
    if num_seqs == 0:
        return
    place = torch.arange(width, device=paths.path.device)
    older = paths.kv_len.long() - 1 - paths.num_accepted
    moves = (place > 0) & (place <= paths.num_accepted[:, None]) & (paths.path > place)
    rows = paths.row_of_seq.long()
    page_size, group_tokens = pages.page_size, pages.sides[0].shape[2]
    last = paths.table.shape[1] - 1

    def cells(kv_index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        page_no, offset = kv_index // page_size, kv_index % page_size
        page = paths.table[rows, page_no.clamp(0, last)].long()
        in_row = (page_no >= 0) & (page_no <= last)
        return torch.where(in_row, page, -1), offset // group_tokens, offset % group_tokens

    # In order, because a place may be the target of one move and lie before the source of the next one.
    for at in range(1, width):
        live = moves[:, at]
        target, source = cells(older + at), cells(older + paths.path[:, at])
        is_live = live & (source[0] > paths.no_page) & (target[0] > paths.no_page)
        # Fixed shapes: a sequence without a move repeats another one's move, or writes the content of page 0.
        any_live = is_live.any()
        mover = torch.where(is_live, torch.arange(num_seqs, device=live.device), is_live.int().argmax())
        source = tuple(torch.where(any_live, each[mover], 0) for each in source)  # type: ignore[assignment]
        target = tuple(torch.where(any_live, each[mover], 0) for each in target)  # type: ignore[assignment]
        for side in pages.sides:
            side[target] = side[source]
