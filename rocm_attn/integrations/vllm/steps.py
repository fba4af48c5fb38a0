"""Converts a step as vLLM's runner describes it to the runtime's form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rocm_attn.errors import Unsupported
from rocm_attn.paging.index_spaces import num_pages
from rocm_attn.step.external_step import ONE_EACH, Boundaries, DeviceSpans, ExternalStep, NoCells

# Our builders' support of full graphs, by vLLM's names. A schedule on the device assigns the work to the programs of a
# step, so one graph serves all lengths. Prompts of MLA layers run on vLLM's kernels and are not captured.
GQA_GRAPHS, MLA_GRAPHS = "ALWAYS", "UNIFORM_BATCH"


@dataclass(frozen=True, slots=True)
class CommonMetadata:
    """The part that is read of vLLM's CommonAttentionMetadata, which stands for this, or of the first of its sequences.

    Only its numbers are on the host, and what is named so.

    query_start_loc:    int32 [num_reqs + 1 or more]; the first new token of each request
    seq_lens:           int32 [num_reqs or more]; tokens of each request, new ones included; 0 for padding
    num_reqs:           padded for a full graph
    num_actual_tokens:  padded for a full graph
    max_query_len, max_seq_len: upper bounds
    block_table_tensor: int32 [num_reqs or more, width]; null blocks are 0
    slot_mapping:       int64 [num_actual_tokens or more]; -1: this token is not stored
    causal:             a tensor if requests differ, of models that VllmConfig.diffusion_config is for
    query_start_loc_cpu: query_start_loc on the host
    seq_lens_cpu_upper_bound: bounds of seq_lens, on the host; of prompts their values
    mm_req_doc_ranges:  request -> first and last place of each image in its prompt, on the host; None: there are none
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Tensor
    slot_mapping: Tensor
    causal: bool | Tensor
    query_start_loc_cpu: Tensor | None = None
    seq_lens_cpu_upper_bound: Tensor | None = None
    mm_req_doc_ranges: Mapping[int, Sequence[tuple[int, int]]] | None = None


@dataclass(frozen=True, slots=True)
class ReplayShape:
    """The properties of a step that a graph of vLLM's fixes. They decide which steps may replay the graph.

    num_seqs, num_tokens: padding included
    max_q_len:            the most new tokens of a sequence
    """

    num_seqs: int
    num_tokens: int
    max_q_len: int

    @classmethod
    def of(cls, common: CommonMetadata) -> ReplayShape:
        """Returns the shape of a step. A step has at least one token, and a sequence at least one new one."""
        tokens = max(1, common.num_actual_tokens)
        return cls(max(1, common.num_reqs), tokens, min(max(1, common.max_query_len), tokens))

    @property
    def decodes(self) -> bool:
        """True if each sequence has one new token, padding included."""
        return self.max_q_len == 1 and self.num_seqs == self.num_tokens

    @property
    def min_q_len(self) -> int:
        """The fewest new tokens of a sequence. If tokens and sequences differ in number, one may have none."""
        return int(self.decodes or self.max_q_len > 1)

    def widest(self) -> ReplayShape:
        """Returns the shape of steps of this size in which one sequence may have all new tokens."""
        return ReplayShape(self.num_seqs, self.num_tokens, self.num_tokens)

    @property
    def padded(self) -> tuple[int, int]:
        """The key by which vLLM looks a graph up."""
        return self.num_seqs, self.num_tokens

    def serves(self, step: ReplayShape) -> bool:
        """True if a step may run with this shape: its bounds may be smaller, never larger."""
        return step.padded == self.padded and step.max_q_len <= self.max_q_len


def require_causal(common: CommonMetadata) -> None:
    """Raises Unsupported for a step that is not causal."""
    if common.causal is not True:
        raise Unsupported(
            "the step is not causal, and vLLM has not said so of its layers (use_non_causal); choose another attention "
            "backend for this model"
        )


def external_step(
    common: CommonMetadata,
    shape: ReplayShape,
    kv_len: Tensor,
    num_seqs: int,
    captured: bool,
    mask: DeviceSpans | NoCells,
) -> ExternalStep:
    """Returns the step at a shape.

    kv_len:   of its sequences; as common has them, or less
    num_seqs: sequences that are read; the others are padding
    """
    return ExternalStep(
        num_seqs=num_seqs,
        padded_seqs=shape.num_seqs,
        padded_tokens=shape.num_tokens,
        kv_len=kv_len,
        q=ONE_EACH if shape.decodes else Boundaries(common.query_start_loc),
        rows=None,
        min_q_len=shape.min_q_len,
        max_q_len=shape.max_q_len,
        max_kv_len=max(1, common.max_seq_len),
        captured=captured,
        mask=mask,
    )


def slots_of_whole(common: CommonMetadata, slots: Tensor, page_size: int, longest: int) -> Tensor:
    """Returns a step's slots, and -1 for all tokens of a sequence whose length vLLM has cut to the longest one.

    Block drafts of vLLM's runner V2 (DFlash) have a fixed number of tokens, also past the longest sequence. There vLLM
    cuts the length and not the slots. Drafts after the end are of no use, and storing them would hide the sequence's
    own tokens. Such a sequence is known by its first two tokens: the table has their slots at later places. Other slots
    that differ from the table's are wrong: they stay, and are reported.
    """
    ends, seq_lens = common.query_start_loc[1 : common.num_reqs + 1], common.seq_lens[: common.num_reqs]
    starts, table = common.query_start_loc[: common.num_reqs], common.block_table_tensor[: common.num_reqs]

    def slot_of(place: Tensor) -> Tensor:  # vLLM looks for places beyond the table in its last block
        page = table.gather(1, (place // page_size).clamp(max=table.shape[1] - 1)[:, None])[:, 0]
        return page * page_size + place % page_size

    first = (seq_lens - (ends - starts)).clamp(min=0).long()
    given, second = (slots[(starts + place).clamp(max=len(slots) - 1)] for place in range(2))
    is_page = table[:, : num_pages(longest, page_size)] == (given // page_size)[:, None]
    place = is_page.int().argmax(1) * page_size + given % page_size
    is_later = (is_page.any(1) & (place > first)) | (given == slot_of(torch.full_like(first, longest)))
    is_alone = (second == slot_of(first + 1)) & (ends - starts > 1)
    is_cut = (seq_lens >= longest) & (given >= 0) & (given != slot_of(first)) & is_later & ~is_alone
    owner = torch.searchsorted(ends, torch.arange(len(slots), dtype=ends.dtype, device=ends.device), right=True)
    return slots.masked_fill(is_cut[owner.clamp(max=common.num_reqs - 1)], -1)


def as_vllm_makes_it(step: ExternalStep) -> ExternalStep:
    """Returns a step in the form of external_step(): vLLM does not say the fewest new tokens of a sequence."""
    return replace(step, min_q_len=1)
