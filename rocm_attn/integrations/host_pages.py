"""HostPages: offloads KV pages of a runtime to host memory, and loads them back only if they are unchanged.

A prefix cache evicts pages when they run out. Here they go to host memory first (pinned memory, if the runtime is on a
GPU), each as a record (rocm_attn/paging/host_record.py). A record that comes back must have the key of the wanted
tokens, the identity of this runtime, and the checksum of the page that has arrived in the pool. Otherwise the page
counts as missing, metrics count a refusal, and a line is logged. So damaged host memory costs time, but never gives
wrong results.

All copies are launched on the current stream, next to the steps. restore() waits for the device once.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rocm_attn.batch.step_batch import Int32Array, as_int32, has_repeats
from rocm_attn.errors import BadBatch, BadSetting, Unsupported
from rocm_attn.integrations.kv_passport import ALIGNMENT, KVPassport
from rocm_attn.integrations.kv_transfer import ScaleValues
from rocm_attn.integrations.owners import idle
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.moved_rows import word_dtype
from rocm_attn.machine.devices import on_device
from rocm_attn.machine.sending import sent
from rocm_attn.machine.settings import require_kind
from rocm_attn.paging.host_memory import HostMemory
from rocm_attn.paging.host_record import CHECKSUM, HEAD_WORDS, NAME_WORDS, checksums
from rocm_attn.paging.index_spaces import RESERVED_PAGE, Space
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.metrics import Metrics

NAME_BYTES = NAME_WORDS * torch.int64.itemsize
_HEAD_BYTES = HEAD_WORDS * torch.int64.itemsize
# Records that lie on the device at a time. The checksum takes four times as much memory.
_STAGED_BYTES = 16 << 20
CHANGED, OTHER = "changed", "other"
_WHY = {
    CHANGED: "its bytes are not those of the page that left the device",
    OTHER: "it holds other tokens, or pages of another model, format or scale",
}


class HostPages:
    """Offloads KV pages of a runtime to host memory, and loads them back into pages of its rows.

    runtime: all its layers have their pages in the full space, and none has a recurrent state
    memory:  a HostMemory with records of record_bytes(runtime)
    model:   identifies the K and V of given tokens, in addition to the passport: name of the weights, rank
    metrics: counts hits, bytes and refusals
    least:   returns the smallest of all ranks' numbers, so that all of them use the same pages

    Raises Unsupported for pages that cannot move alone, BadSetting for memory with records of another size, and
    for arguments of another kind.
    """

    def __init__(
        self,
        runtime: AttentionRuntime,
        memory: HostMemory,
        *,
        model: str,
        metrics: Metrics,
        least: Callable[[int], int] = int,
    ) -> None:
        require_kind("memory", memory, HostMemory, BadSetting)
        require_kind("model", model, str, BadSetting)
        self._runtime, self._memory, self._metrics, self._least = runtime, memory, metrics, least
        self._model = model
        self.device = runtime.device
        self._alone = threading.RLock()  # calls of several threads would mix their staged records
        if memory.record_bytes != self.record_bytes(runtime):
            raise BadSetting(
                f"the memory has records of {memory.record_bytes} bytes, and this runtime's have "
                f"{self.record_bytes(runtime)}; give it memory of its own"
            )
        self._lines = _lines(runtime)
        self._places = [_HEAD_BYTES + place for place in _places(runtime)[:-1]]
        count = max(1, _STAGED_BYTES // memory.record_bytes)
        with torch.inference_mode(False):
            self._staged = torch.empty(count, memory.record_bytes, dtype=torch.uint8, device=self.device)
        self._scales = [ScaleValues(pages) for pages in self._pages_of_layers()]
        self._identity = self._name()

    @staticmethod
    def record_bytes(runtime: AttentionRuntime) -> int:
        """Bytes of one record: a page in all layers. Raises Unsupported for pages that cannot move alone."""
        _require_pages_that_move_alone(runtime)
        return _HEAD_BYTES + _places(runtime)[-1]

    def found(self, key: bytes) -> bool:
        """True if a key has a record, which then counts as just used. Only restore() checks its content."""
        if key not in self._memory:
            return False
        self._memory.use(key)
        return True

    def put(self, keys: Sequence[bytes], pages: Int32Array) -> None:
        """Copies pages to host memory; the last ones are evicted last. It does not wait for the device.

        keys:  NAME_BYTES each: a hash of the page's tokens and all tokens before them
        pages: int32 [n], ids of full pages in the full space, whose K and V are known to be right. Later launches may
               overwrite these pages
        Raises BadBatch for other keys or pages.
        """
        pages, identity = self._checked(keys, pages), self._identity_now()
        with self._alone, on_device(self.device), torch.inference_mode():
            for some, page, records in self._in_turn(keys, pages):
                head = records[:, :_HEAD_BYTES].view(torch.int64)
                head[:, :CHECKSUM] = sent(_words([key + identity for key in some]), self.device)
                head[:, CHECKSUM] = self._checksums(page)
                self._gather(page, records)
                for key, record in zip(some, records, strict=True):
                    self._memory.take(key).copy_(record, non_blocking=True)
        self._metrics.host_kv_bytes = self._memory.num_bytes

    def restore(self, keys: Sequence[bytes], pages: Int32Array) -> int:
        """Loads records into pages; returns how many of the first pages are right. Waits for the device.

        The other pages have no valid content. Records that were loaded or refused are removed from host memory.

        keys, pages: as in put(); one row alone has these pages
        Raises WrongState if a step has begun, and BadBatch for other keys or pages.
        """
        pages, identity = self._checked(keys, pages)[: len(keys)], self._identity_now()
        if not self._runtime.table.full.may_be_written(pages):
            raise BadBatch(
                "a page was given that no row has, or more than one, or that is to be copied; give pages of a row from "
                "admit()"
            )
        with (
            self._alone,
            idle(self._runtime, "pages cannot come back from host memory"),
            on_device(self.device),
            torch.inference_mode(),
        ):
            there = next((at for at, key in enumerate(keys) if key not in self._memory), len(keys))
            keys, checks = keys[:there], list[Tensor]()
            for some, page, records in self._in_turn(keys, pages):
                for key, record in zip(some, records, strict=True):
                    record.copy_(self._memory.at(key), non_blocking=True)
                self._scatter(page, records)
                checks.append(self._check(some, identity, records, page))
            passed = torch.cat(checks).tolist() if checks else []
            bad = next((at for at, each in enumerate(passed) if not all(each)), len(passed))
            if bad < len(passed):
                self._refuse(keys[bad], OTHER if not passed[bad][0] else CHANGED)
            right = self._least(bad)
            for key in keys[: right + 1]:
                self._memory.forget(key)
        self._metrics.host_kv_hits += right
        self._metrics.host_kv_bytes = self._memory.num_bytes
        return right

    def clear(self) -> None:
        """Removes all records."""
        self._memory.clear()
        self._metrics.host_kv_bytes = self._memory.num_bytes

    def _checked(self, keys: Sequence[bytes], pages: Int32Array) -> Int32Array:
        """Returns the pages. Raises BadBatch unless each key has one of its own, and page 0 is none."""
        pages, end = as_int32("pages", pages), self._runtime.table.full.pages.num_pages
        require_kind("keys", keys, Sequence, BadBatch)
        for key in keys:
            require_kind("a key", key, bytes, BadBatch)
        if len(keys) > len(pages) or any(len(key) != NAME_BYTES for key in keys):
            raise BadBatch(
                f"{len(keys)} keys of {sorted({len(key) for key in keys})} bytes and {len(pages)} pages were given; "
                f"give a key of {NAME_BYTES} bytes for each page"
            )
        if len(pages) and not RESERVED_PAGE < pages.min() <= pages.max() < end:
            raise BadBatch(f"pages {pages.min()} to {pages.max()} were given; those of requests are 1 to {end - 1}")
        if has_repeats(pages):
            raise BadBatch("a page was given twice, and it holds the tokens of one key; give each key its own page")
        return pages

    def _in_turn(self, keys: Sequence[bytes], pages: Int32Array) -> Iterator[tuple[Sequence[bytes], Tensor, Tensor]]:
        """The keys, the pages on the device, and memory for their records, as many at a time as there is memory for."""
        for first in range(0, len(keys), len(self._staged)):
            some = keys[first : first + len(self._staged)]
            page = sent(pages[first : first + len(some)].astype(np.int64), self.device)
            yield some, page, self._staged[: len(some)]

    def _check(self, keys: Sequence[bytes], identity: bytes, records: Tensor, page: Tensor) -> Tensor:
        """bool [n, 2]: whether each record is the wanted one, and the page that has arrived the one that left."""
        guards, head = self._runtime.guards.host, records[:, :_HEAD_BYTES].view(torch.int64)
        wanted = sent(_words([key + identity for key in keys]), self.device)
        is_wanted = guards.is_wanted(head[:, :CHECKSUM], wanted)
        return torch.stack([is_wanted, guards.is_unchanged(self._checksums(page), head[:, CHECKSUM])], 1)

    def _refuse(self, key: bytes, reason: str) -> None:
        refusals = self._metrics.host_kv_refusals
        refusals[reason] = refusals.get(reason, 0) + 1
        logging.getLogger(__name__).warning(
            "a page in host memory was refused and is computed again: %s (key %s)", _WHY[reason], key.hex()[:16]
        )

    def _gather(self, page: Tensor, records: Tensor) -> None:
        """Copies pages into records."""
        for line, place in zip(self._lines, self._places, strict=True):
            of_line = records[:, place : place + line[0].nbytes].view(line.dtype)
            of_line.copy_(line.index_select(0, page))

    def _scatter(self, page: Tensor, records: Tensor) -> None:
        """Copies records into pages."""
        for line, place in zip(self._lines, self._places, strict=True):
            line.index_copy_(0, page, records[:, place : place + line[0].nbytes].view(line.dtype))

    def _checksums(self, page: Tensor) -> Tensor:
        """int64 [n]: of pages as they lie in the pool."""
        lines = [line.index_select(0, page).view(torch.uint8) for line in self._lines]
        if missing := -sum(line.shape[1] for line in lines) % torch.int64.itemsize:
            lines.append(torch.zeros(len(page), missing, dtype=torch.uint8, device=self.device))
        return checksums(torch.cat(lines, 1).view(torch.int64))

    def _identity_now(self) -> bytes:
        """The name of this runtime's pages, which changes with their scales."""
        scales = [ScaleValues(pages) for pages in self._pages_of_layers()]
        if not all(now.is_like(before) for now, before in zip(scales, self._scales, strict=True)):
            self._scales, self._identity = scales, self._name()
        return self._identity

    def _name(self) -> bytes:
        passport = KVPassport.of(self._runtime).to_json()
        return blake2b(repr((self._model, passport)).encode(), digest_size=NAME_BYTES).digest()

    def _pages_of_layers(self) -> list[LayerPages]:
        pool = self._runtime.pool
        return [pool.layer(layer) for layer in range(len(self._runtime.kinds.problems))]


def _words(names: Sequence[bytes]) -> npt.NDArray[np.int64]:
    """int64 [n, words of a name]"""
    words: npt.NDArray[np.int64] = np.frombuffer(b"".join(names), np.int64).reshape(len(names), -1).copy()
    return words


def _require_pages_that_move_alone(runtime: AttentionRuntime) -> None:
    """Raises Unsupported for pages that are not all that later steps need of their tokens."""
    if not runtime.states.is_empty:
        raise Unsupported(
            "pages of a model with recurrent layers do not move to host memory, because a request can begin only after "
            "pages that are kept with a state; leave host memory out",
            [],
        )
    if [table.space for table in runtime.table.spaces] != [Space.FULL]:
        raise Unsupported(
            "pages of a model whose layers with a window have pages of their own do not move to host memory, because "
            "pages that have left a window are gone; leave host memory out",
            [],
        )


def _lines(runtime: AttentionRuntime) -> list[Tensor]:
    """All that belongs to a page: of each part of each layer, index keys and scales included, [pages, words]."""
    layers = runtime.pool.in_space(Space.FULL).layers
    return [_flat(line) for layer in layers for line in layer.lines]


def _flat(line: Tensor) -> Tensor:
    """The memory of a line's pages, in words as large as possible."""
    count = line[0].numel()
    last = sum((size - 1) * stride for size, stride in zip(line.shape[1:], line.stride()[1:], strict=True))
    assert last == count - 1, "a page's part of a line has no gaps"
    flat = line.as_strided((len(line), count), (line.stride(0), 1))
    return flat.view(word_dtype(flat))


def _places(runtime: AttentionRuntime) -> list[int]:
    """Bytes from the end of a record's head to each line, and to the end of the record."""
    sizes = [-(-line[0].nbytes // ALIGNMENT) * ALIGNMENT for line in _lines(runtime)]
    return [0, *np.cumsum(sizes).tolist()]
