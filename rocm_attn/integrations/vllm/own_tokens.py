"""OwnTokens: attention of a step's new tokens among themselves, without a KV cache. It imports no vLLM.

It serves encoder models: all tokens of a prompt are in one step and see each other, and no KV is kept.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from rocm_attn.external import Bounds, ExternalAttention, LayerSource
from rocm_attn.integrations.vllm.group import (
    GroupLayer,
    GroupOptions,
    GroupSizes,
    LoadedWeights,
    StepOfGroup,
    require_kernels,
)
from rocm_attn.integrations.vllm.steps import CommonMetadata, ReplayShape
from rocm_attn.machine.devices import with_index
from rocm_attn.paging.adopted import CsrSource
from rocm_attn.problem import KVEncoding, Problem, Scales
from rocm_attn.step.external_step import Boundaries, ExternalStep


class OwnTokens:
    """Like KVGroup, for layers whose new tokens see each other, in memory of this object: each token is a page.

    Layers take turns: store() fills the rows, and attend() of the same layer reads them.
    Raises Unsupported if no kernel serves a layer.
    """

    def __init__(
        self, layers: Mapping[str, GroupLayer], sizes: GroupSizes, device: torch.device, options: GroupOptions
    ) -> None:
        self._layers, self._sizes, self._device, self._options = dict(layers), sizes, with_index(device), options
        self._index = {name: index for index, name in enumerate(layers)}
        self._weights = LoadedWeights(layers.values())
        self._external = replace(options.external, short_kv=False)
        require_kernels([_of_own(each.problem) for each in layers.values()], sizes, self._device, self._external)

    @cached_property
    def attention(self) -> ExternalAttention:
        """The attention that runs the steps. The first step makes it, with all memory of this object.

        While vLLM makes builders, 0.26 lends them the memory of its KV cache, which its sleep mode discards.
        """
        sizes, device = self._sizes, self._device
        with torch.inference_mode(False):
            self._indptr = torch.zeros(sizes.num_seqs + 1, dtype=torch.int32, device=device)
            attention = ExternalAttention(
                [LayerSource(_of_own(each.problem)) for each in self._layers.values()],
                CsrSource(self._indptr, torch.arange(sizes.num_tokens, dtype=torch.int32, device=device)),
                device=device,
                bounds=Bounds(
                    num_seqs=sizes.num_seqs,
                    num_tokens=sizes.num_tokens,
                    kv_len=sizes.num_tokens,
                    num_pages=sizes.num_tokens,
                ),
                options=self._external,
                agree=self._options.agree,
            )
            self._rows = {
                problem: tuple(
                    torch.zeros(sizes.num_tokens, 1, problem.num_kv_heads, dim, dtype=problem.dtype, device=device)
                    for dim in (problem.head_dim, problem.v_head_dim)
                )
                for problem in {each.problem for each in self._layers.values()}
            }
            for name, each in self._layers.items():
                k, v = self._rows[each.problem]
                attention.pages.bind(self._index[name], k, v)
        self._options.said(attention.kernels().selections)
        return attention

    def begin(self, common: CommonMetadata) -> StepOfGroup:
        """Begins and fills a step over new tokens. Raises the errors of ExternalAttention."""
        shape, seqs = ReplayShape.of(common), common.num_reqs
        starts = common.query_start_loc[: seqs + 1]
        attention = self.attention
        attention.take_over()
        self._weights.give(attention)
        self._indptr[: seqs + 1] = starts
        self._indptr[seqs + 1 :] = starts[-1]
        attention.begin(
            ExternalStep(
                num_seqs=seqs,
                padded_seqs=shape.num_seqs,
                padded_tokens=shape.num_tokens,
                kv_len=starts[1:] - starts[:-1],
                q=Boundaries(starts),
                rows=None,
                min_q_len=shape.min_q_len,
                max_q_len=shape.max_q_len,
                max_kv_len=shape.max_q_len,
            )
        )
        attention.fill()
        return StepOfGroup(attention.step_number, shape.num_tokens, None)

    def store(self, name: str, step: StepOfGroup, kv_cache: Tensor, k: Tensor, v: Tensor) -> None:
        """Copies K and V of a step's tokens to the rows. k, v: as in KVGroup.store; the KV cache is not used"""
        for rows, new in zip(self._rows[self._layers[name].problem], (k, v), strict=True):
            rows[: step.num_tokens] = new[: step.num_tokens].unsqueeze(1)

    def attend(
        self, name: str, step: StepOfGroup, kv_cache: Tensor, q: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Computes attention over the rows. Like KVGroup.attend; call store() of the same layer before."""
        tokens = slice(step.num_tokens)
        self.attention.layers.attend(self._index[name], q[tokens], out[tokens], None if lse is None else lse[tokens])


def _of_own(problem: Problem) -> Problem:
    """Returns the problem of a step's new tokens: each is a page of its own, in the model's dtype."""
    return replace(problem, page_size=1, kv_encoding=KVEncoding.LIKE_Q, kv_scales=Scales.NONE)
