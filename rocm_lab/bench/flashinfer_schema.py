"""Reads and writes the files of flashinfer-bench: definitions, workloads, solutions and traces.

The schema is public (FlashInfer Trace). A Definition describes a computation, a Workload its sizes and inputs, a
Solution its source, and a Trace the result. Unknown fields are kept unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rocm_attn.errors import BadSetting

T = TypeVar("T")
Json = Mapping[str, Any]

STATUSES = (
    "PASSED",
    "INCORRECT_SHAPE",
    "INCORRECT_NUMERICAL",
    "INCORRECT_DTYPE",
    "RUNTIME_ERROR",
    "COMPILE_ERROR",
    "TIMEOUT",
)
INPUT_KINDS = ("random", "scalar", "safetensors")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output. shape: names of axes; None: a Python scalar"""

    shape: tuple[str, ...] | None
    dtype: str
    rest: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Definition:
    """A computation.

    constants: axes of a fixed size; variables: axes whose size a workload sets
    reference: source with a function `run`
    rest:      tags, description, constraints and all other fields of the file
    """

    name: str
    op_type: str
    axes: Json
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    reference: str
    rest: Json = field(default_factory=dict)

    @classmethod
    def of(cls, found: Json) -> Definition:
        """Reads a definition. Raises BadSetting."""
        take = _Fields("definition", found)
        definition = cls(
            take.text("name"),
            take.text("op_type"),
            take.mapping("axes"),
            {name: _tensor(name, spec) for name, spec in take.mapping("inputs").items()},
            {name: _tensor(name, spec) for name, spec in take.mapping("outputs").items()},
            take.text("reference"),
            take.rest(),
        )
        for name, axis in definition.axes.items():
            kind = axis.get("type") if isinstance(axis, Mapping) else None
            if kind not in ("const", "var") or (kind == "const" and not isinstance(axis.get("value"), int)):
                raise BadSetting(
                    f"definition {definition.name}: axis {name} is {axis!r}; a const axis must have a whole value"
                )
        for name, tensor in (*definition.inputs.items(), *definition.outputs.items()):
            unknown = set(tensor.shape or ()) - definition.axes.keys()
            if unknown:
                raise BadSetting(f"definition {definition.name}: {name} has the unknown axes {sorted(unknown)}")
        return definition

    @property
    def constants(self) -> dict[str, int]:
        """Axes of a fixed size."""
        return {name: axis["value"] for name, axis in self.axes.items() if axis["type"] == "const"}

    @property
    def variables(self) -> set[str]:
        """Axes whose size a workload sets."""
        return {name for name, axis in self.axes.items() if axis["type"] == "var"}

    def as_json(self) -> dict[str, Any]:
        """Returns the object of a file."""
        return {
            "name": self.name,
            "op_type": self.op_type,
            **self.rest,
            "axes": dict(self.axes),
            "inputs": {name: _as_json(spec) for name, spec in self.inputs.items()},
            "outputs": {name: _as_json(spec) for name, spec in self.outputs.items()},
            "reference": self.reference,
        }


@dataclass(frozen=True, slots=True)
class Workload:
    """Sizes of the variable axes, and the source of each input. inputs: as in the file"""

    uuid: str
    axes: Mapping[str, int]
    inputs: Mapping[str, Json]
    rest: Json = field(default_factory=dict)

    @classmethod
    def of(cls, found: Json) -> Workload:
        """Reads a workload. Raises BadSetting."""
        take = _Fields("workload", found)
        uuid, axes, inputs = take.text("uuid"), take.mapping("axes"), take.mapping("inputs")
        for name, size in axes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 0:
                raise BadSetting(f"workload {uuid}: axis {name} is {size!r}; it must be a whole number of at least 0")
        needed = {"random": (), "scalar": ("value",), "safetensors": ("path", "tensor_key")}
        for name, source in inputs.items():
            kind = source.get("type") if isinstance(source, Mapping) else None
            if kind not in INPUT_KINDS:
                raise BadSetting(
                    f"workload {uuid}: input {name} is {source!r}; its type must be {', '.join(INPUT_KINDS)}"
                )
            missing = [key for key in needed[kind] if key not in source]
            if missing:
                raise BadSetting(f"workload {uuid}: input {name} of type {kind} lacks {' and '.join(missing)}")
        return cls(uuid, axes, inputs, take.rest())

    def as_json(self) -> dict[str, Any]:
        """Returns the object of a file."""
        return {"uuid": self.uuid, "axes": dict(self.axes), "inputs": dict(self.inputs), **self.rest}


@dataclass(frozen=True, slots=True)
class Solution:
    """A source that computes a definition.

    spec:    language, target_hardware, entry_point and more, as in the file
    sources: path -> content
    """

    name: str
    definition: str
    author: str
    spec: Json
    sources: Mapping[str, str]
    rest: Json = field(default_factory=dict)

    @classmethod
    def of(cls, found: Json) -> Solution:
        """Reads a solution. Raises BadSetting."""
        take = _Fields("solution", found)
        name, definition, author = (take.text(each) for each in ("name", "definition", "author"))
        spec = take.mapping("spec")
        entry = spec.get("entry_point")
        if not isinstance(entry, str) or "::" not in entry:
            raise BadSetting(f"solution {name}: entry_point is {entry!r}; it must be FILE::FUNCTION")
        sources = found.get("sources")
        if not isinstance(sources, Sequence) or not all(isinstance(each, Mapping) for each in sources):
            raise BadSetting(f"solution {name}: sources must be a list of files")
        rest = {key: value for key, value in take.rest().items() if key != "sources"}
        return cls(name, definition, author, spec, {each["path"]: each["content"] for each in sources}, rest)

    def as_json(self) -> dict[str, Any]:
        """Returns the object of a file."""
        sources = [{"path": path, "content": content} for path, content in self.sources.items()]
        return {
            "name": self.name,
            "definition": self.definition,
            "author": self.author,
            **self.rest,
            "spec": dict(self.spec),
            "sources": sources,
        }


@dataclass(frozen=True, slots=True)
class Trace:
    """A solution on a workload, or only a workload if solution and evaluation are None. evaluation: as in the file"""

    definition: str
    workload: Workload
    solution: str | None = None
    evaluation: Json | None = None
    rest: Json = field(default_factory=dict)

    @classmethod
    def of(cls, found: Json) -> Trace:
        """Reads a trace. Raises BadSetting."""
        take = _Fields("trace", found)
        definition, workload = take.text("definition"), Workload.of(take.mapping("workload"))
        rest = dict(take.rest())
        solution, evaluation = rest.pop("solution", None), rest.pop("evaluation", None)
        if evaluation is not None:
            _check_evaluation(evaluation)
        return cls(definition, workload, solution, evaluation, rest)

    def as_json(self) -> dict[str, Any]:
        """Returns the object of a file."""
        return {
            "definition": self.definition,
            "solution": self.solution,
            "workload": self.workload.as_json(),
            "evaluation": None if self.evaluation is None else dict(self.evaluation),
            **self.rest,
        }


def read_definition(path: Path) -> Definition:
    """Reads a definition. Raises BadSetting, which names the file."""
    return _read(path, lambda text: Definition.of(_object(text)))


def read_solution(path: Path) -> Solution:
    """Reads a solution. Raises BadSetting, which names the file."""
    return _read(path, lambda text: Solution.of(_object(text)))


def read_traces(path: Path) -> list[Trace]:
    """Reads traces, one per line: workloads, or their results. Raises BadSetting, which names the file and the line."""
    return _read(path, lambda text: list(_traces(text)))


def _traces(text: str) -> Iterator[Trace]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield Trace.of(_object(line))
            except BadSetting as error:
                raise BadSetting(f"line {number}: {error}") from error


def _read(path: Path, parse: Callable[[str], T]) -> T:
    try:
        return parse(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise BadSetting(f"{path} cannot be read ({error}); give a file of flashinfer-bench's schema") from error
    except BadSetting as error:
        raise BadSetting(f"{path}: {error}") from error


def _object(text: str) -> Json:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise BadSetting(f"it is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise BadSetting(f"it is {type(found).__name__}, not an object")
    return found


class _Fields:
    """Takes fields of an object. Fields that are not taken are the rest."""

    def __init__(self, of: str, found: Json) -> None:
        self._of, self._found, self._taken = of, found, set[str]()

    def text(self, name: str) -> str:
        return self._take(name, str)

    def mapping(self, name: str) -> Json:
        found: Json = self._take(name, dict)
        return found

    def rest(self) -> Json:
        return {name: value for name, value in self._found.items() if name not in self._taken}

    def _take(self, name: str, kind: type[T]) -> T:
        self._taken.add(name)
        value = self._found.get(name)
        if not isinstance(value, kind):
            word = {"str": "text", "dict": "an object"}[kind.__name__]
            raise BadSetting(f"{self._of} {self._found.get('name', '')}: {name} is {value!r}; it must be {word}")
        return value


def _tensor(name: str, spec: Any) -> TensorSpec:
    if not isinstance(spec, Mapping) or not isinstance(spec.get("dtype"), str) or "shape" not in spec:
        raise BadSetting(f"tensor {name} is {spec!r}; it must have a shape and a dtype")
    shape = spec["shape"]
    if shape is not None and not (isinstance(shape, list) and all(isinstance(axis, str) for axis in shape)):
        raise BadSetting(f"tensor {name} has the shape {shape!r}; it must be a list of axes, or null for a scalar")
    rest = {key: value for key, value in spec.items() if key not in ("shape", "dtype")}
    return TensorSpec(None if shape is None else tuple(shape), spec["dtype"], rest)


def _as_json(spec: TensorSpec) -> dict[str, Any]:
    return {"shape": None if spec.shape is None else list(spec.shape), "dtype": spec.dtype, **spec.rest}


def _check_evaluation(evaluation: Any) -> None:
    status = evaluation.get("status") if isinstance(evaluation, Mapping) else None
    if status not in STATUSES:
        raise BadSetting(f"an evaluation has the status {status!r}; it must be one of {', '.join(STATUSES)}")
