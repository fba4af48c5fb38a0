"""Engines with the conventions of SGLang, vLLM and FlashInfer: each owns pages, tables, lengths, slots and graphs.

An engine keeps its stored rows in NumPy, and compares every row of every step with the reference. Pages start as NaN,
and return to NaN when they are freed, unless a test fills them otherwise; q, k and v of pads are NaN.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rocm_attn.capture.graphs import recorder_for
from rocm_attn.external import Bounds, ExternalAttention, ExternalOptions, LayerSource
from rocm_attn.guards.registry import Guards
from rocm_attn.paging.adopted import CsrSource, Source, TableSource, TableUnit
from rocm_attn.paging.index_spaces import Space
from rocm_attn.problem import Problem
from rocm_attn.step.external_step import ONE_EACH, Boundaries, ExternalStep, NewLengths, OneEach
from rocm_attn.step.protocols import LayerCalls
from tests.amd.integrations.oracle import Array, Scores, attention

Q_HEADS, KV_HEADS, DIM, V_DIM = 4, 2, 16, 24
NUM_REQUESTS, ROOM = 6, 96
SCALE = 0.3
NAN = float("nan")
# Float32 against float64.
TOLERANCE = 2e-5


@dataclass
class Request:
    """A request, as its engine knows it. pages: space -> page of each page_no, 0 if it was freed"""

    row: int
    kv_len: int = 0
    pages: dict[Space, list[int]] = field(default_factory=dict)


@dataclass
class Tensors:
    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]


class StoredRows(dict[tuple[int, int], tuple[Array, Array]]):
    """K and V of every token that was stored, by layer and row; windows: of the layers"""

    def __init__(self, windows: Sequence[int]) -> None:
        super().__init__()
        self.windows = windows

    def add(self, requests: Sequence[Request], new: Sequence[int], given: Tensors) -> None:
        """Records the rows that a step stored, and the new lengths of its requests."""
        for layer in range(len(self.windows)):
            first = 0
            for request, count in zip(requests, new, strict=True):
                nothing = np.zeros((0, KV_HEADS, DIM)), np.zeros((0, KV_HEADS, V_DIM))
                before = self.get((layer, request.row), nothing)
                rows = (side[layer][first : first + count].double().cpu().numpy() for side in (given.k, given.v))
                k, v = (np.concatenate([old[: request.kv_len], fresh]) for old, fresh in zip(before, rows, strict=True))
                self[layer, request.row] = k, v
                first += count
        for request, count in zip(requests, new, strict=True):
            request.kv_len += count

    def compare(self, requests: Sequence[Request], new: Sequence[int], given: Tensors, outs: Sequence[Tensor]) -> None:
        """Checks that every row equals the reference's, and that padded rows are 0."""
        for layer, window in enumerate(self.windows):
            first = 0
            for request, count in zip(requests, new, strict=True):
                q = given.q[layer][first : first + count].double().cpu().numpy()
                want, _ = attention(q, *self[layer, request.row], Scores(SCALE, window_left=window))
                found = outs[layer][first : first + count].double().cpu().numpy()
                assert np.allclose(found, want, atol=TOLERANCE, rtol=TOLERANCE), f"layer {layer}, row {request.row}"
                first += count
            assert (outs[layer][first:] == 0).all(), f"padded rows of layer {layer} are not 0"


def leave_alone(kv_len: Tensor, slots: Tensor) -> None:
    """Changes nothing."""


class Engine(ABC):
    """The common part of all engines.

    windows: of each layer, -1 for none
    copied:  whether its scheduler writes the next step's tables as soon as begin() has run
    """

    null_page = True
    first_page = 1
    page_strides = False

    def __init__(
        self,
        page_size: int,
        windows: Sequence[int] = (-1,),
        *,
        device: torch.device,
        provider: str,
        spaces: Sequence[Space] | None = None,
        guards: Guards | None = None,
        empty: float = NAN,
        copied: bool = False,
        **options: Any,
    ) -> None:
        self.page_size, self.windows, self.device = page_size, tuple(windows), device
        self.spaces = tuple(spaces) if spaces is not None else (Space.FULL,) * len(windows)
        self.random, self.empty = np.random.default_rng(0), empty
        self.num_pages = 1 + NUM_REQUESTS * -(-ROOM // page_size)
        self.free = {
            space: self.random.permutation(np.arange(self.first_page, self.num_pages)).tolist()
            for space in dict.fromkeys(self.spaces)
        }
        self.requests: dict[int, Request] = {}
        self.stored = StoredRows(self.windows)
        self.bounds = Bounds(num_seqs=16, num_tokens=128, kv_len=ROOM, num_pages=self.num_pages)
        with torch.inference_mode(False):  # an engine writes them in any mode
            self.pages = [self.new_pages() for _ in windows]
            self.make_tables()
        problems = [
            Problem(
                Q_HEADS,
                KV_HEADS,
                DIM,
                torch.float32,
                page_size,
                v_head_dim=V_DIM,
                scale=SCALE,
                window_left=window,
            )
            for window in windows
        ]
        self.attention = ExternalAttention(
            [LayerSource(problem, space) for problem, space in zip(problems, self.spaces, strict=True)],
            {space: replace(source, copied=copied) for space, source in self.sources().items()},
            device=device,
            bounds=self.bounds,
            options=ExternalOptions(provider=provider, page_strides=self.page_strides, **options),
            guards=guards,
        )
        for layer, (k, v) in enumerate(self.pages):
            self.attention.pages.bind(layer, k, v)

    @abstractmethod
    def new_pages(self) -> tuple[Tensor, Tensor]:
        """Returns K and V pages of a layer, as [pages, page_size, kv_heads, dim]."""

    @abstractmethod
    def make_tables(self) -> None:
        """Allocates the tables that sources() names."""

    @abstractmethod
    def sources(self) -> Mapping[Space, Source]:
        """Returns the tables, as steps read them in place."""

    @abstractmethod
    def put_pages(self, request: Request) -> None:
        """Writes a request's pages to the tables."""

    @abstractmethod
    def slots_of(self, requests: Sequence[Request], new: Sequence[int]) -> list[int] | None:
        """Returns the slot of each new token, or None if steps give none."""

    @abstractmethod
    def start_step(self, requests: Sequence[Request], new: Sequence[int]) -> None:
        """Prepares a step, in addition to put_pages()."""

    def admit(self) -> Request:
        """Adds a request without tokens, in a row of its own."""
        row = next(row for row in itertools.count(1) if row not in self.requests)
        request = self.requests[row] = Request(row, pages={space: [] for space in self.free})
        return request

    def begun(self, *new: int) -> list[Request]:
        """Adds a request for each number of new tokens, and gives them these tokens in one step, which is compared."""
        requests = [self.admit() for _ in new]
        self.run(requests, new)
        return requests

    def free_request(self, request: Request) -> None:
        """Frees the request's pages, and clears their contents."""
        for space in self.free:
            self._give_back(request, space, len(request.pages[space]))
            request.pages[space].clear()
        del self.requests[request.row]
        for layer in range(len(self.windows)):
            self.stored.pop((layer, request.row), None)

    def reserve(self, request: Request, kv_len: int) -> None:
        for space, pages in request.pages.items():
            while len(pages) * self.page_size < kv_len:
                pages.append(self.free[space].pop())
        self.put_pages(request)

    def _give_back(self, request: Request, space: Space, first: int) -> None:
        """Frees the pages before page_no `first`. They are NaN until another request takes them."""
        pages = request.pages[space]
        for page_no in range(min(first, len(pages))):
            page = pages[page_no]
            if page or not self.null_page:
                for layer, its in enumerate(self.spaces):
                    if its == space:
                        for side in self.pages[layer]:
                            side[page] = self.empty
                self.free[space].insert(0, page)
                pages[page_no] = 0

    def evict(self, request: Request, kept: int) -> None:
        """Frees the pages before the token `kept`, in spaces of layers with a window."""
        for space in self.free:
            if all(window >= 0 for window, its in zip(self.windows, self.spaces, strict=True) if its == space):
                self._give_back(request, space, kept // self.page_size)
        self.put_pages(request)

    def tensors(self, num_tokens: int, padded: int) -> Tensors:
        """Returns new q, k and v for each layer; NaN in padded rows."""

        def rows(heads: int, dim: int) -> Tensor:
            values = torch.from_numpy(self.random.standard_normal((padded, heads, dim))).float()
            values[num_tokens:] = NAN
            return values.to(self.device)

        layers = range(len(self.windows))
        return Tensors(
            [rows(Q_HEADS, DIM) for _ in layers],
            [rows(KV_HEADS, DIM) for _ in layers],
            [rows(KV_HEADS, V_DIM) for _ in layers],
        )

    def ints(self, values: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(list(values), dtype=dtype, device=self.device)

    def lengths(
        self, requests: Sequence[Request], new: Sequence[int], padded: int
    ) -> tuple[int, Tensor, OneEach | NewLengths | Boundaries, Tensor | None]:
        """Returns num_seqs, kv_len, q and rows in the engine's form, with its own pads."""
        kv_len = [request.kv_len + q for request, q in zip(requests, new, strict=True)]
        rows = [request.row for request in requests]
        return (
            len(requests),
            self.ints(kv_len, torch.int64),
            self._new_tokens(new, padded),
            self.ints(rows, torch.int64),
        )

    def _new_tokens(self, new: Sequence[int], padded: int) -> OneEach | NewLengths | Boundaries:
        return ONE_EACH if set(new) == {1} else NewLengths(self.ints(new))

    def slot_tensor(self, slots: Sequence[int], padded: int) -> Tensor:
        """Returns slots, with the engine's own value for pads."""
        return self.ints([*slots, *[0] * (padded - len(slots))], torch.int64)

    def run(
        self,
        requests: Sequence[Request],
        new: Sequence[int],
        *,
        pads: int = 0,
        corrupt: Callable[[Tensor, Tensor], None] = leave_alone,
    ) -> None:
        """Runs an eager step with `pads` padding sequences and tokens, and compares it with the reference."""
        self.stored.compare(requests, new, *self.run_unseen(requests, new, pads=pads, corrupt=corrupt))

    def run_unseen(
        self,
        requests: Sequence[Request],
        new: Sequence[int],
        *,
        pads: int = 0,
        corrupt: Callable[[Tensor, Tensor], None] = leave_alone,
    ) -> tuple[Tensors, list[Tensor]]:
        """Like run(), but without checks of the results. corrupt: gets the step's lengths and slots before it"""
        for request, count in zip(requests, new, strict=True):
            self.reserve(request, request.kv_len + count)
        self.start_step(requests, new)
        total = sum(new)
        num_seqs, kv_len, q, rows = self.lengths(requests, new, len(requests) + pads)
        decodes = isinstance(q, OneEach)
        step = ExternalStep(
            num_seqs,
            len(requests) + pads,
            len(requests) + pads if decodes else total + pads,
            kv_len,
            q,
            rows,
            min_q_len=1 if decodes else 0,
            max_q_len=max(new),
            max_kv_len=max(request.kv_len + count for request, count in zip(requests, new, strict=True)),
        )
        given = self.tensors(total, step.padded_tokens)
        listed = self.slots_of(requests, new)
        slots = None if listed is None else self.slot_tensor(listed, step.padded_tokens)
        corrupt(kv_len, kv_len if slots is None else slots)
        self.attention.begin(step)
        self.attention.fill(slots)
        outs = self.forward(given)
        self.stored.add(requests, new, given)
        return given, outs

    def calls(self) -> LayerCalls:
        """Returns the object that its model calls."""
        return self.attention.layers

    def forward(self, given: Tensors) -> list[Tensor]:
        outs = []
        for layer in range(len(self.windows)):
            out = torch.full_like(given.q[layer][:, :, :1].expand(-1, -1, V_DIM), 7.0)
            self.calls().store(layer, given.k[layer], given.v[layer])
            self.calls().attend(layer, given.q[layer], out)
            outs.append(out)
        return outs

    def capture(self, bucket: int, width: int = 1) -> Replay:
        """Captures a graph of steps of up to `bucket` sequences with `width` new tokens each, in buffers of its own."""
        return Replay(self, bucket, width)


class Replay:
    """The engine's graph at one bucket, and the buffers that it reads."""

    def __init__(self, engine: Engine, bucket: int, width: int) -> None:
        self.engine, self.bucket, self.width = engine, bucket, width
        num_tokens = bucket * width
        self.given = engine.tensors(0, num_tokens)
        num_seqs, self.kv_len, self.q, self.rows = self._lengths([], [])
        self.slots = engine.slot_tensor([], num_tokens)
        self.has_slots = engine.slots_of([], []) is not None
        engine.attention.begin(self._step(num_seqs))

        def body() -> list[Tensor]:
            engine.attention.fill(self.slots if self.has_slots else None)
            return engine.forward(self.given)

        self.recording, self.outs = recorder_for(engine.device).record(body)

    def _lengths(
        self, requests: Sequence[Request], new: Sequence[int]
    ) -> tuple[int, Tensor, OneEach | NewLengths | Boundaries, Tensor | None]:
        num_seqs, kv_len, q, rows = self.engine.lengths(requests, new, self.bucket)

        def padded(values: Tensor, size: int, fill: int) -> Tensor:
            return torch.cat([values, values.new_full((size - len(values),), fill)])

        if isinstance(q, NewLengths):
            q = NewLengths(padded(q.of_seq, self.bucket, self.width))
        elif isinstance(q, Boundaries):
            q = Boundaries(padded(q.of_seq, self.bucket + 1, int(q.of_seq[-1])))
        pad_kv_len = 1 if num_seqs == len(requests) else 0
        return (
            num_seqs,
            padded(kv_len, self.bucket, pad_kv_len),
            q if self.width > 1 else ONE_EACH,
            None if rows is None else padded(rows, self.bucket, 0),
        )

    def _step(self, num_seqs: int) -> ExternalStep:
        return ExternalStep(
            num_seqs,
            self.bucket,
            self.bucket * self.width,
            self.kv_len,
            self.q,
            self.rows,
            min_q_len=self.width,
            max_q_len=self.width,
            max_kv_len=1,  # ignored: the graph serves any length
            captured=True,
        )

    def run(self, requests: Sequence[Request]) -> None:
        """Replays the graph for these requests, and compares with the reference."""
        engine, new = self.engine, [self.width] * len(requests)
        for request in requests:
            engine.reserve(request, request.kv_len + self.width)
        engine.start_step(requests, new)
        num_seqs, kv_len, q, rows = self._lengths(requests, new)
        self.kv_len.copy_(kv_len)
        if not isinstance(q, OneEach) and not isinstance(self.q, OneEach):
            self.q.of_seq.copy_(q.of_seq)
        if rows is not None and self.rows is not None:
            self.rows.copy_(rows)
        slots = engine.slots_of(requests, new)
        if slots is not None:
            self.slots.copy_(engine.slot_tensor(slots, len(self.slots)))
        fresh = engine.tensors(len(requests) * self.width, self.bucket * self.width)
        for mine, theirs in ((self.given.q, fresh.q), (self.given.k, fresh.k), (self.given.v, fresh.v)):
            for to, values in zip(mine, theirs, strict=True):
                to.copy_(values)
        engine.attention.begin(self._step(num_seqs))
        self.recording.replay()
        engine.stored.add(requests, new, fresh)
        engine.stored.compare(requests, new, fresh, self.outs)


class SGLang(Engine):
    """An engine with a table of slots, whose row 0 is reserved.

    Layers with a window have a pool of their own, reached by a map. Pads go to slot 0.
    """

    def new_pages(self) -> tuple[Tensor, Tensor]:
        k, v = (
            torch.full((self.num_pages * self.page_size, KV_HEADS, dim), self.empty, device=self.device)
            for dim in (DIM, V_DIM)
        )
        return k.view(-1, self.page_size, KV_HEADS, DIM), v.view(-1, self.page_size, KV_HEADS, V_DIM)

    def make_tables(self) -> None:
        self.req_to_token = torch.zeros(NUM_REQUESTS + 1, ROOM, dtype=torch.int32, device=self.device)
        # An index of -1 would read the last entry.
        self.to_swa = torch.zeros(self.num_pages * self.page_size + 1, dtype=torch.int64, device=self.device)
        self.to_swa[-1] = -1

    def sources(self) -> Mapping[Space, Source]:
        maps = {Space.FULL: None, Space.SWA: self.to_swa}
        return {
            space: TableSource(self.req_to_token, TableUnit.SLOT, maps[space]) for space in dict.fromkeys(self.spaces)
        }

    def put_pages(self, request: Request) -> None:
        size = self.page_size
        for page_no, page in enumerate(request.pages[Space.FULL]):
            here = slice(page_no * size, min((page_no + 1) * size, ROOM))
            self.req_to_token[request.row, here] = torch.arange(page * size, page * size + here.stop - here.start)
            if Space.SWA in request.pages:
                swa = request.pages[Space.SWA][page_no]
                self.to_swa[page * size : (page + 1) * size] = torch.arange(swa * size, (swa + 1) * size) if swa else 0

    def slots_of(self, requests: Sequence[Request], new: Sequence[int]) -> list[int] | None:
        return [
            slot
            for request, count in zip(requests, new, strict=True)
            for slot in self.req_to_token[request.row, request.kv_len : request.kv_len + count].tolist()
        ]

    def start_step(self, requests: Sequence[Request], new: Sequence[int]) -> None:
        """Does nothing: rows are those of the requests."""


class VLLM(Engine):
    """An engine with a block table per KV cache group, in the batch's order.

    K and V are packed in a page. Pads have no KV and slot -1.
    """

    page_strides = True

    def new_pages(self) -> tuple[Tensor, Tensor]:
        packed = torch.full((self.num_pages, KV_HEADS, self.page_size, DIM + V_DIM), self.empty, device=self.device)
        kv = packed.transpose(1, 2)
        return kv[..., :DIM], kv[..., DIM:]

    def make_tables(self) -> None:
        width = -(-ROOM // self.page_size)
        self.block_tables = {
            space: torch.zeros(self.bounds.num_seqs, width, dtype=torch.int32, device=self.device)
            for space in dict.fromkeys(self.spaces)
        }

    def sources(self) -> Mapping[Space, Source]:
        return {space: TableSource(table) for space, table in self.block_tables.items()}

    def put_pages(self, request: Request) -> None:
        """Does nothing: rows are those of the batch."""

    def start_step(self, requests: Sequence[Request], new: Sequence[int]) -> None:
        for space, table in self.block_tables.items():
            for row, request in enumerate(requests):
                table[row, : len(request.pages[space])] = self.ints(request.pages[space])

    def lengths(
        self, requests: Sequence[Request], new: Sequence[int], padded: int
    ) -> tuple[int, Tensor, OneEach | NewLengths | Boundaries, Tensor | None]:
        kv_len = [request.kv_len + q for request, q in zip(requests, new, strict=True)] + [0] * (padded - len(requests))
        return padded, self.ints(kv_len), self._new_tokens(new, padded), None

    def _new_tokens(self, new: Sequence[int], padded: int) -> OneEach | NewLengths | Boundaries:
        ends = [*itertools.accumulate(new, initial=0)]
        return ONE_EACH if set(new) == {1} else Boundaries(self.ints(ends + [ends[-1]] * (padded - len(new))))

    def slots_of(self, requests: Sequence[Request], new: Sequence[int]) -> list[int] | None:
        if len(self.block_tables) > 1:
            return None  # each group would have slots of its own
        (space,) = self.block_tables
        return [
            request.pages[space][at // self.page_size] * self.page_size + at % self.page_size
            for request, count in zip(requests, new, strict=True)
            for at in range(request.kv_len, request.kv_len + count)
        ]

    def slot_tensor(self, slots: Sequence[int], padded: int) -> Tensor:
        return self.ints([*slots, *[-1] * (padded - len(slots))], torch.int64)


class FlashInfer(Engine):
    """An engine with lists of pages, in which page 0 is a normal page. K and V are next to each other in a page."""

    null_page = False
    first_page = 0
    page_strides = True

    def new_pages(self) -> tuple[Tensor, Tensor]:
        kv = torch.full((self.num_pages, 2, self.page_size, KV_HEADS, V_DIM), self.empty, device=self.device)
        return kv[:, 0, :, :, :DIM], kv[:, 1]

    def make_tables(self) -> None:
        self.indptr = torch.zeros(self.bounds.num_seqs + 1, dtype=torch.int32, device=self.device)
        self.indices = torch.zeros(NUM_REQUESTS * -(-ROOM // self.page_size) + 1, dtype=torch.int32, device=self.device)

    def sources(self) -> Mapping[Space, Source]:
        return {Space.FULL: CsrSource(self.indptr, self.indices)}

    def put_pages(self, request: Request) -> None:
        """Does nothing: rows are those of the batch."""

    def start_step(self, requests: Sequence[Request], new: Sequence[int]) -> None:
        ends = [*itertools.accumulate((len(request.pages[Space.FULL]) for request in requests), initial=0)]
        self.indptr[: len(ends)] = self.ints(ends)
        self.indptr[len(ends) :] = ends[-1]
        pages = [page for request in requests for page in request.pages[Space.FULL]]
        self.indices[: len(pages)] = self.ints(pages)

    def lengths(
        self, requests: Sequence[Request], new: Sequence[int], padded: int
    ) -> tuple[int, Tensor, OneEach | NewLengths | Boundaries, Tensor | None]:
        num_seqs, kv_len, q, _ = super().lengths(requests, new, padded)
        return num_seqs, kv_len.int(), q, None

    def _new_tokens(self, new: Sequence[int], padded: int) -> OneEach | NewLengths | Boundaries:
        return ONE_EACH if set(new) == {1} else Boundaries(self.ints([*itertools.accumulate(new, initial=0)]))

    def slots_of(self, requests: Sequence[Request], new: Sequence[int]) -> list[int] | None:
        return None


MakeEngine = Callable[..., Engine]
ENGINES: Mapping[str, MakeEngine] = {"sglang": SGLang, "vllm": VLLM, "flashinfer": FlashInfer}
