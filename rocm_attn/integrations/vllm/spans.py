"""GroupSpans: the tokens of a step of vLLM's that see each other, of images and of steps that are not causal.

Images come as ranges of prompts, on the host. A request that is not causal is one span, however long it is: its new
tokens see all of its KV. So such a step needs no lengths. It imports no vLLM.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from rocm_attn.batch.step_batch import INT32_MAX
from rocm_attn.errors import Unsupported, WrongState
from rocm_attn.integrations.vllm.steps import CommonMetadata, require_causal
from rocm_attn.problem import UNLIMITED_WINDOW, Problem
from rocm_attn.step.external_step import NO_CELLS, DeviceSpans, NoCells
from rocm_attn.step.host_ring import HostRing


class GroupSpans:
    """The spans of a group's steps, in fixed memory.

    problems: of the group's layers
    num_seqs, num_tokens: of the largest step
    """

    def __init__(self, problems: Collection[Problem], num_seqs: int, num_tokens: int, device: torch.device) -> None:
        self.is_needed = any(problem.custom_mask for problem in problems)
        self._is_passed = any(problem.spans_pass_window for problem in problems)
        windows = [problem.window_left for problem in problems if problem.window_left != UNLIMITED_WINDOW]
        self._shortest_window = min(windows, default=INT32_MAX)
        if not self.is_needed:
            return
        with torch.inference_mode(False):
            self._ring = HostRing(device)
            self._of_images = torch.zeros(num_tokens, 3, dtype=torch.int32, device=device)
            self._of_requests = torch.zeros(num_seqs, 3, dtype=torch.int32, device=device)
            self._is_open = torch.zeros(num_seqs, dtype=torch.bool, device=device)
            self._of_requests[:, 0] = torch.arange(num_seqs, device=device)

    @property
    def none(self) -> DeviceSpans:
        """The spans of a masked step that has none."""
        return DeviceSpans(self._of_images[:0])

    def of(self, common: CommonMetadata) -> DeviceSpans | NoCells:
        """Returns a step's spans; NO_CELLS if its tokens see themselves and what comes before.

        Raises Unsupported for a step that is not causal, or has images, in layers that were not declared so; for one
        whose tokens a window hides from each other; and for an image of which only a part is in the step.
        """
        if common.max_query_len <= 1:
            return NO_CELLS  # the last token of its KV sees all of it anyway
        if not self.is_needed:
            require_causal(common)
            if common.mm_req_doc_ranges and len(_images_of(common)):
                raise Unsupported(
                    "vLLM gives images whose tokens see each other to layers of which it has not said so "
                    "(is_mm_prefix_lm); choose another attention backend for this model"
                )
            return NO_CELLS
        if common.causal is not True:
            return self._whole(common, common.causal)
        return self._images(common) if common.mm_req_doc_ranges else NO_CELLS

    def _whole(self, common: CommonMetadata, causal: bool | Tensor) -> DeviceSpans:
        """The spans of a step of which all requests, or some, are not causal."""
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
        spans, is_open = self._of_requests[: common.num_reqs], self._is_open[: common.num_reqs]
        if isinstance(causal, Tensor):
            torch.logical_not(causal[: common.num_reqs], out=is_open)
        else:
            is_open.fill_(True)
        torch.mul(is_open, INT32_MAX, out=spans[:, 2])
        return DeviceSpans(spans)

    def _images(self, common: CommonMetadata) -> DeviceSpans | NoCells:
        """The spans of the images that have new tokens in the step."""
        found = _images_of(common)
        if not len(found):
            return NO_CELLS
        spans = self._of_images[: len(found)]
        self._ring.send(found, spans)
        return DeviceSpans(spans)


def _images_of(common: CommonMetadata) -> Tensor:
    """Sequence, first key and end of each image with new tokens, int32 [n, 3] on the host.

    Lengths on the host are those of the device for prompts.
    """
    assert common.mm_req_doc_ranges is not None
    if common.query_start_loc_cpu is None or common.seq_lens_cpu_upper_bound is None:
        raise WrongState("vLLM gives ranges of images for a step without its lengths on the host")
    of_requests = common.mm_req_doc_ranges.items()
    # vLLM counts to the last token.
    ranges = [(seq, first, last + 1) for seq, given in of_requests for first, last in given]
    spans = torch.tensor(ranges, dtype=torch.int32).view(-1, 3)
    seq, first, end = spans.unbind(1)
    starts, kv_len = common.query_start_loc_cpu, common.seq_lens_cpu_upper_bound[seq.long()]
    start = kv_len - (starts[seq.long() + 1] - starts[seq.long()])
    is_new = (end > start) & (first < kv_len)
    for number in (is_new & (end > kv_len)).nonzero()[:1].flatten().tolist():
        raise Unsupported(
            f"an image has the tokens {first[number]} to {end[number] - 1} of request {seq[number]}, and the step ends "
            f"with its token {kv_len[number] - 1}; the tokens of an image see each other, so set "
            "--disable-chunked-mm-input"
        )
    return spans[is_new].contiguous()
