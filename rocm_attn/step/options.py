"""RuntimeOptions: how large a runtime with pages of its own is, and which of its steps may be captured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from rocm_attn.batch.drafts import Drafts
from rocm_attn.batch.halves import HALVES
from rocm_attn.batch.padding import PaddingPolicy
from rocm_attn.batch.step_batch import INT32_MAX
from rocm_attn.batch.step_kinds import Extra
from rocm_attn.errors import BadSetting
from rocm_attn.hip_graphs.errors import BadLadder
from rocm_attn.hip_graphs.size_ladder import SizeLadder, default_ladder
from rocm_attn.machine.settings import whole_number
from rocm_attn.paging.index_spaces import RESERVED_PAGE, Space
from rocm_attn.paging.kv_pool import space_of
from rocm_attn.paging.page_table import SpacePages
from rocm_attn.problem import Problem
from rocm_attn.providers.contract import PoolSize


@dataclass(frozen=True, slots=True)
class RuntimeOptions:
    """Sizes of an AttentionRuntime, and which of its steps may be captured. All of it is host values.

    num_pages:       pages of the KV pool, the reserved page 0 included
    max_num_seqs:    sequences of a step; a padded step may be larger
    max_kv_len:      tokens of the longest sequence
    max_num_rows:    requests that can be admitted at a time, at least max_num_seqs; 0: as many. Those that take no part
                     in a step keep their KV
    swa_pages:       pages of a pool of its own for layers with a window, the reserved page 0 included. There a request
                     holds the pages of its window alone, and gives back those that have left it; 0: one pool for all
    swa_kept:        tokens before a window that stay in that pool: at least as many as a sequence may go back, for
                     instance by the drafts of a verify step that are rejected
    first_swa_page:  the first page of that pool that is handed out. From num_pages on, no id is used in both pools
    provider:        "auto", "torch", "triton" or "aiter"
    capture_sizes:   sequence counts that decode steps are padded to and may be captured at; None: a ladder up to
                     max_num_seqs
    capture_tokens:  token counts that steps with more than one new token a sequence are padded to and may be captured
                     at; such steps run eagerly above the largest, and by default that is all of them
    verify_tokens:   new tokens of a sequence in steps that verify drafts, its last token among them: steps of up to as
                     many are padded to so many for each padded sequence, and may be captured at the sizes of
                     capture_sizes; 0: as other steps
    prompt_tokens:   token counts that steps with prompts in them are padded to, all at the largest of capture_sizes,
                     and may be captured at, one graph for each; such steps run eagerly above the largest
    split_steps:     whether graphs may be made of steps that are split in two, so that captured memory has room for
                     both halves; without, split steps run eagerly
    shared_prefixes: whether graphs may be made of decode steps that share prefixes (batch/prefixes.py), so that
                     captured memory has room for them; without, such steps run eagerly
    drafts:          the rounds of drafts that graphs may be made of, so that captured memory has room for their steps;
                     others run eagerly. Several branches take masks in every layer
    mask_keys:       keys before a sequence's new ones that the masks of captured steps have room for, a bit for each of
                     them and each padded token; a step whose mask has more cells than such masks runs eagerly
    deterministic:   whether a sequence's results must be bitwise the same in any batch, padded and chunked in any way
                     (docs/deterministic.md)

    Raises BadSetting for a number that is not allowed. What does not fit is refused when the runtime is built.
    """

    num_pages: int
    max_num_seqs: int
    max_kv_len: int
    max_num_rows: int = 0
    swa_pages: int = 0
    swa_kept: int = 0
    first_swa_page: int = RESERVED_PAGE + 1
    provider: str = "auto"
    capture_sizes: Sequence[int] | None = None
    capture_tokens: Sequence[int] = (1,)
    verify_tokens: int = 0
    prompt_tokens: Sequence[int] = ()
    split_steps: bool = False
    shared_prefixes: bool = False
    drafts: Sequence[Drafts] = ()
    mask_keys: int = 1024
    deterministic: bool = False

    def __post_init__(self) -> None:
        for each in fields(self):
            if each.type == "int":
                object.__setattr__(self, each.name, whole_number(each.name, getattr(self, each.name)))
        if self.max_num_rows and self.max_num_rows < self.max_num_seqs:
            raise BadSetting(
                f"max_num_rows is {self.max_num_rows} and max_num_seqs is {self.max_num_seqs}; each sequence of a step "
                "has a row, so give at least as many rows, or 0 for as many"
            )
        if not 0 <= self.mask_keys <= INT32_MAX:
            raise BadSetting(f"mask_keys is {self.mask_keys}; it is a number of keys, from 0 to {INT32_MAX}")
        if self.verify_tokens < 0:
            raise BadSetting(
                f"verify_tokens is {self.verify_tokens}; it is a number of tokens, drafts and the one before them, or 0"
            )
        if self.swa_kept < 0:
            raise BadSetting(f"swa_kept is {self.swa_kept}; it is a number of tokens, 0 or more")
        if self.first_swa_page <= RESERVED_PAGE:
            raise BadSetting(
                f"first_swa_page is {self.first_swa_page}; page {RESERVED_PAGE} is reserved, so it is at least 1"
            )
        if self.capture_sizes is not None:
            object.__setattr__(self, "capture_sizes", _ladder("capture_sizes", self.capture_sizes).sizes)
        object.__setattr__(self, "capture_tokens", _ladder("capture_tokens", self.capture_tokens).sizes)
        if self.prompt_tokens:
            object.__setattr__(self, "prompt_tokens", _ladder("prompt_tokens", self.prompt_tokens).sizes)
        object.__setattr__(self, "drafts", tuple(dict.fromkeys(self.drafts)))

    @property
    def pool_size(self) -> PoolSize:
        """What kernels are chosen for."""
        return PoolSize(max(self.num_pages, self.swa_pages), self.max_kv_len, self.max_num_seqs)

    def spaces(self, problems: Sequence[Problem]) -> tuple[Space, ...]:
        """The space that each layer lives in; problems: one for each layer."""
        return tuple(space_of(problem, has_swa=self.swa_pages > 0) for problem in problems)

    def windows(self, problems: Sequence[Problem]) -> tuple[SpacePages, ...]:
        """The SWA space, if there is to be one. Raises NeverFits."""
        if not self.swa_pages:
            return ()
        window_left = max((problem.window_left for problem in problems), default=0)
        return (
            SpacePages(Space.SWA, self.swa_pages, "swa_pages", max(window_left, 0), self.swa_kept, self.first_swa_page),
        )

    def padding(self, problems: Sequence[Problem]) -> PaddingPolicy:
        """What steps are padded to, and which of them may be captured."""
        sizes = self.capture_sizes
        extras = {Extra.NOTHING}
        if any(problem.custom_mask for problem in problems):
            extras.add(Extra.MASK)
        if self.shared_prefixes:
            extras.add(Extra.PREFIXES)
        drafts = tuple(self.drafts)
        if any(each.branches > 1 for each in drafts) and not all(problem.custom_mask for problem in problems):
            raise BadSetting(
                "drafts with several branches need masks in every layer; give problems with custom_mask, or one branch"
            )
        return PaddingPolicy(
            default_ladder(self.max_num_seqs) if sizes is None else SizeLadder(tuple(sizes)),
            SizeLadder(tuple(self.capture_tokens)),
            HALVES if self.split_steps else 1,
            frozenset(extras),
            drafts,
            self.mask_keys,
            verify=self.verify_tokens,
            prompts=tuple(self.prompt_tokens),
        )


def _ladder(name: str, sizes: Sequence[int]) -> SizeLadder:
    try:
        ladder = SizeLadder(tuple(sizes))
    except BadLadder as bad:
        raise BadSetting(f"{name}: {bad}") from bad
    if ladder.largest > INT32_MAX:
        raise BadSetting(f"{name} goes up to {ladder.largest}; counts are int32, so it ends at {INT32_MAX} or before")
    return ladder
