"""Hooks in vLLM by which StateWatch checks vLLM's own recurrent states before a step's layers run.

A layer's state gets a third part, the header that says which tokens are in it. vLLM moves it with the other parts,
whenever it copies a state to another block, in each of its runners. Nothing is hooked unless it is requested.
"""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.kv_cache_interface import MambaSpec

from rocm_attn.integrations.hooked import hook_once
from rocm_attn.integrations.state_watch import HEADER_WORDS, StateWatch, refused, require_followed
from rocm_attn.integrations.vllm.group import KVGroup
from rocm_attn.integrations.vllm.state_slots import has_states, slots_of

# The kinds of layers whose states get a header, by vLLM's names.
_KINDS = ("gated_delta_net", "mamba2")
_HEADER = 2  # its place among the parts of a state
_watches: WeakKeyDictionary[KVGroup, StateWatch] = WeakKeyDictionary()


def add_headers() -> None:
    """Adds a header to the states of layers that are made from now on. Call it before vLLM plans its memory.

    Layers ask for the dtypes of their own two parts, and unpack these (MambaMixer2 in 0.26, gated delta nets on GPUs).
    So only shapes have one more part, and who lays out memory by both is given its dtype.
    """
    header, copy = (HEADER_WORDS,), mamba_utils.get_temporal_copy_spec
    for kind in _KINDS:
        hook_once(mamba_utils.MambaStateShapeCalculator, f"{kind}_state_shape", partial(_with_part, header))
        hook_once(mamba_utils.MambaStateCopyFuncCalculator, f"{kind}_state_copy_func", partial(_with_part, copy))
    hook_once(MambaSpec, "__init__", _with_dtype)
    if hasattr(MambaBase, "bind_kv_cache"):  # before, vLLM lays out a state's parts by its MambaSpec
        hook_once(MambaBase, "bind_kv_cache", _then_header)


def _with_part(part: object, parts: Callable[..., tuple[object, ...]]) -> Any:
    """Returns a class method that adds a part to those that another one returns."""
    return classmethod(lambda _, *given, **named: (*parts(*given, **named), part))


def _with_dtype(make: Callable[..., None]) -> Callable[..., None]:
    """Gives a specification of memory the dtype of a header, if its shapes have one."""

    def made(spec: Any, *given: Any, **named: Any) -> None:
        make(spec, *given, **named)
        if len(spec.dtypes) == _HEADER and tuple(spec.shapes[_HEADER:]) == ((HEADER_WORDS,),):
            object.__setattr__(spec, "dtypes", (*spec.dtypes, torch.int32))

    return made


def _then_header(bind: Callable[..., None]) -> Callable[..., None]:
    """Adds the header to the views of a layer's states. It lies after the other parts."""

    def bound(layer: Any, pages: Tensor) -> None:
        bind(layer, pages)
        if has_header(layer):
            first = sum(each.shape[1:].numel() * each.element_size() for each in layer.kv_cache)
            header = pages.squeeze(dim=(1, 2))[:, first : first + HEADER_WORDS * torch.int32.itemsize]
            layer.kv_cache = (*layer.kv_cache, header.view(torch.int32))

    return bound


def has_header(layer: Any) -> bool:
    """True if a recurrent layer's states have a header, which is their third part."""
    return tuple(layer.get_state_shape())[_HEADER:] == ((HEADER_WORDS,),)


def watch(vllm_config: VllmConfig) -> None:
    """Checks the states of all further steps, if the model has any. Call it once the model's layers are known.

    Raises Unsupported for a model or options whose states are not followed.
    """
    layers = get_layers_from_vllm_config(vllm_config, MambaBase)
    if not layers:
        return
    for name, layer in layers.items():
        if not has_header(layer):
            raise refused(f"the states of {name} ({type(layer).__name__}) have no header")
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    used = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "KV transfer": vllm_config.kv_transfer_config is not None,
        "mamba_cache_mode 'all'": cache.mamba_cache_mode == "all",
    }
    require_followed("vLLM", used)
    runners = {
        "vllm.v1.worker.gpu_model_runner": ("GPUModelRunner", "_model_forward", _in_first_runner),
        "vllm.v1.worker.gpu.model_states.mamba_hybrid": ("MambaHybridModelState", "prepare_attn", _in_second_runner),
    }
    for module, (owner, name, hook) in runners.items():
        if module in sys.modules:
            hook_once(getattr(sys.modules[module], owner), name, hook)


def _in_first_runner(forward: Callable[..., Any]) -> Any:
    """Checks a step before the model's forward, which a graph may replace."""

    def checked(runner: Any, *given: Any, **named: Any) -> Any:
        from vllm.forward_context import get_forward_context

        check(get_forward_context().attn_metadata, runner.input_ids.gpu, runner.compilation_config)
        return forward(runner, *given, **named)

    return checked


def _in_second_runner(prepare: Callable[..., Any]) -> Any:
    """Checks a step once its metadata is there."""

    def checked(state: Any, input_batch: Any, *given: Any, for_capture: bool = False, **named: Any) -> Any:
        metadata = prepare(state, input_batch, *given, for_capture=for_capture, **named)
        if not for_capture:
            check(metadata, input_batch.input_ids, state.vllm_config.compilation_config)
        return metadata

    return checked


def check(metadata: Mapping[str, Any] | None, token_ids: Tensor, compilation: Any) -> None:
    """Checks the states of a step. metadata: by layer; None if vLLM measures memory. Raises Unsupported."""
    if metadata is None:
        return
    # Layers with one set of slots have one value, and each of them has the same headers.
    of_states = {id(each): (name, each) for name, each in metadata.items() if has_states(each)}
    if not of_states:
        return
    group = next((each.group for each in metadata.values() if isinstance(getattr(each, "group", None), KVGroup)), None)
    if group is None:
        raise refused("no attention layer with K and V per head is served by rocm_attn")
    attention = group.attention
    step, page_size = attention.gate.begun().step.spaces[0], attention.tables.page_size
    if group not in _watches:
        _watches[group] = StateWatch(attention.bounds.num_pages * page_size, attention.device)
    with torch.inference_mode():
        tokens = _watches[group].begin(step, page_size, token_ids)
        for name, each in of_states.values():
            headers = compilation.static_forward_context[name].kv_cache[_HEADER]
            _watches[group].check(tokens, headers, slots_of(each, len(tokens.live)))
