"""A small version of vLLM's model runners: packed caches, block tables, slots, pads, graphs.

It follows vLLM 0.26 and 0.32 (v1/worker/gpu_model_runner.py, v1/worker/gpu/cudagraph_utils.py, block_table.py), with K
and V of every request also kept in NumPy. Blocks without a request are NaN, and so are the values of pads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rocm_attn.capture.engine_kernels import StepsAhead, run_nothing
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.external import ExternalAttention, ExternalOptions
from rocm_attn.integrations.vllm.group import GroupLayer, GroupOptions, GroupSizes, KVGroup, Lend
from rocm_attn.integrations.vllm.layer_terms import PLAIN_MASK, CacheTerms, LayerTerms, MaskTerms
from rocm_attn.integrations.vllm.steps import CommonMetadata
from rocm_attn.problem import Scales as SharedScales
from rocm_attn.truth.adopted import try_nothing
from tests.amd.coded import kept
from tests.amd.integrations.oracle import Array, Scores, attention

HEADS, KV_HEADS, DIM = 4, 2, 16
SCALE = 0.3
MAX_SEQS, MAX_TOKENS, MAX_LEN = 8, 64, 128
NUM_BLOCKS = 40
NAN = float("nan")
# Against float64.
TOLERANCES = {torch.float32: 3e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}

TERMS = LayerTerms(HEADS, DIM, SCALE, KV_HEADS)


@dataclass
class Request:
    """A request in a line of the block tables. blocks: of each group, 0 for an evicted one"""

    blocks: list[list[int]]
    kv_len: int = 0


@dataclass
class Layer:
    """One layer in vLLM's form, and the stored rows of its requests. group: of KV caches"""

    name: str
    terms: LayerTerms
    group: int
    kv_cache: Tensor
    _k_scale: Tensor
    _v_scale: Tensor
    stored: dict[int, list[tuple[Array, Array]]] = field(default_factory=dict)


class _Noted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the tensors that operations make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and not made.is_meta:
            self.made.append(made)
        return made


@contextmanager
def discarding() -> Iterator[None]:
    """Clears all memory that was made in it, as the sleep mode of vLLM 0.26 does with what builders make."""
    with _Noted() as noted:
        yield
    with torch.inference_mode(False):
        for each in noted.made:
            torch.empty(0, dtype=torch.uint8, device=each.device).set_(each.untyped_storage()).zero_()


def unchanged(runner: Runner) -> None:
    """Changes nothing in a step."""


class Runner:
    """A vLLM runner over KVGroups, one per KV cache group. `groups` names the groups of layers."""

    def __init__(
        self,
        terms: Sequence[LayerTerms] = (TERMS,),
        groups: Sequence[int] = (0,),
        *,
        device: torch.device,
        provider: str,
        block_size: int = 16,
        heads_first: bool = False,
        wide: bool = False,
        dtype: torch.dtype = torch.float32,
        mask: MaskTerms = PLAIN_MASK,
        scales: tuple[float | list[float], float | list[float]] = (0.5, 0.25),
        external: ExternalOptions | None = None,
        tried: Callable[[ExternalAttention, Lend], None] = try_nothing,
        ran_ahead: Callable[[ExternalAttention, StepsAhead], None] = run_nothing,
    ) -> None:
        self.device, self.block_size, self.dtype, self.dim = device, block_size, dtype, terms[0].head_size
        self.random, self.pad, self.mask = np.random.default_rng(0), NAN, mask
        # First and last place of each image, and whether a step is not causal.
        self.images: dict[int, list[tuple[int, int]]] = {}
        self.is_open = False
        self.scales, shared = scales, SharedScales.HEAD if isinstance(scales[0], list) else SharedScales.LAYER
        self.cache = CacheTerms(block_size, self.dim, dtype, torch.float8_e4m3fn, fp8_scales=shared)
        self.layers = [
            self._new_layer(f"layers.{i}", each, group, heads_first)
            for i, (each, group) in enumerate(zip(terms, groups, strict=True))
        ]
        self.tables = [
            torch.zeros(MAX_SEQS, -(-MAX_LEN // block_size), dtype=torch.int32, device=device)
            for _ in range(max(groups) + 1)
        ]
        self.slots = [torch.full((MAX_TOKENS,), -1, dtype=torch.int64, device=device) for _ in self.tables]
        self.seq_lens = torch.zeros(MAX_SEQS, dtype=torch.int32, device=device)
        self.query_start_loc = torch.zeros(MAX_SEQS + 1, dtype=torch.int32, device=device)
        self.free = [self.random.permutation(np.arange(1, NUM_BLOCKS)).tolist() for _ in self.tables]
        self.requests: list[Request] = []
        external = external if external is not None else ExternalOptions()
        options = GroupOptions(
            replace(external, provider=provider, page_strides=True),
            is_wide=lambda: wide,
            tried=tried,
            ran_ahead=ran_ahead,
        )
        of_groups = [self._group_layers(group) for group in range(len(self.tables))]
        with discarding():
            self.groups = [
                KVGroup(layers, GroupSizes(MAX_SEQS, MAX_TOKENS, MAX_LEN), device, options) for layers in of_groups
            ]

    def _new_layer(self, name: str, terms: LayerTerms, group: int, heads_first: bool) -> Layer:
        shape = (NUM_BLOCKS, KV_HEADS, self.block_size, 2 * self.dim)
        is_coded = terms.kv_cache_dtype != "auto"
        if not heads_first:
            shape = (shape[0], shape[2], shape[1], shape[3])
        cache = (
            torch.full(shape, 127, dtype=torch.uint8, device=self.device)  # NaN in e4m3
            if is_coded
            else torch.full(shape, NAN, dtype=self.dtype, device=self.device)
        )
        cache[0] = 0
        k_scale, v_scale = (torch.tensor(scale, device=self.device) for scale in self.scales)
        return Layer(
            name,
            terms,
            group,
            cache if heads_first else cache.transpose(1, 2),
            k_scale,
            v_scale,
        )

    def _group_layers(self, group: int) -> dict[str, GroupLayer]:
        return {
            layer.name: GroupLayer(
                layer,
                layer.terms.problem(self.cache, self.mask),
                layer.terms.head_weights,
            )
            for layer in self.layers
            if layer.group == group
        }

    def admit(self) -> int:
        self.requests.append(Request([[] for _ in self.tables]))
        for layer in self.layers:
            layer.stored[len(self.requests) - 1] = []
        return len(self.requests) - 1

    def step(self, new: Sequence[int], corrupt: Callable[[Runner], None] = unchanged) -> None:
        """Runs an eager step of the first requests, with new[i] new tokens each, and compares it with the reference."""
        given, outs = self.step_unseen(new, corrupt)
        self.compare(new, given, outs)

    def step_unseen(
        self, new: Sequence[int], corrupt: Callable[[Runner], None] = unchanged
    ) -> tuple[list[tuple[Tensor, Tensor, Tensor]], list[Tensor]]:
        total = sum(new)
        self.prepare(new, len(new), total)
        corrupt(self)
        steps = [group.begin(self.common(index, len(new), total, max(new))) for index, group in enumerate(self.groups)]
        # vLLM's q, k and v may be longer than the step, for graphs of the rest of the model.
        given = [self.projected(total, total + 3) for _ in self.layers]
        outs = [self.unwritten(total + 3) for _ in self.layers]
        self.forward(steps, given, outs)
        self.keep(new, given)
        return given, outs

    def prepare(self, new: Sequence[int], padded_seqs: int, padded_tokens: int) -> None:
        """Writes blocks, lengths and slots of a step, and vLLM's pads."""
        ends = np.cumsum([0, *new])
        for index, table in enumerate(self.tables):
            slots: list[int] = []
            for row, count in enumerate(new):
                request = self.requests[row]
                blocks = request.blocks[index]
                while len(blocks) * self.block_size < request.kv_len + count:
                    blocks.append(self.free[index].pop())
                table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
                places = range(request.kv_len, request.kv_len + count)
                slots += [blocks[at // self.block_size] * self.block_size + at % self.block_size for at in places]
            table[len(new) : padded_seqs] = 0
            self.slots[index].fill_(-1)
            self.slots[index][: len(slots)] = torch.tensor(slots, dtype=torch.int64)
        lengths = [self.requests[row].kv_len + count for row, count in enumerate(new)]
        self.seq_lens.zero_()
        self.seq_lens[: len(new)] = torch.tensor(lengths, dtype=torch.int32)
        self.query_start_loc.fill_(int(ends[-1]))
        self.query_start_loc[: len(ends)] = torch.from_numpy(ends.astype(np.int32))

    def common(self, group: int, num_reqs: int, num_tokens: int, max_query_len: int) -> CommonMetadata:
        """Returns a group's metadata: parts of persistent memory."""
        return CommonMetadata(
            self.query_start_loc[: num_reqs + 1],
            self.seq_lens[:num_reqs],
            num_reqs,
            num_tokens,
            max_query_len,
            int(self.seq_lens.max()),
            self.tables[group][:num_reqs],
            self.slots[group][:num_tokens],
            not self.is_open,
            self.query_start_loc[: num_reqs + 1].cpu(),
            self.seq_lens[:num_reqs].cpu(),
            self.images or None,
        )

    def projected(self, num_tokens: int, padded: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, k and v of a layer; self.pad in padded rows."""
        values = [
            torch.from_numpy(self.random.standard_normal((padded, heads, self.dim))).to(self.device, self.dtype)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        ]
        for each in values:
            each[num_tokens:] = self.pad
        return values[0], values[1], values[2]

    def unwritten(self, num_tokens: int) -> Tensor:
        return torch.full((num_tokens, HEADS, self.dim), 7.0, dtype=self.dtype, device=self.device)

    def forward(
        self, steps: Sequence[object], given: Sequence[tuple[Tensor, Tensor, Tensor]], outs: Sequence[Tensor]
    ) -> None:
        for layer, (q, k, v), out in zip(self.layers, given, outs, strict=True):
            group, step = self.groups[layer.group], steps[layer.group]
            if layer.terms.stores:
                group.store(layer.name, step, layer.kv_cache, k, v)  # type: ignore[arg-type]
            group.attend(layer.name, step, layer.kv_cache, q, out)  # type: ignore[arg-type]

    def keep(self, new: Sequence[int], given: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        """Records the stored rows, as a reader of the pages gets them."""
        for layer, (_, k, v) in zip(self.layers, given, strict=True):
            problem, first = layer.terms.problem(self.cache, self.mask), 0
            scales = [scale.cpu().reshape(-1) for scale in (layer._k_scale, layer._v_scale)]
            for row, count in enumerate(new):
                rows = [
                    kept(side[first : first + count].cpu(), problem, scale).double().numpy()
                    for side, scale in zip((k, v), scales, strict=True)
                ]
                layer.stored[row].append((rows[0], rows[1]))
                first += count
        for row, count in enumerate(new):
            self.requests[row].kv_len += count

    def compare(
        self, new: Sequence[int], given: Sequence[tuple[Tensor, Tensor, Tensor]], outs: Sequence[Tensor]
    ) -> None:
        for row in range(len(new)):
            self.compare_request(row, new, given, outs)

    def compare_request(
        self, row: int, new: Sequence[int], given: Sequence[tuple[Tensor, Tensor, Tensor]], outs: Sequence[Tensor]
    ) -> None:
        tokens = slice(sum(new[:row]), sum(new[: row + 1]))
        for layer, (q, _, _), out in zip(self.layers, given, outs, strict=True):
            terms = layer.terms
            scores = Scores(
                SCALE,
                window_left=-1 if terms.sliding_window is None else terms.sliding_window - 1,
                cap=terms.logits_soft_cap or 0.0,
                slopes=None if terms.alibi_slopes is None else np.array(terms.alibi_slopes),
                sinks=None if terms.sinks is None else terms.sinks.double().cpu().numpy(),
                chunk=self.mask.chunk,
                causal=not self.is_open,
                spans=self.images.get(row, ()),
                spans_pass=self.mask.spans_pass_window,
            )
            k, v = (np.concatenate(side) for side in zip(*layer.stored[row], strict=True))
            want, _ = attention(q[tokens].double().cpu().numpy(), k, v, scores)
            found = out[tokens].double().cpu().numpy()
            near = TOLERANCES[self.dtype]
            assert np.allclose(found, want, atol=near, rtol=near), f"{layer.name}, request {row}"

    def evict(self, row: int, group: int, blocks: int) -> None:
        """Frees a request's first blocks of a group, which its window has passed."""
        request = self.requests[row]
        for index in range(blocks):
            block = request.blocks[group][index]
            for layer in self.layers:
                if layer.group == group and block:
                    layer.kv_cache[block] = NAN
            request.blocks[group][index] = 0

    def capture(self, num_reqs: int, num_tokens: int, max_query_len: int) -> Graph:
        return Graph(self, num_reqs, num_tokens, max_query_len)


class Graph:
    """One of vLLM's full graphs: build_for_cudagraph_capture, a warm-up, the capture; then build and replay."""

    def __init__(self, runner: Runner, num_reqs: int, num_tokens: int, max_query_len: int) -> None:
        self.runner, self.num_reqs, self.num_tokens = runner, num_reqs, num_tokens
        self.given = [runner.projected(0, num_tokens) for _ in runner.layers]
        self.outs = [runner.unwritten(num_tokens) for _ in runner.layers]
        # vLLM's dummy batch: tokens spread over requests without blocks, and no slots.
        for table, slots in zip(runner.tables, runner.slots, strict=True):
            table.zero_()
            slots.fill_(-1)
        runner.seq_lens[:num_reqs] = max_query_len
        runner.query_start_loc[: num_reqs + 1] = torch.linspace(0, num_tokens, num_reqs + 1).int()
        commons = [runner.common(group, num_reqs, num_tokens, max_query_len) for group in range(len(runner.tables))]
        steps = [group.begin_capture(common) for group, common in zip(runner.groups, commons, strict=True)]
        self.recording, _ = recorder_for(runner.device).record(lambda: runner.forward(steps, self.given, self.outs))

    def run(self, new: Sequence[int], corrupt: Callable[[Runner], None] = unchanged) -> None:
        self.run_unseen(new, corrupt)
        self.runner.compare(new, self.given, self.outs)

    def run_unseen(self, new: Sequence[int], corrupt: Callable[[Runner], None] = unchanged) -> None:
        runner, total = self.runner, sum(new)
        runner.prepare(new, self.num_reqs, self.num_tokens)
        corrupt(runner)
        for index, group in enumerate(runner.groups):
            group.begin(runner.common(index, self.num_reqs, self.num_tokens, max(new)))
        for mine in self.given:
            for to, values in zip(mine, runner.projected(total, self.num_tokens), strict=True):
                to.copy_(values)
        self.recording.replay()
        runner.keep(new, self.given)
