"""Decode context parallelism: ranks share the context of sequences, for layers whose heads have their own K and V.

Each rank keeps every n-th stretch of a sequence's tokens. A step's new tokens attend twice:

    context  the tokens before the step: each rank over its own part, for the query heads of all ranks
    own      the step's new tokens, whose K and V every rank has; causal

Parts of the context are merged by their log-sum-exps, and then with the own part. This module does not import vLLM.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from rocm_attn.errors import Unsupported
from rocm_attn.external import ExternalAttention
from rocm_attn.integrations.vllm.group import GroupLayer, GroupOptions, GroupSizes, KVGroup, StepOfGroup
from rocm_attn.integrations.vllm.own_tokens import OwnTokens
from rocm_attn.integrations.vllm.steps import CommonMetadata, ReplayShape, require_causal
from rocm_attn.machine.devices import on_device, with_index
from rocm_attn.problem import UNLIMITED_WINDOW, Problem


class ContextRanks(Protocol):
    """The ranks that share contexts, like vLLM's GroupCoordinator. All ranks make the same calls in the same order."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""

    @property
    def rank_in_group(self) -> int:
        """The number of this rank."""

    def all_gather(self, input_: Tensor, dim: int) -> Tensor:
        """Returns the tensors of all ranks, concatenated along a dimension."""

    def reduce_scatter(self, input_: Tensor, dim: int) -> Tensor:
        """Returns this rank's part, along a dimension, of the sum of all ranks' tensors."""


@dataclass(frozen=True, slots=True)
class ContextSharing:
    """The ranks that share contexts. stretch: consecutive tokens of a sequence that a rank keeps"""

    ranks: ContextRanks
    stretch: int = 1

    def kept(self, lengths: Tensor) -> Tensor:
        """Returns how many of the first `lengths` tokens of sequences this rank keeps. May be captured."""
        turn = self.stretch * self.ranks.world_size
        rest = lengths % turn - self.ranks.rank_in_group * self.stretch
        return lengths // turn * self.stretch + rest.clamp(0, self.stretch)


class SharedContextGroup:
    """Like KVGroup, but for ranks that share contexts. layers: with this rank's query heads

    Raises Unsupported also for windows and ALiBi slopes, because a rank does not know the distance of its keys; and for
    more than one KV head per rank, because ranks that share contexts have copies of the same one.
    """

    def __init__(
        self,
        layers: Mapping[str, GroupLayer],
        sizes: GroupSizes,
        device: torch.device,
        options: GroupOptions,
        sharing: ContextSharing,
    ) -> None:
        for name, each in layers.items():
            _require_plain(name, each.problem)
        self._layers, self._sizes, self._device, self._sharing = dict(layers), sizes, with_index(device), sharing
        ranks = sharing.ranks.world_size
        self._context = KVGroup(
            {name: GroupLayer(each.layer, _of_context(each.problem, ranks)) for name, each in layers.items()},
            sizes,
            device,
            replace(options, external=replace(options.external, short_kv=True), has_slots=False),
        )
        self._own = OwnTokens(
            {name: replace(each, problem=replace(each.problem, wants_lse=True)) for name, each in layers.items()},
            sizes,
            device,
            options,
        )

    @property
    def attention(self) -> ExternalAttention:
        """The attention over contexts. Raises WrongState before the first step."""
        return self._context.attention

    def begin(self, common: CommonMetadata) -> StepOfGroup:
        """Begins and fills both parts of a step. common: as in KVGroup.begin, with the lengths of whole sequences

        Raises Unsupported for a step that is not causal, and the errors of ExternalAttention.
        """
        require_causal(common)
        shape, seqs = ReplayShape.of(common), common.num_reqs
        starts = common.query_start_loc[: seqs + 1]
        new = starts[1:] - starts[:-1]
        context = CommonMetadata(
            query_start_loc=common.query_start_loc,
            seq_lens=self._sharing.kept(common.seq_lens[:seqs] - new),
            num_reqs=seqs,
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            max_seq_len=min(common.max_seq_len, self._sizes.kv_len),
            block_table_tensor=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=True,
        )
        step = self._context.begin(context)
        self._own.begin(common)
        return replace(step, slots=common.slot_mapping[: shape.num_tokens])

    def store(self, name: str, step: StepOfGroup, kv_cache: Tensor, k: Tensor, v: Tensor) -> None:
        """Writes K and V of the new tokens that this rank keeps to the cache, and all of them to rows for attend()."""
        self._context.store_at(name, step, kv_cache, k, v)
        self._own.store(name, step, kv_cache, k, v)

    def attend(self, name: str, step: StepOfGroup, kv_cache: Tensor, q: Tensor, out: Tensor) -> None:
        """Like KVGroup.attend. Call store() of the same layer before."""
        tokens = slice(step.num_tokens)
        q = q[tokens]
        context, lse = self._of_context(name, step, kv_cache, q)
        own = q.new_empty(context.shape)
        own_lse = torch.empty_like(lse)
        self._own.attend(name, step, kv_cache, q, own, own_lse)
        with on_device(self._device):
            self._own.attention.ops.merge_states(context, lse, own, own_lse, context, lse)
        out[tokens] = context

    def _of_context(self, name: str, step: StepOfGroup, kv_cache: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the attention of this rank's heads over the contexts of all ranks, and its log-sum-exp; float32."""
        ranks, heads = self._sharing.ranks, q.shape[1]
        of_all = ranks.all_gather(q.contiguous(), 1)
        part = q.new_empty(*of_all.shape[:2], self._layers[name].problem.v_head_dim)
        lse = torch.empty(of_all.shape[:2], dtype=torch.float32, device=q.device)
        self._context.attend(name, step, kv_cache, of_all, part, lse)
        total = ranks.all_gather(lse.unsqueeze(0), 0).logsumexp(0)
        is_empty = lse == float("-inf")
        weight = (lse - total).exp().masked_fill(is_empty, 0.0)
        weighted = part.float().masked_fill(is_empty[..., None], 0.0) * weight[..., None]
        mine = slice(ranks.rank_in_group * heads, (ranks.rank_in_group + 1) * heads)
        return ranks.reduce_scatter(weighted, 1), total[:, mine].contiguous()


def _of_context(problem: Problem, ranks: int) -> Problem:
    """Returns the problem of a rank's part of contexts: all ranks' query heads, all keys seen, no sinks."""
    heads = problem.num_q_heads * ranks
    return replace(problem, num_q_heads=heads, has_sinks=False, window_right=UNLIMITED_WINDOW, wants_lse=True)


def _require_plain(name: str, problem: Problem) -> None:
    requested = {
        "a window": problem.window_left != UNLIMITED_WINDOW,
        "ALiBi slopes": problem.has_alibi_slopes,
        "tokens that see each other": problem.custom_mask or not problem.causal,
    }
    if found := [what for what, is_requested in requested.items() if is_requested]:
        raise Unsupported(
            f"{name} has {' and '.join(found)}, and a rank that shares a context does not know how far its keys "
            "are; set decode_context_parallel_size to 1"
        )
    if problem.num_kv_heads != 1:  # ranks that share contexts have copies of one KV head, and gather their query heads
        raise Unsupported(
            f"{name} has {problem.num_kv_heads} KV heads on a rank, and ranks can share the contexts of one only; "
            "set tensor_parallel_size to at least num_key_value_heads x decode_context_parallel_size"
        )
