"""RuntimeOptions: the sizes of a runtime that allocates its own KV pages, and which of its steps may be captured."""

from __future__ import annotations  # check_fields() reads types as texts

from collections.abc import Sequence
from dataclasses import dataclass

from rocm_attn.batch.drafts import Drafts
from rocm_attn.batch.halves import HALVES
from rocm_attn.batch.padding import PaddingPolicy
from rocm_attn.batch.step_batch import INT32_MAX
from rocm_attn.batch.step_kinds import Extra
from rocm_attn.errors import BadSetting
from rocm_attn.hip_graphs.errors import BadLadder
from rocm_attn.hip_graphs.size_ladder import SizeLadder, default_ladder
from rocm_attn.machine.settings import check_fields, whole_number
from rocm_attn.paging.index_spaces import RESERVED_PAGE, Space
from rocm_attn.paging.kv_pool import space_of
from rocm_attn.paging.page_table import SpacePages
from rocm_attn.problem import Problem
from rocm_attn.providers.contract import PoolSize


@dataclass(frozen=True, slots=True)
class RuntimeOptions:
    """Sizes of an AttentionRuntime, and which of its steps may be captured as graphs. All are host values.

    num_pages:       pages of the KV pool, the reserved page 0 included
    max_num_seqs:    most sequences in a step; a padded step may be larger
    max_kv_len:      tokens of the longest sequence
    max_num_rows:    most requests admitted at a time, at least max_num_seqs; 0: max_num_seqs. Requests that are not in
                     a step keep their KV
    swa_pages:       pages of a separate pool for sliding-window layers, the reserved page 0 included. There a request
                     holds only the pages of its window; older ones are freed. 0: one pool for all layers
    swa_kept:        tokens before the window that stay in that pool: at least the number of tokens that a sequence may
                     be rolled back by, for instance the rejected draft tokens of a verify step
    first_swa_page:  the first page id of that pool in use. From num_pages on, no id is used in both pools
    provider:        "auto", "cpu", "torch", "triton" or "aiter"
    capture_sizes:   sequence counts that decode steps are padded to and may be captured at; None: default_ladder() up
                     to max_num_seqs. Memory is reserved for all steps that may be captured; other steps run eagerly. To
                     run without graphs, use a StepRunner whose recorder is None
    capture_tokens:  the same for token counts of steps with several new tokens per sequence; default: none is captured
    verify_tokens:   new tokens per sequence in steps that verify draft tokens: the drafts and the token before them.
                     Steps with at most this number are padded to it in each sequence, and to capture_sizes; 0: they are
                     padded like other steps
    prompt_tokens:   token counts at which steps with prompts (prefill, mixed) may be captured, one graph for each, all
                     padded to the largest of capture_sizes
    split_steps:     True if steps in two halves may be captured
    shared_prefixes: True if decode steps with shared prefixes (batch/prefixes.py) may be captured
    drafts:          the draft rounds that may be captured. Several branches need custom_mask in every layer
    mask_keys:       keys before a sequence's new ones for which masks of captured steps have room, one bit per key and
                     padded token
    deterministic:   True if a sequence's results must be bitwise the same in any batch, padded and chunked in any way
                     (docs/deterministic.md)

    Raises BadSetting for a number that is not allowed. Sizes that do not fit are refused when the runtime is built.
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
        check_fields(self, BadSetting)
        if self.max_num_rows and self.max_num_rows < self.max_num_seqs:
            raise BadSetting(
                f"max_num_rows is {self.max_num_rows} and max_num_seqs is {self.max_num_seqs}; each sequence of a "
                "step needs a row, so give at least as many rows, or 0 for the same number"
            )
        if not 0 <= self.mask_keys <= INT32_MAX:
            raise BadSetting(f"mask_keys is {self.mask_keys}; it must be a number of keys, from 0 to {INT32_MAX}")
        if not 0 <= self.verify_tokens <= INT32_MAX:
            raise BadSetting(
                f"verify_tokens is {self.verify_tokens}; it must be a number of tokens, the draft tokens and the "
                f"one before them, or 0, and at most {INT32_MAX}"
            )
        if self.swa_kept < 0:
            raise BadSetting(f"swa_kept is {self.swa_kept}; it must be a number of tokens, 0 or more")
        if self.first_swa_page <= RESERVED_PAGE:
            raise BadSetting(
                f"first_swa_page is {self.first_swa_page}; it must be at least 1, because page {RESERVED_PAGE} is "
                "reserved"
            )
        sequences = ("capture_sizes", Sequence | None), ("capture_tokens", Sequence), ("prompt_tokens", Sequence)
        for name, kind in sequences:
            if not isinstance(getattr(self, name), kind):
                raise BadSetting(f"{name} is {getattr(self, name)!r}; give a list of sizes")
        if self.capture_sizes is not None:
            if not self.capture_sizes:
                raise BadSetting(
                    "capture_sizes is empty, and steps are padded to one of them; give at least one size. For "
                    "steps without graphs build the StepRunner with recorder=None"
                )
            object.__setattr__(self, "capture_sizes", _ladder("capture_sizes", self.capture_sizes).sizes)
        object.__setattr__(self, "capture_tokens", _ladder("capture_tokens", self.capture_tokens).sizes)
        if self.prompt_tokens:
            object.__setattr__(self, "prompt_tokens", _ladder("prompt_tokens", self.prompt_tokens).sizes)
        if not isinstance(self.drafts, Sequence) or not all(isinstance(each, Drafts) for each in self.drafts):
            raise BadSetting(f"drafts is {self.drafts!r}; give a list of Drafts, the rounds that may be captured")
        object.__setattr__(self, "drafts", tuple(dict.fromkeys(self.drafts)))

    @property
    def num_rows(self) -> int:
        """Requests that can be admitted at a time."""
        return self.max_num_rows or self.max_num_seqs

    @property
    def pool_size(self) -> PoolSize:
        """The pool size that kernels are chosen for."""
        return PoolSize(max(self.num_pages, self.swa_pages), self.max_kv_len, self.max_num_seqs)

    def spaces(self, problems: Sequence[Problem]) -> tuple[Space, ...]:
        """The space of each layer's pages. problems: one for each layer"""
        return tuple(space_of(problem, has_swa=self.swa_pages > 0) for problem in problems)

    def windows(self, problems: Sequence[Problem]) -> tuple[SpacePages, ...]:
        """The pages of the sliding-window (SWA) space, if there is one. Raises NeverFits."""
        if not self.swa_pages:
            return ()
        # A row of several tokens is folded from tokens before its last one.
        reaches = [max(problem.window_left, problem.row.span - 1) for problem in problems]
        # A row keeps its last token, which transfers send, even if no later one sees it.
        window_left = max([1, *reaches])
        return (SpacePages(Space.SWA, self.swa_pages, "swa_pages", window_left, self.swa_kept, self.first_swa_page),)

    def padding(self, problems: Sequence[Problem]) -> PaddingPolicy:
        """The sizes that steps are padded to, and which steps may be captured."""
        extras = {Extra.NOTHING}
        if any(problem.custom_mask for problem in problems):
            extras.add(Extra.MASK)
        if self.shared_prefixes:
            extras.add(Extra.PREFIXES)
        if any(each.branches > 1 for each in self.drafts) and not all(problem.custom_mask for problem in problems):
            raise BadSetting(
                "drafts with several branches need masks in every layer; give problems with custom_mask, or one branch"
            )
        return PaddingPolicy(
            default_ladder(self.max_num_seqs) if self.capture_sizes is None else SizeLadder(tuple(self.capture_sizes)),
            SizeLadder(tuple(self.capture_tokens)),
            HALVES if self.split_steps else 1,
            frozenset(extras),
            tuple(self.drafts),
            self.mask_keys,
            verify=self.verify_tokens,
            prompts=tuple(self.prompt_tokens),
        )


def _ladder(name: str, sizes: Sequence[int]) -> SizeLadder:
    try:
        ladder = SizeLadder(tuple(whole_number(f"one of {name}", size) for size in sizes))
    except BadLadder as bad:
        raise BadSetting(f"{name}: {bad}") from bad
    if ladder.largest > INT32_MAX:
        raise BadSetting(
            f"{name} goes up to {ladder.largest}; counts are int32, so it must end at {INT32_MAX} or before"
        )
    return ladder
