"""A stand-in for AITER: its module tree with the recorded signatures of a release, and functions that are strict."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
from torch import Tensor

from rocm_attn.machine import releases
from tests.amd.aiter.checks import EIGHT_BITS, require
from tests.amd.aiter.decode_functions import pa_decode_gluon, paged_attention_ragged
from tests.amd.aiter.latent_functions import (
    get_mla_metadata_v1,
    mla_decode_fwd,
    mla_prefill_fwd,
    unified_attention_sparse_mla,
)
from tests.amd.aiter.prefill_functions import flash_attn_varlen_func, mha_batch_prefill_func, unified_attention
from tests.amd.aiter.signatures import Release

Body = Callable[[Mapping[str, Any]], Any]


def bodies_of(release: Release, arch: str) -> dict[str, Body]:
    """Returns the functions of a release on an arch. Most are the same in all releases."""
    here = release, EIGHT_BITS[arch]
    return {
        "paged_attention_ragged": paged_attention_ragged,
        "unified_attention": partial(unified_attention, *here),
        "mha_batch_prefill_func": partial(mha_batch_prefill_func, EIGHT_BITS[arch]),
        "flash_attn_varlen_func": flash_attn_varlen_func,
        "pa_decode_gluon": partial(pa_decode_gluon, EIGHT_BITS[arch]),
        "mla_decode_fwd": partial(mla_decode_fwd, *here),
        "mla_prefill_fwd": mla_prefill_fwd,
        "get_mla_metadata_v1": partial(get_mla_metadata_v1, *here),
        "unified_attention_sparse_mla": unified_attention_sparse_mla,
    }


@dataclass
class StandIn:
    """An installed stand-in.

    calls:  names of functions, in the order in which they were called
    bodies: the implementation of each function; a test may put a wrong one in
    """

    release: Release
    calls: list[str] = field(default_factory=list)
    bodies: dict[str, Body] = field(default_factory=dict)

    def function(self, name: str) -> Callable[..., Any]:
        """Returns the function of this name, which takes keywords only."""
        signature = self.release.signature(name)

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            require(not args, f"{name} was called by position; its parameters move between releases")
            bound = signature.bind(**kwargs)
            bound.apply_defaults()
            self.calls.append(name)
            return self.bodies[name](bound.arguments)

        stand_in.__name__ = name
        stand_in.__signature__ = signature  # type: ignore[attr-defined]
        return stand_in

    def noted(self, name: str) -> list[dict[str, Any]]:
        """Returns a list that collects the arguments of a function's calls from now on; tensors are copied."""
        body, seen = self.bodies[name], list[dict[str, Any]]()

        def note(call: Mapping[str, Any]) -> Any:
            seen.append({key: each.clone() if isinstance(each, Tensor) else each for key, each in call.items()})
            return body(call)

        self.bodies[name] = note
        return seen

    def change(self, name: str, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
        """Makes a function work with other arguments: change returns those that differ."""
        body = self.bodies[name]
        self.bodies[name] = lambda call: body({**call, **change(call)})

    def fail(self, name: str, error: BaseException) -> None:
        """Makes a function raise."""

        self.bodies[name] = Mock(side_effect=error)


def install(release: Release, monkeypatch: pytest.MonkeyPatch, arch: str = "gfx942") -> StandIn:
    """Puts the module tree of a release into sys.modules until the test ends. arch: of the device that it finds"""
    stand_in = StandIn(release, bodies=bodies_of(release, arch))
    places = {
        "aiter": (
            "paged_attention_ragged",
            "mha_batch_prefill_func",
            "flash_attn_varlen_func",
            "get_mla_metadata_v1",
        ),
        "aiter.ops.triton.gluon.pa_decode_gluon": ("pa_decode_gluon",),
        "aiter.mla": ("mla_decode_fwd", "mla_prefill_fwd"),
        "aiter.ops.triton.attention.unified_attention_sparse_mla": ("unified_attention_sparse_mla",),
        "aiter.ops.triton.attention.unified_attention": ("unified_attention",),
    }
    for path, names in places.items():
        module = _module(path, monkeypatch)
        for name in names:
            if name in release.parameters:
                setattr(module, name, stand_in.function(name))
    monkeypatch.setattr(releases, "aiter_version", lambda: release.version)
    return stand_in


def _module(path: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Returns the module at `path`, made with all of its parents."""
    parts = path.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        if name not in sys.modules:
            module = ModuleType(name)
            module.__path__ = []  # a package
            monkeypatch.setitem(sys.modules, name, module)
    return sys.modules[path]
