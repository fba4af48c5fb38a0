"""This package as a solution of flashinfer-bench: sources that call its FlashInfer names, as other users would."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rocm_attn.errors import BadSetting, Unsupported
from rocm_lab.bench.flashinfer_schema import Definition, Solution
from rocm_lab.bench.machine import commit

AUTHOR = "rocm_attn"
ENTRY = "main.py::run"

_HEAD = """import torch

import rocm_attn.integrations.flashinfer as flashinfer

BACKEND = "{backend}"
_wrappers = {{}}


def _wrapper(kind, device, *layout):
    if device not in _wrappers:
        _wrappers[device] = kind(torch.empty(1, dtype=torch.uint8, device=device), *layout, backend=BACKEND)
    return _wrappers[device]


def _last_page_len(kv_indptr, page_size, given):
    if given is not None:
        return given
    return torch.full_like(kv_indptr[1:], page_size)  # the definition has whole pages


"""

_GQA_DECODE = """def run(q, k_cache, v_cache, kv_indptr, kv_indices, sm_scale, kv_last_page_len=None):
    page_size, kv_heads = k_cache.shape[1:3]
    wrapper = _wrapper(flashinfer.BatchDecodeWithPagedKVCacheWrapper, q.device, "NHD")
    last = _last_page_len(kv_indptr, page_size, kv_last_page_len)
    sizes = q.shape[1], kv_heads, q.shape[2], page_size
    wrapper.plan(
        kv_indptr, kv_indices, last, *sizes, q_data_type=q.dtype, kv_data_type=k_cache.dtype, sm_scale=sm_scale
    )
    return wrapper.run(q, (k_cache, v_cache), return_lse=True)
"""

_GQA_PREFILL = """def run(q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, sm_scale, kv_last_page_len=None):
    page_size, kv_heads = k_cache.shape[1:3]
    wrapper = _wrapper(flashinfer.BatchPrefillWithPagedKVCacheWrapper, q.device, "NHD")
    last = _last_page_len(kv_indptr, page_size, kv_last_page_len)
    sizes = q.shape[1], kv_heads, q.shape[2], page_size
    dtypes = {"q_data_type": q.dtype, "kv_data_type": k_cache.dtype}
    wrapper.plan(qo_indptr, kv_indptr, kv_indices, last, *sizes, causal=True, sm_scale=sm_scale, **dtypes)
    return wrapper.run(q, (k_cache, v_cache), return_lse=True)
"""

_MLA = """def {signature}:
    page_size = ckv_cache.shape[1]
    wrapper = _wrapper(flashinfer.mla.BatchMLAPagedAttentionWrapper, q_nope.device)
    last = _last_page_len(kv_indptr, page_size, kv_last_page_len)
    num_pages = kv_indptr[1:] - kv_indptr[:-1]
    kv_len = torch.where(num_pages > 0, (num_pages - 1) * page_size + last, 0).int()
{queries}
    sizes = q_nope.shape[1], q_nope.shape[2], q_pe.shape[2], page_size
    dtypes = q_nope.dtype, ckv_cache.dtype
    wrapper.plan(qo_indptr, kv_indptr, kv_indices, kv_len, *sizes, {causal}, sm_scale, *dtypes)
    return wrapper.run(q_nope, q_pe, ckv_cache, kpe_cache, return_lse=True)
"""
_MLA_DECODE = _MLA.format(
    signature="run(q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, sm_scale, kv_last_page_len=None)",
    queries="    qo_indptr = torch.arange(len(kv_indptr), dtype=torch.int32, device=kv_indptr.device)",
    causal="False",
)
_MLA_PREFILL = _MLA.format(
    signature=(
        "run(\n    q_nope, q_pe, ckv_cache, kpe_cache, qo_indptr, kv_indptr, kv_indices, sm_scale, "
        "kv_last_page_len=None\n)"
    ),
    queries="    qo_indptr = qo_indptr.int()",
    causal="True",
)

# Inputs that identify a kind of definition -> its source. kv_last_page_len is optional in each.
_GQA, _LATENT = {"q", "k_cache", "v_cache"}, {"q_nope", "q_pe", "ckv_cache", "kpe_cache"}
_PAGED = {"kv_indptr", "kv_indices", "sm_scale"}
_SOURCES: tuple[tuple[set[str], str], ...] = (
    (_GQA | _PAGED, _GQA_DECODE),
    (_GQA | _PAGED | {"qo_indptr"}, _GQA_PREFILL),
    (_LATENT | _PAGED, _MLA_DECODE),
    (_LATENT | _PAGED | {"qo_indptr"}, _MLA_PREFILL),
)


def solution_of(definition: Definition, provider: str) -> Solution:
    """Returns our source for a definition. provider: of the kernels

    Raises Unsupported if it is not paged attention.
    """
    given = definition.inputs.keys() - {"kv_last_page_len"}
    source = next((source for inputs, source in _SOURCES if inputs == given), None)
    if source is None:
        raise Unsupported(
            f"definition {definition.name} takes {', '.join(definition.inputs)}; only gqa_paged and mla_paged, "
            "prefill and decode, are served"
        )
    return Solution(
        name=f"rocm_attn_{provider}_{definition.name}",
        definition=definition.name,
        author=AUTHOR,
        spec={
            "language": "python",
            "target_hardware": ["AMD_MI300X", "AMD_MI355X", "NVIDIA_H100", "NVIDIA_H200"],
            "dependencies": ["rocm-attn", "torch", "triton"],
            "entry_point": ENTRY,
            "build_commands": [],
        },
        sources={"main.py": _HEAD.format(backend=provider) + source},
        rest={"description": f"rocm_attn at {commit()}, by its FlashInfer names: planned and run in each call."},
    )


def require_runs(solution: Solution, definition: Definition) -> None:
    """Raises BadSetting for a solution of another definition, or one that is not a single Python file."""
    if solution.definition != definition.name:
        raise BadSetting(f"solution {solution.name} is for {solution.definition}, not for {definition.name}")
    language, (file, _) = solution.spec.get("language"), _entry(solution)
    if language != "python" or list(solution.sources) != [file]:
        raise BadSetting(
            f"solution {solution.name} is in {language!r}, with the files {', '.join(solution.sources) or 'none'}; "
            f"it must be one file in python, that of its entry_point ({file})"
        )


def entry_of(solution: Solution) -> Callable[..., Any]:
    """Executes the source of a solution that require_runs() accepts, and returns its function."""
    file, function = _entry(solution)
    return function_of(solution.sources[file], solution.name, function)


def _entry(solution: Solution) -> tuple[str, str]:
    file, _, function = str(solution.spec["entry_point"]).partition("::")
    return file, function


def function_of(source: str, name: str, function: str = "run") -> Callable[..., Any]:
    """Executes a source, and returns its function. Raises BadSetting if there is none."""
    scope: dict[str, Any] = {"__name__": name}
    exec(compile(source, name, "exec"), scope)
    found: Callable[..., Any] | None = scope.get(function)
    if found is None:
        raise BadSetting(f"{name} has no function {function}")
    return found


def environment(device: torch.device) -> Mapping[str, Any]:
    """Returns a trace's description of the machine."""
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    runtime = ("hip", torch.version.hip) if torch.version.hip else ("cuda", torch.version.cuda)
    libs = {"torch": torch.__version__, "rocm_attn": commit(), **({runtime[0]: runtime[1]} if runtime[1] else {})}
    return {"hardware": hardware.replace(" ", "_"), "libs": libs}
