"""GroupSpans: the tokens of a step of vLLM's that see each other, of images and of steps that are not causal.

Images come as ranges of prompts, on the host. A request that is not causal is one span, however long it is: its new
tokens see all of its KV. So such a step needs no lengths. It imports no vLLM.
"""

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from rocm_attn.batch.step_batch import INT32_MAX
from rocm_attn.errors import Unsupported, WrongState
from rocm_attn.integrations.vllm.steps import CommonMetadata, require_causal
from rocm_attn.problem import UNLIMITED_WINDOW, Problem
from rocm_attn.step.external_step import NO_CELLS, DeviceSpans, NoCells
from rocm_attn.step.host_ring import HostRing


class Span(NamedTuple):
    """The tokens of an image, from the first one until the end, of a sequence of the step."""

    seq: int
    first: int
    end: int


class GroupSpans:
    """The spans of a group's steps, in fixed memory, which the first step makes: see OwnTokens.attention.

    problems: of the group's layers
    num_seqs, num_tokens: of the largest step
    """

    def __init__(self, problems: Collection[Problem], num_seqs: int, num_tokens: int, device: torch.device) -> None:
        self.is_needed = any(problem.custom_mask for problem in problems)
        passed = [problem.window_left for problem in problems if problem.spans_pass_window]
        self._is_passed, self._passed_window = bool(passed), min(passed, default=INT32_MAX)
        windows = [problem.window_left for problem in problems if problem.window_left != UNLIMITED_WINDOW]
        self._shortest_window = min(windows, default=INT32_MAX)
        self._num_seqs, self._num_tokens, self._device = num_seqs, num_tokens, device

    @cached_property
    def _of_images(self) -> Tensor:
        with torch.inference_mode(False):
            self._ring = HostRing(self._device)
            return torch.zeros(self._num_tokens, 3, dtype=torch.int32, device=self._device)

    @cached_property
    def _of_requests(self) -> Tensor:
        with torch.inference_mode(False):
            spans = torch.zeros(self._num_seqs, 3, dtype=torch.int32, device=self._device)
            spans[:, 0] = torch.arange(self._num_seqs, device=self._device)
            spans[:, 2] = INT32_MAX
            return spans

    @property
    def none(self) -> DeviceSpans:
        """The spans of a masked step that has none."""
        return DeviceSpans(self._of_images[:0])

    def of(self, common: CommonMetadata) -> DeviceSpans | NoCells:
        """Returns a step's spans; NO_CELLS if its tokens see themselves and what comes before.

        Raises Unsupported for a step that is not causal, or has images, in layers that were not declared so; for one
        whose tokens a window hides from each other; and for an image of which only a part is in the step, or that
        begins before a window that it overrides.
        """
        if common.max_query_len <= 1:
            self._images_of(common)  # refuses a token whose image goes on
            return NO_CELLS  # the last token of its KV sees all of it anyway
        if not self.is_needed:
            require_causal(common)
            if self._images_of(common):
                raise Unsupported(
                    "vLLM gives images whose tokens see each other to layers of which it has not said so "
                    "(is_mm_prefix_lm); choose another attention backend for this model"
                )
            return NO_CELLS
        if common.causal is False:
            return self._whole(common)
        require_causal(common)
        return self._images(self._images_of(common))

    def _whole(self, common: CommonMetadata) -> DeviceSpans:
        """The spans of a step that is not causal."""
        if self._is_passed:
            raise Unsupported(
                "the step is not causal, and images override the windows of its layers; choose another attention "
                "backend for this model"
            )
        if common.max_query_len - 1 > self._shortest_window:
            raise Unsupported(
                f"the step is not causal, and a request has up to {common.max_query_len} new tokens in layers with a "
                f"window of {self._shortest_window + 1}; a window hides no later tokens here, so choose another "
                "attention backend for this model"
            )
        return DeviceSpans(self._of_requests[: common.num_reqs])

    def _images(self, found: Sequence[Span]) -> DeviceSpans | NoCells:
        """The spans of the images that have new tokens in the step."""
        if not found:
            return NO_CELLS
        spans = self._of_images[: len(found)]
        self._ring.send([word for span in found for word in span], spans)
        return DeviceSpans(spans)

    def _images_of(self, common: CommonMetadata) -> Sequence[Span]:
        """The images with new tokens. Lengths on the host are those of the device for prompts.

        vLLM makes no spans of images that are longer than a window which they override. So it has taken back no block
        of one, and a step of one token needs no mask.
        """
        if not common.mm_req_doc_ranges:
            return ()
        if common.query_start_loc_cpu is None or common.seq_lens_cpu_upper_bound is None:
            raise WrongState("vLLM gives ranges of images for a step without its lengths on the host")
        starts, kv_len = common.query_start_loc_cpu.tolist(), common.seq_lens_cpu_upper_bound.tolist()
        found = []
        for seq, ranges in common.mm_req_doc_ranges.items():
            stop = kv_len[seq]
            start = stop - (starts[seq + 1] - starts[seq])
            for first, last in ranges:
                if max(first, start) >= min(last + 1, stop):
                    continue
                if last >= stop:
                    raise Unsupported(
                        f"an image has the tokens {first} to {last} of request {seq}, and the step ends with its token "
                        f"{stop - 1}; the tokens of an image see each other, so set --disable-chunked-mm-input"
                    )
                if first < start - self._passed_window:
                    raise Unsupported(
                        f"an image begins with token {first} of request {seq}, and the step with token {start}, in "
                        f"layers whose images override a window of {self._passed_window + 1} keys; vLLM may have taken "
                        "back what lies before a window, so set --no-enable-prefix-caching"
                    )
                found.append(Span(seq, first, last + 1))  # vLLM counts to the last token
        return found
