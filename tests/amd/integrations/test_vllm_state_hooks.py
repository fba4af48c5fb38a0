"""The hooks of the check of states, in classes that stand for vLLM's; steps are begun by a real group."""

import importlib
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rocm_attn.errors import DeviceFault, Unsupported
from rocm_attn.integrations.state_watch import HEADER_WORDS
from rocm_attn.integrations.vllm import whole_images
from rocm_attn.machine.settings import WATCH_STATES
from tests.amd.integrations.modules import install
from tests.amd.integrations.vllm_runner import MAX_TOKENS, TERMS, Runner

HOOKS = "rocm_attn.integrations.vllm.state_hooks"
NUM_SLOTS = 8
REPORT = "a slot that the engine names for a sequence's recurrent state"


class MambaBase:
    """Lays out the states of a layer as in vLLM 0.32, from pages [blocks, 1, 1, bytes]."""

    kv_cache: tuple[Any, ...]
    get_state_shape: Any
    get_state_dtype: Any

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        pages, states, first = kv_cache.squeeze(dim=(1, 2)), [], 0
        for shape, dtype in zip(self.get_state_shape(), self.get_state_dtype(), strict=False):
            size = math.prod(shape) * dtype.itemsize
            states.append(pages[:, first : first + size].view(dtype).view(-1, *shape))
            first += size
        self.kv_cache = tuple(states)


@dataclass(frozen=True)
class MambaSpec:
    """The sizes of a state, of which blocks are made."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]


class Layer(MambaBase):
    def __init__(self, vllm: Any, kind: str = "mamba2") -> None:
        self._utils, self._kind = vllm.utils, kind
        self.kv_cache: tuple[Any, ...] = (None, None, torch.zeros(NUM_SLOTS, HEADER_WORDS, dtype=torch.int32))

    def get_state_shape(self) -> Any:
        return getattr(self._utils.MambaStateShapeCalculator, f"{self._kind}_state_shape")()

    def get_state_dtype(self) -> Any:
        return torch.bfloat16, torch.float32


def calculator(what: str, parts: tuple[Any, ...]) -> type:
    """Stands for one of vLLM's classes. Two kinds of layers get headers, and one does not."""
    kinds = ("gated_delta_net", "mamba2", "mamba1")
    return type("Calculator", (), {f"{kind}_{what}": classmethod(lambda _: parts) for kind in kinds})


class FirstRunner:
    def __init__(self, ids: torch.Tensor, compilation: Any) -> None:
        self.input_ids, self.compilation_config = SimpleNamespace(gpu=ids), compilation
        self.ran = 0

    def _model_forward(self, number: int) -> int:
        self.ran += 1
        return number


class SecondRunner:
    def __init__(self, compilation: Any) -> None:
        self.vllm_config = SimpleNamespace(compilation_config=compilation)

    def prepare_attn(self, input_batch: Any, mode: int, *, for_capture: bool = False) -> Any:
        return input_batch.metadata


REGISTRY = "vllm.v1.attention.backends.registry"


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """vLLM's modules as far as the hooks read them, and the module of the hooks, imported next to them."""
    context = SimpleNamespace(attn_metadata=None)
    utils = SimpleNamespace(
        MambaStateShapeCalculator=calculator("state_shape", ((3, 8), (2, 4))),
        MambaStateCopyFuncCalculator=calculator("state_copy_func", ("conv", "temporal")),
        get_temporal_copy_spec="temporal",
    )
    first = type("GPUModelRunner", (FirstRunner,), {"_model_forward": FirstRunner._model_forward})
    second = type("MambaHybridModelState", (SecondRunner,), {"prepare_attn": SecondRunner.prepare_attn})
    # The hooks of this test go with it.
    base, spec = MambaBase, MambaSpec
    monkeypatch.setattr(base, "bind_kv_cache", base.bind_kv_cache)
    monkeypatch.setattr(spec, "__init__", spec.__init__)
    modules: dict[str, dict[str, Any]] = {
        "vllm.config": {
            "VllmConfig": object,
            "get_layers_from_vllm_config": lambda config, kind: config.layers,
        },
        "vllm.forward_context": {"get_forward_context": lambda: context},
        "vllm.model_executor.layers.mamba": {"mamba_utils": utils},
        "vllm.model_executor.layers.mamba.abstract": {"MambaBase": base},
        "vllm.v1.kv_cache_interface": {"MambaSpec": spec},
        "vllm.v1.worker.gpu_model_runner": {"GPUModelRunner": first},
        "vllm.v1.worker.gpu.model_states.mamba_hybrid": {"MambaHybridModelState": second},
    }
    install(monkeypatch, modules)
    monkeypatch.delitem(sys.modules, HOOKS, raising=False)
    hooks = importlib.import_module(HOOKS)
    yield SimpleNamespace(hooks=hooks, utils=utils, context=context, first=first, second=second)
    sys.modules.pop(HOOKS, None)
    vars(importlib.import_module("rocm_attn.integrations.vllm")).pop("state_hooks", None)


def config(layers: dict[str, Layer], **changed: Any) -> Any:
    """A configuration of vLLM's. changed: values that differ from the default ones"""
    values = {
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "kv_transfer_config": None,
        "mamba_cache_mode": "align",
        **changed,
    }
    everything = SimpleNamespace(**values)
    return SimpleNamespace(
        layers=layers,
        parallel_config=everything,
        cache_config=everything,
        kv_transfer_config=values["kv_transfer_config"],
    )


def test_states_of_two_kinds_get_one_header_that_is_copied_like_the_state(vllm: Any) -> None:
    """Layers unpack two dtypes, and so they get no third one."""
    for _ in range(2):
        vllm.hooks.add_headers()
    for kind, more in (("gated_delta_net", 1), ("mamba2", 1), ("mamba1", 0)):
        layer = Layer(vllm, kind)
        shapes, dtypes = layer.get_state_shape(), layer.get_state_dtype()
        copies = getattr(vllm.utils.MambaStateCopyFuncCalculator, f"{kind}_state_copy_func")()
        assert shapes == ((3, 8), (2, 4), *[(HEADER_WORDS,)] * more)
        assert copies == ("conv", "temporal", *["temporal"] * more)
        conv, recurrent = dtypes
        planned = MambaSpec(shapes, dtypes)
        assert planned.dtypes == (conv, recurrent, *[torch.int32] * more)
        assert replace(planned).dtypes == planned.dtypes
        pages = torch.arange(NUM_SLOTS * 108).to(torch.int8).view(NUM_SLOTS, 1, 1, 108)
        layer.bind_kv_cache(pages)
        assert len(layer.kv_cache) == 2 + more
        if more:
            assert torch.equal(layer.kv_cache[2].view(torch.int8), pages[:, 0, 0, 80:92])


@pytest.mark.parametrize("value", ["", "0", "1"])
def test_nothing_is_hooked_or_imported_unless_the_check_is_asked_for(
    value: str, vllm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry: Any = SimpleNamespace(AttentionBackendEnum=Enum("Names", ["CUSTOM"]), register_backend=lambda *_: None)
    monkeypatch.setitem(sys.modules, REGISTRY, registry)
    monkeypatch.setenv(WATCH_STATES, value)
    monkeypatch.setattr(whole_images, "keep_images_whole", lambda: None)
    before = vars(vllm.utils.MambaStateShapeCalculator)["mamba2_state_shape"]
    sys.modules.pop(HOOKS)
    importlib.import_module("rocm_attn.integrations.vllm")._register_names()
    is_on = value == "1"
    assert (HOOKS in sys.modules) == is_on
    assert (vars(vllm.utils.MambaStateShapeCalculator)["mamba2_state_shape"] is not before) == is_on


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"decode_context_parallel_size": 2}, "decode context parallelism"),
        ({"kv_transfer_config": object()}, "KV transfer"),
        ({"mamba_cache_mode": "all"}, "mamba_cache_mode 'all'"),
    ],
)
def test_what_is_not_followed_is_refused(changed: dict[str, Any], words: str, vllm: Any) -> None:
    vllm.hooks.add_headers()
    with pytest.raises(Unsupported, match=f"ROCM_ATTN_WATCH_STATES is 1 and vLLM runs with {words}"):
        vllm.hooks.watch(config({"mamba": Layer(vllm)}, **changed))


def test_layers_without_headers_are_refused_and_models_without_states_are_not(vllm: Any) -> None:
    with pytest.raises(Unsupported, match=r"the states of mamba \(Layer\) have no header"):
        vllm.hooks.watch(config({"mamba": Layer(vllm)}))
    vllm.hooks.add_headers()
    with pytest.raises(Unsupported, match=r"the states of mamba \(Layer\) have no header"):
        vllm.hooks.watch(config({"mamba": Layer(vllm, "mamba1")}))
    vllm.hooks.watch(config({}, pipeline_parallel_size=2))
    with pytest.raises(Unsupported, match="no attention layer with K and V per head is served by rocm_attn"):
        vllm.hooks.check({"mamba": SimpleNamespace(state_indices_tensor_d=None)}, torch.tensor([1]), None)


@pytest.mark.parametrize("runner_name", ["first", "second"])
@pytest.mark.parametrize("captured", [False, True])
def test_steps_of_both_runners_are_checked_and_a_wrong_slot_is_reported(
    captured: bool, runner_name: str, vllm: Any, device: torch.device, provider: str
) -> None:
    """Prompts, then decodes: eager ones or those of a graph, whose fill is replayed."""
    vllm.hooks.add_headers()
    layer = Layer(vllm)
    layer.kv_cache = (None, None, layer.kv_cache[2].to(device))
    compilation = SimpleNamespace(static_forward_context={"mamba": layer})
    for _ in range(2):
        vllm.hooks.watch(config({"mamba": layer}))
    steps = Runner([TERMS], device=device, provider=provider)
    graph = steps.capture(4, 4, 1) if captured else None
    ids = torch.randint(0, 1000, (MAX_TOKENS,), generator=torch.Generator().manual_seed(0)).to(device)
    first, second = vllm.first(ids, compilation), vllm.second(compilation)

    def step(new: list[int], slots: list[int], is_read: bool) -> None:
        if graph is not None and max(new) == 1:
            graph.run_unseen(new)
        else:
            steps.step_unseen(new)
        states = SimpleNamespace(
            non_spec_state_indices_tensor=torch.tensor(slots, dtype=torch.int32, device=device),
            spec_sequence_masks=None,
            has_initial_state=None,
            num_decodes=len(slots) if is_read else 0,
        )
        metadata = {"mamba": states, "attention": SimpleNamespace(group=steps.groups[0])}
        if runner_name == "first":
            vllm.context.attn_metadata = metadata
            assert first._model_forward(5) == 5
        else:
            batch = SimpleNamespace(metadata=metadata, input_ids=ids)
            assert second.prepare_attn(batch, 0, for_capture=False) is metadata
            second.prepare_attn(SimpleNamespace(metadata={"mamba": None}, input_ids=ids), 0, for_capture=True)

    for _ in range(2):
        steps.admit()
    step([5, 9], [3, 4], False)
    step([1, 1], [3, 4], True)
    steps.groups[0].attention.check_device()
    step([1, 1], [4, 3], True)
    with pytest.raises(DeviceFault, match=REPORT):
        steps.groups[0].attention.check_device()


def test_a_run_that_measures_memory_is_not_checked(vllm: Any) -> None:
    vllm.hooks.add_headers()
    vllm.hooks.watch(config({"mamba": Layer(vllm)}))
    runner = vllm.first(torch.tensor([1]), None)
    assert runner._model_forward(3) == 3
    assert runner.ran == 1
