"""The settings of a soak: the verbs that are drawn, how often, and the sizes of pools, steps and requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from rocm_attn.batch.drafts import Drafts
from rocm_attn.errors import BadSetting
from rocm_attn.paging.state_pool import NO_RECURRENT_LAYERS, RecurrentLayers
from rocm_attn.problem import Problem
from rocm_attn.step.options import RuntimeOptions
from rocm_lab.soak import serving, shown_verbs, step_verbs, table_verbs
from rocm_lab.soak.recurrences import recurrent_forms
from rocm_lab.soak.scene import Scene
from rocm_lab.soak.setting import Setting

STEPS: Mapping[str, Callable[[Scene], None]] = {
    "decode": serving.decode,
    "extend": serving.extend,
    "mixed": serving.mixed,
    "idle": serving.idle,
    "empty": serving.empty,
    "share": shown_verbs.step_sharing_prefixes,
    "verify": shown_verbs.verify_drafts,
    "tree": serving.trees,
    "draft": serving.rounds,
    "mask": shown_verbs.step_with_mask,
    "spans": shown_verbs.step_with_spans,
    "any": step_verbs.run_graphed,  # also of rows that are none, and of tokens that were stored before
}
CHANGES: Mapping[str, Callable[[Scene], None]] = {
    "admit": table_verbs.admit,
    "fork": table_verbs.fork,
    "keep": table_verbs.keep,
    "begin": table_verbs.admit_over,
    "drop": table_verbs.drop,
    "reserve": table_verbs.reserve,
    "truncate": table_verbs.truncate,
    "free": table_verbs.free,
}
_OF_MASKS = ("tree", "draft", "mask", "spans")
_WEIGHTS: Mapping[str, float] = {
    "decode": 8,
    "extend": 3,
    "mixed": 4,
    "idle": 0.4,
    "empty": 0.3,
    "share": 4,
    "verify": 2,
    "tree": 2,
    "draft": 2,
    "mask": 0.5,
    "spans": 0.5,
    "any": 1,
    "admit": 6,
    "fork": 1.5,
    "keep": 2.5,
    "begin": 4,
    "drop": 0.5,
    "reserve": 1,
    "truncate": 0.5,
    "free": 1,
}


@dataclass(frozen=True, slots=True)
class Ladders:
    """Sizes that graphs are captured at: sequences, and tokens of steps with more than one new token per sequence."""

    seqs: tuple[int, ...]
    tokens: tuple[int, ...]


# Tokens of the longest request. SHORT: few, so that much happens in few steps. LONG: more than one segment of torch's
# kernels, so that deterministic sums are split.
SHORT_KV_LEN, LONG_KV_LEN = 80, 200


@dataclass(frozen=True, slots=True)
class Scenario:
    """The settings from which a soak is drawn.

    page_size, num_pages: of the pool, the reserved page included; few, so that they run out
    swa_pages:            pages that are handed out to the layer with a window
    max_num_seqs:         sequences of a step
    max_num_rows:         requests at a time
    max_kv_len:           tokens of a request
    ladders:              capture sizes; each reopen uses the next
    reopen_every:         steps between two reopens
    audit_every:          steps between two audits of tables and pages
    most_unjudged:        steps that may have been launched before their results are compared
    num_drafts:           new tokens of a sequence in verify steps, of which any number is taken back
    most_nodes:           of a tree of drafts
    rounds:               of drafts, of which one is drawn each time
    weights:              how often each verb is drawn
    deterministic:        whether the runtime is; alone_every: one step in this many has a sequence served alone too
    checkpoints:          of the states of recurrent layers; 0: there are no such layers
    """

    page_size: int = 4
    num_pages: int = 65
    swa_pages: int = 32
    max_num_seqs: int = 10
    max_num_rows: int = 12
    max_kv_len: int = SHORT_KV_LEN
    ladders: tuple[Ladders, ...] = (
        Ladders((2, 4, 8), (4, 24)),
        Ladders((1, 3, 6), (16,)),
        Ladders((4, 8, 12), (8, 32)),
    )
    reopen_every: int = 1000
    audit_every: int = 50
    most_unjudged: int = 8
    num_drafts: int = 3
    most_nodes: int = 6
    rounds: tuple[Drafts, ...] = (Drafts(1, 3), Drafts(3, 2), Drafts(2, 3))
    weights: Mapping[str, float] = field(default_factory=lambda: dict(_WEIGHTS))
    deterministic: bool = False
    alone_every: int = 3
    checkpoints: int = 0

    def __post_init__(self) -> None:
        for pages, knob in ((self.num_pages - 1, "num_pages"), (self.swa_pages, "swa_pages")):
            if pages * self.page_size < self.max_kv_len:
                raise BadSetting(
                    f"{pages} pages of {self.page_size} tokens do not hold one request of {self.max_kv_len}; "
                    f"raise {knob}"
                )
        if not any(self.weights.get(step, 0) > 0 for step in STEPS):
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
        """Returns a scenario that mostly drafts and verifies chains and trees."""
        more = {"draft": 12.0, "tree": 14.0, "verify": 9.0, "decode": 2.0, "share": 1.5, "extend": 2.0, "mixed": 2.0}
        return replace(self, weights={**self.weights, **more}, most_nodes=9)

    def with_states(self) -> Scenario:
        """Returns a scenario of a model with recurrent layers, with more drafts of chains that are taken back.

        Their states go on token after token, so that there are no masks and no rounds of drafts.
        """
        more = {"verify": 8.0, "keep": 5.0}
        return replace(self.without(*_OF_MASKS), checkpoints=6).weighing(more)

    def in_order(self) -> Scenario:
        """Returns a scenario of a deterministic runtime, which has no kernels for masks and shared prefixes."""
        return replace(self.without("share", *_OF_MASKS), deterministic=True)

    def weighing(self, weights: Mapping[str, float]) -> Scenario:
        """Returns a scenario in which these verbs have other weights."""
        return replace(self, weights={**self.weights, **weights})

    def without(self, *verbs: str) -> Scenario:
        """Returns a scenario in which these verbs are never drawn."""
        return self.weighing(dict.fromkeys(verbs, 0.0))

    def setting(self, dtype: torch.dtype, provider: str) -> Setting:
        """Returns what the runtime is built from."""
        recurrent = NO_RECURRENT_LAYERS
        if self.checkpoints:
            forms = recurrent_forms(dtype)
            recurrent = RecurrentLayers(forms, kept=self.num_drafts, checkpoints=self.checkpoints)
        can_mask = not self.deterministic and not self.checkpoints
        options = RuntimeOptions(
            num_pages=self.num_pages,
            # No page id is used in both spaces, so a mix-up meets a page that no request has.
            swa_pages=self.num_pages + self.swa_pages,
            first_swa_page=self.num_pages,
            swa_kept=self.num_drafts,
            max_num_seqs=self.max_num_seqs,
            max_num_rows=self.max_num_rows,
            max_kv_len=self.max_kv_len,
            provider=provider,
            capture_sizes=self.ladders[0].seqs,
            capture_tokens=self.ladders[0].tokens,
            split_steps=True,
            deterministic=self.deterministic,
            shared_prefixes=not self.deterministic,
            drafts=self.rounds if self.weights.get("draft", 0) > 0 else (),
        )
        return Setting(
            _problems(dtype, self.page_size, custom_mask=can_mask),
            options,
            has_graphs=True,
            recurrent=recurrent,
            most_unjudged=self.most_unjudged,
            most_nodes=self.most_nodes,
            num_drafts=self.num_drafts,
        )


def _problems(dtype: torch.dtype, page_size: int, *, custom_mask: bool) -> list[Problem]:
    """Returns two layers that share only the page size, so that a step has two kernels and two schedules.

    The second has a window that sequences outgrow, and so a pool of its own, a soft cap and sinks.
    """
    full = Problem(4, 2, 16, dtype, page_size, v_head_dim=16, scale=0.25, custom_mask=custom_mask, wants_lse=True)
    windowed = replace(full, num_q_heads=3, num_kv_heads=1, head_dim=24, v_head_dim=32, scale=0.2, window_left=13)
    return [full, replace(windowed, logits_soft_cap=2.0, has_sinks=True)]
