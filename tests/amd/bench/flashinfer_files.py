"""A small data set of flashinfer-bench, written by hand from its public documentation, without our own writer.

docs/flashinfer-trace of flashinfer-ai/flashinfer-bench has the schema. definitions/OP_TYPE/NAME.json,
workloads/OP_TYPE/NAME.jsonl and the tensors in blob/ are placed as in its data set.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

_REFERENCE = """import math
import torch


def run({arguments}):
    {unpack}
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[-1], dtype=q.dtype)
    lse = torch.full(q.shape[:2], float("-inf"))
    for b in range(len(kv_indptr) - 1):
        pages = kv_indices[kv_indptr[b] : kv_indptr[b + 1]].long()
        length = (len(pages) - 1) * k.shape[1] + {last}
        keys, values = k[pages].flatten(0, 1)[:length].float(), v[pages].flatten(0, 1)[:length].float()
        keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (keys, values))
        begin, end = {tokens}
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].float(), keys) * sm_scale
        place = torch.arange(length - (end - begin), length)[:, None]
        scores = scores.masked_fill(torch.arange(length) > place, float("-inf"))
        lse[begin:end] = (scores.logsumexp(-1) / math.log(2)).T
        out[begin:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype)
    return out, lse
"""
Json = Mapping[str, Any]
_LATENT_ROWS = """q, v = torch.cat([q_nope, q_pe], -1), ckv_cache[:, :, None]
    k = torch.cat([ckv_cache, kpe_cache], -1)[:, :, None]"""
_CACHES = ["num_pages", "page_size", "num_kv_heads", "head_dim"]
_VAR: dict[str, Any] = {"type": "var"}


def _const(value: int) -> dict[str, Any]:
    return {"type": "const", "value": value}


def _tensor(*shape: str, dtype: str = "float32", **more: str) -> dict[str, Any]:
    return {"shape": list(shape), "dtype": dtype, **more}


def _definition(
    name: str, op_type: str, stage: str, axes: Mapping[str, Any], inputs: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns a definition whose outputs have its first input's tokens, with a reference."""
    latent, prefill, tails = op_type == "mla_paged", stage == "prefill", "kv_last_page_len" in inputs
    tokens = "total_q" if prefill else "batch_size"
    unpack = _LATENT_ROWS if latent else "k, v = k_cache, v_cache"
    reference = _REFERENCE.format(
        arguments=", ".join(inputs),
        unpack=unpack,
        last="int(kv_last_page_len[b])" if tails else "k.shape[1]",
        tokens="int(qo_indptr[b]), int(qo_indptr[b + 1])" if prefill else "b, b + 1",
    )
    indptr = {"len_indptr": _VAR, "num_kv_indices": _VAR, "num_pages": _VAR, tokens: _VAR}
    return {
        "name": name,
        "description": "By hand.",
        "op_type": op_type,
        "tags": [f"stage:{stage}", "status:draft"],
        "axes": {**axes, **indptr},
        "constraints": ["num_kv_indices == kv_indptr[-1].item()"],
        "inputs": dict(inputs),
        "outputs": {
            "output": _tensor(tokens, "num_qo_heads", "head_dim_ckv" if latent else "head_dim"),
            "lse": _tensor(tokens, "num_qo_heads", description="The 2-based log-sum-exp of attention logits."),
        },
        "reference": reference,
    }


_SCALE: dict[str, Any] = {"shape": None, "dtype": "float32", "description": "Softmax scale."}
_LISTS = {"kv_indptr": _tensor("len_indptr", dtype="int32"), "kv_indices": _tensor("num_kv_indices", dtype="int32")}
_GQA = {"num_qo_heads": _const(4), "num_kv_heads": _const(2), "head_dim": _const(16)}

GQA_DECODE = _definition(
    "gqa_paged_decode_h4_kv2_d16_ps4",
    "gqa_paged",
    "decode",
    {**_GQA, "page_size": _const(4)},
    {
        "q": _tensor("batch_size", "num_qo_heads", "head_dim"),
        "k_cache": _tensor(*_CACHES),
        "v_cache": _tensor(*_CACHES),
        **_LISTS,
        "kv_last_page_len": _tensor("batch_size", dtype="int32"),
        "sm_scale": _SCALE,
    },
)
GQA_PREFILL = _definition(
    "gqa_paged_prefill_causal_h4_kv2_d16_ps1",
    "gqa_paged",
    "prefill",
    {**_GQA, "page_size": _const(1)},
    {
        "q": _tensor("total_q", "num_qo_heads", "head_dim"),
        "k_cache": _tensor(*_CACHES),
        "v_cache": _tensor(*_CACHES),
        "qo_indptr": _tensor("len_indptr", dtype="int32"),
        **_LISTS,
        "sm_scale": _SCALE,
    },
)
_LATENT = {
    "num_qo_heads": _const(4),
    "head_dim_ckv": _const(32),
    "head_dim_kpe": _const(16),
    "page_size": _const(4),
}
_ROWS = {
    "ckv_cache": _tensor("num_pages", "page_size", "head_dim_ckv"),
    "kpe_cache": _tensor("num_pages", "page_size", "head_dim_kpe"),
}
MLA_DECODE = _definition(
    "mla_paged_decode_h4_ckv32_kpe16_ps4",
    "mla_paged",
    "decode",
    _LATENT,
    {
        "q_nope": _tensor("batch_size", "num_qo_heads", "head_dim_ckv"),
        "q_pe": _tensor("batch_size", "num_qo_heads", "head_dim_kpe"),
        **_ROWS,
        **_LISTS,
        "kv_last_page_len": _tensor("batch_size", dtype="int32"),
        "sm_scale": _SCALE,
    },
)
MLA_PREFILL = _definition(
    "mla_paged_prefill_causal_h4_ckv32_kpe16_ps4",
    "mla_paged",
    "prefill",
    _LATENT,
    {
        "q_nope": _tensor("total_q", "num_qo_heads", "head_dim_ckv"),
        "q_pe": _tensor("total_q", "num_qo_heads", "head_dim_kpe"),
        **_ROWS,
        "qo_indptr": _tensor("len_indptr", dtype="int32"),
        **_LISTS,
        "kv_last_page_len": _tensor("batch_size", dtype="int32"),
        "sm_scale": _SCALE,
    },
)
MLA_PREFILL["axes"]["batch_size"] = _VAR
DEFINITIONS = {each["name"]: each for each in (GQA_DECODE, GQA_PREFILL, MLA_DECODE, MLA_PREFILL)}


def ints(*values: int) -> Tensor:
    """Returns an int32 tensor."""
    return torch.tensor(values, dtype=torch.int32)


# Three sequences of 5, 8 and 1 keys in pages of 4, and of 5, 3 and 2 in pages of 1; 2, 3 and 1 new tokens in prefills.
_PAGES_OF_4 = {"kv_indptr": ints(0, 2, 4, 5), "kv_indices": ints(6, 0, 3, 5, 1), "kv_last_page_len": ints(1, 4, 1)}
_PAGES_OF_1 = {"kv_indptr": ints(0, 5, 8, 10), "kv_indices": ints(6, 0, 3, 5, 1, 8, 9, 2, 4, 7)}
_NEW = {"qo_indptr": ints(0, 2, 5, 6)}


def tensors_of(definition: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the inputs that a workload of the definition reads from a file."""
    paged = _PAGES_OF_4 if definition["axes"]["page_size"]["value"] == 4 else _PAGES_OF_1
    return {**paged, **(_NEW if "qo_indptr" in definition["inputs"] else {})}


def workload_of(definition: Mapping[str, Any], blob: str) -> dict[str, Any]:
    """Returns a line of a file of workloads. blob: the file with its tensors"""
    tensors = tensors_of(definition)
    axes = {"len_indptr": 4, "num_kv_indices": len(tensors["kv_indices"]), "num_pages": 10}
    axes |= {name: size for name, size in {"total_q": 6, "batch_size": 3}.items() if name in definition["axes"]}
    inputs: dict[str, Any] = {}
    for name, spec in definition["inputs"].items():
        inputs[name] = {"type": "random"}
        if name in tensors:
            inputs[name] = {"type": "safetensors", "path": blob, "tensor_key": name}
        elif spec["shape"] is None:
            inputs[name] = {"type": "scalar", "value": 0.25}
    workload = {"uuid": f"6120f144-b973-4bd9-b884-{len(definition['name']):012d}", "axes": axes, "inputs": inputs}
    return {"definition": definition["name"], "solution": None, "workload": workload, "evaluation": None}


def data_set(root: Path, definition: Mapping[str, Any]) -> tuple[Path, Path]:
    """Writes a definition and its workload, and returns their files."""
    folder, name = definition["op_type"], definition["name"]
    blob = f"./blob/workloads/{folder}/{name}.safetensors"
    files = root / "definitions" / folder / f"{name}.json", root / "workloads" / folder / f"{name}.jsonl"
    for path in (*files, root / blob):
        path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors_of(definition), root / blob)
    files[0].write_text(json.dumps(definition))
    files[1].write_text(json.dumps(workload_of(definition, blob)) + "\n")
    return files
