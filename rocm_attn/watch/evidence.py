"""EvidenceFile: the inputs, the code objects and the results of a layer that was found wrong, in one file.

`rocm-attn replay-step FILE --simulate` runs the code on the inputs, and says where the fault is. The file holds K and V
of the step's sequences: it is as secret as their text. Reading one runs nothing of it.
"""

from __future__ import annotations

import hashlib
import logging
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.errors import BadSetting
from rocm_attn.machine.whole_files import require_place, whole_file
from rocm_attn.oracle.numerics import Bound
from rocm_attn.problem import UNLIMITED_WINDOW, Problem
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.protocols import Evidence, WrongLayer
from rocm_attn.watch.few_sequences import MOST_TOKENS, AllowedOutputs, LayerOfStep

if TYPE_CHECKING:
    from rocm_attn.kernels.noted_launches import NotedLaunch

_FORMAT = 1
# Other files, and damaged ones, raise these.
_NO_EVIDENCE = (
    OSError,
    RuntimeError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    EOFError,
    UnpicklingError,
    zipfile.BadZipFile,
)
# A pool of more bytes is not kept whole, but by the pages of the step's sequences.
WHOLE_BYTES = 64 << 20
# A step whose pages have more bytes is not kept.
_MOST_BYTES = 4 << 30


def layer_of_step(runtime: AttentionRuntime, layer: int, problem: Problem, batch: StepBatch) -> LayerOfStep:
    """A layer of a runtime's own step, whose lengths and rows the host knows."""
    device = runtime.device
    table, space = runtime.table, runtime.pool.space_of_layer(layer)
    kind = runtime.core.kinds.of_layer[layer]
    return LayerOfStep(
        problem,
        runtime.pool.layer(layer),
        runtime.head_weights.of(layer),
        batch.q_len.tolist(),
        batch.kv_len.tolist(),
        lambda seq: torch.tensor(table.pages_of(int(batch.rows[seq]), space).tolist(), device=device),
        UNLIMITED_WINDOW,
        runtime.selections[kind].eight_bit_products,
    )


class EvidenceFile(Evidence):
    """Writes the evidence of the first layer that was found wrong since its process began.

    path: the file; one of an earlier process is replaced

    Raises BadSetting for a place where no file can be written, so that this is not found out at a fault.
    """

    def __init__(self, runtime: AttentionRuntime, path: Path | str) -> None:
        self.path = Path(path)
        require_place(self.path, "evidence")
        self._runtime = runtime
        self._is_kept = False

    def keep(self, wrong: WrongLayer) -> None:
        """Does the same as `Evidence.keep`. A reason for keeping nothing goes to the log."""
        if self._is_kept:
            return
        try:
            self._write(self._content(wrong))
        except (OSError, ValueError, ImportError, torch.OutOfMemoryError) as reason:
            _log().warning("no evidence of layer %d is kept: %s", wrong.layer, reason)
            return
        self._is_kept = True
        _log().warning("evidence is in %s; see rocm-attn replay-step --simulate", self.path)

    def _write(self, content: dict[str, Any]) -> None:
        """Writes the file, whole or not at all. Raises OSError."""
        try:
            with whole_file(self.path) as part:
                torch.save(content, part)
        except RuntimeError as error:  # of torch's writer, which raises no OSError if the disk is full
            raise OSError(f"{self.path} could not be written: {error}") from error

    def _content(self, wrong: WrongLayer) -> dict[str, Any]:
        # Kernels without Triton have no code to keep; the module imports Triton.
        from rocm_attn.kernels.noted_launches import NotedLaunches

        num_pages = len(self._runtime.pool.layer(wrong.layer).raw_k)
        noted = NotedLaunches(lambda tensor: tensor.shape[:1] == (num_pages,) and _storage_bytes(tensor) > WHOLE_BYTES)
        again = wrong.again(noted.noting)
        if again is None or not noted.launches:
            raise ValueError("its attention is launched by something else than Triton")
        # Pads may hold NaN, which equals nothing.
        if not torch.equal(again.q.nan_to_num(), wrong.found.q.nan_to_num()):
            raise ValueError("its queries were others when the step ran again")
        batch = wrong.batch
        of_step = layer_of_step(self._runtime, wrong.layer, wrong.problem, batch)
        held = torch.cat([of_step.pages_of(seq) for seq in range(batch.num_seqs)])
        memory = _Memory(held)
        launches = [_launch(each, memory) for each in noted.launches]
        ends = np.cumsum(of_step.q_len).tolist()
        news = {seq: min(of_step.q_len[seq], MOST_TOKENS) for seq in wrong.seqs}
        right = [
            {
                "tokens": [ends[seq] - new, ends[seq]],
                "allowed": [_allowed(each) for each in of_step.allowed(again.q, seq, ends[seq], new)],
            }
            for seq, new in news.items()
        ]
        return {
            "format": _FORMAT,
            "finding": wrong.finding,
            "layer": wrong.layer,
            "launches": launches,
            "out": memory.place_of(again.place),
            "storages": memory.storages,
            "rows": memory.rows,
            "recorded": wrong.found.out.cpu(),
            "again": again.out.cpu(),
            "right": right,
        }


class _Memory:
    """The storages that launches were given, as values that torch.save writes.

    pages:     of the step's sequences; of large pools those alone are kept, the others are zero
    storages:  by number
    rows:      these lines
    """

    def __init__(self, pages: Tensor) -> None:
        self._pages = pages
        self._numbers: dict[int, int] = {}
        self._has_rows: set[tuple[int, ...]] = set()
        self.storages: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []

    def add(self, name: str, tensor: Tensor, before: Mapping[int, Tensor]) -> dict[str, Any]:
        """Keeps the memory of an argument once, as it was before the first launch, and returns its place.

        Raises ValueError if its pages are too many.
        """
        address = tensor.untyped_storage().data_ptr()
        content = before.get(address)
        if address not in self._numbers:
            self._numbers[address] = len(self.storages)
            self.storages.append(
                {"num_bytes": _storage_bytes(tensor), "content": None if content is None else content.cpu()}
            )
        place = self.place_of(tensor)
        if content is None and (tensor.data_ptr(), *tensor.stride()) not in self._has_rows:
            if tensor[0].nbytes * len(self._pages) > _MOST_BYTES:
                raise ValueError(f"{name} has more than {_MOST_BYTES} bytes in the step's {len(self._pages)} pages")
            self._has_rows.add((tensor.data_ptr(), *tensor.stride()))
            self.rows.append({"place": place, "pages": self._pages.cpu(), "content": tensor[self._pages].cpu()})
        return place

    def place_of(self, tensor: Tensor) -> dict[str, Any]:
        """Where a tensor lies in the storages. Raises ValueError if it lies in none of them."""
        number = self._numbers.get(tensor.untyped_storage().data_ptr())
        if number is None:
            raise ValueError("no launch was given the memory of its output")
        return {
            "storage": number,
            "offset": tensor.storage_offset(),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
        }


def _storage_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _launch(launch: NotedLaunch, memory: _Memory) -> dict[str, Any]:
    from rocm_attn.kernels.noted_launches import name_of

    compiled, metadata = launch.compiled, launch.compiled.metadata
    if "hsaco" not in compiled.asm:
        raise ValueError(f"{metadata.name} is not compiled for a GPU that is simulated")
    return {
        "kernel": name_of(launch.kernel),
        "name": metadata.name,
        "arch": metadata.target.arch,
        "num_waves": metadata.num_warps,
        "lds_bytes": metadata.shared,
        "assembly": compiled.asm["amdgcn"],
        "code": torch.frombuffer(bytearray(compiled.asm["hsaco"]), dtype=torch.uint8),
        "grid": list(launch.grid),
        "types": {name: str(kind) for name, kind in compiled.src.signature.items()},
        "arguments": {name: _argument(name, value, launch, memory) for name, value in launch.arguments.items()},
        "options": {name: value for name, value in launch.options.items() if isinstance(value, bool | int | str)},
    }


def _argument(name: str, value: Any, launch: NotedLaunch, memory: _Memory) -> dict[str, Any]:
    """The place of a tensor, a plain value, or the type of a value that cannot be written down."""
    from rocm_attn.kernels.noted_launches import as_plain

    if isinstance(value, Tensor):
        return {"place": memory.add(name, value, launch.memory)}
    try:
        return {"plain": as_plain(value)}
    except ValueError:
        return {"unknown": type(value).__name__}


def _allowed(allowed: AllowedOutputs) -> dict[str, Any]:
    bound = allowed.bound
    return {"want": allowed.want.cpu(), "atol": bound.atol, "rtol": bound.rtol, "size": allowed.size}


def _log() -> logging.Logger:
    return logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies: in a storage, from an element on."""

    storage: int
    offset: int
    dtype: str
    shape: list[int]
    stride: list[int]

    def within(self, storages: Sequence[Tensor]) -> Tensor:
        """The tensor. storages: uint8 [n] each"""
        typed = storages[self.storage].view(getattr(torch, self.dtype))
        return typed.as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True, slots=True, eq=False)
class RecordedLaunch:
    """A launch of a file.

    kernel:    "module:name" of the jitted function
    code:      the code object; assembly: the text that the compiler made it from
    types:     Triton's types of the arguments, in order
    arguments: by name, each with a place, a plain value, or the type of an unknown one
    """

    kernel: str
    name: str
    arch: str
    num_waves: int
    lds_bytes: int
    assembly: str
    code: bytes
    grid: tuple[int, int, int]
    types: Mapping[str, str]
    arguments: Mapping[str, Mapping[str, Any]]
    options: Mapping[str, Any]

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.code).hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class StepEvidence:
    """The contents of a file.

    recorded: the output that was found wrong; again: that of the second run, whose inputs these are
    out:      where the launches write it
    """

    finding: str
    layer: int
    launches: Sequence[RecordedLaunch]
    out: Place
    recorded: Tensor
    again: Tensor
    _storages: Sequence[Mapping[str, Any]] = field(repr=False)
    _rows: Sequence[Mapping[str, Any]] = field(repr=False)
    _right: Sequence[Mapping[str, Any]] = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> StepEvidence:
        """Reads a file. Raises BadSetting if it holds no evidence, or is damaged."""
        try:
            with zipfile.ZipFile(path) as file:  # torch compares no checksum, and takes other bytes for a pickle
                if changed := file.testzip():
                    raise BadSetting(f"{path} is damaged: the bytes of {changed} have changed; copy the file again")
            content = torch.load(path, weights_only=True)
            if content["format"] != _FORMAT:
                raise BadSetting(f"{path} has format {content['format']}; this version reads format {_FORMAT}")
            launches = [
                RecordedLaunch(**{**each, "code": each["code"].numpy().tobytes(), "grid": tuple(each["grid"])})
                for each in content["launches"]
            ]
            return cls(
                content["finding"],
                content["layer"],
                launches,
                Place(**content["out"]),
                content["recorded"],
                content["again"],
                content["storages"],
                content["rows"],
                content["right"],
            )
        except _NO_EVIDENCE as error:
            if isinstance(error, BadSetting):
                raise
            # torch adds advice, in several lines
            reason = str(error).partition("\n")[0].partition(". ")[0]
            raise BadSetting(
                f"{path} holds no evidence of a step ({reason}); give a file that --evidence has written"
            ) from error

    def storages(self) -> list[Tensor]:
        """A new copy of the memory before the first launch, uint8 [n] each; zeros take no memory."""
        made = [
            torch.from_numpy(np.zeros(each["num_bytes"], np.uint8))
            if each["content"] is None
            else each["content"].clone()
            for each in self._storages
        ]
        for row in self._rows:
            Place(**row["place"]).within(made)[row["pages"]] = row["content"]
        return made

    def compared(self, out: Tensor) -> Tensor:
        """The rows of an output that were compared with the reference."""
        return torch.cat([out[slice(*each["tokens"])] for each in self._right])

    def is_right(self, out: Tensor) -> bool:
        """True if an output agrees with the reference where this was compared."""
        return self.error(out) <= 1

    def error(self, out: Tensor) -> float:
        """The largest error of an output, relative to its bound, where it was compared; inf for NaN."""
        return max(
            min(allowed.error(out[slice(*each["tokens"])]) for allowed in self._allowed_in(each))
            for each in self._right
        )

    @staticmethod
    def _allowed_in(right: Mapping[str, Any]) -> Iterator[AllowedOutputs]:
        for given in right["allowed"]:
            yield AllowedOutputs(given["want"], Bound(given["atol"], given["rtol"]), given["size"])
