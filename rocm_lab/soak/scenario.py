"""The settings of a soak: the actions that can be drawn, their weights, and the sizes of pools, steps and requests."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rocm_attn.batch.drafts import Drafts
from rocm_attn.errors import BadSetting


class Action(enum.Enum):
    """Actions that can be drawn. The first ones change the table; the others are steps."""

    ADMIT = "admit"  # a request with a new prompt
    RESUME = "resume"  # a preempted request, to be computed again
    FORK = "fork"  # requests that share the first tokens of another
    KEEP = "keep"  # the full pages of a request are kept when it ends
    BEGIN = "begin"  # a request over kept pages, possibly of several requests that began alike
    DROP = "drop"  # kept pages are dropped, or only those of the SWA space
    RESERVE = "reserve"  # pages that no step needs yet
    REJECT = "reject"  # the last tokens of a request are taken back, as after a verify step
    ABORT = "abort"
    PREEMPT = "preempt"
    DECODE = "decode"  # one new token in each sequence
    SHARE = "share"  # the same, but shared prefixes are read once for all sequences that share them
    VERIFY = "verify"  # the same few new tokens in each sequence
    DRAFT = "draft"  # a round of drafts of each sequence, none of which is kept
    TREE = "tree"  # trees of drafts, each with a mask; the tokens of a path from the first one on are kept
    EXTEND = "extend"  # chunks of a few sequences
    MIXED = "mixed"  # up to two chunks among decodes and idle sequences
    IDLE = "idle"  # no new token in any sequence
    EMPTY = "empty"  # no sequence


_STEPS = tuple(Action)[list(Action).index(Action.DECODE) :]


@dataclass(frozen=True, slots=True)
class Ladders:
    """Sizes that graphs are captured at: sequences, and tokens of steps with more than one new token per sequence."""

    seqs: tuple[int, ...]
    tokens: tuple[int, ...]


# Tokens of the longest request. SHORT: few, so that much happens in few steps. LONG: more than one segment of torch's
# kernels, so that deterministic sums are split.
SHORT_KV_LEN, LONG_KV_LEN = 80, 200

_WEIGHTS: Mapping[Action, float] = {
    Action.ADMIT: 5,
    Action.RESUME: 2,
    Action.FORK: 1.5,
    Action.KEEP: 2.5,
    Action.BEGIN: 4,
    Action.DROP: 0.5,
    Action.RESERVE: 1,
    Action.REJECT: 1,
    Action.ABORT: 1,
    Action.PREEMPT: 0.5,
    Action.DECODE: 8,
    Action.SHARE: 4,
    Action.VERIFY: 2,
    Action.DRAFT: 0,
    Action.TREE: 2,
    Action.EXTEND: 3,
    Action.MIXED: 4,
    Action.IDLE: 0.4,
    Action.EMPTY: 0.3,
}


@dataclass(frozen=True, slots=True)
class Scenario:
    """The settings from which a soak is drawn.

    page_size, num_pages: of the pool, the reserved page included; few, so that they run out
    swa_pages:            pages that are handed out to the layer with a window
    max_num_seqs:         sequences of a step
    max_num_rows:         requests at a time
    max_kv_len:           tokens of a request
    vocabulary:           token ids, the reserved id 0 included
    ladders:              capture sizes; each reopen uses the next
    reopen_every:         steps between two reopens
    audit_every:          steps between two audits of tables and pages
    max_unchecked:        steps that may have been launched before their results are compared
    verify_len:           new tokens of a sequence in verify steps, and the most that are taken back later
    tree_len:             most new tokens of a sequence in steps of trees, which take rejected ones back themselves
    rounds:               of drafts, of which one is drawn each time
    chunk_lens:           smallest and largest chunk
    pad_chance:           the probability that a step's padding is forced
    split_every:          one step in this many runs as two halves, unless it shares prefixes
    alone_every:          in deterministic mode, one step in this many has a sequence that is served alone too
    weights:              how often each action is drawn
    recurrent:            whether the model has recurrent layers next to those that attend; checkpoints: of their states
    """

    page_size: int = 4
    num_pages: int = 65
    swa_pages: int = 32
    max_num_seqs: int = 10
    max_num_rows: int = 12
    max_kv_len: int = SHORT_KV_LEN
    vocabulary: int = 40
    ladders: tuple[Ladders, ...] = (
        Ladders((2, 4, 8), (4, 24)),
        Ladders((1, 3, 6), (16,)),
        Ladders((4, 8, 12), (8, 32)),
    )
    reopen_every: int = 1000
    audit_every: int = 50
    max_unchecked: int = 8
    verify_len: int = 3
    tree_len: int = 6
    rounds: tuple[Drafts, ...] = (Drafts(1, 3), Drafts(3, 2), Drafts(2, 3))
    chunk_lens: tuple[int, int] = (2, 20)
    pad_chance: float = 0.15
    split_every: int = 4
    alone_every: int = 3
    weights: Mapping[Action, float] = field(default_factory=lambda: dict(_WEIGHTS))
    recurrent: bool = False
    checkpoints: int = 6

    def __post_init__(self) -> None:
        for pages, knob in ((self.num_pages - 1, "num_pages"), (self.swa_pages, "swa_pages")):
            if pages * self.page_size < self.max_kv_len:
                raise BadSetting(
                    f"{pages} pages of {self.page_size} tokens do not hold one request of {self.max_kv_len}; "
                    f"raise {knob}"
                )
        if not any(self.weights.get(step, 0) > 0 for step in _STEPS):
            raise BadSetting("no step has a weight; give at least one of them a positive one")

    @classmethod
    def of_seed(cls, seed: int, max_kv_len: int = SHORT_KV_LEN) -> Scenario:
        """Returns a scenario. The seed sets the page size. The pools hold about 3 and 1.5 of the longest requests."""
        page_size = (4, 8, 16, 5)[seed % 4]
        full, swa = 16 * max_kv_len // 5, 8 * max_kv_len // 5
        return cls(
            page_size=page_size,
            num_pages=1 - (-full // page_size),
            swa_pages=-(-swa // page_size),
            max_kv_len=max_kv_len,
        )

    def speculative(self) -> Scenario:
        """Returns a scenario that mostly drafts and verifies chains and trees, with many rejections and preemptions."""
        more = {
            Action.DRAFT: 12.0,
            Action.TREE: 14.0,
            Action.VERIFY: 5.0,
            Action.REJECT: 4.0,
            Action.PREEMPT: 1.5,
            Action.DECODE: 2.0,
            Action.SHARE: 1.5,
            Action.EXTEND: 2.0,
            Action.MIXED: 2.0,
        }
        return replace(self, weights={**self.weights, **more}, tree_len=9)

    def with_states(self) -> Scenario:
        """Returns a scenario of a model with recurrent layers, with more drafts of chains that are taken back.

        Their states go on token after token, so that there are no trees and no rounds of drafts.
        """
        more = {Action.VERIFY: 6.0, Action.REJECT: 4.0, Action.KEEP: 5.0, Action.TREE: 0.0, Action.DRAFT: 0.0}
        return replace(self, weights={**self.weights, **more}, recurrent=True)

    def without(self, action: Action) -> Scenario:
        """Returns a scenario in which an action is never drawn."""
        return replace(self, weights={**self.weights, action: 0.0})

    @property
    def drawn_rounds(self) -> tuple[Drafts, ...]:
        """The rounds of drafts that are drawn, if any are."""
        return self.rounds if self.weights.get(Action.DRAFT, 0) > 0 else ()

    @property
    def most_seqs(self) -> int:
        """An upper bound of the sequences of a padded step."""
        # Drawn padding exceeds the sizes by 3 at most, and halves are equal.
        return 4 + max(self.max_num_seqs, *(max(ladders.seqs) for ladders in self.ladders))

    @property
    def max_tokens(self) -> int:
        """An upper bound of the tokens of a padded step."""
        # One more than the number of sequences, because both halves of a split step are padded to the larger one.
        most = max(*self.chunk_lens, self.verify_len, self.tree_len) * (self.max_num_seqs + 1)
        return max(most, 2 * max(max(*ladders.seqs, *ladders.tokens) for ladders in self.ladders))
