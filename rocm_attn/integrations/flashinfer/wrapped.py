"""The common part of wrappers: workspaces, buffers that graphs read, the plan, and one call of run()."""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from rocm_attn.batch.step_batch import MOST_TOKENS
from rocm_attn.errors import BadSetting, BadTensor, NeverFits, WrongState
from rocm_attn.integrations.flashinfer.batch import BatchCapacity, PlannedBatch
from rocm_attn.integrations.flashinfer.calls import Result, RunArguments, attend
from rocm_attn.integrations.flashinfer.names import REFUSED_ATTRIBUTES, NotServed
from rocm_attn.integrations.flashinfer.planned import PlannedAttention
from rocm_attn.integrations.flashinfer.requests import Geometry, ScoreRules, as_out_dtype, check_layout, provider_of
from rocm_attn.integrations.flashinfer.signatures import Given, as_in_flashinfer
from rocm_attn.machine.devices import require_tensor
from rocm_attn.machine.settings import whole_number


class Wrapper:
    """The members of a wrapper that programs need which pass workspaces around. No workspace is used.

    float_workspace_buffer: sets the wrapper's device; nothing is written to it
    """

    def __init__(self, float_workspace_buffer: Tensor) -> None:
        require_tensor("float_workspace_buffer", float_workspace_buffer)
        self.device = float_workspace_buffer.device
        # Engines pass this attribute of one wrapper to others, although it is not public in FlashInfer either.
        self._int_workspace_buffer = torch.empty(0, dtype=torch.uint8, device=self.device)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raises NotServed for attributes of FlashInfer's that engines read and no wrapper here has."""
            reason = REFUSED_ATTRIBUTES.get(name)
            if reason is not None:
                raise NotServed(f"{type(self).__name__}.{name} is not served: {reason}")
            return object.__getattribute__(self, name)

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor | list[Tensor]
    ) -> None:
        """Does nothing: no workspace of the caller's is used."""

    def end_forward(self) -> None:
        """Does nothing, as in the releases of FlashInfer that have it."""


def deprecated(name: str) -> Callable[..., Result]:
    """Returns FlashInfer's deprecated form of run(), with scores that may differ from those of plan().

    name: Class.forward, or Class.forward_return_lse
    """

    def forward(wrapper: PlannedWrapper, given: Given) -> Result:
        return wrapper._forward(given, return_lse=name.endswith("_return_lse"))

    forward.__qualname__ = name
    return as_in_flashinfer(forward)


def as_plan(function: Callable[[Any, Given], None]) -> Callable[..., None]:
    """Gives a wrapper's plan the parameters of FlashInfer's. Whatever it raises, nothing is planned then."""
    plan = as_in_flashinfer(function)

    @functools.wraps(plan)
    def planning(wrapper: Any, *args: Any, **named: Any) -> None:
        try:
            plan(wrapper, *args, **named)
        except BaseException:
            wrapper._forget_plan()  # it may have been made before buffers were found too small
            raise

    return planning


class PlannedWrapper(Wrapper):
    """A wrapper whose plan() is called once per step, and whose run() is called for each layer.

    BUFFERS: the constructor's names of the caller's buffers. If run() is captured, they keep the arguments of plan().
             The last but one is for page indices, and the last one has an entry for each sequence of every batch
    given:   the constructor's arguments. use_cuda_graph: whether run() is captured; max_total_num_rows: the most new
             tokens of a captured batch, else those of the first one; backend: a provider of ours, or a name of
             FlashInfer's, which stands for the best one
    Raises BadSetting, BadTensor.
    """

    BUFFERS: ClassVar[tuple[str, ...]] = ()
    run: Callable[..., Any]  # of each class

    def __init__(self, given: Given) -> None:
        super().__init__(given.float_workspace_buffer)
        self._kv_layout = check_layout(getattr(given, "kv_layout", "NHD"))
        self._provider = provider_of(getattr(given, "backend", "auto"))
        self._use_cuda_graph: bool = getattr(given, "use_cuda_graph", False)
        most_tokens = getattr(given, "max_total_num_rows", None)
        if most_tokens is not None and not self._use_cuda_graph:
            raise BadSetting("max_total_num_rows is of captured batches; give it with use_cuda_graph, or leave it None")
        self._most_tokens = whole_number("max_total_num_rows", most_tokens or 0)
        if not 0 <= self._most_tokens <= MOST_TOKENS:
            raise BadSetting(f"max_total_num_rows is {most_tokens}; it must be from 0 to {MOST_TOKENS}")
        of_caller = {name: getattr(given, name) for name in self.BUFFERS}
        if self._use_cuda_graph and any(each is None for each in of_caller.values()):
            raise BadTensor(f"with use_cuda_graph give {', '.join(of_caller)}")
        self._buffers: dict[str, Tensor] = of_caller if self._use_cuda_graph else {}
        # Engines read these attributes, although they are not public in FlashInfer either.
        for name, buffer in of_caller.items():
            setattr(self, f"_{name.removesuffix('_buffer').removesuffix('_buf')}_buf", buffer)
        self._planned: PlannedAttention | None = None
        self._geometry: Geometry | None = None
        self._out_dtype = torch.float16

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """True if run() is captured."""
        return self._use_cuda_graph

    # Engines read these of the plan, although they are not public in FlashInfer either.
    _window_left = property(lambda self: self._ready()[1].window_left)
    _window_right = property(lambda self: 0 if self._causal else self._ready()[1].window_right)
    _logits_soft_cap = property(lambda self: self._ready()[1].soft_cap)
    _sm_scale = property(lambda self: self._ready()[1].scale)
    _causal = property(lambda self: self._ready()[1].causal)

    def _new_planned(self, batch: PlannedBatch, *, each_one: bool = False) -> PlannedAttention:
        """Makes the attention of a wrapper whose first batch this is. each_one: see PlannedAttention"""
        fixed = None
        if self._buffers:
            *_, indices, per_seq = self._buffers.values()
            num_tokens = self._most_tokens or max(batch.lengths.num_tokens, 1)
            fixed = BatchCapacity(len(per_seq), num_tokens, len(indices), len(indices))
        return PlannedAttention(self.device, self._provider, fixed=fixed, each_one=each_one)

    def _plan(self, batch: PlannedBatch, geometry: Geometry, out_dtype: torch.dtype, *, each_one: bool = False) -> None:
        """Plans a batch for later calls. Raises Unsupported, BadSetting, BadBatch, NeverFits, BadTensor."""
        if out_dtype != geometry.dtype:
            out_dtype = as_out_dtype(out_dtype)
        planned = self._planned or self._new_planned(batch, each_one=each_one)
        planned.plan(batch, geometry)
        self._planned, self._geometry, self._out_dtype = planned, geometry, out_dtype

    def _forget_plan(self) -> None:
        """Makes run() raise WrongState until a plan succeeds."""
        self._geometry = None

    def _keep(self, arguments: Sequence[Tensor]) -> None:
        """Copies arguments of plan() to the beginnings of the buffers, if run() is captured. Raises NeverFits."""
        for (name, buffer), values in zip(self._buffers.items(), arguments, strict=False):
            if len(values) > len(buffer):
                raise NeverFits(f"{len(values)} entries do not fit {name}, which has {len(buffer)}; make it larger")
            buffer[: len(values)].copy_(values, non_blocking=True)

    def _ready(self) -> tuple[PlannedAttention, Geometry]:
        """Returns what was planned last. Raises WrongState."""
        if self._planned is None or self._geometry is None:
            raise WrongState("nothing is planned; call plan() before run()")
        return self._planned, self._geometry

    def _forward(self, given: Given, *, return_lse: bool) -> Result:
        """Does the work of deprecated()."""
        if hasattr(given, "pos_encoding_mode"):
            geometry = self._ready()[1]
            causal = getattr(given, "causal", geometry.causal)
            self._geometry = ScoreRules.of(given).over(replace(geometry, causal=causal))
        of_run = inspect.signature(self.run).parameters.keys() - {*ScoreRules.__slots__}
        values = {name: value for name, value in vars(given).items() if name in of_run}
        found: Result = self.run(**values, return_lse=return_lse)
        return found

    def _check_window(self, window_left: int | None) -> None:
        planned = self._ready()[1].window_left
        if window_left not in (None, planned):
            raise BadSetting(f"window_left is {window_left}, planned with {planned}; call plan() again")

    def _attend(self, q: Tensor, pages: tuple[Tensor, Tensor], call: RunArguments) -> Result:
        """Returns the attention of the planned batch. Raises Unsupported, BadTensor, WrongState."""
        planned, geometry = self._ready()
        return attend(planned, geometry, self._out_dtype, q, pages, call)
