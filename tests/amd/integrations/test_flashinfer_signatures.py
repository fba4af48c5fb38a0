"""Our functions have FlashInfer's names, its parameters in its order, and its defaults."""

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rocm_attn.errors import BadBatch, Unsupported, WrongState
from rocm_attn.integrations import flashinfer
from rocm_attn.integrations.flashinfer.requests import geometry_of
from rocm_attn.integrations.flashinfer.signatures import ALWAYS_REFUSED, Given, recorded
from tests.amd.integrations.signatures import LEFT_OUT, of_flashinfer, served_names

# An unpacked wheel of FlashInfer; without one, the recorded signatures are used.
FOLDER = os.environ.get("FLASHINFER_PACKAGE", "")
THEIRS = of_flashinfer(Path(FOLDER)) if FOLDER else recorded()


def parameters(function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    return str(
        signature.replace(
            parameters=[each.replace(annotation=each.empty) for each in signature.parameters.values()],
            return_annotation=signature.empty,
        )
    )[1:-1]


@pytest.mark.parametrize("name", [name for name in THEIRS if name.rpartition(".")[2] not in LEFT_OUT])
def test_every_parameter_is_where_flashinfer_has_it(name: str) -> None:
    owner, _, method = name.partition(".")
    found = inspect.getattr_static(getattr(flashinfer, owner), method) if method else getattr(flashinfer, owner)
    if isinstance(found, property):
        found = found.fget
    elif method:
        found = getattr(getattr(flashinfer, owner), method)
        found = getattr(found, "__func__", found)
    assert parameters(found) == THEIRS[name]


REFUSED = [
    (name, argument)
    for name, text in THEIRS.items()
    for argument in sorted(ALWAYS_REFUSED.keys() & {each.split("=")[0].strip("* ") for each in text.split(",")})
    # A wrapper with sinks gets them so.
    if name.rpartition(".")[2] not in LEFT_OUT and not (argument == "args" and "AttentionSink" in name)
]


@pytest.mark.parametrize(("name", "argument"), REFUSED)
def test_an_argument_that_is_not_served_is_refused_before_anything_else(name: str, argument: str) -> None:
    owner, _, method = name.partition(".")
    function = getattr(getattr(flashinfer, owner), method) if method else getattr(flashinfer, owner)
    plain = [
        each for each in inspect.signature(function).parameters.values() if each.kind is each.POSITIONAL_OR_KEYWORD
    ]
    given = [None if each.default is each.empty else each.default for each in plain if each.name != argument]
    if method:
        given[0] = object.__new__(getattr(flashinfer, owner))  # a wrapper that was not made
    named = {} if argument == "args" else {argument: torch.ones(2)}
    at = next((place for place, each in enumerate(plain) if each.name == argument), len(plain))
    with pytest.raises(Unsupported, match=f"^{argument} is not served: .+"):
        function(*given[:at], *([1.0] if argument == "args" else []), **named)


def test_values_that_ask_for_nothing_are_taken_and_others_refused() -> None:
    taken: list[dict[str, Any]] = [{"jit_kwargs": {}}, {"jit_args": None, "variant_owns_mask": False}]
    for values in taken:
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1), **values)
    mla, ragged = (
        getattr(flashinfer, name)(torch.empty(1))
        for name in ("BatchMLAPagedAttentionWrapper", "BatchPrefillWithRaggedKVCacheWrapper")
    )
    with pytest.raises(BadBatch, match=r"plan.. needs num_heads"):
        mla.plan(output_scale="".join(["no", "ne"]), scale_mode="kv-per-tensor", use_profiler=False)
    with pytest.raises(Unsupported, match="scale_mode is not served"):
        mla.plan(scale_mode="bmm-scalar")
    for name in ("o_scale", "kv_len", "page_table"):
        with pytest.raises(Unsupported, match=f"{name} is not served"):
            mla.run(**{name: torch.ones(1)})
    rows = torch.ones(1, 1, 1)
    for o_scale, error in ((1.0, WrongState), (2.0, Unsupported)):
        with pytest.raises(error):
            ragged.run(rows, rows, rows, o_scale=o_scale)


def test_a_plans_arguments_mean_what_they_mean_in_flashinfer() -> None:
    sizes: dict[str, Any] = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 64, "q_data_type": None}
    plain = geometry_of(Given(**sizes))
    assert (plain.dtype, plain.kv_dtype, plain.v_head_dim, plain.page_size) == (torch.float16, torch.float16, 64, 1)
    assert (plain.scale, plain.causal, plain.alibi, plain.soft_cap, plain.deterministic) == (
        0.125,
        False,
        False,
        0,
        False,
    )
    asked = geometry_of(Given(**sizes, data_type="float32", head_dim_vo=32, fixed_split_size=4, logits_soft_cap=3.0))
    assert (asked.dtype, asked.kv_dtype, asked.v_head_dim) == (torch.float32, torch.float32, 32)
    assert (asked.soft_cap, asked.deterministic) == (3.0, True)
    coded = geometry_of(Given(**sizes, data_type="float32", kv_data_type=torch.float8_e4m3fn), causal=True)
    assert (coded.kv_dtype, coded.causal) == (torch.float8_e4m3fn, True)


def test_each_name_is_in_the_module_of_flashinfers_and_in_the_package() -> None:
    for module, names in served_names().items():
        for name in names:
            assert getattr(flashinfer, name) is getattr(getattr(flashinfer, module), name)
            assert name in flashinfer.__all__
