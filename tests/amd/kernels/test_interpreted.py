"""The interpreter of these tests replaces the names of triton.language once a launch, and undoes it at the end."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from rocm_attn.kernels.cache.page_format import Encoding
from tests.amd.kernels.codes_kernels import decode_all

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled here")


def test_every_type_has_the_numpy_type_that_triton_gives_it() -> None:
    wanted = {tl.int1: "bool", tl.bfloat16: "uint16", tl.float8e5: "uint8", tl.int64: "int64", tl.float16: "float16"}
    for dtype, name in wanted.items():
        for _ in range(2):
            assert interpreter._get_np_dtype(dtype) == name
            assert interpreter._get_np_dtype(tl.block_type(dtype, [4])) == name
            assert interpreter._get_np_dtype(tl.pointer_type(dtype)) == "uint64"
            assert interpreter._get_np_dtype(tl.block_type(tl.pointer_type(dtype), [4])) == "uint64"


def test_names_are_replaced_once_a_launch_however_many_functions_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def count(*args: Any, **options: Any) -> Any:
            calls.append(name)
            return function(*args, **options)

        monkeypatch.setattr(owner, name, count)

    counted(interpreter, "_patch_lang_core")
    counted(interpreter.InterpretedFunction, "__call__")
    for launches in (1, 2):
        read, cast = decode_all(Encoding.E4M3FN, torch.float32, torch.device("cpu"))
        assert torch.equal(read.nan_to_num(), cast.nan_to_num())
        # That of the kernel and that of the functions that it calls, which lie in one file.
        assert calls.count("_patch_lang_core") == 2 * launches
        assert calls.count("__call__") > 2 * launches
        assert tl.core.is_builtin(tl.load), "names are Triton's own again where no kernel runs"
