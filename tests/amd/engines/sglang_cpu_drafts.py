"""Compiled kernels that SGLang calls around drafts, in torch: SGLang needs them on a CPU, and no wheel has them.

Each is named and called as in SGLang 0.5.23 (sglang/kernels/ops/speculative), and written from its purpose.
"""

import ctypes
from typing import Any

from torch import Tensor


def give_kernels() -> None:
    """Puts the kernels where SGLang imports them from, before it does."""
    import sgl_kernel  # type: ignore[import-not-found]  # of SGLang's environment

    for function in (
        assign_draft_cache_locs_contiguous_cpu,
        assign_extend_cache_locs_cpu,
        assign_req_to_token_pool_cpu,
        build_tree_kernel_efficient_cpu,
        copy_all_layer_kv_cache_cpu,
        fill_accept_out_cache_loc_cpu,
        fill_bonus_tokens_cpu,
        verify_tree_greedy_cpu,
    ):
        setattr(sgl_kernel, function.__name__, function)


def see_whole_masks() -> None:
    """Makes masks of trees cover all keys of a request, as on a GPU. On a CPU SGLang's masks cover only the drafts."""
    from sglang.kernels.ops.speculative.spec_tree import TreeMaskMode
    from sglang.srt.speculative import eagle_utils

    eagle_utils.default_tree_mask_mode = lambda *_: TreeMaskMode.FULL_MASK


def find_last_slots_in_torch() -> None:
    """Replaces the Triton kernel with which SGLang finds a request's last slot for backends that it does not know."""
    from sglang.srt.mem_cache import allocation

    allocation.get_last_loc_triton = allocation.get_last_loc_torch


def allow_block_drafts() -> None:
    """Lets SGLang draft blocks on a CPU, which it allows on GPUs alone; it has torch functions for what Triton does."""
    from sglang.srt.arg_groups import speculative_hook

    class Allowing:
        def __init__(self, platform: Any) -> None:
            self._platform = platform

        def __getattr__(self, name: str) -> Any:
            return getattr(self._platform, name)

        def is_out_of_tree(self) -> bool:
            return True

        def supports_speculative_algorithm(self, name: str) -> bool:
            return True

        def supports_speculative_draft_attention_backend(self, name: str, backend: str) -> bool:
            return True

    speculative_hook.current_platform = Allowing(speculative_hook.current_platform)
    # A CPU has no streams that a tensor's memory waits for. SGLang rounds embeddings that a model is given to bfloat16.
    Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]  # for this process
    Tensor.bfloat16 = Tensor.contiguous  # type: ignore[method-assign]  # for this process


def assign_draft_cache_locs_contiguous_cpu(
    rows: Tensor, table: Tensor, seq_lens: Tensor, out: Tensor, _width: int, topk: int, num_steps: int
) -> None:
    """Writes the slots of drafts: those after a request's tokens."""
    count = topk * num_steps
    for i, (row, length) in enumerate(zip(rows.tolist(), seq_lens.tolist(), strict=True)):
        out[i * count : (i + 1) * count] = table[row, length : length + count]


def assign_extend_cache_locs_cpu(
    rows: Tensor, table: Tensor, starts: Tensor, ends: Tensor, out: Tensor, _width: int
) -> None:
    """Writes the slots from a place in each request to another, one request after the other."""
    place = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        out[place : place + end - start] = table[row, start:end]
        place += end - start


def assign_req_to_token_pool_cpu(
    rows: Tensor, table: Tensor, starts: Tensor, ends: Tensor, slots: Tensor, _width: int
) -> None:
    """Copies in the other direction: slots into the table."""
    place = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = slots[place : place + end - start]
        place += end - start


def copy_all_layer_kv_cache_cpu(addresses: Tensor, row_bytes: Tensor, to: Tensor, source: Tensor) -> None:
    """Copies rows from some slots to others in every pool of K and of V, given by its address."""
    for address, size in zip(addresses.tolist(), row_bytes.tolist(), strict=True):
        rows = [ctypes.string_at(address + slot * size, size) for slot in source.tolist()]
        for slot, row in zip(to.tolist(), rows, strict=True):
            ctypes.memmove(address + slot * size, row, size)


def fill_bonus_tokens_cpu(accepted: Tensor, accept_lens: Tensor, out: Tensor, stride: int) -> None:
    """Writes the last token that each request has accepted."""
    for i, count in enumerate(accept_lens.tolist()):
        out[i] = accepted.view(-1)[i * stride + count - 1]


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, slots: Tensor, out: Tensor) -> None:
    """Writes the slots of the drafts that were accepted, in order."""
    chosen = accept_index.flatten()
    chosen = chosen[chosen >= 0].long()
    out[: len(chosen)] = slots[chosen]


def build_tree_kernel_efficient_cpu(  # its parameters are SGLang's
    parent_list: Tensor,
    selected: Tensor,
    seq_lens: Tensor,
    mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    topk: int,
    *sizes: Any,
) -> None:
    """Builds the tree of each request: node 0 is its last token, node i the i-th draft that was selected.

    parent_list: [S, ...], candidate -> the candidate it came from, for each group of topk
    selected:    [S, nodes - 1], candidates
    mask:        for each node one row of length + nodes, or of nodes: those that it sees
    """
    _depth, nodes, mode = sizes
    place = 0
    for i, length in enumerate(seq_lens.tolist()):
        chosen = selected[i].tolist()
        parents = [0] * nodes
        for node in range(1, nodes):
            group = chosen[node - 1] // topk
            parents[node] = 0 if group == 0 else 1 + chosen.index(int(parent_list[i, group]))
        before = length if int(mode) == 0 else 0
        rows = mask[place : place + nodes * (before + nodes)].view(nodes, before + nodes)
        place += nodes * (before + nodes)
        rows[:, :before] = True
        rows[:, before:] = False
        for node in range(nodes):
            at, depth = node, 0
            rows[node, before] = rows[node, before + node] = True
            while at:
                rows[node, before + at] = True
                at, depth = parents[at], depth + 1
            positions.view(-1, nodes)[i, node] = length + depth
            retrieve_index[i, node] = i * nodes + node
        for node in range(nodes - 1, 0, -1):  # the first child is the one with the smallest number
            next_sibling[i, node] = next_token[i, parents[node]]
            next_token[i, parents[node]] = node


def verify_tree_greedy_cpu(  # its parameters are SGLang's
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walks down each tree along drafts that equal the target's tokens."""
    said = target_predict.flatten()
    for i in range(len(candidates)):
        node, count, at = 0, 0, int(retrive_index[i, 0])
        accept_index[i, 0] = at
        while count + 1 < accept_index.shape[1]:
            child = int(retrive_next_token[i, node])
            while child != -1 and candidates[i, child] != said[at]:
                child = int(retrive_next_sibling[i, child])
            if child == -1:
                break
            predicts[at] = said[at]
            node, count, at = child, count + 1, int(retrive_index[i, child])
            accept_index[i, count] = at
        accept_token_num[i] = count
        predicts[at] = said[at]
